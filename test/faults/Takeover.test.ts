/**
 * Goal: a takeover takes exactly what it may, as it was, whole or not at all (I4, I8; K-076 to K-078,
 * K-085 to K-099, K-217, K-218, K-229, K-231, K-232, K-235).
 * Method: real executors are killed with work in every state. Where nothing must happen, an executor
 * that was lost later is the control: once it has been recovered, the scan has passed the others by.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect } from "effect"
import { SqlClient } from "effect/sql"
import { randomUUID } from "node:crypto"
import { Work } from "./support/Work.ts"
import { run, steady, type World } from "./support/World.ts"

const waits = (gate: string) =>
  [
    { do: "step", name: "before" },
    { do: "wait", gate, onAttempt: [1] },
    { do: "step", name: "after" }
  ] as const

/** Starts a worker with an item, and kills it while the item waits. */
const lose = Effect.fnUntraced(function* (world: World, gate: string, version: string) {
  const worker = yield* world.ready({ version })
  const [item = ""] = yield* world.enqueue([waits(gate)])
  yield* world.until(`${version} runs it`, () => world.sink.waiting(gate) === 1)
  yield* worker.signal("SIGKILL")
  yield* worker.ended
  return { worker, item }
})

const stateOf = (world: World, executor: string | undefined) =>
  Effect.map(world.executor(executor), ({ state }) => state)

const settled = (world: World, item: string) =>
  world.until("it is settled", () =>
    Effect.map(world.count(`tenure.done WHERE id = '${item}'`), (count) => count === 1)
  )

