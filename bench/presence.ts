/**
 * Claim: the ring of presence sees a process end within a quarter of a second, for four statements a
 * second of each executor and without holding the horizon back.
 *
 * Beside it the other way to watch: a session of its own for each executor, which waits in the
 * database for its neighbour's lock, five seconds at a time. It sees an end at once, and pays with a
 * snapshot that is never younger than that wait: VACUUM keeps every row that died in it.
 *
 * The processes are sockets here: one holds an executor's lock, and is destroyed.
 */
import { PgClient } from "@effect/sql-pg"
import { Clock, Effect, Exit, Fiber, Random, Scope } from "effect"
import * as Reactivity from "effect/reactivity/Reactivity"
import { randomUUID } from "node:crypto"
import { watchPresence } from "../src/executor/PresenceStore.ts"
import { quantile, type Report } from "./Report.ts"
import { type Bench, execute, type Server } from "./Server.ts"
import * as WireClient from "./WireClient.ts"

const waitMillis = 5000

const statements = [
  // Caught inside, so that a wait that ends for nothing is an answer and no error in the server's log.
  `CREATE FUNCTION wait_for(place int) RETURNS boolean LANGUAGE plpgsql AS $$
   BEGIN
     PERFORM set_config('lock_timeout', '${waitMillis}ms', true);
     PERFORM pg_advisory_xact_lock_shared(1413828182, place);
     RETURN true;
   EXCEPTION WHEN lock_not_available THEN RETURN false;
   END $$`
]

interface Member {
  readonly id: string
  readonly key: number
}

type Watcher = (
  sql: PgClient.PgClient,
  own: Member,
  next: Member,
  size: number
) => Effect.Effect<ReadonlyArray<string>>

const poll: Watcher = (sql, own, _, size) =>
  Effect.gen(function* () {
    yield* Effect.sleep(Math.max(250, size * 2.5))
    const row = yield* watchPresence(sql, own.id, {
      versions: ["v1"],
      everyone: false,
      followed: []
    })
    return row?.missing ?? []
  }).pipe(Effect.orDie)

const wait: Watcher = (sql, _, next) =>
  Effect.gen(function* () {
    const [row] = yield* sql<{ gone: boolean }>`SELECT wait_for(${next.key}::int) AS gone`
    return row?.gone === true ? [next.id] : []
  }).pipe(Effect.orDie)

export const run = Effect.fnUntraced(function* (
  server: Server,
  report: Report
): Effect.fn.Return<void, never, Scope.Scope> {
  report.row({
    workload: "calibration",
    system: "postgres",
    metric: "updates_per_s",
    value: yield* server.calibrate
  })
  for (const size of [2, 20]) {
    for (const [system, watcher] of [
      ["poll", poll],
      ["wait", wait]
    ] as const) {
      const bench = yield* server.database("presence")
      yield* bench.migrate
      yield* Effect.scoped(measure(server, bench, report, { size, system, watcher }))
    }
  }
})

