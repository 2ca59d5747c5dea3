/**
 * Goal: there is no way to write to a fenced table that the fence does not see, and no table that
 * work may write to without somebody being told (I1; rows 37 and 38).
 * Method: the tables come from the catalog, ours and an application's; each is tried with every kind
 * of statement, most of which touch no row at all. A superuser runs them, so that no missing right
 * stands in for the fence: with the identity of a revoked executor each must be refused, and the same
 * statement must pass with a live one.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect } from "effect"
import type { SqlError } from "effect/sql/SqlError"
import { sqlState } from "../../src/database/SqlState.ts"
import * as Fixture from "../isolation/Fixture.ts"
import type { Session } from "../isolation/Isolation.ts"

const application = [
  "CREATE TABLE app.parent (id int PRIMARY KEY, text text)",
  "SELECT tenure.exempt_table('app.parent', 'the test writes to it to reach its child')",
  `CREATE TABLE app.child (id int PRIMARY KEY, text text,
     parent_id int REFERENCES app.parent ON DELETE CASCADE ON UPDATE CASCADE)`,
  "CREATE TABLE app.measure (id int PRIMARY KEY, text text) PARTITION BY RANGE (id)",
  "CREATE TABLE app.measure_low PARTITION OF app.measure FOR VALUES FROM (0) TO (100)",
  "CREATE TABLE app.measure_high PARTITION OF app.measure FOR VALUES FROM (100) TO (200) PARTITION BY RANGE (id)",
  "CREATE TABLE app.measure_high_leaf PARTITION OF app.measure_high FOR VALUES FROM (100) TO (200)",
  "SELECT tenure.fence_table(t::regclass) FROM unnest(ARRAY['app.child', 'app.measure']) t",
  "INSERT INTO app.parent VALUES (1, 'a'), (2, 'b')",
  "INSERT INTO app.child VALUES (1, 'a', 1)",
  `CREATE FUNCTION app.run(statement text) RETURNS void LANGUAGE plpgsql SECURITY DEFINER AS
     $$ BEGIN EXECUTE statement; END $$`,
  `CREATE FUNCTION app.attempt(statement text) RETURNS text LANGUAGE plpgsql AS $$
   BEGIN
     EXECUTE statement;
     RAISE EXCEPTION 'undone' USING ERRCODE = 'UNDO0';
   EXCEPTION WHEN OTHERS THEN
     RETURN CASE SQLSTATE WHEN 'UNDO0' THEN 'ok' ELSE SQLSTATE END;
   END $$`
]

interface Table {
  readonly name: string
  /** Of its primary key. */
  readonly key: string
  readonly column: string
}

const fencedTables = (fixture: Fixture.Fixture) =>
  fixture.owner.unsafe<Table & Record<string, unknown>>(`
    SELECT c.oid::regclass::text AS name, max(a.attname) AS "column",
           (SELECT string_agg(k.attname, ', ') FROM pg_index i JOIN pg_attribute k
             ON k.attrelid = i.indrelid AND k.attnum = ANY(i.indkey)
            WHERE i.indrelid = c.oid AND i.indisprimary) AS key
      FROM pg_class c
      JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND a.attidentity = '' AND NOT a.attisdropped
     WHERE c.relkind IN ('r', 'p') AND c.relnamespace IN ('tenure'::regnamespace, 'app'::regnamespace)
       AND c.oid::regclass::text <> ALL(ARRAY[
         'tenure.migration', 'tenure.executor', 'tenure.exempt_table', 'app.parent', 'app.lanes'])
     GROUP BY c.oid ORDER BY 1`)

const nothing = (table: Table) =>
  `INSERT INTO ${table.name} OVERRIDING SYSTEM VALUE SELECT * FROM ${table.name} LIMIT 0`

