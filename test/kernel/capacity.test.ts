/**
 * Goal: a slot is reserved, activated, kept by heartbeats and given back once; whoever comes late is
 * refused with a word of its own (rows 40, 41, 43; C1, C3, C4; I-006..I-030, I-042..I-048 for the guard, I-051, I-056,
 * I-064..I-069).
 * Method: the store's functions on sessions of two executors, with clocks that are set and not waited
 * for; races by a transaction that is held open.
 */
import { assert, layer } from "@effect/vitest"
import { Effect, Fiber } from "effect"
import * as Store from "../../src/capacity/CapacityStore.ts"
import * as C from "./capacity.ts"
import * as K from "./kernel.ts"

const rowOf = (owner: K.Sql, id: string) =>
  owner`SELECT state, execution_seq, losses, session::text AS session FROM tenure.capacity_lease
         WHERE item_id = ${id}::uuid`

const outcomeOf = (owner: K.Sql, id: string) =>
  owner`SELECT outcome, reason, result, attempt, failures, losses FROM tenure.done WHERE id = ${id}::uuid`

const millisLeft = (owner: K.Sql, session: string) =>
  Effect.map(
    owner<{ session: number; leases: ReadonlyArray<number> }>`
      SELECT extract(epoch FROM s.expires_at - tenure.clock())::float8 * 1000 AS session,
             ARRAY(SELECT extract(epoch FROM c.expires_at - tenure.clock())::float8 * 1000
                     FROM tenure.capacity_lease c WHERE c.session = s.id ORDER BY c.state) AS leases
        FROM tenure.session s WHERE s.id = ${session}::uuid`,
    K.first
  )

