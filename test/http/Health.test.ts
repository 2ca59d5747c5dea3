/**
 * Goal: an orchestrator gets true answers over HTTP, with no payload in them, from the port of their
 * own and from the application's own router alike.
 * Method: a whole executor on a real database, asked by a real client.
 * Covers K-168, K-169, K-173, K-174.
 */
import * as NodeHttpClient from "@effect/platform-node/NodeHttpClient"
import * as NodeHttpServer from "@effect/platform-node/NodeHttpServer"
import { assert, describe, it } from "@effect/vitest"
import { Effect, Layer } from "effect"
import { HttpClient, HttpRouter } from "effect/http"
import { createServer } from "node:http"
import { Tenure } from "tenure"
import { layerRuntime } from "../queue/runtime.ts"

const get = Effect.fnUntraced(function* (url: string) {
  const response = yield* HttpClient.get(url)
  return { status: response.status, body: yield* response.json }
})

const held = {
  launched: true,
  renewal: true,
  scan: true,
  probe: true,
  lease: true,
  admission: true
}

const freePort = Effect.callback<number>((resume) => {
  const server = createServer().listen(0, "127.0.0.1", () => {
    const address = server.address()
    const port = typeof address === "object" && address !== null ? address.port : 0
    server.close(() => resume(Effect.succeed(port)))
  })
})

let businessUp = true
const Business = Tenure.layerReadiness(
  "business_database",
  Effect.suspend(() => (businessUp ? Effect.void : Effect.fail("postgresql://user:secret@host")))
)

describe("the health endpoints", () => {
  it.live("answer on a port of their own, and say which check failed and nothing else", () =>
    Effect.gen(function* () {
      const port = yield* freePort
      yield* Effect.gen(function* () {
        const base = `http://127.0.0.1:${port}/health`
        const { drain, lease } = yield* Tenure.Executor
        assert.deepStrictEqual(yield* get(`${base}/live`), { status: 200, body: { live: true } })
        const checks = { ...held, business_database: true }
        assert.deepStrictEqual(yield* get(`${base}/ready`), {
          status: 200,
          body: { ready: true, checks }
        })
        businessUp = false
        assert.deepStrictEqual(yield* get(`${base}/ready`), {
          status: 503,
          body: { ready: false, checks: { ...checks, business_database: false } }
        })
        businessUp = true
        lease.doubtUnsafe()
        const doubted = yield* get(`${base}/ready`)
        assert.deepStrictEqual(
          [doubted.status, doubted.body],
          [503, { ready: false, checks: { ...checks, lease: false } }]
        )
        yield* drain
        yield* Effect.yieldNow
        const draining = yield* get(`${base}/ready`)
        assert.strictEqual(draining.status, 503)
        assert.deepNestedInclude(draining.body, { "checks.admission": false })
        // Whatever the state, the process answers.
        assert.strictEqual((yield* get(`${base}/live`)).status, 200)
      }).pipe(
        Effect.provide(
          Layer.mergeAll(Tenure.layerHttp({ port, host: "127.0.0.1" }), Business).pipe(
            // Renewals every 10 s: none clears the doubt before we ask.
            Layer.provideMerge(layerRuntime({ profile: "default" })),
            Layer.provideMerge(NodeHttpClient.layerUndici)
          )
        )
      )
    })
  )

  it.live("answer from the application's own router", () =>
    Effect.gen(function* () {
      assert.strictEqual((yield* get("/health/live")).status, 200)
      assert.deepStrictEqual(yield* get("/health/ready"), {
        status: 200,
        body: { ready: true, checks: held }
      })
    }).pipe(
      Effect.provide(
        HttpRouter.serve(Tenure.layerRoutes, { disableLogger: true, disableListenLog: true }).pipe(
          Layer.provideMerge(layerRuntime()),
          Layer.provideMerge(NodeHttpServer.layerTest)
        )
      )
    )
  )
})
