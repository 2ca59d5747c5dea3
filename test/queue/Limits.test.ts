/**
 * Goal: a queue with a rate is drained at that rate by claimers that are told when to look, and does not
 * claim ahead; a paused queue starts nothing and goes on when it is told to; where keys take turns a small
 * key is served beside a huge one.
 * Method: the whole runtime, with a poll interval that no test outlives: whatever happens was told or timed.
 */
import { assert, describe, it } from "@effect/vitest"
import { Clock, Deferred, Effect, Layer, Option, Schema } from "effect"
import { SqlClient } from "effect/sql"
import { Tenure, WorkQueue } from "tenure"
import { QueueRuntime } from "../../src/queue/QueueRuntime.ts"
import { present } from "../support/present.ts"
import { layerRuntime } from "./runtime.ts"

class Paced extends WorkQueue.make("paced", {
  payload: { n: Schema.Int, key: Schema.String },
  key: ({ key }) => key
}) {}

const runtime = Effect.map(Effect.serviceOption(QueueRuntime), Option.getOrThrow)

const runnerOf = (queue: string) =>
  Effect.map(runtime, ({ runners }) => present(runners().find((one) => one.queue === queue)))

const eventually = <R>(condition: Effect.Effect<boolean, never, R>) =>
  Effect.gen(function* () {
    while (!(yield* condition)) yield* Effect.sleep("10 millis")
  }).pipe(Effect.timeout("30 seconds"))

const payloads = (count: number, key = "k") => Array.from({ length: count }, (_, n) => ({ n, key }))

const nowMillis = Effect.map(Clock.monotonicTimeNanos, (nanos) => Number(nanos) / 1e6)

/** Once it is ready to be told: from then on nothing here needs a poll. */
const inRuntime = <A, E, R>(body: Effect.Effect<A, E, R>) =>
  body.pipe(
    Effect.scoped,
    Effect.provide(layerRuntime({ settings: { drain: 100, pollInterval: "10 minutes" } }))
  )

describe("limits in the runtime", () => {
  it.live("a rate is kept without polling, for the queue and for each key", () =>
    inRuntime(
      Effect.gen(function* () {
        const client = yield* Tenure.Client
        yield* client.ready
        yield* Layer.build(
          Paced.toLayer(() => Effect.void, {
            rateLimit: {
              limit: 6,
              window: "1 second",
              perKey: { limit: 2, window: "500 millis" }
            }
          })
        )
        const runner = yield* runnerOf("paced")
        const begun = yield* nowMillis
        const stepsBefore = runner.claimer.progress().steps
        // Eighteen in windows of six: the last ones start two seconds after the first, at the earliest.
        const ids = yield* Paced.enqueueAll([
          ...payloads(6, "a"),
          ...payloads(6, "b"),
          ...payloads(6, "c")
        ])
        yield* Effect.forEach(ids, (id) => Paced.await(id), { concurrency: "unbounded" }).pipe(
          Effect.timeout("30 seconds")
        )
        assert.isAtLeast((yield* nowMillis) - begun, 2000)
        assert.isBelow(runner.claimer.progress().steps - stepsBefore, 80)
      })
    )
  )

  it.live("what a rate counts is not claimed before there is a slot for it", () =>
    inRuntime(
      Effect.gen(function* () {
        const open = yield* Deferred.make<void>()
        yield* Layer.build(
          Paced.toLayer(({ n }) => (n < 40 ? Effect.void : Deferred.await(open)), {
            concurrency: { perExecutor: 3 },
            rateLimit: { limit: 1000, window: "1 minute" }
          })
        )
        const runner = yield* runnerOf("paced")
        const ids = yield* Paced.enqueueAll(payloads(60))
        yield* eventually(Effect.sync(() => runner.countsUnsafe().live === 3))
        assert.strictEqual(runner.countsUnsafe().buffered, 0)
        yield* Deferred.succeed(open, undefined)
        yield* Effect.forEach(ids, (id) => Paced.await(id), { concurrency: "unbounded" })
      })
    )
  )

  it.live(
    "a paused queue starts nothing, in a transaction or out of it, and goes on when told to",
    () =>
      inRuntime(
        Effect.gen(function* () {
          const client = yield* Tenure.Client
          yield* client.ready
          yield* Layer.build(Paced.toLayer(() => Effect.void))
          const runner = yield* runnerOf("paced")
          yield* Paced.await(yield* Paced.enqueue({ n: 0, key: "k" }))
          const sql = yield* SqlClient.SqlClient
          yield* sql.withTransaction(Paced.pause)
          // A claim that began before the commit may take what comes until it ends.
          yield* eventually(Effect.sync(() => !runner.claimer.progress().inFlight))
          const steps = runner.claimer.progress().steps
          const ids = yield* Paced.enqueueAll(payloads(5))
          // It was told of them and has looked.
          yield* eventually(Effect.sync(() => runner.claimer.progress().steps > steps))
          assert.deepInclude(runner.countsUnsafe(), { live: 0, buffered: 0 })
          assert.isTrue(Option.isNone(yield* Paced.poll(present(ids[0]))))
          yield* Paced.resume
          yield* Effect.forEach(ids, (id) => Paced.await(id), { concurrency: "unbounded" }).pipe(
            Effect.timeout("30 seconds")
          )
        })
      )
  )

  it.live("a small key is served beside a huge one, by one slot", () =>
    inRuntime(
      Effect.gen(function* () {
        const order: Array<string> = []
        const ids = yield* Paced.enqueueAll([...payloads(400, "huge"), ...payloads(3, "small")])
        yield* Layer.build(
          Paced.toLayer(
            ({ key }) =>
              Effect.andThen(
                Effect.sync(() => order.push(key)),
                Effect.sleep("1 millis")
              ),
            { concurrency: { perExecutor: 1 }, fair: true }
          )
        )
        yield* Effect.forEach(ids, (id) => Paced.await(id), { concurrency: "unbounded" })
        assert.strictEqual(order.length, 403)
        assert.isBelow(order.lastIndexOf("small"), 10)
      })
    )
  )

  it.live("a policy that means nothing is refused at the start", () =>
    inRuntime(
      Effect.gen(function* () {
        const refused = yield* Effect.flip(
          Layer.build(
            Paced.toLayer(() => Effect.void, { rateLimit: { limit: 0, window: "1 second" } })
          )
        )
        assert.include(refused.message, "rateLimit.limit is an integer")
      })
    )
  )
})
