/**
 * Goal: an item that waits is in one place, is woken once, not before its time and for what it waits
 * for, whoever tells it, ends it or dies meanwhile; and the two recovery loops never have the same row
 * (I6, I7, I8, I13; I-031..I-048, I-061, I-063).
 * Method: the functions of 0012 over named sessions; what two transactions have not seen of each other
 * is made by leaving one of them open.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect } from "effect"
import { randomInt } from "node:crypto"
import { seeded } from "../model/Seeded.ts"
import { freshDatabase } from "../support/Postgres.ts"
import * as K from "./kernel.ts"

const setting = Effect.gen(function* () {
  const database = yield* freshDatabase
  return {
    database,
    api: yield* K.sessionOf(database, "api"),
    owner: yield* K.sessionOf(database, "owner"),
    runner: yield* K.executorOf(database, { queue: "q" }),
    other: yield* K.executorOf(database, { queue: "q" })
  }
})

const hour = 3_600_000

interface Wait {
  readonly id: string
  readonly attempt: number
  readonly name?: string
  readonly kind?: "sleep" | "event" | "invoke"
  readonly ms?: number
}

interface Answer {
  readonly status: string
  readonly value: unknown
  readonly due_in_ms: number | null
}

const ask = (runner: K.Executor, waits: ReadonlyArray<Wait>) =>
  runner.sql<Answer>`
    SELECT status, value, due_in_ms
      FROM tenure.ask_waits(${K.array(waits.map((one) => one.id))}::text::uuid[],
             ${K.array(waits.map((one) => one.attempt))}::text::int[],
             ${K.array(waits.map((one) => one.name ?? "w"))}::text::text[],
             ${K.array(waits.map((one) => one.kind ?? "sleep"))}::text::text[],
             ${K.array(waits.map((one) => one.ms ?? null))}::text::float8[])
     ORDER BY place`

const askOne = (runner: K.Executor, wait: Wait) => Effect.map(ask(runner, [wait]), K.first)

const park = (
  runner: K.Executor,
  items: ReadonlyArray<Wait & { readonly names?: ReadonlyArray<string> }>
) =>
  runner.sql<K.Answer>`
    SELECT id::text AS id, attempt, status
      FROM tenure.park(${K.array(items.map((one) => one.id))}::text::uuid[],
             ${K.array(items.map((one) => one.attempt))}::text::int[],
             ${K.array(items.map(() => runner.startedLane))}::text::int[],
             ${K.array(items.map((one) => JSON.stringify(one.names ?? [one.name ?? "w"])))}::text::text[])`

const signal = (sql: K.Sql, id: string, name = "w", value = "null") =>
  Effect.map(
    sql<{
      answer: string
    }>`SELECT tenure.signal(${id}::uuid, ${name}, ${value}::text::json) AS answer`,
    (rows) => K.first(rows).answer
  )

const wake = (runner: K.Executor, max = 100) =>
  Effect.map(
    runner.sql<{ ids: ReadonlyArray<string>; next_due_ms: number | null }>`
      SELECT ids::text[] AS ids, next_due_ms FROM tenure.claim_waits(${runner.id}::uuid, ${max}::int)`,
    K.first
  )

const dispatch = (runner: K.Executor, ids: ReadonlyArray<string>) =>
  Effect.map(
    runner.sql<{ dispatched: number; queue_ids: ReadonlyArray<number> }>`
      SELECT dispatched, queue_ids FROM tenure.dispatch_waits(${runner.id}::uuid, ${K.array(ids)}::text::uuid[])`,
    K.first
  )

const sweep = (runner: K.Executor, threshold: string) =>
  Effect.map(
    runner.sql<{ swept: number }>`
      SELECT tenure.sweep_stale_claims(${threshold}::text::interval, 100) AS swept`,
    (rows) => K.first(rows).swept
  )

const cancel = (sql: K.Sql, id: string) =>
  Effect.map(
    sql<{ answer: string }>`SELECT tenure.cancel(${id}::uuid) AS answer`,
    (rows) => K.first(rows).answer
  )

interface Parked {
  readonly state: string
  readonly pre_claim_status: string | null
  readonly claimed_by: string | null
  readonly claimed: boolean
}

const parkedRow = (owner: K.Sql, id: string) =>
  Effect.map(
    owner<Parked>`
      SELECT state, pre_claim_status, claimed_by::text AS claimed_by, claimed_at IS NOT NULL AS claimed
        FROM tenure.parked WHERE id = ${id}::uuid`,
    K.first
  )

/** As if the time had passed. */
const pass = (owner: K.Sql) =>
  Effect.andThen(
    owner`UPDATE tenure.wait SET due_at = tenure.clock() WHERE due_at IS NOT NULL`,
    owner`UPDATE tenure.parked SET due_at = tenure.clock() WHERE due_at IS NOT NULL`
  )

