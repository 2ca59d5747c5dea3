/**
 * Whether a queue starves, decided from a sequence of looks at it. Pure.
 *
 *   starved     there was work that could start and room for it at every look, and nobody claimed
 *   stalled     the same, and this process has not even asked, whatever its peers do
 *   unstarted   this process held claimed work and room for it at every look, and started nothing
 *
 * Each has a clock of its own, which begins at the first look that shows the condition. A look that
 * does not, a claim, an answer, a start: whatever breaks the condition begins it anew. What was not
 * looked at is not known, so a pause between two looks does too.
 */

/** Instants are monotonic milliseconds of this process. */
export interface Look {
  readonly atMillis: number
  /** Work could start: no limit, version, lock or delay holds it back, and this process has a slot for it. */
  readonly canClaim: boolean
  /** Claimed work has waited here since the last look, with room for it, and nothing was started. */
  readonly startsNothing: boolean
  /** The last claim by anybody that took something. */
  readonly claimedMillis: number
  /** The last answer to a claim of this process, an empty one included. */
  readonly answeredMillis: number
}

export type Verdict = "starved" | "stalled" | "unstarted"

/** Since when each condition holds without a break. */
export interface Clocks {
  readonly lookedMillis: number
  readonly starvedMillis: number | undefined
  readonly stalledMillis: number | undefined
  readonly unstartedMillis: number | undefined
}

export const none: Clocks = {
  lookedMillis: -Infinity,
  starvedMillis: undefined,
  stalledMillis: undefined,
  unstartedMillis: undefined
}

export interface Limits {
  readonly starvationMillis: number
  /** Between two looks of one sequence. */
  readonly pauseMillis: number
}

export const advance = (clocks: Clocks, look: Look, { pauseMillis }: Limits): Clocks => {
  const before = look.atMillis - clocks.lookedMillis > pauseMillis ? none : clocks
  const since = (holds: boolean, sinceMillis: number | undefined, brokenMillis: number) =>
    holds
      ? Math.min(look.atMillis, Math.max(sinceMillis ?? look.atMillis, brokenMillis))
      : undefined
  return {
    lookedMillis: look.atMillis,
    starvedMillis: since(look.canClaim, before.starvedMillis, look.claimedMillis),
    stalledMillis: since(look.canClaim, before.stalledMillis, look.answeredMillis),
    unstartedMillis: since(look.startsNothing, before.unstartedMillis, -Infinity)
  }
}

/** The worst first: where nobody claims, this process does not either. */
export const judge = (clocks: Clocks, { starvationMillis }: Limits): Verdict | undefined => {
  const isOver = (sinceMillis: number | undefined) =>
    sinceMillis !== undefined && clocks.lookedMillis - sinceMillis >= starvationMillis
  if (isOver(clocks.unstartedMillis)) return "unstarted"
  if (isOver(clocks.starvedMillis)) return "starved"
  return isOver(clocks.stalledMillis) ? "stalled" : undefined
}

/**
 * Whether only a lock of somebody else could still excuse the queue: from half the time on it is asked
 * for, because the question is not free.
 */
export const isSerious = (clocks: Clocks, { starvationMillis }: Limits): boolean =>
  [clocks.starvedMillis, clocks.stalledMillis].some(
    (since) => since !== undefined && clocks.lookedMillis - since >= starvationMillis / 2
  )
