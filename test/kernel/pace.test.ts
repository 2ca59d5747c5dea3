/**
 * Goal: of the items with one debounce key the last one runs, of those with one throttle key the first,
 * whoever hands them in at the same time and however the transactions end; every caller gets the id whose
 * outcome is his answer.
 * Method: sessions whose waits are seen in `pg_blocking_pids`; times that pass are written into the tables,
 * never waited for.
 */
import { assert, layer } from "@effect/vitest"
import { Effect, Fiber } from "effect"
import { present } from "../support/present.ts"
import * as K from "./kernel.ts"

const hour = 3_600_000

const debounce = (key = "k", delayMs = hour, maxWaitMs?: number) => ({
  debounce: { key, delayMs, ...(maxWaitMs === undefined ? {} : { maxWaitMs }) }
})

const throttle = (key = "k", periodMs = hour) => ({ throttle: { key, periodMs } })

const payloadOf = (sql: K.Sql, id: string) =>
  Effect.map(
    sql<{
      payload: string
    }>`SELECT payload::text AS payload FROM tenure.item WHERE id = ${id}::uuid`,
    (rows) => K.first(rows).payload
  )

const idsOf = (sql: K.Sql, queue: string) =>
  Effect.map(
    sql<{ id: string }>`
      SELECT i.id::text AS id FROM tenure.item i JOIN tenure.queue q ON q.id = i.queue_id
       WHERE q.name = ${queue} ORDER BY i.seq`,
    (rows) => rows.map((row) => row.id)
  )

/** Of a debounced item: due after so many milliseconds from the key's beginning. */
const waitOf = (sql: K.Sql, id: string) =>
  Effect.map(
    sql<{ ms: number }>`
      SELECT extract(epoch FROM d.due_at - p.began_at)::float8 * 1000 AS ms
        FROM tenure.delayed d JOIN tenure.pace_key p ON p.item_id = d.id AND p.ends_at = d.due_at
       WHERE d.id = ${id}::uuid`,
    (rows) => K.first(rows).ms
  )

/** The time of everything in a queue has come. */
const letPass = Effect.fnUntraced(function* (owner: K.Sql, queue: string) {
  yield* owner`UPDATE tenure.delayed d SET due_at = tenure.clock() - interval '1 second'
                 FROM tenure.item i JOIN tenure.queue q ON q.id = i.queue_id
                WHERE i.id = d.id AND q.name = ${queue}`
  yield* owner`UPDATE tenure.pace_key p SET ends_at = tenure.clock() - interval '1 second'
                 FROM tenure.queue q WHERE q.id = p.queue_id AND q.name = ${queue}`
})

const promote = (sql: K.Sql) => sql`SELECT promoted FROM tenure.promote(1000)`

