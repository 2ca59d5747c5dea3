/**
 * What the facts of the registry and of the queues mean. Pure.
 *
 * Work stands still for one of these reasons, asked in this order:
 *   claimed    its owner is in no registry; or holds no lease, and nobody live may take it over
 *   available  nobody has ever run its queue; nobody live may go on with it; a limit is reached; every
 *              slot may be taken; or else nobody claims although somebody could
 * What is delayed waits for its time and does not stand still, unless its time has passed.
 */
import { waitReason } from "../../watchdog/Waiting.ts"
import type { Limits } from "./Diagnosis.ts"
import type {
  Claims,
  DoubtfulExecutor,
  Head,
  LateLeases,
  LateSchedule,
  LiveGroup,
  Overdue,
  Quarantined,
  ServerClock
} from "./DoctorStore.ts"
import { type Finding, formatMillis, literal, ok, problem, warning } from "./Finding.ts"

export interface WorkFacts {
  readonly live: ReadonlyArray<LiveGroup>
  readonly doubtful: ReadonlyArray<DoubtfulExecutor>
  readonly claims: ReadonlyArray<Claims>
  readonly heads: ReadonlyArray<Head>
  /** Of the heads, those that were the first of their lane again after a poll interval. */
  readonly unmoved: ReadonlyArray<string>
  readonly overdue: Overdue
  readonly lateSchedules: ReadonlyArray<LateSchedule>
  readonly lateLeases: ReadonlyArray<LateLeases>
  readonly roomMillis: number
  readonly quarantined: ReadonlyArray<Quarantined>
  readonly clock: ServerClock
  /** The database's clock less this machine's, and how far off that can be. */
  readonly aheadMillis: number
  readonly uncertainMillis: number
}

export const judgeWork = (facts: WorkFacts, limits: Limits): ReadonlyArray<Finding> => [
  ...judgeClock(facts, limits),
  ...judgeMargins(facts, limits),
  ...judgeVersions(facts),
  ...judgeExecutors(facts, limits),
  ...judgeClaims(facts),
  ...judgeWaiting(facts),
  ...judgeOverdue(facts, limits),
  ...judgeSchedules(facts),
  ...judgeLeases(facts),
  ...judgeRoom(facts),
  ...judgeQuarantine(facts)
]

const judgeClock = (facts: WorkFacts, limits: Limits): ReadonlyArray<Finding> => {
  const { aheadMillis, clock, uncertainMillis } = facts
  if (!clock.isServers) {
    return [
      problem(
        "clock.replaced",
        "tenure.clock() is not the server's clock, as time travel in a test leaves it: leases and timers follow it",
        {
          sql: [
            "CREATE OR REPLACE FUNCTION tenure.clock() RETURNS timestamptz LANGUAGE sql VOLATILE PARALLEL SAFE " +
              "AS $$ SELECT pg_catalog.clock_timestamp() $$"
          ]
        }
      )
    ]
  }
  const apart = Math.abs(aheadMillis)
  if (apart <= limits.clockDifference + uncertainMillis) {
    return [ok("clock", `the database's clock and this machine's are ${formatMillis(apart)} apart`)]
  }
  return [
    warning(
      "clock.difference",
      `this machine's clock is ${formatMillis(apart)} ${aheadMillis > 0 ? "behind" : "ahead of"} the database's. ` +
        "Leases and timers follow the database's alone; but the times in logs of different machines cannot be " +
        "compared, and instants that a program here gives as notBefore or notAfter are off by as much",
      { action: "let both machines follow the same time servers" }
    )
  ]
}

const judgeMargins = ({ live }: WorkFacts, { settings }: Limits): ReadonlyArray<Finding> => {
  const { abandonAfter, forcedExit, leaseRenewal, leaseValidity, watchdog } = settings
  const chain =
    `renewal ${formatMillis(leaseRenewal)} x 3 <= watchdog ${formatMillis(watchdog)}; ` +
    `watchdog + forced exit ${formatMillis(forcedExit)} + abandoned operation ${formatMillis(abandonAfter)} ` +
    `< validity ${formatMillis(leaseValidity)}`
  const other = live.filter((one) => Math.abs(one.validityMillis - leaseValidity) > 1000)
  return [
    ok("margins", chain),
    ...other.map(({ application, validityMillis, version }) =>
      ok(
        "margins.other",
        `executors of ${application} ${version} run with a validity of ${formatMillis(validityMillis)}`
      )
    )
  ]
}