/** Every way to write, none of which needs a row to be there. */
const ways: Readonly<Record<string, (table: Table) => string>> = {
  INSERT: nothing,
  "INSERT .. ON CONFLICT DO NOTHING": (table) => `${nothing(table)} ON CONFLICT DO NOTHING`,
  "INSERT .. ON CONFLICT DO UPDATE": (table) =>
    `${nothing(table)} ON CONFLICT (${table.key}) DO UPDATE SET ${table.column} = excluded.${table.column}`,
  UPDATE: (table) => `UPDATE ${table.name} SET ${table.column} = ${table.column} WHERE false`,
  "UPDATE .. FROM": (table) =>
    `UPDATE ${table.name} t SET ${table.column} = t.${table.column} FROM app.parent p WHERE p.id = 0`,
  DELETE: (table) => `DELETE FROM ${table.name} WHERE false`,
  "DELETE .. USING": (table) => `DELETE FROM ${table.name} t USING app.parent p WHERE p.id = 0`,
  MERGE: (table) =>
    `MERGE INTO ${table.name} t USING (SELECT 1 WHERE false) s ON true WHEN MATCHED THEN DELETE`,
  COPY: (table) => `COPY ${table.name} FROM '/dev/null'`,
  TRUNCATE: (table) => `TRUNCATE ${table.name}`,
  "TRUNCATE CASCADE": (table) => `TRUNCATE ${table.name} CASCADE`,
  "a CTE": (table) => `WITH gone AS (DELETE FROM ${table.name} WHERE false RETURNING 1) SELECT 1`,
  "a view": (table) => `DELETE FROM ${viewOf(table)} WHERE false`,
  "a function": (table) => `SELECT app.run('DELETE FROM ${table.name} WHERE false') IS NULL`,
  "a DO block": (table) => `DO $$ BEGIN DELETE FROM ${table.name} WHERE false; END $$`,
  "EXPLAIN ANALYZE": (table) => `EXPLAIN ANALYZE DELETE FROM ${table.name} WHERE false`
}

const viewOf = (table: Table) => `app.view_${table.name.replace(/\W/g, "_")}`

const answerOf = Effect.fnUntraced(function* (session: Session, statement: string) {
  yield* session.sql.unsafe("BEGIN")
  const answer = yield* Effect.match(session.sql.unsafe(statement).unprepared, {
    onSuccess: () => "ok",
    onFailure: (error: SqlError) => `${sqlState(error)} ${error.message}`.slice(0, 5)
  })
  yield* session.sql.unsafe("ROLLBACK")
  return answer
})

/** Many at once, each undone by a savepoint of its own: some thousand are tried. */
const answersOf = (session: Session, statements: ReadonlyArray<string>) =>
  Effect.map(
    session.sql<{ readonly answer: string }>`
      SELECT app.attempt(s.text) AS answer FROM unnest(${statements}::text[]) WITH ORDINALITY s(text, place)
       ORDER BY s.place`,
    (rows) => rows.map(({ answer }) => answer)
  )

const scene = Effect.gen(function* () {
  const fixture = yield* Fixture.make
  for (const statement of application) yield* fixture.owner.unsafe(statement)
  const tables = yield* fencedTables(fixture)
  for (const table of tables) {
    yield* fixture.owner.unsafe(`CREATE VIEW ${viewOf(table)} AS SELECT * FROM ${table.name}`)
  }
  const dead = yield* fixture.executor
  const [revoked, alive] = [
    yield* fixture.session({ role: "superuser", executor: dead }),
    yield* fixture.session({ role: "superuser", executor: yield* fixture.executor })
  ]
  yield* fixture.owner.unsafe(Fixture.statements.mark(dead))
  yield* fixture.owner.unsafe(Fixture.statements.revoke(dead))
  return { fixture, tables, revoked, alive }
})

