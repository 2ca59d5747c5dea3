/**
 * Goal: items that wait are promoted, cancelled, expired and brought back without being lost, ended
 * twice or overlooked while they move (I7, row 41, bug reports 15 and 18).
 * Method: the sweeps look at all queues, so each test has a database of its own.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect, Fiber, Queue } from "effect"
import { randomUUID } from "node:crypto"
import { type FreshDatabase, freshDatabase } from "../support/Postgres.ts"
import * as K from "./kernel.ts"

interface Setting {
  readonly database: FreshDatabase
  readonly api: K.Sql
  readonly owner: K.Sql
  readonly runner: K.Executor
}

const setting = Effect.gen(function* () {
  const database = yield* freshDatabase
  return {
    database,
    api: yield* K.sessionOf(database, "api"),
    owner: yield* K.sessionOf(database, "owner"),
    runner: yield* K.executorOf(database, { queue: "q" })
  } satisfies Setting
})

const promote = (runner: K.Executor, max: number) =>
  Effect.map(
    runner.sql<{ promoted: number; queue_ids: ReadonlyArray<number>; next_due_ms: number | null }>`
      SELECT * FROM tenure.promote(${max}::int)`,
    K.first
  )

const expire = (runner: K.Executor, max = 100) =>
  Effect.map(
    runner.sql<{ expired: number; next_due_ms: number | null }>`
      SELECT expired, next_due_ms FROM tenure.expire_deadlines(${max}::int)`,
    K.first
  )

const cancel = (sql: K.Sql, id: string) =>
  Effect.map(
    sql<{ answer: string }>`SELECT tenure.cancel(${id}::uuid) AS answer`,
    (rows) => K.first(rows).answer
  )

const retry = (sql: K.Sql, id: string) =>
  Effect.map(
    sql<{ answer: string }>`SELECT tenure.retry(${id}::uuid) AS answer`,
    (rows) => K.first(rows).answer
  )

/** Makes what waits for an hour due now. */
const makeDue = (owner: K.Sql, ids: ReadonlyArray<string>) =>
  owner`UPDATE tenure.delayed SET due_at = tenure.clock() - interval '1 ms'
         WHERE id = ANY(${[...ids]}::text[]::uuid[])`

const hour = 3_600_000

describe("promotion", () => {
  it.live("moves what is due, as it is, and tells for whom and when the next one is", () =>
    Effect.gen(function* () {
      const { api, owner, runner } = yield* setting
      assert.deepStrictEqual(yield* promote(runner, 10), {
        promoted: 0,
        queue_ids: [],
        next_due_ms: null
      })
      const ids = yield* K.enqueueMany(api, "q", 3, {
        delaysMs: [hour, hour, hour],
        priorities: [1, 2, 3]
      })
      const other = yield* K.enqueueOne(api, "other", "1", { delayMs: hour })
      yield* makeDue(owner, [ids[0] ?? "", ids[1] ?? "", other])
      const report = yield* promote(runner, 10)
      assert.strictEqual(report.promoted, 3)
      assert.strictEqual(report.queue_ids.length, 2)
      assert.isAtLeast(report.next_due_ms ?? 0, hour - 60_000)
      assert.deepStrictEqual(yield* K.placesOf(owner, [...ids, other]), {
        [ids[0] ?? ""]: "ready",
        [ids[1] ?? ""]: "ready",
        [ids[2] ?? ""]: "delayed",
        [other]: "ready"
      })
      assert.deepStrictEqual(
        (yield* K.claim(runner, 10)).map((row) => [row.id, row.rank, row.attempt]),
        [
          [ids[1], -2, 1],
          [ids[0], -1, 1]
        ]
      )
    })
  )

  it.live("takes no more than wanted, the longest due first", () =>
    Effect.gen(function* () {
      const { api, owner, runner } = yield* setting
      const ids = yield* K.enqueueMany(api, "q", 5, {
        delaysMs: [5, 4, 3, 2, 1].map((n) => -n * 1000 + hour)
      })
      yield* owner`UPDATE tenure.delayed SET due_at = due_at - interval '2 hours'`
      assert.strictEqual((yield* promote(runner, 2)).promoted, 2)
      assert.deepStrictEqual(
        (yield* K.claim(runner, 10)).map((row) => row.id),
        ids.slice(0, 2)
      )
      assert.strictEqual((yield* promote(runner, 10)).promoted, 3)
    })
  )

  it.live("a due item that somebody holds does not hold up a hundred others", () =>
    Effect.gen(function* () {
      const { api, owner, runner } = yield* setting
      const ids = yield* K.enqueueMany(api, "q", 101, {
        delaysMs: Array.from({ length: 101 }, () => hour)
      })
      yield* makeDue(owner, ids)
      yield* owner`BEGIN`
      yield* owner`SELECT FROM tenure.delayed WHERE id = ${ids[0] ?? ""}::uuid FOR UPDATE`
      assert.strictEqual((yield* promote(runner, 1000)).promoted, 100)
      yield* owner`ROLLBACK`
      assert.strictEqual((yield* promote(runner, 1000)).promoted, 1)
    })
  )

  it.live("four promoters at once promote each item once", () =>
    Effect.gen(function* () {
      const { database, api, owner } = yield* setting
      const runners = yield* Effect.all(
        [0, 1, 2, 3].map(() => K.executorOf(database, { queue: "q" }))
      )
      const ids = yield* K.enqueueMany(api, "q", 400, {
        delaysMs: Array.from({ length: 400 }, () => hour)
      })
      yield* makeDue(owner, ids)
      const reports = yield* Effect.forEach(
        runners,
        (runner) => Effect.all(Array.from({ length: 10 }, () => promote(runner, 15))),
        { concurrency: "unbounded" }
      )
      assert.strictEqual(
        reports.flat().reduce((sum, report) => sum + report.promoted, 0),
        400
      )
      assert.deepStrictEqual(
        new Set(Object.values(yield* K.placesOf(owner, ids))),
        new Set(["ready"])
      )
    })
  )
})

