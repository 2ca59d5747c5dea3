/**
 * Goal: an item that kills every process that runs it ends after four of them, in a state that can be
 * seen; its application's rows are settled without running it; those that were claimed beside it are not
 * drawn in, and the survivors go on (row 8; I9, Q1; K-104 to K-114, K-119, K-207, K-233; bug report 8).
 * Method: two replicas that are started again whenever they end, as a deployment does.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect } from "effect"
import { run } from "./support/World.ts"

const healthy = Array.from({ length: 12 }, () => [{ do: "step", name: "work" } as const])

describe("a poison item", () => {
  it.live(
    "is quarantined after four processes, settled once, and healthy work goes on in the survivors",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          // Handed in first, so that the first claim takes the poison and its neighbours together.
          const [poison = ""] = yield* world.enqueue([[{ do: "die" }], ...healthy])
          yield* world.keepRunning(2, { settles: true })
          yield* world.allSettled()
          const outcomes = yield* world.outcomes
          assert.deepInclude(
            outcomes.find((one) => one.id === poison),
            {
              outcome: "failed",
              reason: "MAX_RECOVERY_ATTEMPTS_EXCEEDED",
              attempt: 4,
              losses: 4,
              failures: 0
            }
          )
          assert.isTrue(
            outcomes.every(
              (one) => one.id === poison || (one.outcome === "completed" && one.losses <= 1)
            )
          )
          const ends = yield* Effect.forEach(
            world.workers.filter((worker) => worker.hasEnded()),
            (worker) => worker.ended
          )
          assert.strictEqual(ends.filter(({ signal }) => signal === "SIGKILL").length, 4)

          const announced = yield* world.until("the quarantine is announced", () => {
            const lines = world.workers.flatMap((worker) =>
              worker.logs("workflow_recovery_exhausted")
            )
            return lines.length === 0 ? undefined : lines
          })
          assert.strictEqual(announced.length, 1)
          assert.include(announced[0], poison)
          assert.include(announced[0], '"ERROR"')

          // At once where it was exhausted: the others look every 30 s.
          yield* world.until(
            "the application's row is written",
            () => Effect.map(world.count("app.failed"), (rows) => rows > 0),
            "15 seconds"
          )

          yield* world.enqueue(healthy)
          yield* world.allSettled()
          assert.strictEqual(yield* world.count("tenure.done WHERE outcome = 'completed'"), 24)
          assert.strictEqual(
            yield* world.count(`tenure.done WHERE id = '${poison}' AND outcome = 'failed'`),
            1,
            "it is kept, and nobody has tried it again"
          )
          assert.deepStrictEqual(
            yield* world.sql`
              SELECT f.item, f.executions, q.state, q.settled_by = f.executor::text AS by_its_writer
                FROM app.failed f JOIN tenure.quarantine q ON q.item_id = f.item`,
            [{ item: poison, executions: 4, state: "settled", by_its_writer: true }]
          )
          assert.strictEqual((yield* world.attempts(poison)).length, 4)
          assert.strictEqual(
            world.workers.flatMap((worker) => worker.logs("workflow_recovery_settlement")).length,
            0,
            "no settlement has failed"
          )
        })
      ),
    300_000
  )
})
