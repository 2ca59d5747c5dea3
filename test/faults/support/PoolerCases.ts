/** What must hold behind a pooler, whoever's it is: our own small one or PgBouncer. */
import { PgClient } from "@effect/sql-pg"
import { assert } from "@effect/vitest"
import { Effect, Fiber, Layer, Redacted, Result } from "effect"
import { SqlClient } from "effect/sql"
import { Tenure } from "../../../src/index.ts"
import { Work } from "./Work.ts"
import { steady, type World } from "./World.ts"

/** It ends by itself, with 78 and one sentence, and has registered nobody. */
export const refusesWorker = Effect.fnUntraced(function* (world: World, url: string, why: RegExp) {
  const worker = yield* world.worker({ url, settings: steady })
  assert.deepStrictEqual(yield* worker.ended, { code: 78, signal: null })
  const said = worker.output().filter((line) => line.includes("Database rejected"))
  assert.lengthOf(said, 1, worker.output().join("\n"))
  assert.match(said[0] ?? "", why)
  assert.match(said[0] ?? "", /connect to PostgreSQL directly/)
  assert.strictEqual(yield* world.count("tenure.executor"), 0)
})

/** A plain client of an application: neither identity nor settings, and no named statements. */
export const layerPlain = (url: string, options: Partial<PgClient.PgPoolConfig> = {}) =>
  PgClient.layer({ url: Redacted.make(url), maxConnections: 3, prepare: false, ...options })

const post = (name: string, secret: string) => ({
  program: [{ do: "post", name } as const],
  secret
})

/**
 * Three applications hand in, look and cancel at once, in transactions and without; one in three takes
 * its transaction back. What they accepted is done once by a worker that is connected directly.
 */
export const servesClients = Effect.fnUntraced(function* (world: World, url: string) {
  const { secret } = world
  const handIn = Effect.fnUntraced(function* (caller: number) {
    const sql = yield* SqlClient.SqlClient
    const kept: Array<string> = []
    for (let turn = 0; turn < 6; turn++) {
      const work = post(`${caller} ${turn}`, secret)
      kept.push(yield* Work.enqueue(work, { idempotencyKey: `${caller} ${turn}` }))
      // The same key is the same item, whichever session answers.
      assert.strictEqual(
        yield* Work.enqueue(work, { idempotencyKey: `${caller} ${turn}` }),
        kept.at(-1)
      )
      const outcome = yield* sql
        .withTransaction(
          Effect.gen(function* () {
            const ids = yield* Work.enqueueAll([work, work])
            yield* Work.enqueue(work)
            if (turn % 3 === 0) return yield* Effect.fail("taken back")
            kept.push(...ids)
            return yield* Effect.succeed(ids)
          })
        )
        .pipe(Effect.result)
      assert.strictEqual(Result.isFailure(outcome), turn % 3 === 0)
      const [row] = yield* sql.unsafe<{ readonly id: string }>(
        `SELECT tenure.enqueue('work', '${JSON.stringify(work)}', '{"priority": ${turn}}') AS id`
      )
      kept.push(row?.id ?? "")
      const cancelled = yield* Work.enqueue(work, { delay: "1 hour" })
      assert.strictEqual((yield* Work.poll(cancelled))._tag, "None")
      yield* Work.cancel(cancelled)
    }
    return kept
  })
  const kept = yield* Effect.forEach(
    [0, 1, 2],
    (caller) => handIn(caller).pipe(Effect.provide(layerPlain(url)), Effect.orDie),
    { concurrency: 3 }
  )
  const expected = 3 * 6
  assert.strictEqual(yield* world.count("tenure.ready"), expected * 2 + expected * (2 / 3) * 3)
  assert.strictEqual(yield* world.count("tenure.done WHERE outcome = 'cancelled'"), expected)
  yield* world.ready({ settings: steady })
  yield* world.allSettled()
  const outcomes = yield* world.outcomes
  assert.deepStrictEqual(
    new Set(outcomes.filter(({ id }) => kept.flat().includes(id)).map(({ outcome }) => outcome)),
    new Set(["completed"])
  )
  assert.lengthOf(world.sink.arrivals(), expected * 4)
})

/** It has asked once and in vain when the result comes, so it has to hear of it or to look again. */
export const waitsForResults = Effect.fnUntraced(function* (world: World, url: string) {
  yield* world.ready({ settings: steady })
  const result = yield* Effect.gen(function* () {
    yield* Effect.flatMap(Tenure.Client, (client) => client.ready)
    const id = yield* Work.enqueue({
      program: [{ do: "wait", gate: "result" }],
      secret: world.secret
    })
    const waiting = yield* Effect.forkChild(Work.await(id))
    yield* world.until("it waits for the result", () =>
      Effect.map(world.count("tenure.waiter"), (count) => count === 1)
    )
    yield* world.until("it is being worked on", () => world.sink.waiting("result") === 1)
    yield* world.sink.open("result")
    return yield* Fiber.join(waiting)
  }).pipe(
    Effect.provide(Tenure.layerClient.pipe(Layer.provideMerge(layerPlain(url)))),
    Effect.orDie
  )
  assert.strictEqual(result.attempt, 1)
})