layer(K.Kernel.layer, { excludeTestServices: true })("a debounced item", (it) => {
  it.effect("is replaced while it waits, under its id, and put off", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const owner = yield* K.session("owner")
      const first = yield* K.enqueueOne(api, "burst", "1", debounce())
      const waited = yield* waitOf(owner, first)
      assert.closeTo(waited, hour, 1)
      for (const payload of ["2", "3"]) {
        assert.strictEqual(yield* K.enqueueOne(api, "burst", payload, debounce()), first)
      }
      assert.isAbove(yield* waitOf(owner, first), waited)
      assert.strictEqual(yield* payloadOf(owner, first), "3")
      assert.deepStrictEqual(yield* idsOf(owner, "burst"), [first])
      const other = yield* K.enqueueOne(api, "burst", "4", debounce("other"))
      const elsewhere = yield* K.enqueueOne(api, "burst elsewhere", "5", debounce())
      assert.strictEqual(new Set([first, other, elsewhere]).size, 3)
    })
  )

  it.effect("is replaced with its options, and is found where they put it", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const owner = yield* K.session("owner")
      const id = yield* K.enqueueOne(api, "options", "1", {
        ...debounce(),
        priority: 1,
        key: "a",
        deadlineMs: hour
      })
      yield* K.enqueueOne(api, "options", "2", {
        ...debounce(),
        priority: 7,
        key: "b",
        deadlineMs: 3 * hour
      })
      const watched = yield* owner`
        SELECT i.priority, i.key, i.deadline_at = d.due_at AS watched,
               d.due_at > tenure.clock() + interval '2 hours' AS later
          FROM tenure.item i JOIN tenure.deadline d USING (id) WHERE i.id = ${id}::uuid`
      assert.deepStrictEqual(watched, [{ priority: 7, key: "b", watched: true, later: true }])
      yield* K.enqueueOne(api, "options", "3", { ...debounce(), priority: 5 })
      assert.deepStrictEqual(yield* owner`SELECT FROM tenure.deadline WHERE id = ${id}::uuid`, [])
      yield* letPass(owner, "options")
      yield* promote(owner)
      const runner = yield* K.executor({ queue: "options" })
      const places = yield* owner`SELECT place FROM tenure.item_place(${id}::uuid)`
      assert.deepStrictEqual(places, [{ place: "ready" }])
      const [claimed] = yield* K.claim(runner, 1)
      assert.deepInclude(claimed, { id, rank: -5, key: null, payload: "3" })
    })
  )

  it.effect("is never put off for longer than its maximum after the first call", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const owner = yield* K.session("owner")
      const id = yield* K.enqueueOne(api, "max", "1", debounce("k", hour, 1.5 * hour))
      yield* owner`UPDATE tenure.pace_key SET began_at = began_at - interval '1 hour' WHERE item_id = ${id}::uuid`
      yield* K.enqueueOne(api, "max", "2", debounce("k", hour, 1.5 * hour))
      assert.closeTo(yield* waitOf(owner, id), 1.5 * hour, 1)
      yield* K.enqueueOne(api, "max", "3", debounce("k", hour, 1.5 * hour))
      assert.closeTo(yield* waitOf(owner, id), 1.5 * hour, 1)
      assert.strictEqual(yield* payloadOf(owner, id), "3")
    })
  )

  it.effect("that has become due, runs or has ended is left alone: a new one begins", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const owner = yield* K.session("owner")
      const runner = yield* K.executor({ queue: "due" })
      const seen: Array<string> = []
      const again = Effect.gen(function* () {
        const id = yield* K.enqueueOne(api, "due", String(seen.length), debounce())
        assert.isFalse(seen.includes(id))
        seen.push(id)
      })
      yield* again
      yield* letPass(owner, "due")
      yield* again
      yield* letPass(owner, "due")
      yield* promote(owner)
      yield* again
      const claimed = yield* K.claim(runner, 2)
      assert.strictEqual(claimed.length, 2)
      // Tried again later, it waits as well, and has run.
      yield* letPass(owner, "due")
      yield* owner`UPDATE tenure.pace_key SET item_id = ${present(claimed[0]).id}::uuid, ends_at = tenure.clock() + interval '1 hour'
                     FROM tenure.queue q WHERE q.id = queue_id AND q.name = 'due'`
      yield* K.settle(runner, [
        { id: present(claimed[0]).id, attempt: 1, outcome: "retry", delayMs: hour }
      ])
      yield* again
      yield* api`SELECT tenure.cancel(${present(seen.at(-1))}::uuid)`
      yield* again
      assert.deepStrictEqual(
        yield* Effect.forEach(seen.slice(0, 2), (id) => payloadOf(owner, id)),
        ["0", "1"]
      )
    })
  )

  it.effect("of two callers at once is one, whichever commits and whichever does not", () =>
    Effect.gen(function* () {
      const owner = yield* K.session("owner")
      const [one, two] = [yield* K.session("api"), yield* K.session("api")]
      const pid = yield* K.pidOf(two)
      for (const end of ["COMMIT", "ROLLBACK"]) {
        yield* one`BEGIN`
        const first = yield* K.enqueueOne(one, "two", "1", debounce(end))
        const waiting = yield* Effect.forkChild(K.enqueueOne(two, "two", "2", debounce(end)))
        yield* K.whenBlocked(owner, pid)
        yield* one.unsafe(end)
        const second = yield* Fiber.join(waiting)
        assert.strictEqual(second === first, end === "COMMIT")
        assert.strictEqual(yield* payloadOf(owner, second), "2")
        // And once more over one that is there.
        yield* one`BEGIN`
        yield* K.enqueueOne(one, "two", "3", debounce(end))
        const third = yield* Effect.forkChild(K.enqueueOne(two, "two", "4", debounce(end)))
        yield* K.whenBlocked(owner, pid)
        yield* one.unsafe(end)
        assert.strictEqual(yield* Fiber.join(third), second)
        assert.strictEqual(yield* payloadOf(owner, second), "4")
      }
      assert.strictEqual((yield* idsOf(owner, "two")).length, 2)
    })
  )

  it.effect("of many callers at once is one, and no payload is torn", () =>
    Effect.gen(function* () {
      const owner = yield* K.session("owner")
      const sessions = yield* Effect.forEach([1, 2, 3, 4, 5, 6], () => K.session("api"))
      const ids = yield* Effect.forEach(
        sessions,
        (sql, at) =>
          Effect.forEach(Array.from({ length: 15 }), (_, n) =>
            K.enqueueOne(sql, "many", `{"at":${at},"n":${n}}`, { ...debounce(), priority: n })
          ),
        { concurrency: "unbounded" }
      )
      const [id] = yield* idsOf(owner, "many")
      assert.deepStrictEqual(new Set(ids.flat()), new Set([id]))
      const rows = yield* owner<{ n: number }>`
        SELECT (i.payload ->> 'n')::int AS n FROM tenure.item i JOIN tenure.delayed d USING (id)
         WHERE i.id = ${present(id)}::uuid AND d.rank = -i.priority AND (i.payload ->> 'n')::int = i.priority`
      // Some session's last call was the last of all.
      assert.deepStrictEqual(rows, [{ n: 14 }])
    })
  )

  it.effect(
    "waits for nobody who holds the item: what is being promoted or cancelled has waited",
    () =>
      Effect.gen(function* () {
        const api = yield* K.session("api")
        const owner = yield* K.session("owner")
        const client = yield* K.session("api")
        const old = yield* K.enqueueOne(api, "held", "1", debounce())
        yield* client`BEGIN`
        yield* client`SELECT tenure.cancel(${old}::uuid)`
        const fresh = yield* K.enqueueOne(api, "held", "2", debounce())
        assert.notStrictEqual(fresh, old)
        yield* client`ROLLBACK`
        assert.deepStrictEqual(yield* Effect.forEach([old, fresh], (id) => payloadOf(owner, id)), [
          "1",
          "2"
        ])
        assert.strictEqual(yield* K.enqueueOne(api, "held", "3", debounce()), fresh)
      })
  )

  it.effect("that is twice in a batch is the last of them, beside others of every kind", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const owner = yield* K.session("owner")
      const hand = () =>
        K.enqueueAll(api, "batch", ["1", "2", "3", "4", "5", "6", "7"], {
          paceKinds: ["debounce", null, "throttle", "debounce", "throttle", "debounce", null],
          paceKeys: ["a", null, "a", "b", "a", "a", null],
          paceMs: [hour, null, hour, hour, hour, hour, null],
          idempotencyKeys: [null, null, null, null, null, null, "once"],
          delaysMs: [null, hour, null, null, null, null, null]
        })
      const { ids } = yield* hand()
      const [a, plain, throttled, b, alsoThrottled, alsoA, once] = ids ?? []
      assert.strictEqual(alsoA, a)
      assert.strictEqual(alsoThrottled, throttled)
      assert.strictEqual(new Set(ids).size, 5)
      assert.strictEqual(yield* payloadOf(owner, present(a)), "6")
      assert.strictEqual(yield* payloadOf(owner, present(throttled)), "3")
      const places = yield* K.placesOf(owner, [...new Set(ids)])
      assert.deepStrictEqual(
        [a, b, plain, throttled, once].map((id) => places[present(id)]),
        ["delayed", "delayed", "delayed", "ready", "ready"]
      )
      const again = yield* hand()
      assert.deepStrictEqual(
        again.ids?.map((id, at) => id === ids?.[at]),
        [true, false, true, true, true, true, true]
      )
    })
  )

  it.effect(
    "has neither another delay, nor an idempotency key, nor a group, nor options unknown",
    () =>
      Effect.gen(function* () {
        const api = yield* K.session("api")
        const group = "01900000-0000-7000-8000-000000000000"
        for (const options of [
          { ...debounce(), delayMs: 1 },
          { ...debounce(), notBefore: "2100-01-01T00:00:00Z" },
          { ...debounce(), idempotencyKey: "k" },
          { ...debounce(), ...throttle() },
          { ...throttle(), idempotencyKey: "k" },
          { debounce: { key: "k" } },
          { debounce: { delayMs: 1 } },
          { throttle: { key: "k", periodMs: 1, maxWaitMs: 1 } },
          { debounce: { key: "k", delayMs: 1, leading: true } }
        ]) {
          assert.strictEqual(
            yield* K.stateOf(K.enqueueOne(api, "refused", "1", options)),
            "TN021",
            JSON.stringify(options)
          )
        }
        assert.strictEqual(
          yield* K.stateOf(K.enqueueOne(api, "refused", "1", { ...throttle(), group })),
          "TN030"
        )
      })
  )
})

