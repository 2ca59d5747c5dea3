/**
 * What the facts of a database mean for those who run on it, and what to do about it. Pure.
 *
 * Here what concerns the server, the way to it, and rights; what concerns executors and their work is in
 * DiagnosisOfWork.ts.
 */
import type { ServerFacts } from "../../executor/ExecutorStore.ts"
import type { Resolved } from "../../executor/Settings.ts"
import type { RoleFacts } from "./CommandStore.ts"
import { judgeWork, type WorkFacts } from "./DiagnosisOfWork.ts"
import type {
  Grant,
  PreparedTransaction,
  ServerSettings,
  SessionDefault,
  Slot,
  Snapshot
} from "./DoctorStore.ts"
import { type Finding, formatMillis, ident, literal, ok, problem, warning } from "./Finding.ts"

/** What lies between this process and the server. */
export interface WayFacts {
  /** What it says of a session that brings a worker's settings, when it lets none in. */
  readonly refused: string | undefined
  readonly keepsIdentity: boolean
  readonly sharesSessions: boolean
  /** Effective in a worker's session; 0 for off. */
  readonly checkMillis: number
  readonly transactionMillis: number
}

/** Of the database, where its schema is the one this code needs. */
export interface TenureFacts extends WorkFacts {
  readonly unfenced: ReadonlyArray<string>
  readonly wrongGrants: ReadonlyArray<Grant>
  readonly missingGrants: ReadonlyArray<string>
  readonly unvacuumed: ReadonlyArray<string>
  readonly snapshots: ReadonlyArray<Snapshot>
  readonly hiddenSessions: number
  readonly foreignWorkers: ReadonlyArray<string>
}

export interface Facts {
  /** Why nothing could be asked. */
  readonly unreachable?: string | undefined
  readonly limits: Limits
  readonly way?: WayFacts | undefined
  readonly server?: ServerFacts | undefined
  readonly settings?: ServerSettings | undefined
  readonly role?: RoleFacts | undefined
  readonly defaults: ReadonlyArray<SessionDefault>
  readonly prepared: ReadonlyArray<PreparedTransaction>
  readonly slots: ReadonlyArray<Slot>
  /** Why the schema is not the one this code needs. */
  readonly schema?: string | undefined
  readonly tenure?: TenureFacts | undefined
}

/** What is too long or too far, in milliseconds. */
export interface Limits {
  readonly settings: Resolved
  readonly unrevoked: number
  readonly snapshot: number
  readonly waiting: number
  readonly overdue: number
  readonly clockDifference: number
  /** Between two looks at what may stand still. */
  readonly again: number
}

/** A snapshot so many times older than its limit has cost more than a protection. */
const snapshotProblem = 10

/** As many transactions ago a slot may keep rows for. */
const slotTransactionsMax = 1_000_000

/** Lease 2, work 4, recovery 1, listener 1, and 2 that come and go; handlers have theirs beside them. */
const connectionsOfItsOwn = 10

export const judge = (facts: Facts): ReadonlyArray<Finding> =>
  facts.unreachable === undefined
    ? [
        ...judgeServer(facts),
        ...judgeWay(facts),
        facts.schema === undefined
          ? ok("schema", "the schema is the one this code needs")
          : problem("schema.other", facts.schema, { action: "run `tenure migrate` as its owner" }),
        ...judgeRole(facts),
        ...judgeDefaults(facts),
        ...judgePrepared(facts),
        ...judgeHorizon(facts),
        ...judgeConnections(facts),
        ...(facts.tenure === undefined
          ? []
          : [
              ...judgeGrants(facts.tenure),
              ...judgeFences(facts.tenure),
              ...judgeVacuum(facts.tenure),
              ...judgeWork(facts.tenure, facts.limits)
            ])
      ]
    : [
        problem("server.unreachable", `the database cannot be reached: ${facts.unreachable}`, {
          action: "start it, or correct the address"
        })
      ]