/** An item of `q` that runs as its first attempt. */
const running = Effect.fnUntraced(function* (
  api: K.Sql,
  runner: K.Executor,
  options: Readonly<Record<string, unknown>> = {}
) {
  yield* K.enqueueOne(api, "q", "1", options)
  return K.first(yield* K.claim(runner, 1))
})

/** One that is parked for the wait `w`. */
const parked = Effect.fnUntraced(function* (
  api: K.Sql,
  runner: K.Executor,
  wait: Pick<Wait, "kind" | "ms">,
  options: Readonly<Record<string, unknown>> = {}
) {
  const { attempt, id } = yield* running(api, runner, options)
  yield* askOne(runner, { id, attempt, ...wait })
  assert.deepStrictEqual(yield* park(runner, [{ id, attempt }]), [])
  return id
})

describe("a wait", () => {
  it.live("gives the item back when its time is over and not before, in the place it had", () =>
    Effect.gen(function* () {
      const { api, owner, runner, other } = yield* setting
      const item = yield* running(api, runner, { priority: 7 })
      const wait = { id: item.id, attempt: 1, ms: hour }
      const begun = yield* askOne(runner, wait)
      assert.strictEqual(begun.status, "pending")
      assert.isAbove(begun.due_in_ms ?? 0, hour - 60_000)
      // Whatever asks again, the first time stays.
      assert.isAbove((yield* askOne(runner, { ...wait, ms: 1 })).due_in_ms ?? 0, hour - 60_000)
      yield* park(runner, [wait])
      assert.strictEqual(yield* K.placeOf(owner, item.id), "parked")
      // The look of every second, and it writes nothing.
      yield* other.sql`BEGIN`
      const early = yield* wake(other)
      const [written] = yield* other.sql<{ transaction: string | null }>`
        SELECT pg_current_xact_id_if_assigned()::text AS transaction`
      yield* other.sql`ROLLBACK`
      assert.isNull(written?.transaction)
      assert.deepStrictEqual(early.ids, [])
      assert.isAbove(early.next_due_ms ?? 0, hour - 60_000)
      yield* pass(owner)
      assert.deepStrictEqual((yield* wake(other)).ids, [item.id])
      assert.deepStrictEqual(yield* parkedRow(owner, item.id), {
        state: "waking",
        pre_claim_status: "sleeping",
        claimed_by: other.id,
        claimed: true
      })
      assert.deepStrictEqual((yield* wake(runner)).ids, [], "it is taken")
      assert.strictEqual((yield* dispatch(runner, [item.id])).dispatched, 0, "by somebody else")
      assert.deepStrictEqual(yield* dispatch(other, [item.id]), {
        dispatched: 1,
        queue_ids: [runner.queueId]
      })
      assert.strictEqual((yield* dispatch(other, [item.id])).dispatched, 0, "a late one")
      const again = K.first(yield* K.claim(runner, 1))
      assert.deepStrictEqual(
        [again.id, again.attempt, again.rank, again.seq, again.failures, again.losses],
        [item.id, 2, item.rank, item.seq, 0, 0]
      )
      // Decided once: neither the time nor an event changes it any more.
      const over = { status: "over", value: null, due_in_ms: null }
      assert.deepStrictEqual(yield* askOne(runner, { ...wait, attempt: 2 }), over)
      assert.strictEqual(yield* signal(api, item.id), "already")
      assert.deepStrictEqual(yield* askOne(runner, { ...wait, attempt: 2, ms: hour }), over)
    })
  )

  it.live("that is asked for early again is not over early", () =>
    Effect.gen(function* () {
      const { api, owner, runner } = yield* setting
      const id = yield* parked(api, runner, { ms: hour })
      // The parked row alone: a clock that was set back, or a wake for something else.
      yield* owner`UPDATE tenure.parked SET due_at = tenure.clock()`
      yield* dispatch(runner, (yield* wake(runner)).ids)
      yield* K.claim(runner, 1)
      assert.strictEqual((yield* askOne(runner, { id, attempt: 2 })).status, "pending")
      yield* park(runner, [{ id, attempt: 2 }])
      assert.isAbove((yield* wake(runner)).next_due_ms ?? 0, hour - 60_000)
    })
  )

  it.live("of an attempt that is over begins, parks and invokes nothing", () =>
    Effect.gen(function* () {
      const { api, owner, runner, other } = yield* setting
      const { id } = yield* running(api, runner)
      for (const [who, attempt] of [
        [runner, 2],
        [other, 1]
      ] as const) {
        assert.strictEqual((yield* askOne(who, { id, attempt, ms: 1 })).status, "stale")
        assert.deepStrictEqual(yield* park(who, [{ id, attempt }]), [
          { id, attempt, status: "stale" }
        ])
        const [invoked] = yield* who.sql`
          SELECT status FROM tenure.invoke(${id}::uuid, ${attempt}::int, 'w', NULL, 'q', '1', 0, NULL, NULL)`
        assert.deepStrictEqual(invoked, { status: "stale" })
      }
      assert.deepStrictEqual(yield* owner`SELECT FROM tenure.wait`, [])
      assert.strictEqual(yield* K.placeOf(owner, id), "claimed")
    })
  )

  it.live("whose row somebody holds is answered busy, and holds up no other", () =>
    Effect.gen(function* () {
      const { api, owner, runner } = yield* setting
      const held = yield* running(api, runner)
      const free = yield* running(api, runner)
      yield* ask(
        runner,
        [held, free].map(({ id }) => ({ id, attempt: 1, ms: hour }))
      )
      yield* owner`BEGIN`
      yield* owner`SELECT FROM tenure.claimed WHERE id = ${held.id}::uuid FOR UPDATE`
      assert.deepStrictEqual(
        yield* park(runner, [
          { id: held.id, attempt: 1 },
          { id: free.id, attempt: 1 }
        ]),
        [{ id: held.id, attempt: 1, status: "busy" }]
      )
      yield* owner`ROLLBACK`
      assert.deepStrictEqual(yield* park(runner, [{ id: held.id, attempt: 1 }]), [])
    })
  )

  it.live("forgets the losses of its item, and leaves its failures", () =>
    Effect.gen(function* () {
      const { api, database, owner, runner } = yield* setting
      const lost = yield* K.executorOf(database, { queue: "q" })
      const { id } = yield* running(api, lost)
      yield* K.settle(lost, [{ id, attempt: 1, outcome: "retry" }])
      yield* K.claim(lost, 1)
      yield* K.loseExecutor(owner, lost.id)
      assert.strictEqual(K.first(yield* K.claim(runner, 1)).losses, 1)
      yield* askOne(runner, { id, attempt: 3, ms: 0 })
      yield* askOne(runner, { id, attempt: 3, name: "later", ms: hour })
      yield* park(runner, [{ id, attempt: 3, name: "later" }])
      yield* pass(owner)
      yield* dispatch(runner, (yield* wake(runner)).ids)
      const again = K.first(yield* K.claim(runner, 1, { suspects: 0 }))
      assert.deepStrictEqual([again.id, again.losses, again.failures], [id, 0, 1])
    })
  )

  it.live("for several things parks once and wakes for the first of them", () =>
    Effect.gen(function* () {
      const { api, owner, runner } = yield* setting
      const { id } = yield* running(api, runner)
      yield* ask(runner, [
        { id, attempt: 1, name: "a", kind: "event" },
        { id, attempt: 1, name: "b", ms: hour },
        { id, attempt: 1, name: "c", kind: "event", ms: 2 * hour }
      ])
      yield* park(runner, [{ id, attempt: 1, names: ["a", "b", "c"] }])
      assert.strictEqual((yield* parkedRow(owner, id)).state, "waiting")
      const due = (yield* wake(runner)).next_due_ms ?? 0
      assert.isAtMost(due, hour)
      yield* signal(api, id, "c", "7")
      assert.deepStrictEqual((yield* wake(runner)).ids, [id])
      yield* dispatch(runner, [id])
      yield* K.claim(runner, 1)
      const answers = yield* ask(runner, [
        { id, attempt: 2, name: "a", kind: "event" },
        { id, attempt: 2, name: "b" },
        { id, attempt: 2, name: "c", kind: "event" }
      ])
      assert.deepStrictEqual(
        answers.map(({ status, value }) => [status, value]),
        [
          ["pending", null],
          ["pending", null],
          ["over", { value: 7 }]
        ]
      )
    })
  )
})

