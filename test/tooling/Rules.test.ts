/**
 * Goal: the two rules that `npm run check` holds by itself catch what they are for.
 * Method: examples, and the sources as they are.
 */
import { assert, describe, it } from "@effect/vitest"
import { violations } from "./Direction.ts"
import { violationsInCode, violationsInSchema } from "./SqlClock.ts"

const source = (path: string, ...targets: ReadonlyArray<string>) => ({
  path,
  text: targets.map((target) => `import { x } from "${target}"`).join("\n")
})

describe("the direction of dependencies", () => {
  it("lets a folder import what stands below it, and a fault point from anywhere", () => {
    const sources = [
      source("queue/Runner.ts", "../executor/Executor.ts", "../testing/FaultPoint.ts", "./Step.ts"),
      source("main/Tenure.ts", "../http/Health.ts", "../queue/Runner.ts"),
      source("index.ts", "./main/Tenure.ts")
    ]
    assert.deepStrictEqual(violations(sources), [])
  })

  it("refuses an import of what stands above, also a dynamic one and one of a type", () => {
    for (const text of [
      `import type { Run } from "../queue/Runner.ts"`,
      `export * from "../queue/Runner.ts"`,
      `await import("../queue/Runner.ts")`
    ]) {
      assert.deepStrictEqual(violations([{ path: "executor/Executor.ts", text }]), [
        "executor/Executor.ts: executor must not import queue (queue/Runner.ts)"
      ])
    }
  })

  it("refuses a cycle between folders of one level, once", () => {
    const sources = [
      source("http/Health.ts", "../main/Tenure.ts"),
      source("main/Tenure.ts", "../http/Health.ts")
    ]
    assert.deepStrictEqual(violations(sources), ["a cycle: http -> main -> http"])
  })

  it("refuses a folder it does not know", () => {
    assert.lengthOf(violations([source("utils/Text.ts")]), 1)
  })
})

describe("the clock in SQL", () => {
  it("is tenure.clock() alone", () => {
    for (const other of [
      "now()",
      "CURRENT_TIMESTAMP",
      "statement_timestamp()",
      "clock_timestamp()"
    ]) {
      assert.lengthOf(violationsInSchema("f.sql", `UPDATE t SET at = ${other};`), 1, other)
      assert.lengthOf(
        violationsInCode("f.ts", `sql<{ readonly at: Date }>\`SELECT ${other}\``),
        1,
        other
      )
    }
    assert.deepStrictEqual(violationsInSchema("f.sql", "now := tenure.clock(); -- not now()"), [])
  })

  it("may be read by what defines it", () => {
    const definition =
      "CREATE FUNCTION tenure.clock() RETURNS timestamptz AS $$ SELECT clock_timestamp() $$;"
    assert.deepStrictEqual(violationsInSchema("f.sql", definition), [])
  })

  it("never stands bare in a predicate", () => {
    const bare = "SELECT id FROM t WHERE a = 1 AND expires_at <= tenure.clock() ORDER BY id"
    assert.lengthOf(violationsInSchema("f.sql", bare), 1)
    for (const fine of [
      "SELECT id FROM t WHERE expires_at <= (SELECT tenure.clock())",
      "UPDATE t SET at = tenure.clock() WHERE id = 1",
      "IF lease.expires_at <= tenure.clock() THEN RETURN; END IF",
      "INSERT INTO t SELECT id, tenure.clock() FROM u"
    ]) {
      assert.deepStrictEqual(violationsInSchema("f.sql", fine), [], fine)
    }
  })
})
