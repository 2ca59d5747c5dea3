/**
 * Goal: nothing of a document is lost by cutting it, every chunk fits an index, and every file that
 * is no document gets the one reason for it.
 * Method: texts made of what documents are made of (headings, paragraphs, long lines, characters of
 * two units), and bytes of every kind.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect, Schema } from "effect"
import {
  bytesMax,
  chunkMax,
  classify,
  NotIndexed,
  printable,
  split,
  titleOf,
  tooLarge
} from "../../src/main/demo/Documents.ts"

const parts = [
  "# Heading\n",
  "### A deeper one ###\r\n",
  "a paragraph of some words, ",
  "\n",
  "\n\n",
  "\t ",
  "😀",
  "ä",
  "```\n# no heading\n```\n",
  `${"x".repeat(700)} `,
  "y".repeat(2500),
  `${"😀".repeat(900)}`
] as const

const Text = Schema.Array(Schema.Literals(parts))

describe("a document", () => {
  it.effect.prop(
    "is the same after it was cut, in chunks that are not too long and split no character",
    { text: Text },
    ({ text: of }) =>
      Effect.sync(() => {
        const text = of.join("")
        const chunks = split(text)
        assert.strictEqual(chunks.map((chunk) => chunk.text).join(""), text)
        let before = ""
        chunks.forEach((chunk, index) => {
          assert.isAtLeast(chunk.text.length, 1)
          assert.isAtMost(chunk.text.length, chunkMax)
          assert.isTrue(chunk.text.isWellFormed())
          assert.isTrue(chunk.heading.isWellFormed())
          assert.strictEqual(chunk.number, index + 1)
          assert.strictEqual(chunk.line, before.split("\n").length)
          before += chunk.text
        })
      }),
    { arbitrary: { runs: 300 } }
  )

  it.effect("is cut before its headings once there is enough to stand alone", () =>
    Effect.sync(() => {
      const section = (name: string) => `# ${name}\n\n${"words of a paragraph. ".repeat(20)}\n\n`
      const chunks = split(section("One") + section("Two"))
      assert.deepStrictEqual(
        chunks.map(({ heading, line, number }) => ({ heading, line, number })),
        [
          { heading: "One", line: 1, number: 1 },
          { heading: "Two", line: 5, number: 2 }
        ]
      )
      assert.strictEqual(titleOf("docs/a.md", chunks), "One")
      assert.strictEqual(titleOf("docs/a.md", split("no heading")), "a.md")
      assert.strictEqual(titleOf("b.md", split("```sh\n# install\n```\n# Real\n")), "Real")
      assert.strictEqual(titleOf("a.ts", split("/**\n * @title Of a source\n */\n")), "Of a source")
    })
  )
})

describe("a file", () => {
  it.effect.prop(
    "is a text, byte for byte, or has one reason why it is none",
    { bytes: Schema.Array(Schema.Int.check(Schema.isBetween({ minimum: 0, maximum: 255 }))) },
    ({ bytes: of }) =>
      Effect.sync(() => {
        const bytes = Uint8Array.from(of)
        const found = classify(bytes)
        if (typeof found === "string") {
          assert.deepStrictEqual(new Uint8Array(Buffer.from(found)), bytes)
          assert.notInclude(found, "\0")
          assert.notStrictEqual(found.trim(), "")
        } else {
          const refused = new NotIndexed({ path: "a", ...found })
          assert.include(refused.message, found.detail)
        }
      })
  )

  it.effect("is named for what is wrong with it", () =>
    Effect.sync(() => {
      const reason = (bytes: Uint8Array | string) => {
        const found = classify(typeof bytes === "string" ? Buffer.from(bytes) : bytes)
        return typeof found === "string" ? "text" : found.reason
      }
      assert.strictEqual(reason(""), "empty")
      assert.strictEqual(reason(" \n\t"), "empty")
      assert.strictEqual(reason("a\0b"), "binary")
      assert.strictEqual(reason(Uint8Array.of(0x63, 0xe9, 0x0a)), "notUtf8")
      assert.strictEqual(reason(Uint8Array.of(0xff, 0xfe, 0x68, 0)), "notUtf8")
      assert.strictEqual(reason(Uint8Array.of(0xed, 0xa0, 0x80)), "notUtf8", "half a character")
      assert.strictEqual(reason("\ufeffwith a byte order mark"), "text")
      assert.strictEqual(reason("a".repeat(bytesMax)), "text")
      assert.strictEqual(reason("a".repeat(bytesMax + 1)), "huge")
      assert.strictEqual(tooLarge(6_000_000).detail, "5.7 MB")
    })
  )

  it.effect.prop(
    "cannot move the cursor by its name or its words",
    { text: Schema.String },
    ({ text }) =>
      Effect.sync(() => {
        const shown = printable(`${text}\u001b[2J\r\n\u009b1m\u2028\u202e${text}`)
        assert.isFalse(/[\p{Cc}\p{Zl}\p{Zp}\u202e]/u.test(shown))
      })
  )
})
