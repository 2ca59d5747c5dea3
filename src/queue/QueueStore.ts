/**
 * All SQL of queues, as one function for each statement. No policy: which items, how many and what
 * becomes of them is decided by the callers.
 */
import { PgTypes } from "@effect/sql-pg"
import { Effect } from "effect"
import type { SqlClient } from "effect/sql"
import { bigints, floats, instants, ints, texts, uuids } from "../database/Parameters.ts"
import type { Encoded } from "./Limits.ts"
import type { Pace } from "./Pace.ts"

export interface Registration {
  readonly queue: string
  readonly application: string
  readonly version: string
  readonly accepts: ReadonlyArray<string>
  readonly globalLimit: number | null
  readonly perKeyLimit: number | null
  readonly limits: Encoded
  readonly recoveryLimit: "executions" | "consecutive"
  readonly recoveryMax: number
}

export interface Lanes {
  readonly queueId: number
  /** Where an item waits that no executor has started. */
  readonly unstarted: number
  /** Where one goes that this version has started: only this version, or one that accepts it, goes on. */
  readonly started: number
  readonly suspect: number
  readonly all: ReadonlyArray<number>
  readonly suspects: ReadonlyArray<number>
}

export const registerQueue = (sql: SqlClient.SqlClient, queue: Registration) =>
  Effect.map(
    sql<{
      readonly queue_id: number
      readonly unstarted_lane: number
      readonly started_lane: number
      readonly suspect_lane: number
      readonly lanes: ReadonlyArray<number>
      readonly suspect_lanes: ReadonlyArray<number>
    }>`
      SELECT queue_id, unstarted_lane, started_lane, suspect_lane, lanes, suspect_lanes
        FROM tenure.register_queue(
          ${queue.queue}, ${queue.application}, ${queue.version}, ${texts(queue.accepts)},
          ${PgTypes.int4(queue.globalLimit)}, ${PgTypes.int4(queue.perKeyLimit)},
          ${queue.recoveryLimit}, ${PgTypes.int4(queue.recoveryMax)},
          ${JSON.stringify(queue.limits)}::text::jsonb)`,
    ([row]): Lanes => ({
      queueId: row?.queue_id ?? 0,
      unstarted: row?.unstarted_lane ?? 0,
      started: row?.started_lane ?? 0,
      suspect: row?.suspect_lane ?? 0,
      all: row?.lanes ?? [],
      suspects: row?.suspect_lanes ?? []
    })
  )

/** One item to hand in. Times are milliseconds from now, or epoch milliseconds. */
export interface NewItem {
  readonly payload: string
  readonly priority: number
  readonly key: string | null
  readonly idempotencyKey: string | null
  readonly delayMillis: number | null
  readonly notBefore: number | null
  readonly deadlineMillis: number | null
  readonly notAfter: number | null
  /** W3C trace context of whoever hands it in. */
  readonly trace: string | null
  readonly pace?: Pace | null | undefined
  readonly group?: string | null | undefined
}

export interface Enqueued {
  readonly ids: ReadonlyArray<string> | null
  readonly queue_id: number
  readonly conflict_key: string | null
  readonly conflict_id: string | null
  readonly refused_group: string | null
}

/** A column that is null for every row is sent as NULL: the server then skips what it is for. */
const column = <Row, A, B>(
  rows: ReadonlyArray<Row>,
  pick: (row: Row) => A | null,
  array: (values: ReadonlyArray<A | null>) => B
): B | null => (rows.some((row) => pick(row) !== null) ? array(rows.map(pick)) : null)

export const enqueueAll = (
  sql: SqlClient.SqlClient,
  queue: string,
  items: ReadonlyArray<NewItem>
) =>
  Effect.map(
    sql<Enqueued>`
      SELECT ids, queue_id, conflict_key, conflict_id, refused_group
        FROM tenure.enqueue_all(
          ${queue}, ${texts(items.map((item) => item.payload))},
          ${column(items, (item) => (item.priority === 0 ? null : item.priority), ints)}::int[],
          ${column(items, (item) => item.key, texts)}::text[],
          ${column(items, (item) => item.idempotencyKey, texts)}::text[],
          ${column(items, (item) => item.delayMillis, floats)}::float8[],
          ${column(items, (item) => item.notBefore, instants)}::timestamptz[],
          ${column(items, (item) => item.deadlineMillis, floats)}::float8[],
          ${column(items, (item) => item.notAfter, instants)}::timestamptz[],
          ${column(items, (item) => item.trace, texts)}::text[],
          ${column(items, ({ pace }) => pace?.kind ?? null, texts)}::text[],
          ${column(items, ({ pace }) => pace?.key ?? null, texts)}::text[],
          ${column(items, ({ pace }) => pace?.millis ?? null, floats)}::float8[],
          ${column(items, ({ pace }) => pace?.millisMax ?? null, floats)}::float8[],
          ${column(items, ({ group }) => group ?? null, uuids)}::uuid[])`,
    ([row]) => row
  )

