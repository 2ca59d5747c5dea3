/**
 * What the tests of the queue functions share: sessions that are one connection each, executors, and
 * the functions of `schema/0004_queue.sql` with arguments that can be written by hand.
 *
 * Executors log in as the worker role, because for an owner or a superuser every guard is open. All
 * waiting is for something seen in the database, never for time.
 */
import { PgClient } from "@effect/sql-pg"
import { Context, Duration, Effect, Layer, type Scope } from "effect"
import * as Reactivity from "effect/reactivity/Reactivity"
import { isSqlError, type SqlError } from "effect/sql/SqlError"
import { randomUUID } from "node:crypto"
import * as Pool from "../../src/database/Pool.ts"
import { sqlState } from "../../src/database/SqlState.ts"
import type { Encoded } from "../../src/queue/Limits.ts"
import { type FreshDatabase, freshDatabase, type Role } from "../support/Postgres.ts"

export type Sql = PgClient.PgClient

/** The database of a test file. */
export class Kernel extends Context.Service<Kernel, FreshDatabase>()("tenure/test/Kernel") {
  static readonly layer: Layer.Layer<Kernel> = Layer.effect(Kernel, freshDatabase)
}

/** One connection: what is sent through it runs in order and in one session, BEGIN included. */
export const sessionOf = <Logins extends Role>(
  database: Pick<FreshDatabase, Logins>,
  role: Logins,
  executorId?: string
): Effect.Effect<Sql, SqlError, Scope.Scope> =>
  PgClient.makeClient({
    ...database[role].config,
    applicationName: `tenure kernel ${executorId ?? role}`,
    startupParameters: Pool.startupParameters({
      database: database[role],
      applicationName: "",
      executorId,
      statementTimeout: "45 seconds",
      lockTimeout: "10 seconds",
      idleInTransactionTimeout: "45 seconds"
    })
  }).pipe(Effect.provideServiceEffect(Reactivity.Reactivity, Reactivity.make))

export const session = (role: Role, executorId?: string) =>
  Effect.flatMap(Kernel, (database) => sessionOf(database, role, executorId))

export interface ExecutorOptions {
  readonly queue: string
  readonly application?: string
  readonly version?: string
  readonly accepted?: ReadonlyArray<string>
  readonly globalLimit?: number
  readonly perKeyLimit?: number
  readonly limits?: Encoded
  readonly recoveryLimit?: "executions" | "consecutive"
  readonly recoveryMax?: number
  readonly validity?: Duration.Input
}

export interface Executor {
  readonly id: string
  readonly sql: Sql
  readonly queueId: number
  /** Where a hand-back or a retry of an item without losses goes. */
  readonly startedLane: number
  readonly suspectLane: number
  readonly lanes: ReadonlyArray<number>
  readonly suspectLanes: ReadonlyArray<number>
}

/** A registered executor that runs one queue. */
export const executor = (options: ExecutorOptions) =>
  Effect.flatMap(Kernel, (database) => executorOf(database, options))

export const executorOf = Effect.fnUntraced(function* (
  database: Pick<FreshDatabase, "worker">,
  options: ExecutorOptions
): Effect.fn.Return<Executor, SqlError, Scope.Scope> {
  const id = randomUUID()
  const application = options.application ?? "app"
  const version = options.version ?? "v1"
  const sql = yield* sessionOf(database, "worker", id)
  const seconds = Duration.toSeconds(options.validity ?? "10 minutes")
  yield* sql`SELECT tenure.register_executor(${id}::uuid, ${application}, ${version},
                      make_interval(secs => ${seconds}::float8), 'host', 1)`
  return yield* runQueue(sql, id, options)
})

/** A session that is an executor already takes up a queue. */
export const runQueue = Effect.fnUntraced(function* (
  sql: Sql,
  id: string,
  options: ExecutorOptions
): Effect.fn.Return<Executor, SqlError> {
  const queue = first(
    yield* sql<{
      queue_id: number
      started_lane: number
      suspect_lane: number
      lanes: ReadonlyArray<number>
      suspect_lanes: ReadonlyArray<number>
    }>`SELECT * FROM tenure.register_queue(${options.queue}, ${options.application ?? "app"},
              ${options.version ?? "v1"}, ${array(options.accepted ?? [])}::text::text[],
              ${options.globalLimit ?? null}::int, ${options.perKeyLimit ?? null}::int,
              ${options.recoveryLimit ?? "executions"}, ${options.recoveryMax ?? 4}::int,
              ${JSON.stringify(options.limits ?? {})}::text::jsonb)`
  )
  return {
    id,
    sql,
    queueId: queue.queue_id,
    startedLane: queue.started_lane,
    suspectLane: queue.suspect_lane,
    lanes: queue.lanes,
    suspectLanes: queue.suspect_lanes
  }
})

