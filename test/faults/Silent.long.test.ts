/**
 * Goal: connections that fall silent under a claim, an outcome and a scan are replaced before anything
 * counts as stuck (K-045).
 * Method: a proxy freezes the business connections that are open at one moment, and lets new ones through.
 * Long, because the driver needs five seconds for each that it gives up.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect } from "effect"
import { run, steady } from "./support/World.ts"

describe("a process whose open business connections fall silent", () => {
  it.live(
    "goes on with others, and charges nobody",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const proxy = yield* world.proxy
          const worker = yield* world.ready({
            url: proxy.url,
            settings: steady
          })
          yield* world.enqueue([[{ do: "wait", gate: "finish" }]])
          yield* world.until("it runs", () => world.sink.waiting("finish") === 1)
          yield* proxy.setOpen("freeze", "tenure work")
          yield* world.sink.open("finish")
          yield* world.enqueue([[{ do: "post", name: "next" }]])
          yield* world.allSettled()
          assert.isFalse(worker.hasEnded())
          for (const one of yield* world.outcomes) {
            assert.deepInclude(one, { outcome: "completed", losses: 0, failures: 0 })
          }
          yield* proxy.heal
        })
      ),
    300_000
  )
})
