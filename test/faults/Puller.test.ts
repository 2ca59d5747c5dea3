/**
 * Goal: a pull worker that is killed with all that served it loses nothing: its slot comes back through
 * its own clock, once, and another worker goes on under a higher number (row 43 in part;
 * C1, C3, C4; I-001 to I-003, I-016 to I-025, I-060, I-064 to I-066).
 * Method: two processes, each an executor that serves a session of its own; SIGKILL for one.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect } from "effect"
import { fileURLToPath } from "node:url"
import * as Child from "../main/Child.ts"
import { connect, freshDatabase } from "../support/Postgres.ts"
import type { Orders } from "./support/puller-main.ts"

const main = fileURLToPath(new URL("support/puller-main.ts", import.meta.url))

const queue = "pulled"

describe("a pull worker", () => {
  it.live(
    "that is killed is followed by another one, which has the slot and a higher number",
    () =>
      Effect.gen(function* () {
        const database = yield* freshDatabase
        const sql = yield* connect(database.superuser)
        const start = (holds: boolean) => {
          const orders: Orders = { url: database.urlOf("worker"), queue, holds }
          return Child.start([main, JSON.stringify(orders)])
        }
        // One slot in all: nobody goes on before the dead one's is free.
        yield* sql`INSERT INTO tenure.queue (name, application_name, global_limit) VALUES (${queue}, 'faults', 1)`
        const victim = yield* start(true)
        const session = yield* victim.line("> session ")
        const [row] = yield* sql<{ id: string }>`
          SELECT tenure.enqueue(${queue}, '{}', '{"idempotencyKey": "once"}')::text AS id`
        const id = row?.id ?? ""
        yield* victim.line(`> active ${id} 1`)
        const survivor = yield* start(false)
        yield* survivor.line("> session ")
        yield* victim.kill("SIGKILL")
        yield* survivor.line(`> settled ${id} 2`)

        const events = yield* sql<{
          event: string
          seq: number
          session: string | null
          in_time: boolean
        }>`
          SELECT e.event, (e.detail ->> 'executionSeq')::int AS seq, e.detail ->> 'session' AS session,
                 coalesce((e.detail ->> 'expiredAt')::timestamptz <= e.at, true) AS in_time
            FROM tenure.audit_event e WHERE e.item_id = ${id}::uuid ORDER BY e.id`
        assert.deepStrictEqual(events, [
          { event: "capacity.lease.expired", seq: 1, session, in_time: true },
          { event: "capacity.segment.recovered", seq: 2, session: null, in_time: true }
        ])
        assert.deepStrictEqual(
          yield* sql`SELECT outcome, attempt, losses FROM tenure.done WHERE id = ${id}::uuid`,
          [{ outcome: "completed", attempt: 2, losses: 1 }]
        )
        assert.deepStrictEqual(yield* sql`SELECT FROM tenure.capacity_lease`, [])
        assert.deepStrictEqual(
          yield* sql`SELECT FROM tenure.session WHERE id = ${session}::uuid`,
          []
        )
      }).pipe(Effect.scoped),
    180_000
  )
})
