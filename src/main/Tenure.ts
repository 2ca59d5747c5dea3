/**
 * The composition root: the supervision tree, top to bottom, in start order. Stop is the reverse, so
 * that the lease is the last thing a process gives back.
 *
 *   supervisor
 *   |- executor_watchdog   its thread, and what the thread is shown   (ends after the release)
 *   |- executor       identity, pools, registration        (released last)
 *   |- executor_coordination   lease renewal
 *   |- listener       hints, cancellations, results; its loss closes the lease check at once. Holds the presence
 *   |- executor_presence       death watch on a neighbour
 *   |- executor_recovery       scanner, loop 1
 *   |- stale_claim_sweep       loop 2
 *   |- queue_client, queue_progress, queue_waker
 *   |- queue_wake, queue_audit, queue_budget, queue_retention
 *   |- queue_schedules
 *   |- queue_monitor
 *   |- workflow_recovery_settlement
 *   |- capacity_sweep
 *   |- probe_claimer, executor_probe         a private queue
 *   `- queue_claimer  one for each queue that `toLayer` adds
 */
import { PgClient } from "@effect/sql-pg"
import {
  Config,
  Context,
  Deferred,
  type Duration,
  Effect,
  Layer,
  type Redacted,
  type Scope
} from "effect"
import { SqlClient } from "effect/sql"
import * as Actor from "../actor/Actor.ts"
import type { Stopped } from "../actor/Actor.ts"
import { type Child, Supervisor } from "../actor/Supervisor.ts"
import {
  Database,
  layerPostgres,
  layerPostgresConfig,
  parseEndpoint,
  type PostgresOptions
} from "../database/Database.ts"
import { layerEmbedded } from "../database/EmbeddedPostgres.ts"
import * as Listener from "../database/Listener.ts"
import { layerMigrations } from "../database/Migrations.ts"
import * as Pool from "../database/Pool.ts"
import * as Pooler from "../database/Pooler.ts"
import { waitOrRefuse } from "../database/Startup.ts"
import {
  DatabaseRejected,
  DefinitionRejected,
  FenceMissing,
  refuse,
  SchemaRejected,
  SettingsRejected,
  StartupRefused
} from "../database/StartupRefused.ts"
import * as CapacitySweep from "../capacity/Sweep.ts"
import * as ExecutorModule from "../executor/Executor.ts"
import { Executor, type Options } from "../executor/Executor.ts"
import type { LeaseLost, LeaseUnverified } from "../executor/HeldLease.ts"
import { Launch } from "../executor/Launch.ts"
import * as PresenceModule from "../executor/Presence.ts"
import type { Settings } from "../executor/Settings.ts"
import { layerApi, layerHttp, layerReadiness, layerRoutes } from "../http/Health.ts"
import * as ReadinessModule from "../http/Readiness.ts"
import { Readiness } from "../http/Readiness.ts"
import * as ClientModule from "../queue/Client.ts"
import { Client } from "../queue/Client.ts"
import { AlreadySettled, StaleAttempt, UnknownId } from "../queue/Errors.ts"
import * as EnqueuerModule from "../queue/Enqueuer.ts"
import { Enqueuer } from "../queue/Enqueuer.ts"
import * as QueueRuntimeModule from "../queue/QueueRuntime.ts"
import { QueueRuntime } from "../queue/QueueRuntime.ts"
import { processChannel, workChannel } from "../queue/QueueStore.ts"
import { wakePayload } from "../queue/WaitStore.ts"
import * as SchedulerModule from "../queue/Scheduler.ts"
import { Scheduler } from "../queue/Scheduler.ts"
import { schedulesPayload } from "../queue/ScheduleStore.ts"
import * as Sweeps from "../queue/Sweeps.ts"
import * as WakerModule from "../queue/Waker.ts"
import { Waker } from "../queue/Waker.ts"
import * as Scanner from "../recovery/Scanner.ts"
import * as StaleClaims from "../recovery/StaleClaims.ts"
import * as QueueMonitor from "../watchdog/QueueMonitor.ts"
import * as SettlementModule from "../recovery/Settlement.ts"
import { Settlement } from "../recovery/Settlement.ts"
import * as Watchdog from "../watchdog/Watchdog.ts"
import * as Probe from "../watchdog/Probe.ts"
import { runMain, type RunOptions } from "./runMain.ts"
import { randomUUID } from "node:crypto"