describe("an event", () => {
  it.live("that comes before its wait is kept, and the first of a name stays", () =>
    Effect.gen(function* () {
      const { api, owner, runner } = yield* setting
      const id = yield* K.enqueueOne(api, "q", "1")
      assert.strictEqual(yield* signal(api, id, "w", `{"n": "\\u0000\\ud800"}`), "sent")
      assert.strictEqual(yield* signal(api, id, "w", "2"), "already")
      yield* K.claim(runner, 1)
      assert.deepStrictEqual(yield* askOne(runner, { id, attempt: 1, kind: "event" }), {
        status: "over",
        value: { value: { n: "\u0000\ud800" } },
        due_in_ms: null
      })
      assert.strictEqual(yield* signal(api, id, "w", "3"), "already", "it was taken")
      assert.deepStrictEqual(yield* owner`SELECT FROM tenure.signal`, [])
      assert.deepStrictEqual(yield* owner`SELECT FROM tenure.wait`, [])
      yield* K.settle(runner, [{ id, attempt: 1 }])
      assert.strictEqual(yield* signal(api, id, "x"), "completed")
      assert.strictEqual(yield* signal(api, crypto.randomUUID()), "unknown")
    })
  )

  it.live("wakes the item that waits for it, and no other wait", () =>
    Effect.gen(function* () {
      const { api, owner, runner } = yield* setting
      const id = yield* parked(api, runner, { kind: "event" })
      yield* signal(api, id, "something else")
      assert.deepStrictEqual(yield* wake(runner), { ids: [], next_due_ms: null })
      assert.deepStrictEqual(yield* owner`SELECT FROM tenure.wake`, [], "told and done with")
      yield* signal(api, id)
      assert.deepStrictEqual((yield* wake(runner)).ids, [id])
      assert.deepStrictEqual(yield* owner`SELECT FROM tenure.wake`, [])
    })
  )

  it.live("that comes between the question and the park makes the item due at once", () =>
    Effect.gen(function* () {
      const { api, runner } = yield* setting
      const { id } = yield* running(api, runner)
      yield* askOne(runner, { id, attempt: 1, kind: "event" })
      yield* signal(api, id)
      assert.deepStrictEqual(yield* park(runner, [{ id, attempt: 1 }]), [
        { id, attempt: 1, status: "due" }
      ])
      assert.deepStrictEqual((yield* wake(runner)).ids, [id])
    })
  )

  it.live("that a park on its way has not seen, nor it the park, wakes the item all the same", () =>
    Effect.gen(function* () {
      const { api, owner, runner, other } = yield* setting
      const { id } = yield* running(api, runner)
      yield* askOne(runner, { id, attempt: 1, kind: "event" })
      yield* runner.sql`BEGIN`
      yield* park(runner, [{ id, attempt: 1 }])
      yield* signal(api, id)
      const looked = yield* wake(other)
      assert.deepStrictEqual(looked.ids, [], "there is nothing to wake yet")
      assert.isAtMost(looked.next_due_ms ?? Infinity, 1000, "look again")
      yield* runner.sql`COMMIT`
      yield* owner`UPDATE tenure.wake SET look_at = tenure.clock()`
      assert.deepStrictEqual((yield* wake(other)).ids, [id])
    })
  )

  it.live("of a transaction that is open for long is found when it commits", () =>
    Effect.gen(function* () {
      const { api, runner, other } = yield* setting
      const { id } = yield* running(api, runner)
      yield* askOne(runner, { id, attempt: 1, kind: "event" })
      yield* api`BEGIN`
      yield* signal(api, id)
      // Nothing of ours waits for it.
      assert.deepStrictEqual(yield* park(runner, [{ id, attempt: 1 }]), [])
      assert.deepStrictEqual((yield* wake(other)).ids, [])
      yield* api`COMMIT`
      assert.deepStrictEqual((yield* wake(other)).ids, [id])
    })
  )

  it.live("counts when it is there at the end of the time, and not after that was stored", () =>
    Effect.gen(function* () {
      const { api, owner, runner } = yield* setting
      const { id } = yield* running(api, runner)
      yield* askOne(runner, { id, attempt: 1, name: "a", kind: "event", ms: hour })
      yield* askOne(runner, { id, attempt: 1, name: "b", kind: "event", ms: hour })
      yield* pass(owner)
      yield* signal(api, id, "a", "1")
      const ended = yield* ask(runner, [
        { id, attempt: 1, name: "a", kind: "event" },
        { id, attempt: 1, name: "b", kind: "event" }
      ])
      assert.deepStrictEqual(
        ended.map((one) => one.value),
        [{ value: 1 }, { timedOut: true }]
      )
      assert.strictEqual(yield* signal(api, id, "b"), "already")
      assert.deepStrictEqual(
        (yield* askOne(runner, { id, attempt: 1, name: "b", kind: "event" })).value,
        { timedOut: true }
      )
    })
  )
})

