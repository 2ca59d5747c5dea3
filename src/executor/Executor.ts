/**
 * This process incarnation: a fresh identity, a lease, and the pools that carry that identity.
 *
 *   building --facts good, registered--> running --drain--> draining --scope closes--> released
 *      |  ^                                 |
 *      |  +-- unreachable: a new identity   +-- lost lease, forced exit: the lease runs out
 *      +-- refused: never registered
 *
 * I3. An id is made here and used once: it cannot be set from outside, so a restart is always a new
 *     executor, and the old one's tombstone refuses whatever arrives late.
 *
 * The lease is released last, after everything that could write has stopped, and only when the
 * database confirms the hand-back. A forced exit never releases it.
 */
import { PgClient } from "@effect/sql-pg"
import {
  Clock,
  Context,
  DateTime,
  Deferred,
  Duration,
  Effect,
  Exit,
  Random,
  Result,
  Schedule,
  Schema,
  Scope
} from "effect"
import * as Reactivity from "effect/reactivity/Reactivity"
import { isSqlError, type SqlError } from "effect/sql/SqlError"
import { randomUUID } from "node:crypto"
import { hostname } from "node:os"
import { Database, type Endpoint } from "../database/Database.ts"
import { abandonAfter } from "../database/Deadline.ts"
import * as Migrations from "../database/Migrations.ts"
import * as Pool from "../database/Pool.ts"
import * as Pooler from "../database/Pooler.ts"
import { classify, sqlState } from "../database/SqlState.ts"
import { refusalOf } from "../database/Startup.ts"
import {
  DatabaseRejected,
  FenceMissing,
  refuse,
  StartupRefused
} from "../database/StartupRefused.ts"
import { reach } from "../testing/FaultPoint.ts"
import * as ExecutorStore from "./ExecutorStore.ts"
import * as HeldLease from "./HeldLease.ts"
import { type Profile, resolve, type Resolved, type Settings } from "./Settings.ts"
import { subjectOf, WatchdogFired, type WatchdogReason } from "./WatchdogFired.ts"

export const ExecutorId = Schema.String.pipe(Schema.brand("tenure/ExecutorId"))
export type ExecutorId = typeof ExecutorId.Type

export interface Options {
  /** Recovery never crosses applications. */
  readonly application: string
  /** Recovery never crosses versions, except to the ones accepted here. */
  readonly version: string
  readonly accepts?: ReadonlyArray<string> | undefined
  readonly profile?: Profile | undefined
  readonly settings?: Partial<Settings> | undefined
  /** What to do when an application table has no fence. Default `refuse`; `warn` in development. */
  readonly unfenced?: "refuse" | "warn" | undefined
}

/** The pools of an executor; every session in them has its identity. */
export interface Pools {
  /** Renewals and questions about the lease alone: business traffic cannot queue ahead of them. */
  readonly lease: PgClient.PgClient
  /** Claims, settles, checkpoints, sweeps: short statements of ours. */
  readonly work: PgClient.PgClient
  /** Revocations, which wait for a barrier by design, and the looks of the queue monitor between them. */
  readonly recovery: PgClient.PgClient
  /** The fenced pool of the application's handlers. */
  readonly application: PgClient.PgClient
}

/** Who may run: this process incarnation and its lease. Only `Tenure.layer` makes one. */
export class Executor extends Context.Service<
  Executor,
  {
    readonly id: ExecutorId
    readonly application: string
    readonly version: string
    readonly accepts: ReadonlyArray<string>
    readonly startedAt: DateTime.Utc
    /** Asks this process to stop in order: admission closes, running work ends, the lease goes last. */
    readonly drain: Effect.Effect<void>
    /** Completes when a drain was asked for. */
    readonly drained: Effect.Effect<void>
    /** This process is not fit to go on: it stops in order if it can, and is killed if it cannot. */
    readonly fireUnsafe: (reason: WatchdogReason, subject?: string) => void
    /** Fails with the first reason, and never succeeds. */
    readonly fired: Effect.Effect<never, WatchdogFired>
    readonly settings: Resolved
    readonly database: Endpoint
    readonly lease: HeldLease.HeldLease
    readonly pools: Pools
  }
>()("tenure/Executor") {}