export {
  AlreadySettled,
  Client,
  Database,
  DatabaseRejected,
  DefinitionRejected,
  Executor,
  FenceMissing,
  layerApi,
  layerEmbedded,
  layerHttp,
  layerMigrations,
  layerPostgres,
  layerPostgresConfig,
  layerReadiness,
  layerRoutes,
  runMain,
  SchemaRejected,
  SettingsRejected,
  StaleAttempt,
  StartupRefused,
  UnknownId
}
export type { Options, PostgresOptions, RunOptions, Settings }

type Services = Executor | Client | PgClient.PgClient | SqlClient.SqlClient

/** An executor: lease, recovery, and the fenced pool as this process's `SqlClient`. */
export const layer = (options: Options): Layer.Layer<Services, StartupRefused, Database> =>
  Layer.effectContext(make(options)).pipe(Layer.provide(Supervisor.layer()))

/** `layer` with every option read from `Config`, as Effect's own `layerConfig`s. */
export const layerConfig = (
  options: Config.Wrap<Options>
): Layer.Layer<Services, StartupRefused | Config.ConfigError, Database> =>
  Layer.unwrap(Effect.map(Config.unwrap(options), layer))

const make = Effect.fnUntraced(function* (
  options: Options
): Effect.fn.Return<
  Context.Context<Services>,
  StartupRefused,
  Database | Supervisor | Scope.Scope
> {
  const supervisor = yield* Supervisor
  // Beside the registration, which takes about as long as the thread.
  const watchdog = yield* Watchdog.make
  const executor = yield* ExecutorModule.make(options)
  const { lease, pools, settings } = executor
  const supervise = (child: Child) => Effect.catch(supervisor.supervise(child), stopping)
  // Before anything can go wrong that the main of the process has to know.
  yield* Effect.flatMap(Launch, (launch) => launch.announce({ executor, supervisor }))
  yield* watchdog.arm(executor, supervisor)

  const ready = yield* Deferred.make<void>()
  const waker = yield* WakerModule.make(pools.work)
  const watching = yield* ClientModule.make({
    sql: pools.work,
    channel: processChannel(executor.id),
    pollMillis: settings.pollInterval
  })
  // The runtime's queues start after it is complete, so the sweeps never see it half made.
  let runtime: QueueRuntime["Service"] | undefined
  const runtimeOf = () => {
    if (runtime === undefined) throw new Error("a sweep ran before the runtime was made")
    return runtime
  }
  const sweeps = yield* Sweeps.make(settings, runtimeOf)
  runtime = yield* QueueRuntimeModule.make({
    executor,
    supervisor,
    waker,
    hooks: {
      enforceSoonUnsafe: sweeps.enforceSoonUnsafe,
      dueInUnsafe: sweeps.dueInUnsafe,
      settledUnsafe: watching.toldUnsafe
    }
  })
  const hintAll = Effect.sync(() => runtimeOf().hintUnsafe())
  const scheduler = yield* SchedulerModule.make({
    executor,
    onEnqueued: (queueId) => {
      runtimeOf().hintUnsafe(queueId)
      waker.workUnsafe(queueId)
    }
  })

  const renewal = yield* Actor.make<LeaseLost | LeaseUnverified, never>({
    name: "executor_coordination",
    step: Effect.tap(lease.renewOnce, (report) =>
      report["regained"] === 1 ? hintAll : Effect.void
    ),
    cadence: settings.leaseRenewal,
    progressWithin: settings.watchdog,
    onFailure: {
      first: Math.max(50, settings.leaseRenewal / 20),
      max: Math.max(100, settings.leaseRenewal / 4),
      while: (error) => error._tag === "LeaseUnverified"
    }
  })
  yield* supervise({ actor: renewal })
  yield* supervise({
    name: "lease",
    run: Effect.tapError(lease.lost, (error) =>
      Effect.logError("executor_coordination").pipe(
        Effect.annotateLogs({ executorId: executor.id, lost: error.cause })
      )
    ),
    restarts: 0
  })
  const presence = yield* PresenceModule.make({
    executor,
    renewUnsafe: renewal.wakeUnsafe,
    markedUnsafe: () => scanner.wakeUnsafe()
  })
  yield* supervise({
    name: "listener",
    run: Listener.run({
      connection: Pool.connectionConfig({
        database: executor.database,
        applicationName: `tenure listener ${executor.id}`,
        executorId: executor.id,
        statementTimeout: settings.abandonAfter,
        lockTimeout: settings.abandonAfter,
        idleInTransactionTimeout: settings.abandonAfter,
        // Peers take the end of this session for the end of the process. Whom the network has lost
        // still runs, and refuses itself later than after the 25 s of the other sessions.
        keepaliveAfter: settings.leaseValidity
      }),
      channels: [workChannel, processChannel(executor.id)],
      beside: presence?.hold,
      quietMillis: settings.leaseRenewal,
      answerWithin: settings.abandonAfter,
      onUp: Effect.gen(function* () {
        yield* Deferred.succeed(ready, undefined)
        watching.lookUnsafe()
        sweeps.cancelsUnsafe()
        yield* hintAll
      }),
      onHeard: (hears) => Effect.sync(() => sweeps.hearsUnsafe(hears)),
      // The database is out of reach, for all we know: refuse until a renewal says otherwise.
      onDown: Effect.sync(() => {
        lease.doubtUnsafe()
        renewal.wakeUnsafe()
        presence?.lostUnsafe()
      }),
      onNotification: (channel, payload) =>
        Effect.sync(() => {
          if (payload === wakePayload) runtimeOf().dueInUnsafe(0)
          else if (payload === schedulesPayload) scheduler.wakeUnsafe()
          else if (channel === workChannel) runtimeOf().hintUnsafe(Number(payload))
          else if (payload === "cancel") sweeps.cancelsUnsafe()
          else watching.notifiedUnsafe(payload)
        })
    })
  })
  const settlement = yield* SettlementModule.make(executor)
  const scanner = yield* Scanner.make({
    executor,
    onRecovered: ({ requeued, settled }) =>
      Effect.sync(() => {
        for (const id of settled) runtimeOf().settledUnsafe(id)
        if (settled.length > 0) settlement.wakeUnsafe()
        if (requeued > 0) runtimeOf().announceUnsafe()
      })
  })
  if (presence !== undefined) {
    // Between the end of the watch and that of the session, which peers must not mistake for a death.
    yield* Effect.addFinalizer(() => presence.leave)
    yield* supervise({ actor: presence.actor })
  }
  const staleClaims = yield* StaleClaims.make({
    executor,
    onSwept: Effect.sync(() => runtimeOf().dueInUnsafe(0))
  })
  for (const actor of [
    scanner,
    staleClaims,
    waker.actor,
    watching.actor,
    watching.progressActor,
    ...sweeps.actors,
    scheduler.actor,
    settlement.actor
  ]) {
    yield* supervise({ actor })
  }
  const capacity = yield* CapacitySweep.make({
    executor,
    onSettled: ({ exhausted, settled }) =>
      Effect.sync(() => {
        for (const id of settled) runtimeOf().settledUnsafe(id)
        if (exhausted.length > 0) settlement.wakeUnsafe()
      })
  })
  yield* supervise({ actor: capacity })
  const monitor = yield* QueueMonitor.make({ executor, queues: () => runtimeOf().runners() })
  yield* supervise({ actor: monitor })
  yield* supervise({ actor: yield* Probe.make(runtime), shutdown: "1 second" })
  yield* watchdog.ready
  const services = Context.make(Executor, executor).pipe(
    Context.add(Client, {
      ready: Deferred.await(ready),
      outcome: watching.outcome,
      progress: watching.progress
    }),
    Context.add(PgClient.PgClient, pools.application),
    Context.add(SqlClient.SqlClient, pools.application),
    // Not in the type: only layers of ours look for them.
    Context.add(QueueRuntime, runtime),
    Context.add(Scheduler, scheduler),
    Context.add(Settlement, settlement),
    Context.add(Waker, waker),
    Context.add(Enqueuer, yield* EnqueuerModule.make(pools.application)),
    Context.add(Supervisor, supervisor),
    Context.add(Readiness, yield* ReadinessModule.make({ executor, supervisor }))
  )
  return services as Context.Context<Services>
})

