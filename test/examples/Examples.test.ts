/**
 * Goal: the examples of the README are code that compiles and does what is said of it.
 * Method: each is a module of this folder, compiled with the sources; here it is compared with its block in
 * the README, and run.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect, Layer, Option } from "effect"
import { readdirSync, readFileSync } from "node:fs"
import { Tenure } from "tenure"
import { present } from "../support/present.ts"
import { layerRuntime } from "../queue/runtime.ts"
import { Mails, MailsLive, whilePaused } from "./limits.ts"

const readme = readFileSync(new URL("../../README.md", import.meta.url), "utf8")

describe("the README", () => {
  for (const file of readdirSync(new URL(".", import.meta.url))) {
    if (file.endsWith(".test.ts")) continue
    it(`shows ${file} as it is`, () => {
      const block = readme.split(`<!-- example: ${file} -->\n\`\`\`ts\n`)[1]?.split("```")[0]
      assert.strictEqual(block, readFileSync(new URL(file, import.meta.url), "utf8"))
    })
  }
})

describe("its example of limits", () => {
  it.live("sends what is handed in, and nothing while it is paused", () =>
    Effect.gen(function* () {
      const client = yield* Tenure.Client
      yield* client.ready
      yield* Layer.build(MailsLive)
      const mails = Array.from({ length: 12 }, (_, n) => ({ tenant: `t${n % 3}`, to: `${n}` }))
      const during = yield* whilePaused(
        Effect.gen(function* () {
          const ids = yield* Mails.enqueueAll(mails)
          yield* Effect.sleep("100 millis")
          assert.isTrue(Option.isNone(yield* Mails.poll(present(ids[0]))))
          return ids
        })
      )
      yield* Effect.forEach(during, (id) => Mails.await(id), { concurrency: "unbounded" })
    }).pipe(Effect.scoped, Effect.provide(layerRuntime()))
  )
})
