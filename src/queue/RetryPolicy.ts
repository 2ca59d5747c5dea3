/**
 * Whether and when an attempt that failed is tried again. Pure, because the tries of one item run in
 * different processes: the schedule is replayed up to the number of failures, with the elapsed time
 * simulated from the delays.
 */
import { Duration, Effect, Pull, Schedule } from "effect"

/** Same names as the options of `Effect.retry`; the schedule sees the number of the failure. */
export interface RetryPolicy<E> {
  /** Failures that are followed by another attempt. */
  readonly times?: number | undefined
  readonly schedule?: Schedule.Schedule<unknown, number> | undefined
  /** Declared failures for which it says no are final. */
  readonly while?: ((error: E) => boolean) | undefined
}

/** What is no declared failure (a database that does not answer) is tried again without a policy, too. */
export const defaultTimes = 5

const defaultSchedule: Schedule.Schedule<unknown, number> = Schedule.min([
  Schedule.exponential("1 second"),
  Schedule.spaced("5 minutes")
])

/** Whether another attempt follows the `failures`-th failure. A declared one needs a policy. */
export const triesAgain = <E>(
  policy: RetryPolicy<E> | undefined,
  failures: number,
  declared: { readonly error: E } | undefined
): boolean => {
  if (declared !== undefined && policy === undefined) return false
  if (failures > (policy?.times ?? defaultTimes)) return false
  return declared === undefined || (policy?.while?.(declared.error) ?? true)
}

/** Milliseconds before the attempt after the `failures`-th failure. A schedule that ends keeps its last delay. */
export const delayMillis = Effect.fnUntraced(function* (
  schedule: Schedule.Schedule<unknown, number> | undefined,
  failures: number
): Effect.fn.Return<number> {
  const step = yield* Schedule.toStep(schedule ?? defaultSchedule)
  let elapsed = 0
  let delay = 0
  for (let failure = 1; failure <= failures; failure++) {
    const next = yield* Pull.catchDone(step(elapsed, failure), () => Effect.undefined)
    if (next === undefined) break
    delay = Duration.toMillis(next[1])
    elapsed += delay
  }
  return delay
})
