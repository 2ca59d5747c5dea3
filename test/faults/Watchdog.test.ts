/**
 * Goal: a process whose event loop stands still, one of whose critical loops makes no progress, which
 * was suspended, or which has lost its watchdog, has ended before its lease can, under our main and under
 * one of the application's own, and a peer goes on with its work (rows 11, 24, 25, 27 and 32; I11; K-039,
 * K-040, K-042, K-043, K-180, K-184, K-201, K-208; P-13 to P-20).
 * Method: real processes that are told to do this to themselves; how they end is read from outside.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect } from "effect"
import { pace } from "../support/pace.ts"
import type { Instruction } from "./support/Work.ts"
import type { Worker } from "./support/Worker.ts"
import { run, steady, type World } from "./support/World.ts"

/** Gives up soon, and has ended long before its lease. */
const short = { watchdog: "3 seconds", leaseValidity: "8 seconds" } as const

const killedMessage = "executor_watchdog: killed, the lease is left to expire"

/** What the watchdog, in whichever thread, said of this worker. */
const verdicts = (worker: Worker) =>
  worker.logs('executor_watchdog"').map((line) => {
    const { annotations } = JSON.parse(line.slice(line.indexOf("{"))) as {
      readonly annotations: Readonly<Record<string, string>>
    }
    const { executorId, reason, subject, ...rest } = annotations
    assert.strictEqual(executorId, worker.executor())
    assert.deepStrictEqual(rest, {})
    return subject === undefined ? reason : `${reason} ${subject}`
  })

const assertLeaseLeft = Effect.fnUntraced(function* (world: World, victim: Worker) {
  const { is_past, state } = yield* world.executor(victim.executor())
  assert.deepStrictEqual([state, is_past], ["active", false], victim.name)
})

const untilHeartbeat = (world: World, victim: Worker, condition: string) =>
  world.until(`heartbeat_at ${condition}`, () =>
    Effect.map(
      world.sql.unsafe<{ readonly holds: boolean }>(
        `SELECT heartbeat_at ${condition} AS holds FROM tenure.executor WHERE id = '${victim.executor()}'`
      ),
      ([row]) => row?.holds === true
    )
  )

const onFirst = { onAttempt: [1] } as const
const stays: Instruction = { do: "wait", gate: "never", ...onFirst }