export interface ClaimedRow {
  /**
   * Null in the last row of a claim from a queue with keys that count, a rate, or a pause. Its `key` is then
   * the next cursor, null to keep it; `deadline_in_ms` in how long a rate lets the next item start; and
   * `cancel_requested` that no item of the queue may start before.
   */
  readonly id: string | null
  readonly attempt: number
  readonly lane_id: number
  readonly rank: number
  readonly seq: bigint
  readonly failures: number
  readonly losses: number
  readonly key: string | null
  readonly payload: unknown
  readonly trace: string | null
  readonly deadline_in_ms: number | null
  readonly enqueued_at: Date
  readonly cancel_requested: boolean
}

export interface Floor {
  readonly rank: number
  readonly seq: bigint
}

export const lowestFloor: Floor = { rank: -2_147_483_648, seq: -1n }

export const claimItems = (
  sql: SqlClient.SqlClient,
  claim: {
    readonly lanes: Lanes
    readonly floors: ReadonlyArray<Floor>
    readonly wanted: number
    readonly suspectsWanted: number
    readonly keyCursor: string
  }
) => sql<ClaimedRow>`
  SELECT id, attempt, lane_id, rank, seq, failures, losses, key, payload, trace, deadline_in_ms,
         enqueued_at, cancel_requested
    FROM tenure.claim(
      ${PgTypes.int4(claim.lanes.queueId)}, ${ints(claim.lanes.all)},
      ${ints(claim.floors.map((floor) => floor.rank))}, ${bigints(claim.floors.map((floor) => floor.seq))},
      ${PgTypes.int4(claim.wanted)}, ${ints(claim.lanes.suspects)}, ${PgTypes.int4(claim.suspectsWanted)},
      ${claim.keyCursor})`

export type Outcome = "completed" | "failed" | "cancelled" | "retry" | "hand-back"

export type Reason = "HandlerDied" | "DeadlineExceeded"

export interface Settlement {
  readonly id: string
  readonly attempt: number
  readonly outcome: Outcome
  readonly reason: Reason | null
  /** Encoded JSON. */
  readonly result: string | null
  /** Where a retry or a hand-back waits. */
  readonly lane: number | null
  readonly delayMillis: number | null
}

export type Settled = "settled" | "already" | "busy" | "stale"

const withCompleted = (outcomes: ReadonlyArray<Outcome | null>) =>
  texts(outcomes.map((outcome) => outcome ?? "completed"))

/** Only what is not simply `settled` is returned. */
export const settleItems = (sql: SqlClient.SqlClient, settlements: ReadonlyArray<Settlement>) =>
  sql<{ readonly id: string; readonly attempt: number; readonly status: Settled }>`
    SELECT id, attempt, status
      FROM tenure.settle(
        ${uuids(settlements.map((one) => one.id))}, ${ints(settlements.map((one) => one.attempt))},
        ${column(settlements, (one) => (one.outcome === "completed" ? null : one.outcome), withCompleted)}::text[],
        ${column(settlements, (one) => one.reason, texts)}::text[],
        ${column(settlements, (one) => one.result, texts)}::text[],
        ${column(settlements, (one) => one.lane, ints)}::int[],
        ${column(settlements, (one) => one.delayMillis, floats)}::float8[])`

/** One, in the transaction of its handler. */
export const completeItem = (
  sql: SqlClient.SqlClient,
  item: { readonly id: string; readonly attempt: number; readonly result: string | null }
) =>
  Effect.map(
    sql<{ readonly status: Settled }>`
      SELECT tenure.complete_item(
        ${PgTypes.uuid(item.id)}, ${PgTypes.int4(item.attempt)}, ${PgTypes.text(item.result)}) AS status`,
    ([row]): Settled => row?.status ?? "stale"
  )

export interface Checkpoint {
  readonly id: string
  readonly attempt: number
  readonly name: string
  /** Encoded JSON. */
  readonly value: string
}

