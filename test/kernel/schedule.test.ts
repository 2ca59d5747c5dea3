/**
 * Goal: a slot is fired once, whoever tries and however often (S1); one definition is in force (S2); no slot
 * fires before its time, nor again when the clock goes back (S3). Pause, trigger, backfill and removal are
 * exact beside it.
 * Method: scripted sessions of two executors; the clock of the database is moved where time is the subject.
 */
import { assert, describe, it, layer } from "@effect/vitest"
import { Effect, Fiber } from "effect"
import { type FreshDatabase, freshDatabase } from "../support/Postgres.ts"
import * as K from "./kernel.ts"

const minute = 60_000

interface Schedule {
  readonly name: string
  readonly queue?: string
  readonly definition?: string
  readonly application?: string
}

const instants = (slots: ReadonlyArray<number>) =>
  K.array(slots.map((slot) => new Date(slot).toISOString()))

const instant = (millis: number | null) => (millis === null ? null : new Date(millis).toISOString())

const queueOf = (schedule: Schedule) => schedule.queue ?? `queue of ${schedule.name}`

const stateOf = (sql: K.Sql, schedule: Schedule) =>
  Effect.map(
    sql<{
      is_known: boolean
      is_mine: boolean
      has_runner: boolean
      paused: boolean
      now_ms: number
      next_ms: number | null
      last_ms: number | null
      resumed_ms: number | null
      request_id: bigint | null
      request_kind: string | null
    }>`
      SELECT * FROM tenure.schedule_states(ARRAY[${schedule.name}], ARRAY[${queueOf(schedule)}],
                                           ARRAY[${schedule.definition ?? "hourly"}])`,
    K.first
  )

const register = (
  sql: K.Sql,
  schedule: Schedule,
  next: number | null,
  seen?: { readonly definition?: string; readonly next: number | null }
) =>
  Effect.map(
    sql<{ answer: string }>`
      SELECT tenure.register_schedule(${schedule.name}, ${queueOf(schedule)}, ${schedule.application ?? "app"},
               ${schedule.definition ?? "hourly"}, ${instant(next)}::text::timestamptz,
               ${seen === undefined ? null : (seen.definition ?? "hourly")}::text,
               ${instant(seen?.next ?? null)}::text::timestamptz) AS answer`,
    (rows) => K.first(rows).answer
  )

interface Fired {
  readonly answer: string
  readonly enqueued: number
}

/** Each slot's payload is its time. */
const fire = (
  sql: K.Sql,
  schedule: Schedule,
  seen: number,
  slots: ReadonlyArray<number>,
  next: number | null
): Effect.Effect<Fired, Effect.Error<ReturnType<typeof register>>> =>
  Effect.map(
    sql<Fired>`
      SELECT answer, enqueued
        FROM tenure.fire_schedule(${schedule.name}, ${queueOf(schedule)}, ${schedule.definition ?? "hourly"},
               ${instant(seen)}::text::timestamptz, ${instants(slots)}::text::timestamptz[],
               ${K.array(slots)}::text::text[], NULL, NULL, NULL, ${instant(next)}::text::timestamptz)`,
    K.first
  )

const serve = (
  sql: K.Sql,
  schedule: Schedule,
  request: bigint | null,
  slots: ReadonlyArray<number>,
  rest: number | null
) =>
  Effect.map(
    sql<Fired>`
      SELECT answer, enqueued
        FROM tenure.serve_schedule_request(${String(request)}::text::bigint, ${schedule.name}, ${queueOf(schedule)},
               ${schedule.definition ?? "hourly"}, ${instants(slots)}::text::timestamptz[],
               ${K.array(slots)}::text::text[], NULL, NULL, NULL, ${instant(rest)}::text::timestamptz)`,
    K.first
  )

const answerOf = (sql: K.Sql, act: "pause" | "resume" | "remove", name: string) =>
  Effect.map(
    sql.unsafe<{ answer: string }>(`SELECT tenure.${act}_schedule($1) AS answer`, [name]),
    (rows) => K.first(rows).answer
  )

