/**
 * Goal: what is handed in is stored as it was handed in, in the order it was handed in, by any client
 * and inside any transaction, and moves nothing that could run out (I7, bug reports 20 and 21).
 * Method: the API's role enqueues; the owner of the schema looks.
 */
import { assert, layer } from "@effect/vitest"
import { Effect } from "effect"
import { freshDatabase } from "../support/Postgres.ts"
import * as K from "./kernel.ts"

/** Texts that `jsonb` refuses, and that have to come back as they are. */
const awkward = [
  String.raw`{"a":"\u0000"}`,
  String.raw`"\ud800"`,
  "1e999999",
  "-0.0",
  "12345678901234567890123456789",
  `{"b":1,"a":2,"b":3}`,
  `"${"ü€𝄞".repeat(50)}"`
]

layer(K.Kernel.layer, { excludeTestServices: true })("enqueue", (it) => {
  it.effect("an item is stored with everything it was given", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const owner = yield* K.session("owner")
      const id = yield* K.enqueueOne(api, "one", `{"imageId": "a"}`, {
        priority: 5,
        key: "k",
        idempotencyKey: "once",
        deadlineMs: 60_000
      })
      const row = K.first(
        yield* owner`
          SELECT i.priority, i.key, i.idempotency_key, i.payload::text AS payload,
                 r.rank, r.attempt, r.failures, r.losses, r.stuck, r.seq = i.seq AS same_seq,
                 l.version, l.suspect, q.name AS queue,
                 i.deadline_at - i.enqueued_at = interval '60 s' AS in_time,
                 d.due_at = i.deadline_at AS is_watched,
                 i.id BETWEEN tenure.id_at(tenure.clock() - interval '5 s')
                          AND tenure.id_at(tenure.clock() + interval '5 s') AS id_tells_time
            FROM tenure.item i JOIN tenure.ready r USING (id) JOIN tenure.lane l ON l.id = r.lane_id
            JOIN tenure.queue q ON q.id = l.queue_id JOIN tenure.deadline d ON d.id = i.id
           WHERE i.id = ${id}::uuid`
      )
      assert.deepStrictEqual(row, {
        priority: 5,
        key: "k",
        idempotency_key: "once",
        payload: `{"imageId": "a"}`,
        rank: -5,
        attempt: 0,
        failures: 0,
        losses: 0,
        stuck: 0,
        same_seq: true,
        version: null,
        suspect: false,
        queue: "one",
        in_time: true,
        is_watched: true,
        id_tells_time: true
      })
    })
  )

  it.effect("ids and seq of a batch are in the order of its payloads", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const owner = yield* K.session("owner")
      for (const queue of ["plain", "with options"]) {
        const ids = yield* K.enqueueMany(
          api,
          queue,
          1000,
          queue === "plain"
            ? {}
            : { delaysMs: Array.from({ length: 1000 }, (_, n) => (n % 2 === 0 ? 60_000 : 0)) }
        )
        const bySeq = yield* owner<{ id: string; payload: string }>`
          SELECT i.id::text AS id, i.payload::text AS payload FROM tenure.item i
            JOIN tenure.queue q ON q.id = i.queue_id AND q.name = ${queue} ORDER BY i.seq`
        assert.deepStrictEqual(
          bySeq.map((row) => row.id),
          ids
        )
        assert.deepStrictEqual(
          bySeq.map((row) => row.payload),
          Array.from({ length: 1000 }, (_, n) => String(n))
        )
      }
    })
  )

  it.effect("a batch of nothing is an empty answer", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      assert.deepStrictEqual((yield* K.enqueueAll(api, "empty", [])).ids, [])
      assert.deepStrictEqual(
        (yield* K.enqueueAll(api, "empty", [], { idempotencyKeys: [] })).ids,
        []
      )
    })
  )

  it.effect(
    "a later start waits, an earlier one does not, and an instant wins over a duration",
    () =>
      Effect.gen(function* () {
        const api = yield* K.session("api")
        const owner = yield* K.session("owner")
        const enqueue = (options: Readonly<Record<string, unknown>>) =>
          Effect.flatMap(K.enqueueOne(api, "delays", "1", options), (id) => K.placeOf(owner, id))
        assert.strictEqual(yield* enqueue({ delayMs: 60_000 }), "delayed")
        assert.strictEqual(yield* enqueue({ delayMs: 0 }), "ready")
        assert.strictEqual(yield* enqueue({ delayMs: -5 }), "ready")
        assert.strictEqual(yield* enqueue({ notBefore: "2020-01-01T00:00:00Z" }), "ready")
        assert.strictEqual(yield* enqueue({ notBefore: "2999-01-01T00:00:00Z" }), "delayed")
        assert.strictEqual(
          yield* enqueue({ notBefore: "2020-01-01T00:00:00Z", delayMs: 60_000 }),
          "ready"
        )
      })
  )

  it.effect("only items with a deadline are watched for one", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const owner = yield* K.session("owner")
      const { ids } = yield* K.enqueueAll(api, "deadlines", ["1", "2", "3"], {
        deadlinesMs: [null, 5_000, null],
        delaysMs: [null, null, 60_000]
      })
      assert.deepStrictEqual(
        yield* owner`SELECT d.id::text AS id FROM tenure.deadline d
                       JOIN tenure.item i USING (id) WHERE i.id = ANY(${ids ?? []}::text[]::uuid[])`,
        [{ id: ids?.[1] }]
      )
    })
  )

  it.effect("any JSON is stored to the letter, that which jsonb refuses included", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const runner = yield* K.executor({ queue: "awkward" })
      yield* K.enqueueAll(api, "awkward", awkward)
      assert.deepStrictEqual(
        (yield* K.claim(runner, 100)).map((row) => row.payload),
        awkward
      )
      for (const refused of awkward.slice(0, 3)) {
        assert.include(
          ["22P05", "22P02", "22003"],
          yield* K.stateOf(api`SELECT ${refused}::text::jsonb::text AS it`)
        )
      }
    })
  )

  it.effect("one payload that is no JSON refuses the batch and leaves nothing", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const owner = yield* K.session("owner")
      assert.strictEqual(yield* K.stateOf(K.enqueueAll(api, "broken", ["1", "{", "3"])), "22P02")
      assert.deepStrictEqual(yield* owner`SELECT FROM tenure.queue WHERE name = 'broken'`, [])
    })
  )

  it.effect("names and keys are data, whatever is in them", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const owner = yield* K.session("owner")
      const names = [
        `a"; DROP TABLE tenure.item; --`,
        "a'b",
        "%I %s $1",
        "1a",
        "Öß🙂",
        "\\",
        "x".repeat(200)
      ]
      for (const name of names) {
        const runner = yield* K.executor({ queue: name, perKeyLimit: 1 })
        const id = yield* K.enqueueOne(api, name, "1", { key: name, idempotencyKey: name })
        assert.deepStrictEqual(
          (yield* K.claim(runner, 10)).map((row) => [row.id, row.key]),
          [[id, name]]
        )
        yield* K.checkpoint(runner, [{ id, attempt: 1, name, value: "1" }])
        assert.strictEqual(yield* K.enqueueOne(api, name, "1", { idempotencyKey: name }), id)
      }
      assert.deepStrictEqual(
        yield* owner`SELECT count(*)::int AS n FROM tenure.queue WHERE name = ANY(${names}::text[])`,
        [{ n: names.length }]
      )
      for (const refused of ["", "x".repeat(201)]) {
        assert.strictEqual(yield* K.stateOf(K.enqueueOne(api, refused, "1")), "23514")
      }
      // An empty key would never be seen by a claim that walks the keys.
      assert.strictEqual(yield* K.stateOf(K.enqueueOne(api, "q", "1", { key: "" })), "23514")
    })
  )

  it.effect("an option that does not exist is refused by name", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const error = yield* Effect.flip(K.enqueueOne(api, "q", "1", { prio: 1, delay: 2 }))
      assert.include(String(error.reason.cause), "unknown option")
      assert.strictEqual(yield* K.stateOf(K.enqueueOne(api, "q", "1", { prio: 1 })), "TN021")
    })
  )

  it.effect("an item appears with its caller's commit and vanishes with his rollback", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const owner = yield* K.session("owner")
      yield* api`BEGIN`
      const lost = yield* K.enqueueOne(api, "transaction", "1")
      assert.strictEqual(yield* K.placeOf(owner, lost), "nowhere")
      yield* api`ROLLBACK`
      assert.strictEqual(yield* K.placeOf(owner, lost), "nowhere")
      yield* api`BEGIN ISOLATION LEVEL SERIALIZABLE`
      const kept = yield* K.enqueueOne(api, "transaction", "1", { idempotencyKey: "k" })
      yield* api`COMMIT`
      assert.strictEqual(yield* K.placeOf(owner, kept), "ready")
    })
  )

  it.effect("a thousand enqueues move no sequence but the one of the items", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const owner = yield* K.session("owner")
      const runner = yield* K.executor({ queue: "sequences" })
      const positions = Effect.map(
        owner<{ name: string; last: number | null }>`
          SELECT sequencename AS name, last_value::int AS last FROM pg_sequences
           WHERE schemaname = 'tenure'`,
        (rows) => Object.fromEntries(rows.map((row) => [row.name, row.last ?? 0]))
      )
      yield* K.enqueueOne(api, "sequences", "1", { idempotencyKey: "known" })
      const before = yield* positions
      for (let n = 0; n < 500; n++) {
        yield* K.enqueueOne(api, "sequences", "1")
        yield* K.enqueueOne(api, "sequences", "1", { idempotencyKey: "known" })
      }
      // An executor that starts again finds its queue and its lanes.
      yield* K.executor({ queue: "sequences" })
      const after = yield* positions
      assert.deepStrictEqual(after, { ...before, item_seq: (before["item_seq"] ?? 0) + 500 })
      assert.strictEqual(runner.queueId, (yield* K.enqueueAll(api, "sequences", ["1"])).queue_id)
    })
  )

  it.effect("the first enqueue after weeks without maintenance makes its own bucket", () =>
    Effect.gen(function* () {
      const database = yield* freshDatabase
      const owner = yield* K.sessionOf(database, "owner")
      // What is left when nothing has run for weeks: buckets that have all passed.
      const passed = yield* owner<{ name: string }>`
        SELECT name FROM tenure.bucket WHERE upper_at > tenure.clock() - interval '1 hour'`
      for (const { name } of passed) {
        for (const parent of ["item", "done", "step"])
          yield* owner.unsafe(`DROP TABLE tenure.${parent}_${name}`)
        yield* owner`DELETE FROM tenure.bucket WHERE name = ${name}`
      }
      assert.strictEqual(
        yield* K.stateOf(
          owner`INSERT INTO tenure.item (id, queue_id, priority, payload, enqueued_at)
                VALUES (tenure.new_id(), 1, 0, '1', tenure.clock())`
        ),
        "23514"
      )
      // Four at once: one makes the buckets, the others wait for it and find them made.
      const clients = yield* Effect.all([0, 1, 2, 3].map(() => K.sessionOf(database, "api")))
      const ids = yield* Effect.forEach(clients, (api) => K.enqueueOne(api, "after weeks", "1"), {
        concurrency: "unbounded"
      })
      assert.deepStrictEqual(
        Object.values(yield* K.placesOf(owner, ids)),
        ids.map(() => "ready")
      )
      assert.deepStrictEqual(
        yield* owner`SELECT b.name FROM tenure.bucket b
                      WHERE b.lower_at <> coalesce((SELECT max(o.upper_at) FROM tenure.bucket o
                        WHERE o.lower_at < b.lower_at), b.lower_at)`,
        [],
        "buckets without a gap"
      )
      assert.deepStrictEqual(
        yield* owner`SELECT name FROM tenure.unfenced_tables() WHERE name LIKE 'tenure.%'`,
        []
      )
    })
  )
})
