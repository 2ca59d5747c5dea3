/**
 * All SQL of pull sessions: slots, reservations, leases, and the sweep that takes them back. No policy:
 * intervals come from the caller, who serves the worker, and what a refusal means is decided there.
 *
 * Any executor serves any session. Every write of a worker names the session, the item and the
 * `executionSeq` under which it was handed out, and changes exactly that lease or is `stale`.
 *
 * What settles an item tells whoever waits for it afterwards, in a statement of its own: a waiter that
 * registers meanwhile would otherwise be missed.
 */
import { PgTypes } from "@effect/sql-pg"
import { Effect } from "effect"
import type { SqlClient } from "effect/sql"
import type { SqlError } from "effect/sql/SqlError"
import { texts } from "../database/Parameters.ts"
import { notifySettled } from "../queue/QueueStore.ts"

/** Why a session may not do anything: it was never opened, was closed, or missed its heartbeats. */
export type SessionRefusal = "unknown session" | "session expired"

/**
 * Why a write of an execution is refused. None of these goes away by a second try.
 *
 *   older execution_seq   the item went back, or somebody has it under a higher number
 *   reservation expired   not activated in time; lease expired: no heartbeat in time
 *   not activated         a reservation allows nothing but its activation
 *   settled, cancelled    the item has its outcome
 */
export type StaleReason =
  | SessionRefusal
  | "unknown item"
  | "older execution_seq"
  | "reservation expired"
  | "lease expired"
  | "not activated"
  | "settled"
  | "cancelled"

export interface Stale {
  readonly status: "stale"
  readonly reason: StaleReason
}

export interface Clocks {
  /** How often the worker is asked for a heartbeat. */
  readonly heartbeatMillis: number
  /** For how long one heartbeat keeps the session and what it executes. */
  readonly leaseMillis: number
  /** How long an item waits for its activation. */
  readonly reservationMillis: number
}

export interface NewSession {
  /** A name for people. */
  readonly worker: string
  readonly queues: ReadonlyArray<string>
  readonly slots: number
  readonly clocks: Clocks
  /** Of the worker's code: what it has started, only sessions and executors of this version go on with. */
  readonly version?: string | undefined
  /** For queues that nobody has run yet; the queue's own otherwise. */
  readonly recovery?:
    | { readonly limit: "executions" | "consecutive"; readonly max: number }
    | undefined
}

export interface OpenedSession {
  readonly session: string
  readonly heartbeatMillis: number
  readonly expiresInMillis: number
}

/** The version of workers that name none. */
export const unversioned = "pull"

/** Fails with TN011 for a queue of another application. */
export const openSession = (sql: SqlClient.SqlClient, opened: NewSession) =>
  Effect.map(
    sql<{ readonly session: string }>`
      SELECT tenure.open_session(
        ${opened.worker}, ${texts(opened.queues)}, ${PgTypes.int4(opened.slots)},
        ${opened.version ?? unversioned}, make_interval(secs => ${PgTypes.float8(opened.clocks.leaseMillis / 1000)}),
        make_interval(secs => ${PgTypes.float8(opened.clocks.reservationMillis / 1000)}), ${opened.recovery?.limit ?? "executions"},
        ${PgTypes.int4(opened.recovery?.max ?? 4)}) AS session`,
    ([row]): OpenedSession => ({
      session: row?.session ?? "",
      heartbeatMillis: opened.clocks.heartbeatMillis,
      expiresInMillis: opened.clocks.leaseMillis
    })
  )

export interface PulledItem {
  readonly id: string
  readonly executionSeq: number
  readonly queue: string
  readonly payload: unknown
  readonly key: string | null
  readonly trace: string | null
  /** Earlier executions that failed and were tried again. */
  readonly failures: number
  /** Earlier holders that were lost. */
  readonly losses: number
  readonly enqueuedAt: Date
  readonly deadlineInMillis: number | null
  readonly reservedForMillis: number
}

export interface Pulled {
  /** Why the session gets nothing; null when there was nothing, or no slot. */
  readonly refused: SessionRefusal | null
  readonly items: ReadonlyArray<PulledItem>
}

interface PulledRow {
  readonly refused: SessionRefusal | null
  readonly ended: string | null
  readonly id: string
  readonly execution_seq: number
  readonly queue: string
  readonly payload: unknown
  readonly key: string | null
  readonly trace: string | null
  readonly failures: number
  readonly losses: number
  readonly enqueued_at: Date
  readonly deadline_in_ms: number | null
  readonly reserved_for_ms: number
}

