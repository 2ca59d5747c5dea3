/**
 * Watches the items of a show until each has its outcome, and notes it beside the file. What another
 * start left unfinished is watched in the same way: the truth is in the database.
 */
import { Effect, Exit } from "effect"
import * as Cause from "effect/Cause"
import type { ItemId } from "../../queue/WorkQueue.ts"
import { DocumentQueue } from "./DocumentQueue.ts"
import { NotIndexed, printable } from "./Documents.ts"
import type { Todo } from "./HandIn.ts"
import { recordOutcome } from "./IndexStore.ts"
import type { Problem } from "./Report.ts"

export interface Outcomes {
  readonly settled: Set<string>
  indexed: number
  readonly problems: Array<Problem>
  readonly lost: Array<Problem>
}

export const empty = (): Outcomes => ({ settled: new Set(), indexed: 0, problems: [], lost: [] })

const watchedAtOnce = 500

export const watch = (
  todo: ReadonlyArray<Todo>,
  outcomes: Outcomes,
  onSettledUnsafe: (problem: Problem | undefined) => void
) =>
  Effect.forEach(
    todo,
    Effect.fnUntraced(function* ({ itemId, path }) {
      const exit = yield* Effect.exit(DocumentQueue.await(itemId as ItemId))
      const failure = Exit.isFailure(exit) ? Cause.squash(exit.cause) : undefined
      const declared = failure instanceof NotIndexed
      const text = failure === undefined ? null : textOf(failure)
      yield* recordOutcome({ itemId, problem: text, again: text !== null && !declared })
      const problem = text === null ? undefined : { path: printable(path), text }
      if (problem === undefined) outcomes.indexed++
      else if (declared) outcomes.problems.push(problem)
      else outcomes.lost.push(problem)
      outcomes.settled.add(itemId)
      onSettledUnsafe(problem)
    }),
    { concurrency: watchedAtOnce, discard: true }
  )

const textOf = (failure: unknown): string => {
  if (failure instanceof NotIndexed) return failure.text
  return failure instanceof Error ? failure.message : "it ended without an outcome"
}