/** The same executor on its private queue, made at the first call. */
export const probeOf = (runner: Executor): Effect.Effect<Executor, SqlError> =>
  Effect.map(runner.sql<{ queue: number }>`SELECT tenure.register_probe() AS queue`, (rows) => {
    const { queue } = first(rows)
    return {
      ...runner,
      queueId: queue,
      startedLane: queue,
      suspectLane: queue,
      lanes: [queue],
      suspectLanes: []
    }
  })

export interface Enqueued {
  readonly ids: ReadonlyArray<string> | null
  readonly queue_id: number
  readonly conflict_key: string | null
  readonly conflict_id: string | null
  readonly refused_group: string | null
}

export interface EnqueueOptions {
  readonly priorities?: ReadonlyArray<number | null>
  readonly keys?: ReadonlyArray<string | null>
  readonly idempotencyKeys?: ReadonlyArray<string | null>
  readonly delaysMs?: ReadonlyArray<number | null>
  readonly deadlinesMs?: ReadonlyArray<number | null>
  readonly paceKinds?: ReadonlyArray<"debounce" | "throttle" | null>
  readonly paceKeys?: ReadonlyArray<string | null>
  readonly paceMs?: ReadonlyArray<number | null>
  readonly paceMaxMs?: ReadonlyArray<number | null>
  readonly groups?: ReadonlyArray<string | null>
}

/** `payloads` are JSON texts, as every client sends them. */
export const enqueueAll = (
  sql: Sql,
  queue: string,
  payloads: ReadonlyArray<string>,
  options: EnqueueOptions = {}
): Effect.Effect<Enqueued, SqlError> =>
  Effect.map(
    sql<Enqueued>`
      SELECT e.ids::text[] AS ids, e.queue_id, e.conflict_key, e.conflict_id::text AS conflict_id,
             e.refused_group::text AS refused_group
        FROM tenure.enqueue_all(${queue}, ${array(payloads)}::text::text[],
               ${array(options.priorities)}::text::int[], ${array(options.keys)}::text::text[],
               ${array(options.idempotencyKeys)}::text::text[],
               ${array(options.delaysMs)}::text::float8[], NULL,
               ${array(options.deadlinesMs)}::text::float8[], NULL, NULL,
               ${array(options.paceKinds)}::text::text[], ${array(options.paceKeys)}::text::text[],
               ${array(options.paceMs)}::text::float8[], ${array(options.paceMaxMs)}::text::float8[],
               ${array(options.groups)}::text::uuid[]) e`,
    first
  )

/** `count` items with the payloads 0, 1, 2 ..; answers their ids in that order. */
export const enqueueMany = (
  sql: Sql,
  queue: string,
  count: number,
  options: EnqueueOptions = {}
): Effect.Effect<ReadonlyArray<string>, SqlError> =>
  Effect.map(
    enqueueAll(
      sql,
      queue,
      Array.from({ length: count }, (_, n) => String(n)),
      options
    ),
    (enqueued) => enqueued.ids ?? []
  )

export const enqueueOne = (
  sql: Sql,
  queue: string,
  payload: string,
  options: Readonly<Record<string, unknown>> = {}
): Effect.Effect<string, SqlError> =>
  Effect.map(
    sql<{ id: string }>`SELECT tenure.enqueue(${queue}, ${payload}::text::json,
                                 ${JSON.stringify(options)}::text::jsonb)::text AS id`,
    (rows) => first(rows).id
  )

export interface Claimed {
  readonly id: string
  readonly attempt: number
  readonly lane_id: number
  readonly rank: number
  readonly seq: number
  readonly failures: number
  readonly losses: number
  readonly key: string | null
  readonly payload: string
  readonly deadline_in_ms: number | null
  readonly cancel_requested: boolean
}

export interface ClaimOptions {
  readonly suspects?: number
  readonly cursor?: string
  /** For each lane the last place seen: rank and seq. */
  readonly floors?: ReadonlyArray<readonly [rank: number, seq: number]>
}

// Below every rank there is: a claim from here sees the whole lane.
const start = [-2147483648, 0] as const

/** The claim as it answers: the last row of a keyed claim has no id and carries the next cursor. */
export const claimRows = (
  executor: Executor,
  wanted: number,
  options: ClaimOptions = {}
): Effect.Effect<ReadonlyArray<Claimed>, SqlError> => {
  const floors = options.floors ?? executor.lanes.map(() => start)
  return executor.sql<Claimed>`
    SELECT c.id::text AS id, c.attempt, c.lane_id, c.rank, c.seq::float8 AS seq, c.failures,
           c.losses, c.key, c.payload::text AS payload, c.deadline_in_ms, c.cancel_requested
      FROM tenure.claim(${executor.queueId}::int, ${array(executor.lanes)}::text::int[],
             ${array(floors.map(([rank]) => rank))}::text::int[],
             ${array(floors.map(([, seq]) => seq))}::text::bigint[], ${wanted}::int,
             ${array(executor.suspectLanes)}::text::int[], ${options.suspects ?? 1}::int,
             ${options.cursor ?? ""}) c`
}