const request = (sql: K.Sql, name: string, range?: readonly [from: number, to: number]) =>
  Effect.map(
    sql<{ answer: string; has_runner: boolean }>`
      SELECT * FROM tenure.request_schedule(${name}, ${instant(range?.[0] ?? null)}::text::timestamptz,
                                            ${instant(range?.[1] ?? null)}::text::timestamptz)`,
    K.first
  )

/** The payloads of the items there are, in their order. */
const items = (sql: K.Sql, schedule: Schedule) =>
  Effect.map(
    sql<{ payload: string }>`
      SELECT i.payload::text AS payload FROM tenure.item i JOIN tenure.queue q ON q.id = i.queue_id
       WHERE q.name = ${queueOf(schedule)} ORDER BY i.seq`,
    (rows) => rows.map((row) => Number(row.payload))
  )

const clockOf = (sql: K.Sql) =>
  Effect.map(
    sql<{ now: number }>`SELECT floor(extract(epoch FROM tenure.clock()) * 1000)::float8 AS now`,
    (rows) => K.first(rows).now
  )

/** Two executors with the schedule, and a slot of a minute ago that nobody has fired. */
const twoWithSlot = Effect.fnUntraced(function* (schedule: Schedule) {
  const owner = yield* K.session("owner")
  const one = yield* K.executor({ queue: `other ${schedule.name}` })
  const two = yield* K.executor({ queue: `other ${schedule.name}` })
  const slot = (yield* clockOf(owner)) - minute
  assert.strictEqual(yield* register(one.sql, schedule, slot), "registered")
  assert.strictEqual(yield* register(two.sql, schedule, slot, { next: slot }), "registered")
  return { owner, one, two, slot, next: slot + 60 * minute }
})

