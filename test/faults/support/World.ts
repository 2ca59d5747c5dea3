/**
 * The scene of one fault test: a database of its own with the history's triggers and a fenced
 * application table, the outside world, and whatever workers and proxies the test starts. When the
 * test has done its part, what happened is checked against the promises, and then that nothing was
 * left behind. A failure prints the seed, what every process said and logged, and the server's log.
 *
 * TENURE_SEED repeats the choices of a run; the operating system's own are not repeatable.
 */
import type { PgClient } from "@effect/sql-pg"
import { Clock, Console, Duration, Effect, Random, type Scope } from "effect"
import { SqlClient } from "effect/sql"
import type { SqlError } from "effect/sql/SqlError"
import { randomInt } from "node:crypto"
import { existsSync, readFileSync } from "node:fs"
import { StartupRefused } from "../../../src/database/StartupRefused.ts"
import { counts, resolve, type Settings } from "../../../src/executor/Settings.ts"
import { pace } from "../../support/pace.ts"
import * as Postgres from "../../support/Postgres.ts"
import * as History from "./History.ts"
import * as Proxy from "./Proxy.ts"
import * as Sink from "./Sink.ts"
import { secretOf, type Instruction, Work } from "./Work.ts"
import * as WorkerProcess from "./Worker.ts"

export interface Server {
  readonly worker: string
  readonly api: string
  readonly superuser: Postgres.FreshDatabase["superuser"]
  readonly log: string | undefined
}

export interface World {
  readonly server: Server
  /** A superuser without identity. */
  readonly sql: PgClient.PgClient
  readonly sink: Sink.Sink
  readonly secret: string
  readonly proxy: Effect.Effect<Proxy.Proxy, never, Scope.Scope>
  /** Starts a worker; `ready` waits until it runs. */
  readonly worker: (
    options?: WorkerProcess.Options
  ) => Effect.Effect<WorkerProcess.Worker, never, Scope.Scope>
  readonly ready: (
    options?: WorkerProcess.Options
  ) => Effect.Effect<WorkerProcess.Worker, never, Scope.Scope>
  /** So many, each started again whenever it ends, as a deployment does. */
  readonly keepRunning: (
    replicas: number,
    options?: WorkerProcess.Options
  ) => Effect.Effect<void, never, Scope.Scope>
  readonly workers: ReadonlyArray<WorkerProcess.Worker>
  readonly proxies: ReadonlyArray<Proxy.Proxy>
  readonly enqueue: (
    programs: ReadonlyArray<ReadonlyArray<Instruction>>
  ) => Effect.Effect<ReadonlyArray<string>>
  /** Until the condition holds: polled, because half of what is waited for is in other processes. */
  readonly until: <A>(
    what: string,
    condition: () => Effect.Effect<A | false | undefined, SqlError> | A | false | undefined,
    within?: Duration.Input
  ) => Effect.Effect<A>
  readonly allSettled: (within?: Duration.Input) => Effect.Effect<void>
  readonly outcomes: Effect.Effect<ReadonlyArray<Outcome>>
  readonly attempts: (item: string) => Effect.Effect<ReadonlyArray<Attempt>>
  readonly executor: (id: string | undefined) => Effect.Effect<ExecutorRow>
  /** Until no worker's probe is on its way: the next ones come after the interval in its settings. */
  readonly betweenProbes: Effect.Effect<unknown>
  /** Of a table of items: without the probes of the workers. */
  readonly count: (from: string) => Effect.Effect<number>
}

export interface Outcome {
  readonly id: string
  readonly outcome: string
  readonly reason: string | null
  readonly attempt: number
  readonly failures: number
  readonly losses: number
  readonly owner: string | null
}

export interface Attempt {
  readonly attempt: number
  readonly owner: string
  readonly at: Date
}

export interface ExecutorRow {
  readonly state: string
  readonly heartbeat_at: Date
  readonly expires_at: Date
  readonly revoked_at: Date | null
  /** By the database's clock. */
  readonly is_past: boolean
}