layer(K.Kernel.layer, { excludeTestServices: true })("a pull session", (it) => {
  it.effect("reserves, activates, keeps and settles an item, through whichever executor", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const owner = yield* K.session("owner")
      const node = yield* K.executor({ queue: "life" })
      const other = yield* K.executor({ queue: "life" })
      const id = yield* K.enqueueOne(api, "life", '{"a":1}', { key: "k", deadlineMs: 600_000 })
      const session = yield* C.open(node, { queues: ["life"], slots: 2 })
      const item = C.one((yield* Store.pull(node.sql, session, 5)).items)
      assert.deepInclude(item, {
        id,
        executionSeq: 1,
        queue: "life",
        payload: { a: 1 },
        key: "k",
        failures: 0,
        losses: 0,
        reservedForMillis: 30_000
      })
      assert.isAbove(item.deadlineInMillis ?? 0, 500_000)
      assert.deepInclude(K.first(yield* rowOf(owner, id)), { state: "reserved", session })
      assert.deepStrictEqual(yield* Store.pull(node.sql, session, 5), { refused: null, items: [] })
      for (const at of [node, other]) {
        const activated = yield* Store.activate(at.sql, session, id, 1)
        assert.strictEqual(activated.status, "active")
      }
      assert.deepInclude(K.first(yield* rowOf(owner, id)), { state: "active", execution_seq: 1 })
      assert.deepInclude(yield* Store.heartbeat(other.sql, session), { gone: false, cancelled: [] })
      assert.deepStrictEqual(yield* Store.complete(other.sql, session, id, 1, '{"b":2}'), {
        status: "settled"
      })
      assert.deepStrictEqual(yield* outcomeOf(owner, id), [
        {
          outcome: "completed",
          reason: null,
          result: { b: 2 },
          attempt: 1,
          failures: 0,
          losses: 0
        }
      ])
      assert.deepStrictEqual(yield* rowOf(owner, id), [])
      // The answer was lost, and the worker asks again: elsewhere, and after it has closed.
      assert.deepStrictEqual(yield* Store.complete(node.sql, session, id, 1, '{"b":2}'), {
        status: "already"
      })
      yield* Store.closeSession(node.sql, session)
      assert.deepStrictEqual(yield* Store.complete(node.sql, session, id, 1, '{"b":2}'), {
        status: "already"
      })
    })
  )

  it.effect("is refused with a word of its own for each thing", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const owner = yield* K.session("owner")
      const node = yield* K.executor({ queue: "refusals" })
      const session = yield* C.open(node, { queues: ["refusals"] })
      const writes = (of: string, id: string, seq: number) => ({
        activate: Store.activate(node.sql, of, id, seq),
        extend: Store.extend(node.sql, of, id, seq, 1000),
        complete: Store.complete(node.sql, of, id, seq, null),
        fail: Store.fail(node.sql, of, id, seq, { message: "no" }),
        business: Store.businessError(node.sql, of, id, seq, { code: "No" }),
        checkpoint: Store.checkpoint(node.sql, of, id, seq, { name: "s", value: "1" })
      })
      const refuses = Effect.fnUntraced(function* (
        reason: Store.StaleReason,
        of: string,
        id: string,
        seq: number,
        except: ReadonlyArray<string> = []
      ) {
        for (const [name, write] of Object.entries(writes(of, id, seq))) {
          if (except.includes(name)) continue
          assert.deepStrictEqual<unknown>(
            yield* write,
            { status: "stale", reason },
            `${name}: ${reason}`
          )
        }
      })
      const nobody = "00000000-0000-4000-8000-000000000000"
      const ids = yield* K.enqueueMany(api, "refusals", 5)
      const [done = "", cancelled = "", held = "", expired = "", reserved = ""] = ids
      yield* C.start(node, session, 4)
      yield* Store.pull(node.sql, session, 1)
      yield* refuses("unknown session", nobody, held, 1)
      yield* refuses("unknown item", session, nobody, 1)
      yield* refuses("not activated", session, reserved, 1, ["activate"])
      yield* refuses("older execution_seq", session, held, 0)
      yield* refuses("older execution_seq", session, held, 2)
      const rival = yield* C.open(node, { queues: ["refusals"] })
      yield* refuses("older execution_seq", rival, held, 1)
      yield* Store.complete(node.sql, session, done, 1, null)
      const settles = ["complete", "fail", "business"]
      yield* refuses("settled", session, done, 1, settles)
      yield* refuses("settled", session, done, 2)
      yield* api`SELECT tenure.cancel(${cancelled}::uuid)`
      assert.deepStrictEqual(
        yield* Store.fail(node.sql, session, cancelled, 1, { message: "told to stop" }),
        { status: "cancelled" }
      )
      yield* refuses("cancelled", session, cancelled, 1, settles)
      for (const [id, reason] of [
        [expired, "lease expired"],
        [reserved, "reservation expired"]
      ] as const) {
        yield* owner`UPDATE tenure.capacity_lease SET expires_at = tenure.clock() WHERE item_id = ${id}::uuid`
        yield* refuses(reason, session, id, 1)
      }
      yield* C.expire(owner, session, "session")
      yield* refuses("session expired", session, held, 1)
      assert.deepStrictEqual(yield* Store.pull(node.sql, session, 1), {
        refused: "session expired",
        items: []
      })
      assert.deepInclude(yield* Store.heartbeat(node.sql, session), {
        gone: true,
        reason: "session expired"
      })
      assert.deepStrictEqual(yield* Store.closeSession(node.sql, session), {
        refused: "session expired",
        handedBack: 0
      })
      for (const answer of [
        Effect.map(Store.pull(node.sql, nobody, 1), ({ refused }) => refused),
        Effect.map(Store.heartbeat(node.sql, nobody), ({ reason }) => reason),
        Effect.map(Store.closeSession(node.sql, nobody), ({ refused }) => refused)
      ]) {
        assert.strictEqual(yield* answer, "unknown session")
      }
    })
  )

  it.effect("a heartbeat pushes every clock but those of reservations, and revives nothing", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const owner = yield* K.session("owner")
      const node = yield* K.executor({ queue: "heartbeat" })
      yield* K.enqueueMany(api, "heartbeat", 4)
      const session = yield* C.open(node, { queues: ["heartbeat"] })
      const [dead] = yield* C.start(node, session, 3)
      yield* Store.pull(node.sql, session, 1)
      yield* owner`UPDATE tenure.session SET expires_at = tenure.clock() + interval '5 s'`
      yield* owner`UPDATE tenure.capacity_lease SET expires_at = tenure.clock() + CASE
                     WHEN item_id = ${dead?.id ?? ""}::uuid THEN interval '0' ELSE interval '5 s' END`
      assert.isAbove((yield* Store.heartbeat(node.sql, session)).expiresInMillis, 80_000)
      const left = yield* millisLeft(owner, session)
      assert.isAbove(left.session, 80_000)
      const [first = 0, second = 0, third = 0, reserved = 0] = left.leases
      assert.deepStrictEqual(
        [first, second, third].toSorted((a, b) => a - b).map((one) => one > 80_000),
        [false, true, true]
      )
      assert.isBelow(reserved, 5_000)
      assert.deepInclude(yield* Store.activate(node.sql, session, dead?.id ?? "", 1), {
        reason: "lease expired"
      })
      yield* C.expire(owner, session, "session")
      yield* Store.heartbeat(node.sql, session)
      assert.isBelow((yield* millisLeft(owner, session)).session, 0)
    })
  )

  it.effect(
    "an extension keeps one item and its session, and a heartbeat does not shorten it",
    () =>
      Effect.gen(function* () {
        const api = yield* K.session("api")
        const owner = yield* K.session("owner")
        const node = yield* K.executor({ queue: "extend" })
        yield* K.enqueueMany(api, "extend", 2)
        const session = yield* C.open(node, { queues: ["extend"] })
        const [item] = yield* C.start(node, session, 2)
        const extended = yield* Store.extend(node.sql, session, item?.id ?? "", 1, 600_000)
        assert.strictEqual(extended.status, "extended")
        yield* Store.heartbeat(node.sql, session)
        const left = yield* millisLeft(owner, session)
        assert.isAbove(left.session, 500_000)
        assert.deepStrictEqual(
          left.leases.toSorted((a, b) => a - b).map((one) => one > 500_000),
          [false, true]
        )
        yield* Store.extend(node.sql, session, item?.id ?? "", 1, 1e12)
        assert.isBelow((yield* millisLeft(owner, session)).session, 86_400_001)
      })
  )

  it.effect("a failure is tried again while retries are left; a business error is final", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const owner = yield* K.session("owner")
      const node = yield* K.executor({ queue: "fails" })
      const session = yield* C.open(node, { queues: ["fails"], version: "w1" })
      const id = yield* K.enqueueOne(api, "fails", "1")
      yield* C.start(node, session)
      assert.deepStrictEqual(
        yield* Store.fail(node.sql, session, id, 1, { message: "busy", retriesLeft: 2 }),
        { status: "retried" }
      )
      // Executors of another version do not go on with what this one has started.
      assert.deepStrictEqual(yield* K.claim(node, 1), [])
      const again = C.one(yield* C.start(node, session))
      assert.deepInclude(again, { id, executionSeq: 2, failures: 1, losses: 0 })
      yield* Store.fail(node.sql, session, id, 2, {
        message: "later",
        retriesLeft: 1,
        retryAfterMillis: 60_000
      })
      assert.strictEqual(yield* K.placeOf(owner, id), "delayed")
      yield* owner`UPDATE tenure.delayed SET due_at = tenure.clock() WHERE id = ${id}::uuid`
      yield* owner`SELECT promoted FROM tenure.promote(10)`
      yield* C.start(node, session)
      assert.deepStrictEqual(
        yield* Store.fail(node.sql, session, id, 3, { message: "x".repeat(5000), retriesLeft: 0 }),
        { status: "settled" }
      )
      assert.deepStrictEqual(yield* outcomeOf(owner, id), [
        {
          outcome: "failed",
          reason: "HandlerDied",
          result: { message: "x".repeat(1000) },
          attempt: 3,
          failures: 2,
          losses: 0
        }
      ])
      const declined = yield* K.enqueueOne(api, "fails", "2")
      yield* C.start(node, session)
      yield* Store.businessError(node.sql, session, declined, 1, {
        code: "CardDeclined",
        result: { orderId: "7" }
      })
      assert.deepInclude(K.first(yield* outcomeOf(owner, declined)), {
        outcome: "failed",
        reason: null,
        result: { _tag: "CardDeclined", orderId: "7" }
      })
    })
  )

  it.effect("an orderly close hands everything back without a loss; what comes late is stale", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const owner = yield* K.session("owner")
      const node = yield* K.executor({ queue: "close" })
      const ids = yield* K.enqueueMany(api, "close", 2)
      const [started = "", reserved = ""] = ids
      const session = yield* C.open(node, { queues: ["close"] })
      yield* C.start(node, session)
      yield* Store.pull(node.sql, session, 1)
      assert.deepStrictEqual(yield* Store.closeSession(node.sql, session), {
        refused: null,
        handedBack: 2
      })
      assert.deepStrictEqual(
        yield* owner`SELECT FROM tenure.session_credit
                                           WHERE session = ${session}::uuid`,
        []
      )
      assert.deepStrictEqual(
        yield* owner`SELECT r.id::text AS id, r.attempt, r.losses, l.version FROM tenure.ready r
                       JOIN tenure.lane l ON l.id = r.lane_id WHERE l.queue_id = ${node.queueId}::int
                      ORDER BY r.seq`,
        [
          { id: started, attempt: 1, losses: 0, version: Store.unversioned },
          { id: reserved, attempt: 1, losses: 0, version: null }
        ]
      )
      const next = yield* C.open(node, { queues: ["close"] })
      assert.deepStrictEqual(
        (yield* C.start(node, next, 2)).map((item) => [item.id, item.executionSeq]),
        [
          [started, 2],
          [reserved, 2]
        ]
      )
      assert.deepStrictEqual(yield* Store.complete(node.sql, next, started, 1, null), {
        status: "stale",
        reason: "older execution_seq"
      })
    })
  )

  it.effect("offers no more slots than it has, whoever serves it; and one suspect at a time", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const owner = yield* K.session("owner")
      const node = yield* K.executor({ queue: "slots" })
      const other = yield* K.executor({ queue: "slots" })
      yield* K.enqueueMany(api, "slots", 50)
      const session = yield* C.open(node, { queues: ["slots"], slots: 7 })
      const pulled = yield* Effect.forEach(
        [node, other],
        (at) => Effect.replicateEffect(Store.pull(at.sql, session, 3), 4),
        { concurrency: 2 }
      )
      assert.strictEqual(pulled.flat().flatMap(({ items }) => items).length, 7)
      yield* C.expire(owner, session)
      yield* owner`UPDATE tenure.capacity_lease SET state = 'active', activated_at = reserved_at`
      yield* C.sweep(node)
      const next = yield* C.open(node, { queues: ["slots"], slots: 7 })
      const losses = (yield* Store.pull(node.sql, next, 7)).items.map((item) => item.losses)
      assert.deepStrictEqual(
        losses.toSorted((a, b) => b - a),
        [1, 0, 0, 0, 0, 0, 0]
      )
      const later = yield* Store.pull(node.sql, next, 7)
      assert.deepStrictEqual(later.items, [])
    })
  )

  it.effect("takes turns among its queues, and none of another application's", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const node = yield* K.executor({ queue: "turn a", globalLimit: 100 })
      yield* K.executor({ queue: "turn b", globalLimit: 100 })
      yield* K.executor({ queue: "foreign", application: "another" })
      for (const queue of ["turn a", "turn b"]) yield* K.enqueueMany(api, queue, 60)
      const session = yield* C.open(node, { queues: ["turn b", "turn a"], slots: 100 })
      const seen = new Set<string>()
      for (let turn = 0; turn < 40; turn++) {
        for (const item of (yield* Store.pull(node.sql, session, 1)).items) seen.add(item.queue)
      }
      assert.deepStrictEqual([...seen].toSorted(), ["turn a", "turn b"])
      const both = yield* Store.pull(node.sql, session, 60)
      assert.strictEqual(new Set(both.items.map((item) => item.queue)).size, 2)
      assert.strictEqual(yield* K.stateOf(C.open(node, { queues: ["turn a", "foreign"] })), "TN011")
    })
  )
})

