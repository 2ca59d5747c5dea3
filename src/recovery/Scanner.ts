/**
 * Turns executors whose lease has ended into work for their peers. Owns no clock: a lease is expired
 * when the database says so. Safe on every executor at once (I4), elects nobody.
 *
 *   expired --mark, committed--> revoking --barrier passed--> revoked, its work handed back
 *                                   |  ^
 *              barrier waits too long  +-- sessions of the executor terminated
 *
 * A scanner that dies between the two steps leaves an executor that is fenced and `revoking`: the
 * next scan, anybody's, finishes it.
 */
import { Effect, type Scope } from "effect"
import type { SqlClient } from "effect/sql"
import { isSqlError, type SqlError } from "effect/sql/SqlError"
import * as Actor from "../actor/Actor.ts"
import { type Abandoned, abandonAfter } from "../database/Deadline.ts"
import { classify, sqlState } from "../database/SqlState.ts"
import type { Executor } from "../executor/Executor.ts"
import type { Resolved } from "../executor/Settings.ts"
import { reach } from "../testing/FaultPoint.ts"
import * as RecoveryStore from "./RecoveryStore.ts"

export interface Options {
  readonly executor: Executor["Service"]
  /** Work came back: for the queues of this process, and whoever waits for the ids that ended. */
  readonly onRecovered: (recovered: {
    readonly requeued: number
    readonly settled: ReadonlyArray<string>
  }) => Effect.Effect<void>
}

/** A barrier that was freed once and waits again is left to the next scan. */
const barriersMax = 4

/** One scan in so many also looks for claims of tombstones: once a minute by default. */
const scansPerSweep = 12

/**
 * A connection that has gone silent is given up while there is time for another scan before this one
 * counts as late. What took effect all the same, the next scan sees.
 */
const unlessSilent = (settings: Resolved) => abandonAfter(settings.watchdog / 2)

export const make = (
  options: Options
): Effect.Effect<Actor.Actor<SqlError | Abandoned>, never, Scope.Scope> => {
  let scans = 0
  return Actor.make({
    name: "executor_recovery",
    step: Effect.suspend(() => scan(options, scans++ % scansPerSweep === 0)),
    cadence: options.executor.settings.recoveryScan,
    progressWithin: options.executor.settings.watchdog
  })
}

export const scan = Effect.fnUntraced(function* (options: Options, sweeps: boolean) {
  const { executor } = options
  const { application, accepts, pools, settings, version } = executor
  const versions = [version, ...accepts]
  const max = settings.recoveryScanMax
  const lookUp = unlessSilent(settings)
  const found = [
    ...(yield* RecoveryStore.recoverableExecutors(pools.work, application, versions, max).pipe(
      lookUp
    )),
    ...(sweeps
      ? yield* RecoveryStore.strandedExecutors(pools.work, application, versions, max).pipe(lookUp)
      : [])
  ]
  const report = { found: 0, revoked: 0, requeued: 0, cancelled: 0, exhausted: 0, failed: 0 }
  for (const candidate of found) {
    report.found++
    // One executor that cannot be taken over now must not keep the others waiting.
    const revoked = yield* recover(executor, candidate).pipe(
      Effect.catch((error) =>
        Effect.logWarning("executor_recovery: not taken over now, the next scan tries again").pipe(
          Effect.annotateLogs({
            executorId: candidate.id,
            sqlState: isSqlError(error) ? sqlState(error) : undefined,
            reason: error.message
          }),
          Effect.as(undefined)
        )
      )
    )
    if (revoked === undefined) {
      report.failed++
      continue
    }
    if (revoked.state !== "revoked" && revoked.state !== "released") continue
    report.revoked++
    report.requeued += revoked.requeued
    report.cancelled += revoked.cancelled
    report.exhausted += revoked.exhausted.length
    yield* announce(candidate.id, revoked)
    yield* options.onRecovered({ requeued: revoked.requeued, settled: revoked.settled })
  }
  return report
})

const recover = Effect.fnUntraced(function* (
  executor: Executor["Service"],
  candidate: RecoveryStore.Recoverable
) {
  const { pools } = executor
  if (candidate.state === "active") {
    const state = yield* RecoveryStore.markRevoking(pools.work, candidate.id).pipe(
      unlessSilent(executor.settings)
    )
    // Renewed since the scan read it, or another scanner was first: the answer is then its state.
    if (state === "active") return idle("active")
  }
  yield* reach("recovery.marked")
  return yield* passBarrier(executor, candidate.id)
})

const idle = (state: string): RecoveryStore.Revoked => ({
  state,
  requeued: 0,
  cancelled: 0,
  exhausted: [],
  settled: []
})

const passBarrier = Effect.fnUntraced(function* (executor: Executor["Service"], id: string) {
  const { pools, settings } = executor
  const attempt = RecoveryStore.revoke(
    pools.recovery,
    id,
    settings.recoveryScan,
    settings.recoveryGrace
  )
  for (let barrier = 1; ; barrier++) {
    const exit = yield* (barrier === 1 ? attempt : freeing(pools, id, attempt)).pipe(
      unlessSilent(settings),
      Effect.result
    )
    if (exit._tag === "Success") return exit.success
    const isBlocked = isSqlError(exit.failure) && classify(exit.failure) === "retryTransaction"
    if (barrier === barriersMax || !isBlocked) return yield* exit.failure
    const ended = yield* RecoveryStore.terminateSessions(pools.work, id, null).pipe(
      unlessSilent(settings)
    )
    yield* Effect.logWarning(
      "executor_recovery: sessions that held up a revocation were ended"
    ).pipe(Effect.annotateLogs({ executorId: id, sessions: ended }))
  }
})

/** While the barrier waits, ends whoever holds it up: application code may have renamed its session. */
const freeing = (
  pools: Executor["Service"]["pools"],
  id: string,
  attempt: Effect.Effect<RecoveryStore.Revoked, SqlError>
): Effect.Effect<RecoveryStore.Revoked, SqlError> =>
  Effect.flatMap(RecoveryStore.backendPid(pools.recovery), (pid) =>
    Effect.raceFirst(attempt, untilFreed(pools.work, id, pid))
  )

const untilFreed = (sql: SqlClient.SqlClient, id: string, pid: number) =>
  Effect.sleep("50 millis").pipe(
    Effect.andThen(RecoveryStore.terminateSessions(sql, id, pid)),
    Effect.andThen(Effect.never)
  )

const announce = Effect.fnUntraced(function* (executorId: string, revoked: RecoveryStore.Revoked) {
  yield* Effect.logInfo("executor_recovery").pipe(
    Effect.annotateLogs({
      executorId,
      requeued: revoked.requeued,
      cancelled: revoked.cancelled,
      exhausted: revoked.exhausted.length
    })
  )
  for (const item of revoked.exhausted) {
    yield* Effect.logError("workflow_recovery_exhausted").pipe(
      Effect.annotateLogs({ item, executorId })
    )
  }
})
