/**
 * Claim: a scan and a renewal cost next to nothing with a thousand executors, and no more for what
 * lies finished in the database.
 *
 * The executors are rows with a lease, as registration leaves them, each with claims of its own. Two
 * databases have the same ones: `retained` besides has finished items, waiting items and the
 * tombstones of executors that came before; `fresh` has none of these. The statements are the runtime's
 * own, sent by one client, one after the other, the two databases in turns.
 */
import type { PgClient } from "@effect/sql-pg"
import { Clock, Effect, type Scope } from "effect"
import type { Connection } from "effect/sql/SqlConnection"
import * as ExecutorStore from "../src/executor/ExecutorStore.ts"
import * as PresenceStore from "../src/executor/PresenceStore.ts"
import * as PresenceWatch from "../src/executor/PresenceWatch.ts"
import * as RecoveryStore from "../src/recovery/RecoveryStore.ts"
import { type Goal, quantile, type Report, summarize } from "./Report.ts"
import { checkpoint, execute, type Server } from "./Server.ts"
import * as Statements from "./Statements.ts"

const application = "bench"
const version = "v1"
const queues = 5
const validityMillis = 3_600_000

interface History {
  readonly done: number
  readonly ready: number
  readonly tombstones: number
}

interface Operation {
  readonly name: string
  /** How often each executor does it, by default. */
  readonly everySeconds: (executors: number) => number
  readonly goal?: (executors: number) => Goal | undefined
  /** Without tombstones there is nothing to look for, and the server sees that. */
  readonly onlyRetained?: boolean
  /** One call after the other, each of the next executor. */
  readonly call: (sql: PgClient.PgClient, executorId: string) => Effect.Effect<unknown>
}

const watchPresence =
  (everyone: boolean): Operation["call"] =>
  (sql, executorId) =>
    Effect.orDie(
      PresenceStore.watchPresence(sql, executorId, { versions: [version], everyone, followed: [] })
    )

const calm: PresenceWatch.Look = {
  atMicros: 0,
  heldAtMicros: 0,
  renewedAtMicros: 0,
  nanos: 0n,
  isRound: true,
  present: [],
  missing: [],
  newcomers: []
}

const watching = (executors: number): PresenceWatch.Watch => ({
  ...PresenceWatch.blind,
  seen: new Set(Array.from({ length: executors - 1 }, (_, at) => String(at)))
})

const operations: ReadonlyArray<Operation> = [
  {
    name: "scan",
    everySeconds: () => 5,
    goal: (executors) => (executors === 1000 ? { of: "value", is: "below", limit: 5 } : undefined),
    call: (sql) =>
      Effect.orDie(RecoveryStore.recoverableExecutors(sql, application, [version], 100))
  },
  {
    name: "stranded-claims",
    everySeconds: () => 60,
    onlyRetained: true,
    call: (sql) => Effect.orDie(RecoveryStore.strandedExecutors(sql, application, [version], 100))
  },
  {
    name: "renewal",
    everySeconds: () => 10,
    call: (sql, executorId) =>
      Effect.orDie(ExecutorStore.renewLease(sql, executorId, validityMillis))
  },
  {
    name: "presence-watch",
    everySeconds: (executors) => PresenceWatch.pauseMillis(watching(executors), calm, 1000) / 1000,
    call: watchPresence(false)
  },
  {
    name: "presence-round",
    everySeconds: (executors) => PresenceWatch.roundMillis(watching(executors)) / 1000,
    call: watchPresence(true)
  }
]

/** Executors, and claims of each. */
const sizes = [
  [10, 10],
  [100, 10],
  [1000, 10],
  [1000, 200]
] as const

export const run = Effect.fnUntraced(function* (
  server: Server,
  report: Report
): Effect.fn.Return<void, never, Scope.Scope> {
  const history = { done: report.quick ? 200_000 : 1_000_000, ready: 100_000, tombstones: 10_000 }
  if (report.quick) report.leftOut("retained", "800,000 of the 1,000,000 finished items")
  const places: Places = {
    fresh: yield* prepare(server, "fresh", { done: 0, ready: 0, tombstones: 0 }),
    retained: yield* prepare(server, "retained", history)
  }
  report.row({
    workload: "calibration",
    system: "postgres",
    metric: "updates_per_s",
    value: yield* server.calibrate
  })
  for (const [executors, claims] of sizes) {
    yield* Effect.forEach(Object.values(places), (place: Place) =>
      populate(place, executors, claims)
    )
    const shares: Array<number | undefined> = []
    for (const operation of operations) {
      shares.push(yield* measure(report, places, operation, executors, claims))
    }
    report.row({
      workload: `all-${sizeOf(executors, claims)}`,
      system: "retained",
      metric: "core_percent",
      value: shares.reduce((sum: number | undefined, share) =>
        sum === undefined || share === undefined ? undefined : sum + share
      )
    })
  }
})

const sizeOf = (executors: number, claims: number): string =>
  `${executors}-executors-${claims}-claims-each`

interface Place {
  readonly name: "fresh" | "retained"
  readonly sql: PgClient.PgClient
  readonly holder: Connection
  readonly statements: Statements.Statements | undefined
}

type Places = Readonly<Record<Place["name"], Place>>