/** Reserves slots for up to `wanted` items. Waits for none: ask again. Costs no write while nothing waits. */
export const pull = Effect.fnUntraced(function* (
  sql: SqlClient.SqlClient,
  session: string,
  wanted: number
): Effect.fn.Return<Pulled, SqlError> {
  const rows = yield* sql<PulledRow>`
    SELECT refused, ended, id, execution_seq, queue, payload, key, trace, failures, losses, enqueued_at,
           deadline_in_ms, reserved_for_ms
      FROM tenure.pull(${PgTypes.uuid(session)}, ${PgTypes.int4(wanted)})`
  const items: Array<PulledItem> = []
  const ended: Array<string> = []
  let refused: SessionRefusal | null = null
  for (const row of rows) {
    if (row.refused !== null) refused = row.refused
    else if (row.ended !== null) ended.push(row.ended)
    else items.push(pulledItem(row))
  }
  if (ended.length > 0) yield* notifySettled(sql, ended)
  return { refused, items }
})

const pulledItem = (row: PulledRow): PulledItem => ({
  id: row.id,
  executionSeq: row.execution_seq,
  queue: row.queue,
  payload: row.payload,
  key: row.key,
  trace: row.trace,
  failures: row.failures,
  losses: row.losses,
  enqueuedAt: row.enqueued_at,
  deadlineInMillis: row.deadline_in_ms,
  reservedForMillis: row.reserved_for_ms
})

interface TimedRow<Status> {
  readonly status: Status | "stale"
  readonly reason: StaleReason | null
  readonly expires_in_ms: number | null
}

const timed = <Status extends string>(
  row: TimedRow<Status> | undefined
): { readonly status: Status; readonly expiresInMillis: number } | Stale =>
  row === undefined || row.status === "stale"
    ? { status: "stale", reason: row?.reason ?? "unknown item" }
    : { status: row.status as Status, expiresInMillis: row.expires_in_ms ?? 0 }

/**
 * The worker is about to execute the item. A second time answers the same. An item that was to be
 * cancelled is, and is stale with that reason.
 */
export const activate = Effect.fnUntraced(function* (
  sql: SqlClient.SqlClient,
  session: string,
  id: string,
  executionSeq: number
) {
  const [row] = yield* sql<TimedRow<"active">>`
    SELECT status, reason, expires_in_ms
      FROM tenure.activate(${PgTypes.uuid(session)}, ${PgTypes.uuid(id)}, ${PgTypes.int4(executionSeq)})`
  if (row?.reason === "cancelled") yield* notifySettled(sql, [id])
  return timed(row)
})

export interface Heartbeat {
  /** The session is no more: the worker stops what it executes, and opens another one. */
  readonly gone: boolean
  readonly reason: SessionRefusal | null
  /** What it executes and is to stop; then it answers with any outcome. */
  readonly cancelled: ReadonlyArray<string>
  readonly expiresInMillis: number
}

/** Pushes the clock of the session and those of all that it executes forward, in one statement. */
export const heartbeat = (sql: SqlClient.SqlClient, session: string) =>
  Effect.map(
    sql<{
      readonly reason: SessionRefusal | null
      readonly cancelled: ReadonlyArray<string>
      readonly expires_in_ms: number | null
    }>`
      SELECT reason, cancelled::text[] AS cancelled, expires_in_ms
        FROM tenure.heartbeat(${PgTypes.uuid(session)})`,
    ([row]): Heartbeat => ({
      gone: row === undefined || row.reason !== null,
      reason: row === undefined ? "unknown session" : row.reason,
      cancelled: row?.cancelled ?? [],
      expiresInMillis: row?.expires_in_ms ?? 0
    })
  )

/** The item's clock and the session's run for so long from now at least; 24 hours at most. */
export const extend = (
  sql: SqlClient.SqlClient,
  session: string,
  id: string,
  executionSeq: number,
  millis: number
) =>
  Effect.map(
    sql<TimedRow<"extended">>`
      SELECT status, reason, expires_in_ms
        FROM tenure.extend(
          ${PgTypes.uuid(session)}, ${PgTypes.uuid(id)}, ${PgTypes.int4(executionSeq)},
          ${PgTypes.float8(millis)})`,
    ([row]) => timed(row)
  )

