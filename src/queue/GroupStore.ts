/** All SQL of groups, but for what members do: that is in the database. No policy. */
import { PgTypes } from "@effect/sql-pg"
import { Effect } from "effect"
import type { SqlClient } from "effect/sql"

export interface NewCallback {
  readonly queue: string
  /** Encoded JSON: an object without the field that the database adds. */
  readonly payload: string
  readonly priority: number
  readonly key: string | null
}

export const makeGroup = (
  sql: SqlClient.SqlClient,
  callback: NewCallback | undefined,
  trace: string | null
) =>
  Effect.map(
    sql<{ readonly id: string }>`
      SELECT tenure.make_group(
        ${PgTypes.text(callback?.queue ?? null)}, ${PgTypes.text(callback?.payload ?? null)}::json,
        ${PgTypes.int4(callback?.priority ?? null)}, ${PgTypes.text(callback?.key ?? null)},
        ${PgTypes.text(trace)}) AS id`,
    ([row]) => row?.id ?? ""
  )

/** `sealed`, also when it was before, or `unknown`. */
export const sealGroup = (sql: SqlClient.SqlClient, id: string) =>
  Effect.map(
    sql<{ readonly answer: string }>`SELECT tenure.seal_group(${PgTypes.uuid(id)}) AS answer`,
    ([row]) => row?.answer ?? "unknown"
  )

export interface GroupRow {
  readonly members: number
  readonly completed: number
  readonly failed: number
  readonly cancelled: number
  readonly is_sealed: boolean
  readonly ended_at: Date | null
  readonly callback_id: string | null
}

export const readGroup = (sql: SqlClient.SqlClient, id: string) =>
  Effect.map(
    sql<GroupRow>`
      SELECT members, completed, failed, cancelled, sealed_at IS NOT NULL AS is_sealed, ended_at, callback_id
        FROM tenure.item_group WHERE id = ${PgTypes.uuid(id)}`,
    ([row]) => row
  )
