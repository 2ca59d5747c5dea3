/**
 * What the benchmarks of queues share: the systems, a drain from beginning to end in processes of its
 * own, and the comparison of its numbers.
 */
import { Clock, type Duration, Effect, type Scope } from "effect"
import type { Role } from "./child.ts"
import * as ChildProcess from "./ChildProcess.ts"
import { type Goal, type Report, summarize } from "./Report.ts"
import { type Bench, checkpoint, type Server } from "./Server.ts"

export interface System {
  readonly name: "tenure" | "graphile-worker" | "pg-boss" | "dbos"
  readonly module: string
  readonly prepare: (bench: Bench) => Effect.Effect<void, never, Scope.Scope>
  /** Counts what is left to do. */
  readonly left: string
  /** Its workers run other items first. */
  readonly warms: boolean
}

export const tenure: System = {
  name: "tenure",
  module: "tenureChild.ts",
  prepare: (bench) => bench.migrate,
  left: `SELECT ((SELECT count(*) FROM tenure.ready) + (SELECT count(*) FROM tenure.claimed))::int AS left`,
  warms: true
}

const peer = (name: System["name"], module: string, left: string, warms = true): System => ({
  name,
  module,
  prepare: (bench) =>
    Effect.flatMap(
      ChildProcess.start({ module, role: "setup", url: bench.url, items: 0 }),
      (child) => child.exited
    ),
  left,
  warms
})

export const graphile = peer(
  "graphile-worker",
  "peers/graphileChild.mjs",
  "SELECT count(*)::int AS left FROM graphile_worker._private_jobs"
)
export const pgBoss = peer(
  "pg-boss",
  "peers/pgBossChild.mjs",
  "SELECT count(*)::int AS left FROM pgboss.job WHERE state < 'completed'"
)
export const dbos = peer(
  "dbos",
  "peers/dbosQueueChild.mjs",
  "SELECT count(*)::int AS left FROM dbos.workflow_status WHERE status IN ('ENQUEUED', 'PENDING')",
  // What it listens to is said once, when it starts.
  false
)

export type Templates = Readonly<Record<System["name"], Bench>>

/** A database with the system's tables, to be copied for each run. */
export const prepared = Effect.fnUntraced(function* (server: Server, system: System) {
  const bench = yield* server.database(`template_${system.name.replaceAll("-", "_")}`)
  yield* Effect.scoped(system.prepare(bench))
  return bench
})

export interface Drain {
  readonly enqueuedPerSecond: number
  readonly drainedPerSecond: number
  readonly nodeMicros: number
  readonly postgresMicros: number | undefined
  /** Items handled, by seconds since the first handler started. */
  readonly progress: ReadonlyArray<readonly [seconds: number, items: number]>
}

/** For each worker: what the compiler needs before it leaves a process alone. */
const warmUp = 20_000

