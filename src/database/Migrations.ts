/**
 * Brings the `tenure` schema to what this code needs, from the numbered files in `schema/`.
 *
 *   absent --run--> applied, checksum known        psql -f --> applied, no checksum --run--> adopted
 *
 * M1. A file is applied once, in one transaction that also records it: after a crash it is either
 *     there with its record, or not there at all.
 * M2. Migrators exclude each other by a transaction lock, and each reads the record again under it,
 *     so any number of them may start together.
 * M3. A recorded file that has changed is refused, and nothing is applied.
 *
 * Each file says in its header how old and new code live beside each other while it is rolled out.
 * `run` needs the role that owns the schema. `check` only reads, as whatever role the process has.
 */
import type { PgClient } from "@effect/sql-pg"
import { Effect, Layer } from "effect"
import { isSqlError, type SqlError } from "effect/sql/SqlError"
import { createHash } from "node:crypto"
import { readdir, readFile } from "node:fs/promises"
import { fileURLToPath } from "node:url"
import { Database } from "./Database.ts"
import * as Pool from "./Pool.ts"
import { inTransaction } from "./Retry.ts"
import { isBlank, splitStatements } from "./SqlStatements.ts"
import { classify } from "./SqlState.ts"
import { serverMessage, waitOrRefuse } from "./Startup.ts"
import { refuse, SchemaRejected, type StartupRefused } from "./StartupRefused.ts"

export interface Migration {
  readonly number: number
  readonly name: string
  readonly file: string
  readonly text: string
  readonly checksum: string
}

export interface Recorded {
  readonly number: number
  readonly name: string
  /** Null when psql applied the file. */
  readonly checksum: string | null
  /** Code that knows less than this migration may not run beside it. */
  readonly oldestCode: number
}

export interface Report {
  /** The highest migration before and after. */
  readonly found: number
  readonly needed: number
  readonly applied: ReadonlyArray<string>
  /** Applied by psql before, and given their checksum by this run. */
  readonly adopted: ReadonlyArray<string>
}

// Two-integer transaction locks with a namespace of our own: the letters TNMG. Frozen, because
// releases that disagreed about it would migrate beside each other.
const lockNamespace = 0x544e4d47
const lockKey = 1

// The same distance from src/database and from the published dist/database.
const packagedDirectory = fileURLToPath(new URL("../../schema/", import.meta.url))

/** Applies what is pending. Safe to call from several processes at once. */
export const run = Effect.fn("Migrations.run")(function* (
  directory: string = packagedDirectory
): Effect.fn.Return<Report, StartupRefused, Database> {
  const database = yield* Database
  const migrations = yield* load(directory)
  return yield* Effect.scoped(
    Effect.flatMap(
      Pool.make({
        database,
        applicationName: "tenure migrate",
        connectionsMax: 1,
        statementTimeout: Number.POSITIVE_INFINITY,
        // A migration that waits for a table makes everyone behind it wait as well, so it steps back
        // and tries again.
        lockTimeout: "10 seconds",
        idleInTransactionTimeout: "1 minute"
      }),
      (sql) => applyAll(sql, migrations)
    )
  ).pipe((effect) => waitOrRefuse(effect, "migrations"))
})

/** Refuses a database whose tables are not the ones this code was written for. */
export const check = Effect.fn("Migrations.check")(function* (
  sql: PgClient.PgClient,
  directory: string = packagedDirectory
): Effect.fn.Return<void, StartupRefused> {
  const migrations = yield* load(directory)
  const recorded = yield* waitOrRefuse(selectRecorded(sql), "migrations")
  const decision = decide(migrations, recorded)
  if (decision._tag === "Refused") return yield* refuse(decision.reason)
  if (decision.pending.length > 0) {
    return yield* refuse(
      new SchemaRejected({ found: highest(recorded), needed: highest(migrations) })
    )
  }
})

export const layerMigrations: Layer.Layer<never, StartupRefused, Database> = Layer.effectDiscard(
  Effect.flatMap(run(), (report) =>
    Effect.logInfo("the schema is up to date").pipe(Effect.annotateLogs({ ...report }))
  )
)

/** Reads and orders the files of a folder. A folder with a gap or a twin is a broken package. */
export const load = Effect.fnUntraced(function* (
  directory: string
): Effect.fn.Return<ReadonlyArray<Migration>> {
  const files = (yield* Effect.promise(() => readdir(directory))).filter((file) =>
    file.endsWith(".sql")
  )
  const migrations: Array<Migration> = []
  for (const file of files.sort()) {
    const parts = /^(\d{4})_(\w+)\.sql$/.exec(file)
    if (parts === null || Number(parts[1]) !== migrations.length + 1) {
      return yield* Effect.die(new Error(`schema/${file} is not number ${migrations.length + 1}`))
    }
    // A checkout with CRLF line ends is the same migration.
    const text = (yield* Effect.promise(() => readFile(directory + "/" + file, "utf8"))).replaceAll(
      "\r\n",
      "\n"
    )
    migrations.push({
      number: migrations.length + 1,
      name: parts[2] ?? "",
      file,
      text,
      checksum: createHash("sha256").update(text).digest("hex")
    })
  }
  return migrations
})

export type Decision =
  | {
      readonly _tag: "Proceed"
      readonly pending: ReadonlyArray<Migration>
      readonly adopt: ReadonlyArray<Migration>
    }
  | { readonly _tag: "Refused"; readonly reason: SchemaRejected }

