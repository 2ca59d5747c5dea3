/**
 * Loop 2, beside the scanner: wakes that somebody has begun and not finished.
 *
 *   sleeping | waiting --taken, committed--> waking --dispatched--> ready
 *           ^                                  |
 *           +-- older than the threshold ------+   and held by nothing that loop 1 looks at
 *
 * A process that dies between the two leaves a row that has no owner, no lease and no place in a queue:
 * the scanner cannot see it. This loop puts it back, and the next look of anybody takes it again. That
 * the two never take the same is said in the statement, not by their times (I8). Safe on every executor
 * at once.
 */
import { Effect, type Scope } from "effect"
import type { SqlError } from "effect/sql/SqlError"
import * as Actor from "../actor/Actor.ts"
import { type Abandoned, abandonAfter } from "../database/Deadline.ts"
import type { Executor } from "../executor/Executor.ts"
import { sweepStaleClaims } from "./RecoveryStore.ts"

const sweptMax = 1000

export const make = (options: {
  readonly executor: Executor["Service"]
  /** Something is due again. */
  readonly onSwept: Effect.Effect<void>
}): Effect.Effect<Actor.Actor<SqlError | Abandoned>, never, Scope.Scope> => {
  const { pools, settings } = options.executor
  const sweep = Effect.gen(function* () {
    const swept = yield* sweepStaleClaims(pools.work, settings.staleClaimThreshold, sweptMax).pipe(
      abandonAfter(settings.watchdog / 2)
    )
    if (swept > 0) {
      yield* Effect.logWarning(
        "stale_claim_sweep: wakes that were never finished were put back"
      ).pipe(Effect.annotateLogs({ executorId: options.executor.id, items: swept }))
      yield* options.onSwept
    }
    return { swept }
  })
  return Actor.make({
    name: "stale_claim_sweep",
    step: sweep,
    cadence: (report) => (report["swept"] === sweptMax ? 0 : settings.staleClaimSweep),
    progressWithin: settings.watchdog
  })
}