const judgeVersions = ({ live }: WorkFacts): ReadonlyArray<Finding> => {
  if (live.length === 0) return [ok("executors", "no executor holds a lease: nothing is run now")]
  const applications = Map.groupBy(live, ({ application }) => application)
  return [...applications].map(([application, groups]) => {
    const names = groups.map(({ count, version }) => `${version} (${count})`).join(", ")
    if (groups.length === 1) return ok("executors", `executors of ${application}: ${names}`)
    return warning(
      "versions.mixed",
      `${application} runs several versions: ${names}. Work that one has started is taken over only by the same ` +
        "version, or by one that accepts it",
      { action: "end the deploy, or let the newer version accept the older one" }
    )
  })
}

const judgeExecutors = (facts: WorkFacts, limits: Limits): ReadonlyArray<Finding> =>
  facts.doubtful.flatMap((one): ReadonlyArray<Finding> => {
    const who = `executor ${one.id} (${one.application} ${one.version})`
    if (one.state === "active" && one.silentMillis < 0) {
      return [
        warning(
          "executor.renewedInFuture",
          `${who} has renewed ${formatMillis(-one.silentMillis)} in the future: the database's clock was set back, and ` +
            `if this one is dead its work is taken over so much later`,
          {
            sql: [`SELECT tenure.mark_revoking(${literal(one.id)}, true)`],
            action: "if it is dead"
          }
        )
      ]
    }
    if (one.state === "active" && one.expiredMillis <= 0) {
      return [
        warning(
          "executor.late",
          `${who} has not renewed for ${formatMillis(one.silentMillis)} of ${formatMillis(one.validityMillis)}`,
          {
            action: "look at its process: it is stopped, cut off from the database, or about to end"
          }
        )
      ]
    }
    return one.expiredMillis <= limits.unrevoked ? [] : [unrevoked(one, facts.live)]
  })

const unrevoked = (one: DoubtfulExecutor, live: ReadonlyArray<LiveGroup>): Finding => {
  const { application, blockers, claimed, id, version } = one
  const peers = peersOf(live, application, version)
  const text =
    `executor ${id} (${application} ${version}) expired ${formatMillis(one.expiredMillis)} ago and is not revoked; ` +
    `it holds ${atLeast(claimed)} items. `
  if (blockers.length > 0) {
    return problem(
      "executor.blocked",
      `${text}Its open transactions hold up the revocation: sessions ${blockers.join(", ")}`,
      { sql: [`SELECT tenure.terminate_sessions(${literal(id)})`] }
    )
  }
  const byHand = {
    sql: [
      `SELECT tenure.mark_revoking(${literal(id)})`,
      `SELECT * FROM tenure.revoke(${literal(id)}, interval '10 seconds', interval '0')`
    ]
  }
  if (peers > 0) {
    return problem(
      "executor.unrevoked",
      `${text}${peers} live executors of its version should have done so: look for executor_recovery in their logs`,
      byHand
    )
  }
  const left = `${text}Nobody of its version holds a lease, so nobody takes it over`
  const mend = {
    ...byHand,
    action: `or start ${application} ${version}, or one that accepts it`
  }
  return claimed > 0
    ? problem("executor.orphaned", left, mend)
    : warning("executor.orphaned", left, mend)
}

const peersOf = (live: ReadonlyArray<LiveGroup>, application: string, version: string): number =>
  live.find((one) => one.application === application && one.version === version)?.count ?? 0

/** Counting stops there. */
const atLeast = (count: number): string => (count >= 1000 ? "1000 or more" : String(count))

const judgeClaims = ({ claims, live }: WorkFacts): ReadonlyArray<Finding> =>
  claims.flatMap((one): ReadonlyArray<Finding> => {
    const held = `${atLeast(one.count)} items of queue ${one.queue}, for up to ${formatMillis(one.oldestMillis)},`
    if (one.state === "unknown") return [unknownOwner(one, live, held)]
    // The other states are the executor's own finding.
    if (one.state !== "revoked" && one.state !== "released") return []
    const application = one.application ?? ""
    const version = one.version ?? ""
    if (peersOf(live, application, version) > 0) {
      return [
        warning(
          "claims.late",
          `${held} are claimed by executor ${one.owner}, which is ${one.state}: the next scan hands them back`,
          { action: "look again in a few seconds" }
        )
      ]
    }
    return [
      problem(
        "claims.incompatible",
        `${held} are claimed by executor ${one.owner}, which is ${one.state}; only ${application} ${version}, or one ` +
          "that accepts it, may take them over, and none is live",
        {
          sql: [revoke(one.owner)],
          action: `or start ${application} ${version}, or one that accepts it`
        }
      )
    ]
  })

const revoke = (id: string): string =>
  `SELECT * FROM tenure.revoke(${literal(id)}, interval '10 seconds', interval '0')`

