/**
 * Claim: bulk enqueue and drain of no-op items are ahead of graphile-worker and pg-boss with their
 * batched settings and of DBOS, with results kept, every write fenced, and a Schema and a fiber for
 * each item; so are single enqueues of concurrent callers. A queue that commits each item with what
 * its handler writes is bound by what PostgreSQL commits.
 *
 * All systems run in child processes, one after the other in turns, each time on a fresh database.
 * A drain is timed from the start of the first handler to the moment when the database holds nothing
 * more to do, so that neither start-up nor an unwritten outcome counts as work done.
 */
import { Effect, type Scope } from "effect"
import * as ChildProcess from "./ChildProcess.ts"
import { commitLimit } from "./commitLimit.ts"
import {
  add,
  calibration,
  compare,
  dbos,
  type Drain,
  drainOnce,
  graphile,
  pgBoss,
  prepared,
  type Runs,
  type System,
  type Templates,
  tenure
} from "./Drain.ts"
import * as Peers from "./Peers.ts"
import { type Goal, quantile, type Report, summarize } from "./Report.ts"
import { type Bench, execute, type Server } from "./Server.ts"

const systems = [tenure, graphile, pgBoss]
/** So far behind in all rates that one run of it is enough. */
const slow = [dbos]

/** So many runs of each, in turns; the slow ones once. */
const inTurns = Effect.fnUntraced(function* <A>(
  rounds: number,
  once: (system: System) => Effect.Effect<A, never, Scope.Scope>,
  also: ReadonlyArray<System> = []
) {
  const runs: Runs<A> = new Map()
  for (let round = 0; round < rounds; round++) {
    const turn = round % 2 === 0 ? systems : systems.toReversed()
    for (const system of round === 0 ? [...turn, ...also] : turn) {
      add(runs, system, yield* once(system))
    }
  }
  return runs
})

const processes = (count: number) => (count === 1 ? "1-process" : `${count}-processes`)

const drains = Effect.fnUntraced(function* (server: Server, templates: Templates, report: Report) {
  const rounds = report.quick ? 1 : 5
  for (const items of report.quick ? [36_000] : [20_000, 100_000]) {
    yield* calibration(server, report, `drain-${items}`)
    for (const workers of [1, 2]) {
      const drain = (system: System) =>
        drainOnce(server, system, { template: templates[system.name], items, workers })
      const runs = yield* inTurns(rounds, drain, !report.quick && items === 20_000 ? slow : [])
      const workload = `drain-${items}-${processes(workers)}`
      for (const [metric, better, of, goal] of [
        ["items_per_s", "higher", (drain: Drain) => drain.drainedPerSecond, undefined],
        ["node_us_per_item", "lower", (drain: Drain) => drain.nodeMicros, 8],
        ["postgres_us_per_item", "lower", (drain: Drain) => drain.postgresMicros, 22]
      ] as const) {
        compare(report, { workload, metric, better, goal: atMost(goal) }, runs, of)
      }
      if (workers === 1) {
        const bulk = { workload: `enqueue-${items}-bulk`, metric: "items_per_s", better: "higher" }
        compare(report, { ...bulk, better: "higher" }, runs, (drain) => drain.enqueuedPerSecond)
      }
    }
  }
})

const atMost = (limit: number | undefined): Goal | undefined =>
  limit === undefined ? undefined : { of: "value", is: "at most", limit }

/** Each call hands in one item, and 64 of them are on their way at any time. */
const singles = Effect.fnUntraced(function* (server: Server, templates: Templates, report: Report) {
  const items = report.quick ? 10_000 : 20_000
  yield* calibration(server, report, "enqueue-single")
  const once = Effect.fnUntraced(function* (system: System) {
    const bench = yield* server.database("queue", templates[system.name])
    const common = { module: system.module, url: bench.url, warmUp: 2000 }
    const child = yield* ChildProcess.start({ ...common, role: "single", items })
    return items / ((yield* child.message("done")).millis / 1000)
  }, Effect.scoped)
  const runs = yield* inTurns(report.quick ? 1 : 5, once, report.quick ? [] : slow)
  const row = { workload: "enqueue-single-64-callers", metric: "items_per_s" } as const
  compare(report, { ...row, better: "higher" }, runs, (rate) => rate)
})

