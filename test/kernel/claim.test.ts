/**
 * Goal: a claim takes what is next, no more than was asked for, nothing that belongs to somebody
 * else, and each attempt once (I5, pitfalls P-30 and P-31).
 * Method: executors as the worker role on a real server. Limits have their own file.
 */
import { assert, layer } from "@effect/vitest"
import { Effect } from "effect"
import * as K from "./kernel.ts"

const settings = [
  "enable_indexscan",
  "enable_indexonlyscan",
  "enable_bitmapscan",
  "enable_nestloop",
  "enable_material",
  "enable_sort",
  "enable_memoize",
  "enable_tidscan",
  "enable_hashagg",
  "enable_incremental_sort"
]

/** Claims all that is there and hands it back, so that it waits in the lane of this version. */
const bounce = Effect.fnUntraced(function* (runner: K.Executor, wanted: number) {
  const claimed = yield* K.claim(runner, wanted)
  yield* K.settle(
    runner,
    claimed.map(({ id, attempt }) => ({ id, attempt, outcome: "hand-back" }))
  )
  return claimed
})

layer(K.Kernel.layer, { excludeTestServices: true })("claim", (it) => {
  it.effect("takes the highest priority first, then the oldest, across all its lanes", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const lost = yield* K.executor({ queue: "order" })
      const runner = yield* K.executor({ queue: "order" })
      const random = (n: number) => (n * 7919) % 5
      const enqueue = (from: number) =>
        K.enqueueMany(api, "order", 20, {
          priorities: Array.from({ length: 20 }, (_, n) => random(from + n))
        })
      // Suspects, then what was started, then what nobody has seen.
      yield* enqueue(0)
      yield* K.claim(lost, 100)
      yield* K.loseExecutor(runner.sql, lost.id)
      yield* enqueue(20)
      yield* bounce(runner, 100)
      yield* enqueue(40)
      const claimed = yield* K.claim(runner, 100, { suspects: 100 })
      assert.strictEqual(claimed.length, 60)
      assert.strictEqual(new Set(claimed.map((row) => row.lane_id)).size, 3)
      assert.deepStrictEqual(
        claimed.map((row) => row.id),
        claimed.toSorted((a, b) => a.rank - b.rank || a.seq - b.seq).map((row) => row.id)
      )
    })
  )

  it.effect("a claim of few takes the first of all lanes, not of each", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const owner = yield* K.session("owner")
      const runner = yield* K.executor({ queue: "few" })
      const ids = yield* K.enqueueMany(api, "few", 10)
      yield* bounce(runner, 5)
      assert.deepStrictEqual(
        (yield* K.claim(runner, 7)).map((row) => row.id),
        ids.slice(0, 7)
      )
      assert.deepStrictEqual(
        Object.values(yield* K.placesOf(owner, ids)).filter((place) => place === "ready").length,
        3
      )
    })
  )

  it.effect("takes no more than wanted, whatever the planner is allowed to do", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const owner = yield* K.session("owner")
      const limited = yield* K.executor({
        queue: "limited plans",
        perKeyLimit: 3,
        globalLimit: 1000
      })
      const plain = yield* K.executor({ queue: "plans" })
      for (const [runner, queue] of [
        [plain, "plans"],
        [limited, "limited plans"]
      ] as const) {
        yield* K.enqueueMany(api, queue, 400, {
          keys: Array.from({ length: 400 }, (_, n) => (n % 2 === 0 ? null : `k${n % 97}`))
        })
        yield* bounce(runner, 60)
        yield* owner`ANALYZE tenure.ready`
        let taken = 0
        for (let mask = 0; mask < 24; mask++) {
          yield* runner.sql`BEGIN`
          // Before PostgreSQL 18 a plan that is switched off costs so much that it is compiled.
          yield* runner.sql`SET LOCAL jit = off`
          for (const [bit, setting] of settings.entries()) {
            const isOn = ((mask * 0x9e3779b1) >>> (bit + 7)) & 1
            yield* runner.sql.unsafe(`SET LOCAL ${setting} = ${isOn === 1 ? "on" : "off"}`)
          }
          yield* runner.sql.unsafe(
            `SET LOCAL plan_cache_mode = ${mask % 2 === 0 ? "force_generic_plan" : "force_custom_plan"}`
          )
          taken += (yield* K.claim(runner, 7)).length
          yield* runner.sql`COMMIT`
          const { n } = K.first(
            yield* owner<{ n: number }>`
              SELECT count(*)::int AS n FROM tenure.claimed WHERE owner = ${runner.id}::uuid`
          )
          assert.strictEqual(n, taken, `settings ${mask}`)
          assert.strictEqual(taken, 7 * (mask + 1), `settings ${mask}`)
        }
      }
    })
  )

  it.effect("begins above the floor of each lane, and from the start sees what is below", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const runner = yield* K.executor({ queue: "floors" })
      const ids = yield* K.enqueueMany(api, "floors", 10)
      const [, , third] = yield* bounce(runner, 3)
      const lowest = [-2147483648, 0] as const
      const from = [0, third?.seq ?? 0] as const
      // The three are in the second lane, and below its floor.
      const above = yield* K.claim(runner, 4, { floors: [lowest, from] })
      assert.deepStrictEqual(
        above.map((row) => row.id),
        ids.slice(3, 7)
      )
      const last = above.at(-1)
      assert.deepStrictEqual(
        (yield* K.claim(runner, 1, { floors: [[last?.rank ?? 0, last?.seq ?? 0], from] })).map(
          (row) => row.id
        ),
        ids.slice(7, 8)
      )
      assert.deepStrictEqual(
        (yield* K.claim(runner, 10)).map((row) => row.id),
        [...ids.slice(0, 3), ...ids.slice(8)]
      )
    })
  )

  it.effect("takes no more suspects than wanted, beside as many others", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      for (const perKeyLimit of [undefined, 1]) {
        const queue = `suspects ${perKeyLimit}`
        const options = { queue, ...(perKeyLimit === undefined ? {} : { perKeyLimit }) }
        const lost = yield* K.executor(options)
        const runner = yield* K.executor(options)
        // With and without a key: the two ways of finding them share one bound.
        yield* K.enqueueMany(api, queue, 8, { keys: [null, "a", null, "b", null, "c", null, "d"] })
        assert.strictEqual((yield* K.claim(lost, 8)).length, 8)
        yield* K.loseExecutor(runner.sql, lost.id)
        yield* K.enqueueMany(api, queue, 8, { keys: [null, "e", null, "f", null, "g", null, "h"] })
        const isSuspect = (row: K.Claimed) => row.losses > 0
        assert.strictEqual((yield* K.claim(runner, 2, { suspects: 0 })).filter(isSuspect).length, 0)
        const one = yield* K.claim(runner, 4, { suspects: 1 })
        assert.strictEqual(one.length, 4)
        assert.strictEqual(one.filter(isSuspect).length, 1)
        const three = yield* K.claim(runner, 100, { suspects: 3 })
        assert.strictEqual(three.length, 6)
        assert.strictEqual(three.filter(isSuspect).length, 3)
      }
    })
  )

  it.effect(
    "never takes what another version has started, and takes it where that is accepted",
    () =>
      Effect.gen(function* () {
        const api = yield* K.session("api")
        const one = yield* K.executor({ queue: "versions", version: "v1" })
        const two = yield* K.executor({ queue: "versions", version: "v2" })
        const both = yield* K.executor({ queue: "versions", version: "v2", accepted: ["v1"] })
        const ids = yield* K.enqueueMany(api, "versions", 4)
        yield* bounce(one, 2)
        const lost = yield* K.executor({ queue: "versions", version: "v1" })
        yield* K.claim(lost, 1)
        yield* K.loseExecutor(api, lost.id).pipe(
          Effect.catch(() => K.loseExecutor(one.sql, lost.id))
        )
        assert.deepStrictEqual(
          (yield* K.claim(two, 10, { suspects: 10 })).map((row) => row.id),
          ids.slice(2)
        )
        assert.deepStrictEqual(
          (yield* K.claim(both, 10, { suspects: 10 })).map((row) => row.id).toSorted(),
          ids.slice(0, 2).toSorted()
        )
      })
  )

  it.effect("refuses a snapshot older than its lock, and a session that is no executor", () =>
    Effect.gen(function* () {
      const owner = yield* K.session("owner")
      const runner = yield* K.executor({ queue: "isolation" })
      for (const level of ["REPEATABLE READ", "SERIALIZABLE"]) {
        yield* runner.sql.unsafe(`BEGIN ISOLATION LEVEL ${level}`)
        assert.strictEqual(yield* K.stateOf(K.claim(runner, 1)), "TN010")
        yield* runner.sql`ROLLBACK`
      }
      assert.strictEqual(yield* K.stateOf(K.claim({ ...runner, sql: owner }, 1)), "TN004")
    })
  )

  it.effect("tells the deadline as a duration, and that a cancel was asked for", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const runner = yield* K.executor({ queue: "columns" })
      const { ids } = yield* K.enqueueAll(api, "columns", ["1", "2"], {
        deadlinesMs: [60_000, null]
      })
      const claimed = yield* K.claim(runner, 2)
      const [late, never] = claimed
      assert.isAtMost(late?.deadline_in_ms ?? 0, 60_000)
      assert.isAtLeast(late?.deadline_in_ms ?? 0, 30_000)
      assert.strictEqual(never?.deadline_in_ms, null)
      assert.deepStrictEqual(
        claimed.map((row) => row.cancel_requested),
        [false, false]
      )
      yield* api`SELECT tenure.cancel(${ids?.[0] ?? ""}::uuid)`
      yield* K.settle(
        runner,
        claimed.map(({ id, attempt }) => ({ id, attempt, outcome: "hand-back" }))
      )
      assert.deepStrictEqual(
        (yield* K.claim(runner, 2)).map((row) => row.cancel_requested),
        [true, false]
      )
    })
  )

  it.effect("two claimers share what is there, and a claim that dies leaves it as it was", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const owner = yield* K.session("owner")
      const superuser = yield* K.session("superuser")
      const ids = yield* K.enqueueMany(api, "shared", 6)
      const dying = yield* K.executor({ queue: "shared" })
      const runner = yield* K.executor({ queue: "shared" })
      yield* dying.sql`BEGIN`
      assert.deepStrictEqual(
        (yield* K.claim(dying, 4)).map((row) => row.id),
        ids.slice(0, 4)
      )
      assert.deepStrictEqual(
        (yield* K.claim(runner, 4)).map((row) => row.id),
        ids.slice(4)
      )
      yield* superuser`SELECT pg_terminate_backend(${yield* K.pidOf(dying.sql)}::int, 5000)`
      assert.deepStrictEqual(
        yield* owner`SELECT attempt FROM tenure.ready WHERE id = ANY(${[...ids]}::text[]::uuid[])`,
        [{ attempt: 0 }, { attempt: 0 }, { attempt: 0 }, { attempt: 0 }]
      )
      const again = yield* K.claim(runner, 4)
      assert.deepStrictEqual(
        again.map((row) => [row.id, row.attempt]),
        ids.slice(0, 4).map((id) => [id, 1])
      )
    })
  )

  it.effect("keeps the order of items whose numbers no client's number can hold", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const owner = yield* K.session("owner")
      const runner = yield* K.executor({ queue: "large numbers" })
      for (const start of ["3000000000", "9007199254740992", "9223372036854775000"]) {
        yield* owner`SELECT setval('tenure.item_seq', ${start}::text::bigint)::text`
        const ids = yield* K.enqueueMany(api, "large numbers", 5)
        const claimed = yield* K.claim(runner, 5)
        assert.deepStrictEqual(
          claimed.map((row) => row.id),
          ids
        )
        yield* K.settle(
          runner,
          claimed.map(({ id, attempt }) => ({ id, attempt, outcome: "hand-back" }))
        )
        assert.deepStrictEqual(
          (yield* K.claim(runner, 5)).map((row) => row.id),
          ids
        )
      }
    })
  )

  it.effect("raises the attempt at each claim and by nothing else", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const runner = yield* K.executor({ queue: "attempts" })
      yield* K.enqueueOne(api, "attempts", "1")
      for (const [turn, outcome] of ["hand-back", "retry", "hand-back", "retry"].entries()) {
        const [claimed] = yield* K.claim(runner, 1)
        assert.strictEqual(claimed?.attempt, turn + 1)
        yield* K.settle(runner, [{ id: claimed?.id ?? "", attempt: turn + 1, outcome }])
      }
      const [claimed] = yield* K.claim(runner, 1)
      assert.strictEqual(claimed?.attempt, 5)
      assert.strictEqual(claimed?.failures, 2)
      assert.strictEqual(claimed?.losses, 0)
    })
  )
})