describe("cancel", () => {
  it.live("ends what waits, asks the owner of what runs, and leaves what has ended", () =>
    Effect.gen(function* () {
      const { database, api, owner, runner } = yield* setting
      const [running, ready] = yield* K.enqueueMany(api, "q", 2)
      const delayed = yield* K.enqueueOne(api, "q", "1", { delayMs: hour })
      const [claimed] = yield* K.claim(runner, 1)
      assert.strictEqual(claimed?.id, running)
      assert.strictEqual(yield* cancel(api, ready ?? ""), "cancelled")
      assert.strictEqual(yield* cancel(api, delayed), "cancelled")
      assert.strictEqual(yield* cancel(api, ready ?? ""), "cancelled", "again")
      assert.strictEqual(yield* cancel(api, randomUUID()), "unknown")

      const listener = yield* K.sessionOf(database, "owner")
      const told = yield* listener.listen(`tenure_${runner.id.replaceAll("-", "")}`)
      assert.strictEqual(yield* cancel(api, running ?? ""), "requested")
      assert.strictEqual(yield* cancel(api, running ?? ""), "requested", "again")
      assert.strictEqual((yield* Queue.take(told)).payload, "cancel")
      assert.deepStrictEqual(
        yield* runner.sql`SELECT id::text AS id, attempt FROM tenure.cancel_requests(${runner.id}::uuid)`,
        [{ id: running, attempt: 1 }]
      )
      // The first outcome that is committed wins: a request does not turn into an outcome by itself.
      yield* K.settle(runner, [{ id: running ?? "", attempt: 1 }])
      assert.strictEqual(yield* cancel(api, running ?? ""), "completed")
      assert.deepStrictEqual(yield* owner`SELECT FROM tenure.cancel_request`, [])
      assert.deepStrictEqual(yield* K.placesOf(owner, [running ?? "", ready ?? "", delayed]), {
        [running ?? ""]: "completed",
        [ready ?? ""]: "cancelled",
        [delayed]: "cancelled"
      })
    })
  )

  it.live("an item that keeps moving is in exactly one place whenever anybody looks", () =>
    Effect.gen(function* () {
      const { api, owner, runner } = yield* setting
      const id = yield* K.enqueueOne(api, "q", "1")
      const moving = yield* Effect.forkChild(
        Effect.forever(
          Effect.gen(function* () {
            const [claimed] = yield* K.claim(runner, 1)
            if (claimed === undefined) return
            yield* K.settle(runner, [{ id, attempt: claimed.attempt, outcome: "hand-back" }])
          })
        )
      )
      // Within one statement of the client, and so fast that it looks between any two of its moves.
      yield* owner.unsafe(`
        CREATE FUNCTION public.look(item uuid, times int, OUT missed int, OUT doubled int, OUT places text[])
        LANGUAGE plpgsql AS $$
        DECLARE found_count int; place_ text;
        BEGIN
          missed := 0; doubled := 0; places := '{}';
          FOR n IN 1..times LOOP
            SELECT count(*), max(p.place) INTO found_count, place_ FROM tenure.item_place(item) p;
            missed := missed + (found_count = 0)::int;
            doubled := doubled + (found_count > 1)::int;
            IF place_ <> ALL(places) THEN places := places || place_; END IF;
          END LOOP;
        END $$`)
      const seen = K.first(
        yield* owner<{ missed: number; doubled: number; places: ReadonlyArray<string> }>`
          SELECT * FROM public.look(${id}::uuid, 2500)`
      )
      assert.deepStrictEqual(
        [...seen.places].toSorted(),
        ["claimed", "ready"],
        "it was seen in motion"
      )
      assert.deepStrictEqual([seen.missed, seen.doubled], [0, 0])
      // And it can be cancelled while it moves.
      assert.include(["cancelled", "requested"], yield* cancel(api, id))
      yield* Fiber.interrupt(moving)
    })
  )

  it.live("races with a claim: either it is cancelled or its owner is asked", () =>
    Effect.gen(function* () {
      const { api, owner, runner } = yield* setting
      const ids = yield* K.enqueueMany(api, "q", 200)
      const [answers, claimed] = yield* Effect.all(
        [
          Effect.forEach(ids, (id) => cancel(api, id)),
          Effect.map(Effect.all(Array.from({ length: 60 }, () => K.claim(runner, 2))), (rows) =>
            rows.flat()
          )
        ],
        { concurrency: "unbounded" }
      )
      const taken = new Set(claimed.map((row) => row.id))
      const places = yield* K.placesOf(owner, ids)
      for (const [n, id] of ids.entries()) {
        assert.strictEqual(answers[n], taken.has(id) ? "requested" : "cancelled")
        assert.strictEqual(places[id], taken.has(id) ? "claimed" : "cancelled")
      }
      assert.isAbove(taken.size, 0)
      assert.isBelow(taken.size, 200)
    })
  )
})

