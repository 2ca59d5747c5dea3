/**
 * Claim: an executor that has nothing to do sends the database two statements a second, whatever the
 * number of its queues, and takes a few connections and little memory.
 *
 * Two executors share each database, because one alone has no peer to watch; every number is that of
 * one. The server counts what it is sent, and the counts of each statement are told as well: whoever
 * finds more than there should be sees there what has grown. The peers run with their defaults and with
 * as many queues.
 */
import { Clock, Effect, type Scope } from "effect"
import * as ChildProcess from "./ChildProcess.ts"
import * as Coordinated from "./Coordinated.ts"
import { dbos, effectCluster, type System, tenure } from "./Coordinated.ts"
import type { Goal, Report, Row } from "./Report.ts"
import type { Bench, Server } from "./Server.ts"
import * as Statements from "./Statements.ts"

interface Scenario {
  readonly system: System
  readonly queues: number
  /** Of ours, to see what the watchdog's thread takes of a process. */
  readonly role?: "executor without thread"
}

const scenarios: ReadonlyArray<Scenario> = [
  { system: tenure, queues: 1 },
  { system: tenure, queues: 5 },
  { system: tenure, queues: 50 },
  { system: tenure, queues: 5, role: "executor without thread" },
  { system: dbos, queues: 5 },
  { system: dbos, queues: 50 },
  // Has no queues, so it stands for any number of them.
  { system: effectCluster, queues: 5 }
]

const executors = 2

const goals = {
  statementsWith5: { of: "value", is: "at most", limit: 2 },
  statementsWith50: { of: "ratio", is: "at most", limit: 1.1 },
  presence: { of: "value", is: "at most", limit: 4 }
} as const satisfies Record<string, Goal>

export const run = Effect.fnUntraced(function* (
  server: Server,
  report: Report
): Effect.fn.Return<void, never, Scope.Scope> {
  const windowMillis = report.quick ? 30_000 : 120_000
  report.note(`${windowMillis / 1000} s, with the defaults; of two executors on a database, one`)
  const templates = yield* Coordinated.templates(server)
  yield* tellBare(report)
  // At the same time: they are idle, so nobody is in anybody's way.
  const places = yield* Effect.forEach(scenarios, (scenario, at) =>
    setUp(server, templates.get(scenario.system), scenario, at)
  )
  // At its start a process does at once what it then does now and then.
  yield* Effect.sleep(report.quick ? "12 seconds" : "30 seconds")
  const measured = yield* Effect.forEach(places, (place) => measure(place, windowMillis), {
    concurrency: "unbounded"
  })
  for (const idle of measured) {
    if (idle.role === undefined) tellRows(report, idle, measured)
    else tellThread(report, idle, measured)
  }
  for (const idle of measured) if (idle.role === undefined) tellStatements(report, idle)
})

/** The modules of an executor, loaded, and nothing else. */
const tellBare = Effect.fnUntraced(function* (report: Report) {
  const child = yield* ChildProcess.start({
    module: tenure.module,
    role: "bare",
    url: "",
    items: 1
  })
  yield* child.message("ready")
  const { rssBytes } = yield* used(child, Effect.sleep("1 second"))
  report.row({
    workload: "idle-nothing",
    system: "node",
    metric: "rss_mib",
    value: rssBytes / 1_048_576
  })
}, Effect.scoped)

const used = <E>(child: ChildProcess.Child, during: Effect.Effect<void, E>) =>
  Effect.gen(function* () {
    child.order("warm")
    yield* during
    child.order("stop")
    return yield* child.message("used")
  })

interface Place extends Scenario {
  readonly bench: Bench
  readonly statements: Statements.Statements | undefined
  readonly children: ReadonlyArray<ChildProcess.Child>
}

const setUp = Effect.fnUntraced(function* (
  server: Server,
  template: Bench | undefined,
  scenario: Scenario,
  at: number
): Effect.fn.Return<Place, never, Scope.Scope> {
  const { queues, system } = scenario
  const bench = yield* server.database(`idle_${at}`, template)
  const statements = yield* Statements.make(bench)
  const children = yield* Effect.replicateEffect(
    ChildProcess.start({
      module: system.module,
      role: scenario.role ?? "executor",
      url: bench.url,
      items: queues
    }),
    executors
  )
  for (const child of children) yield* child.message("ready")
  return { ...scenario, bench, statements, children }
})

interface Idle extends Scenario {
  readonly seconds: number
  /** Of all executors together, as the next one. `undefined` where the server cannot count. */
  readonly statements: ReadonlyArray<Statements.Statement> | undefined
  readonly transactionControl: number | undefined
  readonly transactions: number
  readonly connections: number
  readonly rssBytes: number
  readonly cpuMicros: number
}

