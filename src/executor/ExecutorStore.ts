/**
 * All SQL of the registry of executors. No policy: what an answer means is decided by the callers.
 * Every function takes the pool it runs on, because a renewal must never queue behind business.
 */
import { Effect } from "effect"
import type { SqlClient } from "effect/sql"

export interface Registration {
  readonly executorId: string
  readonly application: string
  readonly version: string
  readonly validityMillis: number
  readonly host: string
  readonly pid: number
}

export const registerExecutor = (sql: SqlClient.SqlClient, executor: Registration) => sql`
  SELECT tenure.register_executor(
    ${executor.executorId}::uuid, ${executor.application}, ${executor.version},
    make_interval(secs => ${executor.validityMillis / 1000}::float8), ${executor.host}, ${executor.pid}::int)`

/** `renewed`, or why not: `expired`, `unknown`, or the state the row is in. */
export const renewLease = (sql: SqlClient.SqlClient, executorId: string, validityMillis: number) =>
  Effect.map(
    sql<{ readonly answer: string }>`
      SELECT tenure.renew_lease(
        ${executorId}::uuid, make_interval(secs => ${validityMillis / 1000}::float8)) AS answer`,
    (rows) => rows[0]?.answer ?? "unknown"
  )

/** `active`, `expired`, `unknown`, or the state the row is in. */
export const leaseState = (sql: SqlClient.SqlClient, executorId: string) =>
  Effect.map(
    sql<{ readonly answer: string }>`SELECT tenure.lease_state(${executorId}::uuid) AS answer`,
    (rows) => rows[0]?.answer ?? "unknown"
  )

export const releaseExecutor = (sql: SqlClient.SqlClient, executorId: string) =>
  Effect.map(
    sql<{ readonly state: string; readonly handed_back: number }>`
      SELECT state, handed_back FROM tenure.release_executor(${executorId}::uuid)`,
    (rows) => ({ state: rows[0]?.state ?? "unknown", handedBack: rows[0]?.handed_back ?? 0 })
  )

export interface ServerFacts {
  readonly version: number
  readonly isInRecovery: boolean
  readonly isReadOnly: boolean
  readonly preparedTransactionsMax: number
  /** What the session says its identity is: a pooler drops it, or gives another client's. */
  readonly executorId: string | null
  readonly backendPid: number
  readonly mayClaim: boolean
}

export const serverFacts = (sql: SqlClient.SqlClient) =>
  Effect.map(
    sql<ServerFacts>`
      SELECT current_setting('server_version_num')::int AS "version",
             pg_is_in_recovery() AS "isInRecovery",
             current_setting('transaction_read_only')::boolean AS "isReadOnly",
             current_setting('max_prepared_transactions')::int AS "preparedTransactionsMax",
             nullif(current_setting('tenure.executor_id', true), '') AS "executorId",
             pg_backend_pid() AS "backendPid",
             coalesce(has_function_privilege(
               to_regprocedure('tenure.renew_lease(uuid, interval)')::oid, 'EXECUTE'), false) AS "mayClaim"`,
    (rows) => rows[0]
  )

export const unfencedTables = (sql: SqlClient.SqlClient) =>
  Effect.map(sql<{ readonly name: string }>`SELECT name FROM tenure.unfenced_tables()`, (rows) =>
    rows.map((row) => row.name)
  )

export interface ListedExecutor {
  readonly application_name: string
  readonly application_version: string
  readonly executor_id: string
  readonly state: string
  readonly heartbeat_at: Date
  readonly expires_at: Date
  readonly revoked_at: Date | null
  readonly host: string | null
  readonly pid: number | null
  readonly claimed: number
}

/** Newest heartbeat first, with what each still holds. */
export const listExecutors = (sql: SqlClient.SqlClient, executorsMax: number) =>
  sql<ListedExecutor>`
    SELECT e.application_name, e.application_version, e.id AS executor_id,
           CASE WHEN e.state = 'active' AND e.expires_at <= (SELECT tenure.clock())
                THEN 'expired' ELSE e.state END AS state,
           e.heartbeat_at, e.expires_at, e.revoked_at, e.host, e.pid,
           (SELECT count(*)::int FROM tenure.claimed c
             WHERE c.queue_id = ANY(ARRAY(SELECT q.id FROM tenure.queue q)) AND c.owner = e.id) AS claimed
      FROM tenure.executor e
     ORDER BY e.heartbeat_at DESC, e.id LIMIT ${executorsMax}`

export interface StuckWork {
  readonly queue: string
  readonly executor_id: string
  readonly application_name: string | null
  readonly application_version: string | null
  readonly state: string
  readonly items: number
  readonly oldest_claimed_at: Date
}

/** Claimed work of owners that hold no valid lease, with what the registry knows of them. */
export const listStuckWork = (sql: SqlClient.SqlClient, rowsMax: number) =>
  sql<StuckWork>`
    SELECT q.name AS queue, c.owner AS executor_id, e.application_name, e.application_version,
           CASE WHEN e.id IS NULL THEN 'unknown'
                WHEN e.state = 'active' THEN 'expired' ELSE e.state END AS state,
           count(*)::int AS items, min(c.claimed_at) AS oldest_claimed_at
      FROM tenure.claimed c
      JOIN tenure.queue q ON q.id = c.queue_id
      LEFT JOIN tenure.executor e ON e.id = c.owner
     WHERE e.id IS NULL OR e.state <> 'active' OR e.expires_at <= (SELECT tenure.clock())
     GROUP BY 1, 2, 3, 4, 5 ORDER BY oldest_claimed_at LIMIT ${rowsMax}`