describe("deadlines", () => {
  const passed = (owner: K.Sql) =>
    owner`UPDATE tenure.deadline SET due_at = tenure.clock() - interval '1 ms'`

  it.live("end what waits, and come back later to what runs", () =>
    Effect.gen(function* () {
      const { api, owner, runner } = yield* setting
      assert.deepStrictEqual(yield* expire(runner), { expired: 0, next_due_ms: null })
      const ids = yield* K.enqueueMany(api, "q", 4, {
        deadlinesMs: [hour, hour, hour, null],
        delaysMs: [null, null, hour, null]
      })
      const later = yield* K.enqueueOne(api, "q", "1", { deadlineMs: hour })
      const [claimed] = yield* K.claim(runner, 1)
      yield* owner`UPDATE tenure.deadline SET due_at = tenure.clock() - interval '1 ms' WHERE id <> ${later}::uuid`
      const report = yield* expire(runner)
      assert.strictEqual(report.expired, 2)
      assert.deepStrictEqual(yield* K.placesOf(owner, ids), {
        [ids[0] ?? ""]: "claimed",
        [ids[1] ?? ""]: "failed",
        [ids[2] ?? ""]: "failed",
        [ids[3] ?? ""]: "ready"
      })
      assert.deepStrictEqual(
        yield* owner`SELECT DISTINCT reason, attempt, owner FROM tenure.done WHERE outcome = 'failed'`,
        [{ reason: "DeadlineExceeded", attempt: 0, owner: null }]
      )
      assert.isAtMost(report.next_due_ms ?? 0, 5_000)
      assert.isAtLeast(report.next_due_ms ?? 0, 1_000)
      assert.strictEqual((yield* expire(runner)).expired, 0)
      // Settled in time by its owner: the next look forgets the deadline.
      yield* K.settle(runner, [{ id: claimed?.id ?? "", attempt: 1 }])
      yield* passed(owner)
      assert.strictEqual((yield* expire(runner)).expired, 1)
      assert.deepStrictEqual(yield* owner`SELECT FROM tenure.deadline`, [])
      assert.strictEqual(yield* K.placeOf(owner, claimed?.id ?? ""), "completed")
    })
  )

  it.live("take no more than wanted, and two sweeps share what there is", () =>
    Effect.gen(function* () {
      const { database, api, owner, runner } = yield* setting
      const second = yield* K.executorOf(database, { queue: "q" })
      const ids = yield* K.enqueueMany(api, "q", 30, {
        deadlinesMs: Array.from({ length: 30 }, () => hour)
      })
      yield* passed(owner)
      assert.strictEqual((yield* expire(runner, 10)).expired, 10)
      const reports = yield* Effect.all([expire(runner, 20), expire(second, 20)], {
        concurrency: "unbounded"
      })
      const rest = reports.reduce((sum, report) => sum + report.expired, 0)
      yield* expire(runner)
      assert.isAtMost(rest, 20)
      assert.deepStrictEqual(
        new Set(Object.values(yield* K.placesOf(owner, ids))),
        new Set(["failed"])
      )
    })
  )

  it.live("pass by an item that a user's transaction has cancelled and may yet keep", () =>
    Effect.gen(function* () {
      const { api, owner, runner } = yield* setting
      const ids = yield* K.enqueueMany(api, "q", 3, {
        deadlinesMs: [hour, hour, hour],
        delaysMs: [null, hour, null]
      })
      yield* passed(owner)
      yield* api`BEGIN`
      yield* cancel(api, ids[0] ?? "")
      yield* cancel(api, ids[1] ?? "")
      yield* runner.sql`SET lock_timeout = '300ms'`
      assert.strictEqual((yield* expire(runner)).expired, 1)
      yield* api`ROLLBACK`
      yield* passed(owner)
      assert.strictEqual((yield* expire(runner)).expired, 2)
    })
  )
})

