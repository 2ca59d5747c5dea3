/**
 * Goal: the monitor ends a process for a condition that has held at every look for the whole time, and
 * for nothing else.
 * Method: generated sequences of looks against a judge that searches the whole history each time.
 * Covers K-037, K-038, K-059, K-066, K-068, K-069.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect, Schema } from "effect"
import { resolve, starvationMillis } from "../../src/executor/Settings.ts"
import * as Starvation from "../../src/watchdog/Starvation.ts"

const limits: Starvation.Limits = { starvationMillis: 100, pauseMillis: 40 }

const Step = Schema.Struct({
  pause: Schema.Int.check(Schema.isBetween({ minimum: 1, maximum: 45 })),
  // Mostly true, or no sequence would be long enough.
  canClaim: Schema.Int.check(Schema.isBetween({ minimum: 0, maximum: 12 })),
  startsNothing: Schema.Int.check(Schema.isBetween({ minimum: 0, maximum: 12 })),
  claimed: Schema.Int.check(Schema.isBetween({ minimum: 0, maximum: 12 })),
  answered: Schema.Int.check(Schema.isBetween({ minimum: 0, maximum: 12 }))
})

/** Looks one after the other, with a claim or an answer now and then between two of them. */
const looksOf = (steps: ReadonlyArray<typeof Step.Type>): ReadonlyArray<Starvation.Look> => {
  let atMillis = 1000
  let claimedMillis = -Infinity
  let answeredMillis = -Infinity
  return steps.map((step) => {
    const between = atMillis + step.pause / 2
    atMillis += step.pause
    if (step.claimed === 0) claimedMillis = between
    if (step.answered === 0) answeredMillis = between
    return {
      atMillis,
      canClaim: step.canClaim > 0,
      startsNothing: step.startsNothing > 0,
      claimedMillis,
      answeredMillis
    }
  })
}

const fold = (looks: ReadonlyArray<Starvation.Look>) =>
  looks.reduce((clocks, look) => Starvation.advance(clocks, look, limits), Starvation.none)

/** From the definition: the unbroken looks at the end, and what happened since the first of them. */
const lasted = (
  looks: ReadonlyArray<Starvation.Look>,
  holds: (look: Starvation.Look) => boolean,
  eventMillis: (look: Starvation.Look) => number
): boolean => {
  const last = looks.at(-1)
  if (last === undefined) return false
  let first = looks.length
  while (first > 0) {
    const look = looks[first - 1] as Starvation.Look
    const next = looks[first]
    if (!holds(look)) break
    if (next !== undefined && next.atMillis - look.atMillis > limits.pauseMillis) break
    first--
  }
  const run = looks.slice(first)
  const since = Math.max(...run.map((look) => Math.max(run[0]?.atMillis ?? 0, eventMillis(look))))
  return run.length > 0 && last.atMillis - since >= limits.starvationMillis
}

const expected = (looks: ReadonlyArray<Starvation.Look>): Starvation.Verdict | undefined => {
  if (
    lasted(
      looks,
      (look) => look.startsNothing,
      () => -Infinity
    )
  )
    return "unstarted"
  if (
    lasted(
      looks,
      (look) => look.canClaim,
      (look) => look.claimedMillis
    )
  )
    return "starved"
  return lasted(
    looks,
    (look) => look.canClaim,
    (look) => look.answeredMillis
  )
    ? "stalled"
    : undefined
}

const seen = new Set<string>()

describe("a verdict", () => {
  it.effect.prop(
    "comes when its condition has held without a break for the whole time, and never otherwise",
    { steps: Schema.Array(Step).check(Schema.isMinLength(4), Schema.isMaxLength(30)) },
    ({ steps }) =>
      Effect.sync(() => {
        const looks = looksOf(steps)
        for (let until = 1; until <= looks.length; until++) {
          const history = looks.slice(0, until)
          const verdict = Starvation.judge(fold(history), limits)
          assert.strictEqual(verdict, expected(history))
          seen.add(String(verdict))
        }
      }),
    { arbitrary: { runs: 500 } }
  )

  it("each was reached", () => {
    assert.deepStrictEqual([...seen].sort(), ["stalled", "starved", "undefined", "unstarted"])
  })

  const look = (atMillis: number, rest: Partial<Starvation.Look> = {}): Starvation.Look => ({
    atMillis,
    canClaim: true,
    startsNothing: false,
    claimedMillis: -Infinity,
    answeredMillis: -Infinity,
    ...rest
  })
  const every = (millis: number, rest: (atMillis: number) => Partial<Starvation.Look>) =>
    Array.from({ length: 60 }, (_, n) => look(n * millis, rest(n * millis)))
  const verdicts = (looks: ReadonlyArray<Starvation.Look>) =>
    new Set(looks.map((_, n) => Starvation.judge(fold(looks.slice(0, n + 1)), limits)))

  it("is `stalled` while a peer keeps the queue moving and this process asks for nothing", () => {
    assert.deepStrictEqual(
      [...verdicts(every(10, (at) => ({ claimedMillis: at - 5 })))],
      [undefined, "stalled"]
    )
  })

  it("is never `stalled` for a process whose claims are answered, be they empty", () => {
    assert.deepStrictEqual(
      [...verdicts(every(10, (at) => ({ claimedMillis: at - 99, answeredMillis: at - 99 })))],
      [undefined]
    )
  })

  it("forgets what was before a pause in which nobody looked", () => {
    const looks = [look(0), look(39), look(78), look(119), look(158), look(197), look(220)]
    assert.strictEqual(Starvation.judge(fold(looks.slice(0, 6)), limits), undefined)
    assert.strictEqual(Starvation.judge(fold(looks), limits), "starved")
  })

  it("is asked to be certain from half of the time on", () => {
    assert.isFalse(Starvation.isSerious(fold([look(0), look(30), look(49)]), limits))
    assert.isTrue(Starvation.isSerious(fold([look(0), look(30), look(50)]), limits))
  })
})

describe("the time", () => {
  const defaults = resolve("default")
  const of = (changes: object) => starvationMillis({ ...defaults, ...changes } as never)

  it("is 136 s by default: two minutes, 5 % of it, and two looks", () => {
    assert.strictEqual(of({}), 136_000)
  })

  it("grows with a poll interval above two minutes, and with nothing below", () => {
    assert.strictEqual(of({ pollInterval: 120_000 }), 136_000)
    assert.strictEqual(of({ pollInterval: 300_000 }), 325_000)
    assert.strictEqual(of({ queueMonitor: 10_000 }), 146_000)
  })
})