layer(K.Kernel.layer, { excludeTestServices: true })("the capacity sweep", (it) => {
  it.effect("frees a reservation that was not activated, without a loss and where it was", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const owner = yield* K.session("owner")
      const node = yield* K.executor({ queue: "reservation" })
      const id = yield* K.enqueueOne(api, "reservation", "1", { priority: 3, key: "k" })
      const before = yield* owner`SELECT lane_id, rank, seq, key, failures, losses, stuck
                                    FROM tenure.ready WHERE id = ${id}::uuid`
      const session = yield* C.open(node, { queues: ["reservation"] })
      yield* Store.pull(node.sql, session, 1)
      assert.deepInclude(yield* C.sweep(node, C.graceMillis), {
        reservations: 0,
        leases: 0,
        sessions: 0
      })
      yield* C.expire(owner, session, "leases")
      assert.deepInclude(yield* C.sweep(node, C.graceMillis), {
        reservations: 1,
        leases: 0,
        sessions: 0
      })
      assert.deepStrictEqual(
        yield* owner`SELECT lane_id, rank, seq, key, failures, losses, stuck
                       FROM tenure.ready WHERE id = ${id}::uuid`,
        before
      )
      assert.deepStrictEqual(yield* C.events(owner, id), [])
      assert.deepInclude(yield* Store.activate(node.sql, session, id, 1), {
        reason: "older execution_seq"
      })
      assert.deepInclude(C.one((yield* Store.pull(node.sql, session, 1)).items), {
        id,
        executionSeq: 2,
        losses: 0
      })
    })
  )

  it.effect("takes a lease back, visible in its grace, and the late worker is refused", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const owner = yield* K.session("owner")
      const node = yield* K.executor({ queue: "lease" })
      const survivor = yield* K.executor({ queue: "lease" })
      const id = yield* K.enqueueOne(api, "lease", "1", { key: "k", priority: 2 })
      const session = yield* C.open(node, { queues: ["lease"], worker: "python 1" })
      yield* C.start(node, session)
      const shown = (yield* Store.leases(owner, 100)).filter((one) => one.item_id === id)
      assert.lengthOf(shown, 1)
      assert.deepInclude(K.first(shown), { worker: "python 1", state: "active", session })
      // The node that served it dies as well: that is no separate case.
      yield* K.loseExecutor(owner, node.id)
      assert.strictEqual(yield* K.placeOf(owner, id), "leased")
      yield* C.expire(owner, session)
      const swept = yield* C.sweep(survivor, C.graceMillis)
      assert.deepStrictEqual(swept, {
        reservations: 0,
        leases: 1,
        recovered: 1,
        cancelled: 0,
        sessions: 1,
        exhausted: [],
        settled: []
      })
      assert.deepStrictEqual(yield* C.events(owner, id), [
        { event: "capacity.lease.expired", seq: 1 },
        { event: "capacity.segment.recovered", seq: 2 }
      ])
      const queued = (yield* Store.queued(owner, 100)).find((one) => one.item_id === id)
      assert.deepInclude(queued, { item_id: id, queue: "lease", execution_seq: 1, losses: 1 })
      assert.approximately(queued?.eligible_in_ms ?? 0, C.graceMillis, 20_000)
      assert.deepStrictEqual(
        yield* owner`SELECT execution_seq, eligible_at > tenure.clock() AS waits, losses, stuck, key
                       FROM tenure.dispatch_queue WHERE item_id = ${id}::uuid`,
        [{ execution_seq: 1, waits: true, losses: 1, stuck: 1, key: "k" }]
      )
      const next = yield* C.open(survivor, { queues: ["lease"] })
      assert.deepStrictEqual((yield* Store.pull(survivor.sql, next, 1)).items, [], "in its grace")
      for (const answer of [
        yield* Store.activate(survivor.sql, session, id, 1),
        yield* Store.complete(survivor.sql, session, id, 1, null)
      ]) {
        assert.deepStrictEqual<unknown>(answer, { status: "stale", reason: "unknown session" })
      }
      yield* owner`UPDATE tenure.delayed SET due_at = tenure.clock() WHERE id = ${id}::uuid`
      yield* owner`SELECT promoted FROM tenure.promote(10)`
      assert.deepInclude(C.one(yield* C.start(survivor, next)), { id, executionSeq: 2, losses: 1 })
      assert.deepStrictEqual<unknown>(yield* Store.complete(survivor.sql, next, id, 1, null), {
        status: "stale",
        reason: "older execution_seq"
      })
      assert.deepStrictEqual<unknown>(yield* Store.complete(survivor.sql, next, id, 2, null), {
        status: "settled"
      })
    })
  )

  it.effect("deletes a session and its credits alone; its leases go by their own clock", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const owner = yield* K.session("owner")
      const node = yield* K.executor({ queue: "sessions" })
      const id = yield* K.enqueueOne(api, "sessions", "1")
      const session = yield* C.open(node, { queues: ["sessions"], slots: 4 })
      yield* C.start(node, session)
      const [shown] = (yield* Store.sessions(owner, 10)).filter((one) => one.id === session)
      assert.deepInclude(shown, {
        queues: ["sessions"],
        slots: 4,
        active: 1,
        reserved: 0,
        version: Store.unversioned
      })
      yield* C.expire(owner, session, "session")
      assert.deepInclude(yield* C.sweep(node), { sessions: 1, leases: 0 })
      assert.strictEqual(yield* K.placeOf(owner, id), "leased")
      assert.deepStrictEqual(
        yield* owner`SELECT FROM tenure.session_credit WHERE session = ${session}::uuid`,
        []
      )
      yield* C.expire(owner, session, "leases")
      assert.deepInclude(yield* C.sweep(node), { sessions: 0, leases: 1, recovered: 1 })
      assert.strictEqual(yield* K.placeOf(owner, id), "ready")
    })
  )

  it.effect("two at once take back once, and none waits for the other", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const owner = yield* K.session("owner")
      const node = yield* K.executor({ queue: "two" })
      const other = yield* K.executor({ queue: "two" })
      const ids = yield* K.enqueueMany(api, "two", 20)
      const session = yield* C.open(node, { queues: ["two"], slots: 20 })
      yield* C.start(node, session, 20)
      yield* C.expire(owner, session)
      yield* node.sql`BEGIN`
      assert.deepInclude(yield* C.sweep(node), { leases: 20, sessions: 1 })
      assert.deepInclude(yield* C.sweep(other), { leases: 0, sessions: 0 })
      yield* node.sql`ROLLBACK`
      // With it went the events: what is written down is what happened.
      assert.deepStrictEqual(yield* C.events(owner, ids[0] ?? ""), [])
      const both = yield* Effect.forEach([node, other], (at) => C.sweep(at), { concurrency: 2 })
      assert.strictEqual(
        both.reduce((sum, { leases }) => sum + leases, 0),
        20
      )
      assert.strictEqual(
        both.reduce((sum, { sessions }) => sum + sessions, 0),
        1
      )
      for (const id of ids) assert.lengthOf(yield* C.events(owner, id), 2)
      assert.deepStrictEqual(
        new Set(Object.values(yield* K.placesOf(owner, ids))),
        new Set(["ready"])
      )
    })
  )

  it.effect("leaves what a heartbeat pushes forward while it waits for nobody", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const owner = yield* K.session("owner")
      const node = yield* K.executor({ queue: "race" })
      const other = yield* K.executor({ queue: "race" })
      yield* K.enqueueOne(api, "race", "1")
      const session = yield* C.open(node, { queues: ["race"] })
      const item = C.one(yield* C.start(node, session))
      // The sweep has the lease; the completion waits for it, and then finds it gone.
      yield* C.expire(owner, session, "leases")
      yield* other.sql`BEGIN`
      assert.deepInclude(yield* C.sweep(other), { leases: 1 })
      const pid = yield* K.pidOf(node.sql)
      const late = yield* Effect.forkChild(Store.complete(node.sql, session, item.id, 1, null))
      yield* K.whenBlocked(owner, pid)
      yield* other.sql`COMMIT`
      assert.deepStrictEqual<unknown>(yield* Fiber.join(late), {
        status: "stale",
        reason: "older execution_seq"
      })
      // The completion has the lease: the sweep passes it over.
      yield* C.start(node, session)
      yield* node.sql`BEGIN`
      yield* Store.complete(node.sql, session, item.id, 2, null)
      assert.deepInclude(yield* C.sweep(other), { leases: 0 })
      yield* node.sql`COMMIT`
      assert.strictEqual(yield* K.placeOf(owner, item.id), "completed")
    })
  )

  it.effect(
    "ends what ten holders in a row were lost with; a checkpoint begins the count anew",
    () =>
      Effect.gen(function* () {
        const api = yield* K.session("api")
        const owner = yield* K.session("owner")
        const node = yield* K.executor({
          queue: "exhausted",
          recoveryLimit: "consecutive",
          recoveryMax: 10
        })
        const id = yield* K.enqueueOne(api, "exhausted", "1")
        let exhausted: ReadonlyArray<string> = []
        let lost = 0
        while (exhausted.length === 0 && lost < 30) {
          const session = yield* C.open(node, { queues: ["exhausted"] })
          const item = C.one(yield* C.start(node, session))
          lost++
          assert.strictEqual(item.executionSeq, lost)
          if (lost === 5) {
            assert.deepStrictEqual<unknown>(
              yield* Store.checkpoint(node.sql, session, id, lost, { name: "s", value: "7" }),
              { status: "written", value: 7 }
            )
            assert.deepStrictEqual<unknown>(
              yield* Store.checkpoint(node.sql, session, id, lost, { name: "s", value: "8" }),
              { status: "exists", value: 7 }
            )
          }
          yield* C.expire(owner, session)
          exhausted = (yield* C.sweep(node)).exhausted
        }
        assert.deepStrictEqual([lost, exhausted], [15, [id]])
        assert.deepStrictEqual(yield* outcomeOf(owner, id), [
          {
            outcome: "failed",
            reason: "EXECUTION_RECOVERY_EXHAUSTED",
            result: null,
            attempt: 15,
            failures: 0,
            losses: 15
          }
        ])
        assert.deepStrictEqual(
          yield* owner`SELECT reason, executions FROM tenure.quarantine WHERE item_id = ${id}::uuid`,
          [{ reason: "EXECUTION_RECOVERY_EXHAUSTED", executions: 15 }]
        )
        const events = yield* C.events(owner, id)
        assert.deepStrictEqual(
          [events.length, events.at(-1)],
          [15 + 14, { event: "capacity.lease.expired", seq: 15 }]
        )
      })
  )

  it.effect("a queue that only sessions run gets the limit that its first one names", () =>
    Effect.gen(function* () {
      const node = yield* K.executor({ queue: "already run" })
      const recovery = { limit: "consecutive", max: 10 } as const
      yield* C.open(node, { queues: ["pulled only", "already run"], recovery })
      const owner = yield* K.session("owner")
      assert.deepStrictEqual(
        yield* owner`SELECT name, application_name, recovery_limit, recovery_max FROM tenure.queue
                      WHERE name IN ('pulled only', 'already run') ORDER BY name`,
        [
          {
            name: "already run",
            application_name: "app",
            recovery_limit: "executions",
            recovery_max: 4
          },
          {
            name: "pulled only",
            application_name: "app",
            recovery_limit: "consecutive",
            recovery_max: 10
          }
        ]
      )
    })
  )

  it.effect("is of one application, and what it recorded nobody who works can remove", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const owner = yield* K.session("owner")
      const node = yield* K.executor({ queue: "mine" })
      const stranger = yield* K.executor({ queue: "theirs", application: "another" })
      const id = yield* K.enqueueOne(api, "mine", "1")
      const session = yield* C.open(node, { queues: ["mine"] })
      yield* C.start(node, session)
      yield* C.expire(owner, session)
      assert.deepInclude(
        yield* Store.sweep(stranger.sql, {
          application: "another",
          backoffMillis: 0,
          graceMillis: 0,
          cancelGraceMillis: 0,
          rowsMax: 100
        }),
        { leases: 0, sessions: 0 }
      )
      assert.deepInclude(yield* C.sweep(node), { leases: 1, sessions: 1 })
      assert.strictEqual(yield* K.stateOf(node.sql`DELETE FROM tenure.audit_event`), "42501")
      assert.strictEqual(yield* Store.trimAudit(node.sql, 60_000, 100), 0)
      assert.lengthOf(yield* C.events(owner, id), 2)
      yield* owner`UPDATE tenure.audit_event SET at = at - interval '91 days'`
      yield* owner`SELECT tenure.audit('queue.paused', NULL, ${node.queueId}::int, '{"by": "me"}')`
      const trimmed = yield* Store.trimAudit(node.sql, 90 * 86_400_000, 100)
      assert.isAtLeast(trimmed, 2)
      assert.deepStrictEqual(yield* C.events(owner, id), [])
    })
  )
})

