/** What the tests of pull sessions share: sessions opened through an executor, and their rows. */
import { Effect } from "effect"
import type { SqlError } from "effect/sql/SqlError"
import * as Store from "../../src/capacity/CapacityStore.ts"
import * as K from "./kernel.ts"

/** The intervals of the `capacity` profile. */
export const clocks: Store.Clocks = {
  heartbeatMillis: 30_000,
  leaseMillis: 90_000,
  reservationMillis: 30_000
}

/** Whoever serves a session: an executor's own. */
export type Node = Pick<K.Executor, "sql">

export const graceMillis = 30_000

export const open = (
  node: Node,
  options: Partial<Omit<Store.NewSession, "queues">> & { readonly queues: ReadonlyArray<string> }
): Effect.Effect<string, SqlError> =>
  Effect.map(
    Store.openSession(node.sql, { worker: "worker", slots: 10, clocks, ...options }),
    ({ session }) => session
  )

export const sweep = (node: Node, grace = 0) =>
  Store.sweep(node.sql, {
    application: "app",
    backoffMillis: 0,
    graceMillis: grace,
    cancelGraceMillis: clocks.leaseMillis,
    rowsMax: 100
  })

/** Pulls and activates: what the worker executes now. */
export const start = Effect.fnUntraced(function* (
  node: Node,
  session: string,
  wanted = 1
): Effect.fn.Return<ReadonlyArray<Store.PulledItem>, SqlError> {
  const { items } = yield* Store.pull(node.sql, session, wanted)
  for (const { executionSeq, id } of items) {
    yield* Store.activate(node.sql, session, id, executionSeq)
  }
  return items
})

/** The clocks of a session's leases, or its own as well, have run out. */
export const expire = Effect.fnUntraced(function* (
  owner: K.Sql,
  session: string,
  what: "leases" | "session" | "both" = "both"
): Effect.fn.Return<void, SqlError> {
  if (what !== "session") {
    yield* owner`UPDATE tenure.capacity_lease SET expires_at = tenure.clock() WHERE session = ${session}::uuid`
  }
  if (what !== "leases") {
    yield* owner`UPDATE tenure.session SET expires_at = tenure.clock() WHERE id = ${session}::uuid`
  }
})

export const one = (items: ReadonlyArray<Store.PulledItem>): Store.PulledItem => K.first(items)

export const events = (owner: K.Sql, id: string) =>
  Effect.map(
    owner<{ readonly event: string; readonly detail: Readonly<Record<string, unknown>> }>`
      SELECT event, detail FROM tenure.audit_event WHERE item_id = ${id}::uuid ORDER BY audit_event.id`,
    (rows) => rows.map(({ detail, event }) => ({ event, seq: detail["executionSeq"] }))
  )

/** Asks until it is so; ten seconds are enough for anything here. */
export const eventually = (what: string, sql: K.Sql, question: string) =>
  K.eventually(
    what,
    Effect.map(sql.unsafe<{ ok: boolean }>(question), (rows) => K.first(rows).ok)
  )
