/**
 * Goal: numbers past 32 bits, and past what a number of JavaScript can hold, change nothing: order, retries,
 * recovery, shutdown (bug report 20).
 * Method: the sequences of the database moved there before anything runs.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect, Layer, Schedule, Schema } from "effect"
import { Tenure, WorkQueue } from "tenure"
import { connect, freshDatabase, layerOf } from "../support/Postgres.ts"
import * as K from "../kernel/kernel.ts"

class Job extends WorkQueue.make("job", { payload: { n: Schema.Int } }) {}

describe("sequences past what a number can hold", () => {
  it.live("change nothing: order, retries, an orderly stop, and a lost executor", () =>
    Effect.gen(function* () {
      const database = yield* freshDatabase
      const sql = yield* connect(database.superuser)
      yield* sql`SELECT setval('tenure.item_seq', 9007199254740993)`
      yield* sql`SELECT setval(pg_get_serial_sequence('tenure.queue', 'id'), 2000000000),
                        setval(pg_get_serial_sequence('tenure.lane', 'id'), 2000000000)`
      const order: Array<number> = []
      const executor = Layer.fresh(
        Tenure.layer({
          application: "app",
          version: "v1",
          settings: { drain: 100, pollInterval: "500 millis", recoveryScan: "1 second" }
        })
      ).pipe(Layer.provide(layerOf(database.worker)))
      const serving = (slots: number, gated: boolean) =>
        Job.toLayer(
          ({ n }, item) =>
            Effect.suspend(() => {
              if (gated) return Effect.never
              if (item.attempt === 1 && n === 0) return new WorkQueue.RetryLater({ cause: "x" })
              order.push(n)
              return Effect.void
            }),
          {
            concurrency: { perExecutor: slots },
            retry: { times: 3, schedule: Schedule.spaced("1 millis") }
          }
        ).pipe(Layer.provideMerge(executor))

      const numbers = Array.from({ length: 40 }, (_, n) => n)
      // Held by an executor that is lost, by one that stops in order, and by nobody.
      const ids = yield* Effect.scoped(
        Effect.gen(function* () {
          const context = yield* Layer.build(serving(10, true))
          const handed = yield* Job.enqueueAll(numbers.map((n) => ({ n }))).pipe(
            Effect.provideContext(context)
          )
          yield* K.eventually(
            "ten of them run",
            Effect.map(
              sql`SELECT FROM tenure.claimed WHERE queue_id > 0`,
              (rows) => rows.length >= 10
            )
          )
          return handed
        })
      )
      assert.deepStrictEqual(yield* sql`SELECT FROM tenure.claimed`, [])
      const ghost = yield* K.executorOf(database, { queue: "job" })
      assert.strictEqual((yield* K.claim(ghost, 5)).length, 5)
      yield* sql`SELECT tenure.mark_revoking(${ghost.id}::uuid, true)`

      const context = yield* Layer.build(serving(1, false))
      yield* Effect.forEach(ids, Job.await, { concurrency: "unbounded" }).pipe(
        Effect.timeout("30 seconds"),
        Effect.provideContext(context)
      )
      assert.deepStrictEqual(
        [...order].sort((a, b) => a - b),
        numbers
      )
      // What no lost executor had, and no retry has moved, in the order it was handed in.
      const untouched = order.filter((n) => n >= 5)
      assert.deepStrictEqual(
        untouched,
        [...untouched].sort((a, b) => a - b)
      )
      const [row] = yield* sql<{ readonly seqs: string }>`
        SELECT min(seq)::text AS seqs FROM tenure.item WHERE queue_id > 0`
      assert.isAbove(Number(row?.seqs), Number.MAX_SAFE_INTEGER)
    }).pipe(Effect.scoped)
  )
})
