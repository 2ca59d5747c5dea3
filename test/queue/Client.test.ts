/**
 * Goal: whoever waits gets the outcome, pushed, whatever happens to the session that listens.
 * Method: the whole runtime; its listening session is terminated from outside while items wait.
 * Covers bug reports of lost listeners, P-32, K-182, K-183.
 */
import { assert, describe, it } from "@effect/vitest"
import { Deferred, Effect, Fiber, Layer, References, Schema } from "effect"
import { SqlClient } from "effect/sql"
import { Lease, Tenure, WorkQueue } from "tenure"
import { administer, connect, freshDatabase, layerOf } from "../support/Postgres.ts"
import { layerRuntime } from "./runtime.ts"
import { present } from "../support/present.ts"

class Answer extends WorkQueue.make("answer", {
  payload: { n: Schema.Int },
  success: Schema.Int
}) {}

/** One runs the queue, behind a gate, the other waits; neither polls within an hour. */
const twoProcesses = Effect.gen(function* () {
  const database = yield* freshDatabase
  const gate = yield* Deferred.make<void>()
  const executor = () =>
    Layer.fresh(
      Tenure.layer({
        application: "app",
        version: "app-v1",
        settings: { pollInterval: "1 hour", drain: 100 }
      })
    ).pipe(
      Layer.provide(layerOf(database.worker)),
      Layer.provideMerge(Layer.succeed(References.MinimumLogLevel, "Error" as const))
    )
  const waiter = yield* Layer.build(executor())
  yield* Effect.flatMap(Tenure.Client, (client) => client.ready).pipe(Effect.provideContext(waiter))
  const worker = yield* Layer.build(
    Answer.toLayer(({ n }) => Effect.as(Deferred.await(gate), n)).pipe(
      Layer.provideMerge(executor())
    )
  )
  yield* Effect.flatMap(Tenure.Client, (client) => client.ready).pipe(Effect.provideContext(worker))
  return { database, gate, waiter, worker }
})

describe("a client", () => {
  it.live("in another process is told of the outcome, whose poll is an hour away", () =>
    Effect.gen(function* () {
      const { gate, waiter, worker } = yield* twoProcesses
      const id = yield* Answer.enqueue({ n: 1 }).pipe(Effect.provideContext(waiter))
      const awaited = yield* Effect.forkChild(Answer.await(id).pipe(Effect.provideContext(waiter)))
      const sql = yield* SqlClient.SqlClient.pipe(Effect.provideContext(worker))
      while ((yield* sql`SELECT FROM tenure.waiter`).length === 0) yield* Effect.yieldNow
      yield* Deferred.succeed(gate, undefined)
      assert.strictEqual(yield* Effect.timeout(Fiber.join(awaited), "10 seconds"), 1)
    }).pipe(Effect.scoped)
  )

  it.live("that was deaf while the item settled looks when it hears again", () =>
    Effect.gen(function* () {
      const { database, gate, waiter, worker } = yield* twoProcesses
      const id = yield* Answer.enqueue({ n: 1 }).pipe(Effect.provideContext(waiter))
      const awaited = yield* Effect.forkChild(Answer.await(id).pipe(Effect.provideContext(waiter)))
      const sql = yield* SqlClient.SqlClient.pipe(Effect.provideContext(worker))
      while ((yield* sql`SELECT FROM tenure.waiter`).length === 0) yield* Effect.yieldNow
      const { id: deaf } = yield* Tenure.Executor.pipe(Effect.provideContext(waiter))
      const allow = (allowed: boolean) =>
        administer((admin) =>
          admin.unsafe(`ALTER DATABASE ${database.name} ALLOW_CONNECTIONS ${allowed}`)
        )
      yield* allow(false)
      yield* administer(
        (admin) => admin`
          SELECT pg_terminate_backend(pid) FROM pg_stat_activity
           WHERE application_name = ${`tenure listener ${deaf}`}`
      )
      yield* Deferred.succeed(gate, undefined)
      // Told, into the void.
      while ((yield* sql`SELECT FROM tenure.waiter`).length > 0) yield* Effect.yieldNow
      yield* allow(true)
      assert.strictEqual(yield* Effect.timeout(Fiber.join(awaited), "15 seconds"), 1)
    }).pipe(Effect.scoped)
  )

  it.live("asks one row for a thousand waiters of one item, and forgets those who leave", () =>
    Effect.gen(function* () {
      const gate = yield* Deferred.make<void>()
      yield* Effect.gen(function* () {
        const id = yield* Answer.enqueue({ n: 2 })
        const fibers = yield* Effect.forEach(Array.from({ length: 1000 }), () =>
          Effect.forkChild(Answer.await(id), { startImmediately: true })
        )
        yield* Effect.forEach(fibers.slice(1), Fiber.interrupt, { discard: true })
        yield* Deferred.succeed(gate, undefined)
        assert.strictEqual(yield* Fiber.join(present(fibers[0])), 2)
      }).pipe(
        Effect.provide(
          Layer.provideMerge(
            Answer.toLayer(({ n }) => Effect.as(Deferred.await(gate), n)),
            layerRuntime()
          )
        )
      )
    })
  )
})

describe("the listening session", () => {
  it.live("when it is lost closes Lease.check at once, comes back, and misses nothing", () =>
    Effect.gen(function* () {
      const database = yield* freshDatabase
      const gate = yield* Deferred.make<void>()
      yield* Effect.gen(function* () {
        const { lease } = yield* Tenure.Executor
        yield* (yield* Tenure.Client).ready
        const id = yield* Answer.enqueue({ n: 3 })
        const awaited = yield* Effect.forkChild(Answer.await(id), { startImmediately: true })
        const admin = yield* connect(database.superuser)
        const refusals: Array<string> = []
        const watched = yield* Effect.forkChild(
          Effect.gen(function* () {
            while (refusals.length === 0) {
              const refused = lease.checkUnsafe()
              if (refused !== undefined) refusals.push(refused._tag)
              yield* Effect.yieldNow
            }
          })
        )
        yield* admin`
          SELECT pg_terminate_backend(pid) FROM pg_stat_activity
           WHERE application_name = ${`tenure listener ${lease.executorId}`}`
        yield* Fiber.join(watched).pipe(Effect.timeout("5 seconds"))
        assert.deepStrictEqual(refusals, ["LeaseUnverified"])
        // Granted again by the next renewal, which the loss has brought forward.
        while (lease.checkUnsafe() !== undefined) yield* Effect.yieldNow
        yield* Deferred.succeed(gate, undefined)
        assert.strictEqual(yield* Effect.timeout(Fiber.join(awaited), "10 seconds"), 3)
        yield* Lease.check
      }).pipe(
        Effect.provide(
          Answer.toLayer(({ n }) => Effect.as(Deferred.await(gate), n)).pipe(
            Layer.provideMerge(
              Tenure.layer({
                application: "app",
                version: "app-v1",
                settings: { pollInterval: "1 hour" }
              })
            ),
            Layer.provide(layerOf(database.worker))
          )
        )
      )
    }).pipe(Effect.scoped)
  )
})
