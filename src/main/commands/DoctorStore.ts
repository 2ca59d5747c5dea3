/**
 * What `tenure doctor` asks the database. Reads only. Every answer is bounded, and nothing reads all of
 * what waits or is over: work is looked at by the first of each lane, claims by one probe of an index
 * for each owner.
 */
import { PgTypes } from "@effect/sql-pg"
import { Effect } from "effect"
import type { SqlClient } from "effect/sql"
import { texts } from "../../database/Parameters.ts"

const rowsMax = 100

/** Of what is counted row by row. */
const countMax = 1000

const seconds = (millis: number) => PgTypes.float8(millis / 1000)

export interface ServerSettings {
  readonly serverVersion: string
  readonly database: string
  readonly fsync: string
  readonly synchronousCommit: string
  readonly autovacuum: string
  readonly trackCounts: string
  readonly connectionsMax: number
  /** Kept for administrators. */
  readonly connectionsReserved: number
  readonly connectionsUsed: number
  /** Undefined when there is none: of the role of this session, and of the database. */
  readonly roleConnectionsMax: number | null
  readonly databaseConnectionsMax: number | null
}

export const serverSettings = (sql: SqlClient.SqlClient) =>
  Effect.map(
    sql<ServerSettings>`
      SELECT current_setting('server_version') AS "serverVersion",
             current_database()::text AS "database",
             current_setting('fsync') AS "fsync",
             current_setting('synchronous_commit') AS "synchronousCommit",
             current_setting('autovacuum') AS "autovacuum",
             current_setting('track_counts') AS "trackCounts",
             current_setting('max_connections')::int AS "connectionsMax",
             current_setting('superuser_reserved_connections')::int
               + coalesce(current_setting('reserved_connections', true)::int, 0) AS "connectionsReserved",
             (SELECT coalesce(sum(d.numbackends), 0)::int FROM pg_stat_database d) AS "connectionsUsed",
             (SELECT nullif(r.rolconnlimit, -1) FROM pg_roles r
               WHERE r.rolname = session_user AND NOT r.rolsuper) AS "roleConnectionsMax",
             (SELECT nullif(d.datconnlimit, -1) FROM pg_database d
               WHERE d.datname = current_database()) AS "databaseConnectionsMax"`,
    ([row]) => row
  )

/** What a session gets that brings no settings of its own: a client's, or one of another program. */
export interface SessionDefault {
  readonly name: string
  /** In the setting's own unit. */
  readonly value: string
  readonly source: string
}

const judgedSettings = [
  "default_transaction_isolation",
  "default_transaction_read_only",
  "fsync",
  "idle_session_timeout",
  "synchronous_commit"
]

export const sessionDefaults = (plain: SqlClient.SqlClient) =>
  plain<SessionDefault>`
    SELECT name, setting AS value, source FROM pg_settings
     WHERE name = ANY(${texts(judgedSettings)}) AND source <> 'default' ORDER BY name`

/** Of a session with the settings of a worker's, what the server says that it has. */
export const workerSession = (own: SqlClient.SqlClient) =>
  Effect.map(
    own<{ readonly checkMillis: number; readonly transactionMillis: number }>`
      SELECT (SELECT setting::int FROM pg_settings WHERE name = 'client_connection_check_interval')
               AS "checkMillis",
             coalesce((SELECT setting::int FROM pg_settings WHERE name = 'transaction_timeout'), 0)
               AS "transactionMillis"`,
    ([row]) => row ?? { checkMillis: 0, transactionMillis: 0 }
  )

export interface PreparedTransaction {
  readonly gid: string
  readonly owner: string
  readonly prepared_at: Date
}

/** They hold their locks after the session is gone, and so hold up a revocation for ever. */
export const preparedTransactions = (sql: SqlClient.SqlClient) =>
  sql<PreparedTransaction>`
    SELECT gid, owner::text AS owner, prepared AS prepared_at
      FROM pg_prepared_xacts
     WHERE database = current_database()
     ORDER BY prepared, gid LIMIT ${rowsMax}`

/** What a worker calls, and nobody else may: with one of these the lease is open to anybody. */
const workerFunctions = [
  "register_executor",
  "renew_lease",
  "mark_revoking",
  "revoke",
  "release_executor",
  "claim",
  "settle",
  "complete_item",
  "checkpoint"
]

export interface Grant {
  /** As `GRANT .. ON` has it. */
  readonly object: string
  readonly grantee: string
  readonly privileges: ReadonlyArray<string>
}

