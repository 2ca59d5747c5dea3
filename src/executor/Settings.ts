/**
 * Every interval of the runtime, and the chain of margins between them. Pure: a profile gives the
 * defaults, the caller changes some, and a chain that is broken is named with the number to change.
 *
 *   renewal x 3 <= watchdog                          two lost renewals do not end a healthy process
 *   watchdog + forcedExit + abandonAfter < validity  a process has stopped before its lease can end,
 *                                                    a stuck database operation included
 *   probe x 3 <= watchdog                            two late probes do not end a healthy process
 *   staleClaimThreshold > heartbeat (30 s)           nobody's wake is taken who is only slow
 *   pullHeartbeat x 3 <= pullLease                   two lost heartbeats do not end a healthy session
 *
 * `abandonAfter` is our own deadline for a database operation, not the driver's drain of five
 * seconds: that is what lets a lease of three seconds pass the same check.
 */
import { Duration } from "effect"
import { refuse, SettingsRejected, type StartupRefused } from "../database/StartupRefused.ts"

export interface Settings {
  /** How often the lease is renewed, and for how long the database grants it each time. */
  readonly leaseRenewal: Duration.Input
  readonly leaseValidity: Duration.Input
  /** The trust window: this process stops acting so long after its last good renewal was sent. */
  readonly watchdog: Duration.Input
  /** What a process that must end gets before it is killed. */
  readonly forcedExit: Duration.Input
  /** Our deadline for one database operation that does not answer. */
  readonly abandonAfter: Duration.Input
  /** How often expired peers are looked for, and how many of them in one scan. */
  readonly recoveryScan: Duration.Input
  readonly recoveryScanMax: number
  /** How long recovered work waits before it may start again. */
  readonly recoveryGrace: Duration.Input
  /** Queues with the limit `executions`: so many executors may be lost with an item. */
  readonly executionsMax: number
  /** Queues with the limit `consecutive`: so many since its last checkpoint. */
  readonly recoveriesMax: number
  /**
   * How long a peer may be absent before its work is taken, without waiting for its lease to run out.
   * "Infinity" leaves takeover to the lease alone.
   */
  readonly presenceGrace: Duration.Input
  /**
   * How often waits are looked for whose wake was begun and not finished, and how old one has to be:
   * a process died in between. With the wait for the next look, that long may such a wake take.
   */
  readonly staleClaimSweep: Duration.Input
  readonly staleClaimThreshold: Duration.Input
  /** How often a diagnostic item is sent through a private queue of this process. */
  readonly probe: Duration.Input
  /** How often this process looks at its queues for work that nobody takes. */
  readonly queueMonitor: Duration.Input
  /**
   * How long a queue may have work that could start, and room for it, without a claim. Five percent
   * and two looks of the monitor are added, and a slower poll interval counts instead.
   */
  readonly starvation: Duration.Input
  /** How long claimed items may wait in this process for a slot before they are given back. */
  readonly reservationValidity: Duration.Input
  /** How often a pull worker sends a heartbeat, and for how long one keeps all that it executes. */
  readonly pullHeartbeat: Duration.Input
  readonly pullLease: Duration.Input
  /** How long an item that a pull worker was given waits for its activation. */
  readonly pullReservation: Duration.Input
  /** How often reservations, leases and sessions of pull workers that have run out are looked for. */
  readonly capacityScan: Duration.Input
  /** How long what a pull worker was lost with waits before it may start again. */
  readonly capacityGrace: Duration.Input
  /** One attempt's budget where a queue sets none. */
  readonly attemptTimeout: Duration.Input
  /** One settlement's budget: of a quarantined item, and of outcomes on their way into the database. */
  readonly settleTimeout: Duration.Input
  /** What a handler gets to end after it was told to; then the process is ended. */
  readonly cancelGrace: Duration.Input
  /** How often a queue is looked at without a hint. */
  readonly pollInterval: Duration.Input
  /** How long running handlers may go on after a shutdown was asked for. */
  readonly drain: Duration.Input
  /** How long outcomes, and with them idempotency keys, are kept at least. */
  readonly retention: Duration.Input
  /** Bytes of one payload or result, encoded. */
  readonly payloadMax: number
  /** Connections of the pool that handlers use. */
  readonly poolConnectionsMax: number
}