describe("every way to write to every fenced table", () => {
  it.live("is refused to a revoked executor, and open to a live one", () =>
    Effect.gen(function* () {
      const { alive, revoked, tables } = yield* scene
      const names = tables.map(({ name }) => name)
      assert.includeMembers(names, ["tenure.ready", "tenure.claimed", "tenure.done", "tenure.lane"])
      assert.includeMembers(names, [
        "app.child",
        "app.measure",
        "app.measure_low",
        "app.measure_high_leaf"
      ])
      assert.isAbove(
        names.filter((name) => /^tenure\.(item|done|step)_p\d+$/.test(name)).length,
        20
      )
      const wrong: Array<string> = []
      for (const replica of [false, true]) {
        const role = `SET session_replication_role = ${replica ? "replica" : "origin"}`
        for (const session of [revoked, alive]) yield* session.sql.unsafe(role)
        for (const [way, statementOf] of Object.entries(ways)) {
          // Twice as slow for no further insight: what replica switches off are triggers, not ways.
          if (replica && !["INSERT", "UPDATE", "DELETE", "COPY", "TRUNCATE"].includes(way)) continue
          const statements = tables.map(statementOf)
          const refused = yield* answersOf(revoked, statements)
          const passed = replica ? [] : yield* answersOf(alive, statements)
          statements.forEach((statement, index) => {
            if (refused[index] === "TN002" && (replica || passed[index] === "ok")) return
            wrong.push(
              `${refused[index]}, ${passed[index]}${replica ? " (replica)" : ""}: ${statement}`
            )
          })
        }
      }
      assert.deepStrictEqual(wrong, [])
    })
  )

  it.live("includes what other tables bring about", () =>
    Effect.gen(function* () {
      const { alive, fixture, revoked } = yield* scene
      const reached = [
        // The parent has no fence of its own: only the child's can refuse.
        "DELETE FROM app.parent WHERE id = 1",
        "UPDATE app.parent SET id = 10 WHERE id = 1",
        "TRUNCATE app.parent CASCADE",
        "UPDATE app.measure SET id = 150 WHERE id = 50",
        "WITH moved AS (INSERT INTO app.child VALUES (9, 'c', 2) RETURNING id) DELETE FROM app.parent WHERE false"
      ]
      for (const statement of reached) {
        assert.strictEqual(yield* answerOf(revoked, statement), "TN002", statement)
        assert.strictEqual(yield* answerOf(alive, statement), "ok", statement)
      }
      assert.strictEqual(yield* answerOf(revoked, "INSERT INTO app.parent VALUES (3, 'c')"), "ok")
      assert.strictEqual(yield* fixture.value("SELECT count(*) FROM app.child"), "1")
    })
  )

  it.live("is open through a partition without a fence, or a trigger that replica mode skips", () =>
    Effect.gen(function* () {
      const { fixture, revoked } = yield* scene
      yield* fixture.owner.unsafe(
        "CREATE TABLE app.measure_late PARTITION OF app.measure FOR VALUES FROM (200) TO (300)"
      )
      assert.strictEqual(
        yield* answerOf(revoked, "INSERT INTO app.measure VALUES (200, 'x')"),
        "TN002"
      )
      assert.strictEqual(
        yield* answerOf(revoked, "INSERT INTO app.measure_late VALUES (200, 'x')"),
        "ok"
      )
      yield* fixture.owner.unsafe("ALTER TABLE app.note ENABLE TRIGGER tenure_fence")
      yield* revoked.sql.unsafe("SET session_replication_role = replica")
      assert.strictEqual(yield* answerOf(revoked, Fixture.statements.write), "ok")
    })
  )
})