/** A queue whose items are each committed with what their handler writes, on so many connections. */
const eaches = Effect.fnUntraced(function* (server: Server, templates: Templates, report: Report) {
  const items = report.quick ? 5000 : 20_000
  for (const connections of report.quick ? [4] : [4, 16]) {
    const workload = `commit-each-${connections}-connections`
    yield* calibration(server, report, workload)
    const ratios: Array<number> = []
    const ours: Array<number> = []
    const limits: Array<number> = []
    for (let round = 0; round < (report.quick ? 1 : 5); round++) {
      const limit = yield* Effect.scoped(
        Effect.flatMap(server.database("limit"), (bench) => commitLimit(bench, connections))
      )
      const drain = yield* drainOnce(server, tenure, {
        template: templates.tenure,
        items,
        workers: 1,
        role: "each",
        settings: { connections }
      })
      ours.push(drain.drainedPerSecond)
      if (limit === undefined) continue
      limits.push(limit)
      ratios.push(drain.drainedPerSecond / limit)
    }
    const row = { workload, metric: "items_per_s" }
    report.row({
      ...row,
      system: tenure.name,
      value: summarize(ours).median,
      spread: summarize(ours).spread,
      ratio: ratios.length === 0 ? undefined : summarize(ratios),
      goal: { of: "ratio", is: "at least", limit: 0.6 }
    })
    const limit = limits.length === 0 ? undefined : summarize(limits)
    report.row({ ...row, system: "sql-limit", value: limit?.median, spread: limit?.spread })
    if (limit === undefined) report.note("sql-limit needs pgbench, which is not here")
  }
})

const latencies = Effect.fnUntraced(function* (
  server: Server,
  templates: Templates,
  report: Report
) {
  const items = report.quick ? 40 : 300
  yield* calibration(server, report, "latency")
  for (const count of [1, 2]) {
    const runs = yield* inTurns(report.quick ? 1 : 3, (system) =>
      latencyOnce(server, system, templates[system.name], count, items)
    )
    for (const [what, of, goals] of [
      ["start", (latency: Latency) => latency.startMillis, count === 1 ? [2, undefined] : [3, 8]],
      ["result", (latency: Latency) => latency.resultMillis, [2, undefined]]
    ] as const) {
      for (const [at, [name, share]] of [["p50", 0.5] as const, ["p99", 0.99] as const].entries()) {
        compare(
          report,
          {
            workload: `latency-${processes(count)}-${what}`,
            metric: `${name}_ms`,
            better: "lower",
            goal: atMost(goals[at])
          },
          runs,
          (one) => (of(one).length === 0 ? undefined : quantile(of(one), share))
        )
      }
    }
  }
})

interface Latency {
  readonly startMillis: ReadonlyArray<number>
  /** Empty where a caller can only ask again and again. */
  readonly resultMillis: ReadonlyArray<number>
}

const latencyOnce = Effect.fnUntraced(function* (
  server: Server,
  system: System,
  template: Bench,
  processes: number,
  items: number
): Effect.fn.Return<Latency, never, Scope.Scope> {
  const bench = yield* server.database("queue", template)
  const start = (role: string) =>
    ChildProcess.start({ module: system.module, role, url: bench.url, items })
  if (processes === 1) return yield* (yield* start("both")).message("latency")
  const serving = yield* start("serve")
  yield* serving.message("ready")
  const producing = yield* start("produce")
  // Whoever knows the times tells them: our caller gets the result, graphile-worker's handler keeps them.
  return yield* (system === tenure ? producing : serving).message("latency")
}, Effect.scoped)

/** A million finished items are kept, and a drain is as fast as on an empty database. */
const past = Effect.fnUntraced(function* (server: Server, templates: Templates, report: Report) {
  yield* calibration(server, report, "drain-with-a-past")
  const runs = { without: [] as Array<number>, with: [] as Array<number> }
  const drain = { template: templates.tenure, items: 100_000, workers: 1 }
  for (let round = 0; round < 3; round++) {
    runs.without.push((yield* drainOnce(server, tenure, drain)).drainedPerSecond)
    const once = yield* drainOnce(server, tenure, { ...drain, beforeDraining: makePast })
    runs.with.push(once.drainedPerSecond)
  }
  const ratio = summarize(runs.with.map((rate, at) => rate / (runs.without[at] ?? Number.NaN)))
  for (const [workload, values] of [
    ["drain-with-a-past", runs.with],
    ["drain-without-a-past", runs.without]
  ] as const) {
    const { median: value, spread } = summarize(values)
    const goal = { of: "ratio", is: "at least", limit: 0.8 } as const
    const compared = values === runs.with ? { ratio, goal } : {}
    report.row({ workload, system: tenure.name, metric: "items_per_s", value, spread, ...compared })
  }
})

const makePast = Effect.fnUntraced(function* (bench: Bench) {
  const sql = yield* bench.connect
  yield* execute(sql, [
    `WITH made AS (
       INSERT INTO tenure.item (id, queue_id, priority, payload, enqueued_at)
       SELECT tenure.new_id(), q.id, 0, '{"i":0}', clock_timestamp()
         FROM tenure.queue q, generate_series(1, 1000000) WHERE q.name = 'noop'
       RETURNING id, queue_id)
     INSERT INTO tenure.done (id, queue_id, attempt, owner, outcome, failures, losses, finished_at)
     SELECT m.id, m.queue_id, 1, gen_random_uuid(), 'completed', 0, 0, clock_timestamp() FROM made m`,
    "ANALYZE"
  ])
})

