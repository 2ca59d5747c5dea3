/**
 * Goal: a look of the queue monitor sees work exactly when a claim of this executor could take some, and
 * costs the same however much waits or has been done (K-059 to K-067, K-240; M1, M2).
 * Method: for each reason that holds work back, the look and the claim itself are asked; the server's own
 * counters say what a look has read.
 */
import { assert, describe, it, layer } from "@effect/vitest"
import { Effect } from "effect"
import { freshDatabase } from "../support/Postgres.ts"
import * as K from "./kernel.ts"

interface Look {
  readonly queue: number
  readonly is_full: boolean
  readonly has_fresh: boolean
  readonly has_suspect: boolean
  readonly last_claim_ms: number | null
}

const look = (
  executor: K.Executor,
  options: {
    readonly queues?: ReadonlyArray<number>
    readonly versions?: ReadonlyArray<string>
    readonly unlocked?: boolean
    readonly claimedAgoMs?: number
  } = {}
) => {
  const queues = options.queues ?? [executor.queueId]
  const claimed = options.claimedAgoMs === undefined ? [] : [executor.queueId]
  return executor.sql<Look>`
    SELECT queue, is_full, has_fresh, has_suspect, last_claim_ms
      FROM tenure.observe_queues(${K.array(options.versions ?? ["v1"])}::text::text[],
             ${K.array(queues)}::text::int[],
             ${K.array(options.unlocked === true ? queues : [])}::text::int[],
             ${K.array(claimed)}::text::int[],
             ${K.array(claimed.map(() => options.claimedAgoMs))}::text::float8[])
     ORDER BY queue`
}

const lookAt = (executor: K.Executor, options: Parameters<typeof look>[1] = {}) =>
  Effect.map(look(executor, options), K.first)

const of = ({ id, attempt }: K.Claimed) => ({ id, attempt })

/** What the look says, and what a claim that follows finds: they must agree. */
const agree = Effect.fnUntraced(function* (executor: K.Executor, fresh: boolean, suspect = false) {
  for (const unlocked of [false, true]) {
    const seen = yield* lookAt(executor, { unlocked })
    assert.deepStrictEqual(
      [seen.has_fresh && !seen.is_full, seen.has_suspect && !seen.is_full],
      [fresh, suspect]
    )
  }
  const claimed = yield* K.claim(executor, 1, { suspects: 1 })
  assert.strictEqual(claimed.length, fresh || suspect ? 1 : 0)
  return claimed
})

