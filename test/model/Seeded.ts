/**
 * Random choices that a seed repeats. Each worker of a run has a generator of its own, so that what one
 * chooses does not depend on how the server schedules the others.
 */
export interface Seeded {
  /** In [0, 1). */
  readonly next: () => number
  /** A whole number from 0 to `below` - 1. */
  readonly int: (below: number) => number
  readonly chance: (probability: number) => boolean
  readonly pick: <A>(from: ReadonlyArray<A>) => A
  /** One of the entries, each as often as its weight says. */
  readonly weighted: <A>(from: ReadonlyArray<readonly [weight: number, value: A]>) => A
}

export const seeded = (seed: number): Seeded => {
  let state = seed >>> 0
  // Mulberry32: 32 bits of state, which is plenty for choices.
  const next = (): number => {
    state = (state + 0x6d2b79f5) >>> 0
    let mixed = state
    mixed = Math.imul(mixed ^ (mixed >>> 15), mixed | 1)
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61)
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 4294967296
  }
  const int = (below: number): number => Math.floor(next() * below)
  const pick = <A>(from: ReadonlyArray<A>): A => {
    const value = from[int(from.length)]
    if (value === undefined) throw new Error("nothing to pick from")
    return value
  }
  return {
    next,
    int,
    chance: (probability) => next() < probability,
    pick,
    weighted: (from) => {
      let rest = next() * from.reduce((sum, [weight]) => sum + weight, 0)
      for (const [weight, value] of from) {
        rest -= weight
        if (rest < 0) return value
      }
      return pick(from)[1]
    }
  }
}
