/**
 * A real PostgreSQL of the application's own, for development, first tries and tests: no installation,
 * no Docker, no rights.
 *
 *   with `directory`     the data stay. Processes that name the same directory share one server: the
 *                        first starts it, the last to close stops it. After a SIGKILL the server is
 *                        still there, and the next process adopts it
 *   without `directory`  a temporary one, gone with the scope, and with the process even on SIGKILL
 *
 * Who still uses a server is a shared advisory lock in its `postgres` database, held by an open
 * session. It ends with its process, so nothing has to be cleaned up after a crash; and who gets it
 * exclusively is certain to be the last, and that nobody joins while he stops the server.
 *
 * Everything is committed to disk as on any server, except with `durable: false`.
 */
import { PgClient } from "@effect/sql-pg"
import { Clock, Effect, Exit, Layer, Option, Redacted, Scope } from "effect"
import * as Reactivity from "effect/reactivity/Reactivity"
import type { SqlError } from "effect/sql/SqlError"
import { chmodSync, chownSync, mkdirSync, mkdtempSync, rmSync } from "node:fs"
import { tmpdir } from "node:os"
import { join, resolve } from "node:path"
import { Database, type Endpoint, parseEndpoint } from "./Database.ts"
import { abandonAfter } from "./Deadline.ts"
import { type Binaries, locate, refuseEmbedded } from "./EmbeddedBinaries.ts"
import { type Cluster, databaseName, initialise, role } from "./EmbeddedCluster.ts"
import { awaitReady, choosePort, lastLines, launch, running, stop } from "./EmbeddedServer.ts"
import { choose } from "./EmbeddedUser.ts"
import { run } from "./Migrations.ts"
import type { StartupRefused } from "./StartupRefused.ts"

/** Where the commands of the package keep their data, relative to the working directory. */
export const defaultDirectory = ".tenure/postgres"

export interface Options {
  readonly directory?: string | undefined
  /** Creates or upgrades the `tenure` schema. Default `true`. */
  readonly migrate?: boolean | undefined
  /** `false` trades safety against a crash of the machine for speed. Default `true`. */
  readonly durable?: boolean | undefined
  /** Server parameters, as `{ shared_buffers: "1GB" }`; they count when this process starts the server. */
  readonly parameters?: Readonly<Record<string, string>> | undefined
}

export const layerEmbedded = (options: Options = {}): Layer.Layer<Database, StartupRefused> =>
  Layer.effect(
    Database,
    Effect.gen(function* () {
      const server = yield* start(options)
      const database = endpoint(server, role, databaseName)
      if (options.migrate !== false) {
        yield* Effect.provideService(run(), Database, database)
      }
      yield* Effect.logInfo("an embedded PostgreSQL is ready").pipe(
        Effect.annotateLogs({ port: server.port, directory: server.directory })
      )
      return database
    })
  )

export interface Server {
  readonly port: number
  readonly password: string
  readonly directory: string
  readonly pid: number
}

/** The bare server, with the database `tenure` still empty. */
export const start = (
  options: Options & { readonly binaries?: Binaries | undefined }
): Effect.Effect<Server, StartupRefused, Scope.Scope> =>
  Effect.gen(function* () {
    const binaries = options.binaries ?? (yield* locate())
    const choices = { durable: options.durable ?? true, parameters: options.parameters ?? {} }
    return options.directory === undefined
      ? yield* startTemporary(binaries, choices)
      : yield* share(binaries, choices, resolve(options.directory))
    // A server's pace is not the application's: under a test's clock its start would never end.
  }).pipe(Effect.provideService(Clock.Clock, Clock.Clock.defaultValue()))

export const endpoint = (server: Server, username: string, database: string): Endpoint => {
  const url = new URL(`postgresql://127.0.0.1:${server.port}/${database}`)
  url.username = username
  url.password = server.password
  const parsed = parseEndpoint({ url: Redacted.make(url.href) })
  if (parsed._tag === "Failure") throw new Error("an endpoint of ours is always well formed")
  return parsed.success
}

type Choices = Pick<Cluster, "durable" | "parameters">

const startTemporary = Effect.fnUntraced(function* (
  binaries: Binaries,
  choices: Choices
): Effect.fn.Return<Server, StartupRefused, Scope.Scope> {
  const directory = yield* Effect.acquireRelease(
    Effect.sync(() => mkdtempSync(join(tmpdir(), "tenure-postgres-"))),
    (made) => Effect.sync(() => rmSync(made, { recursive: true, force: true }))
  )
  // The server's user has to get through to its data, and to remove the folder when we are gone.
  yield* Effect.sync(() => chmodSync(directory, 0o711))
  const cluster = yield* describe(binaries, choices, directory)
  yield* Effect.sync(() => chownSync(directory, cluster.user.uid, cluster.user.gid))
  const password = yield* initialise(cluster, directory)
  return yield* severalTimes(
    cluster,
    Effect.gen(function* () {
      const port = yield* choosePort(cluster.data)
      const launched = yield* Effect.acquireRelease(
        launch(cluster, port, directory),
        (server) => server.end
      )
      const ready = yield* awaitReady(cluster, launched)
      return ready === undefined ? undefined : { ...ready, password, directory }
    })
  )
})

