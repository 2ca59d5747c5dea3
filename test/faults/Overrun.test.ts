/**
 * Goal: an attempt that runs out of its time is told to stop before its item may run again, a handler
 * that does not obey never runs beside its own retry, and a retry without a pause needs no poll
 * (bug report 10).
 * Method: a worker whose attempts have half a second, and handlers that wait for the test.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect } from "effect"
import { run, steady } from "./support/World.ts"

const orders = { settings: steady, timeoutMillis: 500, retries: 3, retryMillis: 0 }

describe.concurrent("an attempt that overruns", () => {
  it.live(
    "is over before the next one of its item begins",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const worker = yield* world.ready(orders)
          const [item = ""] = yield* world.enqueue([
            [
              { do: "wait", gate: "never", onAttempt: [1, 2] },
              { do: "step", name: "work" }
            ]
          ])
          yield* world.allSettled()
          assert.deepInclude((yield* world.outcomes)[0], {
            id: item,
            outcome: "completed",
            attempt: 3,
            failures: 2
          })
          const turns = worker
            .said()
            .flatMap((one) =>
              one.say === "started" || one.say === "ended" ? [`${one.say} ${one.attempt}`] : []
            )
          assert.deepStrictEqual(turns, [
            ...["started 1", "ended 1", "started 2", "ended 2", "started 3", "ended 3"]
          ])
        })
      ),
    300_000
  )

  it.live(
    "and does not obey keeps its item from running a second time beside it",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const worker = yield* world.ready({
            ...orders,
            settings: { ...steady, cancelGrace: "1 minute" }
          })
          const [stubborn = ""] = yield* world.enqueue([
            [
              { do: "wait stubbornly", gate: "late", onAttempt: [1] },
              { do: "step", name: "work" }
            ]
          ])
          // Handed in later and overrunning as well: when it is through, the stubborn one's time is long over.
          const [control = ""] = yield* world.enqueue([
            [
              { do: "wait", gate: "never", onAttempt: [1, 2] },
              { do: "step", name: "work" }
            ]
          ])
          yield* world.until("the control is settled", () =>
            Effect.map(world.count(`tenure.done WHERE id = '${control}'`), (count) => count === 1)
          )
          assert.strictEqual((yield* world.attempts(stubborn)).length, 1)
          assert.strictEqual(yield* world.count(`tenure.claimed WHERE id = '${stubborn}'`), 1)
          yield* world.sink.open("late")
          yield* world.allSettled()
          // Its late end is no outcome: the attempt had failed by its time.
          assert.deepInclude(
            (yield* world.outcomes).find((one) => one.id === stubborn),
            { outcome: "completed", attempt: 2, failures: 1 }
          )
          assert.isFalse(worker.hasEnded())
        })
      ),
    300_000
  )

  it.live(
    "of itself, by an interruption, is a failure and cancels nothing",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const worker = yield* world.ready({ settings: steady })
          yield* world.enqueue([[{ do: "interrupt" }], [{ do: "step", name: "work" }]])
          yield* world.allSettled()
          assert.deepStrictEqual(
            (yield* world.outcomes).map(({ outcome, reason }) => [outcome, reason]),
            [
              ["failed", "HandlerDied"],
              ["completed", null]
            ]
          )
          assert.isFalse(worker.hasEnded())
        })
      ),
    300_000
  )
})
