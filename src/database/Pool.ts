/**
 * The one place where connections are made. What makes a session ours (its identity, its isolation
 * level, its limits) travels in the startup packet of every physical connection, so that no
 * `RESET ALL`, `DISCARD ALL` or rolled-back `SET` of user code can take it away (P-27), and a
 * connection that replaces a dead one has it from its first statement.
 *
 * A pool is bound to one executor for its life: a process that starts again under a new id makes new
 * pools. On a crash the sockets close, and the server rolls back what was open within
 * `client_connection_check_interval`.
 */
import { PgClient, type PgConnection } from "@effect/sql-pg"
import { Duration, Effect, Scope } from "effect"
import * as Reactivity from "effect/reactivity/Reactivity"
import type { SqlError } from "effect/sql/SqlError"
import type { Endpoint } from "./Database.ts"

export interface Options {
  readonly database: Endpoint
  /** Shown in `pg_stat_activity`; the server keeps 63 bytes. */
  readonly applicationName: string
  readonly connectionsMax: number
  /** Left out by a session that is no executor: a migrator, a client, an API server. */
  readonly executorId?: string | undefined
  readonly statementTimeout: Duration.Input
  readonly lockTimeout: Duration.Input
  readonly idleInTransactionTimeout: Duration.Input
  /** Known to PostgreSQL 17 and later; older servers run without it. */
  readonly transactionTimeout?: Duration.Input | undefined
  /** After so much silence the server asks the network whether the client is there. Default 10 s. */
  readonly keepaliveAfter?: Duration.Input | undefined
  /** Pipelines statements of many fibers over one connection: for short statements only. */
  readonly multiplex?: boolean | undefined
}

export const make = Effect.fnUntraced(function* (
  options: Options
): Effect.fn.Return<PgClient.PgClient, SqlError, Scope.Scope> {
  const transactionTimeout =
    options.transactionTimeout !== undefined && (yield* serverVersion(options)) >= 170_000
      ? options.transactionTimeout
      : undefined
  return yield* PgClient.make({
    ...connectionConfig({ ...options, transactionTimeout }),
    maxConnections: options.connectionsMax,
    ...(options.multiplex === undefined ? {} : { multiplex: options.multiplex })
  }).pipe(Effect.provideServiceEffect(Reactivity.Reactivity, Reactivity.make), openUntilClosed)
})

/**
 * In a scope of its own, closed in its turn. The driver's pool makes its connections in its scope, and
 * none once that has begun to close: a finalizer that gives a lease back would wait for ever if the
 * last connection had just been lost, or closed after a minute without use.
 */
export const openUntilClosed = <A, E, R>(
  pool: Effect.Effect<A, E, R | Scope.Scope>
): Effect.Effect<A, E, Exclude<R, Scope.Scope> | Scope.Scope> =>
  Effect.flatMap(Effect.scope, (parent) =>
    Effect.flatMap(Scope.fork(parent), (scope) => Scope.provide(pool, scope))
  )

/** One connection with the same settings, for a session that is no part of a pool. */
export const connectionConfig = (
  options: Omit<Options, "connectionsMax" | "multiplex">
): PgConnection.Config => ({
  ...options.database.config,
  applicationName: options.applicationName,
  startupParameters: startupParameters(options)
})

/** Everything but `transaction_timeout` exists since PostgreSQL 14. */
export const startupParameters = (
  options: Omit<Options, "connectionsMax" | "multiplex">
): Readonly<Record<string, string>> => ({
  // A guard that counts rows under a lock is exact only when each statement sees the latest rows.
  default_transaction_isolation: "read committed",
  default_transaction_read_only: "off",
  statement_timeout: milliseconds(options.statementTimeout),
  lock_timeout: milliseconds(options.lockTimeout),
  idle_in_transaction_session_timeout: milliseconds(options.idleInTransactionTimeout),
  // A listener is quiet for long, and so is a pool at rest.
  idle_session_timeout: "0",
  client_connection_check_interval: "1000",
  // Without probes the server notices a host that lost its power only after two hours.
  tcp_keepalives_idle: String(
    Math.ceil(Duration.toSeconds(options.keepaliveAfter ?? "10 seconds"))
  ),
  tcp_keepalives_interval: "5",
  tcp_keepalives_count: "3",
  ...(options.transactionTimeout === undefined
    ? {}
    : { transaction_timeout: milliseconds(options.transactionTimeout) }),
  ...(options.executorId === undefined ? {} : { "tenure.executor_id": options.executorId })
})

// The server reads 0 as "no limit", so a limit below one millisecond becomes one.
const milliseconds = (duration: Duration.Input): string => {
  const millis = Duration.toMillis(duration)
  return Number.isFinite(millis) ? String(Math.max(1, Math.ceil(millis))) : "0"
}

// Asked first, on a connection of its own: a startup packet with a setting the server does not know
// is refused as a whole.
const serverVersion = (options: Options): Effect.Effect<number, SqlError> =>
  Effect.scoped(
    Effect.gen(function* () {
      const sql = yield* PgClient.makeClient({
        ...options.database.config,
        applicationName: options.applicationName
      })
      const rows = yield* sql<{ readonly version: number }>`
        SELECT current_setting('server_version_num')::int AS version`
      return rows[0]?.version ?? 0
    })
  ).pipe(Effect.provideServiceEffect(Reactivity.Reactivity, Reactivity.make))
