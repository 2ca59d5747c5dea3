/**
 * Goal: a global limit and a limit for each key are never passed, a hot key holds up nobody but
 * itself, and the cursor of a keyed claim reaches every key (I10, bug reports 16 and 23).
 * Method: concurrent claimers with the count taken inside each transaction; then the same claim
 * without its lock, which passes the limit at once.
 */
import { assert, layer } from "@effect/vitest"
import { Effect, Fiber } from "effect"
import { freshDatabase } from "../support/Postgres.ts"
import * as K from "./kernel.ts"

const theLock = "PERFORM pg_advisory_xact_lock(1413828181, claimed_queue);"

const settleAll = (runner: K.Executor, claimed: ReadonlyArray<K.Claimed>) =>
  K.settle(
    runner,
    claimed.map(({ id, attempt }) => ({ id, attempt }))
  )

/** Claims with the cursor that the claim before it answered, `turns` times or until it is at the start again. */
const walk = Effect.fnUntraced(function* (runner: K.Executor, wanted: number, turnsMax: number) {
  const seen: Array<K.Claimed> = []
  let cursor = ""
  for (let turn = 1; turn <= turnsMax; turn++) {
    const rows = yield* K.claimRows(runner, wanted, { cursor })
    const last = rows.at(-1)
    assert.isNull(last?.id, "the last row carries the cursor")
    seen.push(...rows.slice(0, -1))
    cursor = last?.key ?? ""
    if (cursor === "") return { seen, turns: turn }
  }
  return { seen, turns: turnsMax }
})

