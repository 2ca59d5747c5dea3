/**
 * Goal: a handler that asks its own process to stop, or finds out that the lease is lost, is stopped like
 * every other, even if it does so before it waits for anything.
 * Method: the handler runs in the claimer's own stack until it waits, and asks there.
 * Covers K-047, K-163, P-20; a draining process that claims again (bug report 5).
 */
import { assert, describe, it } from "@effect/vitest"
import { Deferred, Effect, Exit, Fiber, Layer, References, Schema, Scope } from "effect"
import { SqlClient } from "effect/sql"
import { Tenure, WorkQueue } from "tenure"
import { connect, freshDatabase, layerOf } from "../support/Postgres.ts"
import { layerRuntime } from "./runtime.ts"

const layerExecutor = Tenure.layer({
  application: "app",
  version: "app-v1",
  settings: { drain: "1 minute", pollInterval: "500 millis" }
}).pipe(Layer.provideMerge(Layer.succeed(References.MinimumLogLevel, "Error" as const)))

class Job extends WorkQueue.make("job", { payload: {} }) {}

/** A handler that begins with `first`; the main closes its queue as soon as it hears of it. */
const stopped = (
  first: (executor: Tenure.Executor["Service"]) => Effect.Effect<unknown>,
  heard: (executor: Tenure.Executor["Service"]) => Effect.Effect<unknown, unknown>
) =>
  Effect.gen(function* () {
    const executor = yield* Tenure.Executor
    const interrupted = yield* Deferred.make<void>()
    const scope = yield* Scope.make()
    const handler = first(executor).pipe(
      Effect.andThen(Effect.never),
      Effect.onInterrupt(() => Deferred.succeed(interrupted, undefined))
    )
    yield* Layer.buildWithScope(
      Job.toLayer(() => handler),
      scope
    )
    // Waits already, so that it goes on in the stack of whoever tells it.
    const closing = yield* Effect.forkChild(
      Effect.andThen(Effect.exit(heard(executor)), Scope.close(scope, Exit.void)),
      { startImmediately: true }
    )
    yield* Job.enqueue({})
    yield* Fiber.join(closing)
    assert.isTrue(yield* Deferred.isDone(interrupted), "the handler still runs")
    const sql = yield* SqlClient.SqlClient
    return yield* sql`SELECT attempt, losses FROM tenure.ready WHERE lane_id > 0`
  })

describe("a handler", () => {
  it.live("that asks for the drain is told to stop, and its item is handed back", () =>
    Effect.gen(function* () {
      const ready = yield* stopped(
        ({ drain }) => drain,
        ({ drained }) => drained
      )
      assert.deepStrictEqual(ready, [{ attempt: 1, losses: 0 }])
    }).pipe(Effect.provide(layerRuntime()), Effect.scoped)
  )

  it.live(
    "that is let to its end by a drain holds nothing up: the process takes nothing more",
    () =>
      Effect.gen(function* () {
        const database = yield* freshDatabase
        const executor = () =>
          Layer.fresh(layerExecutor).pipe(Layer.provide(layerOf(database.worker)))
        const gate = yield* Deferred.make<void>()
        const owners = new Set<string>()
        class Both extends WorkQueue.make("both", { payload: { long: Schema.Boolean } }) {}
        const BothLive = Both.toLayer(
          Effect.fnUntraced(function* ({ long }) {
            const { id } = yield* Tenure.Executor
            if (long) yield* Deferred.await(gate)
            else owners.add(id)
          })
        )
        const draining = yield* Layer.build(Layer.provideMerge(BothLive, executor()))
        const sql = yield* connect(database.superuser)
        const long = yield* Both.enqueue({ long: true }).pipe(Effect.provideContext(draining))
        const running = sql`SELECT FROM tenure.claimed WHERE id = ${long}::uuid`
        while ((yield* running).length === 0) yield* Effect.sleep("5 millis")
        const old = yield* Tenure.Executor.pipe(Effect.provideContext(draining))
        yield* old.drain
        const ids = yield* Both.enqueueAll(
          Array.from({ length: 20 }, () => ({ long: false }))
        ).pipe(Effect.provideContext(draining))
        // It takes them; and had it only been late, some would have been left to the old one.
        const peer = yield* Layer.build(Layer.provideMerge(BothLive, executor()))
        yield* Effect.forEach(ids, Both.await, { concurrency: "unbounded" }).pipe(
          Effect.provideContext(peer)
        )
        const { id } = yield* Tenure.Executor.pipe(Effect.provideContext(peer))
        assert.deepStrictEqual([...owners], [id])
        // The old one still holds what it had, under its own identity.
        assert.strictEqual((yield* running).length, 1)
        yield* Deferred.succeed(gate, undefined)
        yield* Both.await(long).pipe(Effect.provideContext(peer))
      }).pipe(Effect.scoped)
  )

  it.live("that finds the process unfit is told so at once", () =>
    Effect.gen(function* () {
      const ready = yield* stopped(
        ({ fireUnsafe }) => Effect.sync(() => fireUnsafe("stubborn", "job")),
        ({ fired }) => fired
      )
      assert.deepStrictEqual(ready, [{ attempt: 1, losses: 0 }])
    }).pipe(Effect.provide(layerRuntime({ settings: { drain: "1 hour" } })), Effect.scoped)
  )

  it.live("that notices the loss of the lease stores nothing", () =>
    Effect.gen(function* () {
      const ready = yield* stopped(
        ({ lease }) => lease.close("revoked"),
        ({ lease }) => lease.lost
      )
      assert.deepStrictEqual(ready, [])
    }).pipe(Effect.provide(layerRuntime()), Effect.scoped)
  )
})
