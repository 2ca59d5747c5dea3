/**
 * Goal: a process that dies after it has sent something, and before it could store the receipt, leaves
 * an outcome that nobody takes for a failure: who goes on asks by the same key, sends again under the
 * same key, or is told that it is unknown (K-137, K-157 to K-161).
 * Method: a worker that kills itself when three effects have arrived in the outside world, and a peer.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect } from "effect"
import { run, steady } from "./support/World.ts"

const at = "queue.step.returned"

describe("an effect whose receipt was lost with its process", () => {
  it.live(
    "is asked for, sent again under its key, or unknown, as the handler says",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const victim = yield* world.ready({
            // All three are out before the process dies, and none is stored.
            faults: [
              { at, do: "stay", turn: 1 },
              { at, do: "stay", turn: 2 },
              { at, do: "die", turn: 3 }
            ]
          })
          const [asks, repeats, neither] = yield* world.enqueue([
            [{ do: "send", name: "ask", resolve: "ask" }],
            [{ do: "send", name: "again", resolve: "again" }],
            [{ do: "send", name: "none", resolve: "none" }]
          ])
          yield* victim.ended
          const sent = ["again", "ask", "none"]
          assert.deepStrictEqual(
            world.sink
              .arrivals()
              .map(({ name }) => name)
              .sort(),
            sent
          )
          assert.deepStrictEqual(yield* world.sql`SELECT name FROM tenure.step ORDER BY name`, [
            ...sent.map((name) => ({ name: `~intent/${name}` }))
          ])

          const peer = yield* world.ready({ settings: steady })
          yield* world.allSettled()
          const keysOf = (name: string) => world.sink.arrivalsOf(name).map(({ key }) => key)
          assert.deepStrictEqual(keysOf("ask"), [`${asks}/ask`])
          assert.deepStrictEqual(world.sink.questions(), [`${asks}/ask`])
          assert.deepStrictEqual(keysOf("again"), [`${repeats}/again`, `${repeats}/again`])
          assert.deepStrictEqual(keysOf("none"), [`${neither}/none`])
          assert.deepStrictEqual(
            peer.said().filter((one) => one.say === "unknown"),
            [{ say: "unknown", item: neither ?? "", step: "none", key: `${neither}/none` }]
          )
          // The receipts: what the outside world has answered, to the question or to the second call.
          const receipts = yield* world.sql<{ readonly name: string; readonly value: string }>`
            SELECT name, value #>> '{}' AS value FROM tenure.step WHERE name !~ '^~' ORDER BY name`
          const valueOf = (name: string) => world.sink.arrivalsOf(name).at(-1)?.value
          assert.deepStrictEqual(
            receipts,
            ["again", "ask"].map((name) => ({ name, value: valueOf(name) ?? "" }))
          )
        })
      ),
    300_000
  )
})
