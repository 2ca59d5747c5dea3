/**
 * All SQL of the ring of presence. No policy: whom to ask about and what an answer means is decided
 * in PresenceWatch. Instants travel as microseconds, which a double holds exactly; a millisecond would
 * make a renewal and the look after it the same instant.
 */
import { type PgConnection, PgTypes } from "@effect/sql-pg"
import { Effect } from "effect"
import type { SqlClient } from "effect/sql"
import type { SqlError } from "effect/sql/SqlError"
import { uuids, texts } from "../database/Parameters.ts"
import type { Answer } from "./PresenceWatch.ts"

/** On the session that is to hold the lock. Since when it does, or `undefined` when another one has it. */
export const holdPresence = (
  session: PgConnection.PgConnection,
  executorId: string
): Effect.Effect<number | undefined, SqlError> =>
  Effect.map(
    session.query(
      "SELECT (extract(epoch FROM tenure.hold_presence($1)) * 1000000)::float8 AS held_at",
      [PgTypes.uuid(executorId)]
    ),
    ({ rows }) => {
      const heldAtMicros = rows[0]?.["held_at"]
      return typeof heldAtMicros === "number" ? heldAtMicros : undefined
    }
  )

/** Without an instant whatever session it is. */
export const leavePresence = (
  sql: SqlClient.SqlClient,
  executorId: string,
  heldAtMicros: number | undefined
) => sql`
  SELECT tenure.leave_presence(
    ${PgTypes.uuid(executorId)},
    timestamptz 'epoch' + ${PgTypes.float8(heldAtMicros ?? null)} * interval '1 microsecond')`

export interface Watched {
  readonly at: number
  readonly held_at: number | null
  readonly renewed_at: number
  readonly is_round: boolean
  readonly present: ReadonlyArray<string>
  readonly missing: ReadonlyArray<string>
  readonly newcomers: ReadonlyArray<string>
}

export const watchPresence = (
  sql: SqlClient.SqlClient,
  watcher: string,
  options: {
    readonly versions: ReadonlyArray<string>
    readonly everyone: boolean
    readonly followed: ReadonlyArray<string>
  }
) =>
  Effect.map(
    sql<Watched>`
      SELECT (extract(epoch FROM w.seen_at) * 1000000)::float8 AS at,
             (extract(epoch FROM w.held_at) * 1000000)::float8 AS held_at,
             (extract(epoch FROM w.renewed_at) * 1000000)::float8 AS renewed_at,
             w.is_round, w.present::text[] AS present, w.missing::text[] AS missing,
             w.newcomers::text[] AS newcomers
        FROM tenure.watch_presence(
               ${PgTypes.uuid(watcher)}, ${texts(options.versions)},
               ${PgTypes.bool(options.everyone)}, ${uuids(options.followed)}) w`,
    ([row]) => row
  )

export const markAbsent = (
  sql: SqlClient.SqlClient,
  absent: {
    readonly id: string
    readonly watcher: string
    readonly sinceMicros: number
    readonly graceMillis: number
  }
) =>
  Effect.map(
    sql<{ readonly answer: Answer }>`
      SELECT tenure.mark_absent(
        ${PgTypes.uuid(absent.id)}, ${PgTypes.uuid(absent.watcher)},
        timestamptz 'epoch' + ${PgTypes.float8(absent.sinceMicros)} * interval '1 microsecond',
        make_interval(secs => ${PgTypes.float8(absent.graceMillis / 1000)})) AS answer`,
    ([row]): Answer => row?.answer ?? "unknown"
  )
