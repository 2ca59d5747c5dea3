/**
 * Which of the peers that a watcher misses it may have revoked: pure.
 *
 *   unknown --there--> seen --missing--> absent --grace over, renewed since--> condemned
 *                       ^                  |                                      |
 *                       +--there again-----+--left the ring--> forgotten          +--asked: it lives--> spared
 *
 * - Only who was there in the time of this session of the watcher's own can become absent: it has seen
 *   him, or he came later than it did. A server that starts again frees every lock, and whoever comes
 *   back first must not condemn the others.
 * - An absence begins with the first look that misses its member, by the database's clock. The grace
 *   has to pass on that clock and on the monotonic one: neither alone tells a jump from time.
 * - The watcher renews after that look before it condemns: it may be the one that was cut off.
 * - A member that has renewed since is spared for as long as it is absent. Its lease decides.
 */

/** One answer of the database. Instants are microseconds of its clock. */
export interface Look {
  readonly atMicros: number
  /** Since when the watcher's own session holds its lock; `undefined` when it does not. */
  readonly heldAtMicros: number | undefined
  readonly renewedAtMicros: number
  /** Monotonic, when the answer had come. */
  readonly nanos: bigint
  /** All members were looked at. */
  readonly isRound: boolean
  readonly present: ReadonlyArray<string>
  readonly missing: ReadonlyArray<string>
  /** Of the missing: who took his lock after the watcher took its own. */
  readonly newcomers: ReadonlyArray<string>
}

export interface Absence {
  readonly sinceMicros: number
  readonly sinceNanos: bigint
  readonly isSpared: boolean
}

export interface Watch {
  readonly heldAtMicros: number | undefined
  readonly seen: ReadonlySet<string>
  readonly absences: ReadonlyMap<string, Absence>
}

/** What the database answers when it is asked to mark an absent member. */
export type Answer =
  | "marked"
  | "unknown"
  | "revoking"
  | "revoked"
  | "released"
  | "left"
  | "present"
  | "returned"
  | "renewed"
  | "early"
  | "busy"
  | "restarted"
  | "unfit"
  | "alone"

export const blind: Watch = { heldAtMicros: undefined, seen: new Set(), absences: new Map() }

/** `missing` has to cover everybody who is absent already; whoever is in neither list has left. */
export const looked = (watch: Watch, look: Look, graceMillis: number): Watch => {
  const { heldAtMicros } = look
  if (heldAtMicros === undefined) return blind
  const before = heldAtMicros === watch.heldAtMicros ? watch : { ...blind, heldAtMicros }
  const missed = look.missing.filter((id) => before.seen.has(id) || look.newcomers.includes(id))
  const absences = new Map<string, Absence>()
  for (const id of missed) {
    const known = before.absences.get(id)
    // A clock that was set back would never reach the end of the grace.
    if (known !== undefined && known.sinceMicros <= look.atMicros) absences.set(id, known)
    // Who came back itself a moment ago has not given the others the time to.
    else if (look.atMicros - heldAtMicros >= graceMillis * 1000) {
      absences.set(id, {
        sinceMicros: look.atMicros,
        sinceNanos: look.nanos,
        isSpared: false
      })
    }
  }
  const seen = new Set([...(look.isRound ? [] : before.seen), ...missed, ...look.present])
  return { heldAtMicros, seen, absences }
}

/** Whom to have marked, and since when they are missed. */
export const condemned = (
  watch: Watch,
  look: Look,
  graceMillis: number
): ReadonlyArray<{ readonly id: string; readonly sinceMicros: number }> =>
  pending(watch).flatMap(([id, absence]) =>
    remainingMillis(absence, look, graceMillis) <= 0 && look.renewedAtMicros > absence.sinceMicros
      ? [{ id, sinceMicros: absence.sinceMicros }]
      : []
  )

export const answered = (watch: Watch, id: string, answer: Answer): Watch => {
  const absence = watch.absences.get(id)
  if (absence === undefined || askAgain.has(answer)) return watch
  const absences = new Map(watch.absences)
  if (answer === "renewed") absences.set(id, { ...absence, isSpared: true })
  else absences.delete(id)
  return { ...watch, absences }
}

/** Whether somebody is absent since the watcher's last renewal: then it has to renew. */
export const mustRenew = (watch: Watch, look: Look): boolean =>
  pending(watch).some(([, absence]) => look.renewedAtMicros <= absence.sinceMicros)

/**
 * Until the next look: at the end of a grace, if that comes first. The watchers of one ring together
 * stay below 400 looks a second.
 */
export const pauseMillis = (watch: Watch, look: Look, graceMillis: number): number =>
  Math.min(
    Math.max(250, (watch.seen.size + 1) * 2.5),
    ...pending(watch).flatMap(([, absence]) => {
      const millis = remainingMillis(absence, look, graceMillis)
      return millis > 0 ? [millis] : []
    })
  )

/**
 * How often all members are looked at: whom a watcher has never seen it cannot condemn. Each of n watchers
 * looks at n then, so that with many of them it is done less often: 20,000 looks a second with 1,000.
 */
export const roundMillis = (watch: Watch): number => Math.max(10_000, (watch.seen.size + 1) * 50)

const askAgain: ReadonlySet<Answer> = new Set(["early", "busy", "restarted", "unfit", "alone"])

const pending = (watch: Watch) => [...watch.absences].filter(([, { isSpared }]) => !isSpared)

/** On whichever clock has more left. */
const remainingMillis = (absence: Absence, look: Look, graceMillis: number): number =>
  graceMillis -
  Math.min(
    (look.atMicros - absence.sinceMicros) / 1000,
    Number(look.nanos - absence.sinceNanos) / 1e6
  )