/** Nobody guesses whose it is: a person says it, by a tombstone of the version that is to go on. */
const unknownOwner = (one: Claims, live: ReadonlyArray<LiveGroup>, held: string): Finding => {
  const application = one.queueApplication ?? one.queue
  const version =
    one.laneVersion ?? live.find((group) => group.application === application)?.version ?? "v1"
  return problem(
    "claims.unknownOwner",
    `${held} are claimed by ${one.owner}, which is no executor of this registry, so nobody takes them over: look for ` +
      `who wrote such an owner. Once it is certain that nobody runs them, ${application} ${version} can`,
    {
      sql: [
        "INSERT INTO tenure.executor (id, application_name, application_version, state, registered_at, heartbeat_at, " +
          `expires_at) SELECT ${literal(one.owner)}, ${literal(application)}, ${literal(version)}, 'revoking', t, t, t ` +
          "FROM tenure.clock() t",
        revoke(one.owner)
      ]
    }
  )
}

const judgeWaiting = (facts: WorkFacts): ReadonlyArray<Finding> => {
  const findings = facts.heads.flatMap((head) => {
    const why = whyWaiting(head, facts)
    return why === undefined ? [] : [why]
  })
  return findings.length > 0 ? findings : [ok("waiting", "no queue stands still")]
}

/** Why the first item of a lane has been waiting for long; nothing when it may be its turn only now. */
export const whyWaiting = (
  head: Head,
  { claims, live, unmoved }: Pick<WorkFacts, "claims" | "live" | "unmoved">
): Finding | undefined => {
  const { application, version } = head
  const versions = live.filter((one) => one.application === application)
  const ofVersion = versions.filter((one) => version === null || one.version === version)
  const ofQueue = claims.filter((one) => one.queue === head.queue)
  const claimed = sumOf(ofQueue)
  const running = sumOf(ofQueue.filter(({ state }) => state === "live"))
  const text =
    `queue ${head.queue}: ${head.suspect ? "a suspect" : "work"} has been waiting since it was handed in ` +
    `${formatMillis(head.ageMillis)} ago. `
  const reason = waitReason({
    application,
    version,
    executors: sumOf(versions),
    executorsOfVersion: sumOf(ofVersion),
    isPaused: head.pausedMillis !== null,
    isRateUsed: head.rateUsed,
    isFull: head.globalLimit !== null && claimed >= head.globalLimit,
    isKeyFull:
      head.perKeyLimit !== null && head.key !== null && head.keyRunning >= head.perKeyLimit,
    isKeyRateUsed: head.keyRateUsed,
    isNew: !unmoved.includes(head.item),
    isSuspect: head.suspect,
    isServed: running > 0
  })
  switch (reason) {
    case "turn":
      return undefined
    case "unknownQueue":
      return problem("waiting.unknownQueue", `${text}No worker has ever run this queue`, {
        action: "start one with its handler; or correct the name it was handed in under"
      })
    case "nobody":
      return problem("waiting.nobody", `${text}No executor of ${application} holds a lease`, {
        action: `start ${application}${version === null ? "" : ` ${version}`}`
      })
    case "version":
      return problem(
        "waiting.version",
        `${text}It was started by ${application} ${version}, which nobody runs; live are ` +
          versions.map((one) => one.version).join(", "),
        { action: `start ${version}, or one with accepts: [${JSON.stringify(version)}]` }
      )
    case "paused":
      return warning(
        "waiting.paused",
        `${text}The queue has been paused for ${formatMillis(head.pausedMillis ?? 0)}`,
        { sql: [`SELECT tenure.resume_queue(${literal(head.queue)})`] }
      )
    case "rate":
      return warning(
        "waiting.rate",
        `${text}The queue's rate is used up: ${rateOf(head.rateLimit, head.rateWindowMillis)}`,
        { action: "raise rateLimit, or hand in less" }
      )
    case "globalLimit":
      return warning(
        "waiting.globalLimit",
        `${text}The queue's limit is reached: ${head.globalLimit} run, the oldest for ` +
          formatMillis(Math.max(...ofQueue.map(({ oldestMillis }) => oldestMillis))),
        { action: "raise concurrency.global, or look at what runs" }
      )
    case "keyLimit":
      return warning(
        "waiting.keyLimit",
        `${text}The limit of its key is reached: ${head.perKeyLimit} of that key run`,
        { action: "raise concurrency.perKey, or look at what runs" }
      )
    case "keyRate":
      return warning(
        "waiting.keyRate",
        `${text}The rate of its key is used up: ${rateOf(head.keyRateLimit, head.keyRateWindowMillis)}`,
        { action: "raise rateLimit.perKey, or hand in less with that key" }
      )
    case "suspect":
      return warning(
        "waiting.suspect",
        `${text}Its executor was lost with it, and a process runs one such item at a time`,
        { action: "start more executors, or look at why executors are lost" }
      )
    case "busy":
      return warning(
        "waiting.busy",
        `${text}${sumOf(ofVersion)} live executors may run it and have ${atLeast(running)} of the queue claimed: every slot may be taken`,
        { action: "start more executors, or raise concurrency.perExecutor" }
      )
    case "unclaimed":
      return problem(
        "waiting.unclaimed",
        `${text}${sumOf(ofVersion)} live executors of its application and version claim nothing from the queue`,
        {
          action:
            "look whether one of them has a handler for it, and for executor_watchdog and queue_claimer in their logs; then restart them"
        }
      )
  }
}

