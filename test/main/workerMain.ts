/**
 * A worker process for the tests of its main. The plan comes as JSON in the first argument; what the
 * tests wait for is printed as one line each, beside the log.
 */
import { Effect, Layer, Redacted, Schema } from "effect"
import { Executor } from "../../src/executor/Executor.ts"
import { Tenure, WorkQueue } from "../../src/index.ts"
import type { Plan } from "./Child.ts"

const plan = JSON.parse(process.argv[2] ?? "") as Plan

const say = (line: string) => Effect.sync(() => process.stdout.write(`> ${line}\n`))

class Letters extends WorkQueue.make("letters", {
  payload: { text: Schema.String },
  success: Schema.String
}) {}

const handlers = {
  quick: Effect.succeed("done"),
  slow: Effect.as(Effect.sleep("700 millis"), "done"),
  endless: Effect.never,
  // Deaf: nothing can interrupt it.
  deaf: Effect.uninterruptible(Effect.never)
}

const LettersLive = Letters.toLayer(
  () =>
    say("started").pipe(
      Effect.andThen(handlers[plan.handler ?? "quick"]),
      Effect.tap(() => say("ended"))
    ),
  { concurrency: { perExecutor: 2 } }
)

const Introduction = Layer.effectDiscard(
  Effect.flatMap(Executor, ({ drain, id }) =>
    Effect.gen(function* () {
      yield* say(`executor ${id}`)
      if (plan.misfortune === "rejection") {
        setImmediate(() => void Promise.reject(new Error("nobody waits for me")))
      }
      if (plan.misfortune === "exception") {
        setImmediate(() => {
          throw new Error("nobody catches me")
        })
      }
      if (plan.misfortune === "drain") yield* drain
      if (plan.misfortune === "failure") {
        return yield* Effect.fail({ _tag: "PayloadInside", payload: "a-secret" } as const)
      }
      if (plan.misfortune === "hungFinalizer") yield* Effect.addFinalizer(() => Effect.never)
    })
  )
)

Layer.mergeAll(LettersLive, Introduction).pipe(
  Layer.provide(
    Tenure.layer({
      application: "letters",
      version: "letters-v1",
      profile: "short",
      settings: plan.settings
    })
  ),
  Layer.provide(Tenure.layerPostgres({ url: Redacted.make(plan.url) })),
  Tenure.runMain
)