/** Only what was not written is returned. */
export const writeCheckpoints = (
  sql: SqlClient.SqlClient,
  checkpoints: ReadonlyArray<Checkpoint>
) => sql<{ readonly id: string; readonly name: string; readonly status: "exists" | "stale" }>`
  SELECT id, name, status
    FROM tenure.checkpoint(
      ${uuids(checkpoints.map((one) => one.id))}, ${ints(checkpoints.map((one) => one.attempt))},
      ${texts(checkpoints.map((one) => one.name))}, ${texts(checkpoints.map((one) => one.value))})`

export const readCheckpoints = (sql: SqlClient.SqlClient, id: string) =>
  sql<{ readonly name: string; readonly value: unknown }>`
    SELECT name, value FROM tenure.checkpoints(${PgTypes.uuid(id)})`

export interface Looked {
  readonly promoted: number
  readonly promoted_queues: ReadonlyArray<number>
  readonly expired: number
  readonly expired_ids: ReadonlyArray<string>
  readonly next_due_ms: number | null
  /** Running items of the executor that are to be cancelled, and their attempts. */
  readonly cancel_ids: ReadonlyArray<string>
  readonly cancel_attempts: ReadonlyArray<number>
  /** Those of the lanes asked about that have something waiting. */
  readonly waiting_lanes: ReadonlyArray<number>
  /** Taken for this executor, which has to dispatch them. */
  readonly woken_ids: ReadonlyArray<string>
}

/** Promotes, expires, takes what has waited long enough, and tells what is to be cancelled and where something waits: one statement. */
export const look = (
  sql: SqlClient.SqlClient,
  asked: {
    readonly executorId: string
    readonly rowsMax: number
    readonly lanes: ReadonlyArray<number>
  }
) =>
  Effect.map(
    sql<Looked>`
      SELECT promoted, promoted_queues, expired, expired_ids::text[] AS expired_ids, next_due_ms,
             cancel_ids::text[] AS cancel_ids, cancel_attempts, waiting_lanes,
             woken_ids::text[] AS woken_ids
        FROM tenure.look(
          ${PgTypes.uuid(asked.executorId)}, ${PgTypes.int4(asked.rowsMax)}, ${ints(asked.lanes)})`,
    ([row]): Looked =>
      row ?? {
        promoted: 0,
        promoted_queues: [],
        expired: 0,
        expired_ids: [],
        next_due_ms: null,
        cancel_ids: [],
        cancel_attempts: [],
        waiting_lanes: [],
        woken_ids: []
      }
  )

/** `cancelled`, `requested`, `unknown`, or the outcome the item has. */
export const cancelItem = (sql: SqlClient.SqlClient, id: string) =>
  Effect.map(
    sql<{ readonly answer: string }>`SELECT tenure.cancel(${PgTypes.uuid(id)}) AS answer`,
    ([row]) => row?.answer ?? "unknown"
  )

/** Since when it is paused. */
export const pauseQueue = (sql: SqlClient.SqlClient, queue: string) =>
  sql`SELECT tenure.pause_queue(${queue}) AS since`

/** Whoever claims is told at the commit. */
export const resumeQueue = (sql: SqlClient.SqlClient, queue: string) =>
  sql`SELECT tenure.resume_queue(${queue}) AS resumed`

/** `available`, `unknown`, or the state that forbids it. */
export const retryItem = (sql: SqlClient.SqlClient, id: string) =>
  Effect.map(
    sql<{ readonly answer: string }>`SELECT tenure.retry(${PgTypes.uuid(id)}) AS answer`,
    ([row]) => row?.answer ?? "unknown"
  )

export interface OutcomeRow {
  readonly id: string
  readonly settled: boolean
  readonly outcome: "completed" | "failed" | "cancelled" | null
  readonly reason: string | null
  readonly result: unknown
  readonly attempt: number | null
  readonly losses: number | null
}

/** Another text would fail the statement, and with it whoever shares that. */
export const isId = (id: string): boolean =>
  /^[\da-f]{8}-[\da-f]{4}-[\da-f]{4}-[\da-f]{4}-[\da-f]{12}$/i.test(id)

/** No row for an unknown id. */
export const readOutcomes = (sql: SqlClient.SqlClient, ids: ReadonlyArray<string>) =>
  sql<OutcomeRow>`
    SELECT id, settled, outcome, reason, result, attempt, losses FROM tenure.item_outcome(${uuids(ids)})`

