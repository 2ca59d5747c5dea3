/** All SQL of taking over. No policy: whom to revoke, when, and what to do about a blocked barrier is decided by the scanner. */
import { PgTypes } from "@effect/sql-pg"
import { Effect } from "effect"
import type { SqlClient } from "effect/sql"
import { texts } from "../database/Parameters.ts"

export interface Recoverable {
  readonly id: string
  readonly state: "active" | "revoking" | "revoked" | "released"
}

/** Expired or half revoked; of these versions only. */
export const recoverableExecutors = (
  sql: SqlClient.SqlClient,
  application: string,
  versions: ReadonlyArray<string>,
  executorsMax: number
) => sql<Recoverable>`
  SELECT id, state
    FROM tenure.recoverable_executors(
      ${application}, ${texts(versions)}, ${PgTypes.int4(executorsMax)})`

/** Revoked or released, and yet with claims. Reads every claim there is. */
export const strandedExecutors = (
  sql: SqlClient.SqlClient,
  application: string,
  versions: ReadonlyArray<string>,
  executorsMax: number
) => sql<Recoverable>`
  SELECT id, state
    FROM tenure.stranded_executors(
      ${application}, ${texts(versions)}, ${PgTypes.int4(executorsMax)})`

/** First step, committed alone. Answers the state the executor is in then. */
export const markRevoking = (sql: SqlClient.SqlClient, executorId: string) =>
  Effect.map(
    sql<{ readonly state: string }>`
      SELECT tenure.mark_revoking(${PgTypes.uuid(executorId)}) AS state`,
    ([row]) => row?.state ?? "unknown"
  )

export interface Revoked {
  readonly state: string
  readonly requeued: number
  readonly cancelled: number
  readonly exhausted: ReadonlyArray<string>
  readonly settled: ReadonlyArray<string>
}

/** Second step: the barrier, the state and the hand-back in one transaction. */
export const revoke = (
  sql: SqlClient.SqlClient,
  executorId: string,
  backoffMillis: number,
  graceMillis: number
) =>
  Effect.map(
    sql<Revoked>`
      SELECT state, requeued, cancelled, exhausted::text[] AS exhausted, settled::text[] AS settled
        FROM tenure.revoke(
          ${PgTypes.uuid(executorId)},
          make_interval(secs => ${PgTypes.float8(backoffMillis / 1000)}),
          make_interval(secs => ${PgTypes.float8(graceMillis / 1000)}))`,
    ([row]): Revoked =>
      row ?? { state: "unknown", requeued: 0, cancelled: 0, exhausted: [], settled: [] }
  )

/** Puts back wakes that were begun longer ago than that and never finished. Tells how many. */
export const sweepStaleClaims = (
  sql: SqlClient.SqlClient,
  thresholdMillis: number,
  sweptMax: number
) =>
  Effect.map(
    sql<{ readonly swept: number }>`
      SELECT tenure.sweep_stale_claims(
               make_interval(secs => ${PgTypes.float8(thresholdMillis / 1000)}),
               ${PgTypes.int4(sweptMax)}) AS swept`,
    ([row]) => row?.swept ?? 0
  )

export const backendPid = (sql: SqlClient.SqlClient) =>
  Effect.map(
    sql<{ readonly pid: number }>`SELECT pg_backend_pid() AS pid`,
    ([row]) => row?.pid ?? 0
  )

/** The sessions of the executor, and those that hold up `blockedPid`. Tells how many were ended. */
export const terminateSessions = (
  sql: SqlClient.SqlClient,
  executorId: string,
  blockedPid: number | null
) =>
  Effect.map(
    sql<{ readonly ended: number }>`
      SELECT tenure.terminate_sessions(${PgTypes.uuid(executorId)}, ${PgTypes.int4(blockedPid)}) AS ended`,
    ([row]) => row?.ended ?? 0
  )