const judgeServer = ({ defaults, role, server, settings }: Facts): ReadonlyArray<Finding> => {
  if (server === undefined || settings === undefined) {
    return [problem("server.silent", "the server answers no question about itself", {})]
  }
  const findings: Array<Finding> = [
    server.version < 150_000
      ? problem(
          "server.version",
          `PostgreSQL ${settings.serverVersion} is too old: use 15 or newer`,
          {}
        )
      : ok("server", `PostgreSQL ${settings.serverVersion}, database ${settings.database}`)
  ]
  if (server.version >= 150_000 && server.version < 170_000) {
    findings.push(
      warning(
        "server.noTransactionTimeout",
        `PostgreSQL ${settings.serverVersion} cannot end a transaction as a whole: one of many short statements ` +
          `may outlast its lease, and holds up the takeover until the revocation ends its session`,
        { action: "use PostgreSQL 17 or newer" }
      )
    )
  }
  if (server.isInRecovery || server.isReadOnly) {
    findings.push(
      problem("server.readOnly", "the server accepts no writes: connect to the primary", {})
    )
  }
  if (settings.fsync !== "on") {
    findings.push(
      problem(
        "server.fsync",
        "fsync is off: a crash of the machine loses what was acknowledged",
        onServer("fsync", "on")
      )
    )
  }
  if (settings.synchronousCommit === "off") {
    findings.push(
      problem(
        "server.synchronousCommit",
        "synchronous_commit is off: a crash of the server loses what was acknowledged",
        resetOf(
          defaults.find(({ name }) => name === "synchronous_commit"),
          settings.database,
          role?.quoted,
          "synchronous_commit",
          "on"
        )
      )
    )
  }
  if (settings.autovacuum !== "on" || settings.trackCounts !== "on") {
    const name = settings.autovacuum === "on" ? "track_counts" : "autovacuum"
    findings.push(
      problem(
        "server.autovacuum",
        `${name} is off: nobody removes the dead rows of the queues, and claims get slower and slower`,
        onServer(name, "on")
      )
    )
  }
  return findings
}

/** Of a setting that only the server as a whole has. */
const onServer = (name: string, value: string) => ({
  sql: [`ALTER SYSTEM SET ${name} = ${value}`, "SELECT pg_reload_conf()"]
})

/** Where `pg_settings` says that a default comes from decides what takes it back. */
const resetOf = (
  found: SessionDefault | undefined,
  database: string,
  role: string | undefined,
  name: string,
  value: string
) => {
  switch (found?.source) {
    case "database":
      return { sql: [`ALTER DATABASE ${ident(database)} RESET ${name}`] }
    case "user":
      return { sql: [`ALTER ROLE ${role ?? "CURRENT_USER"} RESET ${name}`] }
    case "database user":
      return {
        sql: [`ALTER ROLE ${role ?? "CURRENT_USER"} IN DATABASE ${ident(database)} RESET ${name}`]
      }
    case "global":
      return { sql: [`ALTER ROLE ALL RESET ${name}`] }
    default:
      return onServer(name, value)
  }
}

const judgeWay = ({ way }: Facts): ReadonlyArray<Finding> => {
  if (way === undefined) return []
  const direct = {
    action:
      "let workers connect to PostgreSQL directly; clients that only hand in work may stay, with `prepare: false`"
  }
  if (way.refused !== undefined) {
    return [
      problem(
        "way.refusesSettings",
        `something between us and the server refuses the settings of a worker's session: ${way.refused}`,
        direct
      )
    ]
  }
  const findings: Array<Finding> = []
  if (way.sharesSessions) {
    findings.push(
      problem(
        "way.sharesSessions",
        "something between us and the server lends one session to several connections, as a pooler in transaction mode",
        direct
      )
    )
  }
  if (!way.keepsIdentity) {
    findings.push(
      problem(
        "way.dropsIdentity",
        "something between us and the server drops the identity of a session, so its writes would be refused",
        direct
      )
    )
  }
  if (way.checkMillis === 0) {
    findings.push(
      warning(
        "way.noConnectionCheck",
        "client_connection_check_interval is off: the server notices late that a client is gone",
        { ...onServer("client_connection_check_interval", "'1s'") }
      )
    )
  }
  return findings.length > 0
    ? findings
    : [ok("way", "sessions of our own, with the settings we bring")]
}

