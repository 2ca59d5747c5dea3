/**
 * Goal: nothing here outlives its budget: what waits for a slot goes back, a handler that does not stop and
 * an outcome that does not get into the database end the process (K-044, K-045, K-047; row 29).
 * Method: the whole runtime in this process with short budgets, and a peer that takes what comes back.
 */
import { assert, describe, it } from "@effect/vitest"
import { Deferred, Effect, Exit, Latch, Layer, Option, References, Schema, Scope } from "effect"
import { Tenure, WorkQueue } from "tenure"
import { Database } from "../../src/database/Database.ts"
import { QueueRuntime } from "../../src/queue/QueueRuntime.ts"
import { connect, endpointOf, freshDatabase, type FreshDatabase } from "../support/Postgres.ts"
import { present } from "../support/present.ts"
import { layerRuntime } from "./runtime.ts"

class Job extends WorkQueue.make("job", {
  payload: { name: Schema.String },
  success: Schema.String
}) {}

const executor = (database: FreshDatabase, settings: Partial<Tenure.Settings>) =>
  Layer.fresh(
    Tenure.layer({
      application: "app",
      version: "app-v1",
      settings: { drain: 100, pollInterval: "500 millis", ...settings }
    })
  ).pipe(
    Layer.provide(Layer.succeed(Database, database.worker)),
    Layer.provideMerge(Layer.succeed(References.MinimumLogLevel, "None" as const))
  )

const start = <A, E>(layer: Layer.Layer<A, E>) =>
  Effect.gen(function* () {
    const scope = yield* Scope.fork(yield* Effect.scope)
    return yield* Layer.buildWithScope(layer, scope)
  })

const runtime = Effect.map(Effect.serviceOption(QueueRuntime), Option.getOrThrow)

const firing = Effect.map(
  Effect.flatMap(Tenure.Executor, ({ fired }) => Effect.flip(fired)),
  ({ reason, subject }) => (subject === undefined ? reason : `${reason} ${subject}`)
)

const actorNamed = (name: string) =>
  Effect.map(runtime, ({ supervisor }) =>
    present(supervisor.actors().find((actor) => actor.name === name))
  )

const steps = Effect.fnUntraced(function* (name: string, count: number) {
  const actor = yield* actorNamed(name)
  const until = actor.progress().steps + count
  while (actor.progress().steps < until) yield* Effect.sleep("10 millis")
})

describe("an item that was claimed ahead", () => {
  it.live("goes back when the handler before it has become slow, and a peer runs it", () =>
    Effect.gen(function* () {
      const database = yield* freshDatabase
      const release = yield* Latch.make()
      const first = yield* start(
        Layer.provideMerge(
          Job.toLayer(
            ({ name }) =>
              Effect.as(name === "slow" ? release.await : Effect.yieldNow, `first ${name}`),
            { concurrency: { perExecutor: 1 } }
          ),
          executor(database, { reservationValidity: "500 millis" })
        )
      )
      const sql = yield* connect(database.owner)
      const names = Array.from({ length: 600 }, (_, n) => (n === 400 ? "slow" : `quick ${n}`))
      const ids = yield* Job.enqueueAll(names.map((name) => ({ name }))).pipe(
        Effect.provideContext(first)
      )
      const claimedAfter = sql<{ id: string }>`
        SELECT c.id::text AS id FROM tenure.claimed c JOIN tenure.item i USING (id)
         WHERE i.seq > (SELECT s.seq FROM tenure.item s WHERE s.id = ${present(ids[400])}::uuid)`
      // Behind the slow one: its own claims say so.
      let ahead: ReadonlyArray<{ readonly id: string }> = []
      while (ahead.length === 0) ahead = yield* claimedAfter
      while ((yield* claimedAfter).length > 0) yield* Effect.sleep("10 millis")
      yield* start(
        Layer.provideMerge(
          Job.toLayer(({ name }) => Effect.succeed(`peer ${name}`)),
          executor(database, {})
        )
      )
      const results = yield* Effect.forEach(
        ids.filter((_, n) => n > 400),
        Job.await,
        { concurrency: "unbounded" }
      ).pipe(Effect.provideContext(first), Effect.timeout("10 seconds"))
      assert.isTrue(results.slice(-10).every((result) => result.startsWith("peer ")))
      const counted = yield* sql<{ id: string; attempt: number; losses: number; failures: number }>`
        SELECT id::text AS id, attempt, losses, failures FROM tenure.done WHERE queue_id > 0`
      const late = counted.filter((row) => ahead.some(({ id }) => id === row.id))
      assert.strictEqual(late.length, ahead.length)
      // Given back once: it claims ahead no more while its only slot is taken.
      for (const row of late) assert.deepInclude(row, { attempt: 2, losses: 0, failures: 0 })
      const { runners } = yield* runtime.pipe(Effect.provideContext(first as never))
      const business = runners().find(({ isPrivate }) => !isPrivate)
      assert.deepStrictEqual(business?.countsUnsafe(), { buffered: 0, live: 1, held: 1 })
      yield* release.open
      const slow = yield* Job.await(present(ids[400])).pipe(Effect.provideContext(first))
      assert.strictEqual(slow, "first slow")
    }).pipe(Effect.scoped)
  )
})

