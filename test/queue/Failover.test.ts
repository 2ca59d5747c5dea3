/**
 * Goal: a failover that ends every session, with a default of read-only transactions behind it, stops no
 * executor and leaves no item that nobody can claim (bug report 2).
 * Method: the database's own default is switched, and every session ended, while two executors work. Ours ask
 * for writes when they are opened; what a server that takes none at all does is test/faults/Outage.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect, Latch, Layer, References, Schema } from "effect"
import { Tenure, WorkQueue } from "tenure"
import * as K from "../kernel/kernel.ts"
import { administer, connect, freshDatabase, layerOf } from "../support/Postgres.ts"

class Job extends WorkQueue.make("job", { payload: { n: Schema.Int }, success: Schema.Int }) {}

describe("a database whose transactions become read-only by default", () => {
  it.live(
    "has every item done, by executors that have lost all their sessions to it",
    () =>
      Effect.gen(function* () {
        const database = yield* freshDatabase
        const executor = () =>
          Layer.fresh(
            Tenure.layer({
              application: "app",
              version: "v1",
              settings: { drain: 100, pollInterval: "500 millis", leaseRenewal: "2 seconds" }
            })
          ).pipe(
            Layer.provide(layerOf(database.worker)),
            Layer.provideMerge(Layer.succeed(References.MinimumLogLevel, "None" as const))
          )
        const gate = yield* Latch.make(false)
        const JobLive = Job.toLayer(({ n }) => Effect.as(n < 20 ? Effect.void : gate.await, n), {
          concurrency: { perExecutor: 4 }
        })
        const workers = [
          yield* Layer.build(Layer.provideMerge(JobLive, executor())),
          yield* Layer.build(Layer.provideMerge(JobLive, executor()))
        ] as const
        const sql = yield* connect(database.superuser)
        const ids = yield* Job.enqueueAll(Array.from({ length: 300 }, (_, n) => ({ n }))).pipe(
          Effect.provideContext(workers[0])
        )
        const doneCount = Effect.map(
          sql`SELECT FROM tenure.done WHERE queue_id > 0`,
          (rows) => rows.length
        )
        yield* K.eventually(
          "the first are done",
          Effect.map(doneCount, (count) => count === 20)
        )
        const turn = (readOnly: boolean) =>
          administer((admin) =>
            Effect.andThen(
              admin.unsafe(
                `ALTER DATABASE ${database.name} SET default_transaction_read_only = ${readOnly}`
              ),
              admin`SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                     WHERE datname = ${database.name} AND application_name LIKE 'tenure %'
                       AND application_name <> 'tenure test'`
            )
          )
        yield* turn(true)
        yield* gate.open
        const results = yield* Effect.forEach(ids, Job.await, { concurrency: "unbounded" }).pipe(
          Effect.timeout("60 seconds"),
          Effect.provideContext(workers[1])
        )
        assert.deepStrictEqual(
          results,
          ids.map((_, n) => n)
        )
        yield* turn(false)
        yield* K.eventually(
          "nothing is held",
          Effect.map(
            sql`SELECT id FROM tenure.claimed WHERE queue_id > 0
                UNION ALL SELECT id FROM tenure.ready WHERE lane_id > 0`,
            (rows) => rows.length === 0
          )
        )
        const states = yield* sql`SELECT DISTINCT state FROM tenure.executor`
        assert.deepStrictEqual(states, [{ state: "active" }])
      }).pipe(Effect.scoped),
    120_000
  )
})
