/**
 * Goal: an executor has one probe outstanding at most, and none leaves a row behind: not when it ends,
 * not in ten thousand turns, and not when its executor is lost or goes (K-034, K-056, K-071..K-074,
 * K-237).
 * Method: probes go through the functions that business goes through; what is left is looked for in
 * every table that the catalog has.
 */
import { assert, describe, it, layer } from "@effect/vitest"
import { Effect, Fiber } from "effect"
import { listExecutors, listStuckWork } from "../../src/executor/ExecutorStore.ts"
import { freshDatabase } from "../support/Postgres.ts"
import * as K from "./kernel.ts"

const begin = (sql: K.Sql) =>
  Effect.map(
    sql<{ id: string }>`SELECT tenure.begin_probe()::text AS id`,
    (rows) => K.first(rows).id
  )

const end = (sql: K.Sql) =>
  Effect.map(
    sql<{ outcome: string | null }>`SELECT tenure.end_probe() AS outcome`,
    (rows) => K.first(rows).outcome
  )

const of = (item: K.Claimed | undefined) => {
  if (item === undefined) throw new Error("nothing was claimed")
  return { id: item.id, attempt: item.attempt }
}

/** Without the audit, in which a revocation and a cancellation stay. */
const tables = (owner: K.Sql) =>
  owner<{ name: string }>`
    SELECT c.oid::regclass::text AS name FROM pg_class c
     WHERE c.relnamespace = 'tenure'::regnamespace AND c.relkind IN ('r', 'p') AND NOT c.relispartition
       AND c.relname <> 'audit_event'`

/** The tables with a row that names it. */
const traces = Effect.fnUntraced(function* (owner: K.Sql, text: string) {
  const found: Array<string> = []
  for (const { name } of yield* tables(owner)) {
    const rows = yield* owner.unsafe(`SELECT FROM ${name} t WHERE strpos(t::text, '${text}') > 0`)
    if (rows.length > 0) found.push(name)
  }
  return found
})

const rowCounts = Effect.fnUntraced(function* (owner: K.Sql) {
  const counts: Record<string, number> = {}
  for (const { name } of yield* tables(owner)) {
    const rows = yield* owner.unsafe<{ n: number }>(`SELECT count(*)::int AS n FROM ${name}`)
    counts[name] = K.first(rows).n
  }
  return counts
})

/** How far a probe has come when its executor ends. */
const stages: Readonly<
  Record<string, (probe: K.Executor, owner: K.Sql) => Effect.Effect<unknown, unknown>>
> = {
  "is not there": () => Effect.void,
  waits: ({ sql }) => begin(sql),
  "is claimed": (probe) => Effect.andThen(begin(probe.sql), K.claim(probe, 1)),
  "was handed back for later": (probe) =>
    Effect.gen(function* () {
      yield* begin(probe.sql)
      const [item] = yield* K.claim(probe, 1)
      yield* K.settle(probe, [{ ...of(item), outcome: "hand-back", delayMs: 60_000 }])
    }),
  "has settled": (probe) =>
    Effect.gen(function* () {
      yield* begin(probe.sql)
      const [item] = yield* K.claim(probe, 1)
      yield* K.settle(probe, [of(item)])
    }),
  "is in every table": (probe, owner) =>
    Effect.gen(function* () {
      const id = yield* begin(probe.sql)
      const [item] = yield* K.claim(probe, 1)
      yield* K.checkpoint(probe, [{ ...of(item), name: "step", value: "1" }])
      yield* owner`SELECT tenure.cancel(${id}::uuid)`
      yield* owner`SELECT tenure.await_items(ARRAY[${id}::uuid], 'nobody')`
      yield* owner`INSERT INTO tenure.deadline VALUES (${id}::uuid, tenure.clock() + interval '1 hour')`
    })
}