layer(K.Kernel.layer, { excludeTestServices: true })("leased work", (it) => {
  it.effect("is cancelled before it starts, by its worker, or after its worker was told", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const owner = yield* K.session("owner")
      const node = yield* K.executor({ queue: "cancel" })
      const ids = yield* K.enqueueMany(api, "cancel", 4)
      const [deaf = "", prompt = "", reserved = "", handedBack = ""] = ids
      const session = yield* C.open(node, { queues: ["cancel"] })
      yield* C.start(node, session, 2)
      yield* Store.pull(node.sql, session, 1)
      const brief = yield* C.open(node, { queues: ["cancel"] })
      yield* Store.pull(node.sql, brief, 1)
      for (const id of ids) {
        assert.deepStrictEqual(yield* api`SELECT tenure.cancel(${id}::uuid) AS answer`, [
          { answer: "requested" }
        ])
      }
      assert.deepStrictEqual<unknown>(yield* Store.activate(node.sql, session, reserved, 1), {
        status: "stale",
        reason: "cancelled"
      })
      assert.deepStrictEqual(
        (yield* Store.heartbeat(node.sql, session)).cancelled.toSorted(),
        [deaf, prompt].toSorted()
      )
      yield* Store.fail(node.sql, session, prompt, 1, { message: "stopped", retriesLeft: 3 })
      yield* Store.closeSession(node.sql, brief)
      assert.deepStrictEqual((yield* Store.pull(node.sql, session, 5)).items, [])
      assert.deepStrictEqual((yield* C.sweep(node)).settled, [], "it was told just now")
      assert.strictEqual(yield* K.placeOf(owner, deaf), "leased")
      yield* owner`UPDATE tenure.cancel_request SET at = at - interval '91 seconds'`
      assert.deepStrictEqual((yield* C.sweep(node)).settled, [deaf])
      assert.deepStrictEqual(
        yield* K.placesOf(owner, ids),
        Object.fromEntries(
          [deaf, prompt, reserved, handedBack].map((id) => [id, "cancelled"] as const)
        )
      )
      assert.deepStrictEqual(yield* owner`SELECT FROM tenure.cancel_request`, [])
      assert.deepStrictEqual(
        yield* owner`SELECT DISTINCT losses FROM tenure.done
                                           WHERE id = ANY(${K.array(ids)}::text::uuid[])`,
        [{ losses: 0 }]
      )
    })
  )

  it.effect("completes when it was faster than the cancellation", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const owner = yield* K.session("owner")
      const node = yield* K.executor({ queue: "faster" })
      const id = yield* K.enqueueOne(api, "faster", "1")
      const session = yield* C.open(node, { queues: ["faster"] })
      yield* C.start(node, session)
      yield* api`SELECT tenure.cancel(${id}::uuid)`
      assert.deepStrictEqual<unknown>(yield* Store.complete(node.sql, session, id, 1, "1"), {
        status: "settled"
      })
      assert.strictEqual(yield* K.placeOf(owner, id), "completed")
    })
  )

  it.effect("fails when its deadline passes: while it runs, and when it is pulled too late", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const owner = yield* K.session("owner")
      const node = yield* K.executor({ queue: "deadline" })
      const running = yield* K.enqueueOne(api, "deadline", "1", { deadlineMs: 600_000 })
      const session = yield* C.open(node, { queues: ["deadline"] })
      yield* C.start(node, session)
      yield* owner`UPDATE tenure.item SET deadline_at = tenure.clock() WHERE id = ${running}::uuid`
      yield* owner`UPDATE tenure.deadline SET due_at = tenure.clock() WHERE id = ${running}::uuid`
      const late = yield* K.enqueueOne(api, "deadline", "2", { deadlineMs: -1 })
      assert.deepStrictEqual((yield* Store.pull(node.sql, session, 1)).items, [])
      yield* node.sql`SELECT expired FROM tenure.expire_deadlines(100)`
      for (const id of [running, late]) {
        assert.deepInclude(K.first(yield* outcomeOf(owner, id)), {
          outcome: "failed",
          reason: "DeadlineExceeded",
          attempt: 1,
          losses: 0
        })
      }
      assert.deepStrictEqual<unknown>(yield* Store.complete(node.sql, session, running, 1, null), {
        status: "stale",
        reason: "settled"
      })
      assert.deepStrictEqual(
        yield* owner`SELECT FROM tenure.deadline WHERE id = ${running}::uuid`,
        []
      )
    })
  )

  it.effect(
    "is owned by the capacity layer from its hand-in to its outcome, the grace included",
    () =>
      Effect.gen(function* () {
        const api = yield* K.session("api")
        const owner = yield* K.session("owner")
        const node = yield* K.executor({ queue: "owned" })
        const id = yield* K.enqueueOne(api, "owned", "1")
        const owned = Effect.map(
          owner<{ owned: boolean }>`SELECT tenure.capacity_owns(${id}::uuid) AS owned`,
          (rows) => K.first(rows).owned
        )
        const seen: Array<readonly [string, boolean]> = []
        const look = Effect.gen(function* () {
          seen.push([yield* K.placeOf(owner, id), yield* owned])
        })
        yield* look
        const session = yield* C.open(node, { queues: ["owned"] })
        yield* Store.pull(node.sql, session, 1)
        yield* look
        yield* Store.activate(node.sql, session, id, 1)
        yield* look
        yield* C.expire(owner, session)
        yield* C.sweep(node, C.graceMillis)
        yield* look
        yield* owner`UPDATE tenure.delayed SET due_at = tenure.clock() WHERE id = ${id}::uuid`
        yield* owner`SELECT promoted FROM tenure.promote(10)`
        yield* look
        const next = yield* C.open(node, { queues: ["owned"] })
        yield* C.start(node, next)
        yield* Store.complete(node.sql, next, id, 2, null)
        yield* look
        assert.deepStrictEqual(seen, [
          ["ready", true],
          ["leased", true],
          ["leased", true],
          ["delayed", true],
          ["ready", true],
          ["completed", false]
        ])
      })
  )

  it.effect("keeps its bucket, as all that lives does", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const owner = yield* K.session("owner")
      const node = yield* K.executor({ queue: "bucket" })
      const id = yield* K.enqueueOne(api, "bucket", "1")
      const session = yield* C.open(node, { queues: ["bucket"] })
      yield* C.start(node, session)
      const over = Effect.map(
        owner<{ over: boolean }>`
          SELECT tenure.kept_in_range(${id}::uuid, 'ffffffff-ffff-ffff-ffff-ffffffffffff',
                                      tenure.clock() + interval '1 day', 10) = '{}' AS over`,
        (rows) => K.first(rows).over
      )
      assert.isFalse(yield* over)
      yield* Store.complete(node.sql, session, id, 1, null)
      assert.isTrue(yield* over)
    })
  )

  it.effect("has its queue's slot, and its key's, against executors and other sessions", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      for (const [queue, limits] of [
        ["one slot", { globalLimit: 1 }],
        ["one for each key", { perKeyLimit: 1 }]
      ] as const) {
        const node = yield* K.executor({ queue, ...limits })
        yield* K.enqueueMany(api, queue, 4, { keys: ["k", "k", "k", "k"] })
        const session = yield* C.open(node, { queues: [queue] })
        const other = yield* C.open(node, { queues: [queue] })
        const [held] = yield* C.start(node, session, 4)
        assert.deepStrictEqual(yield* K.claim(node, 4), [], queue)
        assert.deepStrictEqual((yield* Store.pull(node.sql, other, 4)).items, [], queue)
        yield* Store.complete(node.sql, session, held?.id ?? "", 1, null)
        const [claimed] = yield* K.claim(node, 4)
        assert.deepStrictEqual((yield* Store.pull(node.sql, other, 4)).items, [], queue)
        yield* K.settle(node, [{ id: claimed?.id ?? "", attempt: 1 }])
        assert.lengthOf((yield* Store.pull(node.sql, other, 4)).items, 1, queue)
      }
    })
  )

  it.effect("counts against what the monitor takes for room", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const node = yield* K.executor({ queue: "full", globalLimit: 1, perKeyLimit: 1 })
      yield* K.enqueueMany(api, "full", 2, { keys: ["k", "k"] })
      const facts = Effect.map(
        node.sql<{ is_full: boolean; has_fresh: boolean }>`
          SELECT is_full, has_fresh FROM tenure.observe_queues(
            '{v1}', ARRAY[${node.queueId}::int], '{}', '{}', '{}')`,
        K.first
      )
      assert.deepInclude(yield* facts, { is_full: false, has_fresh: true })
      const session = yield* C.open(node, { queues: ["full"] })
      yield* C.start(node, session)
      assert.deepInclude(yield* facts, { is_full: true, has_fresh: false })
    })
  )
})
