/**
 * The API's endpoints, as routes of a router. Loaded when a layer asks for them: what they need costs a
 * process that serves none of it 0.1 s of its start.
 */
import { Effect, Layer } from "effect"
import { HttpApiBuilder } from "effect/http-api"
import { type HttpRouter, HttpServer } from "effect/http"
import { Executor } from "../executor/Executor.ts"
import { QueueRuntime } from "../queue/QueueRuntime.ts"
import { Api } from "./Api.ts"
import { layerAuthorization, layerBoundary } from "./Boundary.ts"
import { layerCapacity } from "./CapacityEndpoints.ts"
import { layerItems } from "./ItemEndpoints.ts"
import { layerSessions } from "./SessionEndpoints.ts"

export const layer: Layer.Layer<never, never, HttpRouter.HttpRouter | Executor> = Layer.unwrap(
  Effect.gen(function* () {
    const executor = yield* Executor
    const runtime = yield* Effect.serviceOption(QueueRuntime)
    if (runtime._tag === "None") {
      return yield* Effect.die(new Error("this Executor was not made by Tenure.layer"))
    }
    return HttpApiBuilder.layer(Api, { openapiPath: "/tenure/v1/openapi.json" }).pipe(
      Layer.provide([
        layerSessions(runtime.value),
        layerItems(runtime.value),
        layerCapacity(executor)
      ]),
      Layer.provide([
        layerAuthorization(executor),
        layerBoundary(executor.settings.payloadMax),
        HttpServer.layerServices
      ])
    )
  })
)
