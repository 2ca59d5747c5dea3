/** All SQL of settling quarantined items. No policy: what is tried, when and with what is decided by the callers. */
import { PgTypes } from "@effect/sql-pg"
import { Effect } from "effect"
import type { SqlClient } from "effect/sql"
import { ints } from "../database/Parameters.ts"

export type Limit = "MAX_RECOVERY_ATTEMPTS_EXCEEDED" | "EXECUTION_RECOVERY_EXHAUSTED"

/** Declares that this application settles the queue's items. Fails with TN011 for another's queue. */
export const settlingQueue = (sql: SqlClient.SqlClient, queue: string, application: string) =>
  Effect.map(
    sql<{ readonly id: number }>`SELECT tenure.settling_queue(${queue}, ${application}) AS id`,
    ([row]) => row?.id ?? 0
  )

export interface Taken {
  readonly item_id: string
  readonly queue_id: number
  /** Of the item, should this try be one. */
  readonly failures: number
}

/** One due item of each queue, of so many queues, with the try charged already; and when the next is due. */
export const takeSettlements = (
  sql: SqlClient.SqlClient,
  queueIds: ReadonlyArray<number>,
  pauses: { readonly firstMillis: number; readonly longestMillis: number },
  takenMax: number
) =>
  Effect.map(
    sql<Taken | { readonly item_id: null; readonly next_due_ms: number }>`
      SELECT item_id, queue_id, failures, next_due_ms
        FROM tenure.take_settlements(
          ${ints(queueIds)}, make_interval(secs => ${PgTypes.float8(pauses.firstMillis / 1000)}),
          make_interval(secs => ${PgTypes.float8(pauses.longestMillis / 1000)}), ${PgTypes.int4(takenMax)})`,
    (rows) => {
      const taken: Array<Taken> = []
      let nextDueMillis = Infinity
      for (const row of rows) {
        if (row.item_id === null) nextDueMillis = row.next_due_ms
        else taken.push(row)
      }
      return { taken, nextDueMillis }
    }
  )

export interface QuarantinedRow {
  readonly id: string
  readonly payload: unknown
  readonly key: string | null
  readonly executions: number
  readonly reason: Limit
  readonly quarantined_at: Date
}

/** Locks the item until the transaction ends. Nothing, when it is not to be settled now. */
export const beginSettlement = (sql: SqlClient.SqlClient, item: string) =>
  Effect.map(
    sql<QuarantinedRow>`
      SELECT ${PgTypes.uuid(item)}::uuid AS id, payload, key, executions, reason, quarantined_at
        FROM tenure.begin_settlement(${PgTypes.uuid(item)})`,
    ([row]) => row
  )

export const endSettlement = (sql: SqlClient.SqlClient, item: string) =>
  sql`SELECT tenure.end_settlement(${PgTypes.uuid(item)})`

/** Whether it really has failed: the answer to a COMMIT may have been lost. */
export const settlementFailed = (sql: SqlClient.SqlClient, item: string, errorCode: string) =>
  Effect.map(
    sql<{ readonly open: boolean }>`
      SELECT tenure.settlement_failed(${PgTypes.uuid(item)}, ${errorCode}) AS open`,
    ([row]) => row?.open ?? false
  )

export interface ListedQuarantine {
  readonly item_id: string
  readonly queue: string
  readonly state: "open" | "settled"
  readonly quarantined_at: Date
  readonly executions: number
  readonly reason: Limit
  readonly failures: number
  readonly last_error_code: string | null
  readonly settled_at: Date | null
  readonly settled_by: string | null
}

/** Open ones first, then by age. */
export const listQuarantine = (
  sql: SqlClient.SqlClient,
  rowsMax: number,
  item: string | null = null
) =>
  sql<ListedQuarantine>`
    SELECT q.item_id, n.name AS queue, q.state, q.quarantined_at, q.executions, q.reason, q.failures,
           q.last_error_code, q.settled_at, q.settled_by
      FROM tenure.quarantine q JOIN tenure.queue n ON n.id = q.queue_id
     WHERE ${PgTypes.uuid(item)}::uuid IS NULL OR q.item_id = ${PgTypes.uuid(item)}
     ORDER BY q.state, q.quarantined_at, q.item_id LIMIT ${PgTypes.int4(rowsMax)}`

/** `closed`, `settled` when it was before, `busy` while it is being settled, or `unknown`. */
export const closeQuarantine = (sql: SqlClient.SqlClient, item: string) =>
  Effect.map(
    sql<{ readonly answer: string }>`
      SELECT tenure.close_quarantine(${PgTypes.uuid(item)}) AS answer`,
    ([row]) => row?.answer ?? "unknown"
  )

/** `available`, `busy`, `unknown`, or the state of an item that is not in quarantine. */
export const retryQuarantined = (sql: SqlClient.SqlClient, item: string) =>
  Effect.map(
    sql<{ readonly answer: string }>`
      SELECT tenure.retry_quarantined(${PgTypes.uuid(item)}) AS answer`,
    ([row]) => row?.answer ?? "unknown"
  )