describe("two wakers", () => {
  it.live("take what is due once, and neither waits for the other", () =>
    Effect.gen(function* () {
      const { api, owner, runner, other } = yield* setting
      const ids: Array<string> = []
      for (let n = 0; n < 10; n++) ids.push(yield* parked(api, runner, { ms: hour }))
      yield* pass(owner)
      yield* runner.sql`BEGIN`
      const first = (yield* wake(runner, 4)).ids
      const second = (yield* wake(other)).ids
      yield* runner.sql`COMMIT`
      assert.strictEqual(first.length, 4, "bounded")
      assert.deepStrictEqual([...first, ...second].sort(), ids.sort())
    })
  )
})

describe("what ends a waiting item", () => {
  it.live("is a cancellation, whether it is parked or being woken", () =>
    Effect.gen(function* () {
      const { api, owner, runner } = yield* setting
      const waiting = yield* parked(api, runner, { kind: "event" })
      yield* signal(api, waiting, "left over")
      assert.strictEqual(yield* cancel(api, waiting), "cancelled")
      const waking = yield* parked(api, runner, { ms: hour })
      yield* owner`UPDATE tenure.parked SET due_at = tenure.clock()`
      assert.deepStrictEqual((yield* wake(runner)).ids, [waking])
      assert.strictEqual(yield* cancel(api, waking), "cancelled")
      assert.strictEqual((yield* dispatch(runner, [waking])).dispatched, 0)
      assert.deepStrictEqual(yield* K.placesOf(owner, [waiting, waking]), {
        [waiting]: "cancelled",
        [waking]: "cancelled"
      })
      assert.deepStrictEqual(
        yield* owner`SELECT item_id FROM tenure.wait UNION SELECT item_id FROM tenure.signal`,
        []
      )
    })
  )

  it.live("is a cancellation that was asked for while it was on its way to park", () =>
    Effect.gen(function* () {
      const { api, runner, other } = yield* setting
      const { id } = yield* running(api, runner)
      yield* askOne(runner, { id, attempt: 1, kind: "event" })
      yield* runner.sql`BEGIN`
      yield* park(runner, [{ id, attempt: 1 }])
      assert.strictEqual(yield* cancel(api, id), "requested")
      yield* runner.sql`COMMIT`
      assert.deepStrictEqual((yield* wake(other)).ids, [id])
      yield* dispatch(other, [id])
      assert.isTrue(K.first(yield* K.claim(other, 1)).cancel_requested)
    })
  )

  it.live("is its deadline", () =>
    Effect.gen(function* () {
      const { api, owner, runner } = yield* setting
      const waiting = yield* parked(api, runner, { kind: "event" }, { deadlineMs: hour })
      const waking = yield* parked(api, runner, { ms: hour }, { deadlineMs: hour })
      yield* owner`UPDATE tenure.parked SET due_at = tenure.clock() WHERE id = ${waking}::uuid`
      yield* wake(runner)
      yield* owner`UPDATE tenure.deadline SET due_at = tenure.clock()`
      const [expired] = yield* runner.sql<{ ids: ReadonlyArray<string> }>`
        SELECT ids::text[] AS ids FROM tenure.expire_deadlines(100)`
      assert.deepStrictEqual([...(expired?.ids ?? [])].sort(), [waiting, waking].sort())
      assert.deepStrictEqual(
        yield* owner`SELECT outcome, reason, attempt FROM tenure.done`,
        [waiting, waking].map(() => ({
          outcome: "failed",
          reason: "DeadlineExceeded",
          attempt: 1
        }))
      )
      assert.deepStrictEqual(yield* owner`SELECT FROM tenure.parked`, [])
    })
  )

  it.live("is no revocation: nobody owns a parked item", () =>
    Effect.gen(function* () {
      const { api, database, owner, runner } = yield* setting
      const lost = yield* K.executorOf(database, { queue: "q" })
      const waiting = yield* parked(api, lost, { kind: "event" })
      const waking = yield* parked(api, lost, { ms: hour })
      yield* owner`UPDATE tenure.parked SET due_at = tenure.clock() WHERE id = ${waking}::uuid`
      yield* wake(lost)
      assert.strictEqual((yield* K.loseExecutor(owner, lost.id)).requeued, 0)
      assert.deepStrictEqual(yield* K.placesOf(owner, [waiting, waking]), {
        [waiting]: "parked",
        [waking]: "parked"
      })
      // The sweep's, and not the scanner's.
      assert.strictEqual(yield* sweep(runner, "0"), 1)
      assert.deepStrictEqual((yield* wake(runner)).ids, [waking])
    })
  )
})