layer(K.Kernel.layer, { excludeTestServices: true })("a slot", (it) => {
  it.effect("is one item, and the schedule has moved on with it", () =>
    Effect.gen(function* () {
      const schedule = { name: "plain" }
      const { next, one, owner, slot, two } = yield* twoWithSlot(schedule)
      assert.deepInclude(yield* stateOf(two.sql, schedule), {
        is_known: true,
        is_mine: true,
        has_runner: true,
        next_ms: slot,
        last_ms: null
      })
      assert.deepStrictEqual(yield* fire(one.sql, schedule, slot, [slot], next), {
        answer: "fired",
        enqueued: 1
      })
      // The answer to the COMMIT was lost, or the peer is as far: nothing happens again.
      assert.strictEqual((yield* fire(one.sql, schedule, slot, [slot], next)).answer, "moved")
      assert.strictEqual((yield* fire(two.sql, schedule, slot, [slot], next)).answer, "moved")
      assert.deepStrictEqual(yield* items(owner, schedule), [slot])
      assert.deepInclude(yield* stateOf(two.sql, schedule), { next_ms: next, last_ms: slot })
    })
  )

  it.effect(
    "that two executors fire at once is fired by one, and the other waits for nothing",
    () =>
      Effect.gen(function* () {
        const schedule = { name: "at once" }
        const { next, one, owner, slot, two } = yield* twoWithSlot(schedule)
        yield* one.sql`BEGIN`
        assert.strictEqual((yield* fire(one.sql, schedule, slot, [slot], next)).answer, "fired")
        assert.strictEqual((yield* fire(two.sql, schedule, slot, [slot], next)).answer, "busy")
        yield* one.sql`ROLLBACK`
        assert.deepStrictEqual(yield* items(owner, schedule), [], "a crash before the COMMIT")
        assert.strictEqual((yield* fire(two.sql, schedule, slot, [slot], next)).answer, "fired")
        assert.deepStrictEqual(yield* items(owner, schedule), [slot])
      })
  )

  it.effect("is not fired again when its key is past retention, and not by who goes back", () =>
    Effect.gen(function* () {
      const schedule = { name: "forgotten" }
      const { next, one, owner, slot } = yield* twoWithSlot(schedule)
      yield* fire(one.sql, schedule, slot, [slot], next)
      yield* owner`DELETE FROM tenure.item_key WHERE queue_id = 0 AND key LIKE 'schedule/forgotten/%'`
      assert.strictEqual((yield* fire(one.sql, schedule, slot, [slot], next)).answer, "moved")
      assert.strictEqual((yield* fire(one.sql, schedule, next, [], slot)).answer, "moved")
      const back = register(one.sql, schedule, slot, { next })
      assert.strictEqual(yield* K.stateOf(back), "23514", "the row does not hold it")
      assert.deepStrictEqual(yield* items(owner, schedule), [slot])
    })
  )

  it.effect("does not collide with any key of a user's", () =>
    Effect.gen(function* () {
      const schedule = { name: "stolen" }
      const { next, one, owner, slot } = yield* twoWithSlot(schedule)
      const [key] = yield* owner<{ key: string }>`
        SELECT tenure.slot_key('stolen', ${instant(slot)}::text::timestamptz) AS key`
      yield* K.enqueueOne(owner, queueOf(schedule), "1", { idempotencyKey: key?.key })
      assert.strictEqual((yield* fire(one.sql, schedule, slot, [slot], next)).enqueued, 1)
      assert.deepStrictEqual(yield* items(owner, schedule), [1, slot])
      yield* K.enqueueOne(owner, queueOf(schedule), "1", { idempotencyKey: key?.key })
      assert.deepStrictEqual(yield* items(owner, schedule), [1, slot])
    })
  )

  it.effect("is not fired by an executor whose lease is gone", () =>
    Effect.gen(function* () {
      const schedule = { name: "stale" }
      const { next, one, owner, slot, two } = yield* twoWithSlot(schedule)
      yield* K.loseExecutor(owner, one.id)
      assert.strictEqual(yield* K.stateOf(fire(one.sql, schedule, slot, [slot], next)), "TN002")
      assert.strictEqual((yield* fire(two.sql, schedule, slot, [slot], next)).answer, "fired")
    })
  )

  it.effect("that an open transaction pauses is not fired before it ends, and not after", () =>
    Effect.gen(function* () {
      const schedule = { name: "paused first" }
      const { next, one, owner, slot } = yield* twoWithSlot(schedule)
      const api = yield* K.session("api")
      yield* api`BEGIN`
      assert.strictEqual(yield* answerOf(api, "pause", schedule.name), "paused")
      assert.strictEqual((yield* fire(one.sql, schedule, slot, [slot], next)).answer, "busy")
      yield* api`COMMIT`
      assert.strictEqual((yield* fire(one.sql, schedule, slot, [slot], next)).answer, "paused")
      assert.strictEqual(yield* answerOf(api, "pause", schedule.name), "already")
      assert.deepStrictEqual(yield* items(owner, schedule), [])
      assert.strictEqual(yield* answerOf(api, "resume", schedule.name), "resumed")
      const { now_ms, resumed_ms } = yield* stateOf(one.sql, schedule)
      assert.isTrue(resumed_ms !== null && resumed_ms > slot && resumed_ms <= now_ms)
      assert.strictEqual(yield* answerOf(api, "resume", schedule.name), "already")
      assert.strictEqual(yield* answerOf(api, "pause", "nobody's"), "unknown")
    })
  )

  it.effect("that is being fired is waited for by who pauses, and stays fired", () =>
    Effect.gen(function* () {
      const schedule = { name: "fired first" }
      const { next, one, owner, slot } = yield* twoWithSlot(schedule)
      const api = yield* K.session("api")
      const pid = yield* K.pidOf(api)
      yield* one.sql`BEGIN`
      yield* fire(one.sql, schedule, slot, [slot], next)
      const pausing = yield* Effect.forkChild(answerOf(api, "pause", schedule.name))
      yield* K.whenBlocked(owner, pid)
      yield* one.sql`COMMIT`
      assert.strictEqual(yield* Fiber.join(pausing), "paused")
      assert.deepStrictEqual(yield* items(owner, schedule), [slot])
      assert.deepInclude(yield* stateOf(one.sql, schedule), { paused: true, next_ms: next })
    })
  )
})

