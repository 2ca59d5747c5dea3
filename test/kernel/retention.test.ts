/**
 * Goal: old buckets go, with everything that belongs to their items, while what is not over lives on: it is
 * moved on, and keeps no bucket (K-118); and nobody's enqueue waits for it (bug reports 17 and 19).
 * Method: a database whose ids are made a week ago, so that the bucket of last week has items.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect, Fiber } from "effect"
import { freshDatabase } from "../support/Postgres.ts"
import * as K from "./kernel.ts"

const lastWeek = Effect.gen(function* () {
  const database = yield* freshDatabase
  const owner = yield* K.sessionOf(database, "owner")
  yield* owner.unsafe(`
    CREATE FUNCTION public.make_ids(shift interval) RETURNS void LANGUAGE plpgsql AS $do$
    BEGIN
      EXECUTE format($f$
        CREATE OR REPLACE FUNCTION tenure.new_id() RETURNS uuid LANGUAGE sql VOLATILE AS $$
          SELECT overlay(gen_random_uuid()::text
            PLACING left(tenure.id_at(pg_catalog.clock_timestamp() - %L::interval)::text, 13)
            FROM 1 FOR 13)::uuid $$ $f$, shift);
    END $do$`)
  yield* owner`SELECT public.make_ids('7 days')`
  const { name } = K.first(
    yield* owner<{ name: string }>`
      SELECT name FROM tenure.bucket WHERE tenure.clock() - interval '7 days' >= lower_at
                                       AND tenure.clock() - interval '7 days' < upper_at`
  )
  return {
    database,
    owner,
    api: yield* K.sessionOf(database, "api"),
    runner: yield* K.executorOf(database, { queue: "q" }),
    name
  }
})

interface Retained {
  readonly made: number
  readonly emptied: number
  readonly dropped: number
  readonly moved: number
  readonly merged: number
  readonly forgotten: number
  readonly blocked: number
}

// The bucket of last week is over since Monday, so that everything is old enough at once.
const retain = (sql: K.Sql, keep = "0", movedMax = 5000) =>
  Effect.map(
    sql<Retained>`SELECT * FROM tenure.retain(${keep}::text::interval, ${movedMax}::int)`,
    K.first
  )

const nothing = { made: 0, emptied: 0, dropped: 0, moved: 0, merged: 0, forgotten: 0, blocked: 0 }

const settleAll = (runner: K.Executor, claimed: ReadonlyArray<K.Claimed>, outcome = "completed") =>
  K.settle(
    runner,
    claimed.map(({ id, attempt }) => ({ id, attempt, outcome }))
  )

describe("retention", () => {
  it.live("keeps a bucket as long as one of its items lives or has ended only just", () =>
    Effect.gen(function* () {
      const { api, owner, runner } = yield* lastWeek
      const id = yield* K.enqueueOne(api, "q", "1")
      assert.deepStrictEqual(yield* retain(owner), nothing, "ready")
      yield* K.claim(runner, 1)
      assert.deepStrictEqual(yield* retain(owner), nothing, "claimed")
      yield* runner.sql`
        SELECT p.status FROM tenure.park(ARRAY[${id}::uuid], ARRAY[1], ARRAY[${runner.startedLane}::int], ARRAY['[]']) p`
      assert.deepStrictEqual(yield* retain(owner), nothing, "parked")
      yield* owner`UPDATE tenure.parked SET due_at = tenure.clock()`
      yield* runner.sql`SELECT ids::text[] FROM tenure.claim_waits(${runner.id}::uuid, 1)`
      yield* runner.sql`SELECT dispatched FROM tenure.dispatch_waits(${runner.id}::uuid, ARRAY[${id}::uuid])`
      yield* K.claim(runner, 1)
      yield* K.settle(runner, [{ id, attempt: 2, outcome: "retry", delayMs: 3_600_000 }])
      assert.deepStrictEqual(yield* retain(owner), nothing, "delayed")
      yield* api`SELECT tenure.cancel(${id}::uuid)`
      // The bucket itself is old enough for this one; its only item is not.
      yield* owner`UPDATE tenure.bucket SET upper_at = upper_at - interval '1 hour' WHERE upper_at > tenure.clock() - interval '1 minute'
                      AND upper_at < tenure.clock()`
      assert.deepStrictEqual(yield* retain(owner, "30 s"), nothing, "ended a moment ago")
      assert.strictEqual(yield* K.placeOf(owner, id), "cancelled")
      assert.deepStrictEqual(yield* retain(owner), { ...nothing, emptied: 1 })
      assert.strictEqual(yield* K.placeOf(owner, id), "nowhere")
    })
  )

  it.live(
    "keeps a bucket as long as one of its items is in quarantine and nobody has dealt with it",
    () =>
      Effect.gen(function* () {
        const { api, database, owner } = yield* lastWeek
        const quarantine = Effect.gen(function* () {
          const id = yield* K.enqueueOne(api, "q", "1")
          const lost = yield* K.executorOf(database, { queue: "q", recoveryMax: 1 })
          yield* K.claim(lost, 1)
          yield* K.loseExecutor(owner, lost.id)
          return id
        })
        const settled = yield* quarantine
        const closed = yield* quarantine
        const settler = yield* K.executorOf(database, { queue: "q" })
        assert.deepStrictEqual(yield* retain(owner), nothing, "both open")
        yield* settler.sql`BEGIN`
        yield* settler.sql`SELECT key FROM tenure.begin_settlement(${settled}::uuid)`
        yield* settler.sql`SELECT tenure.end_settlement(${settled}::uuid)`
        yield* api`SELECT tenure.close_quarantine(${closed}::uuid)`
        const settling = yield* retain(owner)
        assert.deepStrictEqual(settling, { ...nothing, blocked: 1 }, "settled, and not committed")
        yield* settler.sql`COMMIT`
        assert.deepStrictEqual(yield* retain(owner), { ...nothing, emptied: 1 })
        assert.deepStrictEqual(yield* owner`SELECT FROM tenure.quarantine`, [])
      })
  )

  it.live("is not held up by the probe of an executor that nobody here may revoke", () =>
    Effect.gen(function* () {
      const { database, owner, runner } = yield* lastWeek
      // Of versions that nobody accepts: one probe waits, one runs, one has settled just now.
      const dead = yield* Effect.forEach([1, 2, 3], (n) =>
        Effect.flatMap(
          K.executorOf(database, { queue: "q", version: `old ${n}`, validity: "5 minutes" }),
          K.probeOf
        )
      )
      for (const [at, probe] of dead.entries()) {
        yield* probe.sql`SELECT tenure.begin_probe()::text`
        const claimed = at > 0 ? yield* K.claim(probe, 1) : []
        if (at > 1) yield* settleAll(probe, claimed)
      }
      yield* owner`UPDATE tenure.bucket SET upper_at = upper_at - interval '1 hour' WHERE upper_at > tenure.clock() - interval '1 minute'
                      AND upper_at < tenure.clock()`
      assert.deepStrictEqual(yield* retain(owner, "30 s"), { ...nothing, emptied: 1 })
      assert.deepStrictEqual(yield* owner`SELECT FROM tenure.item`, [])
      // Whoever may revoke them later finds nothing amiss.
      for (const { id } of dead) {
        assert.strictEqual((yield* K.loseExecutor(runner.sql, id)).state, "revoked")
      }
      assert.deepStrictEqual(
        yield* owner`SELECT id FROM tenure.ready UNION SELECT id FROM tenure.claimed
                     UNION SELECT executor_id FROM tenure.probe`,
        []
      )
    })
  )

  it.live("takes everything of the items with it, and leaves what is younger", () =>
    Effect.gen(function* () {
      const { api, owner, runner, name } = yield* lastWeek
      const { ids } = yield* K.enqueueAll(api, "q", ["1", "2"], {
        idempotencyKeys: ["a", "b"],
        deadlinesMs: [60_000, 60_000]
      })
      const claimed = yield* K.claim(runner, 2)
      yield* K.checkpoint(
        runner,
        claimed.map((item) => ({ ...item, name: "n", value: "1" }))
      )
      yield* owner`SELECT tenure.await_items(${[...(ids ?? [])]}::text[]::uuid[], 'nobody')`
      yield* owner`SELECT tenure.watch_progress(${[...(ids ?? [])]}::text[]::uuid[], 'nobody')`
      const reportAll = (items: ReadonlyArray<K.Claimed>) =>
        runner.sql`SELECT FROM tenure.report_progress(
          ${K.array(items.map(({ id }) => id))}::text::uuid[],
          ${K.array(items.map(({ attempt }) => attempt))}::text::int[],
          ${K.array(items.map(() => 1))}::text::int[], ${K.array(items.map(() => "1"))}::text::text[])`
      yield* reportAll(claimed)
      yield* owner`INSERT INTO tenure.cancel_request VALUES (${ids?.[0] ?? ""}::uuid, tenure.clock())`
      // Waits that their handlers have given up, and what was told too late.
      for (const id of ids ?? []) {
        yield* runner.sql`
          SELECT a.status FROM tenure.ask_waits(ARRAY[${id}::uuid], ARRAY[1], ARRAY['w'], ARRAY['event'], NULL) a`
        yield* runner.sql`SELECT i.status FROM tenure.invoke(${id}::uuid, 1, 'v', NULL, 'q', '9', 0, NULL, NULL) i`
        yield* api`SELECT tenure.signal(${id}::uuid, 'late')`
      }
      yield* settleAll(runner, yield* K.claim(runner, 2))
      yield* owner`SELECT public.make_ids('0')`
      const young = yield* K.enqueueAll(api, "q", ["3"], {
        idempotencyKeys: ["c"],
        deadlinesMs: [60_000]
      })
      const third = yield* K.claim(runner, 1)
      yield* reportAll(third)
      yield* settleAll(runner, [...claimed, ...third])
      yield* owner`INSERT INTO tenure.cancel_request VALUES (${ids?.[1] ?? ""}::uuid, tenure.clock())`

      assert.deepStrictEqual(yield* retain(owner), { ...nothing, emptied: 1 })
      const left = yield* owner`
        SELECT (SELECT array_agg(id::text) FROM tenure.item) AS item,
               (SELECT array_agg(id::text) FROM tenure.done) AS done,
               (SELECT count(*)::int FROM tenure.step) AS step,
               (SELECT array_agg(key) FROM tenure.item_key) AS keys,
               (SELECT array_agg(id::text) FROM tenure.deadline) AS deadline,
               (SELECT array_agg(item_id::text) FROM tenure.progress) AS progress,
               (SELECT count(*)::int FROM tenure.wait) + (SELECT count(*)::int FROM tenure.signal)
                 + (SELECT count(*)::int FROM tenure.invocation) AS waits,
               (SELECT count(*)::int FROM tenure.waiter) + (SELECT count(*)::int FROM tenure.cancel_request)
               + (SELECT count(*)::int FROM tenure.progress_waiter) AS rest`
      const kept = young.ids
      assert.deepStrictEqual(left, [
        {
          item: kept,
          done: kept,
          step: 0,
          keys: ["c"],
          deadline: kept,
          progress: kept,
          waits: 0,
          rest: 0
        }
      ])
      // The key is free again.
      assert.notInclude(ids ?? [], yield* K.enqueueOne(api, "q", "9", { idempotencyKey: "a" }))
      assert.deepStrictEqual(yield* retain(owner), { ...nothing, dropped: 1 })
      assert.deepStrictEqual(
        yield* owner`SELECT relname FROM pg_class WHERE relname LIKE ${"%_" + name} AND relkind = 'r'`,
        []
      )
      assert.deepStrictEqual(yield* retain(owner), nothing)
    })
  )

  it.live(
    "moves on what is not over, with all that belongs to it, and drops the rest of its bucket",
    () =>
      Effect.gen(function* () {
        const { api, database, owner, runner } = yield* lastWeek
        const open = yield* K.enqueueOne(api, "q", `"open"`)
        const lost = yield* K.executorOf(database, { queue: "q", recoveryMax: 1 })
        yield* K.claim(lost, 1)
        yield* K.checkpoint(lost, [{ id: open, attempt: 1, name: "n", value: `"of open"` }])
        yield* K.loseExecutor(owner, lost.id)
        const failed = yield* K.enqueueMany(api, "q", 2)
        yield* settleAll(runner, yield* K.claim(runner, 2), "failed")
        const [held] = yield* owner<{ id: string; lease: string }>`
        SELECT id::text AS id, lease::text AS lease
          FROM tenure.take_dead_letters('q', 'DeclaredError', NULL, NULL, NULL, '1 day', 1, 'somebody')`
        const { ids } = yield* K.enqueueAll(api, "q", ["1", "2", `"later"`, `"ready"`, "5", "6"], {
          idempotencyKeys: ["a", "b", "c", "d", "e", "f"],
          deadlinesMs: Array.from({ length: 6 }, () => 600_000)
        })
        const [over, , parked, ready, asleep, pulled] = ids ?? []
        const claimed = yield* K.claim(runner, 3)
        yield* K.checkpoint(
          runner,
          claimed.map((item) => ({ ...item, name: "n", value: `"of ${item.id}"` }))
        )
        yield* K.settle(
          runner,
          claimed.map(({ attempt, id }) =>
            id === parked
              ? { id, attempt, outcome: "retry", delayMs: 2_592_000_000 }
              : { id, attempt, outcome: "completed" }
          )
        )
        // One is in a durable wait, and one in the hands of a pull session.
        yield* owner`
          WITH gone AS (DELETE FROM tenure.ready WHERE id = ${asleep ?? ""}::uuid RETURNING *)
          INSERT INTO tenure.parked (id, state, names, due_at, parked_at, lane_id, rank, seq, attempt, failures)
          SELECT id, 'sleeping', '{n}', tenure.clock() + interval '1 year', tenure.clock(), lane_id, rank, seq, 1, 0 FROM gone`
        yield* owner`
          INSERT INTO tenure.wait (item_id, name, kind) SELECT u, 'n', 'event'
            FROM unnest(${[asleep ?? "", over ?? ""]}::text[]::uuid[]) u`
        yield* owner`
          WITH gone AS (DELETE FROM tenure.ready WHERE id = ${pulled ?? ""}::uuid RETURNING *)
          INSERT INTO tenure.capacity_lease (item_id, queue_id, session, version, execution_seq, state, expires_at, lane_id,
                                             rank, seq, failures, losses, stuck, reserved_at)
          SELECT id, ${runner.queueId}::int, gen_random_uuid(), 'v1', 1, 'reserved', tenure.clock(), lane_id, rank, seq, 0, 0,
                 0, tenure.clock() FROM gone`
        assert.deepStrictEqual(
          yield* owner`
            SELECT r.state FROM unnest(${[asleep ?? "", pulled ?? ""]}::text[]::uuid[]) u(id)
             CROSS JOIN LATERAL tenure.item_rows(ARRAY[u.id]) r`,
          [{ state: "sleeping" }, { state: "leased" }]
        )
        const kept = [
          open,
          held?.id ?? "",
          parked ?? "",
          ready ?? "",
          asleep ?? "",
          pulled ?? ""
        ].sort()
        // More than may be moved at once are no remainder.
        assert.deepStrictEqual(yield* retain(owner, "0", 3), nothing)
        assert.deepStrictEqual(yield* retain(owner), { ...nothing, moved: 6 })
        assert.deepStrictEqual(
          yield* owner`
          SELECT (SELECT array_agg(id::text ORDER BY id) FROM tenure.item) AS item,
                 (SELECT array_agg(id::text ORDER BY id) FROM tenure.done) AS done,
                 (SELECT array_agg(item_id::text ORDER BY item_id) FROM tenure.step) AS step,
                 (SELECT array_agg(key ORDER BY key) FROM tenure.item_key) AS keys,
                 (SELECT array_agg(item_id::text) FROM tenure.wait) AS waits,
                 (SELECT array_agg(id::text ORDER BY id) FROM tenure.deadline) AS deadline,
                 (SELECT array_agg(item_id::text) FROM tenure.quarantine) AS quarantine,
                 (SELECT array_agg(item_id::text) FROM tenure.dead_letter_lease) AS lease`,
          [
            {
              item: kept,
              done: [open, held?.id ?? ""].sort(),
              step: [open, parked ?? ""].sort(),
              keys: ["c", "d", "e", "f"],
              waits: [asleep],
              deadline: [parked ?? "", ready ?? "", asleep ?? "", pulled ?? ""].sort(),
              quarantine: [open],
              lease: [held?.id]
            }
          ]
        )
        assert.strictEqual(yield* K.placeOf(owner, over ?? ""), "nowhere")
        assert.lengthOf(failed, 2)
        assert.deepStrictEqual(yield* retain(owner), nothing, "once")

        // Wherever they were, they go on as if nothing had been.

        yield* owner`
          WITH woken AS (DELETE FROM tenure.parked RETURNING id, lane_id, rank, seq),
               back AS (DELETE FROM tenure.capacity_lease RETURNING item_id, lane_id, rank, seq)
          INSERT INTO tenure.ready (id, lane_id, rank, seq, attempt, failures, losses, stuck)
          SELECT *, 1, 0, 0, 0 FROM (SELECT * FROM woken UNION ALL SELECT * FROM back) x`
        yield* owner`UPDATE tenure.delayed SET due_at = tenure.clock() - interval '1 s'`
        yield* runner.sql`SELECT promoted FROM tenure.promote(10)`
        yield* owner`SELECT tenure.reinject_dead_letter(${held?.id ?? ""}::uuid, ${held?.lease ?? ""}::uuid)`
        yield* owner`SELECT tenure.retry(${open}::uuid)`
        const again = yield* K.claim(runner, 10)
        assert.deepStrictEqual(again.map(({ id }) => id).sort(), kept)
        assert.strictEqual(again.find(({ id }) => id === parked)?.payload, `"later"`)
        assert.deepStrictEqual(
          yield* runner.sql`SELECT value #>> '{}' AS value FROM tenure.checkpoints(${parked ?? ""}::uuid)`,
          [{ value: `of ${parked}` }]
        )
        yield* settleAll(runner, again)
        assert.deepStrictEqual(yield* retain(owner), { ...nothing, emptied: 1 })
        assert.deepStrictEqual(yield* retain(owner), { ...nothing, dropped: 1 })
        assert.deepStrictEqual(yield* owner`SELECT FROM tenure.item`, [])
      })
  )

  it.live("keeps the outcome of what has ended only just, however old the item is", () =>
    Effect.gen(function* () {
      const { api, owner, runner } = yield* lastWeek
      const [first, second] = yield* K.enqueueMany(api, "q", 2)
      yield* settleAll(runner, yield* K.claim(runner, 1))
      yield* owner`UPDATE tenure.done SET finished_at = finished_at - interval '1 hour'`
      yield* settleAll(runner, yield* K.claim(runner, 1))
      yield* owner`UPDATE tenure.bucket SET upper_at = upper_at - interval '1 hour' WHERE upper_at > tenure.clock() - interval '1 minute'
                      AND upper_at < tenure.clock()`
      assert.deepStrictEqual(yield* retain(owner, "30 s"), { ...nothing, moved: 1 })
      assert.deepStrictEqual(yield* K.placesOf(owner, [first ?? "", second ?? ""]), {
        [first ?? ""]: "nowhere",
        [second ?? ""]: "completed"
      })
    })
  )

  it.live(
    "shows whoever waits for the move what was moved: no checkpoint is missed, and no payload",
    () =>
      Effect.gen(function* () {
        const { api, owner, runner, name, database } = yield* lastWeek
        const reader = yield* K.executorOf(database, { queue: "q" })
        const [running, waiting] = yield* K.enqueueMany(api, "q", 2)
        const [claimed] = yield* K.claim(runner, 1)
        yield* K.checkpoint(runner, [
          { id: running ?? "", attempt: claimed?.attempt ?? 0, name: "n", value: "1" }
        ])
        const checkpoints = runner.sql`SELECT name FROM tenure.checkpoints(${running ?? ""}::uuid)`
        yield* checkpoints
        const pids = [yield* K.pidOf(runner.sql), yield* K.pidOf(reader.sql)] as const
        yield* owner`BEGIN`
        yield* owner.unsafe(
          `LOCK TABLE tenure.item_${name}, tenure.done_${name}, tenure.step_${name} IN ACCESS EXCLUSIVE MODE`
        )
        const reading = yield* Effect.forkChild(checkpoints)
        const claiming = yield* Effect.forkChild(K.claim(reader, 5))
        const observer = yield* K.sessionOf(database, "owner")
        for (const pid of pids) yield* K.whenBlocked(observer, pid)
        yield* owner`SELECT tenure.thin_bucket(${name}, ${[running ?? "", waiting ?? ""]}::text[]::uuid[])`
        yield* owner`COMMIT`
        assert.deepStrictEqual(yield* Fiber.join(reading), [{ name: "n" }])
        assert.deepStrictEqual(
          (yield* Fiber.join(claiming)).map(({ id, payload }) => [id, payload]),
          [[waiting, "1"]]
        )
      })
  )

  it.live(
    "makes one bucket of neighbours that were thinned, so that a year of them costs one partition",
    () =>
      Effect.gen(function* () {
        const { api, database, owner, runner } = yield* lastWeek
        const count = owner<{ n: number }>`
        SELECT count(*)::int AS n FROM pg_inherits WHERE inhparent = 'tenure.step'::regclass`
        const buckets = K.first(yield* count).n
        const week = Effect.fnUntraced(function* (payload: string) {
          yield* K.enqueueOne(api, "q", "0")
          const id = yield* K.enqueueOne(api, "q", payload, { delayMs: 1, idempotencyKey: payload })
          yield* settleAll(runner, yield* K.claim(runner, 1))
          return id
        })
        const last = yield* week(`"last week"`)
        yield* owner`SELECT public.make_ids('0')`
        const present = yield* week(`"this week"`)
        // When this week is over too.
        const { hours } = K.first(
          yield* owner<{ hours: number }>`
          SELECT ceil(extract(epoch FROM upper_at - tenure.clock()) / 3600)::int AS hours FROM tenure.bucket
           WHERE lower_at <= tenure.clock() AND upper_at > tenure.clock()`
        )
        yield* owner.unsafe(`
        CREATE OR REPLACE FUNCTION tenure.clock() RETURNS timestamptz LANGUAGE sql VOLATILE PARALLEL SAFE
        AS $$ SELECT pg_catalog.clock_timestamp() + interval '${hours} hours' $$`)
        assert.deepInclude(yield* retain(owner), { moved: 1 })
        assert.deepInclude(yield* retain(owner), { moved: 1 })
        const made = K.first(yield* count).n - buckets
        assert.deepStrictEqual(yield* retain(owner), { ...nothing, merged: 1 })
        assert.deepStrictEqual(yield* retain(owner), nothing)
        assert.strictEqual(K.first(yield* count).n, buckets + made - 1)
        assert.deepStrictEqual(
          yield* owner`SELECT name FROM tenure.unfenced_tables() WHERE name LIKE 'tenure.%'`,
          []
        )
        const later = yield* K.executorOf(database, { queue: "q" })
        yield* later.sql`SELECT promoted FROM tenure.promote(10)`
        const claimed = yield* K.claim(later, 5)
        assert.deepStrictEqual(
          claimed.map(({ id, payload }) => [id, payload]),
          [
            [last, `"last week"`],
            [present, `"this week"`]
          ]
        )
        yield* settleAll(later, claimed.slice(0, 1))
        yield* owner`UPDATE tenure.done SET finished_at = finished_at - interval '1 hour'`
        assert.deepStrictEqual(yield* retain(owner), nothing, "one of this week's lives")
        yield* settleAll(later, claimed.slice(1))
        yield* owner`UPDATE tenure.done SET finished_at = finished_at - interval '1 hour'`
        assert.deepStrictEqual(yield* retain(owner), { ...nothing, emptied: 1 })
        assert.deepStrictEqual(yield* retain(owner), { ...nothing, dropped: 1 })
      })
  )

  it.live(
    "empties beside a user's open transaction; a plain DROP waits for it, and everybody behind the DROP",
    () =>
      Effect.gen(function* () {
        const { database, api, owner, runner, name } = yield* lastWeek
        yield* K.enqueueMany(api, "q", 1)
        yield* settleAll(runner, yield* K.claim(runner, 1))
        yield* owner`SELECT public.make_ids('0')`
        // A user's transaction that has written to all the parents, in younger buckets.
        yield* K.enqueueMany(api, "q", 2)
        const [first] = yield* K.claim(runner, 1)
        yield* runner.sql`BEGIN`
        if (first !== undefined) {
          yield* K.checkpoint(runner, [{ ...first, name: "n", value: "1" }])
          yield* settleAll(runner, [first])
        }
        yield* K.enqueueOne(runner.sql, "q", "1")

        assert.deepStrictEqual(yield* retain(owner), { ...nothing, emptied: 1 })
        assert.deepStrictEqual(
          yield* retain(owner),
          { ...nothing, blocked: 1 },
          "and gives up the drop"
        )

        const dropper = yield* K.sessionOf(database, "owner")
        const waiter = yield* K.sessionOf(database, "api")
        const pids = [yield* K.pidOf(dropper), yield* K.pidOf(waiter)] as const
        const drop = yield* Effect.forkChild(dropper.unsafe(`DROP TABLE tenure.item_${name}`))
        yield* K.whenBlocked(owner, pids[0])
        const enqueue = yield* Effect.forkChild(K.enqueueOne(waiter, "q", "1"))
        yield* K.whenBlocked(owner, pids[1])
        yield* owner`SELECT pg_cancel_backend(${pids[0]}::int)`
        assert.strictEqual(yield* K.stateOf(Fiber.join(drop)), "57014")
        yield* Fiber.join(enqueue)

        yield* runner.sql`COMMIT`
        assert.deepStrictEqual(yield* retain(owner), { ...nothing, dropped: 1 })
      })
  )

  it.live("does not drop the payload of a failed item that an operator brings back meanwhile", () =>
    Effect.gen(function* () {
      const { database, api, owner, runner } = yield* lastWeek
      const id = yield* K.enqueueOne(api, "q", `"payload"`)
      yield* settleAll(runner, yield* K.claim(runner, 1), "failed")
      yield* api`BEGIN`
      yield* api`SELECT tenure.retry(${id}::uuid)`
      assert.deepStrictEqual(yield* retain(owner), { ...nothing, blocked: 1 })

      const sweeper = yield* K.sessionOf(database, "owner")
      const pid = yield* K.pidOf(sweeper)
      // Within its 300 ms the lock is free, and what the sweeper saw before is not so any more.
      // Again and again: on a busy machine nobody sees the one that waits for 300 ms.
      const waiting = yield* Effect.forkChild(
        Effect.repeat(retain(sweeper), { until: ({ blocked }) => blocked === 0 })
      )
      yield* K.whenBlocked(owner, pid)
      yield* api`COMMIT`
      assert.deepStrictEqual(yield* Fiber.join(waiting), nothing)
      assert.deepStrictEqual(
        (yield* K.claim(runner, 1)).map((item) => item.payload),
        [`"payload"`]
      )
    })
  )

  it.live("makes room ahead: every bucket and all its tables, with the fence", () =>
    Effect.gen(function* () {
      const { owner } = yield* lastWeek
      const names = yield* owner<{ name: string }>`
        SELECT name FROM tenure.bucket WHERE lower_at > tenure.clock() + interval '8 days' ORDER BY 1`
      for (const { name } of names) {
        for (const parent of ["item", "done", "step"])
          yield* owner.unsafe(`DROP TABLE tenure.${parent}_${name}`)
        yield* owner`DELETE FROM tenure.bucket WHERE name = ${name}`
      }
      assert.isAtLeast(names.length, 5)
      assert.deepStrictEqual(yield* retain(owner), { ...nothing, made: names.length, emptied: 1 })
      assert.deepStrictEqual(
        yield* owner`SELECT c.relname AS name FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
                      WHERE i.inhparent IN ('tenure.item'::regclass, 'tenure.done'::regclass, 'tenure.step'::regclass)
                        AND (SELECT count(*) FROM pg_trigger t WHERE t.tgrelid = c.oid AND t.tgenabled = 'A'
                               AND t.tgtype = 62 AND t.tgfoid = 'tenure.fence()'::regprocedure) <> 1`,
        []
      )
      assert.deepStrictEqual(
        yield* owner`SELECT name FROM tenure.unfenced_tables() WHERE name LIKE 'tenure.%'`,
        []
      )
      // One made by hand has none, and is found.
      yield* owner`CREATE TABLE tenure.item_by_hand PARTITION OF tenure.item
                     FOR VALUES FROM ('ffffffff-ffff-7000-8000-000000000000') TO (MAXVALUE)`
      assert.deepStrictEqual(
        yield* owner`SELECT name FROM tenure.unfenced_tables() WHERE name LIKE 'tenure.%'`,
        [{ name: "tenure.item_by_hand" }]
      )
    })
  )

  it.live("eight sweepers at once empty and drop a bucket once, and none of them fails", () =>
    Effect.gen(function* () {
      const { database, api, owner, runner } = yield* lastWeek
      yield* K.enqueueMany(api, "q", 2000, {
        idempotencyKeys: Array.from({ length: 2000 }, (_, n) => `k${n}`)
      })
      yield* settleAll(runner, yield* K.claim(runner, 2000))
      const sweepers = yield* Effect.all(
        Array.from({ length: 8 }, () => K.sessionOf(database, "worker", runner.id))
      )
      const reports = yield* Effect.forEach(
        sweepers,
        (sql) => Effect.all([retain(sql), retain(sql)]),
        { concurrency: "unbounded" }
      )
      const total = (of: keyof Retained) =>
        reports.flat().reduce((sum, report) => sum + report[of], 0)
      assert.deepStrictEqual([total("emptied"), total("dropped")], [1, 1])
      assert.deepStrictEqual(yield* owner`SELECT FROM tenure.item_key`, [])
    })
  )
})
