/**
 * Looks at the queues of this process for work that nobody takes: a probe that passes proves nothing of
 * a business queue, whose claimer is its own.
 *
 *   look --nothing that could start, or no room, or a claim--> fine
 *     |
 *     +--work and room--> clocks run --at every look, for the whole time--> the watchdog fires
 *                            |
 *                            +--anything breaks it--> fine
 *
 * One statement for all queues, on the connection of recovery: it has to see when those of business are
 * stuck, and must not take one from a renewal when answers are lost. A queue that has no room, or from
 * which this process has claimed since the last look, is not asked about. A crash takes the clocks with
 * it, and the next process begins its own.
 */
import { Clock, Effect, type Scope } from "effect"
import type { SqlError } from "effect/sql/SqlError"
import * as Actor from "../actor/Actor.ts"
import { type Abandoned, abandonAfter } from "../database/Deadline.ts"
import type { Executor } from "../executor/Executor.ts"
import { starvationMillis } from "../executor/Settings.ts"
import type { Facts, Runner } from "../queue/Runner.ts"
import { type Observation, observeQueues } from "./MonitorStore.ts"
import * as Starvation from "./Starvation.ts"

export type Watched = Pick<Runner, "queue" | "queueId" | "factsUnsafe">

interface Known {
  readonly clocks: Starvation.Clocks
  readonly startedCount: number
  readonly expiredCount: number
  /** Peers know of claims up to here. */
  readonly toldMillis: number
}

const unknown: Known = {
  clocks: Starvation.none,
  startedCount: 0,
  expiredCount: 0,
  toldMillis: -Infinity
}

export const make = Effect.fnUntraced(function* (options: {
  readonly executor: Executor["Service"]
  readonly queues: () => ReadonlyArray<Watched>
}): Effect.fn.Return<Actor.Actor<SqlError | Abandoned>, never, Scope.Scope> {
  const { executor } = options
  const { accepts, lease, pools, settings, version } = executor
  const clock = yield* Clock.Clock
  const nowMillis = () => Number(clock.monotonicTimeNanosUnsafe()) / 1e6
  const limits: Starvation.Limits = {
    starvationMillis: starvationMillis(settings),
    // Beyond it the monitor itself is late.
    pauseMillis: settings.watchdog
  }
  let known: ReadonlyMap<number, Known> = new Map()
  const knownOf = (queueId: number) => known.get(queueId) ?? unknown

  const observe = (watched: ReadonlyArray<readonly [Watched, Facts]>) => {
    const sentMillis = nowMillis()
    const hasClaimed = ([{ queueId }, facts]: readonly [Watched, Facts]) =>
      facts.takenMillis > knownOf(queueId).toldMillis
    const claimed = watched.filter(hasClaimed).map(([{ queueId }, facts]) => ({
      queueId,
      agoMillis: sentMillis - facts.takenMillis
    }))
    const queues = watched
      .filter((one) => one[1].hasRoom && !hasClaimed(one))
      .map(([{ queueId }]) => queueId)
    if (claimed.length + queues.length === 0) return Effect.succeed([])
    const unlocked = queues.filter((queueId) =>
      Starvation.isSerious(knownOf(queueId).clocks, limits)
    )
    const versions = [version, ...accepts]
    return observeQueues(pools.recovery, { versions, queues, unlocked, claimed }).pipe(
      abandonAfter(settings.abandonAfter)
    )
  }

  const lookAt = (before: Known, facts: Facts, seen: Observation | undefined): Starvation.Look => {
    const atMillis = nowMillis()
    const hasWaited = facts.hasUnstarted || facts.expiredCount > before.expiredCount
    return {
      atMillis,
      canClaim:
        seen !== undefined &&
        !seen.is_full &&
        !seen.is_held &&
        (seen.has_fresh || (seen.has_suspect && facts.hasRoomForSuspect)),
      startsNothing:
        hasWaited &&
        (facts.hasUnstarted || facts.hasRoom) &&
        facts.startedCount === before.startedCount,
      claimedMillis: Math.max(facts.takenMillis, atMillis - (seen?.last_claim_ms ?? Infinity)),
      answeredMillis: facts.answeredMillis
    }
  }

  const step = Effect.gen(function* () {
    // A private queue is a number below zero, and no business.
    const watched = options
      .queues()
      .filter(({ queueId }) => queueId > 0)
      .map((queue) => [queue, queue.factsUnsafe()] as const)
    const seen = new Map((yield* observe(watched)).map((row) => [row.queue, row]))
    const report = { queues: watched.length, looked: seen.size, waiting: 0 }
    const next = new Map<number, Known>()
    for (const [{ queue, queueId }, facts] of watched) {
      const before = knownOf(queueId)
      const look = lookAt(before, facts, seen.get(queueId))
      const clocks = Starvation.advance(before.clocks, look, limits)
      if (look.canClaim) report.waiting++
      next.set(queueId, {
        clocks,
        startedCount: facts.startedCount,
        expiredCount: facts.expiredCount,
        toldMillis: facts.takenMillis
      })
      const verdict = Starvation.judge(clocks, limits)
      // A process that may not write any more is ended for that, and says so.
      if (verdict !== undefined && lease.isTrustedUnsafe()) executor.fireUnsafe(verdict, queue)
    }
    known = next
    return report
  })

  return yield* Actor.make({
    name: "queue_monitor",
    step,
    cadence: settings.queueMonitor,
    progressWithin: settings.watchdog
  })
})
