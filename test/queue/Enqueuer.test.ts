/**
 * Goal: enqueues of concurrent fibers share commits, and nothing else: each has its own id, its own
 * failure and its own trace, a transaction stays the caller's, and nobody waits for another's key.
 * Method: what the rows say (the transaction that wrote each), with sessions that hold keys open.
 */
import { assert, describe, it } from "@effect/vitest"
import { Deferred, Effect, Exit, Fiber, type Layer, Schema } from "effect"
import { SqlClient } from "effect/sql"
import { WorkQueue } from "tenure"
import { present } from "../support/present.ts"
import { layerRuntime } from "./runtime.ts"

class Job extends WorkQueue.make("job", { payload: { n: Schema.Int } }) {}
class Other extends WorkQueue.make("other", { payload: { n: Schema.Int } }) {}

const numbers = (count: number) => Array.from({ length: count }, (_, n) => n)

/** The payloads by the transaction that wrote them, in the order of enqueue. */
const written = Effect.gen(function* () {
  const sql = yield* SqlClient.SqlClient
  return yield* sql<{ readonly queue: string; readonly numbers: ReadonlyArray<number> }>`
    SELECT q.name AS queue, array_agg((i.payload ->> 'n')::int ORDER BY i.seq) AS numbers
      FROM tenure.item i JOIN tenure.queue q ON q.id = i.queue_id
     GROUP BY i.xmin::text, q.name ORDER BY min(i.seq)`
})

const enqueueEach = (count: number) =>
  Effect.forEach(numbers(count), (n) => Job.enqueue({ n }), { concurrency: "unbounded" })

describe("enqueues of concurrent fibers", () => {
  layered("leave together, each with its own id and in the order of their calls", () =>
    Effect.gen(function* () {
      const sql = yield* SqlClient.SqlClient
      const [ids] = yield* Effect.all([enqueueEach(64), Other.enqueue({ n: 7 })], {
        concurrency: "unbounded"
      })
      assert.strictEqual(new Set(ids).size, 64)
      const rows = yield* sql<{ readonly id: string; readonly n: number }>`
        SELECT id, (payload ->> 'n')::int AS n FROM tenure.item WHERE id = ANY(${ids as ReadonlyArray<string>}::uuid[])`
      const byId = new Map(rows.map(({ id, n }) => [id, n]))
      assert.deepStrictEqual(
        ids.map((id) => byId.get(id)),
        numbers(64)
      )
      const groups = (yield* written).filter(({ queue }) => queue === "job")
      assert.isAtMost(groups.length, 3)
      assert.deepStrictEqual(
        groups.flatMap((group) => group.numbers),
        numbers(64)
      )
    })
  )

  layered("fail alone: what one of them has done wrong is its own", () =>
    Effect.gen(function* () {
      const exits = yield* Effect.forEach(
        numbers(10),
        (n) => Effect.exit(Job.enqueue({ n }, n === 3 ? { key: "" } : {})),
        { concurrency: "unbounded" }
      )
      assert.deepStrictEqual(
        exits.flatMap((exit, n) => (Exit.isFailure(exit) ? [n] : [])),
        [3]
      )
      const accepted = (yield* written).flatMap((group) => group.numbers)
      assert.deepStrictEqual(
        accepted.toSorted(),
        numbers(10).filter((n) => n !== 3)
      )
    })
  )

  layered("keep their own traces", () =>
    Effect.gen(function* () {
      const sql = yield* SqlClient.SqlClient
      const traced = (n: number) =>
        Effect.gen(function* () {
          const id = yield* Job.enqueue({ n })
          return { id, trace: (yield* Effect.currentSpan).traceId }
        }).pipe(Effect.withSpan("hand in", { root: true }))
      const handed = yield* Effect.forEach(numbers(5), traced, { concurrency: "unbounded" })
      const plain = yield* Job.enqueue({ n: 5 })
      const rows = yield* sql<{ readonly id: string; readonly trace: string | null }>`
        SELECT id, split_part(trace, '-', 2) AS trace FROM tenure.item`
      const traces = new Map(rows.map(({ id, trace }) => [id, trace]))
      for (const { id, trace } of handed) assert.strictEqual(traces.get(id), trace)
      assert.isNull(traces.get(plain))
    })
  )

  layered("stay with the transaction of their caller, and go with it", () =>
    Effect.gen(function* () {
      const sql = yield* SqlClient.SqlClient
      const rolledBack = sql.withTransaction(Effect.andThen(enqueueEach(3), Effect.fail("no")))
      assert.isTrue(Exit.isFailure(yield* Effect.exit(rolledBack)))
      assert.deepStrictEqual(yield* written, [])
      yield* sql.withTransaction(enqueueEach(3))
      assert.deepStrictEqual(yield* written, [{ queue: "job", numbers: [0, 1, 2] }])
    })
  )

  layered("do not wait for a key that somebody's open transaction holds", () =>
    Effect.gen(function* () {
      const sql = yield* SqlClient.SqlClient
      // The first one makes the queue, which would be what the others wait for.
      yield* Job.enqueue({ n: 0 })
      const end = yield* Deferred.make<void>()
      const holds = yield* Deferred.make<void>()
      const keyed = Job.enqueue({ n: 1 }, { idempotencyKey: "held" })
      const holder = yield* Effect.forkChild(
        sql.withTransaction(
          Effect.tap(keyed, () =>
            Effect.andThen(Deferred.succeed(holds, undefined), Deferred.await(end))
          )
        )
      )
      yield* Deferred.await(holds)
      const waiting = yield* Effect.forkChild(keyed)
      yield* enqueueEach(5)
      assert.isUndefined(waiting.pollUnsafe())
      yield* Deferred.succeed(end, undefined)
      assert.strictEqual(yield* Fiber.join(waiting), present(yield* Fiber.join(holder)))
    })
  )
})

function layered<A, E>(
  name: string,
  body: () => Effect.Effect<A, E, Layer.Success<ReturnType<typeof layerRuntime>>>
) {
  it.live(name, () => Effect.provide(body(), layerRuntime()))
}