const measure = Effect.fnUntraced(function* (
  server: Server,
  bench: Bench,
  report: Report,
  options: { readonly size: number; readonly system: string; readonly watcher: Watcher }
) {
  const { size, system, watcher } = options
  const clock = yield* Clock.Clock
  const sql = yield* bench.connect
  yield* execute(sql, statements)
  const register = Effect.gen(function* () {
    const id = randomUUID()
    yield* sql`SELECT tenure.register_executor(${id}::uuid, 'bench', 'v1', interval '1 hour', 'bench', 0)`
    const scope = yield* holder(bench, id)
    const [row] = yield* sql<{ key: number }>`
      SELECT key FROM tenure.presence WHERE executor_id = ${id}::uuid`
    return { id, key: row?.key ?? 0, scope }
  }).pipe(Effect.orDie)
  const members = yield* Effect.replicateEffect(register, size)
  const scopes = members.map((member) => member.scope)
  yield* Effect.addFinalizer(() =>
    Effect.forEach(scopes, (scope) => Scope.close(scope, Exit.void), { discard: true })
  )
  // As after ten seconds: nobody is passed over as a newcomer.
  yield* execute(sql, ["UPDATE tenure.presence SET held_at = held_at - interval '20 s'"])

  let asked = 0
  const seen = new Map<string, bigint>()
  const watching = yield* Effect.forEach(members, (own, index) =>
    Effect.gen(function* () {
      const session = yield* PgClient.makeClient({ ...bench.endpoint.config }).pipe(
        Effect.provideServiceEffect(Reactivity.Reactivity, Reactivity.make),
        Effect.orDie
      )
      const next = members[(index + 1) % size] ?? own
      return yield* Effect.forkScoped(
        Effect.andThen(
          Effect.sleep(250 * (yield* Random.next)),
          Effect.forever(
            Effect.map(watcher(session, own, next, size), (missing) => {
              asked++
              for (const id of missing) {
                if (!seen.has(id)) seen.set(id, clock.monotonicTimeNanosUnsafe())
              }
            })
          )
        )
      )
    })
  )
  yield* Effect.sleep(1000)

  const row = (metric: string, value: number | undefined) =>
    report.row({ workload: `${size} executors`, system, metric, value })
  const idleMillis = report.quick ? 5_000 : 20_000
  const [askedBefore, cpuBefore] = [asked, server.cpuSeconds()]
  const horizons: Array<number> = []
  const endNanos = clock.monotonicTimeNanosUnsafe() + BigInt(idleMillis) * 1_000_000n
  while (clock.monotonicTimeNanosUnsafe() < endNanos) {
    yield* Effect.sleep(50)
    const [oldest] = yield* Effect.orDie(sql<{ millis: number }>`
      SELECT coalesce(max(extract(epoch FROM clock_timestamp() - xact_start)) * 1000, 0)::float8 AS millis
        FROM pg_stat_activity
       WHERE datname = current_database() AND backend_xmin IS NOT NULL AND pid <> pg_backend_pid()`)
    horizons.push(oldest?.millis ?? 0)
  }
  const cpuAfter = server.cpuSeconds()
  row("statements_per_s", ((asked - askedBefore) * 1000) / idleMillis)
  row("horizon_lag_p50_ms", quantile(horizons, 0.5))
  row("horizon_lag_max_ms", quantile(horizons, 1))
  row(
    "server_cpu_percent",
    cpuBefore === undefined || cpuAfter === undefined
      ? undefined
      : ((cpuAfter - cpuBefore) * 100_000) / idleMillis
  )

  const detections: Array<number> = []
  for (let round = 0; round < (report.quick ? 10 : 40); round++) {
    const index = round % size
    const member = members[index]
    if (member === undefined) break
    // At no particular moment of the watch.
    yield* Effect.sleep(300 * (yield* Random.next))
    seen.clear()
    const diedNanos = clock.monotonicTimeNanosUnsafe()
    yield* Scope.close(scopes[index] ?? member.scope, Exit.void)
    while (!seen.has(member.id)) yield* Effect.sleep(1)
    detections.push(Number((seen.get(member.id) ?? diedNanos) - diedNanos) / 1e6)
    scopes[index] = yield* holder(bench, member.id)
    yield* execute(sql, ["UPDATE tenure.presence SET held_at = held_at - interval '20 s'"])
  }
  row("detection_p50_ms", quantile(detections, 0.5))
  row("detection_max_ms", quantile(detections, 1))
  yield* Effect.forEach(watching, (fiber) => Effect.sync(() => fiber.interruptUnsafe()))
  yield* execute(sql, [
    `SELECT pg_terminate_backend(pid) FROM pg_stat_activity
      WHERE datname = current_database() AND pid <> pg_backend_pid() AND wait_event = 'advisory'`
  ])
  yield* Effect.forEach(watching, Fiber.await, { discard: true })
})

/** The session of a process, which ends with the scope as a process does. Tries until it has the lock. */
const holder = Effect.fnUntraced(function* (bench: Bench, id: string) {
  const scope = yield* Scope.make()
  const client = yield* Scope.provide(
    WireClient.make(bench.endpoint, { "tenure.executor_id": id }),
    scope
  )
  const sql = yield* bench.connect
  while (true) {
    yield* client.send([yield* client.prepare(`SELECT tenure.hold_presence('${id}')`)])
    const [row] = yield* Effect.orDie(sql<{ held: boolean }>`
      SELECT EXISTS (SELECT FROM pg_locks l JOIN tenure.presence p ON p.key::oid = l.objid
        WHERE l.classid = 1413828182 AND l.pid = ${client.processId}::int AND l.granted
          AND p.executor_id = ${id}::uuid) AS held`)
    if (row?.held === true) return scope
    yield* Effect.sleep(5)
  }
})
