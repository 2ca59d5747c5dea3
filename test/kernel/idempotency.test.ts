/**
 * Goal: an idempotency key names one item, whoever asks at the same time and however the transactions
 * end; a key that is used for something else is named and changes nothing (bug report 14).
 * Method: two to six sessions whose waits are seen in `pg_blocking_pids`. The form that a reader would
 * write first is shown to fail at the same place.
 */
import { assert, layer } from "@effect/vitest"
import { Effect, Fiber } from "effect"
import * as K from "./kernel.ts"

const countItems = (sql: K.Sql, queue: string) =>
  Effect.map(
    sql<{ n: number }>`SELECT count(*)::int AS n FROM tenure.item i
                         JOIN tenure.queue q ON q.id = i.queue_id WHERE q.name = ${queue}`,
    (rows) => K.first(rows).n
  )

layer(K.Kernel.layer, { excludeTestServices: true })("idempotency keys", (it) => {
  it.effect("a known key gives the first item, and the first item stays as it is", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const owner = yield* K.session("owner")
      const first = yield* K.enqueueOne(api, "known", `{"a": 1}`, {
        idempotencyKey: "k",
        priority: 1
      })
      const again = yield* K.enqueueOne(api, "known", `{"a": 1}`, {
        idempotencyKey: "k",
        priority: 9
      })
      assert.strictEqual(again, first)
      assert.deepStrictEqual(
        yield* owner`SELECT i.priority FROM tenure.item i JOIN tenure.queue q ON q.id = i.queue_id
                      WHERE q.name = 'known'`,
        [{ priority: 1 }]
      )
      const elsewhere = yield* K.enqueueOne(api, "another", `{"a": 1}`, { idempotencyKey: "k" })
      assert.notStrictEqual(elsewhere, first, "a key belongs to its queue")
    })
  )

  it.effect("a key goes on naming its item when the item has ended", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const runner = yield* K.executor({ queue: "ended" })
      const id = yield* K.enqueueOne(api, "ended", "1", { idempotencyKey: "k" })
      const [claimed] = yield* K.claim(runner, 1)
      yield* K.settle(runner, [{ id, attempt: claimed?.attempt ?? 0 }])
      assert.strictEqual(yield* K.enqueueOne(api, "ended", "1", { idempotencyKey: "k" }), id)
      assert.deepStrictEqual(yield* K.claim(runner, 1), [])
    })
  )

  it.effect("the same value in another spelling is the same payload", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const id = yield* K.enqueueOne(api, "spelling", `{"a":1,"b":[1.0,2]}`, {
        idempotencyKey: "k"
      })
      for (const spelling of [`{ "b": [1, 2],\n "a": 1 }`, `{"a":1e0,"b":[1.00,2.0]}`]) {
        assert.strictEqual(
          yield* K.enqueueOne(api, "spelling", spelling, { idempotencyKey: "k" }),
          id
        )
      }
      // What jsonb cannot hold is compared as text.
      const nul = String.raw`{"a":"\u0000"}`
      const other = yield* K.enqueueOne(api, "spelling", nul, { idempotencyKey: "nul" })
      assert.strictEqual(
        yield* K.enqueueOne(api, "spelling", nul, { idempotencyKey: "nul" }),
        other
      )
      assert.strictEqual(
        yield* K.stateOf(K.enqueueOne(api, "spelling", ` ${nul}`, { idempotencyKey: "nul" })),
        "TN020"
      )
    })
  )

  it.effect("a conflict names the key and its item, and nothing of the batch is written", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const owner = yield* K.session("owner")
      const id = yield* K.enqueueOne(api, "conflict", "1", { idempotencyKey: "taken" })
      yield* api`BEGIN`
      const before = yield* K.enqueueOne(api, "conflict", "2")
      const refused = yield* K.enqueueAll(api, "conflict", ["3", "4", "5"], {
        idempotencyKeys: ["fresh", "taken", null]
      })
      assert.strictEqual(refused.ids, null)
      assert.strictEqual(refused.conflict_key, "taken")
      assert.strictEqual(refused.conflict_id, id)
      // The caller's transaction is usable, and what it had written before is still there.
      const after = yield* K.enqueueOne(api, "conflict", "6", { idempotencyKey: "fresh" })
      yield* api`COMMIT`
      assert.strictEqual(yield* countItems(owner, "conflict"), 3)
      assert.deepStrictEqual(yield* K.placesOf(owner, [before, after]), {
        [before]: "ready",
        [after]: "ready"
      })
      assert.strictEqual(
        yield* K.stateOf(K.enqueueOne(api, "conflict", "7", { idempotencyKey: "taken" })),
        "TN020"
      )
    })
  )

  it.effect("a key that is twice in a batch names one item: the first", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const owner = yield* K.session("owner")
      // Many, because a sort of two equal keys may keep their order by luck.
      const size = 200
      const { ids } = yield* K.enqueueAll(
        api,
        "twins",
        Array.from({ length: size }, () => "1"),
        {
          idempotencyKeys: Array.from({ length: size }, (_, n) =>
            n % 3 === 0 ? null : `k${n % 2}`
          ),
          priorities: Array.from({ length: size }, (_, n) => n)
        }
      )
      const distinct = new Set(ids)
      assert.strictEqual(distinct.size, Math.ceil(size / 3) + 2)
      assert.strictEqual(yield* countItems(owner, "twins"), distinct.size)
      assert.deepStrictEqual(
        yield* owner`SELECT i.idempotency_key AS key, i.priority FROM tenure.item i
                       JOIN tenure.queue q ON q.id = i.queue_id
                      WHERE q.name = 'twins' AND i.idempotency_key IS NOT NULL ORDER BY 1`,
        [
          { key: "k0", priority: 2 },
          { key: "k1", priority: 1 }
        ]
      )
      const torn = yield* K.enqueueAll(api, "twins", ["1", "2"], { idempotencyKeys: ["x", "x"] })
      assert.strictEqual(torn.conflict_key, "x")
      assert.strictEqual(yield* countItems(owner, "twins"), distinct.size)
    })
  )

  it.effect(
    "an inserter that waited for another one gets the other's item; in one statement it gets nothing",
    () =>
      Effect.gen(function* () {
        const winner = yield* K.session("api")
        const loser = yield* K.session("api")
        const owner = yield* K.session("owner")
        const other = yield* K.session("owner")
        const queueId = (yield* K.enqueueAll(winner, "waits", ["0"])).queue_id

        const otherPid = yield* K.pidOf(other)
        yield* owner`BEGIN`
        yield* owner`INSERT INTO tenure.item_key VALUES (${queueId}::int, 'wrong', tenure.new_id())`
        const wrong = yield* Effect.forkChild(
          other`WITH mine AS (
                INSERT INTO tenure.item_key VALUES (${queueId}::int, 'wrong', tenure.new_id())
                ON CONFLICT DO NOTHING RETURNING item_id)
              SELECT item_id FROM mine
              UNION ALL SELECT item_id FROM tenure.item_key WHERE queue_id = ${queueId}::int AND key = 'wrong'`
        )
        yield* K.whenBlocked(owner, otherPid)
        yield* owner`COMMIT`
        assert.deepStrictEqual(yield* Fiber.join(wrong), [])

        yield* winner`BEGIN`
        const id = yield* K.enqueueOne(winner, "waits", "1", { idempotencyKey: "right" })
        const pid = yield* K.pidOf(loser)
        const right = yield* Effect.forkChild(
          K.enqueueOne(loser, "waits", "1", { idempotencyKey: "right" })
        )
        yield* K.whenBlocked(owner, pid)
        yield* winner`COMMIT`
        assert.strictEqual(yield* Fiber.join(right), id)
      })
  )

  it.effect(
    "of five inserters four roll back: one item, and nobody was told of one that is not",
    () =>
      Effect.gen(function* () {
        const owner = yield* K.session("owner")
        const inserters = yield* Effect.all([0, 1, 2, 3, 4].map(() => K.session("api")))
        let commits = 0
        const answers = yield* Effect.forEach(
          inserters,
          (sql) =>
            Effect.gen(function* () {
              yield* sql`BEGIN`
              const id = yield* K.enqueueOne(sql, "rolls back", "1", { idempotencyKey: "k" })
              // Whoever comes first rolls back, and so on: the last one commits.
              commits++
              yield* commits < 5 ? sql`ROLLBACK` : sql`COMMIT`
              return id
            }),
          { concurrency: "unbounded" }
        )
        assert.strictEqual(new Set(answers).size, 5, "each was told of an item of its own")
        assert.strictEqual(yield* countItems(owner, "rolls back"), 1)
        const places = yield* K.placesOf(owner, answers)
        assert.deepStrictEqual(Object.values(places).toSorted(), [
          "nowhere",
          "nowhere",
          "nowhere",
          "nowhere",
          "ready"
        ])
      })
  )

  it.effect("a caller with an older snapshot gets a retryable refusal, not a second item", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const strict = yield* K.session("api")
      const owner = yield* K.session("owner")
      yield* K.enqueueOne(api, "snapshot", "0")
      yield* strict`BEGIN ISOLATION LEVEL REPEATABLE READ`
      yield* strict`SELECT 1`
      yield* K.enqueueOne(api, "snapshot", "1", { idempotencyKey: "k" })
      assert.strictEqual(
        yield* K.stateOf(K.enqueueOne(strict, "snapshot", "1", { idempotencyKey: "k" })),
        "40001"
      )
      yield* strict`ROLLBACK`
      assert.strictEqual(yield* countItems(owner, "snapshot"), 2)
    })
  )
})
