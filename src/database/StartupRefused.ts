/**
 * Why a process may not start. A refusal is final for this process: waiting does not mend it, so it
 * is raised before the first lease is taken and leaves nothing behind in the database. Each message
 * is one sentence that names the cause and the fix, for the person who reads it at three at night.
 *
 * A database that cannot be reached is no refusal: start-up waits for it.
 */
import { Schema } from "effect"

/** Two settings contradict each other, or one cannot be used as it stands. */
export class SettingsRejected extends Schema.TaggedError<SettingsRejected>()("SettingsRejected", {
  rule: Schema.String,
  settings: Schema.Array(Schema.String)
}) {
  override get message(): string {
    const named = this.settings.length === 0 ? "" : ` (${this.settings.join(", ")})`
    return `Settings rejected: ${this.rule}${named}.`
  }
}

const databaseFixes = {
  transactionPooler:
    "workers keep a session open for their whole life, so connect to PostgreSQL directly",
  preparedStatements: "give this pool `prepare: false`, or connect to PostgreSQL directly",
  otherEndpoint: "every guarded pool must reach the one database that holds the registry",
  unsupportedVersion: "use PostgreSQL 15 or newer",
  readOnly: "connect to the primary, where writes are accepted",
  preparedTransactions: "a prepared transaction outlives its session, so set it to 0 for this role",
  rolePrivileges: "check the role and its password; `tenure doctor` lists the rights it lacks"
} as const

/** The server answers, and is not one that a worker may use. */
export class DatabaseRejected extends Schema.TaggedError<DatabaseRejected>()("DatabaseRejected", {
  problem: Schema.Literals([
    "transactionPooler",
    "preparedStatements",
    "otherEndpoint",
    "unsupportedVersion",
    "readOnly",
    "preparedTransactions",
    "rolePrivileges"
  ]),
  detail: Schema.String
}) {
  override get message(): string {
    return `Database rejected (${this.problem}): ${this.detail}; ${databaseFixes[this.problem]}.`
  }
}

/**
 * The tables of the database and the ones this code needs differ. `detail` names the migration when
 * a single file is the reason.
 */
export class SchemaRejected extends Schema.TaggedError<SchemaRejected>()("SchemaRejected", {
  found: Schema.Int,
  needed: Schema.Int,
  detail: Schema.optionalKey(Schema.String)
}) {
  override get message(): string {
    if (this.detail !== undefined) return `Schema rejected: ${this.detail}.`
    if (this.found > this.needed) {
      return (
        `Schema rejected: the database is at migration ${this.found} and this code knows only ` +
        `${this.needed}; deploy the release that made the newer tables.`
      )
    }
    return (
      `Schema rejected: the database is at migration ${this.found} and this code needs ` +
      `${this.needed}; run \`tenure migrate\` as the role that owns the schema.`
    )
  }
}

/** Application tables that an executor whose lease has ended could still write. */
export class FenceMissing extends Schema.TaggedError<FenceMissing>()("FenceMissing", {
  tables: Schema.Array(Schema.String)
}) {
  override get message(): string {
    const first = this.tables[0] ?? "app.table"
    return (
      `No fence on ${this.tables.join(", ")}: call tenure.fence_table('${first}') for each in a ` +
      `migration of yours, or start with \`unfenced: "warn"\`.`
    )
  }
}

/** A queue, workflow, DAG or process definition that cannot run as it is written. */
export class DefinitionRejected extends Schema.TaggedError<DefinitionRejected>()(
  "DefinitionRejected",
  {
    definition: Schema.String,
    problem: Schema.Literals([
      "duplicateHandler",
      "unguardedSqlClient",
      "invalidSchedule",
      "invalidBpmn",
      "invalidPolicy",
      "missingCost",
      "otherShape"
    ]),
    detail: Schema.String
  }
) {
  override get message(): string {
    return `Definition ${this.definition} rejected (${this.problem}): ${this.detail}.`
  }
}

/** The only error of the layers that start something. Match its reasons with `catchReason`. */
export class StartupRefused extends Schema.TaggedError<StartupRefused>()("StartupRefused", {
  reason: Schema.Union([
    SettingsRejected,
    DatabaseRejected,
    SchemaRejected,
    FenceMissing,
    DefinitionRejected
  ])
}) {
  override get message(): string {
    return this.reason.message
  }
}

export const refuse = (reason: StartupRefused["reason"]): StartupRefused =>
  new StartupRefused({ reason })
