/** Tenure's part where pull workers are killed: the process that serves them, and workers whose items never end. */
import { Effect, Layer, Redacted, References } from "effect"
import { FetchHttpClient } from "effect/http"
import { Api } from "../src/http/index.ts"
import { Tenure } from "../src/index.ts"
import { layerNone } from "../src/testing/Watchdog.ts"
import { role, tell, tellBegan } from "./child.ts"

/** `items`: sessions, each with one slot. */
const { items: sessions, role: name, settings, url } = role()
const port = Number(settings["port"])

const queue = "pulled"

const serve = Effect.gen(function* () {
  tell({ _tag: "ready" })
  return yield* Effect.never
}).pipe(
  Effect.provide(
    Tenure.layerHttp({ port, host: "127.0.0.1", api: true }).pipe(
      Layer.provide(Tenure.layer({ application: "bench", version: "v1", profile: "capacity" })),
      Layer.provide(Tenure.layerPostgres({ url: Redacted.make(url) })),
      Layer.provide(layerNone)
    )
  )
)

/** One session after the other within its first heartbeat, so that a kill meets them at every moment of one. */
const workers = Effect.gen(function* () {
  const { sessions: api } = yield* Api.client({
    url: `http://127.0.0.1:${port}`,
    token: Redacted.make(String(settings["token"]))
  })
  const work = Effect.fnUntraced(function* (at: number) {
    const opened = yield* api.open({ payload: { worker: `${at}`, queues: [queue], slots: 1 } })
    const params = { session: opened.id }
    yield* Effect.sleep((opened.heartbeatMillis * at) / sessions)
    yield* api
      .heartbeat({ params })
      .pipe(Effect.andThen(Effect.sleep(opened.heartbeatMillis)), Effect.forever, Effect.forkChild)
    for (;;) {
      const { items } = yield* api.pull({ params, payload: { wanted: 1, waitMillis: 30_000 } })
      for (const { executionSeq, id } of items) {
        yield* api.activate({ params: { ...params, item: id }, payload: { executionSeq } })
        tellBegan(id)
        return yield* Effect.never
      }
    }
  })
  yield* Effect.forEach(
    Array.from({ length: sessions }, (_, at) => at),
    (at) => Effect.delay(work(at), 10 * at),
    { concurrency: "unbounded", discard: true }
  )
}).pipe(Effect.provide(FetchHttpClient.layer))

const main: Effect.Effect<void, unknown> = name === "serve" ? serve : workers

await Effect.runPromise(Effect.provideService(main, References.MinimumLogLevel, "Error"))