describe("an invoked item", () => {
  const invoke = (runner: K.Executor, id: string, attempt: number, ms: number | null = null) =>
    Effect.map(
      runner.sql<{ status: string; queue_id: number | null }>`
        SELECT status, queue_id
          FROM tenure.invoke(${id}::uuid, ${attempt}::int, 'w', ${ms}::float8, 'child', '{"n": 1}', 3, 'k', NULL)`,
      K.first
    )

  const family = Effect.gen(function* () {
    const set = yield* setting
    const child = yield* K.executorOf(set.database, { queue: "child", recoveryMax: 1 })
    const { id } = yield* running(set.api, set.runner)
    assert.deepStrictEqual(yield* invoke(set.runner, id, 1), {
      status: "begun",
      queue_id: child.queueId
    })
    yield* askOne(set.runner, { id, attempt: 1, kind: "invoke" })
    yield* park(set.runner, [{ id, attempt: 1 }])
    return { ...set, child, id }
  })

  /** What the parent gets. */
  const told = Effect.fnUntraced(function* (runner: K.Executor, id: string) {
    assert.deepStrictEqual((yield* wake(runner)).ids, [id])
    yield* dispatch(runner, [id])
    yield* K.claim(runner, 1)
    return (yield* askOne(runner, { id, attempt: 2, kind: "invoke" })).value
  })

  it.live("is handed in once over all attempts, and its outcome wakes whoever waits", () =>
    Effect.gen(function* () {
      const { child, id, owner, runner } = yield* family
      const [claimed, second] = yield* K.claim(child, 2)
      assert.isUndefined(second)
      assert.deepStrictEqual([claimed?.payload, claimed?.rank, claimed?.key], [`{"n": 1}`, -3, "k"])
      // A hand-back or a retry is no end.
      yield* K.settle(child, [{ id: claimed?.id ?? "", attempt: 1, outcome: "retry" }])
      assert.deepStrictEqual((yield* wake(runner)).ids, [])
      yield* K.claim(child, 1)
      yield* K.settle(child, [{ id: claimed?.id ?? "", attempt: 2, result: `{"r": "\\u0000"}` }])
      assert.deepStrictEqual(yield* told(runner, id), {
        value: {
          id: claimed?.id,
          outcome: "completed",
          reason: null,
          result: { r: "\u0000" },
          losses: 0
        }
      })
      assert.strictEqual((yield* invoke(runner, id, 2)).queue_id, null)
      assert.deepStrictEqual(yield* owner`SELECT count(*)::int AS n FROM tenure.item`, [{ n: 2 }])
      assert.deepStrictEqual(
        yield* owner`SELECT child_id FROM tenure.invocation UNION SELECT item_id FROM tenure.signal
                     UNION SELECT item_id FROM tenure.wait`,
        []
      )
    })
  )

  const ends = {
    "is cancelled": ({ api, childId }) => cancel(api, childId),
    "passes its deadline": ({ child, childId, owner }) =>
      Effect.andThen(
        owner`INSERT INTO tenure.deadline VALUES (${childId}::uuid, tenure.clock())`,
        child.sql`SELECT expired FROM tenure.expire_deadlines(10)`
      ),
    "is quarantined": ({ child, owner }) =>
      Effect.andThen(K.claim(child, 1), K.loseExecutor(owner, child.id))
  } satisfies Record<
    string,
    (on: {
      readonly api: K.Sql
      readonly owner: K.Sql
      readonly child: K.Executor
      readonly childId: string
    }) => Effect.Effect<unknown, unknown>
  >

  for (const [how, end] of Object.entries(ends)) {
    it.live(`that ${how} tells it, too`, () =>
      Effect.gen(function* () {
        const { api, child, id, owner, runner } = yield* family
        const [{ childId = "" } = {}] = yield* owner<{ childId: string }>`
          SELECT child_id::text AS "childId" FROM tenure.invocation`
        yield* end({ api, owner, child, childId })
        const value = yield* told(runner, id)
        const [done] = yield* owner`
          SELECT id::text AS id, outcome, reason, result, losses FROM tenure.done WHERE id = ${childId}::uuid`
        assert.isDefined(done)
        assert.deepStrictEqual(value, { value: done })
      })
    )
  }

  it.live("that is late is named, and goes on without anybody to tell", () =>
    Effect.gen(function* () {
      const { api, database, owner, runner } = yield* setting
      const child = yield* K.executorOf(database, { queue: "child" })
      const { id } = yield* running(api, runner)
      yield* invoke(runner, id, 1, 0)
      const { value } = yield* askOne(runner, { id, attempt: 1, kind: "invoke" })
      const claimed = K.first(yield* K.claim(child, 1))
      assert.deepStrictEqual(value, { timedOut: true, invoked: claimed.id })
      yield* K.settle(child, [{ id: claimed.id, attempt: 1 }])
      assert.deepStrictEqual(yield* owner`SELECT item_id FROM tenure.wake`, [])
      assert.deepStrictEqual(yield* owner`SELECT item_id FROM tenure.signal`, [])
    })
  )

  it.live("of an item that has ended meanwhile leaves nothing behind", () =>
    Effect.gen(function* () {
      const { api, child, id, owner } = yield* family
      yield* cancel(api, id)
      const claimed = K.first(yield* K.claim(child, 1))
      yield* K.settle(child, [{ id: claimed.id, attempt: 1 }])
      assert.deepStrictEqual(
        yield* owner`SELECT child_id FROM tenure.invocation UNION SELECT item_id FROM tenure.signal
                     UNION SELECT item_id FROM tenure.wait UNION SELECT item_id FROM tenure.wake`,
        []
      )
    })
  )
})

