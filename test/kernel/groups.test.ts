/**
 * Goal: a group ends once, in the transaction in which its last member ends, with the counts, and hands in
 * its callback there (G1, G2); and nobody waits for a group but at a commit (G3).
 * Method: sessions in every order of their commits; all of them held at the commit and let go at once;
 * a client that does not commit, beside the form in which it would hold up everybody; and random ends in
 * random batches on several sessions, counted by a model.
 */
import { assert, describe, it, layer } from "@effect/vitest"
import { Effect, Fiber, Queue } from "effect"
import { seeded } from "../model/Seeded.ts"
import { freshDatabase } from "../support/Postgres.ts"
import { present } from "../support/present.ts"
import * as K from "./kernel.ts"

const makeGroup = (
  sql: K.Sql,
  callbackQueue: string | null = "done",
  payload = `{"order":{"id":7}}`
): Effect.Effect<string, never> =>
  Effect.map(
    Effect.orDie(sql<{ id: string }>`
      SELECT tenure.make_group(${callbackQueue}, ${payload}::text::json, 3, 'k')::text AS id`),
    (rows) => K.first(rows).id
  )

const seal = (sql: K.Sql, group: string) =>
  Effect.map(
    sql<{ answer: string }>`SELECT tenure.seal_group(${group}::uuid) AS answer`,
    (rows) => K.first(rows).answer
  )

/** Its members, in the order of enqueue. */
const addMembers = (sql: K.Sql, queue: string, group: string, count: number) =>
  K.enqueueMany(sql, queue, count, { groups: Array.from({ length: count }, () => group) })

interface Group {
  readonly members: number
  readonly completed: number
  readonly failed: number
  readonly cancelled: number
  readonly ended: boolean
}

const statusOf = (sql: K.Sql, group: string) =>
  Effect.map(
    sql<Group>`SELECT members, completed, failed, cancelled, ended_at IS NOT NULL AS ended
                 FROM tenure.item_group WHERE id = ${group}::uuid`,
    K.first
  )

const callbacksOf = (sql: K.Sql, group: string) =>
  Effect.map(
    sql<{ payload: string }>`
      SELECT i.payload::text AS payload FROM tenure.item i JOIN tenure.ready r USING (id)
       WHERE i.payload -> 'group' ->> 'id' = ${group} AND i.key = 'k' AND i.priority = 3`,
    (rows) => rows.map((row) => JSON.parse(row.payload) as unknown)
  )

/** A sealed group whose members are claimed, each by an executor of its own. */
const claimedGroup = Effect.fnUntraced(function* (queue: string, count: number) {
  const owner = yield* K.session("owner")
  const api = yield* K.session("api")
  const group = yield* makeGroup(api)
  const ids = yield* addMembers(api, queue, group, count)
  yield* seal(api, group)
  const runners = yield* Effect.forEach(ids, () => K.executor({ queue }))
  const members = yield* Effect.forEach(runners, (runner) =>
    Effect.map(K.claim(runner, 1), (claimed) => ({
      runner,
      id: K.first(claimed).id,
      end: (outcome = "completed") =>
        K.settle(runner, [{ id: K.first(claimed).id, attempt: 1, outcome }])
    }))
  )
  return { owner, api, group, members }
})

