/** Tenure's part where executors are killed, paused, stopped, or idle: one as a deployment runs it. */
import { Effect, Layer, Redacted, References, Schema } from "effect"
import { Step, Tenure, WorkQueue } from "../src/index.ts"
import { layerNone } from "../src/testing/Watchdog.ts"
import { order, role, tell, tellBegan, tellUsed } from "./child.ts"

const { items: queues, role: name, settings, url } = role()

/** Nothing ends it, so whoever loses it was at work. */
const workOn = (queue: number) => WorkQueue.make(`work ${queue}`, { payload: { i: Schema.Int } })

const WorkLive = Layer.mergeAll(
  Layer.empty,
  ...Array.from({ length: queues }, (_, queue) =>
    workOn(queue).toLayer((_payload, item) =>
      Step.run(
        "work",
        Effect.suspend(() => {
          tellBegan(item.id)
          return Effect.never
        })
      )
    )
  )
)

const Told = Layer.effectDiscard(
  Effect.gen(function* () {
    tell({ _tag: "ready" })
    yield* Effect.promise(() => order("go"))
    yield* workOn(0).enqueue({ i: 1 })
  }).pipe(Effect.forkScoped)
)

void tellUsed()

if (name === "bare") {
  // The same modules and nothing else: what an executor adds is seen beside it.
  tell({ _tag: "ready" })
} else {
  Told.pipe(
    Layer.provideMerge(WorkLive),
    Layer.provide(Tenure.layer({ application: "bench", version: "v1", settings })),
    Layer.provide(Tenure.layerPostgres({ url: Redacted.make(url) })),
    Layer.provide(Layer.succeed(References.MinimumLogLevel, "Error")),
    Layer.provide(name === "executor" ? Layer.empty : layerNone),
    Tenure.runMain
  )
}