/**
 * Rights by which a worker or a client could go round the functions: writing our tables, making others
 * in the schema, or calling what only the other role may.
 */
export const wrongGrants = (sql: SqlClient.SqlClient) =>
  sql<Grant>`
    WITH granted AS (
      SELECT format('TABLE %I.%I', 'tenure', c.relname) AS object, a.grantee, a.privilege_type, c.relowner AS owner
        FROM pg_class c
       CROSS JOIN LATERAL (
         SELECT x.grantee, x.privilege_type FROM aclexplode(c.relacl) x
         UNION SELECT x.grantee, x.privilege_type
           FROM pg_attribute t CROSS JOIN LATERAL aclexplode(t.attacl) x WHERE t.attrelid = c.oid) a
       WHERE c.relnamespace = 'tenure'::regnamespace AND c.relkind IN ('r', 'p')
         AND a.privilege_type IN ('INSERT', 'UPDATE', 'DELETE', 'TRUNCATE', 'TRIGGER')
      UNION ALL
      SELECT 'SCHEMA tenure', a.grantee, a.privilege_type, n.nspowner
        FROM pg_namespace n CROSS JOIN LATERAL aclexplode(n.nspacl) a
       WHERE n.nspname = 'tenure' AND a.privilege_type = 'CREATE'
      UNION ALL
      SELECT format('FUNCTION %s', p.oid::regprocedure), a.grantee, a.privilege_type, p.proowner
        FROM pg_proc p
       CROSS JOIN LATERAL aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a
        LEFT JOIN pg_roles api ON api.rolname = 'tenure_api'
       WHERE p.pronamespace = 'tenure'::regnamespace
         AND (a.grantee = 0 OR a.grantee = api.oid AND p.proname = ANY(${texts(workerFunctions)}))
    )
    SELECT g.object, coalesce(quote_ident(r.rolname), 'PUBLIC') AS grantee,
           array_agg(DISTINCT g.privilege_type ORDER BY g.privilege_type)::text[] AS privileges
      FROM granted g
      LEFT JOIN pg_roles r ON r.oid = g.grantee
     WHERE g.grantee <> g.owner
       AND (g.grantee = 0 OR pg_has_role(session_user, g.grantee, 'USAGE') OR EXISTS (
         SELECT FROM pg_roles ours WHERE ours.rolname IN ('tenure_worker', 'tenure_api')
            AND (pg_has_role(g.grantee, ours.oid, 'MEMBER') OR pg_has_role(ours.oid, g.grantee, 'USAGE'))))
     GROUP BY 1, 2 ORDER BY 1, 2 LIMIT ${rowsMax}`

/** Of the functions that every worker calls, those that its role may not: it was made after them. */
export const missingGrants = (sql: SqlClient.SqlClient) =>
  Effect.map(
    sql<{ readonly name: string }>`
      SELECT format('%s', p.oid::regprocedure) AS name
        FROM pg_proc p JOIN pg_roles worker ON worker.rolname = 'tenure_worker'
       WHERE p.pronamespace = 'tenure'::regnamespace AND p.proname = ANY(${texts(workerFunctions)})
         AND NOT (has_function_privilege(worker.oid, p.oid, 'EXECUTE')
                  AND has_schema_privilege(worker.oid, p.pronamespace, 'USAGE'))
       ORDER BY 1 LIMIT ${rowsMax}`,
    (rows) => rows.map((row) => row.name)
  )

/**
 * Tables without a fence that a worker may write. A session of a worker sees its own; of any other role,
 * those that this role and some worker's login may write.
 */
export const unfencedForWorkers = (sql: SqlClient.SqlClient) =>
  Effect.map(
    sql<{ readonly name: string }>`
      WITH worker AS (
        SELECT r.oid FROM pg_roles r JOIN pg_roles w ON w.rolname = 'tenure_worker'
         WHERE NOT r.rolsuper AND pg_has_role(r.oid, w.oid, 'USAGE')
      )
      SELECT u.name FROM tenure.unfenced_tables() u
       WHERE u.name LIKE 'tenure.%'
          OR NOT EXISTS (SELECT FROM worker)
          OR EXISTS (
            SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace CROSS JOIN worker w
             WHERE format('%I.%I', n.nspname, c.relname) = u.name
               AND (has_table_privilege(w.oid, c.oid, 'DELETE, TRUNCATE')
                    OR has_any_column_privilege(w.oid, c.oid, 'INSERT, UPDATE')))
       ORDER BY 1 LIMIT ${rowsMax}`,
    (rows) => rows.map((row) => row.name)
  )

