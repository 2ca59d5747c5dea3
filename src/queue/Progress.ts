/**
 * Reporting progress from code that has no `item` at hand; see `progress` of `WorkQueue.make`.
 */
import { Effect, Schema } from "effect"
import type { ProgressRefused } from "./Errors.ts"
import { Attempt } from "./Step.ts"

/** The handler that runs is not one of that queue. */
export class ProgressOfOtherQueue extends Schema.TaggedError<ProgressOfOtherQueue>()(
  "ProgressOfOtherQueue",
  { id: Schema.String, queue: Schema.String }
) {
  override get message(): string {
    return `Item ${this.id} is not of the queue ${this.queue}: report with the definition whose handler runs.`
  }
}

/**
 * As `item.progress`, for the attempt in whose handler it is called: the value replaces what the item has
 * reported before, and nobody waits for it to be written. With the definition of another queue than the
 * handler's it dies of `ProgressOfOtherQueue`.
 */
export const report = <Progress extends Schema.Top>(
  queue: { readonly _tag: string; readonly progressSchema: Progress },
  value: Progress["Type"]
): Effect.Effect<void, ProgressRefused, Attempt> =>
  Effect.flatMap(Attempt, ({ id, progress }) =>
    progress?.queue === queue._tag
      ? progress.report(value)
      : Effect.die(new ProgressOfOtherQueue({ id, queue: queue._tag }))
  )