export type Profile = "default" | "short" | "capacity"

const defaults: Settings = {
  leaseRenewal: "10 seconds",
  leaseValidity: "75 seconds",
  watchdog: "45 seconds",
  forcedExit: "5 seconds",
  abandonAfter: "10 seconds",
  recoveryScan: "5 seconds",
  recoveryScanMax: 100,
  recoveryGrace: 0,
  executionsMax: 4,
  recoveriesMax: 10,
  presenceGrace: "1 second",
  staleClaimSweep: "60 seconds",
  staleClaimThreshold: "2 minutes",
  probe: "15 seconds",
  queueMonitor: "5 seconds",
  starvation: "2 minutes",
  reservationValidity: "30 seconds",
  pullHeartbeat: "10 seconds",
  pullLease: "30 seconds",
  pullReservation: "30 seconds",
  capacityScan: "5 seconds",
  capacityGrace: 0,
  attemptTimeout: "30 minutes",
  settleTimeout: "1 minute",
  cancelGrace: "5 seconds",
  pollInterval: "5 seconds",
  drain: "25 seconds",
  retention: "7 days",
  payloadMax: 1_048_576,
  poolConnectionsMax: 10
}

/** A lease of three seconds, for demonstrations and tests: takeover is seen while one watches. */
const short: Settings = {
  ...defaults,
  leaseRenewal: "400 millis",
  leaseValidity: "3 seconds",
  watchdog: "1800 millis",
  forcedExit: "300 millis",
  abandonAfter: "400 millis",
  recoveryScan: "200 millis",
  presenceGrace: "300 millis",
  staleClaimSweep: "5 seconds",
  staleClaimThreshold: "45 seconds",
  probe: "500 millis",
  queueMonitor: "200 millis",
  starvation: "3 seconds",
  reservationValidity: "1 second",
  pullHeartbeat: "500 millis",
  pullLease: "3 seconds",
  pullReservation: "3 seconds",
  capacityScan: "200 millis",
  capacityGrace: "200 millis",
  settleTimeout: "2 seconds",
  cancelGrace: "500 millis",
  pollInterval: "500 millis",
  drain: "5 seconds"
}

/**
 * Pull workers that may be silent for a minute, and are not given up at once: 90 seconds to 3 minutes
 * from the end of one to the next execution. What runs in our own processes returns as by default.
 */
const capacity: Settings = {
  ...defaults,
  pullHeartbeat: "30 seconds",
  pullLease: "90 seconds",
  pullReservation: "30 seconds",
  capacityScan: "30 seconds",
  capacityGrace: "30 seconds"
}

/** All durations in milliseconds. */
export type Resolved = {
  readonly [K in keyof Settings]: number
}

const profiles: Readonly<Record<Profile, Settings>> = { default: defaults, short, capacity }

export const resolve = (
  profile: Profile = "default",
  changes: Partial<Settings> = {}
): Resolved | StartupRefused => {
  const merged: Record<string, Duration.Input> = { ...profiles[profile], ...defined(changes) }
  const resolved: Record<string, number> = {}
  for (const [name, value] of Object.entries(merged)) {
    const millis = counts.has(name) ? Number(value) : toMillis(value)
    const least = mayBeZero.has(name) ? 0 : 1
    const bounded = millis !== undefined && (Number.isFinite(millis) || mayBeInfinite.has(name))
    if (!bounded || millis < least) {
      const rule = `${name} must be positive${mayBeInfinite.has(name) ? "" : " and finite"}`
      return refuse(new SettingsRejected({ rule, settings: [name] }))
    }
    resolved[name] = millis
  }
  const settings = resolved as Resolved
  const broken = rules.find((rule) => !rule.holds(settings))
  if (broken === undefined) return settings
  return refuse(
    new SettingsRejected({
      rule: broken.rule(settings),
      settings: broken.settings
    })
  )
}

