/**
 * Goal: wherever a process dies, its work goes on elsewhere, once, from its last checkpoint (rows 1 to
 * 4 and 28; I4 to I7; K-079 to K-081, K-094, K-225, K-228; bug report 1).
 * Method: a worker that kills itself at a named place between two statements, and a peer that starts
 * after it is dead.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect } from "effect"
import { run, steady, type World } from "./support/World.ts"

const dieAt = (at: string) => [{ at, do: "die", turn: 1 }] as const

/** Everything a takeover leaves behind, beside what the history's checker asks of every run. */
const assertTakenOver = Effect.fnUntraced(function* (
  world: World,
  item: string,
  victim: string | undefined
) {
  const [first, second, third] = yield* world.attempts(item)
  assert.deepStrictEqual([first?.attempt, second?.attempt, third], [1, 2, undefined])
  const dead = yield* world.executor(victim ?? first?.owner)
  assert.strictEqual(first?.owner, victim ?? first?.owner)
  assert.notStrictEqual(second?.owner, first?.owner)
  assert.strictEqual(dead.state, "revoked")
  assert.isTrue((dead.revoked_at ?? 0) >= dead.expires_at, "not before its lease had ended")
  assert.isTrue((second?.at ?? 0) >= (dead.revoked_at ?? 0), "revoked before it was claimed again")
  const [outcome] = yield* world.outcomes
  assert.deepInclude(outcome, {
    outcome: "completed",
    attempt: 2,
    losses: 1,
    failures: 0,
    owner: second?.owner ?? null
  })
})

const steps = [
  { do: "step", name: "reserve" },
  { do: "step", name: "charge" }
] as const

describe.concurrent("a process that dies", () => {
  it.live(
    "as soon as it is registered leaves a lease that ends, and nothing else",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const victim = yield* world.worker({ faults: dieAt("executor.registered") })
          assert.strictEqual((yield* victim.ended).signal, "SIGKILL")
          const [dead] = yield* world.sql<{ readonly id: string; readonly state: string }>`
            SELECT id, state FROM tenure.executor`
          assert.strictEqual(dead?.state, "active")
          const [item = ""] = yield* world.enqueue([steps])
          yield* world.ready({ settings: steady })
          yield* world.allSettled()
          assert.strictEqual((yield* world.attempts(item)).length, 1)
          yield* world.until("the dead executor is revoked", () =>
            Effect.map(world.executor(dead?.id), ({ state }) => state === "revoked")
          )
        })
      ),
    120_000
  )

  it.live(
    "between a claim and its first step loses nothing, and the item runs as attempt 2",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          // Handed in first: the fault is at the first claim, which must find it.
          const [item = ""] = yield* world.enqueue([steps])
          const victim = yield* world.worker({ faults: dieAt("queue.claim.committed") })
          assert.strictEqual((yield* victim.ended).signal, "SIGKILL")
          assert.strictEqual(yield* world.count("tenure.claimed"), 1)
          yield* world.ready({ settings: steady })
          yield* world.allSettled()
          yield* assertTakenOver(world, item, undefined)
          assert.strictEqual(world.sink.arrivals().length, 2)
        })
      ),
    300_000
  )

  it.live(
    "after a step ran and before its checkpoint has the step run again, under the same key",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const victim = yield* world.ready({ faults: dieAt("queue.step.returned") })
          const [item = ""] = yield* world.enqueue([[{ do: "step", name: "charge" }]])
          yield* victim.ended
          assert.strictEqual(yield* world.count("tenure.step"), 0)
          yield* world.ready({ settings: steady })
          yield* world.allSettled()
          yield* assertTakenOver(world, item, victim.executor())
          assert.deepStrictEqual(
            world.sink.arrivalsOf("charge").map((one) => [one.item, one.attempt]),
            [
              [item, 1],
              [item, 2]
            ]
          )
          assert.strictEqual(yield* world.count("tenure.step WHERE attempt = 2"), 1)
        })
      ),
    300_000
  )

  it.live(
    "after a checkpoint has the step replayed with its stored value and not run again",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const victim = yield* world.ready({ faults: dieAt("queue.checkpoint.committed") })
          const [item = ""] = yield* world.enqueue([steps])
          yield* victim.ended
          assert.strictEqual(yield* world.count("tenure.step"), 1)
          yield* world.ready({ settings: steady })
          yield* world.allSettled()
          yield* assertTakenOver(world, item, victim.executor())
          // The value in the result is compared with the checkpoint by the history's checker.
          assert.deepStrictEqual(
            world.sink.arrivals().map((one) => [one.name, one.attempt]),
            [
              ["reserve", 1],
              ["charge", 2]
            ]
          )
          assert.strictEqual(yield* world.count("tenure.step WHERE attempt = 1"), 1)
        })
      ),
    300_000
  )

  it.live(
    "after its outcome is stored, before it knows, changes nothing any more",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const victim = yield* world.ready({ faults: dieAt("queue.settle.committed") })
          const [item = ""] = yield* world.enqueue([steps])
          yield* victim.ended
          const [before] = yield* world.outcomes
          assert.deepInclude(before, {
            id: item,
            outcome: "completed",
            owner: victim.executor() ?? null
          })
          yield* world.ready({ settings: steady })
          yield* world.until("the dead executor is revoked", () =>
            Effect.map(world.executor(victim.executor()), ({ state }) => state === "revoked")
          )
          assert.deepStrictEqual(yield* world.outcomes, before === undefined ? [] : [before])
          assert.strictEqual((yield* world.attempts(item)).length, 1)
          assert.strictEqual(world.sink.arrivals().length, 2)
        })
      ),
    300_000
  )

  it.live(
    "of a full heap loses nothing",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          // Its watchdog must not be quicker: the last collections of a full heap take seconds.
          const victim = yield* world.ready({
            node: ["--max-old-space-size=64"],
            settings: steady
          })
          const [item = ""] = yield* world.enqueue([[{ do: "exhaust", onAttempt: [1] }, ...steps]])
          const ended = yield* victim.ended
          assert.isTrue(ended.signal === "SIGABRT" || ended.code === 134, JSON.stringify(ended))
          yield* world.ready({ settings: steady })
          yield* world.allSettled()
          yield* assertTakenOver(world, item, victim.executor())
        })
      ),
    300_000
  )
})
