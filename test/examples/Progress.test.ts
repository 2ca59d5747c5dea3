/**
 * Goal: the README's example of progress is code that compiles and does what is said of it.
 * Method: compiled with the sources; compared with its block in the README, and run.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect, Layer, Logger, References, Stream } from "effect"
import { readFileSync } from "node:fs"
import { layerRuntime } from "../queue/runtime.ts"
import { follow, Import, ImportLive } from "./progress.ts"

const read = (path: string) => readFileSync(new URL(path, import.meta.url), "utf8")

describe("the README's example of progress", () => {
  it("is the one that is compiled", () => {
    const [, behind] = read("../../README.md").split("<!-- example: progress.ts -->\n```ts\n")
    assert.strictEqual(behind?.split("```")[0], read("progress.ts"))
  })

  it.live("tells how far an item is, and then how it went", () =>
    Effect.gen(function* () {
      const told: Array<string> = []
      const logger = Logger.make(({ message }) => void told.push(String(message)))
      const id = yield* Import.enqueue({ lines: ["a", "b", "c"] })
      yield* follow(id).pipe(
        Effect.provideService(Logger.CurrentLoggers, new Set([logger])),
        Effect.provideService(References.MinimumLogLevel, "Info" as const)
      )
      assert.strictEqual(told.at(-1), "3 of 3")
      assert.deepStrictEqual(yield* Stream.runCollect(Import.progress(id)), [{ done: 3, of: 3 }])
    }).pipe(Effect.provide(ImportLive.pipe(Layer.provideMerge(layerRuntime()))))
  )
})
