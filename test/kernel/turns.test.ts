/**
 * Goal: a paused queue gives nothing and loses nothing; where keys take turns none is passed over; and where
 * priorities age the stated time decides (I10, bug report 23).
 * Method: generated keys and times, claimed one by one or in batches, against what is promised of the order.
 */
import { assert, layer } from "@effect/vitest"
import { Context, Effect, Layer, Schema } from "effect"
import type { SqlError } from "effect/sql/SqlError"
import * as K from "./kernel.ts"

const of = ({ id, attempt }: K.Claimed) => ({ id, attempt })

const between = (minimum: number, maximum: number) =>
  Schema.Int.check(Schema.isBetween({ minimum, maximum }))

/** Claims and settles until nothing is left, in batches; the rows in their order, a list for each claim. */
const drain = Effect.fnUntraced(function* (
  runner: K.Executor,
  wanted: () => number
): Effect.fn.Return<ReadonlyArray<ReadonlyArray<K.Claimed>>, SqlError> {
  const batches: Array<ReadonlyArray<K.Claimed>> = []
  let cursor = ""
  for (let empty = 0; empty < 3;) {
    const rows = yield* K.claimRows(runner, wanted(), { cursor })
    const claimed = rows.filter((row) => row.id !== null)
    const last = rows.find((row) => row.id === null)
    cursor = last?.key ?? cursor
    // Told to come again at once, it is not at the end.
    empty = claimed.length === 0 && last?.deadline_in_ms !== 0 ? empty + 1 : 0
    if (claimed.length > 0) batches.push(claimed)
    yield* K.settle(runner, claimed.map(of))
  }
  return batches
})

layer(K.Kernel.layer, { excludeTestServices: true })("a paused queue", (it) => {
  for (const [name, options] of [
    ["plain", {}],
    ["keyed", { perKeyLimit: 1 }],
    ["rated", { limits: { rateLimit: 100, rateWindowMs: 60_000 } }]
  ] as const) {
    it.effect(`gives nothing from the commit on, and all of it when it goes on: ${name}`, () =>
      Effect.gen(function* () {
        const api = yield* K.session("api")
        const queue = `paused ${name}`
        const runner = yield* K.executor({ queue, ...options })
        yield* K.enqueueMany(api, queue, 3, { keys: ["a", "b", "c"] })
        const running = yield* K.claim(runner, 1)
        yield* api`BEGIN`
        yield* api`SELECT tenure.pause_queue(${queue})`
        assert.lengthOf(yield* K.claim(runner, 1), 1, "nothing is committed yet")
        yield* api`COMMIT`
        const [none, ...more] = yield* K.claimRows(runner, 5)
        assert.deepStrictEqual([none?.id, none?.key, none?.deadline_in_ms], [null, null, null])
        assert.isTrue(none?.cancel_requested)
        assert.lengthOf(more, 0)
        const seen = K.first(
          yield* runner.sql<{ is_held: boolean }>`
            SELECT is_held FROM tenure.observe_queues(ARRAY['v1'], ARRAY[${runner.queueId}::int],
              ARRAY[]::int[], ARRAY[]::int[], ARRAY[]::float8[])`
        )
        assert.isTrue(seen.is_held, "which is no starvation")
        assert.lengthOf(yield* K.settle(runner, running.map(of)), 0, "what runs goes on")
        yield* K.enqueueMany(api, queue, 1, { keys: ["d"] })
        assert.deepStrictEqual(
          yield* api`SELECT tenure.resume_queue(${queue}) AS first, tenure.resume_queue(${queue}) AS again`,
          [{ first: true, again: false }]
        )
        assert.lengthOf(yield* K.claim(runner, 5), 2)
      })
    )
  }

  it.effect("keeps the time of the first pause, and may be one that nobody has used", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const pause = Effect.map(
        api<{ since: Date }>`SELECT tenure.pause_queue('unheard of') AS since`,
        (rows) => K.first(rows).since.getTime()
      )
      assert.strictEqual(yield* pause, yield* pause)
      yield* K.enqueueMany(api, "unheard of", 1)
      const runner = yield* K.executor({ queue: "unheard of" })
      assert.lengthOf(yield* K.claim(runner, 1), 0)
      assert.isFalse(
        K.first(yield* api<{ it: boolean }>`SELECT tenure.resume_queue('no such queue') AS it`).it
      )
    })
  )
})

