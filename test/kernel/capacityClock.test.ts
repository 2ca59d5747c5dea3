/**
 * Goal: a dead holder's slot comes back exactly once, within its stated bound and not before, and a
 * living one's never (C3; I-002, I-011..I-024, I-049..I-054).
 * Method: workers that die at random times against the database's clock, which is shifted and not waited
 * for: heartbeats every 30 s until the death, each in its own rhythm, and sweeps every 30 s by changing
 * executors. TENURE_SEED repeats the times.
 */
import { assert, layer } from "@effect/vitest"
import { Effect } from "effect"
import { randomInt } from "node:crypto"
import * as Store from "../../src/capacity/CapacityStore.ts"
import { seeded } from "../model/Seeded.ts"
import * as C from "./capacity.ts"
import * as K from "./kernel.ts"

// It stands still between the steps, so that what is expected is exact. A sequence, because time passes
// for every snapshot at once.
const shiftable = [
  "CREATE SCHEMA app",
  "CREATE SEQUENCE app.shift MINVALUE 0 START 0",
  "SELECT setval('app.shift', 0)",
  "GRANT USAGE ON SCHEMA app TO PUBLIC",
  "GRANT SELECT ON app.shift TO PUBLIC",
  `DO $do$ BEGIN EXECUTE format($f$
     CREATE OR REPLACE FUNCTION tenure.clock() RETURNS timestamptz LANGUAGE sql VOLATILE PARALLEL SAFE AS $$
       SELECT %L::timestamptz + (SELECT last_value FROM app.shift) * interval '1 s' $$ $f$, clock_timestamp());
   END $do$`
]

const heartbeatSeconds = 30
const scanSeconds = 30

interface Worker {
  readonly item: string
  readonly session: string
  /** Never, for a living one. */
  readonly death: number
  readonly phase: number
  readonly isReserved: boolean
  lastHeartbeat: number
  freed: number | undefined
}

layer(K.Kernel.layer, { excludeTestServices: true })("the clock of a dead holder", (it) => {
  it.effect(
    "runs out 60 to 90 seconds after its death, is seen within 30 more, and once",
    () =>
      Effect.gen(function* () {
        const seed = Number(process.env["TENURE_SEED"] ?? randomInt(2 ** 31))
        const random = seeded(seed)
        const api = yield* K.session("api")
        const owner = yield* K.session("owner")
        for (const statement of shiftable) yield* owner.unsafe(statement)
        const options = { queue: "clock", validity: "10 days" } as const
        const node = yield* K.executor(options)
        const other = yield* K.executor(options)
        const total = 14
        yield* K.enqueueMany(api, "clock", total)
        const workers: Array<Worker> = []
        for (let at = 0; at < total; at++) {
          const isReserved = at % 5 === 4
          const session = yield* C.open(node, { queues: ["clock"], slots: 1 })
          const { executionSeq, id } = C.one((yield* Store.pull(node.sql, session, 1)).items)
          if (!isReserved) yield* Store.activate(node.sql, session, id, executionSeq)
          workers.push({
            item: id,
            session,
            death: at % 4 === 0 && !isReserved ? Infinity : random.int(200),
            phase: random.int(heartbeatSeconds),
            isReserved,
            lastHeartbeat: 0,
            freed: undefined
          })
        }
        const held = Effect.map(
          owner<{ id: string }>`SELECT item_id::text AS id FROM tenure.capacity_lease`,
          (rows) => new Set(rows.map(({ id }) => id))
        )
        let taken = 0
        for (let at = 1; at <= 390; at++) {
          const sweeps = at % scanSeconds === 7
          const beats = workers.filter(
            ({ death, phase }) => at <= death && at % heartbeatSeconds === phase
          )
          if (!sweeps && beats.length === 0) continue
          yield* owner`SELECT setval('app.shift', ${at}::int)`
          for (const worker of beats) {
            assert.isFalse((yield* Store.heartbeat(node.sql, worker.session)).gone)
            worker.lastHeartbeat = at
          }
          if (!sweeps) continue
          const swept = yield* C.sweep(random.chance(0.5) ? node : other, C.graceMillis)
          taken += swept.leases + swept.reservations
          const living = yield* held
          for (const worker of workers) {
            if (!living.has(worker.item)) worker.freed ??= at
          }
        }

        for (const { death, freed, isReserved, item, lastHeartbeat } of workers) {
          const about = `TENURE_SEED=${seed}, death ${death}, last heartbeat ${lastHeartbeat}`
          if (death === Infinity) {
            assert.isUndefined(freed, about)
            assert.strictEqual(yield* K.placeOf(owner, item), "leased")
            continue
          }
          // A reservation is kept by no heartbeat.
          const expires = isReserved ? 30 : lastHeartbeat + 90
          assert.isAtLeast(freed ?? 0, expires, about)
          assert.isAtMost(freed ?? Infinity, expires + scanSeconds - 1, about)
          assert.strictEqual(yield* K.placeOf(owner, item), isReserved ? "ready" : "delayed")
          assert.deepStrictEqual(
            (yield* C.events(owner, item)).map(({ event }) => event),
            isReserved ? [] : ["capacity.lease.expired", "capacity.segment.recovered"]
          )
        }
        const dying = workers.filter(({ death }) => death !== Infinity)
        assert.strictEqual(taken, dying.length, "each once")
        assert.deepStrictEqual(
          yield* owner`SELECT DISTINCT extract(epoch FROM d.due_at - e.at)::int AS grace FROM tenure.delayed d
                         JOIN tenure.audit_event e ON e.item_id = d.id`,
          [{ grace: C.graceMillis / 1000 }]
        )
        assert.strictEqual(
          (yield* Store.sessions(owner, 100)).length,
          total - dying.length,
          "and their sessions are gone"
        )

        // Somebody goes on with each, under a higher number.
        yield* owner`SELECT setval('app.shift', 500)`
        yield* owner`SELECT promoted FROM tenure.promote(100)`
        const next = yield* C.open(node, { queues: ["clock"], slots: total })
        const resumed: Array<string> = []
        for (let turn = 0; turn < total; turn++) {
          for (const { executionSeq, id } of yield* C.start(node, next, total)) {
            assert.strictEqual(executionSeq, 2)
            yield* Store.complete(node.sql, next, id, executionSeq, null)
            resumed.push(id)
          }
        }
        assert.deepStrictEqual(resumed.toSorted(), dying.map(({ item }) => item).toSorted())
      }),
    120_000
  )
})