describe("an operator's retry", () => {
  it.live("makes a failed item available with fresh counters and the next attempt", () =>
    Effect.gen(function* () {
      const { database, api, owner, runner } = yield* setting
      const id = yield* K.enqueueOne(api, "q", "1", { priority: 3, key: "k" })
      yield* K.claim(runner, 1)
      yield* K.settle(runner, [{ id, attempt: 1, outcome: "retry" }])
      yield* K.claim(runner, 1)
      yield* K.loseExecutor(runner.sql, runner.id)
      const next = yield* K.executorOf(database, { queue: "q", version: "v1" })
      yield* K.claim(next, 1)
      yield* K.settle(next, [{ id, attempt: 3, outcome: "failed", reason: "HandlerDied" }])
      assert.strictEqual(yield* retry(api, id), "available")
      assert.deepStrictEqual(
        yield* owner`SELECT r.rank, r.attempt, r.failures, r.losses, r.stuck, r.key, l.version
                       FROM tenure.ready r JOIN tenure.lane l ON l.id = r.lane_id`,
        [{ rank: -3, attempt: 3, failures: 0, losses: 0, stuck: 0, key: "k", version: null }]
      )
      assert.strictEqual((yield* K.claim(next, 1))[0]?.attempt, 4)
    })
  )

  it.live("leaves every other state and names it", () =>
    Effect.gen(function* () {
      const { api, runner } = yield* setting
      const [completed, cancelled, claimed, ready] = yield* K.enqueueMany(api, "q", 4)
      const delayed = yield* K.enqueueOne(api, "q", "1", { delayMs: hour })
      yield* K.claim(runner, 1)
      yield* K.settle(runner, [{ id: completed ?? "", attempt: 1 }])
      yield* cancel(api, cancelled ?? "")
      yield* K.claim(runner, 1)
      const answers = yield* Effect.forEach(
        [completed, cancelled, claimed, ready, delayed, randomUUID()],
        (id) => retry(api, id ?? "")
      )
      assert.deepStrictEqual(answers, [
        "completed",
        "cancelled",
        "claimed",
        "ready",
        "delayed",
        "unknown"
      ])
    })
  )

  it.live("two at once bring an item back once", () =>
    Effect.gen(function* () {
      const { database, api, owner, runner } = yield* setting
      const id = yield* K.enqueueOne(api, "q", "1")
      yield* K.claim(runner, 1)
      yield* K.settle(runner, [{ id, attempt: 1, outcome: "failed" }])
      const second = yield* K.sessionOf(database, "api")
      const answers = yield* Effect.all([retry(api, id), retry(second, id)], {
        concurrency: "unbounded"
      })
      assert.deepStrictEqual([...answers].toSorted(), ["available", "ready"])
      assert.strictEqual(yield* K.placeOf(owner, id), "ready")
    })
  )

  it.live("is not ended by a request to cancel that came too late for the failed run", () =>
    Effect.gen(function* () {
      const { database, api, runner } = yield* setting
      const id = yield* K.enqueueOne(api, "q", "1")
      yield* K.claim(runner, 1)
      const asking = yield* K.sessionOf(database, "api")
      yield* asking`BEGIN`
      assert.strictEqual(yield* cancel(asking, id), "requested")
      yield* K.settle(runner, [{ id, attempt: 1, outcome: "failed" }])
      yield* asking`COMMIT`
      assert.strictEqual(yield* retry(api, id), "available")
      assert.strictEqual((yield* K.claim(runner, 1))[0]?.cancel_requested, false)
    })
  )
})
