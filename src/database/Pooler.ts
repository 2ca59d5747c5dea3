/**
 * Whether two connections have sessions of their own, or something between us and the server lends its
 * sessions to whoever asks next, as a pooler in transaction mode does. Then nothing of a session can be
 * relied on: its identity, what it listens to, its locks, its named statements.
 *
 * Asked in turn and one after the other: a pooler at rest answers both from the session it used last,
 * and one that takes turns answers one of them from several.
 */
import { PgClient } from "@effect/sql-pg"
import { Effect } from "effect"
import * as Reactivity from "effect/reactivity/Reactivity"
import type { SqlClient } from "effect/sql"
import type { SqlError } from "effect/sql/SqlError"

const turns = 3

export const sharesSessions = (
  one: SqlClient.SqlClient,
  other: SqlClient.SqlClient
): Effect.Effect<boolean, SqlError> =>
  Effect.gen(function* () {
    const ones = new Set<number>()
    const others = new Set<number>()
    for (let turn = 0; turn < turns; turn++) {
      ones.add(yield* backendPid(one))
      others.add(yield* backendPid(other))
    }
    return ones.size > 1 || others.size > 1 || [...ones].some((pid) => others.has(pid))
  })

const backendPid = (sql: SqlClient.SqlClient) =>
  Effect.map(
    sql<{ readonly pid: number }>`SELECT pg_backend_pid() AS pid`.unprepared,
    ([row]) => row?.pid ?? 0
  )

/**
 * Whether the server knows statements by the names that our driver gave them. A pooler that lends its
 * sessions has to name them anew; with these names a statement meets sessions that have never heard of
 * it, and inside a transaction that ends the transaction.
 */
export const passesStatementNames = (sql: SqlClient.SqlClient): Effect.Effect<boolean, SqlError> =>
  Effect.map(
    sql<{ readonly passed: boolean }>`
      SELECT EXISTS (SELECT FROM pg_prepared_statements WHERE name LIKE 'effect\\_%') AS passed`,
    ([row]) => row?.passed === true
  )

/** Of a pool that somebody else has made: asked over connections like its own. */
export const inspect = (
  config: PgClient.PgClientConfig
): Effect.Effect<{ readonly lends: boolean; readonly breaksPrepared: boolean }, SqlError> =>
  Effect.gen(function* () {
    const open = PgClient.makeClient(config)
    const one = yield* open
    const lends = yield* sharesSessions(one, yield* open)
    const prepares = config.prepare !== false
    return { lends, breaksPrepared: lends && prepares && (yield* passesStatementNames(one)) }
  }).pipe(Effect.scoped, Effect.provideServiceEffect(Reactivity.Reactivity, Reactivity.make))
