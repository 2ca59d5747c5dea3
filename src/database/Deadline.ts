/**
 * A deadline that does not wait for the interruption. Interrupting a statement on a connection that
 * has gone silent takes five more seconds, because the driver drains it first; a renewal or a
 * finalizer that waited for that would outlive the budget the deadline was there to keep.
 *
 * The abandoned work is told to stop and ends on its own, with its own finalizers, and nobody reads
 * its result. A statement that was already sent may still take effect: whoever abandons a write has
 * to read it back.
 */
import { Duration, Effect, Schema } from "effect"
import { dual } from "effect/Function"

/** The work had not ended within its deadline. Whether it took effect is unknown. */
export class Abandoned extends Schema.TaggedError<Abandoned>()("Abandoned", {
  afterMillis: Schema.Finite
}) {
  override get message(): string {
    return `Abandoned after ${this.afterMillis} ms without an answer; whether it took effect is unknown.`
  }
}

/** Also ends on time inside an uninterruptible region, such as a finalizer. */
export const abandonAfter: {
  (
    deadline: Duration.Input
  ): <A, E, R>(effect: Effect.Effect<A, E, R>) => Effect.Effect<A, E | Abandoned, R>
  <A, E, R>(
    effect: Effect.Effect<A, E, R>,
    deadline: Duration.Input
  ): Effect.Effect<A, E | Abandoned, R>
} = dual(2, <A, E, R>(effect: Effect.Effect<A, E, R>, deadline: Duration.Input) =>
  // Masked between the two forks, so that an interruption cannot lose the handle of the first.
  Effect.uninterruptibleMask((restore) =>
    Effect.gen(function* () {
      const work = yield* Effect.forkDetach(effect, { startImmediately: true })
      const timer = yield* Effect.forkDetach(Effect.sleep(deadline), { startImmediately: true })
      return yield* restore(
        Effect.callback<A, E | Abandoned>((resume) => {
          work.addObserver((exit) => {
            timer.interruptUnsafe()
            resume(exit)
          })
          timer.addObserver((exit) => {
            if (exit._tag === "Failure") return
            // Answered first: work that stops at once would answer with its own interruption.
            resume(Effect.fail(new Abandoned({ afterMillis: Duration.toMillis(deadline) })))
            work.interruptUnsafe()
          })
          return Effect.sync(() => {
            timer.interruptUnsafe()
            work.interruptUnsafe()
          })
        })
      )
    })
  )
)
