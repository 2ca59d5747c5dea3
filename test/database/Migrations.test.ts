/**
 * Goal: the schema is brought up exactly once, whoever asks and however it was begun, and a process
 * never works on tables that its code was not written for.
 * Method: small folders of migrations against real servers; psql as the second opinion on the real
 * files. Covers M1, M2 and M3 of the module and K-021.
 */
import type { PgClient } from "@effect/sql-pg"
import { assert, describe, it } from "@effect/vitest"
import { Effect, Fiber, Schedule, Schema } from "effect"
import * as Arbitrary from "effect/Arbitrary"
import { execFileSync } from "node:child_process"
import { mkdtempSync, readdirSync, rmSync, writeFileSync } from "node:fs"
import { tmpdir } from "node:os"
import { join } from "node:path"
import { fileURLToPath } from "node:url"
import { Database } from "../../src/database/Database.ts"
import * as Migrations from "../../src/database/Migrations.ts"
import { connect, emptyDatabase, type FreshDatabase, freshDatabase } from "../support/Postgres.ts"

const schemaDirectory = fileURLToPath(new URL("../../schema/", import.meta.url))

const base = `
CREATE SCHEMA tenure;
CREATE TABLE tenure.migration (
  number int PRIMARY KEY, name text NOT NULL, checksum text, oldest_code int NOT NULL DEFAULT 1,
  applied_at timestamptz NOT NULL DEFAULT clock_timestamp());
CREATE TABLE tenure.trace (file text);
INSERT INTO tenure.trace VALUES ('base');
INSERT INTO tenure.migration (number, name) VALUES (1, 'base');
`
const second = `
INSERT INTO tenure.trace VALUES ('second; with a semicolon');
INSERT INTO tenure.migration (number, name) VALUES (2, 'second');
`
const third = `
INSERT INTO tenure.trace VALUES ('third');
INSERT INTO tenure.migration (number, name) VALUES (3, 'third');
`
const three = { "0001_base.sql": base, "0002_second.sql": second, "0003_third.sql": third }

const folder = (files: Readonly<Record<string, string>>) =>
  Effect.acquireRelease(
    Effect.sync(() => {
      const directory = mkdtempSync(join(tmpdir(), "tenure-schema-"))
      for (const [file, text] of Object.entries(files)) writeFileSync(join(directory, file), text)
      return directory
    }),
    (directory) => Effect.sync(() => rmSync(directory, { recursive: true }))
  )

const run = (database: FreshDatabase, directory?: string) =>
  Effect.provideService(Migrations.run(directory), Database, database.owner)

const psql = (database: FreshDatabase, file: string): void => {
  execFileSync("psql", [database.url, "-X", "-q", "-1", "-v", "ON_ERROR_STOP=1", "-f", file], {
    stdio: "pipe"
  })
}

const hasPsql = (() => {
  try {
    execFileSync("psql", ["--version"], { stdio: "ignore" })
    return true
  } catch {
    console.log("not run: the comparison with psql, which is not on the PATH")
    return false
  }
})()

const trace = (sql: PgClient.PgClient) =>
  sql<{ readonly file: string }>`SELECT file FROM tenure.trace ORDER BY file`.pipe(
    Effect.map((rows) => rows.map(({ file }) => file))
  )