export const claim = (
  executor: Executor,
  wanted: number,
  options: ClaimOptions = {}
): Effect.Effect<ReadonlyArray<Claimed>, SqlError> =>
  Effect.map(claimRows(executor, wanted, options), (rows) => rows.filter((row) => row.id !== null))

/** A clock that stands still until it is set, for every session and every snapshot at once. */
export interface StoppedClock {
  /** Milliseconds since it was stopped, at the time of day that it was. */
  readonly atMillis: () => number
  readonly set: (millis: number) => Effect.Effect<void, SqlError>
  readonly advance: (millis: number) => Effect.Effect<void, SqlError>
}

export const stopClock = Effect.fnUntraced(function* (
  owner: Sql
): Effect.fn.Return<StoppedClock, SqlError> {
  yield* owner`CREATE SEQUENCE tenure.test_clock MINVALUE -1000000000 START 0`
  yield* owner`GRANT SELECT ON tenure.test_clock TO PUBLIC`
  const { now } = first(yield* owner<{ now: string }>`SELECT tenure.clock()::text AS now`)
  yield* owner.unsafe(
    `CREATE OR REPLACE FUNCTION tenure.clock() RETURNS timestamptz LANGUAGE sql VOLATILE PARALLEL SAFE AS $$
       SELECT '${now}'::timestamptz + (SELECT last_value FROM tenure.test_clock) * interval '1 ms' $$`
  )
  let at = 0
  const set = (millis: number) =>
    Effect.suspend(() => {
      at = millis
      return Effect.asVoid(owner`SELECT setval('tenure.test_clock', ${millis}::float8::bigint)`)
    })
  yield* set(0)
  return { atMillis: () => at, set, advance: (millis) => Effect.suspend(() => set(at + millis)) }
})

export interface Outcome {
  readonly id: string
  readonly attempt: number
  readonly outcome?: string
  readonly reason?: string
  /** JSON text. */
  readonly result?: string
  readonly lane?: number
  readonly delayMs?: number
}

export interface Answer {
  readonly id: string
  readonly attempt: number
  readonly status: string
}

/** The answers for those that were not settled. */
export const settle = (
  executor: Executor,
  outcomes: ReadonlyArray<Outcome>
): Effect.Effect<ReadonlyArray<Answer>, SqlError> =>
  executor.sql<Answer>`
    SELECT s.id::text AS id, s.attempt, s.status
      FROM tenure.settle(${array(outcomes.map((o) => o.id))}::text::uuid[],
             ${array(outcomes.map((o) => o.attempt))}::text::int[],
             ${array(outcomes.map((o) => o.outcome ?? "completed"))}::text::text[],
             ${array(outcomes.map((o) => o.reason))}::text::text[],
             ${array(outcomes.map((o) => o.result))}::text::text[],
             ${array(outcomes.map((o) => o.lane ?? executor.startedLane))}::text::int[],
             ${array(outcomes.map((o) => o.delayMs))}::text::float8[]) s`

export interface Checkpoint {
  readonly id: string
  readonly attempt: number
  readonly name: string
  /** JSON text. */
  readonly value: string
}

/** The answers for those that were not written. */
export const checkpoint = (
  executor: Executor,
  checkpoints: ReadonlyArray<Checkpoint>
): Effect.Effect<ReadonlyArray<{ id: string; name: string; status: string }>, SqlError> =>
  executor.sql<{ id: string; name: string; status: string }>`
    SELECT c.id::text AS id, c.name, c.status
      FROM tenure.checkpoint(${array(checkpoints.map((c) => c.id))}::text::uuid[],
             ${array(checkpoints.map((c) => c.attempt))}::text::int[],
             ${array(checkpoints.map((c) => c.name))}::text::text[],
             ${array(checkpoints.map((c) => c.value))}::text::text[]) c`

export interface Revoked {
  readonly state: string
  readonly requeued: number
  readonly cancelled: number
  readonly exhausted: ReadonlyArray<string>
  readonly settled: ReadonlyArray<string>
}

