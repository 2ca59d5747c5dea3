/**
 * Goal: a worker in any language gets work, keeps it while it lives, and settles it once, over HTTP; and
 * whoever is late is told so in words.
 * Method: a whole process on a real database, and requests on a real socket.
 * Covers I-011, I-012, I-015, I-017, I-021, I-025, I-027, I-075.
 */
import * as NodeHttpClient from "@effect/platform-node/NodeHttpClient"
import { assert, describe, it, layer } from "@effect/vitest"
import { Context, Effect, Exit, Fiber, Layer, Redacted, Schema } from "effect"
import { WorkQueue } from "tenure"
import { Api } from "tenure/http"
import { eventually } from "../kernel/kernel.ts"
import { present } from "../support/present.ts"
import * as World from "./api.ts"

class Declined extends Schema.TaggedError<Declined>()("Declined", { orderId: Schema.String }) {}

class Charge extends WorkQueue.make("charge", {
  payload: { orderId: Schema.String },
  success: Schema.Struct({ receipt: Schema.String }),
  error: Declined
}) {}

class Process extends Context.Service<Process, World.Process>()("tenure/test/http/Process") {
  // Nobody polls within an hour: what is answered was told.
  static readonly layer = Layer.effect(
    Process,
    World.process({ settings: { pollInterval: "1 hour", payloadMax: 10_000 } })
  )
}

const waitLong = { wanted: 10, waitMillis: 30_000 }

let queues = 0

/** A worker with a session on a queue of its own, and items on it. */
const scene = Effect.fnUntraced(function* (
  payloads: ReadonlyArray<unknown> = [],
  options: { readonly slots?: number } = {}
) {
  const world = yield* Process
  const queue = `queue-${queues++}`
  const { secret } = yield* world.token("worker")
  const ids: Array<string> = []
  const enqueue = (payload: unknown) =>
    world.sql<{ id: string }>`
      SELECT tenure.enqueue(${queue}, ${JSON.stringify(payload)}::text::json)::text AS id`.pipe(
      Effect.map((rows) => present(rows[0]).id),
      Effect.tap(
        () =>
          world.sql`SELECT pg_notify('tenure_work', id::text) FROM tenure.queue WHERE name = ${queue}`
      )
    )
  for (const payload of payloads) ids.push(yield* enqueue(payload))
  const worker = yield* World.session(world, secret, { queues: [queue], ...options })
  return { ...world, queue, secret, ids, enqueue, worker }
})

/** Pulled and activated: it is executed. */
const executing = (worker: Effect.Success<ReturnType<typeof World.session>>) =>
  Effect.gen(function* () {
    const { items } = yield* worker.pull({ wanted: 1 })
    const item = present(items[0])
    const activated = yield* worker.activate(item)
    assert.strictEqual(activated.status, 200, activated.text)
    return item
  })

