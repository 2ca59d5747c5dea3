/**
 * What all queues of one executor share: the group commits of outcomes and checkpoints, the waker,
 * the sweeps, and the count of suspects. One of it in a process; `Tenure.layer` makes it.
 *
 * Suspects: a process holds at most one item whose executor was lost before, so that a poison item
 * takes nobody with it but itself.
 */
import { Clock, Context, Effect, FiberSet, type Scope } from "effect"
import { isSqlError, type SqlError } from "effect/sql/SqlError"
import type * as Supervisor from "../actor/Supervisor.ts"
import { abandonAfter } from "../database/Deadline.ts"
import { classify, isRowError, sqlState } from "../database/SqlState.ts"
import type { Executor } from "../executor/Executor.ts"
import type { Lost } from "../executor/TrustWindow.ts"
import { fullJitter } from "../database/Retry.ts"
import { reach } from "../testing/FaultPoint.ts"
import * as GroupCommit from "./GroupCommit.ts"
import * as ProgressReports from "./ProgressReports.ts"
import {
  type Checkpoint,
  type ProgressReport,
  reportProgress,
  type Settled,
  settleItems,
  type Settlement,
  writeCheckpoints
} from "./QueueStore.ts"
import type { Runner } from "./Runner.ts"
import { lostByFence } from "./Verdict.ts"
import { type Asked, askWaits, type Parking, parkItems, type WaitAnswer } from "./WaitStore.ts"
import type { Waker } from "./Waker.ts"

export class QueueRuntime extends Context.Service<
  QueueRuntime,
  {
    readonly executor: Executor["Service"]
    readonly supervisor: Supervisor.Service
    readonly waker: Waker["Service"]
    readonly settler: GroupCommit.GroupCommit<Settlement, Settled, SqlError>
    readonly checkpoints: GroupCommit.GroupCommit<
      Checkpoint,
      "written" | "exists" | "stale",
      SqlError
    >
    readonly parker: GroupCommit.GroupCommit<Parking, Settled, SqlError>
    readonly waits: GroupCommit.GroupCommit<Asked, WaitAnswer, SqlError>
    readonly progress: ProgressReports.ProgressReports
    readonly runners: () => ReadonlyArray<Runner>
    /** Serves the queue until the scope closes, which drains it. */
    readonly serve: (runner: Runner) => Effect.Effect<void, never, Scope.Scope>
    /** Whether a suspect may be claimed; if not, `again` is called when one may be. */
    readonly reserveSuspectUnsafe: (again: () => void) => boolean
    readonly releaseSuspectUnsafe: () => void
    /** A claim has brought one. */
    readonly keepSuspectUnsafe: () => void
    readonly holdsSuspectUnsafe: () => boolean
    /** There may be work on that queue, or on any: look from the start. */
    readonly hintUnsafe: (queueId?: number) => void
    /** Is called at each hint, until the scope closes. */
    readonly overhear: (
      heard: (queueId?: number) => void
    ) => Effect.Effect<void, never, Scope.Scope>
    /** Work came back, to whichever queue: for this process and for its peers. */
    readonly announceUnsafe: () => void
    readonly settledUnsafe: (id: string) => void
    readonly lostUnsafe: (lost: Lost) => void
    /** An attempt went live: its time has to be watched. */
    readonly enforceSoonUnsafe: () => void
    /**
     * Holds everything here to its budget: attempts, reservations, and outcomes on their way into the
     * database. Tells how much there is to watch.
     */
    readonly enforceUnsafe: () => number
    /** Something falls due in so many milliseconds. */
    readonly dueInUnsafe: (millis: number) => void
    readonly later: (millis: number, run: () => void) => void
  }
>()("tenure/queue/QueueRuntime") {}

/** What the sweeps and the client put in. */
export interface Hooks {
  readonly enforceSoonUnsafe: () => void
  readonly dueInUnsafe: (millis: number) => void
  readonly settledUnsafe: (id: string) => void
}

