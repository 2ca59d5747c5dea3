/**
 * Goal: the README's example of schedules is code that works.
 * Method: it is compiled as a file of its own, is the same text, and is run.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect, Layer, Option } from "effect"
import { SqlClient } from "effect/sql"
import { readFileSync } from "node:fs"
import { Schedules } from "tenure"
import { layerRuntime } from "../queue/runtime.ts"
import { again, ReportsLive } from "./schedules.ts"

const read = (path: string) => readFileSync(new URL(path, import.meta.url), "utf8")

describe("the README's example of schedules", () => {
  it("is the one that is compiled", () => {
    const block = /<!-- example: schedules\.ts -->\s*```ts\n([\s\S]*?)```/.exec(
      read("../../README.md")
    )
    assert.strictEqual(block?.[1], read("schedules.ts"))
  })

  it.live("hands in an item at three in Istanbul, and those of a week that has passed", () =>
    Effect.gen(function* () {
      const sql = yield* SqlClient.SqlClient
      const [nightly] = yield* Schedules.list()
      assert.strictEqual(
        Option.map(Option.fromUndefinedOr(nightly), ({ definition }) => definition).pipe(
          Option.getOrUndefined
        ),
        "cron 0 3 * * * Europe/Istanbul"
      )
      const { slots } = yield* again
      const done = sql<{ until: string }>`
        SELECT i.payload ->> 'until' AS until FROM tenure.done d JOIN tenure.item i ON i.id = d.id
         WHERE d.queue_id > 0 AND d.outcome = 'completed' ORDER BY i.seq`
      while ((yield* done).length < slots) yield* Effect.sleep("10 millis")
      assert.strictEqual(slots, 7)
      assert.strictEqual((yield* done)[0]?.until, "2025-11-01T00:00:00.000Z")
    }).pipe(Effect.provide(ReportsLive.pipe(Layer.provideMerge(layerRuntime()))))
  )
})
