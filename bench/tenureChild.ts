/** Tenure's part in the queue benchmark, one process for each role. */
import { PgClient } from "@effect/sql-pg"
import { Effect, Layer, Redacted, References, Schema } from "effect"
import type { SqlClient } from "effect/sql"
import { Tenure, WorkQueue } from "../src/index.ts"
import { counter, millisSince, nowNanos, order, pause, role, tell } from "./child.ts"

const { items, role: name, settings, url, warmUp } = role()

class Noop extends WorkQueue.make("noop", {
  payload: { i: Schema.Int },
  ...(settings["for"] === "keyed" ? { key: ({ i }: { readonly i: number }) => `${i % 1000}` } : {})
}) {}
class WarmUp extends WorkQueue.make("warm-up", { payload: { i: Schema.Int } }) {}

/** Answers with the instant it started. */
class Timed extends WorkQueue.make("timed", {
  payload: { i: Schema.Int },
  success: Schema.String
}) {}

const Postgres = Tenure.layerPostgres({ url: Redacted.make(url) })
const Executor = Tenure.layer({
  application: "bench",
  version: "v1",
  settings:
    settings["connections"] === undefined
      ? {}
      : { poolConnectionsMax: Number(settings["connections"]) }
}).pipe(Layer.provide(Postgres))
const Client = Tenure.layerClient.pipe(
  Layer.provideMerge(PgClient.layer({ url: Redacted.make(url) }))
)
const TimedLive = Timed.toLayer(() => Effect.sync(() => String(nowNanos())), {
  concurrency: { perExecutor: 1 }
})

const batches = (count: number) => {
  const payloads = Array.from({ length: count }, (_, i) => ({ i }))
  return Array.from({ length: Math.ceil(count / 5000) }, (_, at) =>
    payloads.slice(at * 5000, (at + 1) * 5000)
  )
}

const enqueue = Effect.gen(function* () {
  for (const batch of batches(warmUp)) yield* WarmUp.enqueueAll(batch)
  const payloads = batches(items)
  const begun = nowNanos()
  for (const batch of payloads) yield* Noop.enqueueAll(batch)
  tell({ _tag: "done", millis: millisSince(begun) })
})

/** Keeps a few thousand items waiting, until it is killed. */
const endless = Effect.gen(function* () {
  const payloads = Array.from({ length: items }, (_, i) => ({ i }))
  for (;;) {
    const ids = yield* Noop.enqueueAll(payloads)
    const middle = ids[ids.length >> 1]
    if (middle !== undefined) yield* Noop.await(middle)
  }
})

const inParallel = (
  count: number,
  call: (i: number) => Effect.Effect<unknown, unknown, SqlClient.SqlClient>
) =>
  Effect.forEach(
    Array.from({ length: count }, (_, i) => i),
    call,
    {
      concurrency: 64,
      discard: true
    }
  )

const single = Effect.gen(function* () {
  yield* inParallel(warmUp, (i) => WarmUp.enqueue({ i }))
  const begun = nowNanos()
  yield* inParallel(items, (i) => Noop.enqueue({ i }))
  tell({ _tag: "done", millis: millisSince(begun) })
})

const policies = {
  work: { concurrency: { perExecutor: 200 } },
  /** Each item a commit of its own, with what its handler writes. */
  each: { transaction: true, concurrency: { perExecutor: Number(settings["connections"]) } },
  keyed: { concurrency: { perExecutor: 200, perKey: 1 } },
  limited: { concurrency: { perExecutor: 10, global: 10 } }
} satisfies Readonly<Record<string, WorkQueue.Policy<never>>>

const work = (policy: WorkQueue.Policy<never>) =>
  Effect.gen(function* () {
    yield* Effect.promise(() => order("warm"))
    yield* Layer.build(WarmUp.toLayer(() => Effect.void, policy))
    yield* Effect.promise(() => order("cool"))
    const started = counter()
    tell({ _tag: "ready" })
    yield* Effect.promise(() => order("go"))
    yield* Layer.build(Noop.toLayer(() => Effect.sync(started), policy))
    return yield* Effect.never
  })

const produce = Effect.gen(function* () {
  const client = yield* Tenure.Client
  yield* client.ready
  const startMillis: Array<number> = []
  const resultMillis: Array<number> = []
  for (let i = 0; i < items; i++) {
    const begun = nowNanos()
    const id = yield* Timed.enqueue({ i })
    const started = BigInt(yield* Timed.await(id))
    const ended = nowNanos()
    startMillis.push(Number(started - begun) / 1e6)
    resultMillis.push(Number(ended - started) / 1e6)
    yield* Effect.promise(() => pause(5))
  }
  tell({ _tag: "latency", startMillis, resultMillis })
})

const both = Effect.gen(function* () {
  yield* Layer.build(TimedLive)
  yield* produce
})

const serve = Effect.gen(function* () {
  yield* Layer.build(TimedLive)
  tell({ _tag: "ready" })
  return yield* Effect.never
})

const main = (): Effect.Effect<unknown, unknown> => {
  switch (name) {
    case "enqueue":
      return Effect.scoped(Effect.provide(enqueue, Client))
    case "single":
      return Effect.scoped(Effect.provide(single, Client))
    case "each":
    case "keyed":
    case "limited":
    case "work":
      return Effect.scoped(Effect.provide(work(policies[name]), Executor))
    case "endless":
      return Effect.scoped(Effect.provide(endless, Client))
    case "serve":
      return Effect.scoped(Effect.provide(serve, Executor))
    case "produce":
      return Effect.scoped(Effect.provide(produce, Client))
    case "both":
      return Effect.scoped(Effect.provide(both, Executor))
    default:
      return Effect.die(new Error(`no such role: ${name}`))
  }
}

await Effect.runPromise(Effect.provideService(main(), References.MinimumLogLevel, "Error"))
process.exit(0)
