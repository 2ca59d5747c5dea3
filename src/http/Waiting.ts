/**
 * Long polls in line for work, and who of them looks when there may be some.
 *
 *   in line --told--> looks --nothing--> in line again, at the end
 *                       |
 *                       +--found something--> answers, and tells the next in line
 *
 * A hint says that there is work, not how much. It goes to the first in line alone: were all of a hundred
 * told of one item, ninety-nine would ask the database for nothing. So whoever found something tells the
 * next, and so does whoever left before it could look. What is told during a look is kept: that look may
 * have come too early.
 *
 * Nothing here is stored, and a hint that is lost costs a poll interval.
 */
import { Effect, type Scope } from "effect"

/** A queue, or the session of a worker whose slots are all taken. */
export type Line = number | string

export interface Waiting {
  /** There may be something for that line, or for any. */
  readonly hintUnsafe: (line?: Line) => void
  /** Everybody, whatever they wait for. */
  readonly tellAllUnsafe: () => void
  /** At the end of those lines until the scope closes. The effect completes when told since then. */
  readonly join: (
    lines: ReadonlyArray<Line>
  ) => Effect.Effect<Effect.Effect<void>, never, Scope.Scope>
  readonly countUnsafe: () => number
}

interface Waiter {
  told: boolean
  resume: (() => void) | undefined
}

export const make = (): Waiting => {
  const lines = new Map<Line, Set<Waiter>>()
  let count = 0

  const tell = (waiter: Waiter): void => {
    waiter.told = true
    waiter.resume?.()
  }

  const tellFirst = (waiters: Iterable<Waiter>): void => {
    for (const waiter of waiters) return tell(waiter)
  }

  const hintUnsafe = (line?: Line): void => {
    if (line !== undefined) return tellFirst(lines.get(line) ?? [])
    for (const waiters of lines.values()) tellFirst(waiters)
  }

  const enter = (joined: ReadonlyArray<Line>): Waiter => {
    const waiter: Waiter = { told: false, resume: undefined }
    for (const line of joined) lines.set(line, (lines.get(line) ?? new Set()).add(waiter))
    count++
    return waiter
  }

  const leave = (waiter: Waiter, joined: ReadonlyArray<Line>): void => {
    count--
    for (const line of joined) {
      const waiters = lines.get(line)
      waiters?.delete(waiter)
      if (waiters?.size === 0) lines.delete(line)
      if (waiter.told) hintUnsafe(line)
    }
  }

  return {
    hintUnsafe,
    tellAllUnsafe: () => {
      for (const waiters of lines.values()) for (const waiter of waiters) tell(waiter)
    },
    countUnsafe: () => count,
    join: (joined) =>
      Effect.map(
        Effect.acquireRelease(
          Effect.sync(() => enter(joined)),
          (waiter) => Effect.sync(() => leave(waiter, joined))
        ),
        (waiter) =>
          Effect.callback<void>((resume) => {
            const answer = () => {
              waiter.told = false
              resume(Effect.void)
            }
            if (waiter.told) return answer()
            waiter.resume = answer
            return Effect.sync(() => {
              waiter.resume = undefined
            })
          })
      )
  }
}
