/**
 * When a claimer looks again although nobody tells it to, because a claim has told it when the next item may
 * start, and until when hints are not worth a claim. Pure.
 *
 *   open --a claim says what is due--> due later: hints are followed
 *     ^ --the whole queue is held---> held: hints are not followed
 *     +-----------at that time------------+
 */
export interface Hold {
  /** Instants are monotonic milliseconds. */
  readonly dueAtMillis: number
  readonly heldUntilMillis: number
}

export const open: Hold = {
  dueAtMillis: Number.POSITIVE_INFINITY,
  heldUntilMillis: Number.NEGATIVE_INFINITY
}

/** What the last row of a claim says. Nothing is due where a queue is paused: it is announced when it goes on. */
export interface Told {
  readonly isHeld: boolean
  /** 0 where more could have been taken by another claim. */
  readonly dueInMillis: number | null
}

/** A timer takes no longer ones than some weeks, and to look once an hour costs nothing. */
const longestMillis = 3_600_000

/**
 * Of several times the first one counts, for each is another key's. The queue is left alone no longer than
 * for a poll interval: its policy may be another one by then.
 */
export const told = (
  hold: Hold,
  { dueInMillis, isHeld }: Told,
  atMillis: number,
  pollMillis: number
): Hold =>
  dueInMillis === null
    ? hold
    : {
        dueAtMillis: Math.min(hold.dueAtMillis, atMillis + Math.min(dueInMillis, longestMillis)),
        heldUntilMillis: isHeld
          ? atMillis + Math.min(dueInMillis, pollMillis)
          : hold.heldUntilMillis
      }

export const isDue = (hold: Hold, atMillis: number): boolean => hold.dueAtMillis <= atMillis

/** Whether a claim would find nothing, whatever waits. */
export const holds = (hold: Hold, atMillis: number): boolean => atMillis < hold.heldUntilMillis

/** Until it is due, without an end where nothing is. */
export const pauseMillis = (hold: Hold, atMillis: number): number =>
  Math.max(0, hold.dueAtMillis - atMillis)