/** Our tables that autovacuum leaves out. */
export const unvacuumedTables = (sql: SqlClient.SqlClient) =>
  Effect.map(
    sql<{ readonly name: string }>`
      SELECT format('%I.%I', n.nspname, c.relname) AS name
        FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
       CROSS JOIN LATERAL pg_options_to_table(c.reloptions) o
       WHERE n.nspname = 'tenure' AND c.relkind = 'r'
         AND o.option_name = 'autovacuum_enabled' AND NOT o.option_value::boolean
       ORDER BY 1 LIMIT ${rowsMax}`,
    (rows) => rows.map((row) => row.name)
  )

export interface Snapshot {
  readonly pid: number
  readonly role: string
  readonly application: string
  readonly state: string
  readonly ageMillis: number
}

/**
 * Open transactions that hold back the horizon: no dead row that they could see is removed. The text of
 * a statement is not read: it may hold somebody's data.
 */
export const longSnapshots = (sql: SqlClient.SqlClient, olderThanMillis: number) =>
  sql<Snapshot>`
    SELECT a.pid, coalesce(a.usename::text, '') AS role, a.application_name AS application,
           coalesce(a.state, 'unknown') AS state,
           (extract(epoch FROM now.at - a.xact_start) * 1000)::float8 AS "ageMillis"
      FROM pg_stat_activity a CROSS JOIN (SELECT tenure.clock() AS at OFFSET 0) now
     WHERE a.datname = current_database() AND a.pid <> pg_backend_pid()
       AND (a.backend_xmin IS NOT NULL OR a.backend_xid IS NOT NULL)
       AND a.backend_type = 'client backend'
       AND a.xact_start < now.at - make_interval(secs => ${seconds(olderThanMillis)})
     ORDER BY a.xact_start, a.pid LIMIT ${rowsMax}`

/** Sessions of roles that this one may not look at. */
export const hiddenSessions = (sql: SqlClient.SqlClient) =>
  Effect.map(
    sql<{ readonly count: number }>`
      SELECT count(*)::int AS count FROM pg_stat_activity a
       WHERE a.datname = current_database() AND a.pid <> pg_backend_pid() AND a.usesysid IS NOT NULL
         AND NOT pg_has_role(session_user, a.usesysid, 'USAGE')
         AND NOT pg_has_role(session_user, 'pg_read_all_stats', 'USAGE')`,
    ([row]) => row?.count ?? 0
  )

export interface Slot {
  readonly name: string
  readonly active: boolean
  /** How many transactions ago the oldest began that it keeps rows for. */
  readonly transactions: number
}

/** Replication slots that hold back the horizon, as a standby's feedback does. */
export const pinningSlots = (sql: SqlClient.SqlClient) =>
  sql<Slot>`
    SELECT s.slot_name::text AS name, s.active, age(s.xmin)::int AS transactions
      FROM pg_replication_slots s WHERE s.xmin IS NOT NULL
     ORDER BY age(s.xmin) DESC LIMIT ${rowsMax}`

/** Logins of workers whose sessions a revocation by this role could not end. */
export const foreignWorkers = (sql: SqlClient.SqlClient) =>
  Effect.map(
    sql<{ readonly name: string }>`
      SELECT DISTINCT a.usename::text AS name FROM pg_stat_activity a
       WHERE a.datname = current_database() AND a.application_name ~ '^tenure (lease|work|handlers) '
         AND NOT pg_has_role(session_user, a.usesysid, 'MEMBER')
         AND NOT pg_has_role(session_user, 'pg_signal_backend', 'MEMBER')
       ORDER BY 1 LIMIT ${rowsMax}`,
    (rows) => rows.map((row) => row.name)
  )

export interface LiveGroup {
  readonly application: string
  readonly version: string
  readonly count: number
  readonly validityMillis: number
}

/** Who holds a lease, by what it can go on with. */
export const liveExecutors = (sql: SqlClient.SqlClient) =>
  sql<LiveGroup>`
    SELECT e.application_name AS application, e.application_version AS version, count(*)::int AS count,
           (max(extract(epoch FROM e.expires_at - e.heartbeat_at)) * 1000)::float8 AS "validityMillis"
      FROM tenure.executor e
     WHERE e.state = 'active' AND e.expires_at > (SELECT tenure.clock())
     GROUP BY 1, 2 ORDER BY 1, 2 LIMIT ${rowsMax}`