const stopping = (error: Stopped) => Effect.die(error)

/**
 * For a process that hands in and watches, but runs nothing: on the application's own pool, without a
 * lease. Nobody can listen through a pooler that lends its sessions: there results are looked for every
 * five seconds, and a pool without `prepare: false` is refused, since its transactions would fail.
 */
export const layerClient: Layer.Layer<Client, StartupRefused, PgClient.PgClient> =
  Layer.effectContext(
    Effect.gen(function* () {
      const sql = yield* PgClient.PgClient
      const supervisor = yield* Supervisor
      const channel = processChannel(randomUUID())
      const ready = yield* Deferred.make<void>()
      const waker = yield* WakerModule.make(sql)
      const watching = yield* ClientModule.make({ sql, channel, pollMillis: 5000 })
      yield* waitOrRefuse(sql`SELECT FROM tenure.queue LIMIT 1`, "client")
      const { breaksPrepared, lends } = yield* waitOrRefuse(Pooler.inspect(sql.config), "client")
      if (breaksPrepared) {
        const detail = "a pooler lends its sessions and keeps no prepared statements apart"
        return yield* refuse(new DatabaseRejected({ problem: "preparedStatements", detail }))
      }
      const listener = Listener.run({
        connection: { ...sql.config, applicationName: "tenure client" },
        channels: [channel],
        quietMillis: 10_000,
        answerWithin: 10_000,
        onUp: Effect.andThen(Deferred.succeed(ready, undefined), Effect.sync(watching.lookUnsafe)),
        onHeard: () => Effect.void,
        onDown: Effect.void,
        onNotification: (_, payload) => Effect.sync(() => watching.notifiedUnsafe(payload))
      })
      if (lends) {
        yield* Deferred.succeed(ready, undefined)
        yield* Effect.logWarning("a pooler lends its sessions: results are looked for every 5 s")
      } else {
        yield* supervisor
          .supervise({ name: "listener", run: listener })
          .pipe(Effect.catch(stopping))
      }
      for (const actor of [waker.actor, watching.actor, watching.progressActor]) {
        yield* supervisor.supervise({ actor }).pipe(Effect.catch(stopping))
      }
      return Context.make(Client, {
        ready: Deferred.await(ready),
        outcome: watching.outcome,
        progress: watching.progress
      }).pipe(
        Context.add(Waker, waker),
        Context.add(Enqueuer, yield* EnqueuerModule.make(sql))
      ) as Context.Context<Client>
    })
  ).pipe(Layer.provide(Supervisor.layer()))