layer(K.Kernel.layer, { excludeTestServices: true })("a definition", (it) => {
  it.effect("that was registered last is in force; who has another one fires nothing", () =>
    Effect.gen(function* () {
      const schedule = { name: "changed" }
      const { next, one, owner, slot, two } = yield* twoWithSlot(schedule)
      const changed = { ...schedule, definition: "daily" }
      assert.strictEqual(yield* register(two.sql, changed, slot, { next: slot }), "registered")
      assert.strictEqual((yield* fire(one.sql, schedule, slot, [slot], next)).answer, "other")
      assert.deepInclude(yield* stateOf(one.sql, schedule), { is_mine: false, has_runner: true })
      assert.strictEqual((yield* fire(two.sql, changed, slot, [slot], next)).answer, "fired")
      assert.deepStrictEqual(yield* items(owner, schedule), [slot])
    })
  )

  it.effect("is free to be replaced when the last live executor that has it is gone", () =>
    Effect.gen(function* () {
      const schedule = { name: "left behind" }
      const { one, owner, slot, two } = yield* twoWithSlot(schedule)
      const changed = { ...schedule, definition: "daily" }
      yield* register(two.sql, changed, slot, { next: slot })
      yield* K.loseExecutor(owner, two.id)
      assert.deepInclude(yield* stateOf(one.sql, schedule), { is_mine: false, has_runner: false })
      const again = register(one.sql, schedule, slot, { definition: "daily", next: slot })
      assert.strictEqual(yield* again, "registered")
      assert.deepInclude(yield* stateOf(one.sql, schedule), { is_mine: true, has_runner: true })
      assert.deepStrictEqual(
        yield* owner`SELECT executor_id::text AS id FROM tenure.schedule_runner WHERE schedule_name = ${schedule.name}`,
        [{ id: one.id }],
        "the lost one is forgotten"
      )
      yield* one.sql`SELECT tenure.unregister_schedule(${schedule.name})`
      assert.isFalse((yield* stateOf(one.sql, schedule)).has_runner)
    })
  )

  it.effect("is put in force only by who has seen the row as it is", () =>
    Effect.gen(function* () {
      const schedule = { name: "raced" }
      const { next, one, slot, two } = yield* twoWithSlot(schedule)
      assert.strictEqual(yield* register(two.sql, schedule, slot), "moved", "it is there already")
      yield* fire(one.sql, schedule, slot, [slot], next)
      assert.strictEqual(yield* register(two.sql, schedule, slot, { next: slot }), "moved")
      yield* one.sql`BEGIN`
      yield* register(one.sql, schedule, next, { next })
      assert.strictEqual(yield* register(two.sql, schedule, next, { next }), "moved", "held")
      yield* one.sql`COMMIT`
    })
  )

  it.effect("of another application is refused, and so is who is no executor", () =>
    Effect.gen(function* () {
      const schedule = { name: "theirs" }
      const { one, slot } = yield* twoWithSlot(schedule)
      const stranger = { ...schedule, application: "another" }
      assert.strictEqual(
        yield* K.stateOf(register(one.sql, stranger, slot, { next: slot })),
        "TN011"
      )
      const owner = yield* K.session("owner")
      assert.strictEqual(yield* K.stateOf(register(owner, schedule, slot)), "TN004")
      const api = yield* K.session("api")
      assert.strictEqual(yield* K.stateOf(fire(api, schedule, slot, [slot], null)), "42501")
      const worker = yield* K.session("worker")
      assert.strictEqual(yield* K.stateOf(answerOf(worker, "pause", "theirs")), "TN004")
      assert.strictEqual(
        yield* K.stateOf(
          one.sql`SELECT tenure.enqueue_slots('theirs', 'q', '{}', '{}', '{}', '{}', '{}')`
        ),
        "42501"
      )
    })
  )
})