layer(K.Kernel.layer, { excludeTestServices: true })("limits", (it) => {
  it.effect("eight claimers never run more than the global limit", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const options = { queue: "global", globalLimit: 20 }
      const runners = yield* Effect.all(Array.from({ length: 8 }, () => K.executor(options)))
      yield* K.enqueueMany(api, "global", 2000)
      const highest = yield* Effect.forEach(
        runners,
        (runner) =>
          Effect.gen(function* () {
            let most = 0
            for (let turn = 0; turn < 15; turn++) {
              yield* runner.sql`BEGIN`
              const claimed = yield* K.claim(runner, 7)
              const { n } = K.first(
                yield* runner.sql<{ n: number }>`
                  SELECT count(*)::int AS n FROM tenure.claimed WHERE queue_id = ${runner.queueId}::int`
              )
              most = Math.max(most, n)
              yield* runner.sql`COMMIT`
              if (turn % 3 !== 0) yield* settleAll(runner, claimed)
            }
            return most
          }),
        { concurrency: "unbounded" }
      )
      assert.strictEqual(Math.max(...highest), 20, "reached and not passed")
    })
  )

  it.effect(
    "a second claimer waits for the first one's count; without the lock it doubles the limit",
    () =>
      Effect.gen(function* () {
        const database = yield* freshDatabase
        const api = yield* K.sessionOf(database, "api")
        const owner = yield* K.sessionOf(database, "owner")
        const options = { queue: "global", globalLimit: 20 }
        const one = yield* K.executorOf(database, options)
        const two = yield* K.executorOf(database, options)
        yield* K.enqueueMany(api, "global", 100)

        yield* one.sql`BEGIN`
        assert.strictEqual((yield* K.claim(one, 20)).length, 20)
        const pid = yield* K.pidOf(two.sql)
        const second = yield* Effect.forkChild(K.claim(two, 20))
        yield* K.whenBlocked(owner, pid)
        yield* one.sql`COMMIT`
        assert.deepStrictEqual(yield* Fiber.join(second), [])
        yield* owner`TRUNCATE tenure.claimed`

        yield* K.spoil(owner, "claim", theLock, "")
        yield* one.sql`BEGIN`
        const claimed = (yield* K.claim(one, 20)).length + (yield* K.claim(two, 20)).length
        yield* one.sql`COMMIT`
        assert.strictEqual(claimed, 40)
      })
  )

  it.effect("a claim that is refused by the fence does not hold the queue's lock", () =>
    Effect.gen(function* () {
      const owner = yield* K.session("owner")
      const options = { queue: "refused", globalLimit: 20 }
      const victim = yield* K.executor(options)
      const pid = yield* K.pidOf(victim.sql)
      yield* owner`BEGIN`
      yield* owner`SELECT FROM tenure.executor WHERE id = ${victim.id}::uuid FOR UPDATE`
      const waiting = yield* Effect.forkChild(K.claim(victim, 1))
      yield* K.whenBlocked(owner, pid)
      assert.deepStrictEqual(
        yield* owner`SELECT pg_try_advisory_xact_lock(1413828181, ${victim.queueId}::int) AS free`,
        [{ free: true }]
      )
      yield* owner`COMMIT`
      yield* Fiber.join(waiting)
    })
  )

  it.effect("of each key no more run than its limit, in the order of the key", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      for (const perKeyLimit of [1, 2]) {
        const queue = `keyed ${perKeyLimit}`
        const runner = yield* K.executor({ queue, perKeyLimit })
        const other = yield* K.executor({ queue, perKeyLimit })
        const ids = yield* K.enqueueMany(api, queue, 9, {
          keys: ["a", "a", "a", "b", "b", "c", null, null, null]
        })
        const first = yield* K.claim(runner, 100)
        assert.deepStrictEqual(
          first.map((row) => row.id),
          [0, 3, 5, 6, 7, 8].map((n) => ids[n]),
          "the first of each key, and all without one"
        )
        const second = yield* K.claim(other, 100)
        assert.deepStrictEqual(
          second.map((row) => row.id),
          perKeyLimit === 1 ? [] : [ids[1], ids[4]]
        )
        yield* settleAll(runner, first.slice(0, 1))
        assert.deepStrictEqual(
          (yield* K.claim(other, 100)).map((row) => row.id),
          perKeyLimit === 1 ? [ids[1]] : [ids[2]]
        )
      }
    })
  )

  it.effect("a key whose next item is locked is left out, and its later items with it", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const owner = yield* K.session("owner")
      const runner = yield* K.executor({ queue: "locked head", perKeyLimit: 1 })
      const ids = yield* K.enqueueMany(api, "locked head", 4, { keys: ["a", "a", "b", "b"] })
      yield* owner`BEGIN`
      yield* owner`SELECT FROM tenure.ready WHERE id = ${ids[0] ?? ""}::uuid FOR UPDATE`
      assert.deepStrictEqual(
        (yield* K.claim(runner, 10)).map((row) => row.id),
        [ids[2]]
      )
      yield* owner`ROLLBACK`
      assert.deepStrictEqual(
        (yield* K.claim(runner, 10)).map((row) => row.id),
        [ids[0]]
      )
    })
  )

  it.effect("concurrent claimers of a hundred keys never run two of one", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const options = { queue: "races", perKeyLimit: 1 }
      const runners = yield* Effect.all(Array.from({ length: 6 }, () => K.executor(options)))
      yield* K.enqueueMany(api, "races", 1500, {
        keys: Array.from({ length: 1500 }, (_, n) => `k${n % 100}`)
      })
      const most = yield* Effect.forEach(
        runners,
        (runner) =>
          Effect.gen(function* () {
            let highest = 0
            for (let turn = 0; turn < 12; turn++) {
              yield* runner.sql`BEGIN`
              const claimed = yield* K.claim(runner, 30)
              const { n } = K.first(
                yield* runner.sql<{ n: number }>`
                  SELECT coalesce(max(n), 0)::int AS n FROM (
                    SELECT count(*) AS n FROM tenure.claimed
                     WHERE queue_id = ${runner.queueId}::int GROUP BY key) per_key`
              )
              highest = Math.max(highest, n)
              yield* runner.sql`COMMIT`
              yield* settleAll(runner, claimed)
            }
            return highest
          }),
        { concurrency: "unbounded" }
      )
      assert.deepStrictEqual(most, [1, 1, 1, 1, 1, 1])
    })
  )

  it.effect("a key goes on when its item was given up, cancelled or too late, whoever had it", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const owner = yield* K.session("owner")
      const endings: ReadonlyArray<
        readonly [reason: string | null, deadlineMs?: number | undefined, cancels?: boolean]
      > = [["MAX_RECOVERY_ATTEMPTS_EXCEEDED"], ["DeadlineExceeded", 50], [null, undefined, true]]
      for (const [reason, deadlineMs, cancels] of endings) {
        const queue = `given up ${reason}`
        const options = { queue, perKeyLimit: 1, recoveryMax: 1 }
        const first = yield* K.enqueueOne(api, queue, "1", {
          key: "k",
          ...(deadlineMs === undefined ? {} : { deadlineMs })
        })
        const second = yield* K.enqueueOne(api, queue, "2", { key: "k" })
        const lost = yield* K.executor(options)
        assert.deepStrictEqual(
          (yield* K.claim(lost, 10)).map(({ id }) => id),
          [first]
        )
        if (cancels === true) yield* api`SELECT tenure.cancel(${first}::uuid)`
        if (deadlineMs !== undefined) yield* Effect.sleep(deadlineMs)
        yield* K.loseExecutor(owner, lost.id)
        const next = yield* K.executor(options)
        assert.deepStrictEqual(
          (yield* K.claim(next, 10)).map(({ id }) => id),
          [second],
          queue
        )
        const [row] = yield* owner<{ readonly reason: string | null }>`
          SELECT reason FROM tenure.done WHERE id = ${first}::uuid`
        assert.strictEqual(row?.reason, reason)
      }
    })
  )

  it.effect(
    "a hot key of 50,000 holds up none of 10,000 others, and the cursor reaches them all",
    () =>
      Effect.gen(function* () {
        const api = yield* K.session("api")
        const runner = yield* K.executor({ queue: "hot", perKeyLimit: 1 })
        // The hot key is older than all others, and in their middle.
        yield* K.enqueueMany(api, "hot", 50_000, {
          keys: Array.from({ length: 50_000 }, () => "k05000-hot")
        })
        yield* K.enqueueMany(api, "hot", 10_000, {
          keys: Array.from(
            { length: 10_000 },
            (_, n) => `k${String((n * 7919) % 10_000).padStart(5, "0")}`
          )
        })
        const { seen, turns } = yield* walk(runner, 500, 100)
        assert.strictEqual(new Set(seen.map((row) => row.key)).size, 10_001)
        assert.strictEqual(seen.length, 10_001)
        assert.strictEqual(turns, 21)
        // While all of them run there is nothing, however often one asks.
        assert.deepStrictEqual((yield* walk(runner, 500, 100)).seen, [])
      })
  )

  it.effect("the cursor leaves out no key of one lane because another lane has later ones", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const options = { queue: "two lanes", perKeyLimit: 1 }
      const runner = yield* K.executor(options)
      // In the lane of this version: the last keys there are.
      yield* K.enqueueMany(api, "two lanes", 2, { keys: ["z1", "z2"] })
      const started = yield* K.claim(runner, 2)
      yield* K.settle(
        runner,
        started.map(({ id, attempt }) => ({ id, attempt, outcome: "hand-back" }))
      )
      yield* K.enqueueMany(api, "two lanes", 1201, {
        keys: Array.from({ length: 1201 }, (_, n) =>
          n === 1200 ? "z1" : `k${String(n).padStart(4, "0")}`
        ),
        priorities: Array.from({ length: 1201 }, (_, n) => (n === 1200 ? 1 : 0))
      })
      const { seen } = yield* walk(runner, 500, 100)
      assert.strictEqual(seen.length, 1202)
      // Of two lanes with one key the better item is first, though the window saw the other sooner.
      assert.strictEqual(seen.find((row) => row.key === "z1")?.rank, -1)
    })
  )
})
