/**
 * What ends a process that cannot be trusted to do its work, although its lease may still be good:
 * it stops in order if it can, and is killed after `forcedExit` if it cannot.
 *
 *   eventLoop   the main thread ran nothing for the watchdog's time
 *   lease       no renewal that was sent within that time was granted
 *   suspended   the machine stood still for longer than the lease allows
 *   actor       a loop that is due made no progress: renewal, scan, probe, audit, ..
 *   starved     a queue has work that could start and room for it, and nobody claims
 *   stalled     the same, and it is this process that does not claim
 *   unstarted   this process has claimed work, has room for it, and does not start it
 *   unsettled   outcomes do not get into the database
 *   stubborn    a handler was told to stop and does not
 *   watcher     the watchdog's own thread has stopped
 */
import { Schema } from "effect"

export const WatchdogReason = Schema.Literals([
  "eventLoop",
  "lease",
  "suspended",
  "actor",
  "starved",
  "stalled",
  "unstarted",
  "unsettled",
  "stubborn",
  "watcher"
])
export type WatchdogReason = typeof WatchdogReason.Type

/** The name of an actor or of a queue at most: never anything of an item. */
const subjectMax = 200

/** The watchdog ends this process; its peers take the work over. Restart it, and look at the reason. */
export class WatchdogFired extends Schema.TaggedError<WatchdogFired>()("WatchdogFired", {
  executorId: Schema.String,
  reason: WatchdogReason,
  subject: Schema.optional(Schema.String.check(Schema.isMaxLength(subjectMax)))
}) {
  override get message(): string {
    const of = this.subject === undefined ? "" : ` (${this.subject})`
    return `The watchdog ends executor ${this.executorId}: ${sentences[this.reason]}${of}.`
  }
}

export const subjectOf = (name: string): string => name.slice(0, subjectMax)

const sentences: Readonly<Record<WatchdogReason, string>> = {
  eventLoop: "its main thread is blocked",
  lease: "its lease was not renewed in time",
  suspended: "its machine was suspended for longer than the lease allows",
  actor: "a loop makes no progress",
  starved: "a queue has work and room for it, and nobody claims",
  stalled: "it does not claim from a queue that has work and room for it",
  unstarted: "it does not start what it has claimed",
  unsettled: "outcomes do not get into the database",
  stubborn: "a handler that was told to stop does not",
  watcher: "the watchdog's own thread has stopped"
}
