/**
 * Goal: a changed file is indexed again, an unchanged one is not, one that is gone is forgotten, and
 * what an earlier start left is gone on with.
 * Method: what is known and what is found, in every relation to each other.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect, Schema } from "effect"
import { compare } from "../../src/main/demo/HandIn.ts"

const Files = Schema.Array(
  Schema.Struct({
    known: Schema.Boolean,
    found: Schema.Boolean,
    changed: Schema.Boolean,
    round: Schema.Literals([1, 2, 7]),
    state: Schema.Literals(["waiting", "indexed", "refused"])
  })
)

describe("comparing a folder with what is known of it", () => {
  it.effect.prop(
    "gives each file one answer, and a file that is handed in a round of its own",
    { files: Files, again: Schema.Boolean },
    ({ again, files }) =>
      Effect.sync(() => {
        const path = (index: number) => `file-${index}`
        const known = files.flatMap(({ known, round, state }, index) =>
          known
            ? [
                {
                  path: path(index),
                  fingerprint: "old",
                  round,
                  state,
                  itemId: `item-${index}`,
                  problem: state === "refused" ? "it is empty" : null
                }
              ]
            : []
        )
        const found = files.flatMap(({ changed, found }, index) =>
          found ? [{ path: path(index), fingerprint: changed ? "new" : "old" }] : []
        )
        const { gone, handIn, resumed, unchanged } = compare(known, found, again)
        const handedIn = new Map(handIn.map((file) => [file.path, file.round]))
        files.forEach((file, index) => {
          const answers = [
            handedIn.has(path(index)) ? "hand in" : "",
            resumed.some((one) => one.path === path(index)) ? "resume" : "",
            unchanged.some((one) => one.path === path(index)) ? "leave" : "",
            gone.includes(path(index)) ? "forget" : ""
          ].filter((answer) => answer !== "")
          const isUnchanged = file.known && !file.changed
          const expected = !file.found
            ? file.known
              ? ["forget"]
              : []
            : !isUnchanged
              ? ["hand in"]
              : file.state === "waiting"
                ? ["resume"]
                : again
                  ? ["hand in"]
                  : ["leave"]
          assert.deepStrictEqual(answers, expected)
          if (handedIn.has(path(index))) {
            assert.strictEqual(handedIn.get(path(index)), file.known ? file.round + 1 : 1)
          }
        })
      })
  )
})