layer(K.Kernel.layer, { excludeTestServices: true })("a probe", (it) => {
  it.effect("goes the way of all work, and nothing of it is left when it has ended", () =>
    Effect.gen(function* () {
      const owner = yield* K.session("owner")
      const probe = yield* Effect.flatMap(K.executor({ queue: "business" }), K.probeOf)
      assert.isBelow(probe.queueId, 0)
      assert.strictEqual((yield* K.probeOf(probe)).queueId, probe.queueId, "registered again")
      const before = yield* rowCounts(owner)
      assert.strictEqual(yield* end(probe.sql), "none")
      const id = yield* begin(probe.sql)
      assert.strictEqual(yield* K.placeOf(owner, id), "ready")
      assert.strictEqual(yield* end(probe.sql), null)
      const [item] = yield* K.claim(probe, 1)
      assert.deepStrictEqual(of(item), { id, attempt: 1 })
      assert.strictEqual(yield* end(probe.sql), null)
      assert.deepStrictEqual(yield* K.settle(probe, [of(item)]), [])
      assert.strictEqual(yield* K.placeOf(owner, id), "completed")
      assert.strictEqual(yield* end(probe.sql), "completed")
      assert.deepStrictEqual(yield* traces(owner, id), [])
      assert.deepStrictEqual(yield* rowCounts(owner), before)
      assert.strictEqual(yield* end(probe.sql), "none")
    })
  )

  it.effect("that is not through is the next one as well, wherever it waits", () =>
    Effect.gen(function* () {
      const probe = yield* Effect.flatMap(K.executor({ queue: "again" }), K.probeOf)
      const owner = yield* K.session("owner")
      const id = yield* begin(probe.sql)
      assert.strictEqual(yield* begin(probe.sql), id, "while it waits")
      const [first] = yield* K.claim(probe, 1)
      assert.strictEqual(yield* begin(probe.sql), id, "while it runs")
      yield* K.settle(probe, [{ ...of(first), outcome: "hand-back" }])
      assert.strictEqual(yield* begin(probe.sql), id, "when it was handed back")
      const [second] = yield* K.claim(probe, 1)
      assert.strictEqual(second?.attempt, 2)
      yield* K.settle(probe, [of(second)])
      assert.strictEqual(yield* begin(probe.sql), id, "when nobody has ended it")
      // Somebody who should not.
      assert.strictEqual(yield* end(probe.sql), "completed")
      const cancelled = yield* begin(probe.sql)
      assert.notStrictEqual(cancelled, id)
      const [third] = yield* K.claim(probe, 1)
      yield* owner`SELECT tenure.cancel(${cancelled}::uuid)`
      yield* K.settle(probe, [{ ...of(third), outcome: "cancelled" }])
      assert.strictEqual(yield* end(probe.sql), "cancelled")
      assert.deepStrictEqual(yield* traces(owner, cancelled), [])
    })
  )

  it.effect("is the only one: who begins beside another waits for it and gets the same", () =>
    Effect.gen(function* () {
      const owner = yield* K.session("owner")
      const probe = yield* Effect.flatMap(K.executor({ queue: "twice" }), K.probeOf)
      const twin = yield* K.session("worker", probe.id)
      const pid = yield* K.pidOf(twin)
      yield* probe.sql`BEGIN`
      const id = yield* begin(probe.sql)
      const other = yield* Effect.forkChild(begin(twin))
      yield* K.whenBlocked(owner, pid)
      yield* probe.sql`COMMIT`
      assert.strictEqual(yield* Fiber.join(other), id)
      assert.strictEqual((yield* K.claim(probe, 10)).length, 1)
    })
  )

  for (const [stage, reach] of Object.entries(stages)) {
    for (const way of ["revoked", "released"] as const) {
      it.effect(`that ${stage} is gone with its queue when its executor is ${way}`, () =>
        Effect.gen(function* () {
          const owner = yield* K.session("owner")
          const api = yield* K.session("api")
          const queue = `${way} ${stage}`
          const runner = yield* K.executor({ queue })
          const business = yield* K.enqueueOne(api, queue, "1")
          yield* K.claim(runner, 1)
          const probe = yield* K.probeOf(runner)
          yield* reach(probe, owner)
          const [row] = yield* owner<{ item: string | null }>`
            SELECT item_id::text AS item FROM tenure.probe WHERE executor_id = ${probe.id}::uuid`
          if (way === "revoked") {
            // Only business is handed back, counted and told of.
            assert.deepStrictEqual(yield* K.loseExecutor(owner, probe.id), {
              state: "revoked",
              requeued: 1,
              cancelled: 0,
              exhausted: [],
              settled: []
            })
          } else {
            assert.deepStrictEqual(
              yield* runner.sql`SELECT * FROM tenure.release_executor(${probe.id}::uuid)`,
              [{ state: "released", handed_back: 1 }]
            )
          }
          assert.deepStrictEqual(yield* traces(owner, probe.id), ["tenure.executor"])
          assert.deepStrictEqual(yield* traces(owner, `,${probe.queueId},`), [])
          assert.deepStrictEqual(yield* traces(owner, `(${probe.queueId},`), [])
          if (row?.item !== null) {
            assert.deepStrictEqual(yield* traces(owner, row?.item ?? "none"), [])
          }
          assert.strictEqual(yield* K.placeOf(owner, business), "ready")
          assert.strictEqual(yield* K.stateOf(begin(probe.sql)), "TN002")
        })
      )
    }
  }

  it.effect("makes its own bucket when nothing has run for weeks", () =>
    Effect.gen(function* () {
      const database = yield* freshDatabase
      const owner = yield* K.sessionOf(database, "owner")
      const probe = yield* Effect.flatMap(K.executorOf(database, { queue: "q" }), K.probeOf)
      const passed = yield* owner<{ name: string }>`
        SELECT name FROM tenure.bucket WHERE upper_at > tenure.clock() - interval '1 hour'`
      for (const { name } of passed) {
        for (const parent of ["item", "done", "step"])
          yield* owner.unsafe(`DROP TABLE tenure.${parent}_${name}`)
        yield* owner`DELETE FROM tenure.bucket WHERE name = ${name}`
      }
      const id = yield* begin(probe.sql)
      assert.deepStrictEqual((yield* K.claim(probe, 1)).map(of), [{ id, attempt: 1 }])
    })
  )

  it.effect("that was being begun when its executor was revoked is waited for, and deleted", () =>
    Effect.gen(function* () {
      const owner = yield* K.session("owner")
      const revoker = yield* K.session("owner")
      const pid = yield* K.pidOf(revoker)
      const probe = yield* Effect.flatMap(K.executor({ queue: "late" }), K.probeOf)
      yield* probe.sql`BEGIN`
      const id = yield* begin(probe.sql)
      const losing = yield* Effect.forkChild(K.loseExecutor(revoker, probe.id))
      yield* K.whenBlocked(owner, pid)
      yield* probe.sql`COMMIT`
      assert.strictEqual((yield* Fiber.join(losing)).requeued, 0)
      assert.deepStrictEqual(yield* traces(owner, id), [])
    })
  )

  it.effect(
    "is claimed after its executor's row is locked, so that a revocation waits for no probe",
    () =>
      Effect.gen(function* () {
        const owner = yield* K.session("owner")
        const revoker = yield* K.session("owner")
        for (const isDelayed of [false, true]) {
          const probe = yield* Effect.flatMap(K.executor({ queue: "ordered" }), K.probeOf)
          const pid = yield* K.pidOf(probe.sql)
          const id = yield* begin(probe.sql)
          if (isDelayed) {
            const [item] = yield* K.claim(probe, 1)
            yield* K.settle(probe, [{ ...of(item), outcome: "hand-back", delayMs: 1 }])
            yield* K.eventually(
              "it is due",
              Effect.map(
                owner`SELECT FROM tenure.delayed WHERE id = ${id}::uuid AND due_at <= tenure.clock()`,
                (rows) => rows.length === 1
              )
            )
          }
          // What a revocation holds when it comes to the probe.
          yield* revoker`BEGIN`
          yield* revoker`SELECT FROM tenure.executor WHERE id = ${probe.id}::uuid FOR UPDATE`
          const moving = isDelayed
            ? Effect.asVoid(probe.sql`SELECT FROM tenure.promote(10)`)
            : Effect.asVoid(K.claim(probe, 1))
          const moved = yield* Effect.forkChild(moving)
          yield* K.whenBlocked(owner, pid)
          yield* revoker`SELECT tenure.drop_probe(${probe.id}::uuid)`
          yield* revoker`COMMIT`
          yield* Fiber.join(moved)
          assert.deepStrictEqual(yield* traces(owner, id), [])
        }
      })
  )

  it.effect(
    "is no work to anybody: not listed, not stuck, and not for others to make or drop",
    () =>
      Effect.gen(function* () {
        const owner = yield* K.session("owner")
        const api = yield* K.session("api")
        const named = yield* owner`SELECT (SELECT count(*)::int FROM tenure.queue) AS queues,
                                        (SELECT count(*)::int FROM tenure.lane) AS lanes`
        const runner = yield* K.executor({ queue: "hidden" })
        const more = yield* owner`SELECT (SELECT count(*)::int FROM tenure.queue) AS queues,
                                       (SELECT count(*)::int FROM tenure.lane) AS lanes`
        assert.deepStrictEqual(more, [
          { queues: Number(named[0]?.["queues"]) + 1, lanes: Number(named[0]?.["lanes"]) + 3 }
        ])
        const probe = yield* K.probeOf(runner)
        const id = yield* begin(probe.sql)
        yield* K.claim(probe, 1)
        assert.deepStrictEqual(
          yield* owner`SELECT (SELECT count(*)::int FROM tenure.queue) AS queues,
                            (SELECT count(*)::int FROM tenure.lane) AS lanes`,
          more
        )
        yield* owner`UPDATE tenure.executor SET expires_at = tenure.clock() WHERE id = ${probe.id}::uuid`
        const listed = yield* listExecutors(owner, 100)
        assert.strictEqual(listed.find((one) => one.executor_id === probe.id)?.claimed, 0)
        const stuck = yield* listStuckWork(owner, 100)
        assert.isUndefined(stuck.find((one) => one.executor_id === probe.id))
        // The audit of its own executor, and of no other, sees it.
        const neighbour = yield* K.executor({ queue: "hidden" })
        const claims = (executor: string) => owner`
        SELECT id::text AS id, lane_id FROM tenure.claims_of(${executor}::uuid, '0', 10)`
        assert.deepStrictEqual(yield* claims(probe.id), [{ id, lane_id: probe.queueId }])
        assert.deepStrictEqual(yield* claims(neighbour.id), [])

        assert.strictEqual(yield* K.stateOf(begin(api)), "42501")
        assert.strictEqual(
          yield* K.stateOf(begin(neighbour.sql)),
          "TN003",
          "it has no private queue"
        )
        const drop = neighbour.sql`SELECT tenure.drop_probe(${probe.id}::uuid)`
        assert.strictEqual(yield* K.stateOf(drop), "42501")
        const stranger = yield* K.session("worker")
        assert.strictEqual(yield* K.stateOf(begin(stranger)), "TN004")
        assert.strictEqual(yield* K.stateOf(stranger`SELECT tenure.register_probe()`), "TN004")
      })
  )
})

