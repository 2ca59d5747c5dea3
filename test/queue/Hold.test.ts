/**
 * Goal: a policy of limits is stored as it was meant or refused in words; and a claimer that a rate has told
 * to wait is never asleep for longer than that, nor awake for nothing.
 * Method: properties of the pure decisions.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect, Result, Schema } from "effect"
import * as Hold from "../../src/queue/Hold.ts"
import { encode } from "../../src/queue/Limits.ts"

const between = (minimum: number, maximum: number) =>
  Schema.Int.check(Schema.isBetween({ minimum, maximum }))

const Told = Schema.Struct({
  afterMillis: between(0, 5000),
  isHeld: Schema.Boolean,
  dueInMillis: Schema.NullOr(between(0, 100_000_000))
})

const pollMillis = 5000

describe("a hold", () => {
  it.effect.prop(
    "ends with the first time that it was told, within an hour, and never holds beyond a poll",
    { answers: Schema.Array(Told).check(Schema.isMaxLength(20)) },
    ({ answers }) =>
      Effect.sync(() => {
        let hold = Hold.open
        let at = 0
        let first = Infinity
        let lastHeldAt = -Infinity
        for (const { afterMillis, ...answer } of answers) {
          at += afterMillis
          if (Hold.isDue(hold, at)) {
            hold = Hold.open
            first = Infinity
          }
          hold = Hold.told(hold, answer, at, pollMillis)
          if (answer.dueInMillis !== null) {
            first = Math.min(first, at + Math.min(answer.dueInMillis, 3_600_000))
            if (answer.isHeld) lastHeldAt = at
          }
          assert.strictEqual(hold.dueAtMillis, first)
          assert.strictEqual(Hold.pauseMillis(hold, at), Math.max(0, first - at))
          assert.isFalse(Hold.holds(hold, lastHeldAt + pollMillis))
          if (Hold.holds(hold, at)) assert.isAbove(first, at - 1)
        }
      })
  )

  it("holds nothing before it is told to, and a pause names no time", () => {
    assert.isFalse(Hold.holds(Hold.open, 0))
    assert.strictEqual(Hold.pauseMillis(Hold.open, 0), Infinity)
    assert.strictEqual(
      Hold.told(Hold.open, { isHeld: true, dueInMillis: null }, 0, pollMillis),
      Hold.open
    )
  })
})

describe("a policy of limits", () => {
  it.effect.prop(
    "is stored in numbers and milliseconds, where keys take turns if they count for anything",
    { limit: between(1, 1_000_000), seconds: between(1, 1_000_000), isPerKey: Schema.Boolean },
    ({ isPerKey, limit, seconds }) =>
      Effect.sync(() => {
        const rate = { limit, window: `${seconds} seconds` } as const
        assert.deepStrictEqual(
          encode({ rateLimit: { ...rate, perKey: { limit: 1, window: 100 } } }, isPerKey),
          Result.succeed({
            rateLimit: limit,
            rateWindowMs: seconds * 1000,
            keyRateLimit: 1,
            keyRateWindowMs: 100,
            takesTurns: true
          })
        )
        assert.deepStrictEqual(
          encode({ priorityAging: rate.window, fair: !isPerKey }, isPerKey),
          Result.succeed({
            ...(isPerKey ? {} : { takesTurns: true }),
            agingMs: seconds * 1000
          })
        )
        assert.deepStrictEqual(
          encode({}, isPerKey),
          Result.succeed(isPerKey ? { takesTurns: true } : {})
        )
      })
  )

  it("is refused by the name of what is wrong with it", () => {
    const refusals = [
      [{ rateLimit: { limit: 0, window: "1 second" } }, "rateLimit.limit"],
      [{ rateLimit: { limit: 1.5, window: "1 second" } }, "rateLimit.limit"],
      [{ rateLimit: { limit: 5, window: 99 } }, "rateLimit.window"],
      [{ rateLimit: { perKey: { limit: 5, window: "Infinity" } } }, "rateLimit.perKey.window"],
      [{ priorityAging: 999 }, "priorityAging"]
    ] as const
    for (const [limits, name] of refusals) {
      const refused = encode(limits, false)
      assert.isTrue(Result.isFailure(refused))
      if (Result.isFailure(refused)) assert.isTrue(refused.failure.startsWith(`${name} `))
    }
  })
})
