/**
 * The main thread's half of the watchdog: it shows the thread how far everything is, does in order
 * what the thread decides, and watches the thread in turn.
 *
 *   watching --the thread, or anybody here, has a reason--> firing --layer closed--> ended
 *      |                                                      +--forcedExit over--> killed by the thread
 *      +--the thread is gone--> firing (watcher) --forcedExit over--> killed from here
 *
 * I11. Whatever stops making progress, the process has ended before its lease can: the thread needs
 *      nothing from the event loop, and the lease's own time is one of the clocks it reads.
 *
 * No finite timeout tells slow from hung. These ones prefer recovery: a process that was only slow is
 * ended as well, and its peers go on with its work.
 */
import { Clock, Effect, Scope } from "effect"
import * as Actor from "../actor/Actor.ts"
import type * as Supervisor from "../actor/Supervisor.ts"
import type { StartupRefused } from "../database/StartupRefused.ts"
import type { Executor } from "../executor/Executor.ts"
import type { Resolved } from "../executor/Settings.ts"
import type { WatchdogReason } from "../executor/WatchdogFired.ts"
import { pollMillisOf } from "./judge.js"
import type { Firing } from "./memory.js"
import { WatchdogThread } from "./WatchdogThread.ts"

export interface Watchdog {
  /** From the registration on. Whoever is supervised and has a deadline is watched. */
  readonly arm: (
    executor: Watched,
    supervisor: Pick<Supervisor.Service, "actors" | "join" | "supervise">
  ) => Effect.Effect<void>
  /** The thread is up. */
  readonly ready: Effect.Effect<void, StartupRefused>
}

export type Watched = Pick<Executor["Service"], "id" | "drain" | "fireUnsafe" | "fired"> & {
  readonly settings: Pick<Resolved, "watchdog" | "forcedExit" | "abandonAfter" | "drain">
  readonly lease: Pick<
    Executor["Service"]["lease"],
    "checkUnsafe" | "isTrustedUnsafe" | "lost" | "trustedUntilUnsafe"
  >
}

/** The thread is silent for so many of our beats: 20 times as long as it takes for one of its rounds. */
const silentMax = 20

/** Clocks that agree so far are one clock. */
const sameClockNanos = 1_000_000_000n

const nanosOf = (millis: number): bigint => BigInt(Math.round(millis * 1e6))

/**
 * Starts the thread. What is made in the same scope afterwards is closed before it: the watchdog ends
 * when the lease has been given back.
 */
export const make = Effect.gen(function* () {
  const scope = yield* Scope.fork(yield* Effect.scope)
  const thread = yield* Effect.flatten(WatchdogThread).pipe(Scope.provide(scope))
  const clock = yield* Clock.Clock

  const arm: Watchdog["arm"] = Effect.fnUntraced(function* (executor, supervisor) {
    const { lease, settings } = executor
    const pollMillis = pollMillisOf(settings.watchdog)
    const watchdogNanos = nanosOf(settings.watchdog)
    let reported = false

    const fireUnsafe = (reason: WatchdogReason, subject?: string) => {
      // It is what it is called then, for everybody else: lost.
      if (reason === "lease" || reason === "suspended") lease.checkUnsafe()
      executor.fireUnsafe(reason, subject)
    }

    // As the thread reads them: an application may have a clock of its own.
    const write = () => {
      const nowNanos = process.hrtime.bigint()
      const apartNanos = nowNanos - clock.monotonicTimeNanosUnsafe()
      const shiftNanos =
        apartNanos < sameClockNanos && apartNanos > -sameClockNanos ? 0n : apartNanos
      const trusted = lease.trustedUntilUnsafe()
      // While the lease is in doubt the database is out of reach, and all loops are late with it: the
      // lease is the reason then, and its clock is as short as theirs.
      const soonestNanos =
        trusted === undefined || lease.isTrustedUnsafe()
          ? 0n
          : trusted.monotonicNanos + nanosOf(4 * pollMillis)
      const actors = supervisor.actors().flatMap((actor) => {
        const { deadlineNanos } = actor.progress()
        if (deadlineNanos === undefined) return []
        const atNanos = deadlineNanos > soonestNanos ? deadlineNanos : soonestNanos
        return [[actor.name, atNanos + shiftNanos] as const]
      })
      thread.writeUnsafe({
        mainNanos: nowNanos + watchdogNanos,
        leaseNanos: trusted === undefined ? 0n : trusted.monotonicNanos + shiftNanos,
        uptimeNanos: trusted?.uptimeNanos ?? 0n,
        actors
      })
      return actors.length
    }

    let heard = thread.beatUnsafe()
    let silent = 0
    let lastNanos = process.hrtime.bigint()
    const listen = () => {
      const nowNanos = process.hrtime.bigint()
      const stoodStill = nowNanos - lastNanos > nanosOf(3 * pollMillis)
      lastNanos = nowNanos
      const beat = thread.beatUnsafe()
      // With this process the thread stood still as well.
      silent = beat !== heard || beat === 0 || stoodStill ? 0 : silent + 1
      heard = beat
      if (silent === silentMax) fireUnsafe("watcher")
    }

    const log = (firing: Firing) =>
      Effect.logFatal("executor_watchdog").pipe(
        Effect.annotateLogs({ executorId: executor.id, ...firing })
      )

    const onFired = Effect.catch(executor.fired, ({ reason, subject }) =>
      Effect.suspend(() => {
        const firing = { reason, subject }
        thread.firingUnsafe(firing)
        const killing =
          reason === "watcher"
            ? Effect.sleep(settings.forcedExit + 2 * pollMillis).pipe(
                Effect.andThen(Effect.sync(thread.killUnsafe))
              )
            : Effect.void
        return Effect.andThen(reported ? Effect.void : log(firing), killing)
      })
    )
    const onThread = Effect.map(thread.fired, ({ reason, subject }) => {
      reported = true
      fireUnsafe(reason, subject)
    })
    const onGone = Effect.flatMap(thread.gone, (why) => {
      fireUnsafe("watcher")
      return Effect.logError(`executor_watchdog: the thread has ended: ${why}`)
    })
    // No reason of the watchdog's, but no process goes on after it either, whatever its main is.
    const onLost = Effect.catch(lease.lost, ({ cause }) =>
      Effect.sync(() => {
        if (cause !== "released") thread.firingUnsafe({ reason: "lease", subject: undefined })
      })
    )
    // A main of ours has ended by then.
    const onEscalated = Effect.catch(supervisor.join, ({ child }) =>
      executor.drain.pipe(
        Effect.andThen(Effect.sleep(settings.drain + settings.forcedExit)),
        Effect.andThen(Effect.sync(() => fireUnsafe("actor", child)))
      )
    )
    for (const watching of [onFired, onThread, onGone, onLost, onEscalated]) {
      yield* Effect.forkIn(watching, scope)
    }

    write()
    thread.armUnsafe({
      executorId: executor.id,
      watchdogNanos,
      pollNanos: nanosOf(pollMillis),
      forcedExitNanos: nanosOf(settings.forcedExit),
      abandonAfterNanos: nanosOf(settings.abandonAfter)
    })
    const actor = yield* Actor.make({
      name: "executor_watchdog",
      step: Effect.sync(() => {
        listen()
        return { watched: write() }
      }),
      cadence: pollMillis
    })
    yield* Effect.orDie(supervisor.supervise({ actor }))
  }, Scope.provide(scope))

  return { arm, ready: thread.ready } satisfies Watchdog
})