layer(K.Kernel.layer, { excludeTestServices: true })("a group", (it) => {
  it.effect("ends with its last member, in whatever way its members end", () =>
    Effect.gen(function* () {
      const owner = yield* K.session("owner")
      const api = yield* K.session("api")
      const group = yield* makeGroup(api)
      const { ids } = yield* K.enqueueAll(api, "ways", ["1", "2", "3", "4", "5", "6"], {
        groups: Array.from({ length: 6 }, () => group),
        deadlinesMs: [null, null, null, null, 1, null],
        delaysMs: [null, null, null, null, 600_000, 600_000]
      })
      yield* K.enqueueMany(api, "ways", 1)
      yield* seal(api, group)
      const runner = yield* K.executor({ queue: "ways" })
      const lost = yield* K.executor({ queue: "ways", recoveryMax: 1 })
      const claimed = yield* K.claim(runner, 3)
      const [completed, failed, retried] = claimed
      yield* K.claim(lost, 1)
      yield* K.settle(runner, [
        { id: present(completed).id, attempt: 1 },
        { id: present(failed).id, attempt: 1, outcome: "failed" },
        { id: present(retried).id, attempt: 1, outcome: "retry" }
      ])
      yield* K.loseExecutor(owner, lost.id)
      yield* K.eventually(
        "the deadline passes",
        Effect.map(
          owner<{ n: number }>`SELECT expired AS n FROM tenure.expire_deadlines(100)`,
          (rows) => K.first(rows).n === 1
        )
      )
      assert.deepStrictEqual(yield* statusOf(owner, group), {
        members: 6,
        completed: 1,
        failed: 3,
        cancelled: 0,
        ended: false
      })
      yield* api`SELECT tenure.cancel(${present(ids?.[5])}::uuid)`
      assert.deepStrictEqual(yield* callbacksOf(owner, group), [])
      // The one that failed its first attempt is the last.
      yield* api`SELECT tenure.cancel(${present(retried).id}::uuid)`
      assert.deepStrictEqual(yield* callbacksOf(owner, group), [
        { order: { id: 7 }, group: { id: group, completed: 1, failed: 3, cancelled: 2 } }
      ])
      assert.isTrue((yield* statusOf(owner, group)).ended)
    })
  )

  it.effect("without members ends when it is sealed, and not before; with none sealed never", () =>
    Effect.gen(function* () {
      const owner = yield* K.session("owner")
      const api = yield* K.session("api")
      const runner = yield* K.executor({ queue: "empty" })
      const group = yield* makeGroup(api, "done", " { } ")
      assert.isFalse((yield* statusOf(owner, group)).ended)
      assert.strictEqual(yield* seal(api, group), "sealed")
      assert.deepStrictEqual(yield* callbacksOf(owner, group), [
        { group: { id: group, completed: 0, failed: 0, cancelled: 0 } }
      ])
      assert.strictEqual(yield* seal(api, group), "sealed")
      assert.strictEqual((yield* callbacksOf(owner, group)).length, 1)
      assert.strictEqual(yield* seal(api, "01900000-0000-7000-8000-000000000000"), "unknown")
      const open = yield* makeGroup(api)
      const [id] = yield* addMembers(api, "empty", open, 1)
      yield* K.claim(runner, 1)
      yield* K.settle(runner, [{ id: present(id), attempt: 1 }])
      assert.isFalse((yield* statusOf(owner, open)).ended)
      yield* seal(api, open)
      assert.isTrue((yield* statusOf(owner, open)).ended)
      const silent = yield* makeGroup(api, null)
      yield* seal(api, silent)
      assert.isTrue((yield* statusOf(owner, silent)).ended)
    })
  )

  it.effect("made, filled and sealed in one transaction is there as a whole or not at all", () =>
    Effect.gen(function* () {
      const owner = yield* K.session("owner")
      const api = yield* K.session("api")
      for (const end of ["ROLLBACK", "COMMIT"]) {
        yield* api`BEGIN`
        const group = yield* makeGroup(api)
        yield* addMembers(api, "whole", group, 2)
        yield* addMembers(api, "whole", group, 3)
        yield* seal(api, group)
        const refused = yield* K.enqueueAll(api, "whole", ["1"], { groups: [group] })
        assert.strictEqual(refused.refused_group, group)
        yield* api.unsafe(end)
        const rows = yield* owner`SELECT members FROM tenure.item_group WHERE id = ${group}::uuid`
        assert.deepStrictEqual(rows, end === "COMMIT" ? [{ members: 5 }] : [])
      }
      assert.deepStrictEqual(yield* owner`SELECT FROM tenure.group_tally`, [])
    })
  )

  it.effect("hands in one callback when the last two members end in two transactions", () =>
    Effect.gen(function* () {
      for (const [first, second] of [
        [0, 1],
        [1, 0]
      ] as const) {
        const { owner, group, members } = yield* claimedGroup("two", 2)
        for (const { runner } of members) yield* runner.sql`BEGIN`
        // Neither waits for the other before it commits.
        yield* present(members[0]).end()
        yield* present(members[1]).end("failed")
        yield* present(members[first]).runner.sql`COMMIT`
        assert.deepStrictEqual(yield* callbacksOf(owner, group), [])
        yield* present(members[second]).runner.sql`COMMIT`
        assert.deepStrictEqual(yield* callbacksOf(owner, group), [
          { order: { id: 7 }, group: { id: group, completed: 1, failed: 1, cancelled: 0 } }
        ])
      }
    })
  )

  it.effect("hands in one callback when its last members commit at the same moment", () =>
    Effect.gen(function* () {
      const { owner, group, members } = yield* claimedGroup("moment", 4)
      yield* owner`BEGIN`
      yield* owner`SELECT FROM tenure.item_group WHERE id = ${group}::uuid FOR UPDATE`
      const observer = yield* K.session("owner")
      const ending = yield* Effect.forEach(members, ({ end, runner }) =>
        Effect.gen(function* () {
          const pid = yield* K.pidOf(runner.sql)
          const fiber = yield* Effect.forkChild(end())
          yield* K.whenBlocked(observer, pid)
          return fiber
        })
      )
      yield* owner`COMMIT`
      yield* Effect.forEach(ending, Fiber.join)
      assert.deepStrictEqual(yield* callbacksOf(owner, group), [
        { order: { id: 7 }, group: { id: group, completed: 4, failed: 0, cancelled: 0 } }
      ])
    })
  )

  it.effect("waits for a member whose end was rolled back", () =>
    Effect.gen(function* () {
      const { owner, group, members } = yield* claimedGroup("rolled", 2)
      const [one, two] = members
      yield* present(one).runner.sql`BEGIN`
      yield* present(one).end()
      yield* present(two).end()
      yield* present(one).runner.sql`ROLLBACK`
      assert.isFalse((yield* statusOf(owner, group)).ended)
      yield* present(one).end()
      assert.strictEqual((yield* callbacksOf(owner, group)).length, 1)
    })
  )

  it.effect("is not held up by a client that has cancelled a member and does not commit", () =>
    Effect.gen(function* () {
      const { owner, api, group, members } = yield* claimedGroup("client", 2)
      const more = yield* makeGroup(api)
      const [waiting] = yield* K.enqueueMany(api, "client", 1, {
        groups: [more],
        delaysMs: [600_000]
      })
      yield* api`BEGIN`
      yield* api`SELECT tenure.cancel(${present(waiting)}::uuid)`
      const other = yield* K.session("api")
      yield* seal(other, more)
      yield* present(members[0]).end()
      assert.isFalse((yield* statusOf(owner, more)).ended)
      yield* api`COMMIT`
      assert.isTrue((yield* statusOf(owner, more)).ended, "by the one who committed last")
      assert.isFalse((yield* statusOf(owner, group)).ended)
    })
  )

  it.effect("whose row is taken before the commit makes everybody wait for the slowest", () =>
    Effect.gen(function* () {
      const { api, group, members, owner } = yield* claimedGroup("slowest", 2)
      const [one, two] = members
      const pid = yield* K.pidOf(present(two).runner.sql)
      yield* present(one).runner.sql`BEGIN`
      yield* present(one).runner.sql`SET CONSTRAINTS tenure.group_tally_added IMMEDIATE`
      yield* present(one).end()
      const held = yield* Effect.forkChild(present(two).end())
      yield* K.whenBlocked(api, pid)
      yield* present(one).runner.sql`COMMIT`
      yield* Fiber.join(held)
      // And still ends once.
      assert.strictEqual((yield* callbacksOf(owner, group)).length, 1)
    })
  )

  it.effect("that is sealed takes no more members, also not those on their way", () =>
    Effect.gen(function* () {
      const owner = yield* K.session("owner")
      const api = yield* K.session("api")
      const slow = yield* K.session("api")
      const group = yield* makeGroup(api)
      yield* slow`BEGIN`
      const [late] = yield* addMembers(slow, "sealed", group, 1)
      yield* seal(api, group)
      assert.strictEqual(yield* K.stateOf(slow`COMMIT`), "TN030")
      assert.strictEqual(yield* K.placeOf(owner, present(late)), "nowhere")
      yield* api`BEGIN`
      const refused = yield* K.enqueueAll(api, "sealed", ["1", "2"], { groups: [null, group] })
      assert.deepStrictEqual([refused.ids, refused.refused_group], [null, group])
      const after = yield* K.enqueueOne(api, "sealed", "3")
      yield* api`COMMIT`
      assert.strictEqual(yield* K.placeOf(owner, after), "ready")
      assert.strictEqual(yield* K.stateOf(K.enqueueOne(api, "sealed", "1", { group })), "TN030")
      const unknown = "01900000-0000-7000-8000-000000000000"
      assert.strictEqual(
        yield* K.stateOf(K.enqueueOne(api, "sealed", "1", { group: unknown })),
        "TN030"
      )
      assert.strictEqual((yield* callbacksOf(owner, group)).length, 1)
    })
  )

  it.effect("waits for a failed member that is brought back, unless it has ended before that", () =>
    Effect.gen(function* () {
      const { owner, api, group, members } = yield* claimedGroup("back", 2)
      const [one, two] = members
      const retry = (id: string) => api`SELECT tenure.retry(${id}::uuid)`
      yield* present(one).end("failed")
      yield* retry(present(one).id)
      yield* present(two).end("failed")
      assert.deepInclude(yield* statusOf(owner, group), { failed: 1, ended: false })
      const [again] = yield* K.claim(present(one).runner, 1)
      yield* K.settle(present(one).runner, [{ id: present(again).id, attempt: 2 }])
      const ended = { members: 2, completed: 1, failed: 1, cancelled: 0, ended: true }
      assert.deepStrictEqual(yield* statusOf(owner, group), ended)
      yield* retry(present(two).id)
      const [late] = yield* K.claim(present(two).runner, 1)
      yield* K.settle(present(two).runner, [{ id: present(late).id, attempt: 2 }])
      assert.deepStrictEqual(yield* statusOf(owner, group), ended)
      assert.strictEqual((yield* callbacksOf(owner, group)).length, 1)
    })
  )

  it.effect("ends with a revocation whose own executor is being revoked", () =>
    Effect.gen(function* () {
      const { owner, group, members } = yield* claimedGroup("revoked", 1)
      const victim = present(members[0]).runner
      yield* owner`UPDATE tenure.queue SET recovery_max = 1 WHERE name = 'revoked'`
      const scanner = yield* K.executor({ queue: "elsewhere" })
      yield* owner`SELECT tenure.mark_revoking(${victim.id}::uuid, true)`
      // As the victim of another scanner: a lock on its own row would wait for this one.
      yield* owner`BEGIN`
      yield* owner`SELECT FROM tenure.executor WHERE id = ${scanner.id}::uuid FOR UPDATE`
      yield* scanner.sql`SET lock_timeout = '2s'`
      yield* scanner.sql`SELECT state FROM tenure.revoke(${victim.id}::uuid, interval '0', interval '0')`
      yield* owner`ROLLBACK`
      assert.deepStrictEqual(yield* callbacksOf(owner, group), [
        { order: { id: 7 }, group: { id: group, completed: 0, failed: 1, cancelled: 0 } }
      ])
    })
  )

  it.effect(
    "is kept as long as items that have ended, and for ever while something of it lives",
    () =>
      Effect.gen(function* () {
        const owner = yield* K.session("owner")
        const api = yield* K.session("api")
        const make = Effect.fnUntraced(function* (members: number, isSealed: boolean) {
          const group = yield* makeGroup(api, null)
          yield* addMembers(api, "kept", group, members)
          if (isSealed) yield* seal(api, group)
          return group
        })
        const ended = yield* make(0, true)
        const abandoned = yield* make(0, false)
        const sealed = yield* make(1, true)
        const open = yield* make(1, false)
        const kept = (keep: string) =>
          Effect.gen(function* () {
            yield* owner`SELECT made FROM tenure.retain(${keep}::text::interval)`
            const rows = yield* owner<{ id: string }>`SELECT id::text AS id FROM tenure.item_group`
            return [ended, abandoned, sealed, open].map((id) => rows.some((row) => row.id === id))
          })
        assert.deepStrictEqual(yield* kept("1 hour"), [true, true, true, true])
        assert.deepStrictEqual(yield* kept("0"), [false, false, true, true])
      })
  )

  it.effect("is told of to whoever waits for its end, whenever he begins to wait", () =>
    Effect.gen(function* () {
      const channel = "tenure_test_group"
      const { api, group, members } = yield* claimedGroup("told", 2)
      const [one, two] = members
      const listener = yield* K.session("api")
      const told = yield* listener.listen(channel)
      const wait = (sql: K.Sql) => sql`SELECT tenure.await_items(ARRAY[${group}::uuid], ${channel})`
      const outcome = Effect.map(
        api<{ settled: boolean; result: string }>`
          SELECT o.settled, o.result::text AS result FROM tenure.item_outcome(ARRAY[${group}::uuid]) o`,
        K.first
      )
      // On his way while the last member commits: its commit waits for him, and tells him.
      const waiter = yield* K.session("api")
      yield* present(one).end()
      yield* waiter`BEGIN`
      yield* wait(waiter)
      assert.isFalse((yield* outcome).settled)
      const pid = yield* K.pidOf(present(two).runner.sql)
      const ending = yield* Effect.forkChild(present(two).end())
      yield* K.whenBlocked(api, pid)
      yield* waiter`COMMIT`
      yield* Fiber.join(ending)
      assert.strictEqual((yield* Queue.take(told)).payload, group)
      const { result, settled } = yield* outcome
      assert.isTrue(settled)
      assert.deepStrictEqual(JSON.parse(result), {
        id: group,
        completed: 2,
        failed: 0,
        cancelled: 0
      })
    })
  )
})