layer(K.Kernel.layer, { excludeTestServices: true })("a request", (it) => {
  it.effect("to trigger is one more item, served once, paused or not, and moves no slot", () =>
    Effect.gen(function* () {
      const schedule = { name: "triggered" }
      const { one, owner, slot, two } = yield* twoWithSlot(schedule)
      const api = yield* K.session("api")
      yield* answerOf(api, "pause", schedule.name)
      assert.deepStrictEqual(yield* request(api, schedule.name), {
        answer: "requested",
        has_runner: true
      })
      const { request_id, request_kind } = yield* stateOf(one.sql, schedule)
      assert.strictEqual(request_kind, "trigger")
      yield* one.sql`BEGIN`
      assert.strictEqual((yield* serve(one.sql, schedule, request_id, [7], null)).answer, "fired")
      assert.strictEqual((yield* serve(two.sql, schedule, request_id, [7], null)).answer, "busy")
      yield* one.sql`COMMIT`
      assert.strictEqual((yield* serve(two.sql, schedule, request_id, [7], null)).answer, "moved")
      assert.deepStrictEqual(yield* items(owner, schedule), [7])
      assert.deepInclude(yield* stateOf(one.sql, schedule), { next_ms: slot, request_id: null })
      assert.strictEqual((yield* request(api, "nobody's")).answer, "unknown")
    })
  )

  it.effect(
    "to backfill leaves out what was fired, goes on where it was, and may be repeated",
    () =>
      Effect.gen(function* () {
        const schedule = { name: "backfilled" }
        const { next, one, owner, slot, two } = yield* twoWithSlot(schedule)
        yield* fire(one.sql, schedule, slot, [slot], next)
        const before = [3, 2, 1].map((n) => slot - n * minute)
        const range = [before[0] ?? 0, slot + minute / 2] as const
        for (const expected of [3, 0]) {
          yield* request(owner, schedule.name, range)
          const { request_id } = yield* stateOf(one.sql, schedule)
          const half = yield* serve(
            one.sql,
            schedule,
            request_id,
            before.slice(0, 2),
            before[2] ?? 0
          )
          // A peer that was not told of it.
          assert.strictEqual(
            (yield* serve(two.sql, schedule, request_id, before.slice(0, 2), before[2] ?? 0))
              .answer,
            "moved"
          )
          const rest = yield* serve(two.sql, schedule, request_id, [before[2] ?? 0, slot], null)
          assert.strictEqual(half.enqueued + rest.enqueued, expected)
          assert.isNull((yield* stateOf(one.sql, schedule)).request_id)
        }
        assert.deepStrictEqual(yield* items(owner, schedule), [slot, ...before])
        assert.deepInclude(yield* stateOf(one.sql, schedule), { next_ms: next, last_ms: slot })
      })
  )

  it.effect(
    "for slots to come is cut off at now, and what it has fired is not fired in its time",
    () =>
      Effect.gen(function* () {
        const schedule = { name: "impatient" }
        const { next, one, owner, slot } = yield* twoWithSlot(schedule)
        yield* request(owner, schedule.name, [slot, next + minute])
        const [row] = yield* owner`
        SELECT to_at <= tenure.clock() AS "isPast" FROM tenure.schedule_request WHERE schedule_name = ${schedule.name}`
        assert.deepStrictEqual(row, { isPast: true })
        const { request_id } = yield* stateOf(one.sql, schedule)
        assert.strictEqual(
          (yield* serve(one.sql, schedule, request_id, [next], null)).answer,
          "early"
        )
        yield* serve(one.sql, schedule, request_id, [slot], null)
        assert.deepStrictEqual(yield* fire(one.sql, schedule, slot, [slot], next), {
          answer: "fired",
          enqueued: 0
        })
        assert.deepStrictEqual(yield* items(owner, schedule), [slot])
        const [listed] = yield* owner`
        SELECT s.last_item = k.item_id AS same FROM tenure.schedule s
          JOIN tenure.item_key k ON k.queue_id = 0 AND k.key = tenure.slot_key(s.name, s.last_slot)
         WHERE s.name = ${schedule.name}`
        assert.deepStrictEqual(listed, { same: true })
      })
  )

  it.effect("is refused behind a hundred others", () =>
    Effect.gen(function* () {
      const schedule = { name: "nagged" }
      const { owner } = yield* twoWithSlot(schedule)
      yield* owner`SELECT tenure.request_schedule('nagged') FROM generate_series(1, 100)`
      assert.strictEqual((yield* request(owner, schedule.name)).answer, "full")
    })
  )
})

