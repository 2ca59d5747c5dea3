/**
 * Goal: the promises of an actor that a sequence of commands does not show: coalescing at scale, pauses,
 * progress marks, budgets, spans. Method: a controlled step in virtual time. Covers I12, P-14, P-16, P-19
 * and row 47; the lifecycle under every order of events is in ActorModel.test.ts.
 */
import { assert, describe, it } from "@effect/vitest"
import {
  Clock,
  Deferred,
  Duration,
  Effect,
  Exit,
  Fiber,
  Logger,
  Schema,
  Scope,
  type Tracer
} from "effect"
import { TestClock } from "effect/testing"
import * as Actor from "../../src/actor/Actor.ts"
import { quiesce } from "./quiesce.ts"

class Unreachable extends Schema.TaggedError<Unreachable>()("Unreachable", {}) {}

/** A step that hangs until told otherwise, and counts its starts. */
class Gate {
  starts = 0
  #end = Deferred.makeUnsafe<Actor.Report>()
  readonly step: Effect.Effect<Actor.Report> = Effect.suspend(() => {
    this.starts++
    return Deferred.await(this.#end)
  })
  readonly release: Effect.Effect<void> = Effect.suspend(() => {
    const end = this.#end
    this.#end = Deferred.makeUnsafe()
    return Effect.andThen(Deferred.succeed(end, { done: this.starts }), quiesce)
  })
}

const counting = (counter: { starts: number }) =>
  Effect.sync((): Actor.Report => ({ done: ++counter.starts }))

const makeLog = () => {
  const lines: Array<string> = []
  const logger = Logger.make(({ logLevel, message }) => {
    lines.push(`${logLevel} ${[message].flat()[0]}`)
  })
  return { lines, layer: Logger.layer([logger]) }
}

const isLate = (actor: Actor.Actor<unknown>) =>
  Effect.map(Clock.monotonicTimeNanos, (now) => Actor.isLate(actor.progress(), now))

describe("Actor requests", () => {
  it.effect("answers a thousand askers with one step", () =>
    Effect.gen(function* () {
      const gate = new Gate()
      const actor = yield* Actor.make({ name: "subject", step: gate.step, cadence: "1 minute" })
      yield* actor.start
      yield* quiesce
      const asks = yield* Effect.forEach(Array.from({ length: 1000 }), () =>
        Effect.forkChild(actor.ask())
      )
      yield* quiesce
      assert.strictEqual(gate.starts, 1, "the step in flight is not theirs")
      yield* gate.release
      yield* gate.release
      const reports = yield* Fiber.joinAll(asks)
      assert.isTrue(reports.every((report) => report.done === 2))
      assert.strictEqual(gate.starts, 2)
    })
  )

  it.effect("lets an ask time out by its own deadline while the step goes on", () =>
    Effect.gen(function* () {
      const gate = new Gate()
      const actor = yield* Actor.make({ name: "subject", step: gate.step, cadence: "1 minute" })
      yield* actor.start
      yield* quiesce
      const patient = yield* Effect.forkChild(actor.ask())
      const hasty = yield* Effect.forkChild(Effect.flip(actor.ask({ deadline: "2 seconds" })))
      yield* TestClock.adjust("2 seconds")
      const timeout = yield* Fiber.join(hasty)
      assert.strictEqual(timeout._tag, "AskTimeout")
      assert.include(timeout.message, "within 2000 ms")
      yield* gate.release
      yield* gate.release
      assert.deepStrictEqual(yield* Fiber.join(patient), { done: 2 })
    })
  )

  it.effect("keeps a wake and an ask that come before the start", () =>
    Effect.gen(function* () {
      const counter = { starts: 0 }
      const actor = yield* Actor.make({
        name: "subject",
        step: counting(counter),
        cadence: Duration.infinity
      })
      yield* actor.wake
      const ask = yield* Effect.forkChild(actor.ask())
      yield* quiesce
      assert.strictEqual(counter.starts, 0)
      yield* actor.start
      assert.deepStrictEqual(yield* Fiber.join(ask), { done: 1 })
    })
  )

  it.effect("never runs a step on the stack of the waker", () =>
    Effect.gen(function* () {
      const counter = { starts: 0 }
      const actor = yield* Actor.make({
        name: "subject",
        step: counting(counter),
        cadence: "1 minute"
      })
      yield* actor.start
      yield* quiesce
      for (let i = 0; i < 10; i++) actor.wakeUnsafe()
      assert.strictEqual(counter.starts, 1)
      yield* quiesce
      assert.strictEqual(counter.starts, 2)
    })
  )
})

describe("Actor pauses", () => {
  it.effect("rests in full after a step of an hour, without a burst", () =>
    Effect.gen(function* () {
      const gate = new Gate()
      const actor = yield* Actor.make({ name: "subject", step: gate.step, cadence: "5 seconds" })
      yield* actor.start
      yield* TestClock.adjust("1 hour")
      yield* gate.release
      yield* TestClock.adjust("4999 millis")
      assert.strictEqual(gate.starts, 1)
      yield* TestClock.adjust("1 milli")
      assert.strictEqual(gate.starts, 2)
    })
  )

  it.effect("goes on at once while its report says so, and still lets others run", () =>
    Effect.gen(function* () {
      const counter = { starts: 0 }
      let turnsOfOthers = 0
      const actor = yield* Actor.make({
        name: "subject",
        step: Effect.sync((): Actor.Report => ({ moved: ++counter.starts < 100 ? 1 : 0 })),
        cadence: ({ moved }) => (moved === 0 ? "1 minute" : 0)
      })
      const other = Effect.repeat(
        Effect.andThen(
          Effect.sync(() => turnsOfOthers++),
          Effect.yieldNow
        ),
        { while: () => counter.starts < 100 }
      )
      yield* actor.start
      yield* other
      assert.isAtLeast(turnsOfOthers, 90)
      yield* TestClock.adjust("59 seconds")
      assert.strictEqual(counter.starts, 100)
    })
  )

  it.effect("does not hammer a dead database however often it is woken", () =>
    Effect.gen(function* () {
      const counter = { starts: 0 }
      const actor = yield* Actor.make({
        name: "subject",
        step: Effect.andThen(counting(counter), Effect.fail(new Unreachable())),
        cadence: "1 second",
        onFailure: { first: "100 millis", max: "5 seconds" }
      })
      yield* actor.start
      for (let i = 0; i < 1000; i++) {
        actor.wakeUnsafe()
        yield* TestClock.adjust("1 milli")
      }
      assert.strictEqual(counter.starts, 11)
    })
  )

  it.effect.prop(
    "keeps every backoff between the first pause and the longest, and lets it grow",
    {
      first: Schema.Int.check(Schema.isBetween({ minimum: 0, maximum: 10_000 })),
      extra: Schema.Int.check(Schema.isBetween({ minimum: 0, maximum: 100_000 })),
      failures: Schema.Int.check(Schema.isBetween({ minimum: 1, maximum: 2_000_000_000 })),
      random: Schema.Finite.check(Schema.isBetween({ minimum: 0, maximum: 1 }))
    },
    ({ first, extra, failures, random }) =>
      Effect.sync(() => {
        const pause = Actor.backoffMillis(first, first + extra, failures, random)
        const next = Actor.backoffMillis(first, first + extra, failures + 1, random)
        assert.isTrue(pause >= first && pause <= first + extra && next >= pause)
      })
  )
})

describe("Actor progress", () => {
  it.effect("is late when a step hangs, and not while it has nothing to do", () =>
    Effect.gen(function* () {
      const gate = new Gate()
      const actor = yield* Actor.make({
        name: "subject",
        step: gate.step,
        cadence: Duration.infinity,
        progressWithin: "30 seconds"
      })
      yield* actor.wake
      yield* TestClock.adjust("1 day")
      assert.isFalse(yield* isLate(actor), "not started")
      yield* actor.start
      yield* quiesce
      yield* gate.release
      yield* TestClock.adjust("1 day")
      assert.isFalse(yield* isLate(actor), "idle")
      yield* actor.wake
      yield* TestClock.adjust("30 seconds")
      assert.isFalse(yield* isLate(actor))
      yield* TestClock.adjust("1 milli")
      assert.isTrue(yield* isLate(actor), "hangs")
      yield* actor.wake
      yield* gate.release
      assert.isFalse(yield* isLate(actor))
      yield* TestClock.adjust("31 seconds")
      assert.isTrue(yield* isLate(actor), "hangs in the step that the wake in flight asked for")
      yield* Effect.forkChild(actor.stop())
      yield* quiesce
      assert.isFalse(yield* isLate(actor), "a stop has its own budget")
    })
  )

  it.effect("counts from the time a step is due", () =>
    Effect.gen(function* () {
      const gate = new Gate()
      const actor = yield* Actor.make({
        name: "subject",
        step: gate.step,
        cadence: "1 minute",
        progressWithin: "10 seconds"
      })
      yield* actor.start
      yield* quiesce
      yield* gate.release
      yield* TestClock.adjust("70 seconds")
      assert.isFalse(yield* isLate(actor))
      yield* TestClock.adjust("1 milli")
      assert.isTrue(yield* isLate(actor))
    })
  )

  it.effect("does not take failures, crashes or restarts for progress", () =>
    Effect.gen(function* () {
      let broken = true
      const actor = yield* Actor.make({
        name: "subject",
        step: Effect.suspend(() => (broken ? Effect.fail(new Unreachable()) : Effect.succeed({}))),
        cadence: "1 second",
        progressWithin: "10 seconds",
        onFailure: { first: "1 second", max: "1 second", failuresMax: 4 }
      })
      for (let restart = 0; restart < 3; restart++) {
        yield* actor.start
        yield* TestClock.adjust("4 seconds")
        assert.strictEqual(actor.lifecycle, "crashed")
      }
      assert.strictEqual(actor.progress().failures, 12)
      assert.isTrue(yield* isLate(actor))
      broken = false
      yield* actor.start
      yield* quiesce
      assert.isFalse(yield* isLate(actor))
      assert.strictEqual(actor.progress().failures, 0)
    })
  )

  it.effect("is measured in monotonic time, so a wall clock set back changes nothing", () =>
    Effect.gen(function* () {
      const gate = new Gate()
      const actor = yield* Actor.make({
        name: "subject",
        step: gate.step,
        cadence: "1 second",
        progressWithin: "10 seconds"
      })
      yield* TestClock.adjust("1 day")
      yield* actor.start
      yield* TestClock.adjust("9 seconds")
      yield* TestClock.setTime(0)
      yield* TestClock.adjust("2 seconds")
      assert.isTrue(yield* isLate(actor))
    })
  )
})

describe("Actor end", () => {
  it.effect("fails `join` with the error, and logs the crash even if nobody joins", () =>
    Effect.gen(function* () {
      const log = makeLog()
      const actor = yield* Actor.make({
        name: "subject",
        step: Effect.fail(new Unreachable()),
        cadence: 0,
        onFailure: "escalate"
      })
      yield* Effect.provide(actor.start, log.layer)
      yield* quiesce
      assert.strictEqual((yield* Effect.flip(actor.join))._tag, "Unreachable")
      assert.deepStrictEqual(log.lines, ["Error subject: loop crashed"])
    })
  )

  it.effect("does not log a crash when a stop interrupts the step", () =>
    Effect.gen(function* () {
      const log = makeLog()
      const actor = yield* Actor.make({ name: "subject", step: Effect.never, cadence: 0 })
      yield* Effect.provide(actor.start, log.layer)
      yield* quiesce
      const stop = yield* Effect.forkChild(actor.stop({ within: "1 second" }))
      yield* TestClock.adjust("1 second")
      yield* Fiber.join(stop)
      yield* actor.join
      assert.strictEqual(actor.lifecycle, "stopped")
      assert.deepStrictEqual(log.lines, [])
    })
  )

  it.effect("logs failures ever more rarely, and the recovery", () =>
    Effect.gen(function* () {
      const log = makeLog()
      let failures = 0
      const actor = yield* Actor.make({
        name: "subject",
        step: Effect.suspend(() =>
          failures++ < 100 ? Effect.fail(new Unreachable()) : Effect.succeed({})
        ),
        cadence: Duration.infinity,
        onFailure: { first: "1 second", max: "1 second" }
      })
      yield* Effect.provide(actor.start, log.layer)
      yield* TestClock.adjust("100 seconds")
      assert.strictEqual(log.lines.length, 8)
      assert.strictEqual(log.lines[6], "Warn subject: step failed 64 times in a row, retrying")
      assert.strictEqual(log.lines[7], "Info subject: a step succeeded after 100 failures")
    })
  )

  it.effect("returns from a stop inside its own step, and runs no other", () =>
    Effect.gen(function* () {
      const counter = { starts: 0 }
      const actor: Actor.Actor = yield* Actor.make({
        name: "subject",
        step: Effect.tap(counting(counter), () => actor.stop()),
        cadence: 0
      })
      yield* actor.start
      yield* quiesce
      assert.strictEqual(actor.lifecycle, "stopped")
      assert.strictEqual(counter.starts, 1)
    })
  )

  it.effect("interrupts the step when its scope closes", () =>
    Effect.gen(function* () {
      const scope = yield* Scope.make()
      const interrupted = yield* Deferred.make<void>()
      const actor = yield* Actor.make({
        name: "subject",
        step: Effect.onInterrupt(Effect.never, () => Deferred.succeed(interrupted, undefined)),
        cadence: 0
      }).pipe(Scope.provide(scope))
      yield* actor.start
      yield* quiesce
      yield* Scope.close(scope, Exit.void)
      yield* Deferred.await(interrupted)
      assert.strictEqual(actor.lifecycle, "stopped")
    })
  )

  it.effect("gives each step a trace of its own", () =>
    Effect.gen(function* () {
      const parents: Array<Tracer.AnySpan | undefined> = []
      const step = Effect.useSpan("step", (span) =>
        Effect.sync((): Actor.Report => {
          parents.push(span.parent._tag === "Some" ? span.parent.value : undefined)
          return {}
        })
      )
      const actor = yield* Actor.make({ name: "subject", step, cadence: "1 second" }).pipe(
        Effect.tap((made) => made.start),
        Effect.withSpan("startup")
      )
      yield* quiesce
      assert.strictEqual(actor.progress().steps, 1)
      assert.deepStrictEqual(parents, [undefined])
    })
  )
})
