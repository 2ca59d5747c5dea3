/**
 * Sends an item through the machinery of this process, again and again, and waits for its outcome:
 * claim, fiber and settle are the ones that business runs through, on a queue that nobody else has.
 *
 *   idle --begin--> outstanding --claimed, run, settled--> told --end, deleted--> idle
 *                       |  ^                                 ^
 *      nobody tells  +--+  +-- look again --+                |
 *                    |                      +-- settled -----+
 *                    +-- not within its interval: the step fails, the next waits for the same item
 *
 * Business at capacity never takes its slot, and a probe that passes says nothing about business:
 * each queue has a claimer and a limit of its own. What does not pass in time is late, as any loop,
 * and the watchdog judges that.
 *
 * A crash leaves at most one item, and whoever revokes the executor deletes it with the queue.
 */
import { Effect, Latch, Schema, type Scope } from "effect"
import type { SqlError } from "effect/sql/SqlError"
import * as Actor from "../actor/Actor.ts"
import { type Abandoned, abandonAfter } from "../database/Deadline.ts"
import { waitOrRefuse } from "../database/Startup.ts"
import type { StartupRefused } from "../database/StartupRefused.ts"
import type { QueueRuntime } from "../queue/QueueRuntime.ts"
import * as Runner from "../queue/Runner.ts"
import { reach } from "../testing/FaultPoint.ts"
import { beginProbe, endProbe, registerProbe } from "./ProbeStore.ts"

/** The item has no outcome yet, or one that proves nothing. The next step goes on with it, or with another. */
export class ProbeFailed extends Schema.TaggedError<ProbeFailed>()("ProbeFailed", {
  outcome: Schema.NullOr(Schema.String)
}) {
  override get message(): string {
    return this.outcome === null
      ? "this process has not run the item on its private queue in time"
      : `the item on its private queue ended as ${this.outcome}, and nobody else may end it`
  }
}

export const name = "executor_probe"

export const make = Effect.fnUntraced(function* (
  runtime: QueueRuntime["Service"]
): Effect.fn.Return<Actor.Actor<unknown>, StartupRefused, Scope.Scope> {
  const { pools, settings } = runtime.executor
  const queue = yield* waitOrRefuse(registerProbe(pools.work), "probe")
  // Open from the telling to the look that follows it, over a failed step as well.
  const told = Latch.makeUnsafe()
  // Nobody tells of an item that the audit or an operator has settled.
  const lookMillis = Math.min(1000, settings.probe / 2)
  const runner = yield* Runner.make<never, never>(runtime, {
    queue: "tenure.probe",
    lanes: {
      queueId: queue,
      unstarted: queue,
      started: queue,
      suspect: queue,
      all: [queue],
      suspects: []
    },
    slots: 1,
    attemptTimeoutMillis: settings.attemptTimeout,
    limited: false,
    rated: false,
    retry: undefined,
    // Not at once, so that it takes a slot and a turn of the scheduler as any handler.
    handle: () => Effect.andThen(Effect.yieldNow, Effect.as(reach("probe.running"), null)),
    encodeError: Effect.succeed,
    private: {
      onSettled: () => {
        told.openUnsafe()
      }
    }
  })
  yield* runtime.serve(runner)

  const answer = Effect.gen(function* () {
    while (true) {
      const wasTold = yield* Effect.raceFirst(
        Effect.as(told.await, 1),
        Effect.as(Effect.sleep(lookMillis), 0)
      )
      // Before the look: what is told during it means another.
      told.closeUnsafe()
      const outcome = yield* endProbe(pools.work).pipe(abandonAfter(settings.abandonAfter))
      if (outcome === "completed") return { passed: 1, told: wasTold }
      if (outcome !== null) return yield* new ProbeFailed({ outcome })
    }
  })

  const step = Effect.gen(function* () {
    yield* beginProbe(pools.work).pipe(abandonAfter(settings.abandonAfter))
    runner.hintUnsafe()
    return yield* Effect.timeoutOrElse(answer, {
      duration: settings.probe,
      orElse: () => Effect.fail(new ProbeFailed({ outcome: null }))
    })
  })

  return yield* Actor.make<SqlError | Abandoned | ProbeFailed, never>({
    name,
    step,
    cadence: settings.probe,
    progressWithin: settings.watchdog,
    // What has failed has waited for its interval already.
    onFailure: { first: Math.min(100, settings.probe), max: settings.probe }
  })
})
