/**
 * Named places between two statements, where a test may stop, delay or kill the process. In
 * production each is one function call that does nothing.
 */
import { Context, Effect } from "effect"

export const names = [
  "executor.registered",
  "executor.renewing",
  "queue.claim.committed",
  "queue.step.returned",
  "queue.checkpoint.committed",
  "queue.settle.committed",
  "wait.claimed",
  "probe.running",
  "recovery.marked"
] as const

export type Name = (typeof names)[number]

/** What happens at a fault point. The default is nothing. */
export const FaultPoint = Context.Reference<(name: Name) => Effect.Effect<void>>(
  "tenure/testing/FaultPoint",
  { defaultValue: () => () => Effect.void }
)

export const reach = (name: Name): Effect.Effect<void> =>
  Effect.flatMap(FaultPoint, (at) => at(name))