/**
 * The short profile with twice its lease: a dozen processes start at once here, on two cores. What ends
 * a process for being slow is left to the tests of it.
 */
const brief = {
  leaseValidity: "6 seconds",
  watchdog: "4 seconds",
  abandonAfter: "1 second",
  forcedExit: "500 millis",
  starvation: "1 minute",
  settleTimeout: "20 seconds",
  reservationValidity: "30 seconds"
} as const

/** A short profile that breaks a rule is left as it is, for the worker to refuse. */
const paced = (settings: Partial<Settings>): Partial<Settings> => {
  const resolved = resolve("short", settings)
  if (resolved instanceof StartupRefused) return settings
  return Object.fromEntries(
    Object.entries(resolved).map(([name, value]) => [
      name,
      // As JSON it would be nothing.
      value === Infinity ? "Infinity" : counts.has(name) ? value : value * pace
    ])
  )
}

/**
 * A lease that a busy machine does not end by accident, and a scan as quick as the short profile's. Hardly
 * any polling: a wake-up that is missing somewhere must not be hidden by it.
 */
export const steady = {
  pollInterval: "10 minutes",
  leaseValidity: "30 seconds",
  watchdog: "20 seconds",
  leaseRenewal: "1 second",
  abandonAfter: "3 seconds",
  forcedExit: "2 seconds"
} as const

/** What is on a private queue is no work: each worker sends itself some, all the time. */
const withoutProbes = (from: string): string =>
  from.replace(
    /^tenure\.(item|done|claimed|ready|delayed)\b/,
    (table, name: string) =>
      `(SELECT * FROM ${table} WHERE ${name === "ready" || name === "delayed" ? "lane_id" : "queue_id"} > 0) work`
  )

const statements = [
  "CREATE SCHEMA app",
  `CREATE TABLE app.written (
     item uuid NOT NULL, attempt int NOT NULL, executor uuid NOT NULL,
     at timestamptz NOT NULL DEFAULT clock_timestamp())`,
  "CREATE TABLE app.once (item uuid PRIMARY KEY, attempt int NOT NULL)",
  "CREATE TABLE app.failed (item uuid NOT NULL, executions int NOT NULL, executor uuid NOT NULL)",
  "SELECT tenure.fence_table(t::regclass) FROM unnest(ARRAY['app.written', 'app.once', 'app.failed']) t",
  "GRANT USAGE ON SCHEMA app TO tenure_worker",
  "GRANT INSERT ON app.written, app.once, app.failed TO tenure_worker"
]