export const make = Effect.fn("executor_startup")(function* (
  options: Options
): Effect.fn.Return<Executor["Service"], StartupRefused, Database | Scope.Scope> {
  const settings = resolve(options.profile, options.settings)
  if (settings instanceof StartupRefused) return yield* settings
  const database = yield* Database
  const outer = yield* Effect.scope
  // Everything an attempt opens is closed with it: the next one has its own identity and pools.
  const attempt = Effect.uninterruptibleMask((restore) =>
    Effect.gen(function* () {
      const scope = yield* Scope.fork(outer)
      const made = yield* Effect.exit(
        restore(register(options, settings, database)).pipe(Scope.provide(scope))
      )
      if (Exit.isFailure(made))
        yield* abandonAfter(Scope.close(scope, made), settings.abandonAfter).pipe(Effect.ignore)
      return yield* made
    })
  )
  const executor = yield* attempt.pipe(
    Effect.catchIf(isSqlError, (error) => Effect.fail(refusalOf(error) ?? error)),
    Effect.tapError((error) =>
      isTransient(error)
        ? Effect.logWarning("executor_startup: the database cannot be reached yet").pipe(
            Effect.annotateLogs({
              sqlState: isSqlError(error) ? sqlState(error) : undefined,
              reason: error.message
            })
          )
        : Effect.void
    ),
    Effect.retry({ schedule: startupBackoff, while: isTransient }),
    Effect.catch((error) =>
      error instanceof StartupRefused ? Effect.fail(error) : Effect.die(error)
    )
  )
  yield* Effect.logInfo("executor_startup").pipe(
    Effect.annotateLogs({
      executorId: executor.id,
      application: executor.application,
      version: executor.version
    })
  )
  return executor
})

/**
 * Between half of and the whole of a pause that doubles from one second to thirty: 0.5-1 s first,
 * 15-30 s at most, so that replicas that failed together do not come back together.
 */
export const startupBackoff: Schedule.Schedule<unknown> = Schedule.min([
  Schedule.exponential("1 second"),
  Schedule.spaced("30 seconds")
]).pipe(
  Schedule.modifyDelay(({ duration }) =>
    Effect.map(Random.next, (share) =>
      Duration.millis(Duration.toMillis(duration) * (0.5 + share / 2))
    )
  )
)

const isTransient = (error: SqlError | StartupRefused): boolean =>
  isSqlError(error) && ["reconnect", "timeout", "retryTransaction"].includes(classify(error))

const register = Effect.fnUntraced(function* (
  options: Options,
  settings: Resolved,
  database: Endpoint
): Effect.fn.Return<Executor["Service"], StartupRefused | SqlError, Scope.Scope> {
  const id = ExecutorId.make(randomUUID())
  const pools = yield* makePools(id, settings, database)
  yield* Effect.scoped(checkServer(database, settings, id))
  yield* Migrations.check(pools.lease)
  yield* checkFences(pools.application, options.unfenced ?? "refuse")
  const clock = yield* Clock.Clock
  const uptimeNanos = yield* HeldLease.Uptime
  const registered = {
    monotonicNanos: clock.monotonicTimeNanosUnsafe(),
    uptimeNanos: uptimeNanos()
  }
  yield* ExecutorStore.registerExecutor(pools.lease, {
    executorId: id,
    application: options.application,
    version: options.version,
    validityMillis: settings.leaseValidity,
    host: hostname(),
    pid: process.pid
  })
  yield* reach("executor.registered")
  const lease = yield* HeldLease.make({ sql: pools.lease, executorId: id, settings, registered })
  const drained = yield* Deferred.make<void>()
  const fired = yield* Deferred.make<never, WatchdogFired>()
  yield* Effect.addFinalizer(() => release(pools.lease, lease, settings))
  return {
    id,
    application: options.application,
    version: options.version,
    accepts: options.accepts ?? [],
    startedAt: yield* DateTime.now,
    drain: Effect.asVoid(Deferred.succeed(drained, undefined)),
    drained: Deferred.await(drained),
    fireUnsafe: (reason, subject) => {
      const given = subject === undefined ? {} : { subject: subjectOf(subject) }
      Deferred.doneUnsafe(
        fired,
        Effect.fail(new WatchdogFired({ executorId: id, reason, ...given }))
      )
    },
    fired: Deferred.await(fired),
    settings,
    database,
    lease,
    pools
  }
})

/** A fenced transaction must end before the lease that admitted it could have been handed on twice. */
const fencedSessions = (id: ExecutorId, settings: Resolved, database: Endpoint) => ({
  database,
  executorId: id,
  statementTimeout: Math.min(settings.leaseValidity * 0.8, 60_000),
  lockTimeout: settings.abandonAfter,
  idleInTransactionTimeout: Math.min(settings.leaseValidity * 0.8, 60_000),
  transactionTimeout: settings.leaseValidity * 0.9
})

/** Of the pools that handlers use. */
export const handlerSessions = (id: ExecutorId, settings: Resolved, database: Endpoint) => ({
  ...fencedSessions(id, settings, database),
  applicationName: `tenure handlers ${id}`
})

