/**
 * Settles quarantined items in the application's own rows, by the effect that `layerSettlement` was
 * given, and never by the handler. One actor for all such queues of the process; any number of
 * processes.
 *
 *   due --charged--> running --rows and state committed--> settled
 *    ^                  |
 *    +---- pause -------+-- failed, died, timed out, undecodable: rolled back
 *
 * Q1. One transaction of the fenced pool holds the application's rows and the end of the quarantine.
 * Q2. A try is charged before it begins, so that a settlement which takes its process along is retried
 *     at the same pace as one that fails. It is retried without end: an operator closes what cannot
 *     succeed.
 *
 * A crash rolls the transaction back, and whoever looks after the pause goes on. A try that ignores its
 * interruption keeps a connection of the pool, so that it ends the process in the end.
 */
import { Cause, Context, Effect, Exit, Fiber, type Scope } from "effect"
import type { SqlClient } from "effect/sql"
import { isSqlError, type SqlError } from "effect/sql/SqlError"
import * as Actor from "../actor/Actor.ts"
import { abandonAfter } from "../database/Deadline.ts"
import { sqlState } from "../database/SqlState.ts"
import type { Executor } from "../executor/Executor.ts"
import { LeaseLost, LeaseUnverified } from "../executor/HeldLease.ts"
import * as SettlementStore from "./SettlementStore.ts"

/** One queue's settlement. */
export interface Settling {
  readonly queue: string
  readonly queueId: number
  /** The fenced pool that `settle` writes to. */
  readonly sql: SqlClient.SqlClient
  readonly settle: (item: SettlementStore.QuarantinedRow) => Effect.Effect<unknown, unknown>
}

export class Settlement extends Context.Service<
  Settlement,
  {
    readonly actor: Actor.Actor<SqlError>
    readonly servesUnsafe: (queueId: number) => boolean
    /** Settles the queue's items until the scope closes. */
    readonly serve: (settling: Settling) => Effect.Effect<void, never, Scope.Scope>
    /** There may be something to settle: look now. */
    readonly wakeUnsafe: () => void
  }
>()("tenure/recovery/Settlement") {}

/** What others have quarantined, or left, is found so late. */
const lookMillis = 30_000

const pauses = { firstMillis: 1000, longestMillis: 300_000 }

/** Each holds a connection of the handlers' pool. */
const concurrencyMax = 4

export const make = Effect.fnUntraced(function* (
  executor: Executor["Service"]
): Effect.fn.Return<Settlement["Service"], never, Scope.Scope> {
  const { lease, pools, settings } = executor
  const serving = new Map<number, Settling>()
  const running = new Map<number, Fiber.Fiber<Settled, unknown>>()
  let draining = false
  yield* Effect.forkScoped(
    Effect.andThen(
      executor.drained,
      Effect.sync(() => {
        draining = true
      })
    )
  )

  const budget = withinBudget(settings.settleTimeout, settings.cancelGrace + settings.abandonAfter)

  const settleOne = Effect.fnUntraced(function* (taken: SettlementStore.Taken) {
    const settling = serving.get(taken.queue_id)
    if (settling === undefined) return "skipped" as const
    const exit = yield* budget(
      Effect.raceFirst(settleInTransaction(settling, taken.item_id), lease.lost),
      (fiber) => running.set(taken.queue_id, fiber)
    )
    running.delete(taken.queue_id)
    if (exit === "stubborn") {
      executor.fireUnsafe("stubborn", `the settlement of ${settling.queue}`)
    } else if (exit !== "late" && Exit.isSuccess(exit)) {
      if (exit.value === "settled") yield* tell(settling, taken)
      return exit.value
    } else if (exit !== "late" && isOurEnd(exit.cause, serving.has(taken.queue_id))) {
      return "skipped" as const
    }
    const error = typeof exit === "string" ? "Timeout" : codeOf(exit.cause)
    // Without an answer it counts as failed: it will be looked at again.
    const open = yield* SettlementStore.settlementFailed(pools.work, taken.item_id, error).pipe(
      abandonAfter(settings.abandonAfter),
      Effect.catch(() => Effect.succeed(true))
    )
    if (!open) {
      yield* tell(settling, taken)
      return "settled" as const
    }
    yield* Effect.logError("workflow_recovery_settlement").pipe(
      Effect.annotateLogs({
        item: taken.item_id,
        queue: settling.queue,
        failures: taken.failures,
        error
      })
    )
    return "failed" as const
  })

  const step = Effect.suspend((): Effect.Effect<Actor.Report, SqlError> => {
    if (serving.size === 0 || draining || !lease.isTrustedUnsafe()) return Effect.succeed(nothing)
    return Effect.gen(function* () {
      const queueIds = [...serving.keys()]
      const { nextDueMillis, taken } = yield* SettlementStore.takeSettlements(
        pools.work,
        queueIds,
        pauses,
        concurrencyMax
      )
      const ends = yield* Effect.forEach(taken, settleOne, { concurrency: concurrencyMax })
      const count = (end: Settled | "failed") => ends.filter((one) => one === end).length
      return {
        taken: taken.length,
        settled: count("settled"),
        skipped: count("skipped"),
        failed: count("failed"),
        nextMillis: Math.min(lookMillis, nextDueMillis)
      }
    })
  })

  const actor = yield* Actor.make<SqlError, never>({
    name: "workflow_recovery_settlement",
    step,
    // A queue's items one after the other, without a pause while there are any.
    cadence: (report) => {
      if (serving.size === 0) return Infinity
      return (report["taken"] ?? 0) > 0 && !draining ? 0 : (report["nextMillis"] ?? lookMillis)
    },
    progressWithin:
      lookMillis + settings.settleTimeout + settings.cancelGrace + 3 * settings.abandonAfter,
    onFailure: { first: "1 second", max: lookMillis }
  })

  return {
    actor,
    servesUnsafe: (queueId) => serving.has(queueId),
    serve: (settling) =>
      Effect.acquireRelease(
        Effect.sync(() => {
          serving.set(settling.queueId, settling)
          actor.wakeUnsafe()
        }),
        () =>
          Effect.suspend(() => {
            serving.delete(settling.queueId)
            const fiber = running.get(settling.queueId)
            if (fiber === undefined) return Effect.void
            // What it runs on is taken down behind this.
            return Effect.ignore(abandonAfter(Fiber.interrupt(fiber), settings.abandonAfter))
          })
      ),
    wakeUnsafe: actor.wakeUnsafe
  }
})