layer(K.Kernel.layer, { excludeTestServices: true })("a schedule", (it) => {
  it.effect("is removed when no live executor has its code, with what was asked of it", () =>
    Effect.gen(function* () {
      const schedule = { name: "abandoned" }
      const { next, one, owner, slot, two } = yield* twoWithSlot(schedule)
      const api = yield* K.session("api")
      yield* fire(one.sql, schedule, slot, [slot], next)
      yield* request(api, schedule.name)
      yield* K.loseExecutor(owner, one.id)
      // It has another definition of it, but it has it.
      const changed = { ...schedule, definition: "daily" }
      yield* register(two.sql, changed, next, { next })
      assert.strictEqual(yield* answerOf(api, "remove", schedule.name), "running")
      yield* K.loseExecutor(owner, two.id)
      assert.strictEqual(yield* answerOf(api, "remove", schedule.name), "removed")
      assert.strictEqual(yield* answerOf(api, "remove", schedule.name), "unknown")
      assert.deepStrictEqual(
        yield* owner`
          SELECT name FROM tenure.schedule WHERE name = 'abandoned'
          UNION ALL SELECT schedule_name FROM tenure.schedule_request WHERE schedule_name = 'abandoned'
          UNION ALL SELECT schedule_name FROM tenure.schedule_runner WHERE schedule_name = 'abandoned'`,
        []
      )
      assert.deepStrictEqual(yield* items(owner, schedule), [slot])
    })
  )
})

/** The database's clock, to be moved. */
const withClock = Effect.fnUntraced(function* (database: FreshDatabase) {
  const owner = yield* K.sessionOf(database, "owner")
  yield* owner`CREATE SEQUENCE tenure.shift MINVALUE -1000000000000 START 0`
  yield* owner.unsafe(`
    CREATE OR REPLACE FUNCTION tenure.clock() RETURNS timestamptz LANGUAGE sql VOLATILE SECURITY DEFINER AS $$
      SELECT pg_catalog.clock_timestamp() + (SELECT last_value FROM tenure.shift) * interval '1 ms' $$`)
  const shift = (millis: number) => owner`SELECT setval('tenure.shift', ${millis}::bigint)`
  return { owner, shift }
})

describe("the clock of the database", () => {
  it.live("decides what is due; set back, it fires nothing twice", () =>
    Effect.gen(function* () {
      const database = yield* freshDatabase
      const { owner, shift } = yield* withClock(database)
      const schedule = { name: "by the clock" }
      const one = yield* K.executorOf(database, { queue: "q", validity: "1 day" })
      const first = (yield* clockOf(owner)) + 60 * minute
      const second = first + 60 * minute
      yield* register(one.sql, schedule, first)
      assert.strictEqual((yield* fire(one.sql, schedule, first, [first], second)).answer, "early")
      yield* shift(61 * minute)
      assert.strictEqual((yield* fire(one.sql, schedule, first, [first], second)).answer, "fired")
      yield* shift(-120 * minute)
      assert.strictEqual((yield* fire(one.sql, schedule, first, [first], second)).answer, "moved")
      assert.strictEqual(
        (yield* fire(one.sql, schedule, second, [second], second + minute)).answer,
        "early"
      )
      // A jump forward over several: all in one transaction, in order.
      yield* shift(240 * minute)
      const slots = [second, second + 60 * minute]
      assert.deepStrictEqual(yield* fire(one.sql, schedule, second, slots, second + 120 * minute), {
        answer: "fired",
        enqueued: 2
      })
      assert.deepStrictEqual(yield* items(owner, schedule), [first, ...slots])
    }).pipe(Effect.scoped)
  )
})