/** An executor is lost: both steps, whatever its lease says. */
export const loseExecutor = Effect.fnUntraced(function* (
  sql: Sql,
  executorId: string,
  options: { readonly backoffMs?: number; readonly graceMs?: number } = {}
): Effect.fn.Return<Revoked, SqlError> {
  yield* sql`SELECT tenure.mark_revoking(${executorId}::uuid, true)`
  return first(
    yield* sql<Revoked>`
    SELECT r.state, r.requeued, r.cancelled, r.exhausted::text[] AS exhausted,
           r.settled::text[] AS settled
      FROM tenure.revoke(${executorId}::uuid,
             make_interval(secs => ${(options.backoffMs ?? 0) / 1000}::float8),
             make_interval(secs => ${(options.graceMs ?? 0) / 1000}::float8)) r`
  )
})

/** The tables an item is in: exactly one, if all is well. */
export const placesOf = (
  sql: Sql,
  ids: ReadonlyArray<string>
): Effect.Effect<Readonly<Record<string, string>>, SqlError> =>
  Effect.map(
    sql<{ id: string; place: string }>`
      SELECT u.id::text AS id, coalesce(string_agg(p.place, '+'), 'nowhere') AS place
        FROM unnest(${array(ids)}::text::uuid[]) u(id)
        LEFT JOIN (SELECT r.id, 'ready' AS place FROM tenure.ready r
                   UNION ALL SELECT c.id, 'claimed' FROM tenure.claimed c
                   UNION ALL SELECT c.item_id, 'leased' FROM tenure.capacity_lease c
                   UNION ALL SELECT d.id, 'delayed' FROM tenure.delayed d
                   UNION ALL SELECT p.id, 'parked' FROM tenure.parked p
                   UNION ALL SELECT d.id, d.outcome FROM tenure.done d) p ON p.id = u.id
       GROUP BY u.id`,
    (rows) => Object.fromEntries(rows.map((row) => [row.id, row.place]))
  )

export const placeOf = (sql: Sql, id: string): Effect.Effect<string, SqlError> =>
  Effect.map(placesOf(sql, [id]), (places) => places[id] ?? "nowhere")

export const pidOf = (sql: Sql): Effect.Effect<number, SqlError> =>
  Effect.map(sql<{ pid: number }>`SELECT pg_backend_pid() AS pid`, (rows) => first(rows).pid)

/** Waits until the server says that the session waits for another one's lock. */
export const whenBlocked = (
  observer: Sql,
  pid: number
): Effect.Effect<void, SqlError | NeverHappened> =>
  eventually(
    `session ${pid} waits for a lock`,
    Effect.map(
      observer<{
        blocked: boolean
      }>`SELECT cardinality(pg_blocking_pids(${pid}::int)) > 0 AS blocked`,
      (rows) => first(rows).blocked
    )
  )

export class NeverHappened extends Error {
  readonly _tag = "NeverHappened"
}

/** Asks until it is so; within five seconds it has to be. */
export const eventually = <E, R>(
  what: string,
  condition: Effect.Effect<boolean, E, R>
): Effect.Effect<void, E | NeverHappened, R> =>
  Effect.gen(function* () {
    for (let turn = 0; turn < 1000; turn++) {
      if (yield* condition) return
      yield* Effect.sleep("5 millis")
    }
    return yield* Effect.fail(new NeverHappened(`never: ${what}`))
  })

/** The SQLSTATE that an effect fails with. */
export const stateOf = <A, E, R>(effect: Effect.Effect<A, E, R>): Effect.Effect<string, A, R> =>
  Effect.map(Effect.flip(effect), (error) =>
    isSqlError(error) ? (sqlState(error) ?? error.reason._tag) : String(error)
  )

/** PostgreSQL's text form: the driver cannot tell the type of an array that holds only nulls. */
export const array = (
  values: ReadonlyArray<string | number | null | undefined> | undefined
): string | null =>
  values === undefined
    ? null
    : `{${values.map((value) => (value === null || value === undefined ? "NULL" : quoted(value))).join(",")}}`

const quoted = (value: string | number): string =>
  typeof value === "number" ? String(value) : `"${value.replaceAll(/["\\]/g, "\\$&")}"`

export const first = <A>(rows: ReadonlyArray<A>): A => {
  const row = rows[0]
  if (row === undefined) throw new Error("the statement returned no row")
  return row
}

/**
 * Gives a database a wrong form of a function of ours, to show what the right one prevents. A text
 * that is not found is an error: the wrong form would be the right one.
 */
export const spoil = Effect.fnUntraced(function* (
  owner: Sql,
  name: string,
  from: string,
  to: string
): Effect.fn.Return<void, SqlError> {
  const { definition } = first(
    yield* owner<{ definition: string }>`
      SELECT pg_get_functiondef(${`tenure.${name}`}::regproc) AS definition`
  )
  if (!definition.includes(from)) throw new Error(`tenure.${name} does not contain: ${from}`)
  yield* owner.unsafe(definition.replace(from, to)).unprepared
})
