/**
 * Goal: work waits while nobody runs, the first process to start takes all of it over, its own earlier
 * work too, and however many recover however much at once, each item is handed back once and the
 * queue's global limit holds (row 7; I4, I10, L1; K-083, K-084, K-120 to K-123, K-131, K-178, K-198,
 * K-230, K-236).
 * Method: real replicas, killed together. The database writes down how many items ran at each claim.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect } from "effect"
import { run, steady, type World } from "./support/World.ts"

const runningMax = (world: World) =>
  Effect.map(
    Effect.orDie(
      world.sql<{ readonly max: number }>`SELECT max(running)::int AS max FROM history.claim`
    ),
    ([row]) => row?.max
  )

/** What the scanners say they handed back, over all processes. */
const requeued = (world: World): number =>
  world.workers
    .flatMap((worker) => worker.logs("executor_recovery"))
    .reduce((sum, line) => sum + Number(/"requeued":(\d+)/.exec(line)?.[1] ?? 0), 0)

const work = Array.from({ length: 12 }, () => [
  { do: "post", name: "begin" } as const,
  { do: "wait", gate: "go" } as const,
  { do: "step", name: "work" } as const
])

describe.concurrent("replicas", () => {
  it.live(
    "that all die leave work that the first restart finishes, within the queue's limit",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const replicas = yield* Effect.forEach([1, 2, 3], () => world.worker({ globalLimit: 4 }))
          yield* world.enqueue(work)
          yield* world.until(
            "as many items run as the limit allows",
            () => world.sink.waiting("go") === 4
          )
          for (const replica of replicas) yield* replica.signal("SIGKILL")
          for (const replica of replicas) yield* replica.ended
          assert.strictEqual(yield* world.count("tenure.claimed"), 4)
          assert.strictEqual(yield* world.count("tenure.ready"), 8)
          yield* world.sink.open("go")
          const restarted = yield* world.ready({ globalLimit: 4, settings: steady, slots: 20 })
          yield* world.allSettled()
          assert.strictEqual(yield* runningMax(world), 4)
          assert.strictEqual(requeued(world), 4)
          const outcomes = yield* world.outcomes
          assert.isTrue(outcomes.every((one) => one.owner === restarted.executor()))
          assert.strictEqual(outcomes.filter((one) => one.losses === 1).length, 4)
        })
      ),
    300_000
  )

  it.live(
    "take the items of a lost peer over one by one without waiting for a poll",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const lost = yield* world.ready({ slots: 20 })
          yield* world.enqueue(Array.from({ length: 20 }, () => work[0] ?? []))
          yield* world.until("it is full", () => world.sink.waiting("go") === 20)
          yield* lost.signal("SIGKILL")
          yield* world.sink.open("go")
          // Its poll interval is ten minutes. At any time it runs one item that a lost executor held.
          const survivor = yield* world.ready({ slots: 20, settings: steady })
          yield* world.allSettled()
          assert.strictEqual(yield* runningMax(world), 20)
          const suspects = `history.claim WHERE owner = '${survivor.executor()}'`
          assert.strictEqual(yield* world.count(suspects), 20)
          assert.strictEqual(yield* world.count(`${suspects} AND running > 1`), 0)
        })
      ),
    300_000
  )

  it.live(
    "recover two lost peers at once, every item once, under one global limit",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const lost = yield* Effect.forEach([1, 2], () =>
            world.worker({ globalLimit: 20, slots: 10 })
          )
          yield* world.enqueue(Array.from({ length: 60 }, () => work[0] ?? []))
          yield* world.until("both are full", () => world.sink.waiting("go") === 20)
          const survivors = yield* Effect.forEach([1, 2, 3], () =>
            world.ready({ globalLimit: 20, slots: 20, settings: steady })
          )
          for (const worker of lost) yield* worker.signal("SIGKILL")
          yield* world.sink.open("go")
          yield* world.allSettled()
          assert.isAtMost((yield* runningMax(world)) ?? 0, 20)
          for (const worker of lost) {
            assert.strictEqual((yield* world.executor(worker.executor())).state, "revoked")
          }
          const outcomes = yield* world.outcomes
          // Some of the 20 may have ended between the last look and the signals.
          const taken = outcomes.filter((one) => one.losses === 1)
          assert.strictEqual(requeued(world), taken.length)
          assert.isTrue(outcomes.every((one) => one.attempt === one.losses + 1 && one.losses <= 1))
          assert.isTrue(survivors.every((one) => !one.hasEnded()))
        })
      ),
    300_000
  )
})