describe("a handler that was told to stop", () => {
  const budgets = { cancelGrace: "300 millis" } as const

  for (const why of ["timeout", "deadline", "cancel"] as const) {
    it.live(`and does not, ends the process: by its ${why}`, () => {
      const release = Latch.makeUnsafe()
      const started = Deferred.makeUnsafe<void>()
      return Effect.gen(function* () {
        const id = yield* Job.enqueue(
          { name: "deaf" },
          why === "deadline" ? { deadline: "300 millis" } : {}
        )
        yield* Deferred.await(started)
        if (why === "cancel") yield* Job.cancel(id)
        assert.strictEqual(yield* firing, "stubborn job")
      }).pipe(
        Effect.ensuring(release.open),
        Effect.provide(
          Layer.provideMerge(
            Job.toLayer(
              () =>
                Effect.uninterruptible(
                  Effect.andThen(Deferred.succeed(started, undefined), release.await)
                ).pipe(Effect.as("at last")),
              why === "timeout" ? { timeout: "200 millis" } : {}
            ),
            layerRuntime({ settings: budgets })
          )
        ),
        Effect.timeout("10 seconds")
      )
    })
  }

  it.live("may clean up within its grace", () =>
    Effect.gen(function* () {
      const { executor: self } = yield* runtime
      const fired = yield* Effect.forkScoped(Effect.exit(self.fired))
      const exit = yield* Effect.exit(Effect.flatMap(Job.enqueue({ name: "slow" }), Job.await))
      assert.isTrue(Exit.isFailure(exit))
      yield* steps("queue_budget", 3)
      assert.isUndefined(fired.pollUnsafe())
    }).pipe(
      Effect.scoped,
      Effect.provide(
        Layer.provideMerge(
          Job.toLayer(() => Effect.onExit(Effect.never, () => Effect.sleep("200 millis")), {
            timeout: "100 millis",
            retry: { times: 0 }
          }),
          // With a reservation this short the budgets are looked at often even when nothing runs.
          layerRuntime({ settings: { ...budgets, reservationValidity: "800 millis" } })
        )
      ),
      Effect.timeout("10 seconds")
    )
  )
})

describe("an outcome that does not get into the database", () => {
  it.live("ends the process, but not while the lease is in doubt", () => {
    const release = Latch.makeUnsafe()
    const started = Deferred.makeUnsafe<void>()
    return Effect.gen(function* () {
      const { executor: self } = yield* runtime
      const fired = yield* Deferred.make<string>()
      yield* Effect.forkScoped(Deferred.into(firing, fired))
      yield* Job.enqueue({ name: "locked" })
      yield* Deferred.await(started)
      const admin = yield* connect(endpointOf("tenure_test_owner", self.database.database))
      yield* admin.withTransaction(
        Effect.gen(function* () {
          yield* admin`SELECT FROM tenure.claimed FOR UPDATE`
          self.lease.doubtUnsafe()
          yield* release.open
          yield* steps("queue_budget", 8)
          assert.isFalse(Deferred.isDoneUnsafe(fired))
          yield* (yield* actorNamed("executor_coordination")).ask({ deadline: "5 seconds" })
          assert.strictEqual(yield* Deferred.await(fired), "unsettled")
        })
      )
    }).pipe(
      Effect.scoped,
      Effect.provide(
        Layer.provideMerge(
          Job.toLayer(() =>
            Effect.andThen(Deferred.succeed(started, undefined), Effect.as(release.await, "done"))
          ),
          layerRuntime({ settings: { settleTimeout: "400 millis" } })
        )
      ),
      Effect.timeout("10 seconds")
    )
  })
})
