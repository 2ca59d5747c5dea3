/**
 * One worker of the stress: an executor with a connection, a client with another, and what they know.
 *
 *   working --pause, crash, revoked by somebody, released--> a new executor, with ghosts of the old one
 *
 * A worker knows what it was told was committed. Everything else is unknown to it, as to a process whose
 * connection broke during COMMIT. An error that is not expected of an operation is kept as a failure.
 */
import { Clock, Effect, Exit, Fiber, Scope } from "effect"
import { isSqlError, type SqlError } from "effect/sql/SqlError"
import { randomUUID } from "node:crypto"
import { sqlState } from "../../src/database/SqlState.ts"
import * as K from "../kernel/kernel.ts"
import type { FreshDatabase } from "../support/Postgres.ts"
import type { Seeded } from "./Seeded.ts"

export const validityMillis = 700
const renewEveryMillis = 150

export const queues = [
  { queue: "plain" },
  { queue: "consecutive", recoveryLimit: "consecutive", recoveryMax: 6 },
  { queue: "limited", globalLimit: 20 },
  { queue: "keyed", perKeyLimit: 1 },
  { queue: "both", perKeyLimit: 2, globalLimit: 30 },
  {
    queue: "turns",
    perKeyLimit: 3,
    limits: { takesTurns: true, agingMs: 1000, rateLimit: 150, rateWindowMs: 300 }
  },
  { queue: "key rate", limits: { keyRateLimit: 10, keyRateWindowMs: 300 } }
] as const satisfies ReadonlyArray<K.ExecutorOptions>

/** Known to all workers: what the database has promised, and how often something was seen. */
export interface Ledger {
  /** Items whose enqueue was acknowledged. */
  readonly accepted: Set<string>
  /** Outcomes that were acknowledged, for items that no operator can bring back. */
  readonly settled: Map<string, { readonly attempt: number; readonly outcome: string }>
  readonly seen: Map<string, number>
  readonly failures: Array<string>
  /** Groups that are not sealed yet. */
  readonly groups: Set<string>
  /** Items that have not ended, as the last snapshot saw them. */
  backlog: number
}

export const makeLedger = (): Ledger => ({
  accepted: new Set(),
  settled: new Map(),
  seen: new Map(),
  failures: [],
  groups: new Set(),
  backlog: 0
})

export const see = (ledger: Ledger, what: string, times = 1): void => {
  ledger.seen.set(what, (ledger.seen.get(what) ?? 0) + times)
}

export interface Held {
  readonly id: string
  readonly attempt: number
  readonly losses: number
  readonly queue: string
}

export interface Session {
  readonly sql: K.Sql
  readonly pid: number
  readonly scope: Scope.Closeable
}

export interface Worker {
  readonly database: FreshDatabase
  readonly random: Seeded
  readonly ledger: Ledger
  readonly superuser: K.Sql
  client: Session
  session: Session
  executorId: string
  readonly runners: Map<string, K.Executor>
  readonly floors: Map<string, ReadonlyArray<readonly [number, number]>>
  readonly cursors: Map<string, string>
  renewedAt: bigint
  readonly held: Map<string, Held>
  /** What this worker has held once: to settle it late is to be refused. */
  past: Array<Held>
  isPaused: boolean
}

export const open = Effect.fnUntraced(function* (
  database: FreshDatabase,
  role: "worker" | "api",
  executorId?: string
): Effect.fn.Return<Session, SqlError> {
  const scope = yield* Scope.make()
  const sql = yield* Scope.provide(K.sessionOf(database, role, executorId), scope)
  return { sql, pid: yield* K.pidOf(sql), scope }
})

export const close = (session: Session) => Effect.ignore(Scope.close(session.scope, Exit.void))

const isBroken = (error: SqlError): boolean => {
  const state = sqlState(error)
  return state === undefined ? error.reason._tag === "ConnectionError" : state.startsWith("57P")
}