describe("run", () => {
  it.live("applies each file once and in order, and then nothing", () =>
    Effect.gen(function* () {
      const database = yield* emptyDatabase
      const directory = yield* folder(three)
      assert.deepStrictEqual(yield* run(database, directory), {
        found: 0,
        needed: 3,
        applied: ["0001_base.sql", "0002_second.sql", "0003_third.sql"],
        adopted: []
      })
      assert.deepStrictEqual(yield* run(database, directory), {
        found: 3,
        needed: 3,
        applied: [],
        adopted: []
      })
      const sql = yield* connect(database.owner)
      assert.deepStrictEqual(yield* trace(sql), ["base", "second; with a semicolon", "third"])
    })
  )

  it.live("applies each file once when five migrators start together", () =>
    Effect.gen(function* () {
      const database = yield* emptyDatabase
      const directory = yield* folder(three)
      const reports = yield* Effect.all(
        Array.from({ length: 5 }, () => run(database, directory)),
        { concurrency: "unbounded" }
      )
      const applied = reports.flatMap((report) => report.applied).sort()
      assert.deepStrictEqual(applied, Object.keys(three))
      const sql = yield* connect(database.owner)
      assert.lengthOf(yield* trace(sql), 3)
    })
  )

  it.live("refuses a recorded file that has changed, names it, and applies nothing", () =>
    Effect.gen(function* () {
      const database = yield* emptyDatabase
      yield* run(database, yield* folder({ "0001_base.sql": base, "0002_second.sql": second }))
      const changed = yield* folder({ ...three, "0002_second.sql": `${second}-- a change` })
      const refused = yield* Effect.flip(run(database, changed))
      assert(refused.reason._tag === "SchemaRejected")
      assert.include(refused.message, "0002_second.sql has changed")
      const sql = yield* connect(database.owner)
      assert.notInclude(yield* trace(sql), "third")
    })
  )

  it.live("takes the same file with other line ends for the same file", () =>
    Effect.gen(function* () {
      const database = yield* emptyDatabase
      yield* run(database, yield* folder({ "0001_base.sql": base }))
      const report = yield* run(
        database,
        yield* folder({ "0001_base.sql": base.replaceAll("\n", "\r\n") })
      )
      assert.deepStrictEqual(report.applied, [])
    })
  )

  it.live("rolls a failing file back, says which and why, and keeps the files before it", () =>
    Effect.gen(function* () {
      const database = yield* emptyDatabase
      const broken = `INSERT INTO tenure.trace VALUES ('half');\nSELECT no_such_function();${second}`
      const refused = yield* Effect.flip(
        run(database, yield* folder({ ...three, "0002_second.sql": broken }))
      )
      assert(refused.reason._tag === "SchemaRejected")
      assert.strictEqual(refused.reason.found, 1)
      assert.match(refused.message, /0002_second\.sql was rolled back: .*no_such_function.*42883/)
      const sql = yield* connect(database.owner)
      assert.deepStrictEqual(yield* trace(sql), ["base"])
    })
  )

  it.live("leaves nothing of a file whose session dies in the middle of it", () =>
    Effect.gen(function* () {
      const database = yield* emptyDatabase
      const slow = `INSERT INTO tenure.trace VALUES ('half');\nSELECT pg_sleep(60);${second}`
      const directory = yield* folder({ "0001_base.sql": base, "0002_second.sql": slow })
      const migrating = yield* Effect.forkChild(run(database, directory))
      const sql = yield* connect(database.superuser)
      yield* sql`
        SELECT pg_terminate_backend(pid)
        FROM pg_stat_activity
        WHERE datname = ${database.name}
          AND query LIKE '%pg_sleep(60)%'
          AND pid <> pg_backend_pid()`.pipe(
        Effect.flatMap((rows) => (rows.length === 1 ? Effect.void : Effect.fail("not there yet"))),
        Effect.retry(Schedule.spaced("10 millis")),
        Effect.timeout("5 seconds")
      )
      yield* Fiber.interrupt(migrating)
      assert.deepStrictEqual(yield* trace(sql), ["base"])
      const recorded = yield* sql`SELECT number FROM tenure.migration`
      assert.deepStrictEqual(recorded, [{ number: 1 }])
    })
  )

  it.live("names the missing rights when the role may not create the schema", () =>
    Effect.gen(function* () {
      const database = yield* emptyDatabase
      const refused = yield* Effect.flip(
        Effect.provideService(Migrations.run(yield* folder(three)), Database, database.worker)
      )
      assert(refused.reason._tag === "DatabaseRejected")
      assert.strictEqual(refused.reason.problem, "rolePrivileges")
    })
  )

  it.live.skipIf(!hasPsql)("adopts files that psql has applied", () =>
    Effect.gen(function* () {
      const database = yield* emptyDatabase
      const directory = yield* folder(three)
      psql(database, join(directory, "0001_base.sql"))
      psql(database, join(directory, "0002_second.sql"))
      const report = yield* run(database, directory)
      assert.deepStrictEqual(report.adopted, ["0001_base.sql", "0002_second.sql"])
      assert.deepStrictEqual(report.applied, ["0003_third.sql"])
      const changed = yield* folder({ ...three, "0001_base.sql": `${base} ` })
      const refused = yield* Effect.flip(run(database, changed))
      assert.include(refused.message, "0001_base.sql has changed")
    })
  )

  it.live.skipIf(!hasPsql)("makes the same schema as psql does from the files of the package", () =>
    Effect.gen(function* () {
      const ours = yield* freshDatabase
      const theirs = yield* emptyDatabase
      for (const file of readdirSync(schemaDirectory).sort()) {
        if (file.endsWith(".sql")) psql(theirs, join(schemaDirectory, file))
      }
      const dumps = yield* Effect.forEach([ours, theirs], (database) =>
        Effect.flatMap(connect(database.superuser, { connectionsMax: 1 }), catalog)
      )
      assert.isAbove(dumps[0]?.length ?? 0, 50)
      assert.deepStrictEqual(dumps[0], dumps[1])
    })
  )
})

