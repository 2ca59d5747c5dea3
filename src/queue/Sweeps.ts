/**
/**
 * The loops that keep queues moving when nobody calls: what is due, what is to be cancelled, what waits
 * and nobody told of, what the database believes to be here and is not, what runs for too long, and
 * what is old enough to go. Every executor runs all of them; each is one bounded statement that skips
 * what another holds.
 *
 * An idle process sends one statement a second for all of its queues: 50 that each polled for
 * themselves sent 11.
 *
 * A statement on a connection that has gone silent is abandoned while there is time for another one
 * before the loop counts as late.
 */
import { Clock, Effect, type Scope } from "effect"
import * as Actor from "../actor/Actor.ts"
import { abandonAfter } from "../database/Deadline.ts"
import type { Resolved } from "../executor/Settings.ts"
import { reach } from "../testing/FaultPoint.ts"
import type { QueueRuntime } from "./QueueRuntime.ts"
import { claimsOf, look, type Looked, retain } from "./QueueStore.ts"
import type { Runner } from "./Runner.ts"
import { dispatchWaits } from "./WaitStore.ts"

const rowsPerStatement = 1000

/** How far ahead of the next due time nobody has to look again, and so how late a foreign one may be. */
const lookMillis = 1000

/** How often queues are looked at without a hint while notifications do not get through. */
const deafPollMillis = 1000

/** A timer may fire a little early: what is so nearly due is done now, and not by one look more. */
const earlyMillis = 10

const budgetMillis = 100

/** How late what waits here, or does not get into the database, may be found out. */
const lateShare = 1 / 8

/** Older claims than this, unknown to the process, were lost with the answer to a COMMIT. */
const auditMillis = 10_000

export interface Sweeps {
  readonly actors: ReadonlyArray<Actor.Actor<unknown>>
  readonly cancelsUnsafe: () => void
  /** Whether notifications reach this process. Until it is said, they do not. */
  readonly hearsUnsafe: (hears: boolean) => void
  readonly enforceSoonUnsafe: () => void
  readonly dueInUnsafe: (millis: number) => void
}

