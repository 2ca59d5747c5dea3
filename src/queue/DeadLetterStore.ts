/** All SQL of dead letters. No policy: what is taken, brought back or purged is decided by the callers. */
import { PgTypes } from "@effect/sql-pg"
import { Effect } from "effect"
import type { SqlClient } from "effect/sql"

/** Which dead letters; null is no condition. Instants are the database's own texts, with their microseconds. */
export interface Filter {
  readonly queue: string
  readonly reason: string | null
  readonly failedAfter: string | null
  readonly failedBefore: string | null
  readonly errorContains: string | null
}

/** So many milliseconds before now by the database's clock, in a form that loses nothing. */
export const instantAgo = (sql: SqlClient.SqlClient, millis: number) =>
  Effect.map(
    sql<{ readonly at: string }>`
      SELECT to_char((tenure.clock() - make_interval(secs => ${PgTypes.float8(millis / 1000)})) AT TIME ZONE 'UTC',
                     'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') AS at`,
    ([row]) => row?.at ?? ""
  )

const conditions = (sql: SqlClient.SqlClient, filter: Filter) => sql`
  ${filter.queue}, ${PgTypes.text(filter.reason)}, ${PgTypes.text(filter.failedAfter)}::timestamptz,
  ${PgTypes.text(filter.failedBefore)}::timestamptz, ${PgTypes.text(filter.errorContains)}`

export const queuesWithDeadLetters = (sql: SqlClient.SqlClient) =>
  Effect.map(
    sql<{ readonly queue: string }>`SELECT queue FROM tenure.dead_letter_queues()`,
    (rows) => rows.map(({ queue }) => queue)
  )

export interface DeadLetterRow {
  readonly id: string
  readonly reason: string
  readonly error: unknown
  /** Null unless it was asked for. */
  readonly payload: unknown
  readonly key: string | null
  readonly attempt: number
  readonly failures: number
  readonly losses: number
  readonly enqueued_at: Date
  readonly failed_at: Date
}

export interface ListedRow extends DeadLetterRow {
  readonly quarantine: "open" | "settled" | null
  readonly holder: string | null
  readonly held_until: Date | null
}

/** The next ones after an id, and where the page after that begins; null at the end. */
export const listDeadLetters = (
  sql: SqlClient.SqlClient,
  page: {
    readonly filter: Filter
    readonly after: string | null
    readonly lookedMax: number
    readonly withPayload: boolean
  }
) =>
  Effect.map(
    sql<ListedRow & { readonly cursor_id: string | null }>`
      SELECT id, reason, error, payload, key, attempt, failures, losses, enqueued_at, failed_at, quarantine,
             holder, held_until, cursor_id
        FROM tenure.dead_letters(
          ${conditions(sql, page.filter)}, ${PgTypes.uuid(page.after)}, ${PgTypes.int4(page.lookedMax)},
          ${PgTypes.bool(page.withPayload)})`,
    (rows) => ({
      rows: rows.filter((row) => row.cursor_id === null) as ReadonlyArray<ListedRow>,
      next: rows.at(-1)?.cursor_id ?? null
    })
  )

export interface TakenRow extends DeadLetterRow {
  readonly lease: string
}

export const takeDeadLetters = (
  sql: SqlClient.SqlClient,
  take: {
    readonly filter: Filter
    readonly visibilityMillis: number
    readonly takenMax: number
    readonly holder: string | null
  }
) => sql<TakenRow>`
  SELECT id, lease, reason, error, payload, key, attempt, failures, losses, enqueued_at, failed_at
    FROM tenure.take_dead_letters(
      ${conditions(sql, take.filter)},
      make_interval(secs => ${PgTypes.float8(take.visibilityMillis / 1000)}), ${PgTypes.int4(take.takenMax)},
      ${PgTypes.text(take.holder)})`

/** False: it is not in the caller's hands any more. */
export const releaseDeadLetter = (sql: SqlClient.SqlClient, id: string, lease: string) =>
  Effect.map(
    sql<{ readonly released: boolean }>`
      SELECT tenure.release_dead_letter(${PgTypes.uuid(id)}, ${PgTypes.uuid(lease)}) AS released`,
    ([row]) => row?.released ?? false
  )

/** `available`, `stale`, `busy` while it is being settled, `unknown`, or the state that forbids it. */
export const reinjectDeadLetter = (sql: SqlClient.SqlClient, id: string, lease: string) =>
  Effect.map(
    sql<{ readonly answer: string }>`
      SELECT tenure.reinject_dead_letter(${PgTypes.uuid(id)}, ${PgTypes.uuid(lease)}) AS answer`,
    ([row]) => row?.answer ?? "unknown"
  )

/** `purged`, `stale`, `quarantined` or `unknown`. */
export const discardDeadLetter = (sql: SqlClient.SqlClient, id: string, lease: string) =>
  Effect.map(
    sql<{ readonly answer: string }>`
      SELECT tenure.discard_dead_letter(${PgTypes.uuid(id)}, ${PgTypes.uuid(lease)}) AS answer`,
    ([row]) => row?.answer ?? "unknown"
  )

export interface Step {
  readonly filter: Filter
  readonly after: string | null
  readonly lookedMax: number
}

/** What a step of a walk has done, and where the next one begins; null at the end. */
export interface Walked {
  readonly processed: number
  /** Of them brought back, or purged. */
  readonly changed: number
  readonly next: string | null
}

const ended: Walked = { processed: 0, changed: 0, next: null }

export const redriveDeadLetters = (sql: SqlClient.SqlClient, { after, filter, lookedMax }: Step) =>
  Effect.map(
    sql<Walked>`
      SELECT processed, reinjected AS changed, next_id AS next
        FROM tenure.redrive_dead_letters(
          ${conditions(sql, filter)}, ${PgTypes.uuid(after)}, ${PgTypes.int4(lookedMax)})`,
    ([row]) => row ?? ended
  )

export const purgeDeadLetters = (sql: SqlClient.SqlClient, { after, filter, lookedMax }: Step) =>
  Effect.map(
    sql<Walked>`
      SELECT processed, purged AS changed, next_id AS next
        FROM tenure.purge_dead_letters(
          ${conditions(sql, filter)}, ${PgTypes.uuid(after)}, ${PgTypes.int4(lookedMax)})`,
    ([row]) => row ?? ended
  )