export const make = Effect.fnUntraced(function* (
  server: Server
): Effect.fn.Return<World, SqlError, Scope.Scope> {
  const clock = yield* Clock.Clock
  const secret = secretOf(String(yield* Random.nextIntBetween(1e6, 1e7)))
  const sql = yield* Postgres.connect(server.superuser)
  for (const statement of statements) yield* sql.unsafe(statement)
  for (const statement of History.statements) yield* sql.unsafe(statement)
  const sink = yield* Sink.make
  const workers: Array<WorkerProcess.Worker> = []
  const proxies: Array<Proxy.Proxy> = []

  const worker = (options: WorkerProcess.Options = {}) => {
    const { node, url, ...orders } = options
    return Effect.tap(
      WorkerProcess.start(
        `worker ${workers.length + 1}`,
        {
          url: url ?? server.worker,
          sink: sink.url,
          version: "v1",
          accepts: [],
          profile: "short",
          slots: 10,
          faults: [],
          ...orders,
          settings: orders.profile === "default" ? {} : paced({ ...brief, ...orders.settings })
        },
        node
      ),
      (started) => Effect.sync(() => workers.push(started))
    )
  }

  const until: World["until"] = (what, condition, within = "60 seconds") =>
    Effect.gen(function* () {
      const patience = Duration.times(Duration.fromInputUnsafe(within), pace)
      const deadline = clock.monotonicTimeNanosUnsafe() + Duration.toNanosUnsafe(patience)
      while (true) {
        const answer = condition()
        const value = Effect.isEffect(answer) ? yield* Effect.orDie(answer) : answer
        if (value !== false && value !== undefined) return value as never
        if (clock.monotonicTimeNanosUnsafe() > deadline) {
          return yield* Effect.die(new Error(`not within ${Duration.format(patience)}: ${what}`))
        }
        yield* Effect.sleep("20 millis")
      }
    })

  const count = (from: string) =>
    sql
      .unsafe<{ readonly count: number }>(
        `SELECT count(*)::int AS count FROM ${withoutProbes(from)}`
      )
      .pipe(
        Effect.map((rows) => rows[0]?.count ?? 0),
        Effect.orDie
      )

  return {
    server,
    sql,
    sink,
    secret,
    proxy: Effect.tap(Proxy.make(server.worker), (made) => Effect.sync(() => proxies.push(made))),
    worker,
    ready: (options) =>
      Effect.tap(worker(options), (started) =>
        until(`${started.name} is ready`, () => {
          if (started.hasEnded()) throw new Error(`${started.name} ended before it was ready`)
          return started.executor()
        })
      ),
    keepRunning: (replicas, options) =>
      Effect.forkScoped(
        Effect.forever(Effect.scoped(Effect.flatMap(worker(options), (one) => one.ended)))
      ).pipe(Effect.replicateEffect(replicas, { discard: true })),
    workers,
    proxies,
    enqueue: (programs) =>
      Work.enqueueAll(programs.map((program) => ({ program, secret }))).pipe(
        Effect.provideService(SqlClient.SqlClient, sql),
        Effect.orDie
      ),
    until,
    allSettled: (within) =>
      Effect.asVoid(
        until(
          "every item is settled",
          () =>
            Effect.map(
              sql<{ readonly open: number }>`
                SELECT (SELECT count(*) FROM tenure.item WHERE queue_id > 0)::int
                     - (SELECT count(*) FROM tenure.done WHERE queue_id > 0)::int AS open`,
              ([row]) => row?.open === 0
            ),
          within
        )
      ),
    betweenProbes: until("no probe is on its way", () =>
      Effect.map(
        sql<{ readonly none: boolean }>`
          SELECT s.is_called AND NOT EXISTS (SELECT FROM tenure.probe p WHERE p.item_id IS NOT NULL) AS none
            FROM tenure.item_seq s`,
        ([row]) => row?.none
      )
    ),
    outcomes: Effect.orDie(
      sql<Outcome>`
        SELECT id, outcome, reason, attempt, failures, losses, owner FROM tenure.done
         WHERE queue_id > 0 ORDER BY id`
    ),
    attempts: (item) =>
      Effect.orDie(sql<Attempt>`
        SELECT attempt, owner, at FROM history.claim WHERE item = ${item}::uuid ORDER BY place`),
    executor: (id) =>
      Effect.gen(function* () {
        const [row] = yield* Effect.orDie(sql<ExecutorRow>`
          SELECT state, heartbeat_at, expires_at, revoked_at, expires_at <= tenure.clock() AS is_past
            FROM tenure.executor WHERE id = ${id ?? null}::uuid`)
        return row ?? (yield* Effect.die(new Error(`executor ${id} is not registered`)))
      }),
    count
  }
})

/** Runs a test in a world of its own on the shared server. */
export const run = (
  test: (world: World) => Effect.Effect<unknown, unknown, Scope.Scope>
): Effect.Effect<void> =>
  runOn(
    Effect.map(Postgres.freshDatabase, (database) => ({
      worker: database.urlOf("worker"),
      api: database.urlOf("api"),
      superuser: database.superuser,
      log: process.env["TENURE_TEST_LOG"]
    })),
    test
  )