/**
 * `already`: this execution has its outcome, and the answer to an earlier call was lost. `cancelled`: it
 * was to be cancelled and did not complete.
 */
export type SettledExecution =
  | { readonly status: "settled" | "retried" | "cancelled" | "already" }
  | Stale

interface ExecutionOutcome {
  readonly outcome: "completed" | "failed" | "retry"
  readonly because: "HandlerDied" | null
  readonly result: string | null
  readonly delayMillis: number
}

const settleExecution = Effect.fnUntraced(function* (
  sql: SqlClient.SqlClient,
  session: string,
  id: string,
  executionSeq: number,
  end: ExecutionOutcome
): Effect.fn.Return<SettledExecution, SqlError> {
  const [row] = yield* sql<{
    readonly status: SettledExecution["status"]
    readonly reason: StaleReason | null
  }>`
    SELECT status, reason
      FROM tenure.settle_execution(
        ${PgTypes.uuid(session)}, ${PgTypes.uuid(id)}, ${PgTypes.int4(executionSeq)}, ${end.outcome},
        ${PgTypes.text(end.because)}, ${PgTypes.text(end.result)}, ${PgTypes.float8(end.delayMillis)})`
  if (row === undefined || row.status === "stale") {
    return { status: "stale", reason: row?.reason ?? "unknown item" }
  }
  if (row.status !== "retried") yield* notifySettled(sql, [id])
  return { status: row.status }
})

/** `result` is encoded JSON, or null for none. */
export const complete = (
  sql: SqlClient.SqlClient,
  session: string,
  id: string,
  executionSeq: number,
  result: string | null
) =>
  settleExecution(sql, session, id, executionSeq, {
    outcome: "completed",
    because: null,
    result,
    delayMillis: 0
  })

const messageMax = 1000

/** A failure of the program. Without retries left it is final, and kept as `HandlerDied`. */
export const fail = (
  sql: SqlClient.SqlClient,
  session: string,
  id: string,
  executionSeq: number,
  failure: {
    readonly message: string
    readonly retriesLeft?: number | undefined
    readonly retryAfterMillis?: number | undefined
  }
) =>
  settleExecution(
    sql,
    session,
    id,
    executionSeq,
    (failure.retriesLeft ?? 0) > 0
      ? {
          outcome: "retry",
          because: null,
          result: null,
          delayMillis: Math.max(0, failure.retryAfterMillis ?? 0)
        }
      : {
          outcome: "failed",
          because: "HandlerDied",
          result: JSON.stringify({ message: failure.message.slice(0, messageMax) }),
          delayMillis: 0
        }
  )

/**
 * A failure that the business knows: final, and the queue's declared error. Kept as `result` with `_tag`
 * set to the code, which is how a tagged error of Effect is encoded.
 */
export const businessError = (
  sql: SqlClient.SqlClient,
  session: string,
  id: string,
  executionSeq: number,
  failure: {
    readonly code: string
    readonly result?: Readonly<Record<string, unknown>> | undefined
  }
) =>
  settleExecution(sql, session, id, executionSeq, {
    outcome: "failed",
    because: null,
    result: JSON.stringify({ ...failure.result, _tag: failure.code }),
    delayMillis: 0
  })

/**
 * Stores a step's result (encoded JSON), once: `exists` answers the value that stays. It is the progress
 * that the limit `consecutive` counts losses from. All of them: `readCheckpoints` of the queue's store.
 */
export const checkpoint = (
  sql: SqlClient.SqlClient,
  session: string,
  id: string,
  executionSeq: number,
  step: { readonly name: string; readonly value: string }
) =>
  Effect.map(
    sql<{
      readonly status: "written" | "exists" | "stale"
      readonly reason: StaleReason | null
      readonly value: unknown
    }>`
      SELECT status, reason, value
        FROM tenure.checkpoint_execution(
          ${PgTypes.uuid(session)}, ${PgTypes.uuid(id)}, ${PgTypes.int4(executionSeq)}, ${step.name},
          ${step.value})`,
    ([row]): { readonly status: "written" | "exists"; readonly value: unknown } | Stale =>
      row === undefined || row.status === "stale"
        ? { status: "stale", reason: row?.reason ?? "unknown item" }
        : { status: row.status, value: row.value }
  )

