/**
 * Goal: a process that is asked to end gives back what it holds and its lease last, a plain
 * interruption cancels nothing for good, and a forced end leaves the lease to expire (rows 5 and 6;
 * K-130, K-163 to K-166; bug report 29).
 * Method: real signals to a worker with all kinds of work in flight; a peer shows when it may go on.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect } from "effect"
import { run, steady } from "./support/World.ts"

describe.concurrent("a process that is asked to end", () => {
  it.live(
    "ends what can end, hands the rest back unharmed, and a peer need not wait for its lease",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const leaving = yield* world.ready({
            settings: { ...steady, drain: "1 second" },
            slots: 2
          })
          const [ends = "", endless = "", ...unstarted] = yield* world.enqueue([
            [
              { do: "step", name: "before" },
              { do: "wait", gate: "end" }
            ],
            [
              { do: "step", name: "before" },
              { do: "wait", gate: "endless", onAttempt: [1] }
            ],
            [{ do: "post", name: "later" }],
            [{ do: "post", name: "later" }]
          ])
          yield* world.until(
            "both handlers wait",
            () => world.sink.waiting("end") + world.sink.waiting("endless") === 2
          )
          yield* world.ready({ settings: steady })
          yield* leaving.signal("SIGTERM")
          yield* world.until(
            "the drain has begun",
            () => leaving.logs("executor_shutdown: draining")[0]
          )
          yield* world.sink.open("end")
          assert.strictEqual((yield* leaving.ended).code, 0)
          const executor = yield* world.executor(leaving.executor())
          assert.strictEqual(executor.state, "released")
          assert.isFalse(executor.is_past, "the lease still ran")
          assert.strictEqual(
            yield* world.count(`tenure.claimed WHERE owner = '${leaving.executor()}'`),
            0
          )
          yield* world.allSettled()
          const outcomes = yield* world.outcomes
          assert.isTrue(
            outcomes.every(
              (one) => one.outcome === "completed" && one.losses === 0 && one.failures === 0
            )
          )
          assert.deepStrictEqual(outcomes.map(({ attempt, id }) => [id, attempt]).slice(0, 2), [
            [ends, 1],
            [endless, 2]
          ])
          assert.strictEqual(unstarted.length, 2)
          const [, again] = yield* world.attempts(endless)
          assert.isTrue(
            (again?.at ?? 0) < executor.expires_at,
            "the peer did not wait for an expiry"
          )
          // Its checkpoint came along.
          assert.strictEqual(world.sink.arrivalsOf("before").length, 2)
        })
      ),
    300_000
  )

  it.live(
    "by a plain interruption cancels none of its work",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          // SIGINT is nothing but an interruption of the program's root fiber.
          const leaving = yield* world.ready({ settings: { ...steady, drain: "200 millis" } })
          const [item = ""] = yield* world.enqueue([
            [{ do: "wait", gate: "never", onAttempt: [1] }]
          ])
          yield* world.until("the handler waits", () => world.sink.waiting("never") === 1)
          yield* leaving.signal("SIGINT")
          assert.strictEqual((yield* leaving.ended).code, 0)
          assert.deepStrictEqual(yield* world.outcomes, [])
          assert.strictEqual(yield* world.count("tenure.cancel_request"), 0)
          assert.strictEqual(
            yield* world.count(`tenure.ready WHERE id = '${item}' AND losses = 0`),
            1
          )
          yield* world.ready({ settings: steady })
          yield* world.allSettled()
          assert.deepInclude((yield* world.outcomes)[0], {
            outcome: "completed",
            attempt: 2,
            losses: 0
          })
        })
      ),
    300_000
  )

  it.live(
    "and has a handler that obeys nobody is forced, and its lease is left to expire",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const stuck = yield* world.ready({ settings: { drain: "300 millis" } })
          const [item = ""] = yield* world.enqueue([
            [
              { do: "wait stubbornly", gate: "never", onAttempt: [1] },
              { do: "post", name: "after" }
            ]
          ])
          yield* world.until("the handler waits", () => world.sink.waiting("never") === 1)
          yield* stuck.signal("SIGTERM")
          assert.strictEqual((yield* stuck.ended).code, 70)
          assert.strictEqual((yield* world.executor(stuck.executor())).state, "active")
          assert.strictEqual(yield* world.count("tenure.claimed"), 1)
          yield* world.ready({ settings: steady })
          yield* world.allSettled()
          const executor = yield* world.executor(stuck.executor())
          const [, again] = yield* world.attempts(item)
          assert.strictEqual(executor.state, "revoked")
          assert.isTrue((again?.at ?? 0) >= executor.expires_at, "the peer waited for the expiry")
          assert.deepInclude((yield* world.outcomes)[0], { attempt: 2, losses: 1 })
        })
      ),
    300_000
  )

  it.live(
    "twice ends at once, and its lease is left to expire",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const leaving = yield* world.ready({ settings: { ...steady, drain: "60 seconds" } })
          yield* world.enqueue([[{ do: "wait", gate: "never" }]])
          yield* world.until("the handler waits", () => world.sink.waiting("never") === 1)
          // A second signal within half a second counts as the first, so it is repeated until it counts.
          yield* world.until("the process has ended", () =>
            Effect.as(leaving.signal("SIGTERM"), leaving.hasEnded())
          )
          assert.strictEqual((yield* leaving.ended).code, 70)
          const executor = yield* world.executor(leaving.executor())
          assert.deepStrictEqual([executor.state, executor.is_past], ["active", false])
          assert.strictEqual(yield* world.count("tenure.claimed"), 1)
        })
      ),
    300_000
  )
})