export const drainOnce = Effect.fnUntraced(function* (
  server: Server,
  system: System,
  options: {
    readonly template: Bench
    readonly items: number
    readonly workers: number
    readonly whileDraining?: ((bench: Bench) => Effect.Effect<void, never, Scope.Scope>) | undefined
    readonly beforeDraining?:
      | ((bench: Bench) => Effect.Effect<void, never, Scope.Scope>)
      | undefined
    /** What the workers do, `work` if nothing else. */
    readonly role?: string | undefined
    readonly settings?: Role["settings"] | undefined
  }
): Effect.fn.Return<Drain, never, Scope.Scope> {
  const { items, workers } = options
  const clock = yield* Clock.Clock
  const bench = yield* server.database("queue", options.template)
  const common = {
    module: system.module,
    url: bench.url,
    items,
    warmUp: system.warms ? warmUp * workers : 0
  }
  const producer = yield* ChildProcess.start({
    ...common,
    role: "enqueue",
    settings: { for: options.role ?? "work" }
  })

  let first: bigint | undefined
  let serverBefore: number | undefined
  const handled = Array.from({ length: workers }, () => 0)
  const progress: Array<readonly [bigint, number]> = []
  const total = () => handled.reduce((sum, count) => sum + count, 0)
  const children = yield* Effect.forEach(handled, (_, at) =>
    ChildProcess.start({
      ...common,
      role: options.role ?? "work",
      settings: options.settings,
      onMessage: (message) => {
        if (message._tag === "first" && first === undefined) {
          first = BigInt(message.atNanos)
          serverBefore = server.cpuSeconds()
        } else if (message._tag === "handled") {
          handled[at] = message.count
          progress.push([clock.monotonicTimeNanosUnsafe(), total()])
        }
      }
    })
  )
  const enqueued = yield* producer.message("done")
  yield* producer.exited
  const sql = yield* bench.connect
  if (options.beforeDraining !== undefined) yield* options.beforeDraining(bench)
  yield* checkpoint(sql)
  for (const child of children) child.order("warm")
  const leftAtMost = (count: number) =>
    Effect.map(
      Effect.orDie(sql.unsafe<{ readonly left: number }>(system.left)),
      (rows) => (rows[0]?.left ?? 0) <= count
    )
  yield* until(`${system.name} warms up`, "50 millis", () => leftAtMost(items))
  for (const child of children) child.order("cool")
  yield* Effect.forEach(children, (child) => child.message("ready"))
  if (options.whileDraining !== undefined) yield* options.whileDraining(bench)
  for (const child of children) child.order("go")

  yield* until(`${system.name} runs ${items} items`, "5 millis", () =>
    Effect.succeed(total() >= items)
  )
  // From here on only the last outcomes are on their way.
  yield* until(`${system.name} stores ${items} outcomes`, "2 millis", () => leftAtMost(0))
  const ended = clock.monotonicTimeNanosUnsafe()
  const serverAfter = server.cpuSeconds()
  for (const child of children) child.order("stop")
  const used = yield* Effect.forEach(children, (child) => child.message("cpu"))
  const begun = first ?? ended
  const seconds = (until: bigint) => Number(until - begun) / 1e9
  return {
    enqueuedPerSecond: items / (enqueued.millis / 1000),
    drainedPerSecond: items / seconds(ended),
    nodeMicros: used.reduce((sum, { micros }) => sum + micros, 0) / items,
    postgresMicros:
      serverBefore === undefined || serverAfter === undefined
        ? undefined
        : ((serverAfter - serverBefore) * 1e6) / items,
    progress: progress.map(([at, count]) => [seconds(at), count] as const)
  }
}, Effect.scoped)

/** Looks again and again. A benchmark that hangs says at what. */
export const until = Effect.fnUntraced(function* (
  what: string,
  every: Duration.Input,
  isSo: () => Effect.Effect<boolean>
) {
  const clock = yield* Clock.Clock
  const deadline = clock.monotonicTimeNanosUnsafe() + 120_000_000_000n
  while (!(yield* isSo())) {
    if (clock.monotonicTimeNanosUnsafe() > deadline) {
      return yield* Effect.die(new Error(`two minutes were not enough: ${what}`))
    }
    yield* Effect.sleep(every)
  }
})

/** What each system has reached in one measure, run by run. */
export type Runs<A> = Map<System["name"], Array<A>>

export const add = <A>(runs: Runs<A>, { name }: System, value: A) =>
  void (runs.get(name)?.push(value) ?? runs.set(name, [value]))

/** Rows of all systems for one measure, each peer's with how far Tenure is ahead. */
export const compare = <A>(
  report: Report,
  row: {
    readonly workload: string
    readonly metric: string
    readonly better: "higher" | "lower"
    readonly goal?: Goal | undefined
  },
  runs: Runs<A>,
  of: (run: A) => number | undefined
) => {
  const ours = (runs.get(tenure.name) ?? []).map(of)
  for (const [system, all] of runs) {
    const values = all.map(of)
    const known = values.filter((value) => value !== undefined)
    const ratios = values.flatMap((their, at) => {
      const our = ours[at]
      if (our === undefined || their === undefined) return []
      return [row.better === "higher" ? our / their : their / our]
    })
    report.row({
      workload: row.workload,
      system,
      metric: row.metric,
      value: known.length === 0 ? undefined : summarize(known).median,
      spread: known.length === 0 ? undefined : summarize(known).spread,
      ratio: system === tenure.name || ratios.length === 0 ? undefined : summarize(ratios),
      goal: system === tenure.name ? row.goal : undefined
    })
  }
}

export const calibration = (server: Server, report: Report, block: string) =>
  Effect.map(server.calibrate, (value) =>
    report.row({
      workload: `calibration-${block}`,
      system: "postgres",
      metric: "updates_per_s",
      value
    })
  )