/** Gives back what the session holds, without a loss to anybody. */
export const closeSession = (sql: SqlClient.SqlClient, session: string) =>
  Effect.map(
    sql<{ readonly reason: SessionRefusal | null; readonly handed_back: number }>`
      SELECT reason, handed_back FROM tenure.close_session(${PgTypes.uuid(session)})`,
    ([row]) => ({
      refused: row === undefined ? ("unknown session" as const) : row.reason,
      handedBack: row?.handed_back ?? 0
    })
  )

export interface Swept {
  readonly reservations: number
  readonly leases: number
  readonly recovered: number
  readonly cancelled: number
  readonly sessions: number
  /** Lost with too many holders: quarantined. */
  readonly exhausted: ReadonlyArray<string>
  /** All that have an outcome now. */
  readonly settled: ReadonlyArray<string>
}

/** Takes back what has run out, of one application, up to `rowsMax` of each kind. */
export const sweep = (
  sql: SqlClient.SqlClient,
  options: {
    readonly application: string
    readonly backoffMillis: number
    readonly graceMillis: number
    readonly cancelGraceMillis: number
    readonly rowsMax: number
  }
) =>
  Effect.map(
    sql<Swept>`
      SELECT reservations, leases, recovered, cancelled, sessions, exhausted::text[] AS exhausted,
             settled::text[] AS settled
        FROM tenure.capacity_sweep(
          ${options.application}, make_interval(secs => ${PgTypes.float8(options.backoffMillis / 1000)}), make_interval(secs => ${PgTypes.float8(options.graceMillis / 1000)}),
          make_interval(secs => ${PgTypes.float8(options.cancelGraceMillis / 1000)}), ${PgTypes.int4(options.rowsMax)})`,
    ([row]): Swept =>
      row ?? {
        reservations: 0,
        leases: 0,
        recovered: 0,
        cancelled: 0,
        sessions: 0,
        exhausted: [],
        settled: []
      }
  )

/** Removes audit events that are older, up to `rowsMax`. Answers how many. */
export const trimAudit = (sql: SqlClient.SqlClient, keepMillis: number, rowsMax: number) =>
  Effect.map(
    sql<{ readonly trimmed: number }>`
      SELECT tenure.trim_audit(
        (SELECT tenure.clock()) - make_interval(secs => ${PgTypes.float8(keepMillis / 1000)}), ${PgTypes.int4(rowsMax)}) AS trimmed`,
    ([row]) => row?.trimmed ?? 0
  )

export interface LeaseRow {
  readonly item_id: string
  readonly queue: string
  readonly session: string
  /** Null when the session is gone and the lease still waits for its own clock. */
  readonly worker: string | null
  readonly execution_seq: number
  readonly state: "reserved" | "active"
  readonly key: string | null
  readonly losses: number
  readonly reserved_at: Date
  readonly activated_at: Date | null
  readonly expires_at: Date
  readonly expires_in_ms: number
}

/** Reservations and leases whose clock runs, the next to expire first. */
export const leases = (sql: SqlClient.SqlClient, rowsMax: number) =>
  sql<LeaseRow>`SELECT * FROM tenure.capacity_leases(${PgTypes.int4(rowsMax)})`

export interface SessionRow {
  readonly id: string
  readonly application_name: string
  readonly worker: string
  readonly version: string
  readonly queues: ReadonlyArray<string>
  readonly slots: number
  readonly reserved: number
  readonly active: number
  readonly opened_at: Date
  readonly heartbeat_at: Date
  readonly expires_at: Date
  readonly expires_in_ms: number
}

export const sessions = (sql: SqlClient.SqlClient, rowsMax: number) =>
  sql<SessionRow>`SELECT * FROM tenure.capacity_sessions(${PgTypes.int4(rowsMax)})`

export interface QueuedRow {
  readonly item_id: string
  readonly queue: string
  /** Of the last execution; the next one has a higher number. */
  readonly execution_seq: number
  readonly version: string | null
  readonly key: string | null
  readonly losses: number
  readonly stuck: number
  /** Null: at once. */
  readonly eligible_at: Date | null
  readonly eligible_in_ms: number
}

/** What waits in queues that sessions offer slots to, and whatever has lost a holder: those first. */
export const queued = (sql: SqlClient.SqlClient, rowsMax: number) =>
  sql<QueuedRow>`SELECT * FROM tenure.capacity_queue(${PgTypes.int4(rowsMax)})`