describe("the list of tables without a fence", () => {
  /** As the role that work logs in with. */
  const listOf = (session: Session) =>
    Effect.map(
      session.sql.unsafe<{ readonly name: string }>(
        "SELECT u.name FROM tenure.unfenced_tables() u"
      ),
      (rows) => rows.map(({ name }) => name)
    )

  it.live("names every gap that a migration can leave, and nothing else", () =>
    Effect.gen(function* () {
      const { fixture } = yield* scene
      const worker = yield* fixture.session()
      const grant = (table: string, rights = "INSERT, UPDATE, DELETE, TRUNCATE") =>
        `GRANT ${rights} ON ${table} TO tenure_worker`
      const gaps: ReadonlyArray<readonly [name: string, ...statements: ReadonlyArray<string>]> = [
        ["app.plain", "CREATE TABLE app.plain (id int)", grant("app.plain")],
        [
          "app.measure_late",
          "CREATE TABLE app.measure_late PARTITION OF app.measure FOR VALUES FROM (200) TO (300)",
          grant("app.measure_late")
        ],
        [
          "app.attached",
          "CREATE TABLE app.attached (id int PRIMARY KEY, text text)",
          grant("app.attached"),
          "ALTER TABLE app.measure ATTACH PARTITION app.attached FOR VALUES FROM (300) TO (400)"
        ],
        [
          "app.disabled",
          "CREATE TABLE app.disabled (id int)",
          "SELECT tenure.fence_table('app.disabled')",
          "ALTER TABLE app.disabled DISABLE TRIGGER tenure_fence",
          grant("app.disabled")
        ],
        [
          "app.origin_only",
          "CREATE TABLE app.origin_only (id int)",
          "SELECT tenure.fence_table('app.origin_only')",
          "ALTER TABLE app.origin_only ENABLE TRIGGER tenure_fence",
          grant("app.origin_only")
        ],
        [
          "app.truncatable",
          "CREATE TABLE app.truncatable (id int)",
          `CREATE TRIGGER tenure_fence BEFORE INSERT OR UPDATE OR DELETE ON app.truncatable
             FOR EACH STATEMENT EXECUTE FUNCTION tenure.fence()`,
          "ALTER TABLE app.truncatable ENABLE ALWAYS TRIGGER tenure_fence",
          grant("app.truncatable", "TRUNCATE")
        ],
        [
          "app.sometimes",
          "CREATE TABLE app.sometimes (id int)",
          `CREATE TRIGGER tenure_fence BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON app.sometimes
             FOR EACH STATEMENT WHEN (current_user <> 'tenure_test_worker') EXECUTE FUNCTION tenure.fence()`,
          "ALTER TABLE app.sometimes ENABLE ALWAYS TRIGGER tenure_fence",
          grant("app.sometimes")
        ],
        [
          "app.some_columns",
          "CREATE TABLE app.some_columns (id int, text text)",
          `CREATE TRIGGER tenure_fence
             BEFORE INSERT OR UPDATE OF text OR DELETE OR TRUNCATE ON app.some_columns
             FOR EACH STATEMENT EXECUTE FUNCTION tenure.fence()`,
          "ALTER TABLE app.some_columns ENABLE ALWAYS TRIGGER tenure_fence",
          grant("app.some_columns")
        ],
        [
          'app."Quoted Name"',
          'CREATE TABLE app."Quoted Name" (id int)',
          grant('app."Quoted Name"')
        ],
        [
          "app.by_column",
          "CREATE TABLE app.by_column (id int)",
          grant("app.by_column", "UPDATE (id)")
        ],
        ["app.unlogged", "CREATE UNLOGGED TABLE app.unlogged (id int)", grant("app.unlogged")],
        ["tenure.waiter", "DROP TRIGGER tenure_fence ON tenure.waiter"]
      ]
      yield* fixture.owner.unsafe("SELECT tenure.exempt_table('app.lanes', 'made by the test')")
      assert.deepStrictEqual(yield* listOf(worker), [])
      for (const [name, ...statements] of gaps) {
        for (const statement of statements) yield* fixture.owner.unsafe(statement)
        assert.include(yield* listOf(worker), name)
      }
      assert.sameMembers(
        yield* listOf(worker),
        gaps.map(([name]) => name)
      )
      // What the worker cannot write to needs no fence.
      yield* fixture.owner.unsafe("CREATE TABLE app.read_only (id int)")
      yield* fixture.owner.unsafe("GRANT SELECT ON app.read_only TO tenure_worker")
      yield* worker.sql.unsafe("CREATE TEMP TABLE own (id int)")
      assert.lengthOf(yield* listOf(worker), gaps.length)
      // The remedies: a fence, or a declared exception with its reason.
      for (const [name] of gaps) {
        const remedy =
          name === "app.plain" ? `exempt_table('${name}', 'reason')` : `fence_table('${name}')`
        yield* fixture.owner.unsafe(`SELECT tenure.${remedy}`)
      }
      assert.deepStrictEqual(yield* listOf(worker), [])
    })
  )
})