const sumOf = (groups: ReadonlyArray<{ readonly count: number }>): number =>
  groups.reduce((sum, { count }) => sum + count, 0)

const rateOf = (limit: number | null, windowMillis: number | null): string =>
  `${limit ?? 0} in ${formatMillis(windowMillis ?? 0)}`

const judgeOverdue = ({ live, overdue }: WorkFacts, limits: Limits): ReadonlyArray<Finding> => {
  const { staleClaimSweep, staleClaimThreshold } = limits.settings
  const late = [
    ["timers", "an item became due", overdue.timers, 0, "queue_wake"] as const,
    ["deadlines", "a deadline passed", overdue.deadlines, 0, "queue_wake"] as const,
    ["waits", "a durable wait was over", overdue.waits, 0, "queue_wake"] as const,
    [
      "wakes",
      "the wake of a waiting item was begun",
      overdue.wakes,
      staleClaimThreshold + staleClaimSweep,
      "stale_claim_sweep"
    ] as const
  ]
  return late.flatMap(([name, what, millis, allowed, loop]) => {
    if (millis === null || millis <= limits.overdue + allowed) return []
    const text = `${what} ${formatMillis(millis)} ago and nobody has done anything about it. `
    return [
      live.length === 0
        ? problem(`overdue.${name}`, `${text}No executor holds a lease; any one would do`, {
            action: "start one"
          })
        : problem(`overdue.${name}`, `${text}Live executors should have`, {
            action: `look for ${loop} in their logs`
          })
    ]
  })
}

/** A schedule is run only by who has its code. */
const judgeSchedules = ({ lateSchedules }: WorkFacts): ReadonlyArray<Finding> =>
  lateSchedules.map(({ application, hasRunner, lateMillis, name }) => {
    const text = `schedule ${name} was due ${formatMillis(lateMillis)} ago and has not fired. `
    return hasRunner
      ? problem("overdue.schedule", `${text}A live executor of ${application} has its code`, {
          action: "look for queue_schedules in its logs"
        })
      : problem("overdue.schedule", `${text}No live executor has the code of its definition`, {
          sql: [`SELECT tenure.pause_schedule(${literal(name)})`],
          action: `or start ${application}: slots that passed in a pause are not made up`
        })
  })

const judgeLeases = ({ lateLeases, live }: WorkFacts): ReadonlyArray<Finding> =>
  lateLeases.map(({ application, count, lateMillis }) => {
    const text =
      `${count} items of ${application} are leased to pull workers that are gone, the oldest since ` +
      `${formatMillis(lateMillis)} ago, and nobody has handed them back. `
    return live.some((one) => one.application === application)
      ? problem("overdue.leases", `${text}Live executors should have`, {
          action: "look for capacity_sweep in their logs"
        })
      : problem("overdue.leases", `${text}No executor of ${application} holds a lease`, {
          action: `start ${application}`
        })
  })

const day = 86_400_000

const judgeRoom = ({ roomMillis }: WorkFacts): ReadonlyArray<Finding> => {
  if (roomMillis >= 7 * day)
    return [ok("buckets", `room is made for ${formatMillis(roomMillis)} ahead`)]
  return [
    warning(
      "buckets.short",
      `room is made for ${formatMillis(Math.max(0, roomMillis))} ahead only: no executor's retention has run for ` +
        "weeks, and a caller will have to make it while he hands in",
      {
        sql: ["SELECT tenure.create_buckets(interval '1344 hours')"],
        action: "or start an executor"
      }
    )
  ]
}

const judgeQuarantine = ({ quarantined }: WorkFacts): ReadonlyArray<Finding> =>
  quarantined.map(({ count, oldestMillis, queue }) =>
    problem(
      "quarantine.open",
      `queue ${queue}: ${atLeast(count)} items are quarantined, since executors were lost with them, the oldest for ` +
        formatMillis(oldestMillis),
      {
        action:
          "`tenure quarantine list` shows them; mend the cause before `tenure quarantine retry` or `close`"
      }
    )
  )
