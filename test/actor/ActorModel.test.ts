/**
 * Goal: whatever happens to an actor and in whatever order, it behaves as the model does (I12, row 47).
 * Method: generated commands run against the real actor in virtual time and against ActorModel;
 * after each command both must agree on every count, on the lifecycle and on every ask. The step
 * itself checks that it is alone, and each ask that it settles once.
 */
import { assert, describe, it } from "@effect/vitest"
import { Arbitrary, Cause, Deferred, Effect, Exit, Fiber, Random, References, Schema } from "effect"
import { TestClock } from "effect/testing"
import * as Actor from "../../src/actor/Actor.ts"
import * as Model from "./ActorModel.ts"
import { quiesce } from "./quiesce.ts"

class StepError extends Schema.TaggedError<StepError>()("StepError", {
  transient: Schema.Boolean
}) {}

const settledBy = (exit: Exit.Exit<unknown, { readonly _tag: string }>): Model.Settled => {
  if (Exit.isSuccess(exit)) return "Report"
  if (Cause.hasInterruptsOnly(exit.cause)) return "Aborted"
  const reason = exit.cause.reasons[0]
  if (reason === undefined || !Cause.isFailReason(reason)) return "Died"
  return reason.error._tag === "Stopped" || reason.error._tag === "AskTimeout"
    ? reason.error._tag
    : "Failed"
}

const run = Effect.fnUntraced(function* (
  history: ReadonlyArray<Model.Command>,
  uninterruptible: boolean
) {
  const model = new Model.ActorModel(uninterruptible)
  let starts = 0
  let outcome: Deferred.Deferred<Actor.Report, StepError> | undefined
  const step = Effect.suspend(() => {
    assert.isUndefined(outcome, "a second step is in flight")
    starts++
    const end = (outcome = Deferred.makeUnsafe<Actor.Report, StepError>())
    return Effect.ensuring(
      uninterruptible ? Effect.uninterruptible(Deferred.await(end)) : Deferred.await(end),
      Effect.sync(() => {
        outcome = undefined
      })
    )
  })
  const actor = yield* Actor.make({
    name: "subject",
    step,
    cadence: Model.cadenceMillis,
    onFailure: {
      first: Model.firstMillis,
      max: Model.backoffMaxMillis,
      failuresMax: Model.failuresMax,
      while: (error) => error.transient
    }
  })
  const asks: Array<{ fiber: Fiber.Fiber<unknown, unknown>; settled: Array<Model.Settled> }> = []
  const stops: Array<Fiber.Fiber<void>> = []

  const ask = Effect.fnUntraced(function* (deadline?: number) {
    const settled: Array<Model.Settled> = []
    const fiber = yield* actor.ask(deadline === undefined ? {} : { deadline }).pipe(
      Effect.onExit((exit) => Effect.sync(() => settled.push(settledBy(exit)))),
      Effect.forkDetach({ startImmediately: true })
    )
    asks.push({ fiber, settled })
    model.ask(deadline ?? Number.POSITIVE_INFINITY)
  })
  const abort = Effect.fnUntraced(function* (index: number) {
    const pending = model.pending.at(index)
    if (pending === undefined) return
    pending.settled = "Aborted"
    const asked = asks[model.asks.indexOf(pending)]
    if (asked !== undefined) yield* Fiber.interrupt(asked.fiber)
  })
  const end = (exit: Exit.Exit<Actor.Report, StepError>, as: Parameters<typeof model.end>[0]) =>
    Effect.sync(() => {
      if (outcome !== undefined) Deferred.doneUnsafe(outcome, exit)
      model.end(as)
    })
  const stop = Effect.fnUntraced(function* (within?: number) {
    const stopped = actor.stop(within === undefined ? {} : { within })
    stops.push(yield* Effect.forkDetach(stopped, { startImmediately: true }))
    model.stop(within ?? Number.POSITIVE_INFINITY)
  })
  const pass = (millis: number) =>
    Effect.andThen(
      TestClock.adjust(millis),
      Effect.sync(() => model.pass(millis))
    )

  const perform: Record<Model.Command, Effect.Effect<void>> = {
    start: Effect.gen(function* () {
      const exit = yield* Effect.exit(actor.start)
      assert.strictEqual(Exit.isFailure(exit), model.isClosed, "start is refused after stop only")
      model.start()
    }),
    wake: Effect.sync(() => {
      actor.wakeUnsafe()
      model.wake()
    }),
    ask: ask(),
    "ask for 37 ms": ask(37),
    "ask for 437 ms": ask(437),
    "abort the oldest ask": abort(0),
    "abort the newest ask": abort(-1),
    "step succeeds": end(Exit.succeed({ done: 1 }), "Report"),
    "step fails": end(Exit.fail(new StepError({ transient: true })), "Failed"),
    "step fails for good": end(Exit.fail(new StepError({ transient: false })), "Failed for good"),
    "step dies": end(Exit.die("a bug"), "Died"),
    "step interrupts itself": end(Exit.interrupt(), "Died"),
    "50 ms pass": pass(50),
    "150 ms pass": pass(150),
    "1000 ms pass": pass(1000),
    stop: stop(),
    "stop within 21 ms": stop(21),
    "stop within 221 ms": stop(221)
  }

  const compare = (command: Model.Command) => {
    const { steps, failures, inFlight } = actor.progress()
    assert.deepStrictEqual(
      {
        lifecycle: actor.lifecycle,
        starts,
        steps,
        failures,
        inFlight,
        stepIsRunning: outcome !== undefined,
        asks: asks.map(({ settled }) => settled),
        stopsReturned: stops.map((fiber) => fiber.pollUnsafe() !== undefined)
      },
      {
        lifecycle: model.lifecycle,
        starts: model.starts,
        steps: model.steps,
        failures: model.failures,
        inFlight: model.inFlight,
        stepIsRunning: model.inFlight,
        asks: model.asks.map(({ settled }) => (settled === undefined ? [] : [settled])),
        stopsReturned: model.stops.map(({ returned }) => returned)
      },
      `after "${command}"`
    )
  }

  for (const command of history) {
    yield* perform[command]
    yield* quiesce
    compare(command)
  }
}, Effect.scoped)

describe("Actor against its model", () => {
  it.effect.prop(
    "agrees after every command",
    {
      early: Arbitrary.array(Model.running, { maxLength: 4 }),
      running: Arbitrary.array(Model.running, { maxLength: 60 }),
      stop: Model.stopping,
      late: Arbitrary.array(Model.any, { maxLength: 12 }),
      uninterruptible: Schema.Boolean
    },
    ({ early, running, stop, late, uninterruptible }) =>
      run(
        [...early, "start", ...running, stop, ...late, "step succeeds", "1000 ms pass"],
        uninterruptible
      ).pipe(
        Effect.provideService(Random.Random, {
          nextIntUnsafe: () => 0,
          nextDoubleUnsafe: () => Model.random
        }),
        Effect.provideService(References.MinimumLogLevel, "None")
      ),
    { timeout: 60_000, arbitrary: { runs: 500, size: 60 } }
  )
})