describe.concurrent("a takeover", () => {
  it.live(
    "leaves the work of an incompatible version and of an unknown owner alone",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const old = yield* lose(world, "old", "v1")
          // A claim of somebody who is in no registry, as another runtime would leave it.
          const stranger = randomUUID()
          const [foreign = ""] = yield* world.sql.withTransaction(
            Effect.gen(function* () {
              const ids = yield* world.enqueue([waits("foreign")])
              yield* world.sql`
                WITH taken AS (DELETE FROM tenure.ready WHERE id = ${ids[0] ?? null}::uuid RETURNING *)
                INSERT INTO tenure.claimed (id, queue_id, lane_id, owner, attempt, rank, seq, failures, losses,
                                            stuck, claimed_at)
                SELECT t.id, (SELECT id FROM tenure.queue), t.lane_id, ${stranger}::uuid, 1, t.rank, t.seq, 0, 0,
                       0, now() - interval '1 day' FROM taken t`
              return ids
            })
          )
          const control = yield* lose(world, "control", "v2")
          const newer = yield* world.ready({ version: "v2", settings: steady })
          yield* settled(world, control.item)
          assert.strictEqual(yield* stateOf(world, control.worker.executor()), "revoked")
          const left = yield* world.executor(old.worker.executor())
          assert.deepStrictEqual([left.state, left.is_past], ["active", true])
          assert.strictEqual(yield* world.count("tenure.claimed"), 2)
          assert.strictEqual((yield* world.attempts(old.item)).length, 1)

          const heir = yield* world.ready({ version: "v3", accepts: ["v1"], settings: steady })
          yield* settled(world, old.item)
          const outcomes = yield* world.outcomes
          assert.deepInclude(
            outcomes.find((one) => one.id === old.item),
            { outcome: "completed", attempt: 2, owner: heir.executor() ?? null }
          )
          assert.deepInclude(
            outcomes.find((one) => one.id === control.item),
            { owner: newer.executor() ?? null }
          )
          assert.strictEqual(
            yield* world.count(`tenure.claimed WHERE id = '${foreign}' AND owner = '${stranger}'`),
            1
          )
        })
      ),
    300_000
  )

  it.live(
    "keeps everything an item has, and touches nothing that is over or has not begun",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const lost = yield* world.ready({ slots: 3 })
          const enqueue = (gate: string, options: Parameters<typeof Work.enqueue>[1]) =>
            Work.enqueue({ program: waits(gate), secret: world.secret }, options).pipe(
              Effect.provideService(SqlClient.SqlClient, world.sql),
              Effect.orDie
            )
          const [completed = ""] = yield* world.enqueue([[{ do: "step", name: "quick" }]])
          yield* settled(world, completed)
          const kept = yield* enqueue("kept", {
            priority: 7,
            key: "lane",
            idempotencyKey: "once",
            deadline: "1 hour"
          })
          const late = yield* enqueue("late", { deadline: "1 hour" })
          const cancelled = yield* enqueue("cancelled", {})
          yield* world.until(
            "all three run",
            () =>
              world.sink.waiting("kept") +
                world.sink.waiting("late") +
                world.sink.waiting("cancelled") ===
              3
          )
          yield* lost.signal("SIGKILL")
          yield* lost.ended
          // Both come when the owner can no longer notice: a deadline that passes, and a cancellation.
          yield* world.sql`
            UPDATE tenure.item SET deadline_at = clock_timestamp() WHERE id = ${late}::uuid`
          yield* Work.cancel(cancelled).pipe(
            Effect.provideService(SqlClient.SqlClient, world.sql),
            Effect.orDie
          )
          const waiting = yield* enqueue("waiting", { delay: "1 hour", priority: 3 })
          const facts = () =>
            Effect.orDie(world.sql`
            SELECT i.*, k.key AS held_key, d.due_at AS deadline_due,
                   (SELECT json_agg(s ORDER BY s.name) FROM tenure.step s WHERE s.item_id = i.id) AS steps
              FROM tenure.item i LEFT JOIN tenure.item_key k ON k.item_id = i.id
              LEFT JOIN tenure.deadline d ON d.id = i.id WHERE i.queue_id > 0 ORDER BY i.id`)
          const rows = () =>
            Effect.orDie(world.sql`
            SELECT d.* FROM tenure.done d WHERE d.id = ${completed}::uuid`)
          const delayed = () => Effect.orDie(world.sql`SELECT * FROM tenure.delayed`)
          const place = (table: string) =>
            Effect.orDie(
              world.sql.unsafe(
                `SELECT rank, seq, key, failures FROM tenure.${table} WHERE id = '${kept}'`
              )
            )
          const before = [yield* facts(), yield* rows(), yield* delayed(), yield* place("claimed")]

          // Scans and runs nothing: what comes back is seen before anybody claims it.
          const scanner = yield* world.ready({
            settings: steady,
            faults: [{ at: "queue.claim.committed", do: "stay", turn: 1 }]
          })
          yield* world.until("the executor is revoked", () =>
            Effect.map(stateOf(world, lost.executor()), (state) => state === "revoked")
          )
          assert.deepStrictEqual(
            [yield* facts(), yield* rows(), yield* delayed(), yield* place("ready")],
            before
          )
          assert.deepStrictEqual(
            yield* Effect.orDie(
              world.sql`SELECT id, attempt, losses, stuck FROM tenure.ready WHERE lane_id > 0`
            ),
            // It has a checkpoint of its first attempt.
            [{ id: kept, attempt: 1, losses: 1, stuck: 0 }]
          )
          yield* scanner.signal("SIGKILL")

          yield* world.ready({ settings: steady })
          yield* settled(world, kept)
          const outcomes = yield* world.outcomes
          const of = (id: string) => outcomes.find((one) => one.id === id)
          assert.deepInclude(of(kept), { outcome: "completed", attempt: 2 })
          assert.deepInclude(of(late), {
            outcome: "failed",
            reason: "DeadlineExceeded",
            attempt: 1,
            losses: 1
          })
          assert.deepInclude(of(cancelled), { outcome: "cancelled", attempt: 1, losses: 1 })
          assert.deepStrictEqual(world.sink.arrivalsOf("before").length, 3, "no step ran twice")
          assert.strictEqual(yield* enqueue("kept", { idempotencyKey: "once" }), kept)
          assert.strictEqual(yield* world.count(`tenure.delayed WHERE id = '${waiting}'`), 1)
        })
      ),
    300_000
  )

  it.live(
    "that fails halfway changes nothing, charges nobody, and the next scan finishes it",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const { item, worker } = yield* lose(world, "lost", "v1")
          // The last write of the hand-back fails, after the executor was marked and its claims deleted.
          yield* world.sql.unsafe(`
            CREATE FUNCTION history.refuse() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN RAISE EXCEPTION 'refused by the test' USING ERRCODE = 'XX000'; END $$`)
          yield* world.sql.unsafe(`
            CREATE TRIGGER refuse BEFORE INSERT ON tenure.ready
              FOR EACH ROW WHEN (NEW.losses > 0) EXECUTE FUNCTION history.refuse()`)
          const survivor = yield* world.ready({ settings: steady })
          yield* world.until(
            "several scans have failed",
            () => survivor.logs("executor_recovery: not taken over now").length >= 3
          )
          assert.strictEqual(yield* stateOf(world, worker.executor()), "revoking")
          assert.strictEqual(
            yield* world.count(
              `tenure.claimed WHERE id = '${item}' AND owner = '${worker.executor()}' AND losses = 0`
            ),
            1
          )
          // Nothing else is held up.
          const [healthy = ""] = yield* world.enqueue([[{ do: "post", name: "healthy" }]])
          yield* settled(world, healthy)
          yield* world.sql.unsafe("DROP TRIGGER refuse ON tenure.ready")
          yield* settled(world, item)
          assert.strictEqual(yield* stateOf(world, worker.executor()), "revoked")
          assert.deepInclude(
            (yield* world.outcomes).find((one) => one.id === item),
            { outcome: "completed", attempt: 2, losses: 1 }
          )
        })
      ),
    300_000
  )
})