describe("check", () => {
  it.live("lets a worker start on the schema of the package", () =>
    Effect.gen(function* () {
      const database = yield* freshDatabase
      yield* Migrations.check(yield* connect(database.worker))
    })
  )

  it.live(
    "refuses a database without the schema, an older one, and a newer one that forbids it",
    () =>
      Effect.gen(function* () {
        const database = yield* emptyDatabase
        const sql = yield* connect(database.owner)
        const refusal = (directory: string) =>
          Effect.map(Effect.flip(Migrations.check(sql, directory)), ({ reason, message }) => {
            assert(reason._tag === "SchemaRejected")
            return [reason.found, reason.needed, message] as const
          })
        const all = yield* folder(three)
        const [found, needed, message] = yield* refusal(all)
        assert.deepStrictEqual([found, needed], [0, 3])
        assert.include(message, "tenure migrate")
        const two = yield* folder({ "0001_base.sql": base, "0002_second.sql": second })
        yield* run(database, two)
        assert.deepStrictEqual((yield* refusal(all)).slice(0, 2), [2, 3])
        const older = yield* folder({ "0001_base.sql": base })
        // A deploy that overlaps keeps its older workers, until a file says that it cannot.
        yield* Migrations.check(sql, older)
        yield* sql`UPDATE tenure.migration SET oldest_code = 2 WHERE number = 2`
        assert.deepStrictEqual((yield* refusal(older)).slice(0, 2), [2, 1])
        yield* Migrations.check(sql, two)
      })
  )
})

describe("decide", () => {
  const migration = (number: number): Migrations.Migration => ({
    number,
    name: `m${number}`,
    file: `000${number}_m${number}.sql`,
    text: "",
    checksum: `c${number}`
  })
  const known = [1, 2, 3, 4].map(migration)
  // What each number has in the database: nothing, a record, one without checksum, or another file's.
  const states = Arbitrary.array(
    Arbitrary.schema(
      Schema.Literals(["absent", "recorded", "psql", "drifted", "renamed", "forbidding"])
    ),
    { minLength: 4, maxLength: 5 }
  )

  it.prop("proceeds only from a prefix of unchanged files", { states }, ({ states }) => {
    const recorded = states.flatMap((state, index): ReadonlyArray<Migrations.Recorded> => {
      const number = index + 1
      const name = state === "renamed" ? "other" : `m${number}`
      const checksum = state === "psql" ? null : state === "drifted" ? "other" : `c${number}`
      const oldestCode = state === "forbidding" ? number : 1
      return state === "absent" ? [] : [{ number, name, checksum, oldestCode }]
    })
    const decision = Migrations.decide(known, recorded)
    const applied = states.findLastIndex((state) => state !== "absent") + 1
    const newer = states[known.length]
    const sound =
      newer !== "forbidding" &&
      states
        .slice(0, Math.min(applied, known.length))
        .every((state) => state === "recorded" || state === "psql" || state === "forbidding")
    assert.strictEqual(decision._tag, sound ? "Proceed" : "Refused")
    if (decision._tag === "Proceed") {
      assert.deepStrictEqual(decision.pending, known.slice(applied))
      assert.deepStrictEqual(
        decision.adopt,
        known.filter((_, index) => states[index] === "psql")
      )
    }
  })
})