/** Finding out whether a long backlog, or somebody's old snapshot, slows the claims down. */
const backlog = Effect.fnUntraced(function* (server: Server, templates: Templates, report: Report) {
  const items = 500_000
  for (const [workload, hold] of [
    ["drain-500k-backlog", false],
    ["drain-500k-backlog-old-snapshot", true]
  ] as const) {
    yield* calibration(server, report, workload)
    const drain = yield* drainOnce(server, tenure, {
      template: templates.tenure,
      items,
      workers: 1,
      whileDraining: hold ? holdSnapshot : undefined
    })
    const last = drain.progress.at(-1)?.[0] ?? 0
    const handledBy = (seconds: number) =>
      drain.progress.findLast(([at]) => at <= seconds)?.[1] ?? 0
    for (const [metric, value] of [
      ["items_per_s", drain.drainedPerSecond],
      ["first_second_items_per_s", handledBy(1)],
      ["last_second_items_per_s", items - handledBy(last - 1)]
    ] as const) {
      report.row({ workload, system: tenure.name, metric, value })
    }
  }
})

const holdSnapshot = Effect.fnUntraced(function* (bench: Bench) {
  const sql = yield* bench.connect
  const session = yield* Effect.orDie(sql.reserve)
  const run = (sql: string) => Effect.orDie(session.executeUnprepared(sql, [], undefined))
  yield* run("BEGIN ISOLATION LEVEL REPEATABLE READ")
  yield* run("SELECT count(*) FROM tenure.queue")
  yield* Effect.addFinalizer(() => Effect.ignore(run("ROLLBACK")))
})

/** How long somebody's snapshot is held while the queue goes on, and how long each look at it takes. */
const heldSeconds = 600
const lookSeconds = 20

/**
 * Work that never ends, while an old snapshot keeps all its dead rows: the rate before, at the end of the
 * time in which it was held, and some time after.
 */
const held = Effect.fnUntraced(function* (server: Server, templates: Templates, report: Report) {
  yield* calibration(server, report, "held-snapshot")
  const bench = yield* server.database("queue", templates.tenure)
  let handled = 0
  const start = (role: string, onHandled: (count: number) => void = () => {}) =>
    ChildProcess.start({
      ...{ module: tenure.module, url: bench.url, warmUp: 0, items: 2000, role },
      onMessage: (message) => {
        if (message._tag === "handled") onHandled(message.count)
      }
    })
  const worker = yield* start("work", (count) => {
    handled = count
  })
  for (const word of ["warm", "cool", "go"] as const) worker.order(word)
  yield* start("endless")
  const rate = Effect.gen(function* () {
    const before = handled
    yield* Effect.sleep(lookSeconds * 1000)
    return (handled - before) / lookSeconds
  })
  yield* rate
  const before = yield* rate
  const during = yield* Effect.scoped(
    Effect.gen(function* () {
      yield* holdSnapshot(bench)
      yield* Effect.sleep((heldSeconds - lookSeconds) * 1000)
      return yield* rate
    })
  )
  yield* Effect.sleep("1 minute")
  const after = yield* rate
  const goal = { of: "ratio", is: "at least", limit: 0.8 } as const
  for (const [workload, value] of [
    ["before-an-old-snapshot", before],
    ["under-an-old-snapshot", during],
    ["after-an-old-snapshot", after]
  ] as const) {
    const ratio = { median: value / before, spread: undefined }
    const row = { workload, system: tenure.name, metric: "items_per_s", value }
    report.row(workload === "before-an-old-snapshot" ? row : { ...row, ratio, goal })
  }
}, Effect.scoped)

export const parts = ["drain", "single", "each", "latency", "past", "backlog", "held"]

export const run = Effect.fnUntraced(function* (
  server: Server,
  report: Report
): Effect.fn.Return<void, never, Scope.Scope> {
  yield* Peers.installed("pg-boss")
  const templates = {
    tenure: yield* prepared(server, tenure),
    "graphile-worker": yield* prepared(server, graphile),
    "pg-boss": yield* prepared(server, pgBoss),
    dbos: yield* prepared(server, dbos)
  }
  if (report.wants("drain")) yield* drains(server, templates, report)
  if (report.wants("single")) yield* singles(server, templates, report)
  if (report.wants("each")) yield* eaches(server, templates, report)
  if (report.wants("latency")) yield* latencies(server, templates, report)
  if (report.quick) {
    report.leftOut("dbos", "takes a minute for what the others do in a second")
    report.leftOut("drain-with-a-past", "a million finished items are made first")
    report.leftOut(
      "drain-500k-backlog",
      "half a million items, without and with an old snapshot held"
    )
    report.leftOut("under-an-old-snapshot", "ten minutes of it")
    return
  }
  if (report.wants("past")) yield* past(server, templates, report)
  if (report.wants("backlog")) yield* backlog(server, templates, report)
  if (report.wants("held")) yield* held(server, templates, report)
})