describe.concurrent("a process", () => {
  it.live(
    "whose event loop stands still, in JavaScript or in a native call, is killed by its watchdog",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const victims = yield* Effect.all(
            [false, false, true].map((ownMain) =>
              world.ready({ settings: short, slots: 1, ownMain })
            ),
            { concurrency: "unbounded" }
          )
          yield* world.enqueue([
            [{ do: "spin", ...onFirst }],
            [{ do: "compute", ...onFirst }],
            [{ do: "block", millis: 10_000 * pace, ...onFirst }]
          ])
          for (const victim of victims) {
            assert.deepStrictEqual(yield* victim.ended, { code: null, signal: "SIGKILL" })
            assert.deepStrictEqual(verdicts(victim), ["eventLoop"])
            assert.strictEqual(victim.logs(killedMessage).length, 1)
            yield* assertLeaseLeft(world, victim)
          }
          const peer = yield* world.ready({ settings: steady })
          yield* world.allSettled()
          for (const outcome of yield* world.outcomes) {
            const expected = { outcome: "completed", attempt: 2, losses: 1 }
            assert.deepInclude(outcome, { ...expected, owner: peer.executor() ?? null })
          }
        })
      ),
    300_000
  )

  it.live(
    "ends for each of its critical loops by itself, while everything else goes on",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const claims = yield* world.ready({
            settings: short,
            faults: [{ at: "queue.claim.committed", do: "stay", turn: 1 }]
          })
          yield* world.enqueue([[{ do: "step", name: "claimed" }]])
          const isStuck = (worker: Worker) => worker.said().some((one) => one.say === "fault")
          yield* world.until("it does not go on to claim", () => isStuck(claims))
          yield* world.enqueue([[{ do: "step", name: "left" }]])
          // A dead executor that only one of them may recover.
          yield* world.sql`
            INSERT INTO tenure.executor
              (id, application_name, application_version, registered_at, heartbeat_at, expires_at, host, pid)
            SELECT gen_random_uuid(), 'faults', 'v0', at, at, at, 'h', 1
              FROM (SELECT clock_timestamp() - interval '1 hour' AS at) t`
          const [scans, renews] = yield* Effect.all(
            [
              world.ready({
                settings: short,
                accepts: ["v0"],
                faults: [{ at: "recovery.marked", do: "stay", turn: 1 }]
              }),
              world.ready({
                settings: short,
                faults: [{ at: "executor.renewing", do: "stay", turn: 3 }]
              })
            ],
            { concurrency: "unbounded" }
          )
          assert.strictEqual((yield* claims.ended).code, 72)
          assert.deepStrictEqual(verdicts(claims), ["actor queue_claimer work"])
          assert.strictEqual((yield* scans.ended).code, 72)
          assert.deepStrictEqual(verdicts(scans), ["actor executor_recovery"])
          // Its own finding about the lease is more than what the watchdog knows.
          assert.strictEqual((yield* renews.ended).code, 75)
          assert.deepStrictEqual(verdicts(renews), ["lease"])
          yield* assertLeaseLeft(world, renews)
          yield* world.ready({ settings: steady })
          yield* world.allSettled()
        })
      ),
    300_000
  )

  it.live(
    "that has lost its watchdog's thread ends, by itself or by its own hand",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const [ours, own] = yield* Effect.all(
            [
              world.ready({ settings: steady, slots: 1 }),
              world.ready({ settings: steady, slots: 1, ownMain: true })
            ],
            { concurrency: "unbounded" }
          )
          yield* world.enqueue([
            [{ do: "end the thread", ...onFirst }, stays],
            [{ do: "end the thread", ...onFirst }, stays]
          ])
          assert.deepStrictEqual(yield* ours.ended, { code: 72, signal: null })
          assert.deepStrictEqual(verdicts(ours), ["watcher"])
          assert.strictEqual((yield* world.executor(ours.executor())).state, "released")
          assert.deepStrictEqual(yield* own.ended, { code: null, signal: "SIGKILL" })
          yield* assertLeaseLeft(world, own)
        })
      ),
    300_000
  )

  it.live(
    "that finds itself unfit stops in order, is forced if it cannot, and is killed if nobody does that",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const orders = { settings: steady, slots: 1 }
          const [orderly, hung, own] = yield* Effect.all(
            [
              world.ready(orders),
              world.ready({ ...orders, hungFinalizer: true }),
              world.ready({ ...orders, ownMain: true })
            ],
            { concurrency: "unbounded" }
          )
          yield* world.enqueue(
            Array.from({ length: 3 }, () => [{ do: "fire", ...onFirst }, stays] as const)
          )
          assert.deepStrictEqual(yield* orderly.ended, { code: 72, signal: null })
          assert.deepStrictEqual(verdicts(orderly), ["stubborn work"])
          assert.strictEqual((yield* world.executor(orderly.executor())).state, "released")
          assert.deepStrictEqual(yield* hung.ended, { code: 72, signal: null })
          assert.deepStrictEqual(verdicts(hung), ["stubborn work"])
          yield* assertLeaseLeft(world, hung)
          assert.deepStrictEqual(yield* own.ended, { code: null, signal: "SIGKILL" })
          assert.strictEqual(own.logs(killedMessage).length, 1)
          yield* assertLeaseLeft(world, own)
          yield* world.ready({ settings: steady })
          yield* world.allSettled()
        })
      ),
    300_000
  )

  it.live(
    "that is stopped for less than its window goes on, and ends after a longer stop",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const victim = yield* world.ready({ settings: { leaseValidity: "12 seconds" } })
          yield* victim.signal("SIGSTOP")
          yield* untilHeartbeat(
            world,
            victim,
            `< clock_timestamp() - interval '${2 * pace} seconds'`
          )
          yield* victim.signal("SIGCONT")
          yield* untilHeartbeat(world, victim, `> clock_timestamp() - interval '${pace} second'`)
          yield* world.enqueue([[{ do: "step", name: "after" }]])
          yield* world.allSettled()
          assert.isFalse(victim.hasEnded())
          assert.deepStrictEqual(verdicts(victim), [])
          yield* victim.signal("SIGSTOP")
          yield* untilHeartbeat(
            world,
            victim,
            `< clock_timestamp() - interval '${4.1 * pace} seconds'`
          )
          yield* victim.signal("SIGCONT")
          assert.strictEqual((yield* victim.ended).code, 75)
          yield* assertLeaseLeft(world, victim)
        })
      ),
    300_000
  )

  it.live(
    "whose wall clock jumps back and forth by hours does not notice",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const victim = yield* world.ready()
          yield* world.enqueue([[{ do: "upset the clock" }]])
          yield* world.allSettled()
          const [{ at } = { at: "" }] = yield* world.sql<{ readonly at: string }>`
            SELECT clock_timestamp()::text AS at`
          // Longer than the watchdog waits for anything.
          yield* untilHeartbeat(
            world,
            victim,
            `> '${at}'::timestamptz + interval '${5 * pace} seconds'`
          )
          yield* world.enqueue(["a", "b", "c"].map((name) => [{ do: "step", name }]))
          yield* world.allSettled()
          assert.isTrue(
            (yield* world.outcomes).every((one) => one.attempt === 1 && one.losses === 0)
          )
          assert.deepStrictEqual(verdicts(victim), [])
          assert.isFalse(victim.hasEnded())
        })
      ),
    300_000
  )
})