layer(K.Kernel.layer, { excludeTestServices: true, timeout: "60 seconds" })(
  "turns of keys",
  (it) => {
    const limits = { takesTurns: true }
    let queues = 0

    it.effect.prop(
      "of each that waits one starts before the second of any, in its own order",
      {
        counts: Schema.Array(between(1, 12)).check(Schema.isMinLength(2), Schema.isMaxLength(9)),
        wanted: Schema.Array(between(1, 8)).check(Schema.isMinLength(3), Schema.isMaxLength(3)),
        perKeyLimit: Schema.Literals([0, 1, 2])
      },
      ({ counts, perKeyLimit, wanted }) =>
        Effect.scoped(
          Effect.gen(function* () {
            const api = yield* K.session("api")
            const queue = `turns ${queues++}`
            const runner = yield* K.executor({
              queue,
              limits,
              ...(perKeyLimit === 0 ? {} : { perKeyLimit })
            })
            // The first keys are the oldest, with all that they have.
            const keys = counts.flatMap((count, key) =>
              Array.from({ length: count }, () => `k${key}`)
            )
            const ids = yield* K.enqueueMany(api, queue, keys.length, { keys })
            let turn = 0
            const batches = yield* drain(runner, () => wanted[turn++ % wanted.length] ?? 1)
            const started = counts.map(() => 0)
            const order = counts.map((): Array<string> => [])
            for (const batch of batches) {
              for (const row of batch) {
                const key = Number(row.key?.slice(1))
                started[key] = (started[key] ?? 0) + 1
                order[key]?.push(row.id)
              }
              // After each claim nobody who still waits is behind another by more than one.
              const waiting = counts.flatMap((count, key) =>
                (started[key] ?? 0) < count ? [started[key] ?? 0] : []
              )
              if (waiting.length === 0) continue
              const ahead = Math.max(...started) - Math.min(...waiting)
              assert.isAtMost(ahead, 1)
            }
            assert.deepStrictEqual(started, counts)
            counts.forEach((_, key) =>
              assert.deepStrictEqual(
                order[key],
                ids.filter((_, at) => keys[at] === `k${key}`)
              )
            )
          })
        ),
      { arbitrary: { runs: 10 } }
    )

    it.effect("a small key is not behind a huge one, however little is claimed at once", () =>
      Effect.gen(function* () {
        const api = yield* K.session("api")
        const place = Effect.fnUntraced(function* (queue: string, fair: boolean) {
          const runner = yield* K.executor({
            queue,
            ...(fair ? { limits } : { perKeyLimit: 1000 })
          })
          yield* K.enqueueMany(api, queue, 300, { keys: Array.from({ length: 300 }, () => "huge") })
          yield* K.enqueueMany(api, queue, 1, { keys: ["small"] })
          const batches = yield* drain(runner, () => 1)
          return batches.findIndex((rows) => rows.some((row) => row.key === "small"))
        })
        assert.isAtMost(yield* place("fair", true), 1)
        assert.strictEqual(yield* place("by age", false), 300)
      })
    )

    it.effect(
      "a key alone is claimed in whole batches, and those without a key are not left out",
      () =>
        Effect.gen(function* () {
          const api = yield* K.session("api")
          const runner = yield* K.executor({ queue: "q", limits })
          yield* K.enqueueMany(api, "q", 100, { keys: Array.from({ length: 100 }, () => "alone") })
          const first = yield* K.claim(runner, 60)
          // One place is kept for an item without a key, should there be one.
          assert.lengthOf(first, 59)
          assert.deepStrictEqual(
            first.map((row) => row.payload),
            Array.from({ length: 59 }, (_, n) => String(n))
          )
          // A key that never runs dry, beside items without one: one place at a time.
          yield* K.settle(runner, first.map(of))
          yield* K.enqueueMany(api, "q", 200, { keys: Array.from({ length: 200 }, () => "more") })
          yield* K.enqueueMany(api, "q", 20)
          const batches = yield* drain(runner, () => 1)
          const keyless = batches.flatMap((rows, at) =>
            rows.some((row) => row.key === null) ? [at] : []
          )
          assert.lengthOf(keyless, 20)
          assert.lengthOf(batches, 261)
          assert.isBelow(keyless[19] ?? 260, 240, "long before the keys have nothing left")
        })
    )

    it.effect("a thousand keys with one at a time each keep their order, with four claimers", () =>
      Effect.gen(function* () {
        const api = yield* K.session("api")
        const owner = yield* K.session("owner")
        const runners = yield* Effect.all(
          Array.from({ length: 4 }, () => K.executor({ queue: "many", limits, perKeyLimit: 1 }))
        )
        const keys = Array.from({ length: 3000 }, (_, n) => `k${n % 1000}`)
        const ids = yield* K.enqueueMany(api, "many", 3000, { keys })
        const batches = yield* Effect.forEach(runners, (runner) => drain(runner, () => 100), {
          concurrency: "unbounded"
        })
        assert.strictEqual(batches.flat(2).length, 3000)
        const settled = yield* owner<{ id: string }>`
        SELECT id::text AS id FROM tenure.done WHERE queue_id = ${K.first(runners).queueId}::int
         ORDER BY finished_at`
        const places = new Map(settled.map((row, at) => [row.id, at]))
        for (let n = 1000; n < 3000; n++) {
          const [before = 0, after = 0] = [ids[n - 1000], ids[n]].map((id) => places.get(id ?? ""))
          assert.isBelow(before, after)
        }
      })
    )
  }
)