describe("the sweep of stale claims", () => {
  it.live("puts back what it was, after the threshold, and nothing that was dispatched", () =>
    Effect.gen(function* () {
      const { api, owner, runner, other } = yield* setting
      const sleeping = yield* parked(api, runner, { ms: hour })
      const waiting = yield* parked(api, runner, { kind: "event" })
      const dispatched = yield* parked(api, runner, { ms: hour })
      yield* signal(api, waiting)
      yield* pass(owner)
      assert.strictEqual((yield* wake(runner)).ids.length, 3)
      yield* dispatch(runner, [dispatched])
      assert.strictEqual(yield* sweep(other, "2 minutes"), 0, "young")
      yield* owner`UPDATE tenure.parked SET claimed_at = claimed_at - interval '3 minutes'`
      // Two at once: the second passes by what the first one holds.
      yield* runner.sql`BEGIN`
      assert.strictEqual(yield* sweep(runner, "2 minutes"), 2)
      assert.strictEqual(yield* sweep(other, "2 minutes"), 0)
      yield* runner.sql`COMMIT`
      assert.strictEqual(yield* sweep(other, "2 minutes"), 0)
      const back = { pre_claim_status: null, claimed_by: null, claimed: false }
      assert.deepStrictEqual(yield* parkedRow(owner, sleeping), { state: "sleeping", ...back })
      assert.deepStrictEqual(yield* parkedRow(owner, waiting), { state: "waiting", ...back })
      assert.strictEqual(yield* K.placeOf(owner, dispatched), "ready")
      // Whoever had taken them is not dead but late.
      assert.strictEqual((yield* dispatch(runner, [sleeping, waiting])).dispatched, 0)
      assert.deepStrictEqual(
        [...(yield* wake(other)).ids].sort(),
        [sleeping, waiting].sort(),
        "the event is not lost with the wake that it had caused"
      )
    })
  )

  it.live("passes by what is being dispatched", () =>
    Effect.gen(function* () {
      const { api, owner, runner, other } = yield* setting
      const id = yield* parked(api, runner, { ms: hour })
      yield* pass(owner)
      yield* wake(runner)
      yield* runner.sql`BEGIN`
      yield* dispatch(runner, [id])
      assert.strictEqual(yield* sweep(other, "0"), 0)
      yield* runner.sql`COMMIT`
      assert.strictEqual(yield* sweep(other, "0"), 0)
      assert.strictEqual(yield* K.placeOf(owner, id), "ready")
    })
  )

  // Loop 1 takes what a dead executor holds; loop 2, what was taken to be woken. The states are made by
  // hand, also those that cannot be: a row that both might take for theirs is the scanner's.
  it.live("and the scanner have every stranded item in one domain, whatever the thresholds", () =>
    Effect.gen(function* () {
      const { api, database, owner, runner } = yield* setting
      const seed = Number(process.env["TENURE_SEED"] ?? randomInt(2 ** 31))
      const random = seeded(seed)
      for (let turn = 0; turn < 6; turn++) {
        const about = `TENURE_SEED=${seed}, turn ${turn}`
        const validity = 1 + random.int(200)
        const threshold = 1 + random.int(200)
        const lost = yield* K.executorOf(database, { queue: "q", recoveryMax: 100 })
        const ids = yield* K.enqueueMany(api, "q", 12)
        const states = new Map<
          string,
          { readonly owned: boolean; readonly waking: number | undefined }
        >()
        const claimed = yield* K.claim(lost, 12)
        assert.strictEqual(claimed.length, 12, about)
        for (const id of ids) {
          const owned = random.chance(0.5)
          states.set(id, { owned, waking: random.chance(0.7) ? random.int(400) : undefined })
        }
        const made = [...states].filter(([, { owned, waking }]) => !owned || waking !== undefined)
        yield* owner`
          INSERT INTO tenure.parked (id, state, names, parked_at, lane_id, rank, seq, attempt, failures,
                                     pre_claim_status, claimed_by, claimed_at)
          SELECT c.id, CASE WHEN u.ago IS NULL THEN 'waiting' ELSE 'waking' END, '{w}', tenure.clock(),
                 ${lost.startedLane}::int, c.rank, c.seq, c.attempt, 0,
                 CASE WHEN u.ago IS NOT NULL THEN 'waiting' END,
                 CASE WHEN u.ago IS NOT NULL THEN c.owner END,
                 tenure.clock() - make_interval(secs => u.ago)
            FROM unnest(${K.array(made.map(([id]) => id))}::text::uuid[],
                        ${K.array(made.map(([, { waking }]) => waking ?? null))}::text::float8[]) u(id, ago)
            JOIN tenure.claimed c ON c.id = u.id`
        const free = made.filter(([, { owned }]) => !owned).map(([id]) => id)
        yield* owner`DELETE FROM tenure.claimed WHERE id = ANY(${K.array(free)}::text::uuid[])`
        const leaseAge = random.int(400)
        yield* owner`
          UPDATE tenure.executor
             SET expires_at = heartbeat_at + make_interval(secs => ${validity - leaseAge}::float8)
           WHERE id = ${lost.id}::uuid`
        const isExpired = leaseAge >= validity

        // The two loops, in either order.
        const scan = Effect.gen(function* () {
          const found = yield* runner.sql<{ id: string }>`
            SELECT id::text AS id FROM tenure.recoverable_executors('app', ARRAY['v1'], 100)`
          for (const { id } of found) yield* K.loseExecutor(owner, id)
        })
        const before = yield* rowsOf(owner, ids)
        const order = random.chance(0.5)
        if (order) yield* scan
        yield* sweep(runner, `${threshold} seconds`)
        if (!order) yield* scan
        const after = yield* rowsOf(owner, ids)
        for (const id of ids) {
          const { owned, waking } = states.get(id) ?? { owned: false, waking: undefined }
          const what = `${about}, item ${JSON.stringify({ owned, waking, validity, threshold, leaseAge })}`
          const scanned = before.get(id)?.attempted !== after.get(id)?.attempted
          const swept = before.get(id)?.parked === "waking" && after.get(id)?.parked === "waiting"
          assert.isFalse(scanned && swept, `both: ${what}`)
          assert.strictEqual(scanned, owned && isExpired, `the scanner: ${what}`)
          assert.strictEqual(
            swept,
            !owned && waking !== undefined && waking >= threshold,
            `the sweep: ${what}`
          )
        }
        yield* owner`DELETE FROM tenure.parked`
        yield* owner`DELETE FROM tenure.ready`
        yield* owner`DELETE FROM tenure.claimed`
      }
    })
  )

  const rowsOf = (owner: K.Sql, ids: ReadonlyArray<string>) =>
    Effect.map(
      owner<{ id: string; parked: string | null; attempted: string }>`
        SELECT u.id::text AS id, p.state AS parked,
               CASE WHEN c.id IS NOT NULL THEN 'claimed' WHEN r.id IS NOT NULL THEN 'ready' ELSE 'no' END AS attempted
          FROM unnest(${K.array(ids)}::text::uuid[]) u(id)
          LEFT JOIN tenure.parked p ON p.id = u.id
          LEFT JOIN tenure.claimed c ON c.id = u.id
          LEFT JOIN tenure.ready r ON r.id = u.id`,
      (rows) => new Map(rows.map((row) => [row.id, row]))
    )
})

