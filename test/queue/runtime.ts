/**
 * An executor on a database of its own, logged in as the restricted worker role. With the production
 * lease: no test here is about time, and a busy machine must not take a lease away.
 */
import { Layer, References } from "effect"
import { Tenure } from "tenure"
import { layerDatabase } from "../support/Postgres.ts"

export const layerRuntime = (options: Partial<Tenure.Options> = {}) =>
  Tenure.layer({
    application: "app",
    version: "app-v1",
    ...options,
    settings: { drain: 100, pollInterval: "500 millis", ...options.settings }
  }).pipe(
    Layer.provideMerge(layerDatabase("worker")),
    Layer.provideMerge(Layer.succeed(References.MinimumLogLevel, "Error" as const))
  )