layer(K.Kernel.layer)("a look", (it) => {
  it.effect("sees an item that waits, and nothing where none does", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const runner = yield* K.executor({ queue: "plain" })
      const other = yield* K.executor({ queue: "other" })
      yield* agree(runner, false)
      yield* K.enqueueMany(api, "plain", 2)
      // Of another queue, and one that is due later: neither is this one's.
      yield* K.enqueueOne(api, "later", "1", { delayMs: 3_600_000 })
      yield* agree(runner, true)
      yield* agree(other, false)
      const later = yield* K.executor({ queue: "later" })
      yield* agree(later, false)
      const both = yield* look(runner, { queues: [runner.queueId, other.queueId, -1, 99_999] })
      assert.deepStrictEqual(
        both.map((row) => [row.queue, row.has_fresh]),
        [
          [runner.queueId, true],
          [other.queueId, false]
        ]
      )
    })
  )

  it.effect("sees work of its own version and of those it accepts, and of no other", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const old = yield* K.executor({ queue: "versions", version: "v1" })
      const next = yield* K.executor({ queue: "versions", version: "v2" })
      yield* K.enqueueMany(api, "versions", 1)
      // Started and handed back: from here on it is v1's.
      yield* K.settle(
        old,
        (yield* K.claim(old, 1)).map((item) => ({ ...of(item), outcome: "hand-back" }))
      )
      assert.isFalse((yield* lookAt(next, { versions: ["v2"] })).has_fresh)
      assert.lengthOf(yield* K.claim(next, 1), 0)
      assert.isTrue((yield* lookAt(next, { versions: ["v2", "v1"] })).has_fresh)
      yield* agree(old, true)
    })
  )

  it.effect("tells of a global limit that is reached, and only then", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const runner = yield* K.executor({ queue: "global", globalLimit: 2 })
      yield* K.enqueueMany(api, "global", 4)
      const first = yield* agree(runner, true)
      yield* agree(runner, true)
      assert.isTrue((yield* lookAt(runner)).is_full)
      yield* agree(runner, false)
      yield* K.settle(runner, first.map(of))
      yield* agree(runner, true)
    })
  )

  it.effect("passes over keys at their limit, and finds the one behind them", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const runner = yield* K.executor({ queue: "keys", perKeyLimit: 1 })
      const keys = Array.from({ length: 40 }, (_, n) => `k${String(n).padStart(2, "0")}`)
      yield* K.enqueueMany(api, "keys", 80, { keys: [...keys, ...keys] })
      const running: Array<K.Claimed> = []
      while (running.length < 40) running.push(...(yield* K.claim(runner, 40)))
      yield* agree(runner, false)
      yield* K.settle(runner, [of(running[39] ?? K.first(running))])
      yield* agree(runner, true)
      // An item without a key stands behind forty that have to wait.
      yield* agree(runner, false)
      yield* K.enqueueMany(api, "keys", 1)
      yield* agree(runner, true)
    })
  )

  it.effect("does not take a key for free whose next item is a suspect, as no claim does", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const lost = yield* K.executor({ queue: "mixed", perKeyLimit: 1 })
      const runner = yield* K.executor({ queue: "mixed", perKeyLimit: 1 })
      yield* K.enqueueMany(api, "mixed", 2, { keys: ["a", "a"] })
      yield* K.claim(lost, 1)
      yield* K.loseExecutor(runner.sql, lost.id)
      const seen = yield* lookAt(runner)
      assert.deepStrictEqual([seen.has_fresh, seen.has_suspect], [false, true])
      assert.lengthOf(yield* K.claim(runner, 1, { suspects: 0 }), 0)
      yield* agree(runner, false, true)
    })
  )

  it.effect("tells suspects from fresh work", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const lost = yield* K.executor({ queue: "suspects" })
      const runner = yield* K.executor({ queue: "suspects" })
      yield* K.enqueueMany(api, "suspects", 1)
      yield* K.claim(lost, 1)
      yield* K.loseExecutor(runner.sql, lost.id)
      yield* agree(runner, false, true)
    })
  )

  for (const keyed of [false, true]) {
    it.effect(
      `counts an item that a client has locked, unless asked for certainty: ${keyed ? "of a key" : "of none"}`,
      () =>
        Effect.gen(function* () {
          const queue = keyed ? "locked keys" : "locked"
          const api = yield* K.session("api")
          const client = yield* K.session("api")
          const runner = yield* K.executor({ queue, ...(keyed ? { perKeyLimit: 1 } : {}) })
          const [item = ""] = yield* K.enqueueMany(api, queue, 1, keyed ? { keys: ["a"] } : {})
          yield* client`BEGIN`
          yield* client`SELECT tenure.cancel(${item}::uuid)`
          assert.lengthOf(yield* K.claim(runner, 1), 0)
          assert.isTrue((yield* lookAt(runner)).has_fresh)
          assert.isFalse((yield* lookAt(runner, { unlocked: true })).has_fresh)
          // One more that nobody has locked is found behind it.
          yield* K.enqueueMany(api, queue, 1, keyed ? { keys: ["b"] } : {})
          assert.isTrue((yield* lookAt(runner, { unlocked: true })).has_fresh)
          yield* client`ROLLBACK`
          assert.isTrue((yield* lookAt(runner, { unlocked: true })).has_fresh)
        })
    )
  }
})