layer(Process.layer, { timeout: "60 seconds", excludeTestServices: true })((it) => {
  describe("a session", () => {
    it.effect("gets items in order, and each outcome reaches whoever waits for it, by type", () =>
      Effect.gen(function* () {
        const world = yield* Process
        const { secret } = yield* world.token("worker")
        const client = yield* Api.client({ url: world.url, token: Redacted.make(secret) })
        const [paid, declined] = yield* Charge.enqueueAll([{ orderId: "1" }, { orderId: "2" }])
        const opened = yield* client.sessions.open({
          payload: { worker: "typed", queues: ["charge"], slots: 2 }
        })
        assert.deepInclude(opened, { heartbeatMillis: 10_000, validityMillis: 30_000 })
        const params = { session: opened.id }
        const { items } = yield* client.sessions.pull({ params, payload: { wanted: 5 } })
        assert.deepStrictEqual(
          items.map(({ executionSeq, id, payload }) => ({ executionSeq, id, payload })),
          [
            { executionSeq: 1, id: present(paid), payload: { orderId: "1" } },
            { executionSeq: 1, id: present(declined), payload: { orderId: "2" } }
          ]
        )
        for (const { executionSeq, id } of items) {
          yield* client.sessions.activate({
            params: { ...params, item: id },
            payload: { executionSeq }
          })
        }
        yield* client.sessions.complete({
          params: { ...params, item: present(paid) },
          payload: { executionSeq: 1, result: { receipt: "r-1" } }
        })
        yield* client.sessions.businessError({
          params: { ...params, item: present(declined) },
          payload: { executionSeq: 1, code: "Declined", fields: { orderId: "2" } }
        })
        assert.deepStrictEqual(yield* Charge.await(present(paid)), { receipt: "r-1" })
        assert.deepStrictEqual(
          yield* Effect.flip(Charge.await(present(declined))),
          new Declined({ orderId: "2" })
        )
        // A lost answer: the same call says the same again, and changes nothing.
        const again = yield* client.sessions.complete({
          params: { ...params, item: present(paid) },
          payload: { executionSeq: 1, result: { receipt: "another" } }
        })
        assert.strictEqual(again.status, "already")
        assert.deepStrictEqual(yield* client.sessions.close({ params }), { handedBack: 0 })
        const gone = yield* Effect.flip(client.sessions.heartbeat({ params }))
        assert.strictEqual(gone._tag, "NotFound")
      }).pipe(Effect.provide(NodeHttpClient.layerUndici), (effect) =>
        Effect.flatMap(Process, ({ context }) => Effect.provideContext(effect, context))
      )
    )

    it.effect("executes a failed item again while it says that retries are left", () =>
      Effect.gen(function* () {
        const { call, ids, token, worker } = yield* scene(["a"])
        const first = yield* executing(worker)
        const retried = yield* worker.settle(first, "fail", { message: "no", retriesLeft: 1 })
        assert.deepStrictEqual(retried.body, { status: "retried" })
        const second = yield* executing(worker)
        assert.deepInclude(second, { id: first.id, failures: 1, losses: 0 })
        assert.isAbove(second.executionSeq, first.executionSeq)
        // The first execution is over, whatever it does.
        const late = yield* worker.settle(first, "complete", { result: 1 })
        assert.strictEqual(late.status, 409)
        assert.deepInclude(late.body, { _tag: "Stale", reason: "older execution_seq" })
        yield* worker.settle(second, "fail", { message: "no again", retriesLeft: 0 })
        const { secret } = yield* token("organisation")
        const seen = yield* call("GET", `/items/${ids[0]}`, { token: secret })
        assert.deepStrictEqual(seen.body, {
          id: ids[0],
          state: "failed",
          reason: "HandlerDied",
          result: { message: "no again" }
        })
        const settled = yield* worker.settle(second, "complete")
        assert.deepInclude(settled.body, { status: "already" })
      })
    )

    it.effect("waits for as long as a failure asks for", () =>
      Effect.gen(function* () {
        const { sql, worker } = yield* scene(["a"])
        const item = yield* executing(worker)
        yield* worker.settle(item, "fail", {
          message: "no",
          retriesLeft: 1,
          delayMillis: 86_400_000
        })
        assert.deepStrictEqual((yield* worker.pull()).items, [])
        assert.deepStrictEqual(
          yield* sql`SELECT due_at > clock_timestamp() + interval '23 hours' AS later
                     FROM tenure.delayed WHERE id = ${item.id}::uuid`,
          [{ later: true }]
        )
      })
    )

    it.effect("has its clocks pushed by a heartbeat, which tells what was cancelled", () =>
      Effect.gen(function* () {
        const { sql, worker } = yield* scene(["a", "b"])
        const kept = yield* executing(worker)
        const doomed = yield* executing(worker)
        const expiry = sql<{ at: Date; session: Date }>`
        SELECT l.expires_at AS at, s.expires_at AS session
          FROM tenure.capacity_lease l JOIN tenure.session s ON s.id = l.session
         WHERE l.item_id = ${kept.id}::uuid`.pipe(Effect.map((rows) => present(rows[0])))
        const before = yield* expiry
        yield* sql`SELECT tenure.cancel(${doomed.id}::uuid)`
        const beat = yield* worker.heartbeat
        assert.deepStrictEqual(beat.body["cancelled"], [doomed.id])
        const after = yield* expiry
        assert.isAbove(after.at.getTime(), before.at.getTime())
        assert.isAbove(after.session.getTime(), before.session.getTime())
        const ended = yield* worker.settle(doomed, "fail", { message: "told to", retriesLeft: 3 })
        assert.deepStrictEqual(ended.body, { status: "cancelled" })
        const extended = yield* worker.settle(kept, "extend", { millis: 3_600_000 })
        assert.isAbove(Number(extended.body["expiresInMillis"]), 3_000_000)
      })
    )

    it.effect("that has not activated an item may do nothing else with it", () =>
      Effect.gen(function* () {
        const { worker } = yield* scene(["a"])
        const item = present((yield* worker.pull()).items[0])
        for (const [verb, body] of [
          ["extend", { millis: 1000 }],
          ["complete", {}],
          ["fail", { message: "no", retriesLeft: 0 }],
          ["business-error", { code: "Declined" }],
          ["checkpoint", { name: "step", value: 1 }]
        ] as const) {
          const answer = yield* worker.settle(item, verb, body)
          assert.deepStrictEqual(
            [answer.status, answer.body["reason"]],
            [409, "not activated"],
            `${verb} ${answer.text}`
          )
        }
      })
    )

    it.effect("finds at the next execution what an earlier one has stored", () =>
      Effect.gen(function* () {
        const { worker } = yield* scene(["a"])
        const first = yield* executing(worker)
        const step = { name: "pay", value: { receipt: "r-1" } }
        const written = yield* worker.settle(first, "checkpoint", step)
        assert.deepStrictEqual(written.body, { value: { receipt: "r-1" } })
        const twice = yield* worker.settle(first, "checkpoint", { name: "pay", value: "another" })
        assert.deepStrictEqual(twice.body, { value: { receipt: "r-1" } })
        yield* worker.settle(first, "fail", { message: "no", retriesLeft: 1 })
        const second = present((yield* worker.pull()).items[0])
        const { body } = yield* worker.activate(second)
        assert.deepStrictEqual(body["checkpoints"], [step])
      })
    )

    it.effect("that closes hands back what it holds, at once and without a loss", () =>
      Effect.gen(function* () {
        const { queue, secret, worker } = yield* scene(["a", "b"])
        yield* executing(worker)
        assert.lengthOf((yield* worker.pull()).items, 1)
        assert.deepStrictEqual((yield* worker.close).body, { handedBack: 2 })
        assert.deepInclude((yield* worker.pull()).body, { _tag: "NotFound" })
        const other = yield* World.session(yield* Process, secret, { queues: [queue] })
        assert.deepStrictEqual(
          (yield* other.pull()).items.map(({ losses }) => losses),
          [0, 0]
        )
      })
    )

    it.effect("never holds more items than it has slots", () =>
      Effect.gen(function* () {
        const { worker } = yield* scene(["a", "b", "c"], { slots: 2 })
        assert.lengthOf((yield* worker.pull()).items, 2)
        assert.lengthOf((yield* worker.pull()).items, 0)
      })
    )

    it.effect("gets any JSON back as it was handed in, and the trace of whoever did it", () =>
      Effect.gen(function* () {
        const payload = JSON.parse(
          `{"nul":"\\u0000","lone":"\\ud800","__proto__":{"a":[1.5e300,null,true]},"":[]}`
        ) as unknown
        const { call, token, worker } = yield* scene([])
        const { secret } = yield* token("organisation")
        const queue = `json-${queues++}`
        const traceparent = `00-${"a".repeat(32)}-${"b".repeat(16)}-01`
        const enqueued = yield* call("POST", "/items", {
          token: secret,
          headers: { traceparent },
          body: { queue, payload }
        })
        assert.strictEqual(enqueued.status, 201, enqueued.text)
        yield* worker.close
        const { secret: workers } = yield* token("worker")
        const other = yield* World.session(yield* Process, workers, { queues: [queue] })
        const item = yield* executing(other)
        assert.strictEqual(JSON.stringify(item.payload), JSON.stringify(payload))
        assert.strictEqual(item.traceparent, traceparent)
        yield* other.settle(item, "complete", { result: payload })
        const seen = yield* call("GET", `/items/${item.id}`, { token: secret })
        assert.strictEqual(JSON.stringify(seen.body["result"]), JSON.stringify(payload))
      })
    )
  })

  describe("a long poll", () => {
    it.effect("is answered by an item as soon as it is handed in, whoever does it", () =>
      Effect.gen(function* () {
        const { call, enqueue, queue, token, worker } = yield* scene()
        const { secret } = yield* token("organisation")
        const ways = [
          enqueue("elsewhere"),
          Effect.map(
            call("POST", "/items", { token: secret, body: { queue, payload: "here" } }),
            ({ body }) => String(body["id"])
          )
        ]
        for (const way of [...ways, ...ways]) {
          const polling = yield* Effect.forkChild(worker.pull(waitLong))
          // Not needed for the answer: it only makes sure that the poll waits when the item comes.
          yield* Effect.sleep("100 millis")
          const id = yield* way
          const { items } = yield* Effect.timeout(Fiber.join(polling), "50 seconds")
          assert.deepStrictEqual(
            items.map((item) => item.id),
            [id]
          )
        }
      })
    )

    it.effect("is answered with nothing when its time is over", () =>
      Effect.gen(function* () {
        const { worker } = yield* scene()
        const { items, status } = yield* worker.pull({ wanted: 1, waitMillis: 50 })
        assert.deepStrictEqual([status, items], [200, []])
      })
    )

    it.effect("of many that wait is answered one for each item, and none is left over", () =>
      Effect.gen(function* () {
        const { queue, secret, sql, worker } = yield* scene()
        const others = yield* Effect.forEach([1, 2, 3], () =>
          Effect.flatMap(Process, (world) => World.session(world, secret, { queues: [queue] }))
        )
        const polls = yield* Effect.forEach([worker, ...others], (one) =>
          Effect.forkChild(one.pull({ wanted: 1, waitMillis: 30_000 }))
        )
        yield* Effect.sleep("100 millis")
        const ids = yield* sql<{ id: string }>`
        SELECT tenure.enqueue(${queue}, to_json(n))::text AS id FROM generate_series(1, 4) n`
        // One hint for all of them.
        yield* sql`SELECT pg_notify('tenure_work', id::text) FROM tenure.queue WHERE name = ${queue}`
        const answers = yield* Effect.timeout(
          Effect.forEach(polls, (fiber) => Fiber.join(fiber)),
          "50 seconds"
        )
        assert.deepStrictEqual(
          answers.flatMap(({ items }) => items.map(({ id }) => id)).sort(),
          ids.map(({ id }) => id).sort()
        )
      })
    )

    it.effect("of a session without a free slot is answered when one is freed", () =>
      Effect.gen(function* () {
        const { ids, worker } = yield* scene(["a", "b"], { slots: 1 })
        const item = yield* executing(worker)
        const polling = yield* Effect.forkChild(worker.pull(waitLong))
        yield* Effect.sleep("100 millis")
        yield* worker.settle(item, "complete")
        const { items } = yield* Effect.timeout(Fiber.join(polling), "50 seconds")
        assert.deepStrictEqual(
          items.map(({ id }) => id),
          [ids[1]]
        )
      })
    )

    it.effect("whose client goes away takes nothing with it, and leaves the line to the next", () =>
      Effect.gen(function* () {
        const { enqueue, queue, secret, sql, worker } = yield* scene()
        const leaving = new AbortController()
        const gone = yield* Effect.forkChild(Effect.exit(worker.pull(waitLong, leaving.signal)))
        yield* Effect.sleep("100 millis")
        const other = yield* Effect.flatMap(Process, (world) =>
          World.session(world, secret, { queues: [queue] })
        )
        const staying = yield* Effect.forkChild(other.pull(waitLong))
        yield* Effect.sleep("100 millis")
        leaving.abort()
        assert.isTrue(Exit.isFailure(yield* Fiber.join(gone)))
        // Answered after the server has seen the end of that connection.
        yield* other.heartbeat
        yield* worker.heartbeat
        const id = yield* enqueue("a")
        const { items } = yield* Effect.timeout(Fiber.join(staying), "50 seconds")
        assert.deepStrictEqual(
          items.map((item) => item.id),
          [id]
        )
        assert.deepStrictEqual(
          yield* sql`SELECT FROM tenure.capacity_lease WHERE session = ${worker.id}::uuid`,
          []
        )
      })
    )

    it.effect("ends with the token that it was asked with", () =>
      Effect.gen(function* () {
        const { enqueue, queue, sql, token } = yield* scene()
        const { id, secret } = yield* token("worker")
        const world = yield* Process
        const worker = yield* World.session(world, secret, { queues: [queue] })
        const polling = yield* Effect.forkChild(worker.pull(waitLong))
        yield* Effect.sleep("100 millis")
        yield* sql`SELECT tenure.revoke_token(${id}::uuid)`
        yield* enqueue("a")
        const answer = yield* Effect.timeout(Fiber.join(polling), "50 seconds")
        assert.strictEqual(answer.status, 401)
        assert.deepStrictEqual(
          yield* sql`SELECT FROM tenure.capacity_lease WHERE session = ${worker.id}::uuid`,
          []
        )
      })
    )
  })
})

describe("a process that drains", () => {
  it.live("answers its long polls at once, and sends new ones elsewhere", () =>
    Effect.gen(function* () {
      const world = yield* World.process({ settings: { pollInterval: "1 hour" } })
      const { secret } = yield* world.token("worker")
      const worker = yield* World.session(world, secret, { queues: ["letters"] })
      const polling = yield* Effect.forkChild(worker.pull(waitLong))
      yield* Effect.sleep("100 millis")
      yield* world.executor.drain
      const { items, status } = yield* Effect.timeout(Fiber.join(polling), "50 seconds")
      assert.deepStrictEqual([status, items], [200, []])
      yield* eventually(
        "a new poll is refused",
        Effect.map(worker.pull(waitLong), ({ status }) => status === 503)
      )
      // What was begun may still be told.
      assert.strictEqual((yield* worker.heartbeat).status, 200)
    }).pipe(Effect.scoped)
  )
})
