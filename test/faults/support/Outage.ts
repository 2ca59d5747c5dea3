/** The two long faults, in two sizes: the short ones belong to every run, the long ones to the long run. */
import { assert } from "@effect/vitest"
import { Effect, Fiber, Random, type Scope } from "effect"
import { pace } from "../../support/pace.ts"
import { steady, type World } from "./World.ts"

/**
 * Replicas that are cut off together end by themselves, are started again by their deployment, wait in
 * turns for a database that is not there, and finish everything when it is back.
 */
export const outage = (replicas: number, attemptsMin: number) =>
  Effect.fnUntraced(function* (world: World): Effect.fn.Return<void, unknown, Scope.Scope> {
    const proxy = yield* world.proxy
    yield* world.keepRunning(replicas, { url: proxy.url, slots: 4 })
    yield* world.until(
      "all are ready",
      () => world.workers.filter((worker) => worker.executor() !== undefined).length === replicas
    )
    yield* world.enqueue(
      Array.from(
        { length: replicas * 6 },
        () =>
          [
            { do: "wait", gate: "go", onAttempt: [1] },
            { do: "step", name: "work" }
          ] as const
      )
    )
    yield* world.until("each has work", () => world.sink.waiting("go") === replicas * 4)
    const first = [...world.workers]
    yield* proxy.set("refuse")
    yield* world.until("all have stopped by themselves", () =>
      first.every((worker) => worker.hasEnded())
    )
    for (const worker of first) assert.strictEqual((yield* worker.ended).code, 75)

    const refused = "executor_startup: the database cannot be reached yet"
    const acceptedBefore = proxy.acceptedCount()
    const waiting = () => world.workers.slice(replicas)
    yield* world.until(
      "their replacements have tried several times",
      () =>
        waiting().length === replicas &&
        waiting().every((worker) => worker.logs(refused).length >= attemptsMin),
      "3 minutes"
    )
    const second = waiting()
    assert.isTrue(second.every((worker) => !worker.hasEnded() && worker.executor() === undefined))
    const attempts = second.reduce((sum, worker) => sum + worker.logs(refused).length, 0)
    // One connection for each attempt; one may be on its way for each.
    assert.isAtMost(proxy.acceptedCount() - acceptedBefore, attempts + 2 * replicas)
    const pauses = second.map((worker) => {
      const [one = 0, two = 0] = worker.logs(refused).map((line) => Number(/^\d+/.exec(line)?.[0]))
      return two - one
    })
    assert.isTrue(
      pauses.every((pause) => pause >= 450),
      `${pauses}`
    )
    assert.isAbove(new Set(pauses).size, 1, "they do not come back in step")

    yield* proxy.heal
    yield* world.sink.open("go")
    yield* world.allSettled("90 seconds")
    const outcomes = yield* world.outcomes
    assert.isTrue(outcomes.every((one) => one.outcome === "completed"))
    // The outage has cost those that were running an execution.
    assert.isAtLeast(outcomes.filter((one) => one.losses > 0).length, replicas * 4)
    // Four pools of up to 1, 4, 1 and 10, the listener, and one that asks for the server's version.
    assert.isAtMost(proxy.openMax(), replicas * 18)
  })

/** Every session of the workers is ended again and again while they work. */
export const terminations = (items: number, roundsMin: number) =>
  Effect.fnUntraced(function* (world: World): Effect.fn.Return<void, unknown, Scope.Scope> {
    // Polling is needed here: with the answer to a statement its hint is lost as well.
    const settings = { ...steady, pollInterval: "1 second" }
    // A handler's own statement that loses its session is a failure of the attempt.
    const orders = { settings, slots: 8, retries: 100, retryMillis: 100 }
    const workers = yield* Effect.replicateEffect(world.ready(orders), 2)
    let rounds = 0
    let ended = 0
    const terminate = Effect.gen(function* () {
      // What the driver holds up at the moment differs each time: some rounds hit all, some a half.
      const share = (yield* Random.next) < 0.5 ? 1 : 0.5
      const rows = yield* world.sql<{ readonly ended: boolean }>`
        SELECT pg_terminate_backend(pid) AS ended FROM pg_stat_activity
         WHERE datname = current_database() AND application_name LIKE 'tenure %'
           AND application_name <> 'tenure test' AND random() < ${share}::float8`
      ended += rows.length
      rounds++
      // Time enough for a new session to do something.
      yield* Effect.sleep((50 + 250 * (yield* Random.next)) * pace)
    })
    yield* world.enqueue(
      Array.from(
        { length: items },
        () => [{ do: "step", name: "one" }, { do: "write" }, { do: "step", name: "two" }] as const
      )
    )
    const terminating = yield* Effect.forkScoped(Effect.forever(terminate))
    yield* world.until(
      "half of the work is settled, in spite of several terminations",
      () =>
        rounds >= roundsMin && Effect.map(world.count("tenure.done"), (done) => done >= items / 2),
      "3 minutes"
    )
    yield* Fiber.interrupt(terminating)
    yield* world.allSettled("2 minutes")
    const outcomes = yield* world.outcomes
    assert.strictEqual(outcomes.length, items)
    assert.deepStrictEqual(
      yield* world.sql`
        SELECT losses, reason, result::text AS result, count(*)::int AS count FROM tenure.done
         WHERE outcome <> 'completed' OR losses > 0 GROUP BY 1, 2, 3`,
      []
    )
    assert.isAbove(ended, roundsMin)
    assert.isTrue(
      workers.every((worker) => !worker.hasEnded()),
      "no process has ended"
    )
  })
