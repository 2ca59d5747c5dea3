/**
 * Why available work is not claimed: the one decision behind what `tenure executors`, `tenure doctor` and
 * `tenure items show` say. Each of the reasons may be true at once; the first in this order is the one
 * that helps. Pure.
 */

export interface WaitFacts {
  /** Null: nobody has ever run the queue. */
  readonly application: string | null
  /** Who has started it; null for work that anybody may start. */
  readonly version: string | null
  /** With a live lease: of the application, and of them those that may run it. */
  readonly executors: number
  readonly executorsOfVersion: number
  readonly isPaused: boolean
  readonly isRateUsed: boolean
  readonly isFull: boolean
  readonly isKeyFull: boolean
  readonly isKeyRateUsed: boolean
  /** It may be its turn only now: nobody has looked twice. */
  readonly isNew: boolean
  readonly isSuspect: boolean
  /** Somebody claims from the queue. */
  readonly isServed: boolean
}

export type WaitReason =
  | "unknownQueue"
  | "nobody"
  | "version"
  | "paused"
  | "rate"
  | "globalLimit"
  | "keyLimit"
  | "keyRate"
  | "turn"
  | "suspect"
  | "busy"
  | "unclaimed"

export const waitReason = (facts: WaitFacts): WaitReason => {
  if (facts.application === null) return "unknownQueue"
  if (facts.executors === 0) return "nobody"
  if (facts.version !== null && facts.executorsOfVersion === 0) return "version"
  if (facts.isPaused) return "paused"
  if (facts.isRateUsed) return "rate"
  if (facts.isFull) return "globalLimit"
  if (facts.isKeyFull) return "keyLimit"
  if (facts.isKeyRateUsed) return "keyRate"
  if (facts.isNew) return "turn"
  if (facts.isSuspect) return "suspect"
  return facts.isServed ? "busy" : "unclaimed"
}