class Stopped extends Context.Service<
  Stopped,
  { readonly api: K.Sql; readonly clock: K.StoppedClock }
>()("tenure/test/Stopped") {
  static readonly layer = Layer.effect(
    Stopped,
    Effect.gen(function* () {
      const clock = yield* K.stopClock(yield* K.session("owner"))
      return { api: yield* K.session("api"), clock }
    })
  ).pipe(Layer.provideMerge(K.Kernel.layer))
}

layer(Stopped.layer, { excludeTestServices: true, timeout: "60 seconds" })(
  "priorities that age",
  (it) => {
    const agingMs = 60_000
    let queues = 0

    const aging = Effect.gen(function* () {
      const { api, clock } = yield* Stopped
      const queue = `aging ${queues++}`
      return {
        api,
        clock,
        hand: (count: number, options: K.EnqueueOptions = {}) =>
          K.enqueueMany(api, queue, count, options),
        register: (limits: { readonly agingMs?: number }) =>
          K.executor({ queue, limits, validity: "400 days" })
      }
    })

    it.effect.prop(
      "n steps are made up for by n times the stated time and by nothing less, and equals keep their order",
      {
        items: Schema.Array(
          Schema.Struct({
            afterMs: between(0, 90_000),
            priority: between(-3, 3),
            isDelayed: Schema.Boolean
          })
        ).check(Schema.isMinLength(8), Schema.isMaxLength(20))
      },
      ({ items }) =>
        Effect.scoped(
          Effect.gen(function* () {
            const { clock, hand, register } = yield* aging
            const runner = yield* register({ agingMs })
            const handed: Array<{ id: string; at: number; priority: number }> = []
            for (const { afterMs, isDelayed, priority } of items) {
              yield* clock.advance(afterMs)
              const [id = ""] = yield* hand(1, {
                priorities: [priority],
                ...(isDelayed ? { delaysMs: [1000] } : {})
              })
              handed.push({ id, at: clock.atMillis(), priority })
            }
            yield* clock.advance(2000)
            yield* runner.sql`SELECT promoted FROM tenure.promote(1000)`
            const order = (yield* drain(runner, () => 3)).flat().map((row) => row.id)
            assert.lengthOf(order, handed.length)
            handed.forEach((a, n) =>
              handed.slice(n + 1).forEach((b) => {
                const steps = b.priority - a.priority
                const isFirst = order.indexOf(a.id) < order.indexOf(b.id)
                const waited = b.at - a.at
                if (steps <= 0 || waited >= steps * agingMs) assert.isTrue(isFirst)
                else if (waited <= (steps - 1) * agingMs) assert.isFalse(isFirst)
              })
            )
          })
        ),
      { arbitrary: { runs: 10 } }
    )

    it.effect("nobody overtakes those before him because the policy changes", () =>
      Effect.gen(function* () {
        const { clock, hand, register } = yield* aging
        const handed: Array<string> = []
        let runner = yield* register({})
        for (const limits of [{}, { agingMs }, { agingMs: 5000 }, {}, { agingMs: 1000 }, {}]) {
          runner = yield* register(limits)
          yield* clock.advance(600_000)
          handed.push(...(yield* hand(2)))
        }
        const order = (yield* drain(runner, () => 5)).flat().map((row) => row.id)
        assert.deepStrictEqual(order, handed)
      })
    )

    it.effect(
      "an item is found where it waits, keeps its place in recovery, and tells what was asked",
      () =>
        Effect.gen(function* () {
          const { api, clock, hand, register } = yield* aging
          const runner = yield* register({ agingMs })
          const [low = ""] = yield* hand(1, { priorities: [-5] })
          yield* clock.advance(10 * agingMs)
          const [later = "", gone = "", late = ""] = yield* hand(3, {
            priorities: [0, 7, 0],
            deadlinesMs: [null, null, 1]
          })
          assert.deepStrictEqual(
            yield* api`SELECT priority + coalesce(aged, 0) AS asked FROM tenure.item WHERE id = ${gone}::uuid`,
            [{ asked: 7 }]
          )
          assert.deepStrictEqual(yield* api`SELECT tenure.cancel(${gone}::uuid) AS it`, [
            { it: "cancelled" }
          ])
          yield* clock.advance(5)
          yield* runner.sql`SELECT expired FROM tenure.expire_deadlines(10)`
          assert.strictEqual(yield* K.placeOf(api, late), "failed")
          const [first] = yield* K.claim(runner, 1)
          assert.strictEqual(first?.id, low)
          const heir = yield* register({ agingMs })
          yield* K.loseExecutor(heir.sql, runner.id)
          const order = (yield* drain(heir, () => 1)).flat().map((row) => row.id)
          assert.deepStrictEqual(order, [low, later])
        })
    )
  }
)
