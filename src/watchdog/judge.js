// @ts-check
/**
 * What the watchdog's thread decides about the deadlines it finds. Pure, apart from what it has seen.
 *
 * Time in which the thread itself stood still is nobody's fault: with it the whole process was stopped,
 * or had no processor, so it is added to each deadline that was known by then. The lease is excepted,
 * because its time runs in the database whatever happens here.
 */
import { Slot, slotsMax } from "./memory.js"

/** How often the thread looks: 40 to 180 times within the watchdog's time. */
export const pollMillisOf = (/** @type {number} */ watchdogMillis) =>
  Math.min(250, Math.max(10, watchdogMillis / 20))

/**
 * @typedef {object} Verdict
 * @property {"eventLoop" | "lease" | "suspended" | "actor"} reason
 * @property {number} slot
 */

/**
 * @param {{ readonly watchdogNanos: bigint, readonly pollNanos: bigint }} orders
 * @returns {(deadlines: BigInt64Array, slots: number, nowNanos: bigint, uptimeNanos: bigint) => Verdict | undefined}
 */
export const makeJudge = ({ pollNanos, watchdogNanos }) => {
  const known = new BigInt64Array(slotsMax)
  const stoodBefore = new BigInt64Array(slotsMax)
  let stoodNanos = 0n
  /** @type {bigint | undefined} */
  let previousNanos

  const stood = (/** @type {number} */ slot) => stoodNanos - (stoodBefore[slot] ?? 0n)
  /** Once the watchdog's time at most: a machine without any processor left must not pardon for ever. */
  const pardon = (/** @type {number} */ slot) => {
    const nanos = stood(slot)
    return nanos < watchdogNanos ? nanos : watchdogNanos
  }

  return (deadlines, slots, nowNanos, uptimeNanos) => {
    for (let slot = 0; slot < slots; slot++) {
      const deadline = Atomics.load(deadlines, slot)
      if (deadline === known[slot]) continue
      known[slot] = deadline
      stoodBefore[slot] = stoodNanos
    }
    // After the values were read: one that was written before the pause is pardoned for it, too.
    if (previousNanos !== undefined && nowNanos - previousNanos > 2n * pollNanos) {
      stoodNanos += nowNanos - previousNanos
    }
    previousNanos = nowNanos

    const isOver = (/** @type {number} */ slot, /** @type {bigint} */ atNanos) => {
      const deadline = known[slot] ?? 0n
      return deadline !== 0n && atNanos >= deadline
    }
    // Whatever is late first: with a blocked loop it is the lease or an actor, and they are not why.
    // A process that was stopped is not blocked, for however long: it may look before the loop has beaten.
    const lastBeatNanos = (known[Slot.main] ?? 0n) - watchdogNanos + stood(Slot.main)
    const isBlocked = known[Slot.main] !== 0n && nowNanos - lastBeatNanos >= watchdogNanos / 2n

    if (isOver(Slot.lease, nowNanos)) {
      return { reason: isBlocked ? "eventLoop" : "lease", slot: Slot.lease }
    }
    if (isOver(Slot.uptime, uptimeNanos)) {
      // Where nothing was suspended the two end together, and the uptime is read later and in steps of
      // 10 ms: it may be the first by so little.
      const isLease = isOver(Slot.lease, nowNanos + 2n * pollNanos)
      const reason = isBlocked ? "eventLoop" : isLease ? "lease" : "suspended"
      return { reason, slot: Slot.uptime }
    }
    if (isOver(Slot.main, nowNanos - pardon(Slot.main))) {
      return { reason: "eventLoop", slot: Slot.main }
    }
    for (let slot = Slot.actors; slot < slots; slot++) {
      if (isOver(slot, nowNanos - pardon(slot))) {
        return { reason: isBlocked ? "eventLoop" : "actor", slot }
      }
    }
    return undefined
  }
}
