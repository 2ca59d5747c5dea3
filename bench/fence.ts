/**
 * Claim: the fence costs a single-row transaction a fifth at most, and a batch nothing that shows.
 *
 * The same inserts run into two tables of one shape, one of them behind `tenure.fence_table`, on
 * sessions that carry the identity of a registered executor. The two take turns in short slices on
 * the same connections, so that a slow moment of the machine hits both. Tables are emptied between
 * the workloads.
 */
import type { PgClient } from "@effect/sql-pg"
import { Clock, Effect, type Scope } from "effect"
import { randomUUID } from "node:crypto"
import { type Report, summarize } from "./Report.ts"
import { type Bench, checkpoint, execute, type Server } from "./Server.ts"
import * as WireClient from "./WireClient.ts"

interface Workload {
  readonly name: string
  readonly clients: number
  readonly begins: boolean
  readonly statements: number
  readonly rows: number
}

const workloads: ReadonlyArray<Workload> = [1, 8].flatMap((clients) => {
  const suffix = clients === 1 ? "1client" : `${clients}clients`
  return [
    { name: `1row-${suffix}`, clients, begins: false, statements: 1, rows: 1 },
    { name: `5rows-${suffix}`, clients, begins: true, statements: 5, rows: 1 },
    { name: `1000rows-${suffix}`, clients, begins: false, statements: 1, rows: 1000 }
  ]
})

const shape = `(
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  executor text,
  payload jsonb NOT NULL DEFAULT '{}'
)`

export const run = Effect.fnUntraced(function* (
  server: Server,
  report: Report
): Effect.fn.Return<void, never, Scope.Scope> {
  const bench = yield* server.database("fence")
  yield* bench.migrate
  const sql = yield* bench.connect
  yield* execute(sql, [
    `CREATE TABLE unfenced ${shape}`,
    `CREATE TABLE fenced ${shape}`,
    "SELECT tenure.fence_table('fenced')"
  ])
  const executorId = randomUUID()
  yield* execute(sql, [
    `SELECT tenure.register_executor('${executorId}', 'bench', 'v1', interval '1 hour', 'bench', 0)`
  ])
  let calibrated = 0
  for (const workload of workloads) {
    if (workload.clients !== calibrated) {
      calibrated = workload.clients
      report.row({
        workload: `calibration-${workload.clients}client${workload.clients === 1 ? "" : "s"}`,
        system: "postgres",
        metric: "updates_per_s",
        value: yield* server.calibrate
      })
    }
    yield* Effect.scoped(measure(bench, sql, executorId, workload, report))
  }
})

const measure = Effect.fnUntraced(function* (
  bench: Bench,
  sql: PgClient.PgClient,
  executorId: string,
  workload: Workload,
  report: Report
) {
  yield* execute(sql, ["TRUNCATE unfenced, fenced"])
  yield* checkpoint(sql)
  const clients = yield* Effect.replicateEffect(
    WireClient.make(bench.endpoint, { "tenure.executor_id": executorId }),
    workload.clients
  )
  const scripts = yield* Effect.forEach(clients, (client) =>
    Effect.all({
      unfenced: script(client, workload, "unfenced"),
      fenced: script(client, workload, "fenced")
    })
  )
  // A thousand rows take milliseconds, so a slice needs to be longer to hold enough of them.
  const sliceMillis = workload.rows > 1 ? 250 : 100
  const pairs = Math.round((report.quick ? 4_500 : 18_000) / (2 * sliceMillis))

  const rate = (table: "unfenced" | "fenced", millis: number) =>
    Effect.gen(function* () {
      const clock = yield* Clock.Clock
      const begun = clock.monotonicTimeNanosUnsafe()
      const until = begun + BigInt(millis) * 1_000_000n
      const counts = yield* Effect.forEach(
        clients,
        (client, at) => client.repeat(scripts[at]?.[table] ?? [], until),
        { concurrency: "unbounded" }
      )
      const seconds = Number(clock.monotonicTimeNanosUnsafe() - begun) / 1e9
      return counts.reduce((sum, count) => sum + count, 0) / seconds
    })

  yield* rate("unfenced", 200)
  yield* rate("fenced", 200)
  const unfenced: Array<number> = []
  const fenced: Array<number> = []
  for (let pair = 0; pair < pairs; pair++) {
    // Each goes first in every other pair: whoever follows finds the caches as the other left them.
    if (pair % 2 === 0) unfenced.push(yield* rate("unfenced", sliceMillis))
    fenced.push(yield* rate("fenced", sliceMillis))
    if (pair % 2 === 1) unfenced.push(yield* rate("unfenced", sliceMillis))
  }
  const ratio = summarize(fenced.map((value, at) => value / (unfenced[at] ?? Number.NaN)))
  for (const [system, rates] of [
    ["tenure", fenced],
    ["unfenced", unfenced]
  ] as const) {
    const { median, spread } = summarize(rates)
    report.row({
      workload: workload.name,
      system,
      metric: "transactions_per_s",
      value: median,
      spread,
      ratio
    })
  }
})

const script = Effect.fnUntraced(function* (
  client: WireClient.WireClient,
  workload: Workload,
  table: string
) {
  const source =
    workload.rows === 1 ? "VALUES ('e')" : `SELECT 'e' FROM generate_series(1, ${workload.rows})`
  const insert = yield* client.prepare(`INSERT INTO ${table} (executor) ${source}`)
  const inserts = Array.from({ length: workload.statements }, () => insert)
  if (!workload.begins) return inserts
  return [yield* client.prepare("BEGIN"), ...inserts, yield* client.prepare("COMMIT")]
})
