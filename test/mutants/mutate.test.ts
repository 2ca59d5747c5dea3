/**
 * Goal: the list of mutants follows the sources: each can still be applied, changes something, and
 * names a test that exists. Method: text only; what the mutants do is `npm run test:mutants`.
 */
import { assert, describe, it } from "@effect/vitest"
import { readFileSync } from "node:fs"
import { fileURLToPath } from "node:url"
import { mutate } from "./mutate.ts"
import { mutants } from "./mutants.ts"

const read = (path: string) =>
  readFileSync(fileURLToPath(new URL(`../../${path}`, import.meta.url)), "utf8")

const two = "CREATE FUNCTION a.one()\nx := 1;\n\nCREATE FUNCTION a.two()\nx := 1;\n"

describe("a mutation", () => {
  it("changes the function that it names and no other", () => {
    assert.strictEqual(
      mutate(two, { within: "a.two", changes: [["x := 1", "x := $& 2"]] }),
      "CREATE FUNCTION a.one()\nx := 1;\n\nCREATE FUNCTION a.two()\nx := $& 2;\n"
    )
    assert.strictEqual(
      mutate(two, { within: "a.one", changes: [["x := 1", "x := 2"]] }),
      "CREATE FUNCTION a.one()\nx := 2;\n\nCREATE FUNCTION a.two()\nx := 1;\n"
    )
  })

  it("is a problem when the text or the function is not there", () => {
    assert.notTypeOf(mutate(two, { within: "a.two", changes: [["y", "z"]] }), "string")
    assert.notTypeOf(mutate(two, { within: "a.three", changes: [["x", "z"]] }), "string")
    assert.notTypeOf(mutate(two, { within: "a.one", changes: [["two", "z"]] }), "string")
  })
})

describe("the list", () => {
  for (const mutant of mutants) {
    it(`applies: ${mutant.name}`, () => {
      const source = read(mutant.file)
      const mutated = mutate(source, mutant)
      if (typeof mutated !== "string") return assert.fail(mutated.problem)
      assert.notStrictEqual(mutated, source)
      // Names are made from templates here and there: their first words are in the text.
      assert.include(read(mutant.test.file), mutant.test.name.split(":")[0] ?? "")
    })
  }

  it("names no mutant twice", () => {
    assert.strictEqual(new Set(mutants.map(({ name }) => name)).size, mutants.length)
  })
})