/**
 * When a queue counts as starved: work that could start, room for it, and no claim. The longest pause
 * that is none, 5 % for its jitter, and two looks, so that a claim between them is not missed. 136 s
 * with two minutes and looks every five seconds.
 */
export const starvationMillis = (
  settings: Pick<Resolved, "starvation" | "pollInterval" | "queueMonitor">
): number => Math.max(settings.starvation, settings.pollInterval) * 1.05 + 2 * settings.queueMonitor

/** All others are durations. */
export const counts: ReadonlySet<string> = new Set([
  "recoveryScanMax",
  "executionsMax",
  "recoveriesMax",
  "payloadMax",
  "poolConnectionsMax"
])
const mayBeZero = new Set(["recoveryGrace", "capacityGrace"])
const mayBeInfinite = new Set(["presenceGrace"])

const defined = (changes: Partial<Settings>): Partial<Settings> =>
  Object.fromEntries(Object.entries(changes).filter(([, value]) => value !== undefined))

const toMillis = (input: Duration.Input): number | undefined => {
  try {
    return Duration.toMillis(input)
  } catch {
    return undefined
  }
}

/** How often whoever holds work says that it lives, at the slowest: a younger claim proves nothing. */
const heartbeatMillis = 30_000

interface Rule {
  readonly settings: ReadonlyArray<keyof Settings>
  readonly holds: (settings: Resolved) => boolean
  readonly rule: (settings: Resolved) => string
}

const rules: ReadonlyArray<Rule> = [
  {
    settings: ["leaseRenewal", "watchdog"],
    holds: (s) => s.leaseRenewal * 3 <= s.watchdog,
    rule: (s) =>
      `leaseRenewal x 3 (${s.leaseRenewal * 3} ms) is more than watchdog (${s.watchdog} ms): ` +
      `lower leaseRenewal to ${Math.floor(s.watchdog / 3)} ms or raise watchdog`
  },
  {
    settings: ["watchdog", "forcedExit", "abandonAfter", "leaseValidity"],
    holds: (s) => s.watchdog + s.forcedExit + s.abandonAfter < s.leaseValidity,
    rule: (s) =>
      `watchdog + forcedExit + abandonAfter (${s.watchdog + s.forcedExit + s.abandonAfter} ms) is not ` +
      `less than leaseValidity (${s.leaseValidity} ms): raise leaseValidity or lower watchdog`
  },
  {
    settings: ["probe", "watchdog"],
    holds: (s) => s.probe * 3 <= s.watchdog,
    rule: (s) =>
      `probe x 3 (${s.probe * 3} ms) is more than watchdog (${s.watchdog} ms): ` +
      `lower probe to ${Math.floor(s.watchdog / 3)} ms or raise watchdog`
  },
  {
    settings: ["staleClaimThreshold"],
    holds: (s) => s.staleClaimThreshold > heartbeatMillis,
    rule: (s) =>
      `staleClaimThreshold (${s.staleClaimThreshold} ms) is not more than a heartbeat ` +
      `(${heartbeatMillis} ms): it would take work from processes that are only slow`
  },
  {
    settings: ["pullHeartbeat", "pullLease"],
    holds: (s) => s.pullHeartbeat * 3 <= s.pullLease,
    rule: (s) =>
      `pullHeartbeat x 3 (${s.pullHeartbeat * 3} ms) is more than pullLease (${s.pullLease} ms): ` +
      `lower pullHeartbeat to ${Math.floor(s.pullLease / 3)} ms or raise pullLease`
  },
  {
    settings: ["retention"],
    holds: (s) => s.retention >= 86_400_000,
    rule: () => "retention is less than 24 hours"
  }
]