export const make = Effect.fnUntraced(function* (
  settings: Resolved,
  runtimeOf: () => QueueRuntime["Service"]
): Effect.fn.Return<Sweeps, never, Scope.Scope> {
  const clock = yield* Clock.Clock
  const nowMillis = () => Number(clock.monotonicTimeNanosUnsafe()) / 1e6
  let dueAtMillis = Infinity
  const idleBudgetMillis = () =>
    Math.min(settings.reservationValidity, settings.settleTimeout) * lateShare
  let hears = false
  let polledMillis = nowMillis()
  // Taken by a look and not available yet: a failed dispatch is repeated. What a dead process leaves
  // between the two is the stale-claim sweep's.
  let woken: ReadonlyArray<string> = []

  const untilPollMillis = () =>
    polledMillis +
    (hears ? settings.pollInterval : Math.min(settings.pollInterval, deafPollMillis)) -
    nowMillis()

  const wake = Effect.suspend(() => {
    const { executor, runners } = runtimeOf()
    const sent = nowMillis()
    // What was announced for later is not in the database yet, perhaps: remember it until then.
    if (dueAtMillis <= sent) dueAtMillis = Infinity
    const polls = untilPollMillis() <= earlyMillis
    const byLane = new Map<number, Runner>()
    if (polls) {
      for (const runner of runners()) {
        for (const lane of runner.pollUnsafe()) byLane.set(lane, runner)
      }
    }
    const asked = { executorId: executor.id, rowsMax: rowsPerStatement, lanes: [...byLane.keys()] }
    const looking = look(executor.pools.work, asked).pipe(
      abandonAfter(settings.watchdog / 2),
      // With its answer is lost what it has promoted, and for whom: then each queue looks for itself.
      Effect.tapError(() => Effect.sync(() => runtimeOf().hintUnsafe()))
    )
    return Effect.gen(function* () {
      if (woken.length > 0) yield* dispatch
      const looked = yield* looking
      if (polls) polledMillis = sent
      act(looked)
      const idle = new Set(looked.waiting_lanes.map((lane) => byLane.get(lane)))
      for (const runner of idle) runner?.hintUnsafe()
      woken = looked.woken_ids
      if (woken.length > 0) {
        yield* reach("wait.claimed")
        yield* dispatch
      }
      const most = Math.max(looked.promoted, looked.expired, looked.woken_ids.length)
      const next = Math.min(
        most === rowsPerStatement ? 0 : lookMillis,
        looked.next_due_ms ?? lookMillis,
        dueAtMillis - nowMillis(),
        untilPollMillis()
      )
      return {
        promoted: looked.promoted,
        expired: looked.expired,
        cancelled: looked.cancel_ids.length,
        woken: looked.woken_ids.length,
        found: idle.size,
        nextMillis: Math.max(0, Math.ceil(next))
      }
    })
  })

  const dispatch = Effect.suspend(() =>
    dispatchWaits(runtimeOf().executor.pools.work, runtimeOf().executor.id, woken).pipe(
      abandonAfter(settings.watchdog / 2),
      Effect.map((dispatched) => {
        woken = []
        announce(dispatched.queue_ids)
      })
    )
  )

  const announce = (queueIds: ReadonlyArray<number>) => {
    const { hintUnsafe, waker } = runtimeOf()
    for (const queueId of queueIds) {
      hintUnsafe(queueId)
      waker.workUnsafe(queueId)
    }
  }

  const act = (looked: Looked) => {
    const { runners, settledUnsafe } = runtimeOf()
    for (const id of looked.expired_ids) settledUnsafe(id)
    announce(looked.promoted_queues)
    looked.cancel_ids.forEach((id, at) => {
      for (const runner of runners()) runner.cancelUnsafe(id, looked.cancel_attempts[at] ?? 0)
    })
  }

  const audit = Effect.suspend(() => {
    const { announceUnsafe, executor, runners, settler } = runtimeOf()
    const claiming = runners().some((runner) => runner.isClaimingUnsafe())
    return Effect.gen(function* () {
      const claims = yield* claimsOf(
        executor.pools.work,
        executor.id,
        auditMillis,
        rowsPerStatement
      ).pipe(abandonAfter(settings.watchdog / 2))
      // A claim on its way may hold these rows already: next time.
      const lost = claiming
        ? []
        : claims.filter(({ id, attempt }) => !runners().some((one) => one.holdsUnsafe(id, attempt)))
      for (const { attempt, id, lane_id } of lost) {
        settler.pushUnsafe(
          {
            id,
            attempt,
            outcome: "hand-back",
            reason: null,
            result: null,
            lane: lane_id,
            delayMillis: null
          },
          // Once it is durable: a look at the table before that finds nothing.
          announceUnsafe
        )
      }
      if (lost.length > 0) {
        yield* Effect.logWarning(
          "queue_audit: handed back claims that this process does not hold"
        ).pipe(Effect.annotateLogs({ executorId: executor.id, items: lost.length }))
      }
      return { claims: claims.length, handedBack: lost.length }
    })
  })

  const budget = Effect.sync(() => ({ watched: runtimeOf().enforceUnsafe() }))

  const retention = Effect.suspend(() => {
    const { executor } = runtimeOf()
    return retain(executor.pools.work, executor.settings.retention)
  })

  const waking = yield* Actor.make({
    name: "queue_wake",
    step: wake,
    cadence: (report) => report["nextMillis"] ?? lookMillis,
    progressWithin: settings.watchdog,
    onFailure: { first: "20 millis", max: "2 seconds" }
  })
  const auditor = yield* Actor.make({
    name: "queue_audit",
    step: audit,
    cadence: auditMillis,
    progressWithin: settings.watchdog
  })
  const enforcer = yield* Actor.make({
    name: "queue_budget",
    step: budget,
    // Woken by an attempt alone, for their times may be short.
    cadence: (report) => (report["watched"] === 0 ? idleBudgetMillis() : budgetMillis)
  })
  const retainer = yield* Actor.make({
    name: "queue_retention",
    step: retention,
    // A bucket a step: while there is something to do it goes on, without holding a lock for long.
    cadence: (report) =>
      ["emptied", "dropped", "moved", "merged", "forgotten"].some((of) => (report[of] ?? 0) > 0)
        ? "10 seconds"
        : "1 hour",
    onFailure: { first: "10 seconds", max: "10 minutes" }
  })

  return {
    actors: [waking, auditor, enforcer, retainer],
    cancelsUnsafe: waking.wakeUnsafe,
    hearsUnsafe: (now) => {
      if (hears && !now) waking.wakeUnsafe()
      hears = now
    },
    enforceSoonUnsafe: enforcer.wakeUnsafe,
    dueInUnsafe: (millis) => {
      const at = nowMillis() + millis
      if (at >= dueAtMillis) return
      dueAtMillis = at
      waking.wakeUnsafe()
    }
  }
})
