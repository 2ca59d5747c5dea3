/** The SQL of what people ask about items, queues and what was done to them. Reads only; no payload but by name. */
import { PgTypes } from "@effect/sql-pg"
import { Effect } from "effect"
import type { SqlClient } from "effect/sql"

/** In a durable wait an item is sleeping or waiting, and waking in the moment between that and available. */
export type ItemState =
  | "available"
  | "leased"
  | "delayed"
  | "sleeping"
  | "waiting"
  | "waking"
  | "completed"
  | "failed"
  | "cancelled"

export interface ItemFilter {
  readonly queue: string | null
  readonly state: string | null
  readonly key: string | null
  /** Handed in at least, or at most, so long ago. */
  readonly olderThanMillis: number | null
  readonly newerThanMillis: number | null
}

export interface ItemRow {
  readonly id: string
  readonly queue: string
  readonly state: string
  readonly priority: number
  readonly key: string | null
  readonly attempt: number | null
  readonly failures: number | null
  readonly losses: number | null
  readonly owner: string | null
  readonly reason: string | null
  readonly enqueued_at: Date
  readonly deadline_at: Date | null
  readonly due_at: Date | null
  readonly claimed_at: Date | null
  readonly finished_at: Date | null
}

const ago = (sql: SqlClient.SqlClient, millis: number | null) =>
  sql`(tenure.clock() - make_interval(secs => ${PgTypes.float8(millis === null ? null : millis / 1000)}))`

/** Newest first: of the next `lookedMax` items those that match, and where the next page begins; null at the end. */
export const listItems = (
  sql: SqlClient.SqlClient,
  page: { readonly filter: ItemFilter; readonly after: string | null; readonly lookedMax: number }
) =>
  Effect.map(
    sql<ItemRow & { readonly next_cursor: string | null }>`
      SELECT id, queue, state, priority, key, attempt, failures, losses, owner, reason, enqueued_at,
             deadline_at, due_at, claimed_at, finished_at, next_cursor
        FROM tenure.list_items(
          ${PgTypes.text(page.filter.queue)}, ${PgTypes.text(page.filter.state)}, ${PgTypes.text(page.filter.key)},
          ${ago(sql, page.filter.newerThanMillis)}, ${ago(sql, page.filter.olderThanMillis)},
          ${PgTypes.text(page.after)}, ${PgTypes.int4(page.lookedMax)})`,
    (rows) => ({
      rows: rows.filter((row) => row.next_cursor === null) as ReadonlyArray<ItemRow>,
      next: rows.at(-1)?.next_cursor ?? null
    })
  )

export interface ItemDetail extends ItemRow {
  readonly idempotency_key: string | null
  readonly stuck: number | null
  /** Whose version has started it. */
  readonly version: string | null
  readonly suspect: boolean | null
}

export const readItem = (sql: SqlClient.SqlClient, id: string) =>
  Effect.map(
    sql<ItemDetail>`
      SELECT id, queue, state, priority, key, idempotency_key, attempt, failures, losses, stuck, version, suspect,
             owner, reason, enqueued_at, deadline_at, due_at, claimed_at, finished_at
        FROM tenure.item_rows(ARRAY[${PgTypes.uuid(id)}]::uuid[])`,
    ([row]) => row
  )

/** Of one item, to be shown only to who asks for it. */
export const readPayload = (sql: SqlClient.SqlClient, id: string) =>
  Effect.map(
    sql<{ readonly payload: unknown; readonly result: unknown }>`
      SELECT i.payload, (SELECT d.result FROM tenure.done d WHERE d.id = i.id) AS result
        FROM tenure.item i WHERE i.id = ${PgTypes.uuid(id)}`,
    ([row]) => row
  )

export interface CheckpointRow {
  readonly name: string
  readonly attempt: number
  readonly written_at: Date
}

/** Names, never values. */
export const readCheckpointNames = (sql: SqlClient.SqlClient, id: string, rowsMax: number) =>
  sql<CheckpointRow>`
    SELECT name, attempt, written_at FROM tenure.step
     WHERE item_id = ${PgTypes.uuid(id)} ORDER BY written_at, name LIMIT ${PgTypes.int4(rowsMax)}`

export interface WaitRow {
  readonly application_name: string | null
  readonly version: string | null
  readonly suspect: boolean
  readonly executors: number
  readonly executors_of_version: number
  readonly paused_at: Date | null
  readonly global_limit: number | null
  readonly is_full: boolean
  readonly per_key_limit: number | null
  readonly is_key_full: boolean
  readonly is_rate_used: boolean
  readonly is_key_rate_used: boolean
  readonly last_claim_at: Date | null
  /** By the database's clock. */
  readonly observed_at: Date
}

/** Of an item that is available; nothing otherwise. */
export const readWaitFacts = (sql: SqlClient.SqlClient, id: string) =>
  Effect.map(
    sql<WaitRow>`
      SELECT application_name, version, suspect, executors, executors_of_version, paused_at, global_limit, is_full,
             per_key_limit, is_key_full, is_rate_used, is_key_rate_used, last_claim_at, observed_at
        FROM tenure.wait_facts(${PgTypes.uuid(id)})`,
    ([row]) => row
  )

export interface QueueRow {
  readonly queue: string
  readonly application_name: string | null
  /** The queue's own row, its limits among others. */
  readonly settings: Readonly<Record<string, unknown>>
  readonly waiting: number
  readonly delayed: number
  /** Not all delayed items were looked at: `delayed` is a lower bound. */
  readonly delayed_is_more: boolean
  /** In a durable wait; as of `delayed`. */
  readonly parked: number
  readonly parked_is_more: boolean
  readonly running: number
  readonly failed: number
  readonly oldest_waiting_at: Date | null
  readonly observed_at: Date
}

/** Every queue; no count goes beyond `countedMax`. */
export const readQueues = (sql: SqlClient.SqlClient, countedMax: number) =>
  sql<QueueRow>`
    SELECT queue, application_name, settings, waiting, delayed, delayed_is_more, parked, parked_is_more,
           running, failed, oldest_waiting_at, observed_at
      FROM tenure.queue_overview(${PgTypes.int4(countedMax)})`

export interface AuditRow {
  readonly id: bigint
  readonly at: Date
  readonly event: string
  readonly item_id: string | null
  readonly queue: string | null
  readonly actor: string
  readonly application: string
  readonly detail: unknown
}

export interface AuditFilter {
  /** All of it, or what stands before a point: `dead_letter`, `dead_letter.purged`. */
  readonly event: string | null
  readonly item: string | null
  readonly queue: string | null
  readonly newerThanMillis: number | null
}

/** Newest first, before an event. */
export const readAudit = (
  sql: SqlClient.SqlClient,
  filter: AuditFilter,
  before: bigint | null,
  rowsMax: number
) =>
  sql<AuditRow>`
    SELECT id, at, event, item_id, queue, actor, application, detail
      FROM tenure.audit_events(
        ${PgTypes.text(filter.event)}, ${PgTypes.uuid(filter.item)}, ${PgTypes.text(filter.queue)},
        ${ago(sql, filter.newerThanMillis)}, ${PgTypes.int8(before)}, ${PgTypes.int4(rowsMax)})`
