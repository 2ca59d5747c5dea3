/** A module as `tenure worker` takes it. */
import { Console, Effect, Layer } from "effect"
import { Tenure } from "../../src/index.ts"

const Executor = Tenure.layer({
  application: "letters",
  version: "letters-v1",
  profile: "short"
}).pipe(Layer.provide(Tenure.layerPostgresConfig()))

const introduction = Effect.flatMap(Tenure.Executor, ({ id }) => Console.log(`> executor ${id}`))

export const layer = Layer.effectDiscard(introduction).pipe(Layer.provide(Executor))

const spin = Effect.sync(() => {
  for (;;);
})

export const stuck = Layer.effectDiscard(Effect.andThen(introduction, spin)).pipe(
  Layer.provide(Executor)
)