layer(K.Kernel.layer)("the last claim", (it) => {
  const activity = (sql: K.Sql) =>
    Effect.map(
      sql<{ executor: string }>`SELECT executor_id::text AS executor FROM tenure.queue_activity`,
      (rows) => rows.map((row) => row.executor)
    )

  it.effect("is anybody's, as told by their looks, and goes with their lease", () =>
    Effect.gen(function* () {
      const owner = yield* K.session("owner")
      const api = yield* K.session("api")
      const [one, two, three] = [
        yield* K.executor({ queue: "told" }),
        yield* K.executor({ queue: "told" }),
        yield* K.executor({ queue: "told" })
      ]
      yield* K.enqueueMany(api, "told", 1)
      assert.isNull((yield* lookAt(three)).last_claim_ms)
      yield* look(one, { claimedAgoMs: 60_000 })
      const told = (yield* lookAt(three)).last_claim_ms ?? 0
      assert.isTrue(told >= 60_000 && told < 80_000, String(told))
      yield* look(two, { claimedAgoMs: 20_000 })
      assert.isBelow((yield* lookAt(three)).last_claim_ms ?? Infinity, 50_000)
      assert.sameMembers(yield* activity(owner), [one.id, two.id])
      yield* look(two, { claimedAgoMs: 0 })
      assert.sameMembers(yield* activity(owner), [one.id, two.id])
      yield* K.loseExecutor(three.sql, two.id)
      assert.deepStrictEqual(yield* activity(owner), [one.id])
      yield* one.sql`SELECT tenure.release_executor(${one.id}::uuid)`
      assert.deepStrictEqual(yield* activity(owner), [])
    })
  )

  it.effect("is not a time that a clock has left in the future", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const one = yield* K.executor({ queue: "ahead" })
      const two = yield* K.executor({ queue: "ahead" })
      yield* K.enqueueMany(api, "ahead", 1)
      yield* look(one, { claimedAgoMs: -3_600_000 })
      assert.isNull((yield* lookAt(two)).last_claim_ms)
    })
  )

  it.effect("is told only under a lease", () =>
    Effect.gen(function* () {
      const lost = yield* K.executor({ queue: "fenced" })
      const runner = yield* K.executor({ queue: "fenced" })
      yield* K.loseExecutor(runner.sql, lost.id)
      assert.strictEqual(yield* K.stateOf(look(lost, { claimedAgoMs: 0 })), "TN002")
      // Without a claim to tell of nothing is written, so nothing is refused.
      assert.lengthOf(yield* look(lost), 1)
    })
  )
})

const written = Effect.fnUntraced(function* (owner: K.Sql) {
  yield* owner`SELECT pg_stat_clear_snapshot()::text`
  const rows = yield* owner<{ n: number }>`
    SELECT (n_tup_ins + n_tup_upd + n_tup_del)::int AS n FROM pg_stat_user_tables
     WHERE schemaname = 'tenure' AND relname = 'queue_activity'`
  return K.first(rows).n
})

/** What the session has read of the tables that grow, in rows and pages of indexes and tables. */
const readBy = Effect.fnUntraced(function* (owner: K.Sql, session: K.Sql) {
  yield* session`SELECT pg_stat_force_next_flush()::text`
  yield* owner`SELECT pg_stat_clear_snapshot()::text`
  const rows = yield* owner<{ n: number }>`
    SELECT (SELECT sum(coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0)) FROM pg_stat_user_tables
             WHERE schemaname = 'tenure' AND relname ~ '^(item|done|step|ready|claimed|delayed)')::int
         + (SELECT sum(idx_tup_read) FROM pg_stat_user_indexes
             WHERE schemaname = 'tenure' AND relname ~ '^(item|done|step|ready|claimed|delayed)')::int AS n`
  return K.first(rows).n
})

describe("the cost of a look", () => {
  it.live("does not depend on what waits, what runs, or what was ever done", () =>
    Effect.gen(function* () {
      const database = yield* freshDatabase
      const owner = yield* K.sessionOf(database, "owner")
      const api = yield* K.sessionOf(database, "api")
      for (const table of ["ready", "claimed", "delayed"]) {
        yield* owner.unsafe(`ALTER TABLE tenure.${table} SET (autovacuum_enabled = off)`)
      }
      const plain = yield* K.executorOf(database, { queue: "plain" })
      const limited = yield* K.executorOf(database, { queue: "limited", globalLimit: 10 })
      const keyed = yield* K.executorOf(database, { queue: "keyed", perKeyLimit: 1 })
      const queues = [plain.queueId, limited.queueId, keyed.queueId]
      const watcher = yield* K.sessionOf(database, "worker", plain.id)
      const costOf = Effect.fnUntraced(function* () {
        const before = yield* readBy(owner, watcher)
        // More than five times, so that generic plans are tried as well.
        for (let turn = 0; turn < 8; turn++) yield* look({ ...plain, sql: watcher }, { queues })
        return ((yield* readBy(owner, watcher)) - before) / 8
      })
      const keys = (count: number) => Array.from({ length: count }, (_, n) => `k${n}`)
      const grow = Effect.fnUntraced(function* (count: number) {
        yield* K.enqueueMany(api, "plain", count)
        yield* K.enqueueMany(api, "limited", count)
        yield* K.enqueueMany(api, "keyed", count, { keys: keys(count) })
        yield* K.enqueueMany(api, "plain", count, { delaysMs: keys(count).map(() => 3_600_000) })
      })
      yield* grow(30)
      yield* K.claim(limited, 30)
      const small = yield* costOf()
      yield* grow(8000)
      yield* K.settle(plain, (yield* K.claim(plain, 3000)).map(of))
      yield* K.claim(plain, 2000)
      for (const table of ["item", "done", "step", "ready", "claimed", "delayed", "lane"]) {
        yield* owner.unsafe(`VACUUM ANALYZE tenure.${table}`).unprepared
      }
      const large = yield* costOf()
      assert.isAtMost(large, small + 3)
      assert.isAtMost(large, 60)
      // The count that one writes first.
      const before = yield* readBy(owner, watcher)
      yield* watcher`SELECT count(*) FROM tenure.ready WHERE lane_id = ANY(${K.array(plain.lanes)}::text::int[])`
      assert.isAtLeast((yield* readBy(owner, watcher)) - before, 3000)
    })
  )

  it.live("is no write while nothing was claimed, and no lock on the executor", () =>
    Effect.gen(function* () {
      const database = yield* freshDatabase
      const owner = yield* K.sessionOf(database, "owner")
      const api = yield* K.sessionOf(database, "api")
      const runner = yield* K.executorOf(database, { queue: "idle" })
      yield* K.enqueueMany(api, "idle", 3)
      yield* runner.sql`BEGIN`
      yield* look(runner)
      const idle = yield* runner.sql<{ assigned: boolean }>`
        SELECT pg_current_xact_id_if_assigned() IS NOT NULL AS assigned`
      assert.isFalse(K.first(idle).assigned)
      yield* runner.sql`COMMIT`
      yield* look(runner, { claimedAgoMs: 0 })
      yield* runner.sql`SELECT pg_stat_force_next_flush()::text`
      assert.strictEqual(yield* written(owner), 1)
    })
  )
})