/** Runs an operation and takes every error for what it means to a process. */
export const guarded = <E>(worker: Worker, name: string, operation: Effect.Effect<unknown, E>) =>
  operation.pipe(
    Effect.catch((error) =>
      Effect.gen(function* () {
        if (!isSqlError(error)) return unexpected(worker, name, String(error))
        const state = sqlState(error) ?? error.reason._tag
        if (isBroken(error)) {
          see(worker.ledger, "a terminated backend")
          return yield* reconnect(worker)
        }
        // The session may be inside a transaction that has failed.
        yield* Effect.ignore(worker.session.sql`ROLLBACK`)
        yield* Effect.ignore(worker.client.sql`ROLLBACK`)
        // TN003: the backend was ended before its registration was committed.
        if (isFenced(error)) {
          if (state !== "TN003") see(worker.ledger, "a fence refusal")
          see(worker.ledger, `a fence refusal with ${state}`)
          return yield* beginAnew(worker)
        }
        if (state === "40001") return see(worker.ledger, "a serialization failure")
        if (state === "TN020") return see(worker.ledger, "an idempotency conflict")
        if (state === "TN030") return see(worker.ledger, "members of a group that was sealed")
        unexpected(worker, name, told(error))
      })
    ),
    // While the worker picks itself up its backend may be ended once more, or its lease taken.
    Effect.catch((error) => {
      if (!isBroken(error) && !isFenced(error)) unexpected(worker, name, told(error))
      return Effect.ignore(reconnect(worker))
    })
  )

const isFenced = (error: SqlError): boolean =>
  ["TN001", "TN002", "TN003"].includes(sqlState(error) ?? "")

const told = (error: SqlError): string => {
  const { cause } = error.reason
  const detail =
    typeof cause === "object" && cause !== null && "detail" in cause ? cause.detail : ""
  return `${sqlState(error) ?? error.reason._tag} ${cause instanceof Error ? cause.message : ""} ${detail}`
}

export const unexpected = (worker: Worker, name: string, what: string): void => {
  if (worker.ledger.failures.length < 20) worker.ledger.failures.push(`${name}: ${what}`)
}

/** Ends the backend of the operation while it runs. What it was told of a COMMIT is then unknown. */
export const cutOff = <E>(worker: Worker, operation: Effect.Effect<unknown, E>) =>
  Effect.gen(function* () {
    const running = yield* Effect.forkChild(operation, { startImmediately: true })
    yield* Effect.sleep(worker.random.next() * 6)
    const pid = worker.random.chance(0.5) ? worker.client.pid : worker.session.pid
    yield* worker.superuser`SELECT pg_terminate_backend(${pid}::int)`
    const exit = yield* Fiber.await(running)
    if (Exit.isFailure(exit)) see(worker.ledger, "an operation of unknown outcome")
    return yield* exit
  })

const reconnect = Effect.fnUntraced(function* (worker: Worker) {
  yield* close(worker.client)
  yield* close(worker.session)
  worker.client = yield* open(worker.database, "api")
  worker.session = yield* open(worker.database, "worker", worker.executorId)
  for (const [queue, runner] of worker.runners) {
    worker.runners.set(queue, { ...runner, sql: worker.session.sql })
  }
})

/**
 * The end of a process and the start of the next one, which knows what the old one held. A peer may
 * take the new one's lease before it has registered its queues: then it is the next one's turn.
 */
export const beginAnew = (worker: Worker) =>
  Effect.retry(start(worker), { times: 20, while: (error) => isFenced(error) || isBroken(error) })

const start = Effect.fnUntraced(function* (worker: Worker) {
  yield* close(worker.session)
  worker.past = [...worker.held.values(), ...worker.past].slice(0, 100)
  worker.held.clear()
  worker.floors.clear()
  worker.cursors.clear()
  worker.isPaused = false
  worker.executorId = randomUUID()
  const isNew = worker.random.chance(0.5)
  worker.session = yield* open(worker.database, "worker", worker.executorId)
  yield* worker.session.sql`
    SELECT tenure.register_executor(${worker.executorId}::uuid, 'app', ${isNew ? "v2" : "v1"},
             make_interval(secs => ${validityMillis / 1000}::float8), 'host', 1)`
  worker.renewedAt = yield* Clock.monotonicTimeNanos
  for (const options of queues) {
    worker.runners.set(
      options.queue,
      yield* K.runQueue(worker.session.sql, worker.executorId, {
        ...options,
        version: isNew ? "v2" : "v1",
        accepted: isNew ? ["v1"] : []
      })
    )
  }
})

export const renewIfDue = Effect.fnUntraced(function* (worker: Worker) {
  const now = yield* Clock.monotonicTimeNanos
  if (now - worker.renewedAt < BigInt(renewEveryMillis) * 1_000_000n) return
  const [row] = yield* worker.session.sql<{ answer: string }>`
    SELECT tenure.renew_lease(${worker.executorId}::uuid,
             make_interval(secs => ${validityMillis / 1000}::float8)) AS answer`
  worker.renewedAt = now
  if (row?.answer === "renewed") return
  see(worker.ledger, `a renewal answered with ${row?.answer}`)
  // Half of them go on nevertheless, as a process that was stopped would: the fence is for those.
  if (worker.random.chance(0.5)) yield* beginAnew(worker)
  else worker.isPaused = true
})
