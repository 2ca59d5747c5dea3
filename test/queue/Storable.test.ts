/**
 * Goal: what is written as JSON is read as it was, or refused by name before anything is written, whatever
 * the value does when it is looked at (bug report 35 and its kind).
 * Method: properties over any JSON; a value of each kind that JSON cannot hold.
 */
import { assert, describe, it } from "@effect/vitest"
import { Schema } from "effect"
import { depthMax, describe as told, textOf, troubleOfKey } from "../../src/queue/Storable.ts"

const bytesMax = 1_000_000

const nested = (levels: number): unknown => {
  let value: unknown = 0
  for (let level = 0; level < levels; level++) value = level % 2 === 0 ? [value] : { a: value }
  return value
}

const cycle: Record<string, unknown> = {}
cycle["self"] = [cycle]

class Point {
  x = 1
}

const doubled = (times: number): unknown => {
  let value: unknown = ["x"]
  for (let turn = 0; turn < times; turn++) value = [value, value]
  return value
}

/** What each is called when it is refused. */
const refused: ReadonlyArray<readonly [what: string, value: unknown, words: RegExp]> = [
  ["NaN", { a: [Number.NaN] }, /the number NaN/],
  ["an infinity", -Infinity, /the number -Infinity/],
  ["undefined", undefined, /undefined/],
  ["an undefined field", { a: undefined }, /undefined/],
  ["a hole", Array(2), /hole/],
  ["a function", { a: () => 1 }, /a function/],
  ["its own toJSON", { toJSON: () => 1 }, /a function/],
  ["a symbol", Symbol("secret"), /^JSON cannot hold it: a symbol$/],
  ["a bigint", 1n, /a bigint/],
  ["a Date", new Date(0), /an object of a class/],
  ["a Map", new Map([[1, 2]]), /an object of a class/],
  ["an instance", [new Point()], /an object of a class/],
  ["a cycle", cycle, /a cycle/],
  ["10,000 levels", nested(10_000), /more than 1000 levels/],
  ["one level too many", nested(depthMax + 1), /more than 1000 levels/],
  [
    "a getter that throws",
    {
      get a() {
        throw new Error("no")
      }
    },
    /Error: no/
  ],
  [
    "a proxy that throws",
    new Proxy(
      {},
      {
        getPrototypeOf: () => {
          throw Symbol("no")
        }
      }
    ),
    /Symbol\(no\)/
  ],
  ["a text of 10 MB", "x".repeat(10_000_000), /the limit is 1000000/],
  ["two of each, sixty times over", doubled(60), /the limit is 1000000/]
]

describe("the text of a value", () => {
  it.prop("is read as the value that was written", { value: Schema.Json }, ({ value }) => {
    const text = textOf(value, bytesMax)
    assert(typeof text === "string")
    assert.deepStrictEqual(JSON.parse(text), value)
  })

  it("keeps what other writers of JSON lose", () => {
    const values: ReadonlyArray<unknown> = [
      "a\0b",
      "\ud800 and \udc00",
      [-0, 0, -1],
      { a: { b: [-0] }, c: "-0" },
      nested(depthMax),
      JSON.parse(`{"__proto__": {"polluted": 1}, "constructor": 1, "": 2}`),
      Object.create(null),
      Number.MAX_VALUE,
      "x".repeat(bytesMax - 2)
    ]
    for (const value of values) {
      const text = textOf(value, bytesMax)
      assert(typeof text === "string")
      const read: unknown = JSON.parse(text)
      assert.deepStrictEqual(read, Object.getPrototypeOf(value) === null ? {} : value)
    }
    assert.isUndefined(({} as { readonly polluted?: unknown }).polluted)
  })

  it.each(refused)("is refused by name: %s", (_, value, words) => {
    const text = textOf(value, bytesMax)
    assert(typeof text === "object")
    assert.match(text.message, words)
    assert.isBelow(text.message.length, 400)
  })
})

describe("a key", () => {
  it("is a text that an index can hold", () => {
    for (const key of ["a", "a'b", `"; DROP TABLE x; --`, "%I", " ", "😀".repeat(500)]) {
      assert.isUndefined(troubleOfKey(key), key)
    }
    assert.match(troubleOfKey("") ?? "", /empty/)
    assert.match(troubleOfKey("a\0") ?? "", /NUL/)
    assert.match(troubleOfKey("a\ud83d") ?? "", /surrogate/)
    assert.match(troubleOfKey("x".repeat(2001)) ?? "", /2000 bytes/)
    assert.match(troubleOfKey("ü".repeat(1001)) ?? "", /2000 bytes/)
    assert.match(troubleOfKey("x".repeat(10_000_000)) ?? "", /2000 bytes/)
  })
})

describe("what is told of an error", () => {
  it("is one bounded line, whatever was thrown", () => {
    const hostile = Object.assign(new Error("x"), { message: Symbol("no") as unknown as string })
    const errors = [hostile, Object.create(null), new Error("x".repeat(10_000_000)), null, Symbol()]
    for (const error of errors) assert.isAtMost(told(error).length, 300)
    assert.strictEqual(told(new TypeError("a\0")), "TypeError: a\0")
  })
})
