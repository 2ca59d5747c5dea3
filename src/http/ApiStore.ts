/** What the API asks beside what queues and capacity have, as one function for each statement. */
import { PgTypes } from "@effect/sql-pg"
import { Effect } from "effect"
import type { SqlClient } from "effect/sql"

/** The table an item is in, all of them seen at one moment. Nothing for an unknown one. */
export const placeOf = (sql: SqlClient.SqlClient, id: string) =>
  Effect.map(
    sql<{ readonly place: string }>`SELECT place FROM tenure.item_place(${PgTypes.uuid(id)})`,
    ([row]): string | undefined => row?.place
  )

/** The queues that a session offers slots to, and whether it has one. */
export const offerOf = (sql: SqlClient.SqlClient, session: string) =>
  Effect.map(
    sql<{ readonly queue_ids: ReadonlyArray<number>; readonly is_full: boolean }>`
      SELECT ARRAY(SELECT c.queue_id FROM tenure.session_credit c WHERE c.session = s.id) AS queue_ids,
             s.slots <= (SELECT count(*) FROM tenure.capacity_lease l WHERE l.session = s.id) AS is_full
        FROM tenure.session s WHERE s.id = ${PgTypes.uuid(session)}`,
    ([row]) => row
  )