const judgeRole = ({ role, schema }: Facts): ReadonlyArray<Finding> => {
  if (role === undefined) return []
  const findings: Array<Finding> = []
  const administrator = (name: string) => ({
    sql: [`CREATE ROLE ${name} NOLOGIN`, ...(schema === undefined ? [grantAgain] : [])],
    action: "as an administrator; then `tenure migrate`"
  })
  if (!role.hasWorkerRole) {
    findings.push(
      warning(
        "role.noWorkerRole",
        "role tenure_worker is missing, so nothing but good behaviour keeps a session without an " +
          "identity out of fenced tables",
        administrator("tenure_worker")
      )
    )
  }
  if (!role.hasApiRole) {
    findings.push(
      warning(
        "role.noApiRole",
        "role tenure_api is missing, for processes that only hand in work",
        administrator("tenure_api")
      )
    )
  }
  const ofItsOwn = { action: "let workers log in as a member of tenure_worker that owns nothing" }
  if (role.isSuperuser) {
    findings.push(
      warning(
        "role.superuser",
        `${role.role} is a superuser, for whom no fence holds: workers need a role of their own`,
        ofItsOwn
      )
    )
  } else if (role.ownsSchema && role.hasWorkerRole) {
    findings.push(
      warning(
        "role.ownsSchema",
        `${role.role} owns the schema and could drop the fence: workers need a role of their own`,
        ofItsOwn
      )
    )
  }
  if (schema === undefined) {
    findings.push(
      role.mayRegister
        ? ok("role", `${role.role} has the rights of a worker`)
        : problem("role.noRights", `${role.role} lacks the rights of a worker`, {
            sql: [`GRANT tenure_worker TO ${role.quoted}`]
          })
    )
  }
  return findings
}

/** What our own pools override and a client's pool does not. */
const judgeDefaults = ({ defaults, role, settings }: Facts): ReadonlyArray<Finding> =>
  defaults.flatMap((found): ReadonlyArray<Finding> => {
    const mend = (value: string) =>
      resetOf(found, settings?.database ?? "", role?.quoted, found.name, value)
    const who = `of ${role?.role ?? "this role"}`
    if (found.name === "default_transaction_read_only" && found.value === "on") {
      return [
        problem(
          "default.readOnly",
          `default_transaction_read_only ${who} is on: a worker's pools override it, but a client's hand-in is refused`,
          mend("off")
        )
      ]
    }
    if (found.name === "default_transaction_isolation" && found.value !== "read committed") {
      return [
        warning(
          "default.isolation",
          `default_transaction_isolation ${who} is ${found.value}: a worker's pools override it; a client's ` +
            `transactions get 40001 where they would have waited, and must be repeated`,
          mend("'read committed'")
        )
      ]
    }
    if (found.name === "idle_session_timeout" && Number(found.value) > 0) {
      return [
        warning(
          "default.idleSession",
          `idle_session_timeout ${who} is ${formatMillis(Number(found.value))}: a worker's pools override it; a client ` +
            `that listens for results is cut off each time it was quiet for so long, and hears of them late`,
          mend("0")
        )
      ]
    }
    return []
  })

const judgePrepared = ({ prepared, server }: Facts): ReadonlyArray<Finding> => {
  const findings = prepared.map(({ gid, owner, prepared_at }) =>
    problem(
      "prepared.open",
      `prepared transaction ${gid} of ${owner} since ${prepared_at.toISOString()} keeps its locks and holds back ` +
        `the horizon: COMMIT PREPARED it if the other parts are committed`,
      { sql: [`ROLLBACK PREPARED ${literal(gid)}`] }
    )
  )
  if ((server?.preparedTransactionsMax ?? 0) > 0) {
    findings.push(
      problem(
        "prepared.allowed",
        "max_prepared_transactions is above 0: workers do not start, since such a transaction outlives its session and its lease",
        {
          sql: ["ALTER SYSTEM SET max_prepared_transactions = 0"],
          action: "then restart the server"
        }
      )
    )
  } else if (findings.length === 0) findings.push(ok("prepared", "no prepared transactions"))
  return findings
}

const judgeHorizon = ({ limits, role, slots, tenure }: Facts): ReadonlyArray<Finding> => {
  const findings = (tenure?.snapshots ?? []).map((one) => {
    const text =
      `session ${one.pid} of ${one.role} (${one.application || "no name"}, ${one.state}) has held a snapshot ` +
      `for ${formatMillis(one.ageMillis)}: no dead row since then can be removed, and claims get slower`
    const mend = { sql: [`SELECT pg_terminate_backend(${one.pid})`] }
    return one.ageMillis > limits.snapshot * snapshotProblem
      ? problem("horizon.snapshot", text, mend)
      : warning("horizon.snapshot", text, mend)
  })
  for (const { active, name, transactions } of slots) {
    if (active && transactions <= slotTransactionsMax) continue
    findings.push(
      (active ? warning : problem)(
        "horizon.slot",
        `replication slot ${name} ${active ? "keeps" : "is used by nobody and keeps"} every row that was dead ` +
          `${transactions} transactions ago`,
        active
          ? {
              action: "end the long query on that standby, or switch hot_standby_feedback off there"
            }
          : { sql: [`SELECT pg_drop_replication_slot(${literal(name)})`] }
      )
    )
  }
  if (tenure === undefined || findings.length > 0) return findings
  return [
    ok(
      "horizon",
      tenure.hiddenSessions === 0
        ? "no long snapshot"
        : `no long snapshot of this role; ${tenure.hiddenSessions} sessions of others cannot be looked at without ` +
            `GRANT pg_read_all_stats TO ${role?.quoted ?? "it"}`
    )
  ]
}