export interface DoubtfulExecutor {
  readonly id: string
  readonly application: string
  readonly version: string
  readonly state: "active" | "revoking"
  /** Since the last renewal; negative when that lies in the future. */
  readonly silentMillis: number
  readonly validityMillis: number
  readonly expiredMillis: number
  /** `countMax` at most. */
  readonly claimed: number
  /** Open transactions of its sessions: what a revocation waits for. */
  readonly blockers: ReadonlyArray<number>
}

/** Expired and not revoked, half revoked, late with a renewal, or renewed in the future. */
export const doubtfulExecutors = (sql: SqlClient.SqlClient) =>
  sql<DoubtfulExecutor>`
    WITH doubtful AS (
      SELECT e.*, now.at FROM tenure.executor e CROSS JOIN (SELECT tenure.clock() AS at OFFSET 0) now
       WHERE e.state IN ('active', 'revoking')
         AND (e.state = 'revoking' OR e.heartbeat_at > now.at + interval '1 second'
              OR now.at - e.heartbeat_at > (e.expires_at - e.heartbeat_at) / 2)
       ORDER BY e.expires_at, e.id LIMIT ${rowsMax}
    )
    SELECT d.id, d.application_name AS application, d.application_version AS version, d.state,
           (extract(epoch FROM d.at - d.heartbeat_at) * 1000)::float8 AS "silentMillis",
           (extract(epoch FROM d.expires_at - d.heartbeat_at) * 1000)::float8 AS "validityMillis",
           (extract(epoch FROM d.at - d.expires_at) * 1000)::float8 AS "expiredMillis",
           (SELECT count(*)::int FROM (
              SELECT FROM tenure.claimed c
               WHERE c.queue_id = ANY(ARRAY(SELECT q.id FROM tenure.queue q)) AND c.owner = d.id
               LIMIT ${countMax}) x) AS claimed,
           ARRAY(SELECT a.pid FROM pg_stat_activity a
                  WHERE a.datname = current_database() AND a.application_name LIKE '%' || d.id::text
                    AND a.xact_start IS NOT NULL AND a.state LIKE 'idle in%'
                  ORDER BY a.xact_start LIMIT 10) AS blockers
      FROM doubtful d ORDER BY d.expires_at, d.id`

export interface Claims {
  readonly queue: string
  /** The application that runs the queue. */
  readonly queueApplication: string | null
  readonly owner: string
  /** Of the owner: `unknown` when no registry row names it. */
  readonly state: "live" | "expired" | "revoking" | "revoked" | "released" | "unknown"
  readonly application: string | null
  readonly version: string | null
  /** Of the lane of one of them: who may go on with what an unknown owner holds. */
  readonly laneVersion: string | null
  /** `countMax` at most. */
  readonly count: number
  readonly oldestMillis: number
}

/** Claimed work by queue and owner, the owners walked along their index. */
export const claimsByOwner = (sql: SqlClient.SqlClient) =>
  sql<Claims>`
    WITH RECURSIVE owners (queue_id, owner) AS (
      SELECT x.queue_id, x.owner FROM tenure.queue q
       CROSS JOIN LATERAL (
         SELECT c.queue_id, c.owner FROM tenure.claimed c
          WHERE c.queue_id = q.id ORDER BY c.owner LIMIT 1) x
      UNION ALL
      SELECT x.queue_id, x.owner FROM owners o
       CROSS JOIN LATERAL (
         SELECT c.queue_id, c.owner FROM tenure.claimed c
          WHERE c.queue_id = o.queue_id AND c.owner > o.owner ORDER BY c.owner LIMIT 1) x
    ), walked AS MATERIALIZED (
      SELECT o.queue_id, o.owner FROM owners o LIMIT ${countMax}
    )
    SELECT q.name AS queue, q.application_name AS "queueApplication", w.owner,
           CASE WHEN e.id IS NULL THEN 'unknown'
                WHEN e.state <> 'active' THEN e.state
                WHEN e.expires_at <= now.at THEN 'expired' ELSE 'live' END AS state,
           e.application_name AS application, e.application_version AS version,
           held.version AS "laneVersion", held.count,
           (extract(epoch FROM now.at - held.oldest_at) * 1000)::float8 AS "oldestMillis"
      FROM walked w
     CROSS JOIN (SELECT tenure.clock() AS at OFFSET 0) now
      JOIN tenure.queue q ON q.id = w.queue_id
     CROSS JOIN LATERAL (
       SELECT count(*)::int AS count, min(s.claimed_at) AS oldest_at,
              (SELECT l.version FROM tenure.lane l WHERE l.id = min(s.lane_id)) AS version
         FROM (SELECT c.claimed_at, c.lane_id FROM tenure.claimed c
                WHERE c.queue_id = w.queue_id AND c.owner = w.owner LIMIT ${countMax}) s) held
      LEFT JOIN tenure.executor e ON e.id = w.owner
     ORDER BY (e.id IS NULL) DESC, q.name, w.owner`