type Settled = "settled" | "skipped"

const nothing: Actor.Report = { taken: 0 }

const settleInTransaction = ({ settle, sql }: Settling, item: string) =>
  sql.withTransaction(
    Effect.gen(function* () {
      const row = yield* SettlementStore.beginSettlement(sql, item)
      if (row === undefined) return "skipped" as const
      yield* settle(row)
      yield* SettlementStore.endSettlement(sql, item)
      return "settled" as const
    })
  )

/**
 * Ends on time, whether the effect obeys or not: `late` when it was interrupted and has ended, `stubborn`
 * when it goes on. In a fiber of its own, because waiting for one that does not obey has no end.
 */
const withinBudget =
  (timeoutMillis: number, graceMillis: number) =>
  <A, E, R>(
    effect: Effect.Effect<A, E, R>,
    onStart: (fiber: Fiber.Fiber<A, E>) => void
  ): Effect.Effect<Exit.Exit<A, E> | "late" | "stubborn", never, R> =>
    Effect.uninterruptibleMask((restore) =>
      Effect.gen(function* () {
        const fiber = yield* Effect.forkDetach(effect)
        onStart(fiber)
        const endedWithin = (millis: number) =>
          Effect.raceFirst(Fiber.await(fiber), Effect.as(Effect.sleep(millis), undefined))
        return yield* restore(
          Effect.gen(function* () {
            const inTime = yield* endedWithin(timeoutMillis)
            if (inTime !== undefined) return inTime
            fiber.interruptUnsafe()
            const late = yield* endedWithin(graceMillis)
            if (late === undefined) return "stubborn" as const
            // It may have been committing at that moment.
            return Exit.isSuccess(late) ? late : ("late" as const)
          })
        ).pipe(Effect.onInterrupt(() => Effect.sync(() => fiber.interruptUnsafe())))
      })
    )

const tell = (settling: Settling, { failures, item_id }: SettlementStore.Taken) =>
  Effect.logInfo("settled a quarantined item in the application's rows").pipe(
    Effect.annotateLogs({ item: item_id, queue: settling.queue, failures: failures - 1 })
  )

/** The process stops or has lost its lease: that is no fault of the settlement, and its peers go on. */
const isOurEnd = (cause: Cause.Cause<unknown>, isServed: boolean): boolean =>
  (Cause.hasInterruptsOnly(cause) && !isServed) ||
  cause.reasons.some((reason) => {
    const error =
      reason._tag === "Fail" ? reason.error : reason._tag === "Die" ? reason.defect : undefined
    return (
      error instanceof LeaseLost ||
      error instanceof LeaseUnverified ||
      (isSqlError(error) && ["TN001", "TN002", "TN003"].includes(sqlState(error) ?? ""))
    )
  })

/** The error's name and SQLSTATE, never its message: that may quote the payload. */
const codeOf = (cause: Cause.Cause<unknown>): string => {
  if (Cause.hasInterruptsOnly(cause)) return "Interrupted"
  const error = Cause.squash(cause)
  if (isSqlError(error)) return `SqlError ${sqlState(error) ?? error.reason._tag}`
  const name =
    typeof error === "object" && error !== null && "_tag" in error
      ? String(error._tag)
      : error instanceof Error
        ? error.name
        : typeof error
  return name.slice(0, 100)
}
