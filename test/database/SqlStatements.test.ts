/**
 * Goal: a script is cut exactly where the server's grammar ends a statement.
 * Method: properties over arbitrary text and over scripts built from everything that can hide a
 * semicolon; a real server, which refuses two statements in one message, judges the pieces.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect, Schema } from "effect"
import * as Arbitrary from "effect/Arbitrary"
import { isBlank, splitStatements } from "../../src/database/SqlStatements.ts"
import { connect, emptyDatabase } from "../support/Postgres.ts"

// Expressions, each a place where a semicolon does not end the statement.
const expressions = [
  "';'",
  "'a''b;'",
  "'a\\'",
  "E'a\\';b'",
  "e'a''\\';'",
  "E'\\\\'",
  "E'a'\n'\\';'",
  "E'a' -- it goes on ;\n  '\\';'",
  "U&'\\003B;'",
  "B'1'::text",
  "$$;$$",
  "$tag$ ; $$ ; $tag$",
  "$Ünï$;$Ünï$",
  "/* ; /* ' ; */ \" */ 1",
  "1 -- ; '\n",
  "(SELECT ';')",
  '1 AS ";"',
  '1 AS "a"";"',
  "1 AS a$b$c",
  "1 AS e, 'x'",
  "2 - - 1",
  "6 / 2"
]

// Any subset of the expressions, and now and then a routine whose body has statements of its own.
const statement = Arbitrary.map(
  Arbitrary.array(Arbitrary.schema(Schema.Literals(expressions)), { minLength: 1, maxLength: 4 }),
  (chosen) => `SELECT ${chosen.join(", ")} `
)
const routine = Arbitrary.schema(
  Schema.Literals([
    "CREATE OR REPLACE FUNCTION f() RETURNS int BEGIN ATOMIC SELECT 1; SELECT CASE WHEN true THEN 2 END; END",
    "create or replace procedure p() language sql begin atomic select 1; select ';'; end",
    "DO $do$ BEGIN PERFORM 1; PERFORM ';'; END $do$",
    "CREATE RULE r AS ON INSERT TO t DO ALSO (SELECT 1; SELECT 2)",
    "SELECT CASE WHEN true THEN 1 END"
  ])
)
const script = Arbitrary.map(
  Arbitrary.array(
    Arbitrary.flatMap(Arbitrary.schema(Schema.Int), (draw) =>
      draw % 4 === 0 ? routine : statement
    ),
    { maxLength: 6 }
  ),
  (statements) => statements.map((text) => `${text};`)
)

describe("splitStatements", () => {
  it.prop(
    "gives the input back when its pieces are put together",
    { text: Schema.String },
    ({ text }) => {
      assert.strictEqual(splitStatements(text).join(""), text)
    },
    { arbitrary: { runs: 500 } }
  )

  it.prop(
    "gives the input back for text made of nothing but delimiters",
    {
      parts: Arbitrary.array(
        Arbitrary.schema(
          Schema.Literals([
            "'",
            '"',
            "$",
            "$$",
            "$a$",
            "E'",
            "\\",
            "--",
            "/*",
            "*/",
            "\n",
            ";",
            "(",
            ")",
            "a",
            " ",
            "create function f ",
            "begin ",
            "end "
          ])
        ),
        { maxLength: 30 }
      )
    },
    ({ parts }) => {
      const text = parts.join("")
      assert.strictEqual(splitStatements(text).join(""), text)
    },
    { arbitrary: { runs: 1_000 } }
  )

  it.prop(
    "cuts a script into the statements it was built from",
    { script },
    ({ script }) => {
      assert.deepStrictEqual(splitStatements(script.join("")), script)
    },
    { arbitrary: { runs: 500 } }
  )

  it("leaves comments behind the last statement as a blank piece", () => {
    const pieces = splitStatements("SELECT 1;\n-- the end\n/* really */ ;")
    assert.deepStrictEqual(pieces.map(isBlank), [false, true])
  })

  it.live("makes pieces that the server takes one by one", () =>
    Effect.gen(function* () {
      const database = yield* emptyDatabase
      const sql = yield* connect(database.owner, { connectionsMax: 1 })
      const all = expressions.map((expression) => `SELECT ${expression} `).join(";")
      for (const piece of splitStatements(all)) {
        // A piece with half a string, or with two statements, is a syntax error.
        yield* sql.unsafe(piece).unprepared
      }
      const body = "BEGIN ATOMIC SELECT 1; SELECT CASE WHEN true THEN 2 END; END"
      const functions = `CREATE FUNCTION f() RETURNS int ${body};\nSELECT f();`
      assert.lengthOf(splitStatements(functions), 2)
      for (const piece of splitStatements(functions)) yield* sql.unsafe(piece).unprepared
    })
  )
})