const prepare = Effect.fnUntraced(function* (
  server: Server,
  name: Place["name"],
  history: History
): Effect.fn.Return<Place, never, Scope.Scope> {
  const bench = yield* server.database(`executors_${name}`)
  yield* bench.migrate
  const statements = yield* Statements.make(bench)
  const sql = yield* bench.connect
  yield* execute(sql, [
    `SELECT r.queue_id FROM generate_series(1, ${queues}) q,
            tenure.register_queue('queue ' || q, '${application}', '${version}', '{}', NULL, NULL, 'executions', 4) r`,
    `INSERT INTO tenure.executor (id, application_name, application_version, state, registered_at,
                                  heartbeat_at, expires_at, revoked_at)
     SELECT gen_random_uuid(), '${application}', '${version}', 'revoked', at, at, at, at
       FROM generate_series(1, ${history.tombstones}) g
      CROSS JOIN LATERAL (SELECT tenure.clock() - g * interval '1 minute' AS at) past`,
    `INSERT INTO tenure.done (id, queue_id, attempt, owner, outcome, failures, losses, finished_at)
     SELECT tenure.new_id(), 1 + g % ${queues}, 1, gen_random_uuid(), 'completed', 0, 0, tenure.clock()
       FROM generate_series(1, ${history.done}) g`,
    `INSERT INTO tenure.ready (lane_id, rank, seq, id, attempt, failures, losses, stuck)
     SELECT l.id, 0, nextval('tenure.item_seq'), tenure.new_id(), 0, 0, 0, 0
       FROM generate_series(1, ${history.ready}) g
       JOIN tenure.lane l ON l.version IS NULL AND l.queue_id = 1 + g % ${queues}`
  ])
  return { name, sql, holder: yield* Effect.orDie(sql.reserve), statements }
})

/** So many executors in all, and of each so many claims. */
const populate = Effect.fnUntraced(function* (
  { holder, sql }: Place,
  executors: number,
  claims: number
) {
  yield* execute(sql, [
    `SELECT tenure.register_executor(gen_random_uuid(), '${application}', '${version}', interval '1 hour', 'bench', g::int)
       FROM generate_series(1, ${executors} - (SELECT count(*) FROM tenure.executor e WHERE e.state = 'active')) g`,
    `INSERT INTO tenure.claimed (id, queue_id, lane_id, owner, attempt, rank, seq, failures, losses, stuck, claimed_at)
     SELECT tenure.new_id(), l.queue_id, l.id, e.id, 1, 0, nextval('tenure.item_seq'), 0, 0, 0, tenure.clock()
       FROM (SELECT e.id, (SELECT count(*) FROM tenure.claimed c WHERE c.owner = e.id) AS held
               FROM tenure.executor e WHERE e.state = 'active') e
      CROSS JOIN LATERAL generate_series(e.held + 1, ${claims}) g
       JOIN tenure.lane l ON l.version IS NULL AND l.queue_id = 1 + g % ${queues}`,
    `INSERT INTO tenure.presence (executor_id, held_at)
     SELECT e.id, tenure.clock() - interval '1 minute' FROM tenure.executor e
      WHERE e.state = 'active' AND NOT EXISTS (SELECT FROM tenure.presence p WHERE p.executor_id = e.id)`,
    "VACUUM ANALYZE tenure.executor, tenure.presence, tenure.claimed, tenure.ready, tenure.done"
  ])
  // All in one session, where an executor has its own: who looks sees no difference.
  yield* Effect.orDie(
    holder.executeUnprepared(
      "SELECT count(pg_try_advisory_lock(1413828182, p.key)) FROM tenure.presence p",
      [],
      undefined
    )
  )
  yield* checkpoint(sql)
})

/** Answers with the percentage of a core that all executors together take of the server for it. */
const measure = Effect.fnUntraced(function* (
  report: Report,
  all: Places,
  operation: Operation,
  executors: number,
  claims: number
) {
  const clock = yield* Clock.Clock
  const workload = `${operation.name}-${sizeOf(executors, claims)}`
  const rounds = report.quick ? 60 : 300
  const places = operation.onlyRetained === true ? [all.retained] : [all.fresh, all.retained]
  const millis = new Map<Place, Array<number>>()
  const ids = new Map<Place, ReadonlyArray<string>>()
  for (const place of places) {
    millis.set(place, [])
    ids.set(place, yield* idsOf(place.sql))
    yield* place.statements?.reset ?? Effect.void
  }
  for (let round = 0; round < rounds; round++) {
    for (const place of round % 2 === 0 ? places : places.toReversed()) {
      const begun = clock.monotonicTimeNanosUnsafe()
      yield* operation.call(place.sql, ids.get(place)?.[round % executors] ?? "")
      millis.get(place)?.push(Number(clock.monotonicTimeNanosUnsafe() - begun) / 1e6)
    }
  }
  for (const place of places) {
    const own = millis.get(place) ?? []
    const fresh = place === all.retained ? millis.get(all.fresh) : undefined
    report.row({
      workload,
      system: place.name,
      metric: "p50_ms",
      value: summarize(own).median,
      spread: summarize(own).spread,
      ratio: fresh && summarize(own.map((value, at) => value / (fresh[at] ?? Number.NaN))),
      goal: operation.goal?.(executors)
    })
    report.row({ workload, system: place.name, metric: "p99_ms", value: quantile(own, 0.99) })
  }
  const [statement] = (yield* all.retained.statements?.read ?? Effect.succeed([])).filter(
    ({ calls }) => calls === rounds
  )
  if (statement === undefined) return undefined
  const serverMillis = statement.execMillis / statement.calls
  return ((serverMillis * executors) / (operation.everySeconds(executors) * 1000)) * 100
})

const idsOf = (sql: PgClient.PgClient) =>
  Effect.map(
    Effect.orDie(
      sql<{ readonly id: string }>`
        SELECT id::text AS id FROM tenure.executor WHERE state = 'active' ORDER BY id`
    ),
    (rows) => rows.map(({ id }) => id)
  )
