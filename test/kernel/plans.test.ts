/**
 * Goal: what the statistics say cannot turn a lookup into a scan. Autoanalyze sees the tables of a
 * queue empty at one moment and full at the next, and a scan grows with every dead row.
 * Method: after ANALYZE on empty and on full tables each operation runs, and the server's own counters
 * say how many sequential scans it has made and how many index entries it has read.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect } from "effect"
import { freshDatabase } from "../support/Postgres.ts"
import * as K from "./kernel.ts"

const setting = Effect.gen(function* () {
  const database = yield* freshDatabase
  return {
    database,
    owner: yield* K.sessionOf(database, "owner"),
    api: yield* K.sessionOf(database, "api"),
    runner: yield* K.executorOf(database, { queue: "q" })
  }
})

// Autoanalyze of its own accord would make the order of things a matter of luck.
const quiet = (owner: K.Sql) =>
  Effect.forEach(["ready", "claimed", "delayed"], (table) =>
    owner.unsafe(`ALTER TABLE tenure.${table} SET (autovacuum_enabled = off)`)
  )

const analyze = (owner: K.Sql) =>
  Effect.forEach(
    [
      "item",
      "done",
      "step",
      "ready",
      "claimed",
      "delayed",
      "deadline",
      "item_key",
      "lane",
      "quarantine"
    ],
    (table) => owner.unsafe(`ANALYZE tenure.${table}`)
  )

/** Sequential scans of the tables that grow. Other sessions report theirs when they are told to. */
const scans = Effect.fnUntraced(function* (owner: K.Sql, others: ReadonlyArray<K.Sql>) {
  for (const sql of others) yield* sql`SELECT pg_stat_force_next_flush()::text`
  yield* owner`SELECT pg_stat_force_next_flush()::text`
  yield* owner`SELECT pg_stat_clear_snapshot()::text`
  const rows = yield* owner<{ name: string; n: number }>`
    SELECT relname AS name, coalesce(seq_scan, 0)::int AS n FROM pg_stat_user_tables
     WHERE schemaname = 'tenure' AND relname ~ '^(item|done|step)(_p[0-9]+)?$|^(ready|claimed|delayed|item_key|quarantine)$'`
  return Object.fromEntries(rows.map((row) => [row.name, row.n]))
})

const entriesRead = Effect.fnUntraced(function* (
  owner: K.Sql,
  others: ReadonlyArray<K.Sql>,
  index: string
) {
  for (const sql of others) yield* sql`SELECT pg_stat_force_next_flush()::text`
  yield* owner`SELECT pg_stat_clear_snapshot()::text`
  const rows = yield* owner<{ n: number }>`
    SELECT idx_tup_read::int AS n FROM pg_stat_user_indexes WHERE indexrelname = ${index}`
  return K.first(rows).n
})

const of = ({ id, attempt }: K.Claimed) => ({ id, attempt })

