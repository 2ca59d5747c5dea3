/** All SQL of the probe. No policy: when to probe, and how long to wait, is decided by the actor. */
import { Effect } from "effect"
import type { SqlClient } from "effect/sql"

/** The number of this executor's private queue, which is that of its only lane as well. */
export const registerProbe = (sql: SqlClient.SqlClient) =>
  Effect.map(
    sql<{ readonly queue: number }>`SELECT tenure.register_probe() AS queue`,
    ([row]) => row?.queue ?? 0
  )

/** The item that is outstanding now: at most one, however often this is asked. */
export const beginProbe = (sql: SqlClient.SqlClient) =>
  Effect.asVoid(sql`SELECT tenure.begin_probe()`)

/** Its outcome, and nothing of it is left then; null while it has none. */
export const endProbe = (sql: SqlClient.SqlClient) =>
  Effect.map(
    sql<{ readonly outcome: string | null }>`SELECT tenure.end_probe() AS outcome`,
    ([row]) => row?.outcome ?? null
  )
