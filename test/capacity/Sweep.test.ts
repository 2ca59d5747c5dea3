/**
 * Goal: whoever hands in and waits does not see whether a pull worker ran the item: results, business
 * errors and quarantine come as from a handler, pushed; and the sweep is an actor of every executor
 * (C3; I-014, I-029, I-064 to I-066).
 * Method: the whole runtime without a handler, and a session on its own pool. Nothing polls.
 */
import { assert, describe, it } from "@effect/vitest"
import { Cause, Effect, Exit, Fiber, Layer, Option, References, Schema } from "effect"
import { Tenure, WorkQueue } from "tenure"
import * as Store from "../../src/capacity/CapacityStore.ts"
import { Database } from "../../src/database/Database.ts"
import { Executor } from "../../src/executor/Executor.ts"
import * as C from "../kernel/capacity.ts"
import * as K from "../kernel/kernel.ts"
import { freshDatabase } from "../support/Postgres.ts"

class Refused extends Schema.TaggedError<Refused>()("Refused", { limit: Schema.Int }) {}

class Resize extends WorkQueue.make("resize", {
  payload: { image: Schema.String },
  success: Schema.Struct({ bytes: Schema.Int }),
  error: Refused
}) {}

const scene = Effect.gen(function* () {
  const database = yield* freshDatabase
  const owner = yield* K.sessionOf(database, "owner")
  const layer = Tenure.layer({
    application: "app",
    version: "v1",
    settings: { drain: 100, pollInterval: "10 minutes", capacityScan: "100 millis" }
  }).pipe(
    Layer.provide(Layer.succeed(Database, database.worker)),
    Layer.provideMerge(Layer.succeed(References.MinimumLogLevel, "Fatal" as const))
  )
  return { owner, layer }
})

const failureOf = <A, E>(exit: Exit.Exit<A, E> | undefined): E | undefined =>
  exit !== undefined && Exit.isFailure(exit)
    ? Option.getOrUndefined(Cause.findErrorOption(exit.cause))
    : undefined

describe("an item that a pull worker runs", () => {
  it.live(
    "gives its result to whoever awaits it, or its declared failure",
    () =>
      Effect.gen(function* () {
        const { layer } = yield* scene
        yield* Effect.gen(function* () {
          const { pools } = yield* Executor
          yield* Effect.flatMap(Tenure.Client, (client) => client.ready)
          const sql = pools.work
          const { heartbeatMillis, session } = yield* Store.openSession(sql, {
            worker: "resizer",
            queues: ["resize"],
            slots: 2,
            clocks: C.clocks
          })
          assert.strictEqual(heartbeatMillis, 30_000)
          const good = yield* Resize.enqueue({ image: "a" })
          const bad = yield* Resize.enqueue({ image: "b" })
          const waiting = yield* Effect.forEach([good, bad], (id) =>
            Effect.forkChild(Effect.exit(Resize.await(id)))
          )
          yield* C.eventually("both wait", sql, "SELECT count(*) = 2 AS ok FROM tenure.waiter")
          const items = yield* C.start({ sql }, session, 2)
          assert.deepStrictEqual(
            items.map((item) => item.payload),
            [{ image: "a" }, { image: "b" }]
          )
          yield* Store.complete(sql, session, good, 1, JSON.stringify({ bytes: 7 }))
          yield* Store.businessError(sql, session, bad, 1, {
            code: "Refused",
            result: { limit: 3 }
          })
          const [result, failure] = yield* Effect.forEach(waiting, Fiber.join)
          assert.deepStrictEqual(result, Exit.succeed({ bytes: 7 }))
          assert.deepStrictEqual(failureOf(failure), new Refused({ limit: 3 }))
        }).pipe(Effect.provide(layer))
      }).pipe(Effect.scoped),
    300_000
  )

  it.live(
    "is quarantined by the sweep of whatever executor, and said so to whoever awaits it",
    () =>
      Effect.gen(function* () {
        const { layer, owner } = yield* scene
        yield* Effect.gen(function* () {
          const { pools } = yield* Executor
          yield* Effect.flatMap(Tenure.Client, (client) => client.ready)
          const sql = pools.work
          const session = yield* C.open(
            { sql },
            { queues: ["resize"], recovery: { limit: "consecutive", max: 1 } }
          )
          const id = yield* Resize.enqueue({ image: "a" })
          const waiting = yield* Effect.forkChild(Effect.exit(Resize.await(id)))
          yield* C.eventually("it waits", sql, "SELECT count(*) = 1 AS ok FROM tenure.waiter")
          yield* C.start({ sql }, session)
          yield* C.expire(owner, session)
          const failure = failureOf(yield* Fiber.join(waiting))
          assert.strictEqual(failure?._tag, "ItemFailed")
          assert.include(failure?.message ?? "", "EXECUTION_RECOVERY_EXHAUSTED")
          assert.lengthOf(yield* C.events(owner, id), 1)
        }).pipe(Effect.provide(layer))
      }).pipe(Effect.scoped),
    300_000
  )
})
