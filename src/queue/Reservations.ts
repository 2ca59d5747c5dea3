/**
 * What a process has claimed and not started yet, in the order of the claims. Nobody else can run it
 * meanwhile, so whoever holds reservations gives back those that have waited for too long.
 *
 * Plain synchronous state, a batch for each claim: what has been taken out of a batch is let go with it,
 * so a buffer that never runs empty does not grow. After a crash the claims are recovered through the
 * executor's lease.
 */
export interface Reservations<A> {
  readonly count: () => number
  /** Of one claim. The array is theirs from then on. */
  readonly add: (items: Array<A>, nowMillis: number) => void
  /** The one that has waited for the longest. */
  readonly next: () => A | undefined
  readonly remove: (isIt: (item: A) => boolean) => A | undefined
  /** Everything that has waited since then or for longer. */
  readonly takeSince: (millis: number) => ReadonlyArray<A>
  readonly takeAll: () => ReadonlyArray<A>
}

export const make = <A>(): Reservations<A> => {
  interface Batch {
    readonly sinceMillis: number
    readonly items: Array<A>
    head: number
  }
  let batches: Array<Batch> = []
  let count = 0

  const takeAll = () => {
    const items = batches.flatMap((batch) => batch.items.slice(batch.head))
    batches = []
    count = 0
    return items
  }

  return {
    count: () => count,
    add: (items, nowMillis) => {
      if (items.length === 0) return
      batches.push({ sinceMillis: nowMillis, items, head: 0 })
      count += items.length
    },
    next: () => {
      const batch = batches[0]
      if (batch === undefined) return undefined
      const item = batch.items[batch.head++]
      if (batch.head === batch.items.length) batches.shift()
      count--
      return item
    },
    remove: (isIt) => {
      for (const [index, batch] of batches.entries()) {
        const at = batch.items.findIndex((item, place) => place >= batch.head && isIt(item))
        if (at < 0) continue
        const [item] = batch.items.splice(at, 1)
        if (batch.head === batch.items.length) batches.splice(index, 1)
        count--
        return item
      }
      return undefined
    },
    takeSince: (millis) => {
      const younger = batches.findIndex((batch) => batch.sinceMillis > millis)
      if (younger < 0) return takeAll()
      if (younger === 0) return []
      const older = batches.splice(0, younger)
      const items = older.flatMap((batch) => batch.items.slice(batch.head))
      count -= items.length
      return items
    },
    takeAll
  }
}