const share = Effect.fnUntraced(function* (
  binaries: Binaries,
  choices: Choices,
  directory: string
): Effect.fn.Return<Server, StartupRefused, Scope.Scope> {
  yield* Effect.try({
    try: () => mkdirSync(directory, { recursive: true }),
    catch: () => refuseEmbedded(`the directory ${directory} cannot be made`)
  })
  const cluster = yield* describe(binaries, choices, directory)
  const password = yield* initialise(cluster, directory)
  return yield* severalTimes(
    cluster,
    Effect.gen(function* () {
      const launched =
        running(cluster.data) === undefined
          ? yield* launch(cluster, yield* choosePort(cluster.data), undefined)
          : undefined
      const ready = yield* awaitReady(cluster, launched)
      if (ready === undefined) return undefined
      const server = { ...ready, password, directory }
      return (yield* takePart(server, cluster.data)) ? server : undefined
    })
  )
})

const describe = Effect.fnUntraced(function* (
  binaries: Binaries,
  choices: Choices,
  directory: string
): Effect.fn.Return<Cluster, StartupRefused> {
  const data = join(directory, "data")
  const user = yield* choose(binaries, directory, data)
  return { binaries, user, data, log: join(directory, "server.log"), ...choices }
})

// A start fails for reasons that pass: somebody took the port, another process was first, or the
// server we found was just being stopped by its last user.
const severalTimes = Effect.fnUntraced(function* <E, R>(
  cluster: Cluster,
  attempt: Effect.Effect<Server | undefined, E, R>
): Effect.fn.Return<Server, E | StartupRefused, R> {
  for (let turn = 0; turn < 5; turn++) {
    const server = yield* attempt
    if (server !== undefined) return server
  }
  return yield* refuseEmbedded(`PostgreSQL does not start: ${lastLines(cluster.log)}`)
})

// The letters TNEM, and frozen as every lock number.
const lockNamespace = 0x544e454d
const lockKey = 1

/** Takes part in a server until the scope closes; the last to go stops it. */
const takePart = Effect.fnUntraced(function* (
  server: Server,
  data: string
): Effect.fn.Return<boolean, never, Scope.Scope> {
  const scope = yield* Scope.Scope
  const session = yield* Scope.fork(scope)
  const sql = yield* connect(server).pipe(
    Effect.tap(
      (sql) => sql`SELECT pg_advisory_lock_shared(${lockNamespace}::int, ${lockKey}::int)`
    ),
    Scope.provide(session),
    Effect.option
  )
  if (Option.isNone(sql)) {
    yield* Scope.close(session, Exit.void)
    return false
  }
  yield* Scope.addFinalizer(
    session,
    abandonAfter(leave(sql.value, server, data), "30 seconds").pipe(
      Effect.ignore,
      Effect.provideService(Clock.Clock, Clock.Clock.defaultValue())
    )
  )
  return true
})

const leave = Effect.fnUntraced(function* (
  sql: PgClient.PgClient,
  server: Server,
  data: string
): Effect.fn.Return<void> {
  const isLast = yield* takeAll(sql).pipe(
    // The session may have been terminated, and its lock with it.
    Effect.catch(() => Effect.scoped(Effect.flatMap(connect(server), takeAll))),
    // Nobody answers: stopped, or about to be.
    Effect.orElseSucceed(() => false)
  )
  // Still holding the lock: whoever comes meanwhile waits for it, and is sent away by the shutdown.
  if (isLast) yield* stop(data)
})

const takeAll = (sql: PgClient.PgClient): Effect.Effect<boolean, SqlError> =>
  sql<{ readonly taken: boolean }>`
    WITH released AS MATERIALIZED (
      SELECT pg_advisory_unlock_shared(${lockNamespace}::int, ${lockKey}::int)
    )
    SELECT pg_try_advisory_lock(${lockNamespace}::int, ${lockKey}::int) AS taken
    FROM released`.pipe(Effect.map((rows) => rows[0]?.taken === true))

const connect = (server: Server): Effect.Effect<PgClient.PgClient, SqlError, Scope.Scope> =>
  PgClient.makeClient({
    ...endpoint(server, role, "postgres").config,
    applicationName: "tenure embedded"
  }).pipe(Effect.provideServiceEffect(Reactivity.Reactivity, Reactivity.make))