export interface Head {
  readonly queue: string
  readonly application: string | null
  /** Who may go on with it; null for whoever runs the queue. */
  readonly version: string | null
  readonly suspect: boolean
  readonly item: string
  /** Since it was handed in: it may have become available later. */
  readonly ageMillis: number
  readonly globalLimit: number | null
  readonly perKeyLimit: number | null
  readonly pausedMillis: number | null
  readonly rateLimit: number | null
  readonly rateWindowMillis: number | null
  readonly rateUsed: boolean
  readonly keyRateLimit: number | null
  readonly keyRateWindowMillis: number | null
  /** Of its key. */
  readonly keyRateUsed: boolean
  readonly key: string | null
  /** Running of its key, when that has a limit; no more are counted than the limit. */
  readonly keyRunning: number
}

/** The first available item of each lane, the oldest ones. */
export const waitingHeads = (sql: SqlClient.SqlClient, olderThanMillis: number) =>
  sql<Head>`
    SELECT q.name AS queue, q.application_name AS application, l.version, l.suspect, h.id AS item,
           (extract(epoch FROM now.at - i.enqueued_at) * 1000)::float8 AS "ageMillis",
           q.global_limit AS "globalLimit", q.per_key_limit AS "perKeyLimit", h.key,
           (extract(epoch FROM now.at - q.paused_at) * 1000)::float8 AS "pausedMillis",
           q.rate_limit AS "rateLimit", (extract(epoch FROM q.rate_window) * 1000)::float8 AS "rateWindowMillis",
           coalesce(tenure.rate_room(q.id, '', q.rate_limit, q.rate_window, now.at) <= 0, false) AS "rateUsed",
           q.key_rate_limit AS "keyRateLimit",
           (extract(epoch FROM q.key_rate_window) * 1000)::float8 AS "keyRateWindowMillis",
           coalesce(tenure.rate_room(q.id, h.key, q.key_rate_limit, q.key_rate_window, now.at) <= 0, false)
             AS "keyRateUsed",
           CASE WHEN q.per_key_limit IS NULL OR h.key IS NULL THEN 0 ELSE (
             SELECT count(*)::int FROM (
               SELECT FROM tenure.claimed c WHERE c.queue_id = q.id AND c.key = h.key
                LIMIT q.per_key_limit) x) END AS "keyRunning"
      FROM tenure.lane l
     CROSS JOIN (SELECT tenure.clock() AS at OFFSET 0) now
      JOIN tenure.queue q ON q.id = l.queue_id
     CROSS JOIN LATERAL (
       SELECT r.id, r.key FROM tenure.ready r
        WHERE r.lane_id = l.id ORDER BY r.rank, r.seq LIMIT 1) h
     CROSS JOIN LATERAL (
       SELECT it.enqueued_at FROM tenure.item it WHERE it.id = h.id OFFSET 0) i
     WHERE i.enqueued_at < now.at - make_interval(secs => ${seconds(olderThanMillis)})
     ORDER BY i.enqueued_at, h.id LIMIT ${rowsMax}`

export interface Overdue {
  readonly timers: number | null
  readonly deadlines: number | null
  readonly waits: number | null
  /** Since somebody took the oldest wake that is not finished. */
  readonly wakes: number | null
}

/** How late the oldest of each kind is, in milliseconds. */
export const overdue = (sql: SqlClient.SqlClient) =>
  Effect.map(
    sql<Overdue>`
      SELECT (extract(epoch FROM now.at
               - (SELECT d.due_at FROM tenure.delayed d ORDER BY d.due_at LIMIT 1)) * 1000)::float8 AS timers,
             (extract(epoch FROM now.at
               - (SELECT d.due_at FROM tenure.deadline d ORDER BY d.due_at LIMIT 1)) * 1000)::float8 AS deadlines,
             (extract(epoch FROM now.at
               - (SELECT p.due_at FROM tenure.parked p
                   WHERE p.state <> 'waking' ORDER BY p.due_at LIMIT 1)) * 1000)::float8 AS waits,
             (extract(epoch FROM now.at
               - (SELECT p.claimed_at FROM tenure.parked p
                   WHERE p.state = 'waking' ORDER BY p.claimed_at LIMIT 1)) * 1000)::float8 AS wakes
        FROM (SELECT tenure.clock() AS at OFFSET 0) now`,
    ([row]) => row ?? { timers: null, deadlines: null, waits: null, wakes: null }
  )