const makePools = Effect.fnUntraced(function* (
  id: ExecutorId,
  settings: Resolved,
  database: Endpoint
): Effect.fn.Return<Pools, SqlError, Scope.Scope> {
  const sessions = fencedSessions(id, settings, database)
  const lease = yield* Pool.make({
    ...sessions,
    applicationName: `tenure lease ${id}`,
    // The next renewal must not wait for one that was abandoned and still drains its connection.
    connectionsMax: 2,
    statementTimeout: settings.abandonAfter,
    // Single statements, which have their own limit.
    transactionTimeout: undefined
  })
  const work = yield* Pool.make({
    ...sessions,
    applicationName: `tenure work ${id}`,
    connectionsMax: 4
  })
  const recovery = yield* Pool.make({
    ...sessions,
    applicationName: `tenure recovery ${id}`,
    connectionsMax: 1,
    lockTimeout: Math.max(100, settings.recoveryScan / 2)
  })
  const application = yield* Pool.make({
    ...handlerSessions(id, settings, database),
    connectionsMax: settings.poolConnectionsMax
  })
  return { lease, work, recovery, application }
})

const rejected = (problem: DatabaseRejected["problem"], detail: string): StartupRefused =>
  refuse(new DatabaseRejected({ problem, detail }))

/**
 * What waiting does not mend, asked of the server before anything is registered, on two connections
 * with the settings of the pools.
 */
export const checkServer = Effect.fnUntraced(function* (
  database: Endpoint,
  settings: Resolved,
  id: string
) {
  const open = PgClient.makeClient(
    Pool.connectionConfig({
      database,
      executorId: id,
      applicationName: `tenure lease ${id}`,
      statementTimeout: settings.abandonAfter,
      lockTimeout: settings.abandonAfter,
      idleInTransactionTimeout: settings.abandonAfter
    })
  ).pipe(Effect.provideServiceEffect(Reactivity.Reactivity, Reactivity.make))
  const sql = yield* open
  const facts = yield* ExecutorStore.serverFacts(sql)
  if (facts === undefined) return yield* Effect.die(new Error("the server answered no row"))
  if (facts.version < 150_000) {
    return yield* rejected(
      "unsupportedVersion",
      `the server is version ${Math.floor(facts.version / 10_000)}`
    )
  }
  if (facts.isInRecovery || facts.isReadOnly) {
    return yield* rejected("readOnly", "the server accepts no writes")
  }
  const other = yield* open
  if (yield* Pooler.sharesSessions(sql, other)) {
    return yield* rejected(
      "transactionPooler",
      "something between us and the server lends one session to several connections"
    )
  }
  // Of both: a pooler that opens sessions by itself has one of another client's at hand.
  const others = (yield* ExecutorStore.serverFacts(other))?.executorId
  if (facts.executorId !== id || others !== id) {
    return yield* rejected(
      "transactionPooler",
      "something between us and the server drops the session's identity"
    )
  }
  if (facts.preparedTransactionsMax > 0) {
    return yield* rejected(
      "preparedTransactions",
      `max_prepared_transactions is ${facts.preparedTransactionsMax}`
    )
  }
})

const checkFences = Effect.fnUntraced(function* (
  sql: PgClient.PgClient,
  unfenced: "refuse" | "warn"
) {
  const tables = yield* ExecutorStore.unfencedTables(sql)
  if (tables.length === 0) return
  if (unfenced === "refuse") return yield* refuse(new FenceMissing({ tables }))
  yield* Effect.logWarning(
    "tables without a fence: an executor whose lease has ended could write them"
  ).pipe(Effect.annotateLogs({ tables: tables.slice(0, 20).join(", "), count: tables.length }))
})

const release = (sql: PgClient.PgClient, lease: HeldLease.HeldLease, settings: Resolved) =>
  Effect.gen(function* () {
    if (lease.checkUnsafe()?._tag === "LeaseLost") return { state: "lost", handedBack: 0 }
    // Released, its work would start elsewhere beside the one that does not stop here.
    if (lease.isKeptUnsafe()) return { state: "left to expire", handedBack: 0 }
    const answer = yield* ExecutorStore.releaseExecutor(sql, lease.executorId)
    yield* lease.close("released")
    return answer
  }).pipe(
    abandonAfter(settings.abandonAfter),
    Effect.result,
    Effect.flatMap((outcome) =>
      Effect.logInfo("executor_shutdown").pipe(
        Effect.annotateLogs(
          Result.isSuccess(outcome)
            ? { executorId: lease.executorId, ...outcome.success }
            : {
                executorId: lease.executorId,
                state: "left to expire",
                reason: outcome.failure.message
              }
        )
      )
    )
  )
