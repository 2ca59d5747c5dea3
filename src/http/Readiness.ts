/**
 * Whether this process should get work: read from marks that are there already, so that asking costs
 * nothing, and from the checks that the application adds. Names and booleans, nothing else.
 *
 *   launched    the whole layer is up
 *   renewal     the lease renewal made progress within its time
 *   scan        so did the scan for expired peers
 *   probe       an item of its own went through this process in time; that proves nothing of business
 *   lease       trusted at this moment, without asking the database
 *   admission   no drain has begun
 *   <name>      a check of the application, each with a deadline
 *
 * Nothing here takes part in a takeover: an unready process keeps its lease and its work.
 */
import { Clock, Context, Deferred, Effect, type Scope } from "effect"
import { type Actor, isLate } from "../actor/Actor.ts"
import type { Executor } from "../executor/Executor.ts"
import type { HeldLease } from "../executor/HeldLease.ts"
import { Launch } from "../executor/Launch.ts"

export interface Report {
  readonly ready: boolean
  readonly checks: Readonly<Record<string, boolean>>
}

/** Hidden in the context of `Tenure.layer`, beside the executor it speaks for. */
export class Readiness extends Context.Service<
  Readiness,
  {
    readonly report: Effect.Effect<Report>
    /** Counts until the scope closes. */
    readonly add: (
      name: string,
      check: Effect.Effect<unknown, unknown>
    ) => Effect.Effect<void, never, Scope.Scope>
  }
>()("tenure/http/Readiness") {}

export const checkDeadline = "5 seconds"

const ownNames = ["launched", "renewal", "scan", "probe", "lease", "admission"]

export const make = Effect.fnUntraced(function* (options: {
  readonly executor: Pick<Executor["Service"], "drained"> & {
    readonly lease: Pick<HeldLease, "checkUnsafe">
  }
  readonly supervisor: {
    readonly actors: () => ReadonlyArray<Pick<Actor<unknown>, "name" | "lifecycle" | "progress">>
  }
}): Effect.fn.Return<Readiness["Service"], never, Scope.Scope> {
  const { executor, supervisor } = options
  const clock = yield* Clock.Clock
  const launch = yield* Launch
  const checks = new Map<string, Effect.Effect<boolean>>()
  let admitting = true
  yield* executor.drained.pipe(
    Effect.andThen(
      Effect.sync(() => {
        admitting = false
      })
    ),
    Effect.forkScoped
  )

  const advances = (name: string): boolean => {
    const actor = supervisor.actors().find((one) => one.name === name)
    return (
      actor !== undefined &&
      actor.lifecycle === "running" &&
      !isLate(actor.progress(), clock.monotonicTimeNanosUnsafe())
    )
  }

  return {
    add: Effect.fnUntraced(function* (name, check) {
      if (checks.has(name) || ownNames.includes(name)) {
        return yield* Effect.die(new Error(`two readiness checks are named ${name}`))
      }
      yield* Effect.acquireRelease(
        Effect.map(shared(check), (once) => checks.set(name, once)),
        () => Effect.sync(() => checks.delete(name))
      )
    }),
    report: Effect.gen(function* () {
      const own: Record<string, boolean> = {
        launched: launch.isCompleteUnsafe(),
        renewal: advances("executor_coordination"),
        scan: advances("executor_recovery"),
        probe: advances("executor_probe"),
        lease: executor.lease.checkUnsafe() === undefined,
        admission: admitting
      }
      const added = yield* Effect.forEach(
        [...checks],
        ([name, check]) => Effect.map(check, (passed) => [name, passed] as const),
        { concurrency: "unbounded" }
      )
      const all = { ...own, ...Object.fromEntries(added) }
      return { ready: Object.values(all).every((passed) => passed), checks: all }
    })
  }
})

/**
 * Runs the check once at a time, whoever asks: one that hangs must not pile up under a prober that
 * asks every second. Each who asks waits for its deadline at most, and the check ends with the scope.
 */
const shared = Effect.fnUntraced(function* (
  check: Effect.Effect<unknown, unknown>
): Effect.fn.Return<Effect.Effect<boolean>, never, Scope.Scope> {
  const scope = yield* Effect.scope
  let running: Deferred.Deferred<boolean> | undefined
  const start = Effect.suspend(() => {
    const answer = Deferred.makeUnsafe<boolean>()
    running = answer
    return check.pipe(
      Effect.timeout(checkDeadline),
      Effect.matchCause({ onSuccess: () => true, onFailure: () => false }),
      Effect.onExit((exit) =>
        Effect.suspend(() => {
          running = undefined
          return Deferred.succeed(answer, exit._tag === "Success" && exit.value)
        })
      ),
      Effect.forkIn(scope),
      Effect.as(answer)
    )
  })
  return Effect.suspend(() => (running === undefined ? start : Effect.succeed(running))).pipe(
    Effect.flatMap(Deferred.await),
    Effect.timeoutOrElse({ duration: checkDeadline, orElse: () => Effect.succeed(false) })
  )
})