export interface LateLeases {
  readonly application: string
  /** Of the oldest. */
  readonly lateMillis: number
  readonly count: number
}

/** What pull workers hold whose lease ended so long ago. Only executors of its application hand it back. */
export const lateLeases = (sql: SqlClient.SqlClient, olderThanMillis: number) =>
  sql<LateLeases>`
    SELECT q.application_name AS application, count(*)::int AS count,
           (extract(epoch FROM now.at - min(c.expires_at)) * 1000)::float8 AS "lateMillis"
      FROM tenure.capacity_lease c
      JOIN tenure.queue q ON q.id = c.queue_id
     CROSS JOIN (SELECT tenure.clock() AS at OFFSET 0) now
     WHERE c.expires_at < now.at - make_interval(secs => ${seconds(olderThanMillis)})
     GROUP BY 1, now.at ORDER BY 1 LIMIT ${rowsMax}`

export interface LateSchedule {
  readonly name: string
  readonly application: string
  readonly lateMillis: number
  /** Whether a live executor has the code of the definition in force. */
  readonly hasRunner: boolean
}

/** Schedules whose next slot has passed and has been decided about by nobody. */
export const lateSchedules = (sql: SqlClient.SqlClient, olderThanMillis: number) =>
  sql<LateSchedule>`
    SELECT s.name, s.application_name AS application,
           (extract(epoch FROM now.at - s.next_at) * 1000)::float8 AS "lateMillis",
           EXISTS (
             SELECT FROM tenure.schedule_runner x JOIN tenure.executor e ON e.id = x.executor_id
              WHERE x.schedule_name = s.name AND x.queue = s.queue AND x.definition = s.definition
                AND e.state = 'active' AND e.expires_at > now.at) AS "hasRunner"
      FROM tenure.schedule s CROSS JOIN (SELECT tenure.clock() AS at OFFSET 0) now
     WHERE NOT s.paused AND s.next_at < now.at - make_interval(secs => ${seconds(olderThanMillis)})
     ORDER BY s.next_at, s.name LIMIT ${rowsMax}`

export const roomMillis = (sql: SqlClient.SqlClient) =>
  Effect.map(
    sql<{ readonly millis: number | null }>`
      SELECT (extract(epoch FROM max(b.upper_at) - (SELECT tenure.clock())) * 1000)::float8 AS millis
        FROM tenure.bucket b`,
    ([row]) => row?.millis ?? 0
  )

export interface Quarantined {
  readonly queue: string
  readonly count: number
  readonly oldestMillis: number
}

/** Items that a person has to deal with. */
export const quarantined = Effect.fnUntraced(function* (sql: SqlClient.SqlClient) {
  const [found] = yield* sql<{ readonly there: boolean }>`
    SELECT to_regclass('tenure.quarantine') IS NOT NULL AS there`
  if (found?.there !== true) return []
  return yield* sql<Quarantined>`
    SELECT q.name AS queue, count(*)::int AS count,
           (max(extract(epoch FROM (SELECT tenure.clock()) - x.quarantined_at)) * 1000)::float8 AS "oldestMillis"
      FROM (SELECT z.queue_id, z.quarantined_at FROM tenure.quarantine z
             WHERE z.state = 'open' LIMIT ${countMax}) x
      JOIN tenure.queue q ON q.id = x.queue_id
     GROUP BY 1 ORDER BY 1 LIMIT ${rowsMax}`
})

export interface ServerClock {
  readonly epochMillis: number
  /** Whether `tenure.clock()` is the server's own. */
  readonly isServers: boolean
}

export const serverClock = (sql: SqlClient.SqlClient) =>
  Effect.map(
    sql<ServerClock>`
      SELECT (extract(epoch FROM tenure.clock()) * 1000)::float8 AS "epochMillis",
             EXISTS (
               SELECT FROM pg_proc p
                WHERE p.pronamespace = 'tenure'::regnamespace AND p.proname = 'clock'
                  AND btrim(p.prosrc) = ${ownClock}) AS "isServers"`,
    ([row]) => row ?? { epochMillis: 0, isServers: false }
  )

/** The body of `tenure.clock()` as the first migration makes it. */
export const ownClock = "SELECT pg_catalog.clock_timestamp()"