export const decide = (
  migrations: ReadonlyArray<Migration>,
  recorded: ReadonlyArray<Recorded>
): Decision => {
  const found = highest(recorded)
  const needed = highest(migrations)
  const refused = (detail?: string): Decision => ({
    _tag: "Refused",
    reason: new SchemaRejected({ found, needed, ...(detail === undefined ? {} : { detail }) })
  })
  // A deploy that overlaps: older code goes on beside newer tables unless their file forbids it.
  if (recorded.some((record) => record.number > needed && record.oldestCode > needed))
    return refused()
  const byNumber = new Map(recorded.map((record) => [record.number, record]))
  const pending: Array<Migration> = []
  const adopt: Array<Migration> = []
  for (const migration of migrations) {
    const record = byNumber.get(migration.number)
    if (record === undefined) {
      if (migration.number < found) {
        return refused(
          `${migration.file} was never applied, and a later one was; apply it by hand with ` +
            `psql -1 -v ON_ERROR_STOP=1 -f`
        )
      }
      pending.push(migration)
    } else if (record.name !== migration.name) {
      return refused(
        `the database recorded number ${record.number} as "${record.name}", and here it is ` +
          `${migration.file}; deploy the release that made the tables`
      )
    } else if (record.checksum === null) {
      adopt.push(migration)
    } else if (record.checksum !== migration.checksum) {
      return refused(
        `${migration.file} has changed since it was applied; restore the file as it was and put ` +
          `the change into a file of its own`
      )
    }
  }
  return { _tag: "Proceed", pending, adopt }
}

const applyAll = Effect.fnUntraced(function* (
  sql: PgClient.PgClient,
  migrations: ReadonlyArray<Migration>
): Effect.fn.Return<Report, StartupRefused | SqlError> {
  const needed = highest(migrations)
  let found: number | undefined
  const applied: Array<string> = []
  const adopted: Array<string> = []
  // One transaction per file. The bound holds: each turn applies one file or is the last.
  for (let turn = 0; turn <= migrations.length; turn++) {
    const step = yield* inTransaction(sql, applyNext(sql, migrations)).pipe(
      Effect.mapError((error) => explained(error, migrations, (found ?? 0) + applied.length))
    )
    found ??= step.found
    adopted.push(...step.adopted)
    if (step.applied === undefined) break
    applied.push(step.applied)
  }
  return { found: found ?? 0, needed, applied, adopted }
})

const applyNext = Effect.fnUntraced(function* (
  sql: PgClient.PgClient,
  migrations: ReadonlyArray<Migration>
) {
  // The other migrator may build an index for an hour: waited for without the limit that the tables
  // have, which counts again from the next statement on.
  yield* sql`SET LOCAL lock_timeout = 0`
  yield* sql`SELECT pg_advisory_xact_lock(${lockNamespace}::int, ${lockKey}::int)`
  yield* sql`SET LOCAL lock_timeout TO DEFAULT`
  // Read under the lock: another migrator may have applied the file we came for while we waited.
  const recorded = yield* selectRecorded(sql)
  const decision = decide(migrations, recorded)
  if (decision._tag === "Refused") return yield* refuse(decision.reason)
  yield* Effect.forEach(decision.adopt, (migration) => recordChecksum(sql, migration))
  const next = decision.pending[0]
  if (next !== undefined) {
    for (const statement of splitStatements(next.text)) {
      if (!isBlank(statement)) yield* sql.unsafe(statement).unprepared
    }
    yield* recordChecksum(sql, next)
  }
  return {
    found: highest(recorded),
    applied: next?.file,
    adopted: decision.adopt.map((migration) => migration.file)
  }
})

// Names the file. A lost connection and missing rights have reasons of their own and pass through.
const explained = (
  error: SqlError | StartupRefused,
  migrations: ReadonlyArray<Migration>,
  found: number
): SqlError | StartupRefused => {
  if (!isSqlError(error)) return error
  const kind = classify(error)
  if (kind === "reconnect" || kind === "refused") return error
  const cure =
    kind === "retryTransaction"
      ? "; end the transactions that hold its locks (pg_stat_activity shows them) and run it again"
      : ""
  const file = migrations[found]?.file ?? "the record of migrations"
  const detail = `${file} was rolled back: ${serverMessage(error)}${cure}`
  return refuse(new SchemaRejected({ found, needed: highest(migrations), detail }))
}

const selectRecorded = Effect.fnUntraced(function* (
  sql: PgClient.PgClient
): Effect.fn.Return<ReadonlyArray<Recorded>, SqlError> {
  // Asked first: to read a table that is not there would end the transaction.
  const present = yield* sql<{ readonly present: boolean }>`
    SELECT to_regclass('tenure.migration') IS NOT NULL AS present`
  if (present[0]?.present !== true) return []
  return yield* sql<Recorded>`
    SELECT number, name, checksum, oldest_code AS "oldestCode"
    FROM tenure.migration
    ORDER BY number`
})

const recordChecksum = Effect.fnUntraced(function* (
  sql: PgClient.PgClient,
  migration: Migration
): Effect.fn.Return<void, SqlError> {
  const recorded = yield* sql`
    UPDATE tenure.migration
    SET checksum = ${migration.checksum}
    WHERE number = ${migration.number}::int
    RETURNING number`
  if (recorded.length === 0) {
    return yield* Effect.die(new Error(`${migration.file} does not end with its own record`))
  }
})

const highest = (records: ReadonlyArray<{ readonly number: number }>): number =>
  records.reduce((most, { number }) => Math.max(most, number), 0)