/**
 * One more guarded pool, beside the one `layer` provides. Other credentials are allowed, another
 * host, port or database is refused: a fence is worth nothing on another server.
 */
export const layerPool = (options: {
  readonly connectionsMax: number
  readonly url?: Redacted.Redacted | undefined
  readonly statementTimeout?: Duration.Input | undefined
}): Layer.Layer<PgClient.PgClient | SqlClient.SqlClient, StartupRefused, Executor> =>
  Layer.effectContext(
    Effect.gen(function* () {
      const executor = yield* Executor
      const { database: registry, settings } = executor
      const database =
        options.url === undefined
          ? registry
          : yield* Effect.fromResult(parseEndpoint({ url: options.url, ssl: undefined }))
      for (const part of ["host", "port", "database"] as const) {
        if (database[part] !== registry[part]) {
          return yield* refuse(
            new DatabaseRejected({
              problem: "otherEndpoint",
              detail: `the pool's ${part} is ${database[part]}, the registry's is ${registry[part]}`
            })
          )
        }
      }
      const pool = yield* waitOrRefuse(
        Effect.gen(function* () {
          const made = yield* Pool.make({
            ...ExecutorModule.handlerSessions(executor.id, settings, database),
            connectionsMax: options.connectionsMax,
            ...(options.statementTimeout === undefined
              ? {}
              : { statementTimeout: options.statementTimeout })
          })
          yield* Effect.scoped(ExecutorModule.checkServer(database, settings, executor.id))
          return made
        }),
        "pool"
      )
      return Context.make(PgClient.PgClient, pool).pipe(Context.add(SqlClient.SqlClient, pool))
    })
  )