describe("plans", () => {
  for (const analyzedWhen of ["empty", "full"] as const) {
    it.live(`no operation scans a table that was analyzed when it was ${analyzedWhen}`, () =>
      Effect.gen(function* () {
        const { database, owner, api, runner } = yield* setting
        const keyed = yield* K.executorOf(database, {
          queue: "keyed",
          perKeyLimit: 1,
          globalLimit: 100_000
        })
        const lost = yield* K.executorOf(database, { queue: "q" })
        const probe = yield* K.probeOf(runner)
        yield* Effect.andThen(K.probeOf(lost), lost.sql`SELECT tenure.begin_probe()::text`)
        const sessions = [api, runner.sql, keyed.sql, lost.sql]
        yield* quiet(owner)
        if (analyzedWhen === "empty") yield* analyze(owner)
        yield* K.enqueueMany(api, "q", 9_000)
        yield* K.enqueueMany(api, "keyed", 2_000, {
          keys: Array.from({ length: 2_000 }, (_, n) => `k${n}`)
        })
        yield* K.enqueueMany(api, "q", 2_000, {
          delaysMs: Array.from({ length: 2_000 }, () => 3_600_000)
        })
        yield* K.settle(
          runner,
          (yield* K.claim(runner, 3_000)).map((item, at) => ({
            ...of(item),
            outcome: at % 10 === 0 ? "failed" : "completed"
          }))
        )
        const held = yield* K.claim(runner, 2_000)
        if (analyzedWhen === "full") yield* analyze(owner)
        yield* owner`UPDATE tenure.delayed SET due_at = tenure.clock() - interval '1 s'
                      WHERE id IN (SELECT id FROM tenure.delayed LIMIT 20)`
        yield* owner`
          INSERT INTO tenure.quarantine (item_id, queue_id, quarantined_at, executions, reason, due_at)
          SELECT id, queue_id, tenure.clock(), 4, 'MAX_RECOVERY_ATTEMPTS_EXCEEDED', tenure.clock() FROM tenure.done`
        const quarantined = yield* owner<{ id: string }>`
          SELECT item_id::text AS id FROM tenure.quarantine LIMIT 8`
        const queueIds = K.array([runner.queueId, keyed.queueId])

        const before = yield* scans(owner, sessions)
        // More than five times each, so that generic plans are tried as well.
        for (let turn = 0; turn < 8; turn++) {
          const { ids } = yield* K.enqueueAll(api, "q", ["1", "2"], {
            idempotencyKeys: [`a${turn}`, `b${turn}`],
            deadlinesMs: [-1, 60_000]
          })
          const claimed = yield* K.claim(runner, 20)
          yield* K.checkpoint(
            runner,
            claimed.map((item) => ({ ...of(item), name: "n", value: "1" }))
          )
          yield* K.settle(runner, [
            ...claimed.map(of),
            // Answered one by one: the slow way through the function.
            { id: claimed[0]?.id ?? "", attempt: 99 }
          ])
          yield* K.settle(keyed, (yield* K.claim(keyed, 20)).map(of))
          yield* runner.sql`SELECT promoted FROM tenure.promote(2)`
          yield* runner.sql`SELECT expired FROM tenure.expire_deadlines(100)`
          yield* runner.sql`
            SELECT promoted FROM tenure.look(${runner.id}::uuid, 2, ${K.array(runner.lanes)}::text::int[])`
          yield* runner.sql`SELECT tenure.begin_probe()::text`
          yield* K.settle(runner, (yield* K.claim(probe, 1)).map(of))
          yield* runner.sql`SELECT tenure.end_probe()`
          yield* api`SELECT tenure.cancel(${ids?.[1] ?? ""}::uuid)`
          yield* api`SELECT tenure.cancel(${held[turn]?.id ?? ""}::uuid)`
          yield* api`SELECT tenure.retry(${ids?.[0] ?? ""}::uuid)`
          yield* api`SELECT settled FROM tenure.item_outcome(${[...(ids ?? [])]}::text[]::uuid[])`
          yield* runner.sql`SELECT name FROM tenure.checkpoints(${held[turn]?.id ?? ""}::uuid)`
          yield* runner.sql`SELECT id::text FROM tenure.claims_of(${runner.id}::uuid, interval '0', 10)`
          yield* runner.sql`SELECT failures FROM tenure.take_settlements(${queueIds}::text::int[], '1 s', '1 s', 9)`
          yield* runner.sql`SELECT key FROM tenure.begin_settlement(${quarantined[turn]?.id ?? ""}::uuid)`
          yield* runner.sql`SELECT tenure.end_settlement(${quarantined[turn]?.id ?? ""}::uuid)`
          yield* runner.sql`SELECT tenure.settlement_failed(${quarantined[turn]?.id ?? ""}::uuid, 'x')`
          yield* api`SELECT tenure.close_quarantine(${quarantined[turn]?.id ?? ""}::uuid)`
          for (const state of [null, "available", "leased", "delayed", "failed", "completed"]) {
            yield* api`SELECT state FROM tenure.list_items('q', ${state}::text, NULL, NULL, NULL, NULL, 20)`
          }
          yield* api`SELECT failed FROM tenure.queue_overview(100)`
          yield* api`SELECT version FROM tenure.wait_facts(${ids?.[1] ?? ""}::uuid)`
          yield* api`SELECT reason FROM tenure.dead_letters('q', NULL, NULL, NULL, NULL, NULL, 20, true)`
          yield* api`SELECT tenure.release_dead_letter(t.id, t.lease)
                       FROM tenure.take_dead_letters('q', NULL, NULL, NULL, NULL, '1 s', 2, 'me') t`
          yield* api`SELECT processed FROM tenure.redrive_dead_letters('q', NULL, NULL, NULL, NULL, NULL, 2)`
          yield* api`SELECT processed FROM tenure.purge_dead_letters('q', NULL, NULL, NULL, NULL, NULL, 2)`
        }
        yield* K.claim(lost, 100)
        yield* K.loseExecutor(runner.sql, lost.id)
        yield* runner.sql`SELECT handed_back FROM tenure.release_executor(${runner.id}::uuid)`
        assert.deepStrictEqual(yield* scans(owner, sessions), before)
      })
    )
  }

  it.live("the counters would show it: the same claim without its settings scans", () =>
    Effect.gen(function* () {
      const { owner, api, runner } = yield* setting
      yield* quiet(owner)
      yield* analyze(owner)
      yield* K.enqueueMany(api, "q", 5_000)
      const held = yield* K.claim(runner, 1_000)
      yield* K.settle(runner, held.slice(0, 100).map(of))
      const before = yield* scans(owner, [api, runner.sql])
      // The settle that one writes first, planned with what ANALYZE saw.
      yield* owner`DELETE FROM tenure.claimed c USING unnest(${held.map((item) => item.id)}::text[]::uuid[]) u(id)
                    WHERE c.id = u.id`
      const after = yield* scans(owner, [api, runner.sql])
      assert.notDeepEqual(after, before)
    })
  )

  it.live(
    "a promotion reads no more than what is due; with the clock in its predicate it reads everything",
    () =>
      Effect.gen(function* () {
        const { owner, api, runner } = yield* setting
        yield* quiet(owner)
        yield* K.enqueueMany(api, "q", 20_000, {
          delaysMs: Array.from({ length: 20_000 }, () => 3_600_000)
        })
        yield* owner`UPDATE tenure.delayed SET due_at = tenure.clock() WHERE id IN (SELECT id FROM tenure.delayed LIMIT 3)`
        yield* analyze(owner)
        const index = "delayed_for_promotion"
        const before = yield* entriesRead(owner, [api, runner.sql], index)
        assert.deepStrictEqual(yield* runner.sql`SELECT promoted FROM tenure.promote(100)`, [
          { promoted: 3 }
        ])
        const read = (yield* entriesRead(owner, [api, runner.sql], index)) - before
        assert.isAtMost(read, 20)

        yield* owner`SET enable_seqscan = off`
        const plan = Effect.fnUntraced(function* (condition: string) {
          const rows = yield* owner.unsafe<Record<string, string>>(
            `EXPLAIN SELECT FROM tenure.delayed d WHERE ${condition} ORDER BY d.due_at LIMIT 10`
          )
          return rows.map((row) => Object.values(row).join("")).join("\n")
        })
        assert.include(yield* plan("d.due_at <= tenure.clock()"), "Filter: (due_at <=")
        assert.include(yield* plan("d.due_at <= (SELECT tenure.clock())"), "Index Cond: (due_at <=")
      })
  )
})
