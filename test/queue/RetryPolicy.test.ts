/**
 * Goal: how often and when an item is tried again depends on its count of failures alone, so that it
 * is the same in whatever process an attempt runs.
 * Method: properties of the pure decisions.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect, Schedule, Schema } from "effect"
import { delayMillis, triesAgain } from "../../src/queue/RetryPolicy.ts"

const count = Schema.Int.check(Schema.isBetween({ minimum: 0, maximum: 30 }))

describe("a retry policy", () => {
  it.effect.prop(
    "gives exactly `times` more attempts",
    { times: count, failures: count },
    ({ failures, times }) =>
      Effect.sync(() => {
        assert.strictEqual(triesAgain({ times }, failures, undefined), failures <= times)
        assert.strictEqual(triesAgain({ times }, failures, { error: "e" }), failures <= times)
      })
  )

  it.effect.prop(
    "never retries what `while` refuses, nor a declared failure without a policy",
    { failures: count },
    ({ failures }) =>
      Effect.sync(() => {
        assert.isFalse(triesAgain({ times: 100, while: () => false }, failures, { error: "e" }))
        assert.isFalse(triesAgain(undefined, failures, { error: "e" }))
        assert.strictEqual(triesAgain(undefined, failures, undefined), failures <= 5)
      })
  )

  it.effect("replays its schedule by the number of the failure", () =>
    Effect.gen(function* () {
      const delays = (schedule: Schedule.Schedule<unknown, number>) =>
        Effect.forEach([1, 2, 3, 4], (failures) => delayMillis(schedule, failures))
      assert.deepStrictEqual(
        yield* delays(Schedule.exponential("1 second")),
        [1000, 2000, 4000, 8000]
      )
      assert.deepStrictEqual(
        yield* delays(Schedule.exponential("1 second").pipe(Schedule.upTo({ times: 2 }))),
        [1000, 2000, 2000, 2000]
      )
      // The time that has passed is the sum of the delays, in whatever process they were waited for.
      assert.deepStrictEqual(
        yield* delays(
          Schedule.exponential("1 second").pipe(Schedule.upTo({ duration: "4 seconds" }))
        ),
        [1000, 2000, 4000, 4000]
      )
      assert.deepStrictEqual(yield* delays(Schedule.spaced("5 seconds")), [5000, 5000, 5000, 5000])
    })
  )
})