const measure = Effect.fnUntraced(function* (place: Place, windowMillis: number) {
  const { bench, children, queues, role, statements, system } = place
  const clock = yield* Clock.Clock
  const sql = yield* bench.connect
  const transactions = Effect.map(
    Effect.orDie(sql<{ readonly count: number }>`
      SELECT (xact_commit + xact_rollback)::float8 AS count FROM pg_stat_database
       WHERE datname = current_database()`),
    ([row]) => row?.count ?? 0
  )
  const before = yield* transactions
  yield* statements?.reset ?? Effect.void
  const begun = clock.monotonicTimeNanosUnsafe()
  const window = Effect.sleep(windowMillis)
  const consumed = yield* Effect.forEach(children, (child) => used(child, window), {
    concurrency: "unbounded"
  })
  const seconds = Number(clock.monotonicTimeNanosUnsafe() - begun) / 1e9
  const asked = statements === undefined ? undefined : yield* statements.read
  const control = statements === undefined ? undefined : yield* statements.transactionControl
  const [sessions] = yield* Effect.orDie(sql<{ readonly count: number }>`
    SELECT count(*)::int AS count FROM pg_stat_activity
     WHERE datname = current_database() AND application_name <> 'tenure bench'`)
  return {
    queues,
    system,
    ...(role === undefined ? {} : { role }),
    seconds,
    statements: asked,
    transactionControl: control,
    transactions: (yield* transactions) - before,
    connections: sessions?.count ?? 0,
    rssBytes: consumed.reduce((sum, { rssBytes }) => sum + rssBytes, 0),
    cpuMicros: consumed.reduce((sum, { cpuMicros }) => sum + cpuMicros, 0)
  } satisfies Idle
}, Effect.scoped)

/** What stands beside the rest. */
const isPresence = ({ text }: Statements.Statement): boolean => text.includes("presence")

const callsPerSecond = (
  idle: Idle,
  counts: (statement: Statements.Statement) => boolean
): number | undefined =>
  idle.statements === undefined
    ? undefined
    : idle.statements.filter(counts).reduce((sum, { calls }) => sum + calls, 0) /
      executors /
      idle.seconds

const withoutPresence = (idle: Idle) => callsPerSecond(idle, (statement) => !isPresence(statement))

const tellRows = (report: Report, idle: Idle, all: ReadonlyArray<Idle>) => {
  const { queues, system } = idle
  const ours = (queues: number) =>
    all.find(
      (other) => other.system === tenure && other.queues === queues && other.role === undefined
    )
  const row = (metric: string, value: number | undefined, more: Partial<Row> = {}) =>
    report.row({ workload: `idle-${queues}-queues`, system: system.name, metric, value, ...more })
  const ratio = (over: number | undefined, under: number | undefined): Partial<Row> =>
    over === undefined || under === undefined
      ? {}
      : { ratio: { median: over / under, spread: undefined } }

  const rate = withoutPresence(idle)
  const five = ours(5)
  const compared = system === tenure ? (queues === 50 ? five : undefined) : ours(queues)
  row("statements_per_s", rate, {
    ...(compared === undefined ? {} : ratio(rate, withoutPresence(compared))),
    ...(system !== tenure || queues === 1
      ? {}
      : { goal: queues === 5 ? goals.statementsWith5 : goals.statementsWith50 })
  })
  if (system === tenure) {
    row("presence_per_s", callsPerSecond(idle, isPresence), { goal: goals.presence })
  }
  row(
    "transaction_control_per_s",
    idle.transactionControl === undefined
      ? undefined
      : idle.transactionControl / executors / idle.seconds
  )
  if (idle.statements === undefined) {
    row("transactions_per_s", idle.transactions / executors / idle.seconds)
  }
  row("connections", idle.connections / executors)
  row("rss_mib", idle.rssBytes / executors / 1_048_576)
  row("node_core_percent", idle.cpuMicros / executors / idle.seconds / 1e4)
}

/** What processes with the thread take more than those without. */
const tellThread = (report: Report, without: Idle, all: ReadonlyArray<Idle>) => {
  const { queues, system } = without
  const other = all.find((one) => one.system === system && one.queues === queues && one !== without)
  if (other === undefined) return
  const row = (metric: string, value: number) =>
    report.row({ workload: `idle-${queues}-queues`, system: "watchdog-thread", metric, value })
  row("rss_mib", (other.rssBytes - without.rssBytes) / executors / 1_048_576)
  row(
    "node_core_percent",
    (other.cpuMicros / other.seconds - without.cpuMicros / without.seconds) / executors / 1e4
  )
}

/** One line for each kind of statement, the most frequent first. */
const tellStatements = (report: Report, idle: Idle) => {
  report.note(`${idle.system.name}, ${idle.queues} queues: by each executor`)
  if (idle.statements === undefined) {
    return report.note("  this server has no pg_stat_statements: transactions were counted instead")
  }
  report.note("  calls/s    ms/call  blocks/call  WAL bytes/call")
  for (const { blocks, calls, execMillis, text, walBytes } of idle.statements) {
    const cells = [
      (calls / executors / idle.seconds).toFixed(3).padStart(9),
      (execMillis / calls).toFixed(3).padStart(9),
      (blocks / calls).toFixed(0).padStart(11),
      (walBytes / calls).toFixed(0).padStart(14)
    ]
    report.note(
      `${cells.join("  ")}  ${/\btenure\.\w+(?=\()/.exec(text)?.[0] ?? text.slice(0, 100)}`
    )
  }
}
