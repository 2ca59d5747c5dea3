/**
 * What a database was asked, by the server's own count: one line for each kind of statement that a
 * client has sent, without what functions do inside. The embedded server brings `pg_stat_statements`,
 * switched off until a benchmark wants it; another server may not have it.
 */
import { Effect, type Scope } from "effect"
import type { Bench } from "./Server.ts"

export interface Statement {
  /** On one line. */
  readonly text: string
  readonly calls: number
  /** Of all calls together. */
  readonly execMillis: number
  readonly blocks: number
  readonly walBytes: number
}

export interface Statements {
  readonly reset: Effect.Effect<void>
  /** The most frequent first, without transaction control. */
  readonly read: Effect.Effect<ReadonlyArray<Statement>>
  /** BEGIN, COMMIT and ROLLBACK. */
  readonly transactionControl: Effect.Effect<number>
}

/** Counts in the sessions that are opened from here on. `undefined` where the server cannot count. */
export const make = Effect.fnUntraced(function* (
  bench: Bench
): Effect.fn.Return<Statements | undefined, never, Scope.Scope> {
  const sql = yield* bench.connect
  const counting = Effect.forEach(
    [
      "CREATE EXTENSION IF NOT EXISTS pg_stat_statements",
      `ALTER DATABASE ${bench.endpoint.database} SET pg_stat_statements.track = 'top'`,
      // Fails where the library is not loaded.
      "SELECT FROM pg_stat_statements LIMIT 1"
    ],
    (statement) => sql.unsafe(statement),
    { discard: true }
  )
  if ((yield* Effect.result(counting))._tag === "Failure") return undefined
  const all = Effect.orDie(
    sql<Statement & { readonly isControl: boolean }>`
      SELECT btrim(regexp_replace(s.query, '\\s+', ' ', 'g')) AS "text",
             sum(s.calls)::int AS "calls",
             sum(s.total_exec_time)::float8 AS "execMillis",
             sum(s.shared_blks_hit + s.shared_blks_read)::float8 AS "blocks",
             sum(s.wal_bytes)::float8 AS "walBytes",
             bool_and(s.query ~* '^\\s*(begin|start transaction|commit|rollback|savepoint|release)') AS "isControl"
        FROM pg_stat_statements s
        JOIN pg_database d ON d.oid = s.dbid
       WHERE d.datname = current_database() AND s.query !~ 'pg_stat_statements'
       GROUP BY 1 ORDER BY 2 DESC, 1`
  )
  return {
    reset: Effect.orDie(
      Effect.asVoid(sql`
        SELECT pg_stat_statements_reset(0, d.oid, 0)::text FROM pg_database d
         WHERE d.datname = current_database()`)
    ),
    read: Effect.map(all, (rows) => rows.filter((row) => !row.isControl)),
    transactionControl: Effect.map(all, (rows) =>
      rows.reduce((sum, row) => sum + (row.isControl ? row.calls : 0), 0)
    )
  }
})