export const runOn = <E>(
  place: Effect.Effect<Server, E, Scope.Scope>,
  test: (world: World) => Effect.Effect<unknown, unknown, Scope.Scope>
): Effect.Effect<void> => {
  const seed = process.env["TENURE_SEED"] ?? String(randomInt(1e9))
  return Effect.gen(function* () {
    const world = yield* Effect.flatMap(place, make)
    yield* Effect.scoped(
      // While the processes still are what they were.
      Effect.tapCause(test(world), () => Effect.ignore(Effect.tap(stateOf(world), Console.error)))
    ).pipe(
      // The workers are gone by now, so nothing moves any more.
      Effect.andThen(checkAll(world)),
      Effect.tapCause(() => Effect.sync(() => console.error(report(seed, world))))
    )
  }).pipe(Effect.scoped, Random.withSeed(seed), Effect.orDie)
}

const checkAll = Effect.fnUntraced(function* (world: World) {
  const findings = yield* History.check(world.sql, world.sink)
  if (findings.length > 0) {
    const lines = findings.slice(0, 20).map(({ about, promise }) => `  ${promise}: ${about}`)
    return yield* Effect.die(new Error(`${findings.length} broken promises\n${lines.join("\n")}`))
  }
  yield* world.until("no worker's session or advisory lock is left", () =>
    Effect.map(
      world.sql<{ readonly left: number }>`
        SELECT (SELECT count(*) FROM pg_stat_activity a
                 WHERE a.datname = current_database() AND a.application_name LIKE 'tenure %'
                   AND a.application_name <> 'tenure test')::int
             + (SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database
                 WHERE d.datname = current_database() AND l.locktype = 'advisory')::int AS left`,
      ([row]) => row?.left === 0
    )
  )
  const told = world.workers
    .flatMap((worker) => worker.output())
    .find((line) => line.includes(world.secret))
  if (told !== undefined)
    return yield* Effect.die(new Error(`a payload was written to a log: ${told}`))
})

/** Where the items are, who holds a lease, and what the sessions do. */
const stateOf = (world: World) =>
  Effect.map(
    Effect.forEach(
      [
        `SELECT (SELECT count(*)::int FROM tenure.ready) AS ready, (SELECT count(*)::int FROM tenure.claimed) AS claimed,
                (SELECT count(*)::int FROM tenure.delayed) AS delayed, (SELECT count(*)::int FROM tenure.parked) AS parked, (SELECT count(*)::int FROM tenure.done) AS done`,
        "SELECT id, state, (expires_at - clock_timestamp())::text AS rest FROM tenure.executor ORDER BY registered_at",
        `SELECT id, lane_id, owner, attempt, losses, failures, (clock_timestamp() - claimed_at)::text AS since
           FROM tenure.claimed LIMIT 20`,
        `SELECT r.id, r.lane_id, r.attempt, r.losses, r.failures, r.rank, r.seq::text AS seq
           FROM tenure.ready r LIMIT 20`,
        `SELECT pid, application_name AS name, state, wait_event_type AS type, wait_event AS wait,
                (clock_timestamp() - state_change)::text AS since, left(regexp_replace(query, '\\s+', ' ', 'g'), 80) AS query
           FROM pg_stat_activity WHERE datname = current_database() ORDER BY application_name`
      ],
      (statement) => world.sql.unsafe(statement)
    ),
    (answers) => ["--- state", ...answers.flat().map((row) => JSON.stringify(row))].join("\n")
  )

const linesMax = 200

const report = (seed: string, world: World): string =>
  [
    `--- seed: TENURE_SEED=${seed}, database ${world.server.superuser.database}`,
    ...world.workers.flatMap((worker) => [
      `--- ${worker.name} (${worker.pid})`,
      ...worker.output().slice(-linesMax)
    ]),
    ...world.proxies.flatMap((proxy, index) => [`--- proxy ${index + 1}`, ...proxy.transcript]),
    `--- sink: ${world.sink.arrivals().length} arrivals`,
    ...world.sink
      .arrivals()
      .slice(-20)
      .map((arrival) => JSON.stringify({ ...arrival, atNanos: String(arrival.atNanos) })),
    "--- server",
    tailOf(world.server.log)
  ].join("\n")

const tailOf = (log: string | undefined): string => {
  if (log === undefined || !existsSync(log)) return "(its log is not here)"
  return readFileSync(log, "utf8").trimEnd().split("\n").slice(-60).join("\n")
}
