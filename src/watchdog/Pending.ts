/**
 * Why work waits, in words for a person: what the monitor's facts say of the oldest item that waits on a
 * queue, and of the one that was claimed first. Pure.
 */
import type { QueueFacts } from "./MonitorStore.ts"
import { waitReason } from "./Waiting.ts"

/** Why its oldest item has not been claimed; undefined when nothing waits. */
export const whyWaiting = (facts: QueueFacts): string | undefined => {
  if (facts.waiting_id === null) return undefined
  const reason = waitReason({
    application: facts.application_name,
    version: facts.waiting_version,
    executors: facts.executors,
    executorsOfVersion: facts.executors_of_version,
    isPaused: facts.paused_at !== null,
    isRateUsed: facts.is_rate_full,
    isFull: facts.is_full,
    isKeyFull: !facts.has_startable && facts.per_key_limit !== null,
    isKeyRateUsed: !facts.has_startable,
    isNew: false,
    isSuspect: facts.waiting_is_suspect === true,
    isServed: facts.last_claim_at !== null
  })
  switch (reason) {
    case "unknownQueue":
      return "no executor has ever run this queue"
    case "nobody":
      return `no executor of ${facts.application_name} holds a lease: start one`
    case "version":
      return (
        `version ${facts.waiting_version} has started it, and no executor of that version holds a lease: ` +
        `start one, or one that accepts it`
      )
    case "paused":
      return `the queue has been paused for ${ago(facts, facts.paused_at ?? facts.observed_at)}: resume it`
    case "rate":
      return `the queue's rate is used up: ${facts.rate_limit} in ${inWords(facts.rate_window_ms ?? 0)}`
    case "globalLimit":
      return `the queue's limit of ${facts.global_limit} running items is reached`
    case "keyLimit":
      return `every key that waits runs as many items as it may (${facts.per_key_limit})`
    case "keyRate":
      return "every key that waits has used up its rate"
    case "suspect":
      return "an executor was lost with it: each process takes one such item at a time"
    case "turn":
      return "it may be its turn only now"
    case "busy":
      return (
        `the last claim was ${ago(facts, facts.last_claim_at ?? facts.observed_at)} ago: ` +
        "every slot is taken, or the claimers stand still"
      )
    case "unclaimed":
      return "nobody has claimed from this queue: no executor that runs it has a free slot, or none runs it"
  }
}

/** How long something has been so, by the clock that wrote both times. */
export const ago = (facts: QueueFacts, since: Date): string =>
  inWords(facts.observed_at.getTime() - since.getTime())

const units = [
  ["d", 86_400_000],
  ["h", 3_600_000],
  ["min", 60_000],
  ["s", 1000]
] as const

/** In its largest unit, and rounded down: `3 min`. */
export const inWords = (millis: number): string => {
  const [unit, size] = units.find(([, size]) => millis >= size) ?? units[3]
  return `${Math.max(0, Math.floor(millis / size))} ${unit}`
}
