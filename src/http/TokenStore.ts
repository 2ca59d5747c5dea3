/** All SQL of tokens, as one function for each statement. Secrets never come here, only their hashes. */
import { PgTypes } from "@effect/sql-pg"
import { Effect } from "effect"
import type { SqlClient } from "effect/sql"
import type { Role } from "./Token.ts"

export const createToken = (
  sql: SqlClient.SqlClient,
  token: {
    readonly role: Role
    readonly name: string
    /** Hexadecimal. */
    readonly hash: string
    readonly validMillis: number | null
  }
) =>
  Effect.map(
    sql<{ readonly id: string }>`
      SELECT tenure.create_token(
        ${token.role}, ${token.name}, decode(${token.hash}, 'hex'),
        make_interval(secs => ${PgTypes.float8(token.validMillis === null ? null : token.validMillis / 1000)})) AS id`,
    ([row]) => row?.id ?? ""
  )

/** `unknown` also for what is no id at all. */
export const revokeToken = (sql: SqlClient.SqlClient, id: string) =>
  Effect.map(
    sql<{ readonly answer: "revoked" | "already" | "unknown" }>`
      SELECT tenure.revoke_token(${PgTypes.uuid(id)}) AS answer`,
    ([row]) => row?.answer ?? "unknown"
  )

export interface TokenRow {
  readonly id: string
  readonly role: Role
  readonly name: string
  readonly state: "usable" | "revoked" | "expired"
  readonly created_at: Date
  readonly created_by: string
  readonly expires_at: Date | null
  readonly revoked_at: Date | null
  readonly last_used_at: Date | null
}

/** Newest first. */
export const listTokens = (sql: SqlClient.SqlClient, max: number) => sql<TokenRow>`
  SELECT t.id, t.role, t.name,
         CASE WHEN t.revoked_at IS NOT NULL THEN 'revoked'
              WHEN t.expires_at <= (SELECT tenure.clock()) THEN 'expired' ELSE 'usable' END AS state,
         t.created_at, t.created_by, t.expires_at, t.revoked_at, t.last_used_at
    FROM tenure.token t
   ORDER BY t.created_at DESC, t.id LIMIT ${PgTypes.int4(max)}`

export interface Found {
  readonly id: string
  readonly role: Role
  readonly name: string
  readonly state: TokenRow["state"]
}

/** Nothing for a secret that nobody has ever made. */
export const authenticate = (sql: SqlClient.SqlClient, hash: string) =>
  Effect.map(
    sql<Found>`SELECT id, role, name, state FROM tenure.authenticate(decode(${hash}, 'hex'))`,
    ([row]): Found | undefined => row
  )

/** Whether a token that was good is good still. */
export const isUsable = (sql: SqlClient.SqlClient, id: string) =>
  Effect.map(
    sql<{ readonly usable: boolean }>`
      SELECT t.revoked_at IS NULL AND (t.expires_at > (SELECT tenure.clock())) IS NOT FALSE AS usable
        FROM tenure.token t WHERE t.id = ${PgTypes.uuid(id)}`,
    ([row]) => row?.usable === true
  )