describe("groups", () => {
  it.live("count every member once, whatever ends meet in whatever batches", () =>
    Effect.gen(function* () {
      const seed = Number(process.env["TENURE_SEED"] ?? Date.now() % 1_000_000)
      const random = seeded(seed)
      const database = yield* freshDatabase
      const owner = yield* K.sessionOf(database, "owner")
      const api = yield* K.sessionOf(database, "api")
      const groups = yield* Effect.forEach(Array.from({ length: 12 }), () => makeGroup(api))
      // Some members of several groups and of none, in each batch.
      const items = new Map<string, { readonly group: string | null; outcome: string }>()
      for (let batch = 0; batch < 20; batch++) {
        const chosen = Array.from({ length: 1 + random.int(25) }, () =>
          random.chance(0.2) ? null : random.pick(groups)
        )
        const ids = yield* K.enqueueMany(api, "q", chosen.length, { groups: chosen })
        ids.forEach((id, at) => items.set(id, { group: chosen[at] ?? null, outcome: "" }))
      }
      const outcomes = ["completed", "completed", "failed", "cancelled"]
      const sessions = yield* Effect.forEach([1, 2, 3, 4], () =>
        K.executorOf(database, { queue: "q" })
      )
      const run = (runner: K.Executor) =>
        Effect.gen(function* () {
          for (;;) {
            const claimed = yield* K.claim(runner, 1 + random.int(30))
            if (claimed.length === 0) return
            const settling = claimed.map(({ id, attempt }) => ({
              id,
              attempt,
              outcome: random.pick(outcomes)
            }))
            for (const { id, outcome } of settling) present(items.get(id)).outcome = outcome
            if (random.chance(0.3)) {
              // Two batches in one transaction, and a first try that is taken back.
              yield* runner.sql`BEGIN`
              yield* K.settle(runner, settling)
              yield* runner.sql`ROLLBACK`
            }
            const half = random.int(settling.length)
            yield* runner.sql`BEGIN`
            yield* K.settle(runner, settling.slice(0, half))
            yield* K.settle(runner, settling.slice(half))
            yield* runner.sql`COMMIT`
          }
        })
      const sealing = Effect.forEach(groups, (group) =>
        Effect.andThen(
          Effect.forEach(Array.from({ length: random.int(6) }), () => api`SELECT 1`),
          seal(api, group)
        )
      )
      yield* Effect.all([...sessions.map(run), sealing], { concurrency: "unbounded" })
      for (const group of groups) {
        const members = [...items.values()].filter((item) => item.group === group)
        const count = (outcome: string) => members.filter((one) => one.outcome === outcome).length
        assert.deepStrictEqual(
          yield* callbacksOf(owner, group),
          [
            {
              order: { id: 7 },
              group: {
                id: group,
                completed: count("completed"),
                failed: count("failed"),
                cancelled: count("cancelled")
              }
            }
          ],
          `TENURE_SEED=${seed}`
        )
      }
      assert.deepStrictEqual(yield* owner`SELECT FROM tenure.group_tally`, [])
      const [{ deadlocks } = { deadlocks: -1 }] = yield* owner<{ deadlocks: number }>`
        SELECT deadlocks::int AS deadlocks FROM pg_stat_database WHERE datname = current_database()`
      assert.strictEqual(deadlocks, 0)
    }).pipe(Effect.scoped)
  )
})