interface Facts {
  readonly queue: string
  readonly is_full: boolean
  readonly has_startable: boolean
  readonly waiting_id: string | null
  readonly waiting_version: string | null
  readonly claimed: number | null
  readonly claimed_id: string | null
  readonly claimed_by: string | null
  readonly executors: number
  readonly executors_of_version: number
}

describe("the facts for people", () => {
  it.live("name the oldest that waits and the one claimed for longest, of any priority", () =>
    Effect.gen(function* () {
      const database = yield* freshDatabase
      const api = yield* K.sessionOf(database, "api")
      const owner = yield* K.sessionOf(database, "owner")
      const runner = yield* K.executorOf(database, { queue: "q", globalLimit: 2 })
      const [first = "", second = "", oldest = "", , urgent = ""] = yield* K.enqueueMany(
        api,
        "q",
        5,
        { priorities: [9, 9, 0, 0, 5] }
      )
      const running = yield* K.claim(runner, 2)
      assert.sameMembers(
        running.map((item) => item.id),
        [first, second]
      )
      yield* owner`UPDATE tenure.claimed SET claimed_at = claimed_at - interval '1 hour' WHERE id = ${second}::uuid`
      const facts = yield* api<Facts>`SELECT f.*, f.waiting_id::text AS waiting_id,
        f.claimed_id::text AS claimed_id, f.claimed_by::text AS claimed_by FROM tenure.queue_facts() f`
      assert.lengthOf(facts, 1)
      assert.deepInclude(K.first(facts), {
        queue: "q",
        is_full: true,
        has_startable: true,
        waiting_id: oldest,
        waiting_version: null,
        claimed: 2,
        claimed_id: second,
        claimed_by: runner.id,
        executors: 1,
        executors_of_version: 1
      })
      assert.notStrictEqual(urgent, "")
    })
  )

  it.live("tell of a queue that nobody runs, and of a version that nobody has", () =>
    Effect.gen(function* () {
      const database = yield* freshDatabase
      const api = yield* K.sessionOf(database, "api")
      const old = yield* K.executorOf(database, { queue: "started", version: "v1" })
      yield* K.enqueueMany(api, "started", 1)
      yield* K.claim(old, 1)
      yield* old.sql`SELECT tenure.release_executor(${old.id}::uuid)`
      yield* K.executorOf(database, { queue: "started", version: "v2" })
      yield* K.enqueueMany(api, "nobody", 1)
      const facts = yield* api<Facts>`SELECT * FROM tenure.queue_facts() ORDER BY queue`
      assert.deepStrictEqual(
        facts.map((one) => [
          one.queue,
          one.waiting_version,
          one.executors,
          one.executors_of_version
        ]),
        [
          ["nobody", null, 0, 0],
          ["started", "v1", 1, 0]
        ]
      )
    })
  )
})
