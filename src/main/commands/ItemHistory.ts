/** What a person is told of one item: why it is where it is, and what has happened to it. Pure. */
import type { AuditRow, CheckpointRow, ItemDetail, WaitRow } from "../../queue/ItemStore.ts"
import type { ListedQuarantine } from "../../recovery/SettlementStore.ts"
import { inWords } from "../../watchdog/Pending.ts"
import { waitReason } from "../../watchdog/Waiting.ts"
import { detailOf } from "./Audit.ts"

/** Why it is in its state, as one sentence. */
export const whyItem = (
  item: ItemDetail,
  wait: WaitRow | undefined,
  quarantine: ListedQuarantine | undefined
): string => {
  switch (item.state) {
    case "available":
      return `It is available: ${wait === undefined ? "it has moved at this moment" : whyAvailable(wait)}.`
    case "leased":
      return `It runs: ${item.owner ?? "somebody"} has claimed it, and this is attempt ${item.attempt}.`
    case "delayed":
      return `It waits until ${item.due_at?.toISOString()}${whyDelayed(item)}.`
    case "failed":
      return `It has failed: ${whyFailed(item, quarantine)}.`
    case "completed":
      return `It is completed, by attempt ${item.attempt}.`
    case "cancelled":
      return "It was cancelled."
    case "sleeping":
    case "waiting":
    case "waking":
      return `It is ${item.state} in a durable wait, ${item.due_at === null ? "until it is told" : `until ${item.due_at.toISOString()} at the latest`}.`
    default:
      return `It is ${item.state}.`
  }
}

const whyAvailable = (facts: WaitRow): string => {
  const reason = waitReason({
    application: facts.application_name,
    version: facts.version,
    executors: facts.executors,
    executorsOfVersion: facts.executors_of_version,
    isPaused: facts.paused_at !== null,
    isRateUsed: facts.is_rate_used,
    isFull: facts.is_full,
    isKeyFull: facts.is_key_full,
    isKeyRateUsed: facts.is_key_rate_used,
    isNew: false,
    isSuspect: facts.suspect,
    isServed: facts.last_claim_at !== null
  })
  switch (reason) {
    case "unknownQueue":
      return "no executor has ever run this queue"
    case "nobody":
      return `no executor of ${facts.application_name} holds a lease: start one`
    case "version":
      return `version ${facts.version} has started it, and no executor of that version holds a lease`
    case "paused":
      return `its queue has been paused for ${since(facts, facts.paused_at)}`
    case "rate":
      return "the rate of its queue is used up for now"
    case "globalLimit":
      return `its queue runs as many items as it may (${facts.global_limit})`
    case "keyLimit":
      return `its key runs as many items as it may (${facts.per_key_limit})`
    case "keyRate":
      return "the rate of its key is used up for now"
    case "suspect":
      return "an executor was lost with it, and a process takes one such item at a time"
    case "busy":
      return `others are before it, or every slot is taken; the last claim was ${since(facts, facts.last_claim_at)} ago`
    default:
      return "nobody has claimed from its queue: no executor that runs it has a free slot, or none runs it"
  }
}

const since = (facts: WaitRow, at: Date | null): string =>
  inWords(facts.observed_at.getTime() - (at ?? facts.observed_at).getTime())

const whyDelayed = (item: ItemDetail): string => {
  if ((item.losses ?? 0) > 0) return ", a pause after an executor was lost with it"
  if ((item.failures ?? 0) > 0) return ", the pause before its next try"
  return (item.attempt ?? 0) > 0 ? ", given back by an executor" : ", as it was handed in"
}

const whyFailed = (item: ItemDetail, quarantine: ListedQuarantine | undefined): string => {
  switch (item.reason) {
    case "DeclaredError":
      return `its handler has answered with an error, after ${item.failures} failures before that`
    case "HandlerDied":
      return "its handler has died"
    case "DeadlineExceeded":
      return `its deadline ${item.deadline_at?.toISOString() ?? ""} has passed`
    default:
      return (
        `${item.losses} executors were lost with it (${item.reason}); in quarantine it is ` +
        (quarantine?.state === "open" ? "open, and nobody has dealt with it" : "settled")
      )
  }
}

export interface HistoryEntry {
  readonly at: Date
  readonly what: string
}

/** In order of time. */
export const historyOf = (
  item: ItemDetail,
  checkpoints: ReadonlyArray<CheckpointRow>,
  quarantine: ListedQuarantine | undefined,
  audit: ReadonlyArray<AuditRow>
): ReadonlyArray<HistoryEntry> => {
  const entry = (at: Date | null | undefined, what: string): ReadonlyArray<HistoryEntry> =>
    at == null ? [] : [{ at, what }]
  return [
    ...entry(item.enqueued_at, "handed in"),
    ...checkpoints.flatMap(({ attempt, name, written_at }) =>
      entry(written_at, `checkpoint ${name}, attempt ${attempt}`)
    ),
    ...audit.flatMap((one) => {
      const detail = detailOf(one)
      return entry(one.at, `${one.event} by ${one.actor}${detail === null ? "" : ` (${detail})`}`)
    }),
    ...entry(item.claimed_at, `claimed by ${item.owner}, attempt ${item.attempt}`),
    ...entry(item.finished_at, item.reason === null ? item.state : `${item.state}: ${item.reason}`),
    ...entry(quarantine?.settled_at, `settled in quarantine by ${quarantine?.settled_by}`)
  ].sort((one, other) => one.at.getTime() - other.at.getTime())
}

export const formatHistory = (history: ReadonlyArray<HistoryEntry>): string =>
  history.map(({ at, what }) => `${at.toISOString()}  ${what}`).join("\n")
