/**
 * Goal: the one statement that an idle process sends every second sees everything that moves by
 * itself, and costs next to nothing while nothing does.
 * Method: what it answers and does, and the server's own account of what it has read and written.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect } from "effect"
import { freshDatabase } from "../support/Postgres.ts"
import * as K from "./kernel.ts"

const setting = Effect.gen(function* () {
  const database = yield* freshDatabase
  return {
    owner: yield* K.sessionOf(database, "owner"),
    api: yield* K.sessionOf(database, "api"),
    runner: yield* K.executorOf(database, { queue: "q", accepted: ["v0"] }),
    other: yield* K.executorOf(database, { queue: "other" })
  }
})

interface Looked {
  readonly promoted: number
  readonly promoted_queues: ReadonlyArray<number>
  readonly expired: number
  readonly expired_ids: ReadonlyArray<string>
  readonly next_due_ms: number | null
  readonly cancel_ids: ReadonlyArray<string>
  readonly cancel_attempts: ReadonlyArray<number>
  readonly waiting_lanes: ReadonlyArray<number>
}

const look = (runner: K.Executor, lanes: ReadonlyArray<number> = []) =>
  Effect.map(
    runner.sql<Looked>`
      SELECT promoted, promoted_queues, expired, expired_ids::text[] AS expired_ids, next_due_ms,
             cancel_ids::text[] AS cancel_ids, cancel_attempts, waiting_lanes
        FROM tenure.look(${runner.id}::uuid, 100, ${K.array(lanes)}::text::int[])`,
    K.first
  )

const nothing: Looked = {
  promoted: 0,
  promoted_queues: [],
  expired: 0,
  expired_ids: [],
  next_due_ms: null,
  cancel_ids: [],
  cancel_attempts: [],
  waiting_lanes: []
}

const hour = 3_600_000

describe("a look", () => {
  it.live("promotes, expires, and tells what to cancel, all at once", () =>
    Effect.gen(function* () {
      const { api, other, owner, runner } = yield* setting
      assert.deepStrictEqual(yield* look(runner), nothing)
      const [running = ""] = yield* K.enqueueMany(api, "q", 1)
      yield* K.claim(runner, 1)
      yield* api`SELECT tenure.cancel(${running}::uuid)`
      const { ids } = yield* K.enqueueAll(api, "q", ["1", "2", "3", "4"], {
        delaysMs: [hour, hour, null, 2 * hour],
        deadlinesMs: [null, null, -1, null]
      })
      const [due = "", , late = ""] = ids ?? []
      yield* owner`UPDATE tenure.delayed SET due_at = tenure.clock() WHERE id = ${due}::uuid`
      const looked = yield* look(runner)
      assert.deepStrictEqual(
        { ...looked, next_due_ms: null },
        {
          ...nothing,
          promoted: 1,
          promoted_queues: [runner.queueId],
          expired: 1,
          expired_ids: [late],
          cancel_ids: [running],
          cancel_attempts: [1]
        }
      )
      // Of what is left: the next item in an hour, no deadline.
      assert.isAtMost(looked.next_due_ms ?? 0, hour)
      assert.isAtLeast(looked.next_due_ms ?? 0, hour - 60_000)
      assert.deepStrictEqual((yield* look(other)).cancel_ids, [], "somebody else's")
      yield* K.enqueueOne(api, "q", "5", { deadlineMs: 1000 })
      assert.isAtMost((yield* look(runner)).next_due_ms ?? hour, 1000)
    })
  )

  it.live("names the lanes that have something waiting, of those it is asked about", () =>
    Effect.gen(function* () {
      const { api, other, owner, runner } = yield* setting
      const all = [...runner.lanes, ...runner.suspectLanes]
      const waiting = Effect.map(look(runner, all), (looked) => looked.waiting_lanes)
      assert.deepStrictEqual(yield* waiting, [])
      yield* K.enqueueMany(api, "other", 3)
      assert.deepStrictEqual(yield* waiting, [], "of another queue")
      yield* K.enqueueMany(api, "q", 2, { delaysMs: [hour, null] })
      const unstarted = runner.lanes[0] ?? 0
      assert.deepStrictEqual(yield* waiting, [unstarted])
      const [item] = yield* K.claim(runner, 1)
      assert.deepStrictEqual(yield* waiting, [], "running or delayed")
      yield* K.settle(runner, [
        { id: item?.id ?? "", attempt: 1, outcome: "retry", lane: runner.startedLane }
      ])
      assert.deepStrictEqual(yield* waiting, [runner.startedLane])
      yield* K.claim(runner, 1)
      yield* K.loseExecutor(owner, runner.id)
      assert.deepStrictEqual(
        (yield* look(other, all)).waiting_lanes,
        [runner.suspectLane],
        "a suspect"
      )
    })
  )

  it.live("writes nothing while nothing is due: not even a lock", () =>
    Effect.gen(function* () {
      const { api, owner, runner } = yield* setting
      yield* K.enqueueMany(api, "q", 5, { delaysMs: [hour, hour, null, null, null] })
      yield* K.enqueueOne(api, "q", "1", { deadlineMs: hour })
      const transaction = Effect.gen(function* () {
        yield* runner.sql`BEGIN`
        yield* look(runner, runner.lanes)
        const { written } = K.first(
          yield* runner.sql<{ written: boolean }>`
            SELECT pg_current_xact_id_if_assigned() IS NOT NULL AS written`
        )
        yield* runner.sql`ROLLBACK`
        return written
      })
      assert.isFalse(yield* transaction)
      // As it was written first: the empty INSERT goes through the fence.
      yield* K.spoil(owner, "expire_deadlines", "IF seen <> '{}' THEN", "IF true THEN")
      assert.isTrue(yield* transaction)
    })
  )

  it.live("reads no more of a lane with 20,000 waiting than of one with one", () =>
    Effect.gen(function* () {
      const { api, owner, runner } = yield* setting
      const read = Effect.gen(function* () {
        yield* runner.sql`SELECT pg_stat_force_next_flush()::text`
        yield* owner`SELECT pg_stat_clear_snapshot()::text`
        const rows = yield* owner<{ entries: number; rows: number }>`
          SELECT (SELECT idx_tup_read::int FROM pg_stat_user_indexes WHERE indexrelname = 'ready_pkey') AS entries,
                 (SELECT seq_tup_read::int FROM pg_stat_user_tables WHERE relid = 'tenure.ready'::regclass) AS rows`
        return K.first(rows)
      })
      yield* owner`ALTER TABLE tenure.ready SET (autovacuum_enabled = off)`
      // What autoanalyze sees of a queue at the wrong moment.
      yield* owner`ANALYZE tenure.ready`
      yield* K.enqueueMany(api, "q", 20_000)
      const before = yield* read
      for (let turn = 0; turn < 8; turn++) {
        const { waiting_lanes } = yield* look(runner, [...runner.lanes, ...runner.suspectLanes])
        assert.deepStrictEqual(waiting_lanes, runner.lanes.slice(0, 1))
      }
      const after = yield* read
      assert.isAtMost(after.entries - before.entries, 8)
      assert.strictEqual(after.rows, before.rows)
    })
  )
})