export const registerWaits = (
  sql: SqlClient.SqlClient,
  ids: ReadonlyArray<string>,
  channel: string
) => sql`SELECT tenure.await_items(${uuids(ids)}, ${channel})`

export const forgetWaits = (
  sql: SqlClient.SqlClient,
  ids: ReadonlyArray<string>,
  channel: string
) => sql`SELECT tenure.forget_items(${uuids(ids)}, ${channel})`

export const notifySettled = (sql: SqlClient.SqlClient, ids: ReadonlyArray<string>) =>
  sql`SELECT tenure.notify_settled(${uuids(ids)})`

export interface ProgressReport {
  readonly id: string
  readonly attempt: number
  /** Grows with each report of the attempt. */
  readonly number: number
  /** Encoded JSON. */
  readonly value: string
}

/** Only those are returned whose attempt holds no claim. */
export const reportProgress = (
  sql: SqlClient.SqlClient,
  reports: ReadonlyArray<ProgressReport>
) => sql<{ readonly id: string; readonly attempt: number }>`
  SELECT id, attempt
    FROM tenure.report_progress(
      ${uuids(reports.map((one) => one.id))}, ${ints(reports.map((one) => one.attempt))},
      ${ints(reports.map((one) => one.number))}, ${texts(reports.map((one) => one.value))})`

export interface ProgressRow {
  readonly id: string
  readonly attempt: number
  readonly number: number
  readonly value: unknown
}

/** Only of those items that have a later report than the one that is known. */
export const readProgress = (
  sql: SqlClient.SqlClient,
  known: ReadonlyArray<Omit<ProgressRow, "value">>
) => sql<ProgressRow>`
  SELECT id, attempt, number, value
    FROM tenure.item_progress(
      ${uuids(known.map((one) => one.id))}, ${ints(known.map((one) => one.attempt))},
      ${ints(known.map((one) => one.number))})`

export const watchProgress = (
  sql: SqlClient.SqlClient,
  ids: ReadonlyArray<string>,
  channel: string
) => sql`SELECT tenure.watch_progress(${uuids(ids)}, ${channel})`

export const forgetProgress = (
  sql: SqlClient.SqlClient,
  ids: ReadonlyArray<string>,
  channel: string
) => sql`SELECT tenure.forget_progress(${uuids(ids)}, ${channel})`

export const notifyProgress = (sql: SqlClient.SqlClient, ids: ReadonlyArray<string>) =>
  sql`SELECT tenure.notify_progress(${uuids(ids)})`

/** The item of a notification about progress. */
export const progressOf = (payload: string): string | undefined =>
  payload.startsWith(progressMark) ? payload.slice(progressMark.length) : undefined

const progressMark = "progress "

export const workChannel = "tenure_work"

/** The channel on which one process is told of its cancellations and of results it waits for. */
export const processChannel = (id: string): string => `tenure_${id.replaceAll("-", "")}`

export const notifyWork = (sql: SqlClient.SqlClient, queueIds: ReadonlyArray<number>) =>
  sql`SELECT pg_notify(${workChannel}, q::text) FROM unnest(${ints(queueIds)}) q`

export const claimsOf = (
  sql: SqlClient.SqlClient,
  executorId: string,
  olderThanMillis: number,
  claimsMax: number
) => sql<{ readonly id: string; readonly attempt: number; readonly lane_id: number }>`
  SELECT id, attempt, lane_id
    FROM tenure.claims_of(
      ${PgTypes.uuid(executorId)}, make_interval(secs => ${PgTypes.float8(olderThanMillis / 1000)}),
      ${PgTypes.int4(claimsMax)})`

export const retain = (sql: SqlClient.SqlClient, keepMillis: number) =>
  Effect.map(
    sql<{
      readonly made: number
      readonly emptied: number
      readonly dropped: number
      /** Items that lived on while the rest of their bucket was dropped. */
      readonly moved: number
      readonly merged: number
      /** Events of the audit. */
      readonly forgotten: number
      readonly blocked: number
    }>`
      SELECT made, emptied, dropped, moved, merged, forgotten, blocked
        FROM tenure.retain(make_interval(secs => ${PgTypes.float8(keepMillis / 1000)}))`,
    ([row]) =>
      row ?? { made: 0, emptied: 0, dropped: 0, moved: 0, merged: 0, forgotten: 0, blocked: 0 }
  )