describe("ten thousand probes", () => {
  it.live(
    "store no more than none",
    () =>
      Effect.gen(function* () {
        const database = yield* freshDatabase
        const owner = yield* K.sessionOf(database, "owner")
        const probe = yield* Effect.flatMap(
          K.executorOf(database, { queue: "business" }),
          K.probeOf
        )
        const before = yield* rowCounts(owner)
        // Committed now and then, as they are in life: inside one transaction nothing is ever cleaned up.
        // A session's statements have a time limit, so none of them does all.
        const some = probe.sql.unsafe(`
        DO $$
        DECLARE
          item    record;
          wrong   int;
        BEGIN
          FOR turn IN 1..200 LOOP
            PERFORM tenure.begin_probe();
            SELECT * INTO STRICT item FROM tenure.claim(${probe.queueId}, ARRAY[${probe.queueId}],
              ARRAY[-2147483648], ARRAY[-1::bigint], 1, '{}', 0);
            SELECT count(*) INTO wrong FROM tenure.settle(ARRAY[item.id], ARRAY[item.attempt],
              NULL, NULL, NULL, NULL, NULL);
            IF wrong > 0 OR tenure.end_probe() <> 'completed' THEN
              RAISE EXCEPTION 'probe % did not pass', turn;
            END IF;
            IF turn % 20 = 0 THEN COMMIT; END IF;
          END LOOP;
        END $$`).unprepared
        yield* Effect.repeat(some, { times: 49 })
        assert.deepStrictEqual(yield* rowCounts(owner), before)
      }),
    300_000
  )
})