// Everything a dump of the schema would show, one line each.
const catalog = (sql: PgClient.PgClient) =>
  sql<{ readonly line: string }>`
    WITH ours AS (SELECT oid FROM pg_namespace WHERE nspname = 'tenure')
    SELECT line FROM (
      SELECT concat_ws(' ', 'relation', c.relname, c.relkind, c.relpersistence, c.reloptions, c.relacl,
                       c.relrowsecurity, pg_get_expr(c.relpartbound, c.oid),
                       CASE WHEN c.relkind = 'p' THEN pg_get_partkeydef(c.oid) END,
                       CASE WHEN c.relkind = 'v' THEN pg_get_viewdef(c.oid) END)
        FROM pg_class c, ours WHERE c.relnamespace = ours.oid
      UNION ALL
      SELECT concat_ws(' ', 'column', c.relname, a.attnum, a.attname, format_type(a.atttypid, a.atttypmod),
                       a.attnotnull, a.attidentity, a.attgenerated, a.attstorage, a.attacl,
                       pg_get_expr(d.adbin, d.adrelid))
        FROM ours JOIN pg_class c ON c.relnamespace = ours.oid
        JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0
        LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
      UNION ALL
      SELECT concat_ws(' ', 'constraint', c.conrelid::regclass, c.conname, pg_get_constraintdef(c.oid))
        FROM pg_constraint c, ours WHERE c.connamespace = ours.oid
      UNION ALL
      SELECT concat_ws(' ', 'index', pg_get_indexdef(i.indexrelid))
        FROM ours JOIN pg_class c ON c.relnamespace = ours.oid JOIN pg_index i ON i.indrelid = c.oid
      UNION ALL
      SELECT concat_ws(' ', 'function', pg_get_functiondef(p.oid), p.proacl)
        FROM pg_proc p, ours WHERE p.pronamespace = ours.oid AND p.prokind IN ('f', 'p')
      UNION ALL
      SELECT concat_ws(' ', 'trigger', pg_get_triggerdef(t.oid), t.tgenabled)
        FROM ours JOIN pg_class c ON c.relnamespace = ours.oid JOIN pg_trigger t ON t.tgrelid = c.oid
       WHERE NOT t.tgisinternal
      UNION ALL
      SELECT concat_ws(' ', 'type', t.typname, t.typtype, format_type(t.typbasetype, t.typtypmod))
        FROM pg_type t, ours WHERE t.typnamespace = ours.oid
      UNION ALL
      SELECT concat_ws(' ', 'schema', nspacl) FROM pg_namespace WHERE nspname = 'tenure'
      UNION ALL
      SELECT concat_ws(' ', 'comment', classoid::regclass, objsubid, description)
        FROM pg_description WHERE objoid IN
             (SELECT c.oid FROM pg_class c, ours WHERE c.relnamespace = ours.oid)
      UNION ALL
      SELECT concat_ws(' ', 'migration', number, name) FROM tenure.migration
    ) AS lines (line)
    ORDER BY line`.pipe(Effect.map((rows) => rows.map(({ line }) => line)))
