/**
 * A layer as the main of a process: builds it, keeps it open, and closes it in order.
 *
 *   building --complete--> open --signal, `executor.drain`--> draining --> closed
 *      |                     |                                   |
 *      |                     +--lease lost, watchdog fired-------+--> closing, within forcedExit
 *      |                     +--a loop crashed too often--> draining, then failed
 *      +--refused, or failed--> closing
 *
 * Draining begins with every executor's own drain, so that nothing new is claimed while the scope
 * closes; the scope closes in reverse, and the lease is the last thing in it.
 */
import { Deferred, Effect, Exit, Layer, Runtime, Schema, Scope } from "effect"
import { dual } from "effect/Function"
import type { Escalated } from "../actor/Supervisor.ts"
import type { LeaseLost } from "../executor/HeldLease.ts"
import { Launch, type Launched } from "../executor/Launch.ts"
import type { WatchdogFired } from "../executor/WatchdogFired.ts"
import { ExitCode } from "./ExitCode.ts"
import { Process, run, type RunOptions } from "./Process.ts"

export type { RunOptions }

/** A handler did not obey. The end of the process ends it, and the lease is left to expire. */
export class DrainIncomplete extends Schema.TaggedError<DrainIncomplete>()("DrainIncomplete", {
  executorId: Schema.String
}) {
  override readonly [Runtime.errorExitCode] = ExitCode.forced

  override get message(): string {
    return (
      `Executor ${this.executorId} has work that does not stop: its lease is left to expire. ` +
      `Look for a handler that is uninterruptible for longer than the drain.`
    )
  }
}

/**
 * The node entrypoint, last in a pipe: drains on SIGTERM and SIGINT, and forces the exit when the
 * drain outlives its budget. The exit codes are in `ExitCode.ts`.
 */
export const runMain: {
  (options?: RunOptions): <E>(self: Layer.Layer<never, E>) => void
  <E>(self: Layer.Layer<never, E>, options?: RunOptions): void
} = dual(
  (args) => Layer.isLayer(args[0]),
  <E>(self: Layer.Layer<never, E>, options?: RunOptions): void => run(launch(self), options)
)

/**
 * The same as an effect. Interrupting it drains; it succeeds when a drain was asked for inside, and
 * fails with `LeaseLost` whenever that is why it ended.
 */
export const launch = <E>(
  self: Layer.Layer<never, E>
): Effect.Effect<void, E | Escalated | LeaseLost | WatchdogFired | DrainIncomplete> =>
  Effect.uninterruptibleMask((restore) =>
    Effect.gen(function* () {
      const main = yield* Process
      const scope = yield* Scope.make()
      const watching = yield* Scope.make()
      const ended = yield* Deferred.make<void, Escalated | LeaseLost | WatchdogFired>()
      const launched: Array<Launched> = []
      let lost: LeaseLost | undefined
      let fired: WatchdogFired | undefined
      let complete = false

      const watch = ({ executor, supervisor }: Launched) => {
        // Watched until the end: a lease that is lost during a drain leaves less time than the drain had.
        const leaseLost = Effect.catch(executor.lease.lost, (error) =>
          Effect.suspend(() => {
            if (error.cause === "released") return Effect.never
            lost = error
            main.stoppingUnsafe(executor.settings.forcedExit, ExitCode.leaseLost)
            return Effect.fail(error)
          })
        )
        const watchdogFired = Effect.tapError(executor.fired, (error) =>
          Effect.sync(() => {
            fired = error
            main.stoppingUnsafe(executor.settings.forcedExit, ExitCode.watchdogFired)
          })
        )
        return Effect.forEach(
          [executor.drained, supervisor.join, leaseLost, watchdogFired],
          (reason: Effect.Effect<void, Escalated | LeaseLost | WatchdogFired>) =>
            Deferred.into(reason, ended).pipe(Effect.interruptible, Effect.forkIn(watching)),
          { discard: true }
        )
      }

      const announce = (one: Launched) =>
        Effect.suspend(() => {
          launched.push(one)
          main.allowUnsafe(drainMillis(one))
          return watch(one)
        })

      const open = Layer.buildWithScope(self, scope).pipe(
        Effect.provideService(Launch, { announce, isCompleteUnsafe: () => complete }),
        Effect.tap(
          Effect.sync(() => {
            complete = true
          })
        ),
        Effect.andThen(Effect.never)
      )
      const exit = yield* Effect.exit(restore(Effect.raceFirst(open, Deferred.await(ended))))
      complete = false
      const budgets = launched.map(drainMillis)
      main.stoppingUnsafe(budgets.length === 0 ? undefined : Math.max(...budgets), ExitCode.forced)
      for (const { executor } of launched) yield* executor.drain
      yield* Scope.close(scope, exit)
      yield* Scope.close(watching, exit)
      const stuck = launched.find(({ executor }) => executor.lease.isKeptUnsafe())
      // A lost lease makes loops crash as well, and may be noticed there first: it is the reason then.
      const reason = lost ?? fired
      const outcome =
        reason !== undefined
          ? Exit.fail(reason)
          : stuck !== undefined
            ? Exit.fail(new DrainIncomplete({ executorId: stuck.executor.id }))
            : Exit.isFailure(exit) && Exit.hasInterrupts(exit)
              ? Exit.void
              : exit
      main.endedUnsafe(outcome)
      return yield* outcome
    })
  )

/** What running work gets to end, and the rest to be put away. */
const drainMillis = ({ executor }: Launched): number =>
  executor.settings.drain + executor.settings.forcedExit
