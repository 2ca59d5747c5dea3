/**
 * The PostgreSQL a benchmark runs on: an embedded 18 of our own, durable and sized like a small real
 * server, or the one `DATABASE_URL` names. Each benchmark gets databases of its own, dropped at the
 * end; what is left of a killed run goes with the next one.
 */
import { PgClient } from "@effect/sql-pg"
import { Clock, Effect, Redacted, type Scope } from "effect"
import * as Reactivity from "effect/reactivity/Reactivity"
import { readdirSync, readFileSync } from "node:fs"
import { Database, type Endpoint, parseEndpoint } from "../src/database/Database.ts"
import { endpoint, start } from "../src/database/EmbeddedPostgres.ts"
import * as Migrations from "../src/database/Migrations.ts"
import { openUntilClosed } from "../src/database/Pool.ts"
import * as WireClient from "./WireClient.ts"

export interface Server {
  /** A new database, empty or a copy of `template`, dropped with the scope. */
  readonly database: (name: string, template?: Bench) => Effect.Effect<Bench, never, Scope.Scope>
  /** Seconds of processor time that the whole server has used, or `undefined` where it cannot be seen. */
  readonly cpuSeconds: () => number | undefined
  /** Until it has been up for so long: nobody is taken for dead by his absence right after a start. */
  readonly hasBeenUpFor: (seconds: number) => Effect.Effect<void>
  /** Single-row updates a second by four clients for two seconds: how fast the machine is just now. */
  readonly calibrate: Effect.Effect<number>
}

export interface Bench {
  readonly endpoint: Endpoint
  readonly url: string
  readonly migrate: Effect.Effect<void>
  /** Sessions of its own, so that nobody is in a database that is being copied. */
  readonly connect: Effect.Effect<PgClient.PgClient, never, Scope.Scope>
}

/** What a server of this size would be given; without it checkpoints decide what is measured. */
const parameters = {
  shared_buffers: "1GB",
  max_wal_size: "8GB",
  checkpoint_timeout: "15min",
  // Counts nothing until a benchmark switches it on for a database of its own.
  shared_preload_libraries: "pg_stat_statements",
  "pg_stat_statements.track": "none"
}

const prefix = "tenure_bench_"

export const make = Effect.fnUntraced(function* (): Effect.fn.Return<Server, never, Scope.Scope> {
  const admin = yield* administrator
  const sql = yield* connect(admin)
  const left = yield* Effect.orDie(
    sql<{ readonly datname: string }>`
      SELECT datname FROM pg_database WHERE starts_with(datname, ${prefix})`
  )
  yield* Effect.forEach(left, ({ datname }) => drop(sql, datname), { discard: true })

  const database = Effect.fnUntraced(function* (name: string, template?: Bench) {
    const full = `${prefix}${name}`
    yield* Effect.acquireRelease(
      Effect.andThen(
        drop(sql, full),
        execute(sql, [
          `CREATE DATABASE ${full} TEMPLATE ${template?.endpoint.database ?? "template1"}`
        ])
      ),
      () => drop(sql, full)
    )
    const target = inDatabase(admin, full)
    return {
      endpoint: target,
      url: urlOf(target),
      connect: connect(target),
      migrate: Effect.asVoid(
        Effect.orDie(Effect.provideService(Migrations.run(), Database, target))
      )
    }
  })

  const calibration = yield* database("calibration")
  yield* execute(yield* calibration.connect, [
    "CREATE TABLE cell AS SELECT g AS id, 0 AS n FROM generate_series(1, 10000) g",
    "ALTER TABLE cell ADD PRIMARY KEY (id)"
  ])
  const postmaster = yield* postmasterOf(admin, sql)
  return {
    database,
    hasBeenUpFor: (seconds) =>
      Effect.gen(function* () {
        const rows = yield* Effect.orDie(sql<{ readonly left: number }>`
          SELECT extract(epoch FROM pg_postmaster_start_time() - clock_timestamp())::float8
                 + ${seconds}::float8 AS left`)
        yield* Effect.sleep(Math.max(0, rows[0]?.left ?? 0) * 1000)
      }),
    cpuSeconds: () => (postmaster === undefined ? undefined : cpuSecondsOf(postmaster)),
    calibrate: Effect.scoped(
      Effect.gen(function* () {
        const clock = yield* Clock.Clock
        const clients = yield* Effect.replicateEffect(WireClient.make(calibration.endpoint), 4)
        const frames = yield* Effect.forEach(clients, (client) =>
          client.prepare("UPDATE cell SET n = n + 1 WHERE id = 1 + floor(random() * 10000)::int")
        )
        const until = clock.monotonicTimeNanosUnsafe() + 2_000_000_000n
        const counts = yield* Effect.forEach(
          clients,
          (client, at) => client.repeat(frames.slice(at, at + 1), until),
          { concurrency: "unbounded" }
        )
        return counts.reduce((sum, count) => sum + count, 0) / 2
      })
    )
  }
})