describe("with many waiting", () => {
  it.live("nothing reads more than what is due, whatever the statistics say", () =>
    Effect.gen(function* () {
      const { api, owner, runner } = yield* setting
      yield* owner`ALTER TABLE tenure.parked SET (autovacuum_enabled = off)`
      yield* owner`ANALYZE tenure.parked, tenure.wait, tenure.signal, tenure.wake`
      const ids = yield* K.enqueueMany(api, "q", 3000)
      yield* K.claim(runner, 3000)
      yield* ask(
        runner,
        ids.map((id) => ({ id, attempt: 1, ms: hour }))
      )
      yield* park(
        runner,
        ids.map((id) => ({ id, attempt: 1 }))
      )
      const read = Effect.gen(function* () {
        yield* runner.sql`SELECT pg_stat_force_next_flush()::text`
        yield* owner`SELECT pg_stat_clear_snapshot()::text`
        return K.first(
          yield* owner<{ scanned: number; entries: number }>`
            SELECT (SELECT sum(seq_tup_read)::int FROM pg_stat_user_tables
                     WHERE schemaname = 'tenure' AND relname IN ('parked', 'wait', 'signal', 'claimed', 'ready')) AS scanned,
                   (SELECT sum(idx_tup_read)::int FROM pg_stat_user_indexes
                     WHERE indexrelname IN ('parked_for_waking', 'parked_pkey', 'wait_pkey')) AS entries`
        )
      })
      const before = yield* read
      for (let turn = 0; turn < 8; turn++) {
        yield* signal(api, ids[turn] ?? "", "other")
        yield* owner`UPDATE tenure.parked SET due_at = tenure.clock() WHERE id = ${ids[turn + 100] ?? ""}::uuid`
        const woken = yield* wake(runner)
        assert.strictEqual(woken.ids.length, 1)
        yield* dispatch(runner, woken.ids)
        yield* sweep(runner, "1 minute")
        yield* cancel(api, ids[turn + 200] ?? "")
        const again = K.first(yield* K.claim(runner, 1))
        yield* askOne(runner, { id: again.id, attempt: 2 })
        yield* park(runner, [{ id: again.id, attempt: 2 }])
      }
      const after = yield* read
      assert.strictEqual(after.scanned, before.scanned)
      assert.isAtMost(after.entries - before.entries, 8 * 40)
    })
  )
})
