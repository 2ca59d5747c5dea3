/**
 * The two answers an orchestrator asks for.
 *
 *   GET /health/live    200 as soon as this process answers at all, whatever state it is in
 *   GET /health/ready   200 or 503, with each check by name: see Readiness.ts
 *
 * Liveness asks nothing on purpose: a process without a database must not be restarted for that, it
 * ends itself when its lease is over. On a crash the port closes with the process.
 */
// By module: the package's index loads everything it has, and with it 0.25 s of each worker's start.
import * as NodeHttpServer from "@effect/platform-node/NodeHttpServer"
import { Effect, Layer, Option } from "effect"
import { type HttpServerError, HttpRouter, HttpServerResponse } from "effect/http"
import { createServer } from "node:http"
import { Executor } from "../executor/Executor.ts"
import { Readiness } from "./Readiness.ts"

/** The routes, added to the application's own router. */
export const layerRoutes: Layer.Layer<never, never, HttpRouter.HttpRouter | Executor> =
  Layer.effectDiscard(
    Effect.gen(function* () {
      const router = yield* HttpRouter.HttpRouter
      const readiness = yield* hidden
      yield* router.add("GET", "/health/live", uncached({ live: true }, 200))
      yield* router.add(
        "GET",
        "/health/ready",
        Effect.map(readiness.report, (report) => uncached(report, report.ready ? 200 : 503))
      )
    })
  )

/**
 * The API on the application's own router, under `/tenure/v1`: pull workers, handing in, looking, and
 * `/tenure/v1/openapi.json`. It takes writes from whoever holds a token: `tenure token create`.
 */
export const layerApi: Layer.Layer<never, never, HttpRouter.HttpRouter | Executor> = Layer.unwrap(
  Effect.map(
    Effect.promise(() => import("./ApiServer.ts")),
    ({ layer }) => layer
  )
)

/** Health on a port of its own, and with `api` what `layerApi` has. */
export const layerHttp = (options: {
  readonly port: number
  readonly host?: string | undefined
  /** Default false: it takes writes. */
  readonly api?: boolean | undefined
}): Layer.Layer<never, HttpServerError.ServeError, Executor> =>
  HttpRouter.serve(options.api === true ? Layer.merge(layerRoutes, layerApi) : layerRoutes, {
    disableLogger: true,
    disableListenLog: true
  }).pipe(
    Layer.provide(
      NodeHttpServer.layer(createServer, {
        port: options.port,
        host: options.host,
        // A prober's open connection must not use up the budget of the drain.
        gracefulShutdownTimeout: "1 second"
      })
    )
  )

/** One more condition of readiness. Each has five seconds; a failure and no answer count as no. */
export const layerReadiness = <E, R>(
  name: string,
  check: Effect.Effect<void, E, R>
): Layer.Layer<never, never, Executor | R> =>
  Layer.effectDiscard(
    Effect.gen(function* () {
      const readiness = yield* hidden
      const context = yield* Effect.context<R>()
      yield* readiness.add(name, Effect.provideContext(check, context))
    })
  )

const hidden = Effect.gen(function* () {
  yield* Executor
  const readiness = yield* Effect.serviceOption(Readiness)
  if (Option.isNone(readiness)) {
    return yield* Effect.die(new Error("this Executor was not made by Tenure.layer"))
  }
  return readiness.value
})

const uncached = (body: unknown, status: number) =>
  HttpServerResponse.jsonUnsafe(body, { status, headers: { "cache-control": "no-store" } })