export const make = Effect.fnUntraced(function* (options: {
  readonly executor: Executor["Service"]
  readonly supervisor: Supervisor.Service
  readonly waker: Waker["Service"]
  readonly hooks: Hooks
}): Effect.fn.Return<QueueRuntime["Service"], never, Scope.Scope> {
  const { executor, hooks, supervisor, waker } = options
  const { lease, pools, settings } = executor
  const clock = yield* Clock.Clock
  const run = yield* FiberSet.makeRuntime<never, unknown, unknown>()
  const runners: Array<Runner> = []
  // Reserved by a claim on its way, or here.
  let suspectHeld = false
  let suspectKept = false
  let trustedSinceMillis: number | undefined
  const denied = new Set<() => void>()
  const listeners = new Set<(queueId?: number) => void>()
  let drainUntilMillis: number | undefined

  const isPrivate = ({ attempt, id }: Settlement) =>
    runners.some((runner) => runner.isPrivate && runner.holdsUnsafe(id, attempt))

  // Repeats whatever the error, unless it is a row's own or the fence's: an outcome is never given up
  // while the lease holds, and a repeated one is answered `already`. On a connection that has gone
  // silent it would wait for ever: three of them fit into the budget.
  const persist = <A>(
    name: string,
    write: Effect.Effect<A, SqlError>
  ): Effect.Effect<A, SqlError> =>
    write.pipe(
      abandonAfter(settings.settleTimeout / 3),
      Effect.tapError((error) => {
        const known = isSqlError(error) ? error : undefined
        const lost = known === undefined ? undefined : lostByFence(known)
        if (lost !== undefined) return lease.close(lost)
        if (known !== undefined && (isRowError(known) || classify(known) === "retryTransaction")) {
          return Effect.void
        }
        return Effect.logWarning(`${name}: not written yet, trying again`).pipe(
          Effect.annotateLogs({ sqlState: known && sqlState(known), reason: error.message })
        )
      }),
      Effect.retry({
        schedule: fullJitter("20 millis", "2 seconds"),
        while: (error) =>
          !isSqlError(error) || !(isRowError(error) || lostByFence(error) !== undefined)
      }),
      Effect.catchTag("Abandoned", Effect.die),
      (persisting) =>
        Effect.raceFirst(
          persisting,
          Effect.catch(lease.lost, () => Effect.interrupt)
        )
    )

  const settler = yield* GroupCommit.make<Settlement, Settled, SqlError, never>({
    groupMax: 1000,
    bytesMax: 4_194_304,
    sizeOf: (row) => 64 + (row.result?.length ?? 0),
    isRowError,
    write: (rows) =>
      persist("queue_settler", settleItems(pools.work, rows)).pipe(
        Effect.map((exceptions) => {
          if (exceptions.length === 0) return rows.map((): Settled => "settled")
          const byId = new Map(exceptions.map((one) => [`${one.id}/${one.attempt}`, one.status]))
          return rows.map((row): Settled => byId.get(`${row.id}/${row.attempt}`) ?? "settled")
        }),
        Effect.tap(() => (rows.every(isPrivate) ? Effect.void : reach("queue.settle.committed")))
      )
  })

  const checkpoints = yield* GroupCommit.make<
    Checkpoint,
    "written" | "exists" | "stale",
    SqlError,
    never
  >({
    groupMax: 1000,
    bytesMax: 4_194_304,
    sizeOf: (row) => 64 + row.name.length + row.value.length,
    isRowError,
    write: (rows) =>
      Effect.map(persist("queue_checkpoints", writeCheckpoints(pools.work, rows)), (exceptions) => {
        if (exceptions.length === 0) return rows.map(() => "written" as const)
        const byName = new Map(exceptions.map((one) => [`${one.id}/${one.name}`, one.status]))
        return rows.map((row) => byName.get(`${row.id}/${row.name}`) ?? "written")
      })
  })

  const parker = yield* GroupCommit.make<Parking, Settled, SqlError, never>({
    groupMax: 1000,
    bytesMax: 4_194_304,
    sizeOf: (row) => row.waits.reduce((size, name) => size + name.length, 64),
    isRowError,
    write: (rows) =>
      Effect.map(persist("queue_parker", parkItems(pools.work, rows)), (exceptions) => {
        if (exceptions.length === 0) return rows.map((): Settled => "settled")
        // Told between its question and its park.
        if (exceptions.some((one) => one.status === "due")) hooks.dueInUnsafe(0)
        const byId = new Map(exceptions.map((one) => [`${one.id}/${one.attempt}`, one.status]))
        return rows.map((row): Settled => {
          const status = byId.get(`${row.id}/${row.attempt}`) ?? "due"
          return status === "due" ? "settled" : status
        })
      })
  })

  const waits = yield* GroupCommit.make<Asked, WaitAnswer, SqlError, never>({
    groupMax: 1000,
    bytesMax: 4_194_304,
    sizeOf: (row) => 64 + row.name.length,
    isRowError,
    write: (rows) => persist("queue_waits", askWaits(pools.work, rows))
  })

  const later = (millis: number, work: () => void) =>
    void run(Effect.andThen(Effect.sleep(millis), Effect.sync(work)))

  const progress = yield* ProgressReports.make({
    isRowError,
    writtenUnsafe: waker.reportedUnsafe,
    later,
    // Of a handler that was told to stop as well, which must not look like one that does not.
    endWithinMillis: Math.min(2000, settings.cancelGrace / 2),
    write: (reports: ReadonlyArray<ProgressReport>) =>
      Effect.map(persist("queue_progress", reportProgress(pools.work, reports)), (exceptions) => {
        if (exceptions.length === 0) return reports.map(() => true)
        const refused = new Set(exceptions.map((one) => `${one.id}/${one.attempt}`))
        return reports.map(({ attempt, id }) => !refused.has(`${id}/${attempt}`))
      })
  })

  const abandonAll = Effect.sync(() => {
    for (const runner of runners) runner.abandonUnsafe()
  })
  yield* Effect.forkScoped(Effect.catch(lease.lost, () => abandonAll))

  const nowMillis = () => Number(clock.monotonicTimeNanosUnsafe()) / 1e6
  const beginDrain = () => (drainUntilMillis ??= nowMillis() + settings.drain)
  // Not the private queue: a long drain must not look like a process that is stuck.
  const drainAll = Effect.suspend(() =>
    Effect.forEach(
      runners.filter((runner) => !runner.isPrivate),
      (runner) => runner.drain(beginDrain()),
      { concurrency: "unbounded", discard: true }
    )
  )
  yield* Effect.forkScoped(Effect.catch(executor.fired, () => executor.drain))
  // All queues stop claiming at once; each then ends with its own scope, within one common budget.
  yield* Effect.forkScoped(Effect.andThen(executor.drained, drainAll))

  const enforceUnsafe = () => {
    const now = nowMillis()
    let watched = 0
    let waitedMillis = 0
    for (const group of [settler, checkpoints, parker, waits]) {
      watched += group.pendingUnsafe()
      waitedMillis = Math.max(waitedMillis, group.waitedMillisUnsafe())
    }
    for (const runner of runners) {
      watched += runner.enforceUnsafe(now)
      waitedMillis = Math.max(waitedMillis, runner.busyMillisUnsafe(now))
    }
    // While the lease is in doubt the database is out of reach, and that has a clock of its own.
    trustedSinceMillis = lease.isTrustedUnsafe() ? (trustedSinceMillis ?? now) : undefined
    const trustedMillis = trustedSinceMillis === undefined ? 0 : now - trustedSinceMillis
    if (Math.min(waitedMillis, trustedMillis) > settings.settleTimeout) {
      executor.fireUnsafe("unsettled")
    }
    return watched
  }

  const serve = (runner: Runner) =>
    Effect.acquireRelease(
      Effect.gen(function* () {
        runners.push(runner)
        yield* Effect.orDie(supervisor.supervise({ actor: runner.claimer }))
      }),
      () =>
        Effect.gen(function* () {
          yield* runner.drain(beginDrain())
          if (runner.countsUnsafe().live > 0) lease.keepUnsafe()
          // Bounded: an outcome that cannot be written is recovered with the executor's lease.
          yield* Effect.raceFirst(
            Effect.andThen(settler.idle, parker.idle),
            Effect.sleep(settings.abandonAfter)
          )
          // Peers are told of what was handed back while there still is a waker.
          yield* Effect.ignore(waker.actor.ask({ deadline: settings.abandonAfter }))
          runners.splice(runners.indexOf(runner), 1)
        })
    )

  return {
    executor,
    supervisor,
    waker,
    settler,
    checkpoints,
    parker,
    waits,
    progress,
    runners: () => runners,
    serve,
    reserveSuspectUnsafe: (again) => {
      if (suspectHeld) {
        denied.add(again)
        return false
      }
      suspectHeld = true
      return true
    },
    releaseSuspectUnsafe: () => {
      suspectHeld = false
      suspectKept = false
      const waiting = [...denied]
      denied.clear()
      for (const again of waiting) again()
    },
    keepSuspectUnsafe: () => {
      suspectKept = true
    },
    holdsSuspectUnsafe: () => suspectKept,
    hintUnsafe: (queueId) => {
      for (const runner of runners) {
        if (queueId === undefined || runner.queueId === queueId) runner.hintUnsafe()
      }
      for (const heard of listeners) heard(queueId)
    },
    overhear: (heard) =>
      Effect.acquireRelease(
        Effect.sync(() => listeners.add(heard)),
        () => Effect.sync(() => listeners.delete(heard))
      ),
    announceUnsafe: () => {
      for (const runner of runners) {
        runner.hintUnsafe()
        if (!runner.isPrivate) waker.workUnsafe(runner.queueId)
      }
    },
    settledUnsafe: (id) => {
      waker.settledUnsafe(id)
      hooks.settledUnsafe(id)
    },
    lostUnsafe: (lost) => void run(lease.close(lost)),
    enforceSoonUnsafe: hooks.enforceSoonUnsafe,
    enforceUnsafe,
    dueInUnsafe: hooks.dueInUnsafe,
    later
  }
})