/** What was written before is on disk, so that it does not burden what is measured next. */
export const checkpoint = (sql: PgClient.PgClient): Effect.Effect<void> =>
  // On a server of somebody else's we may not be allowed to.
  Effect.ignore(sql.unsafe("CHECKPOINT"))

/** Statements of a benchmark's set-up: if one fails, there is nothing to measure. */
export const execute = (
  sql: PgClient.PgClient,
  statements: ReadonlyArray<string>
): Effect.Effect<void> =>
  Effect.orDie(Effect.forEach(statements, (statement) => sql.unsafe(statement), { discard: true }))

// The superuser of an embedded server makes the databases; of a given one, whoever the URL names.
const administrator = Effect.suspend((): Effect.Effect<Endpoint, never, Scope.Scope> => {
  const given = process.env["DATABASE_URL"]
  if (given === undefined) {
    return Effect.orDie(
      Effect.map(start({ directory: ".tenure/bench", parameters }), (server) =>
        endpoint(server, "postgres", "postgres")
      )
    )
  }
  return Effect.orDie(Effect.fromResult(parseEndpoint({ url: Redacted.make(given) })))
})

const connect = (target: Endpoint): Effect.Effect<PgClient.PgClient, never, Scope.Scope> =>
  PgClient.make({ ...target.config, applicationName: "tenure bench", maxConnections: 4 }).pipe(
    Effect.provideServiceEffect(Reactivity.Reactivity, Reactivity.make),
    openUntilClosed,
    Effect.orDie
  )

const drop = (sql: PgClient.PgClient, database: string): Effect.Effect<void> =>
  Effect.asVoid(Effect.orDie(sql.unsafe(`DROP DATABASE IF EXISTS ${database} WITH (FORCE)`)))

export const urlOf = (target: Endpoint): string => {
  const url = new URL(`postgresql://${target.host}:${target.port}/${target.database}`)
  url.username = target.username
  if (target.password !== undefined) url.password = Redacted.value(target.password)
  return url.href
}

const inDatabase = (admin: Endpoint, database: string): Endpoint => {
  const parsed = parseEndpoint({ url: Redacted.make(urlOf({ ...admin, database })) })
  if (parsed._tag === "Failure") throw parsed.failure
  return parsed.success
}

/** The parent of our own session's process, if that process runs on this machine. */
const postmasterOf = Effect.fnUntraced(function* (admin: Endpoint, sql: PgClient.PgClient) {
  const isLocal = ["localhost", "127.0.0.1", "::1"].includes(admin.host)
  if (!isLocal || process.platform !== "linux") return undefined
  const rows = yield* Effect.orDie(sql<{ readonly pid: number }>`SELECT pg_backend_pid() AS pid`)
  const session = processOf(rows[0]?.pid ?? 0)
  return session?.name === "postgres" ? session.parent : undefined
})

interface Process {
  readonly name: string
  readonly parent: number
  /** Its own, and that of its children whose end it has read. */
  readonly ticks: number
  readonly ticksOfEnded: number
}

const processOf = (pid: number): Process | undefined => {
  try {
    const stat = readFileSync(`/proc/${pid}/stat`, "utf8")
    const fields = stat
      .slice(stat.lastIndexOf(")") + 2)
      .split(" ")
      .map(Number)
    return {
      name: stat.slice(stat.indexOf("(") + 1, stat.lastIndexOf(")")),
      parent: fields[1] ?? 0,
      ticks: (fields[11] ?? 0) + (fields[12] ?? 0),
      ticksOfEnded: (fields[13] ?? 0) + (fields[14] ?? 0)
    }
  } catch {
    return undefined
  }
}

/** Linux counts in hundredths of a second. */
const ticksPerSecond = 100

const cpuSecondsOf = (postmaster: number): number | undefined => {
  const server = processOf(postmaster)
  if (server === undefined) return undefined
  let ticks = server.ticks + server.ticksOfEnded
  for (const entry of readdirSync("/proc")) {
    if (!/^\d+$/.test(entry)) continue
    const child = processOf(Number(entry))
    if (child?.parent === postmaster) ticks += child.ticks
  }
  return ticks / ticksPerSecond
}