layer(K.Kernel.layer, { excludeTestServices: true })("a throttled item", (it) => {
  it.effect("is the answer to all others of its period, whatever became of it", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const owner = yield* K.session("owner")
      const runner = yield* K.executor({ queue: "period" })
      const first = yield* K.enqueueOne(api, "period", "1", throttle())
      assert.strictEqual(yield* K.enqueueOne(api, "period", "2", throttle()), first)
      const [claimed] = yield* K.claim(runner, 5)
      assert.deepInclude(claimed, { id: first, payload: "1" })
      yield* K.settle(runner, [{ id: first, attempt: 1, outcome: "failed" }])
      assert.strictEqual(yield* K.enqueueOne(api, "period", "3", throttle("k", 1)), first)
      assert.deepStrictEqual(yield* K.claim(runner, 5), [])
      yield* letPass(owner, "period")
      const second = yield* K.enqueueOne(api, "period", "4", throttle())
      assert.notStrictEqual(second, first)
      assert.strictEqual(yield* K.enqueueOne(api, "period", "5", throttle()), second)
      assert.deepStrictEqual(yield* idsOf(owner, "period"), [first, second])
    })
  )

  it.effect("of two callers at once is one, and rolled back it has not been", () =>
    Effect.gen(function* () {
      const owner = yield* K.session("owner")
      const [one, two] = [yield* K.session("api"), yield* K.session("api")]
      const pid = yield* K.pidOf(two)
      for (const end of ["COMMIT", "ROLLBACK"]) {
        yield* one`BEGIN`
        const first = yield* K.enqueueOne(one, "twice", "1", throttle(end))
        const waiting = yield* Effect.forkChild(K.enqueueOne(two, "twice", "2", throttle(end)))
        yield* K.whenBlocked(owner, pid)
        yield* one.unsafe(end)
        const second = yield* Fiber.join(waiting)
        assert.strictEqual(second === first, end === "COMMIT")
        assert.strictEqual(yield* payloadOf(owner, second), end === "COMMIT" ? "1" : "2")
      }
    })
  )

  it.effect("is one for callers who hand in their keys in different orders", () =>
    Effect.gen(function* () {
      const owner = yield* K.session("owner")
      const [holder, one, two] = [
        yield* K.session("api"),
        yield* K.session("api"),
        yield* K.session("api")
      ]
      const keys = ["a", "b", "c", "d", "e"]
      const hand = (sql: K.Sql, order: ReadonlyArray<string>) =>
        K.enqueueAll(
          sql,
          "orders",
          order.map(() => "1"),
          {
            paceKinds: order.map(() => "throttle" as const),
            paceKeys: order,
            paceMs: order.map(() => hour)
          }
        )
      // The queue itself is there before, or all would wait for that.
      yield* hand(holder, ["z"])
      // Both come as far as the key in the middle, and would have what the other one wants next.
      yield* holder`BEGIN`
      yield* hand(holder, ["c"])
      const pids = [yield* K.pidOf(one), yield* K.pidOf(two)]
      const first = yield* Effect.forkChild(hand(one, keys))
      yield* K.whenBlocked(owner, present(pids[0]))
      const second = yield* Effect.forkChild(hand(two, keys.toReversed()))
      yield* K.whenBlocked(owner, present(pids[1]))
      yield* holder`ROLLBACK`
      const { ids } = yield* Fiber.join(first)
      assert.deepStrictEqual((yield* Fiber.join(second)).ids?.toReversed(), ids)
    })
  )

  it.effect(
    "leaves no key behind for ever: whoever makes keys clears away those that have passed",
    () =>
      Effect.gen(function* () {
        const api = yield* K.session("api")
        const owner = yield* K.session("owner")
        const hand = (name: string) =>
          K.enqueueAll(
            api,
            "cleared",
            Array.from({ length: 60 }, () => "1"),
            {
              paceKinds: Array.from({ length: 60 }, () => "throttle" as const),
              paceKeys: Array.from({ length: 60 }, (_, n) => `${name} ${n}`),
              paceMs: Array.from({ length: 60 }, () => hour)
            }
          )
        const count = Effect.map(
          owner<{ n: number }>`SELECT count(*)::int AS n FROM tenure.pace_key p
                               JOIN tenure.queue q ON q.id = p.queue_id WHERE q.name = 'cleared'`,
          (rows) => K.first(rows).n
        )
        for (let round = 0; round < 4; round++) {
          yield* hand(`round ${round}`)
          assert.isAtMost(yield* count, 120)
          yield* letPass(owner, "cleared")
        }
      })
  )
})