const judgeConnections = (facts: Facts): ReadonlyArray<Finding> => {
  const { limits, role, settings, tenure } = facts
  if (settings === undefined) return []
  const each = connectionsOfItsOwn + limits.settings.poolConnectionsMax
  const executors = Math.max(1, tenure?.live.reduce((sum, { count }) => sum + count, 0) ?? 0)
  const needed = executors * each
  const bounds = [
    {
      code: "connections.server",
      max: settings.connectionsMax - settings.connectionsReserved,
      name: "max_connections",
      mend: (enough: number) => ({
        sql: [`ALTER SYSTEM SET max_connections = ${enough + settings.connectionsReserved}`],
        action: "then restart the server; or lower poolConnectionsMax"
      })
    },
    {
      code: "connections.database",
      max: settings.databaseConnectionsMax,
      name: `the connection limit of database ${settings.database}`,
      mend: (enough: number) => ({
        sql: [`ALTER DATABASE ${ident(settings.database)} CONNECTION LIMIT ${enough}`]
      })
    },
    {
      code: "connections.role",
      max: settings.roleConnectionsMax,
      name: `the connection limit of role ${role?.role ?? ""}`,
      mend: (enough: number) => ({
        sql: [`ALTER ROLE ${role?.quoted ?? "CURRENT_USER"} CONNECTION LIMIT ${enough}`]
      })
    }
  ]
  const findings = bounds.flatMap(({ code, max, mend, name }) => {
    if (max === null || max >= needed) return []
    // Room for one more, for a deploy that starts the next before it ends the last.
    const enough = needed + each
    const text =
      `${name} leaves ${max} connections, and ${executors} ${executors === 1 ? "executor" : "executors"} of up to ` +
      `${each} may want ${needed}`
    return [max < each ? problem(code, text, mend(enough)) : warning(code, text, mend(enough))]
  })
  if (findings.length > 0) return findings
  return [
    ok(
      "connections",
      `${settings.connectionsUsed} of ${settings.connectionsMax} connections in use; an executor uses ${each} at most`
    )
  ]
}

const grantAgain = "SELECT tenure.grant_roles()"

const judgeGrants = (facts: TenureFacts): ReadonlyArray<Finding> => {
  const findings = facts.wrongGrants.map(({ grantee, object, privileges }) =>
    problem(
      "grant.wrong",
      `${grantee} may ${privileges.join(", ")} on ${object}, which goes round the fence`,
      { sql: [`REVOKE ${privileges.join(", ")} ON ${object} FROM ${grantee}`] }
    )
  )
  if (facts.missingGrants.length > 0) {
    findings.push(
      problem(
        "grant.missing",
        `tenure_worker may not call ${facts.missingGrants.join(", ")}: no worker of that role starts`,
        { sql: [grantAgain], action: "or `tenure migrate`, as the owner of the schema" }
      )
    )
  }
  if (facts.foreignWorkers.length > 0) {
    findings.push(
      warning(
        "grant.signal",
        `workers log in as ${facts.foreignWorkers.join(", ")} too, whose sessions a revocation by this role cannot ` +
          `end: one that is stuck holds up the takeover`,
        { sql: ["GRANT pg_signal_backend TO tenure_worker"], action: "or use one login for all" }
      )
    )
  }
  return findings
}

const judgeFences = ({ unfenced }: TenureFacts): ReadonlyArray<Finding> => {
  if (unfenced.length === 0) return [ok("fence", "every table that work may write has a fence")]
  return unfenced.map((table) =>
    problem(
      "fence.missing",
      `${table} has no fence: an executor whose lease has ended can write it`,
      {
        sql: [`SELECT tenure.fence_table(${literal(table)})`],
        action: "in a migration of yours; or tenure.exempt_table with the reason"
      }
    )
  )
}

const judgeVacuum = ({ unvacuumed }: TenureFacts): ReadonlyArray<Finding> =>
  unvacuumed.map((table) =>
    problem(
      "vacuum.off",
      `autovacuum is off for ${table}: nobody removes its dead rows, and claims get slower and slower`,
      { sql: [`ALTER TABLE ${table} RESET (autovacuum_enabled)`] }
    )
  )
