/**
 * Goal: an outcome is stored once, for the attempt that it names, and each of a batch has its own
 * answer (I5, row 40, bug reports 13 and 35). Checkpoints are written once and by the attempt that
 * runs (I6).
 * Method: one or two executors as the worker role; somebody else's lock where a lock is the subject.
 */
import { assert, layer } from "@effect/vitest"
import { Effect, Fiber } from "effect"
import { randomUUID } from "node:crypto"
import * as K from "./kernel.ts"

/** A queue with its items claimed by its only executor. */
const running = Effect.fnUntraced(function* (queue: string, count: number) {
  const api = yield* K.session("api")
  const owner = yield* K.session("owner")
  const runner = yield* K.executor({ queue })
  yield* K.enqueueMany(api, queue, count)
  return { api, owner, runner, items: yield* K.claim(runner, count) }
})

const of = (item: K.Claimed | undefined) => ({ id: item?.id ?? "", attempt: item?.attempt ?? 0 })

layer(K.Kernel.layer, { excludeTestServices: true })("settle", (it) => {
  it.effect("each outcome puts the item where it belongs", () =>
    Effect.gen(function* () {
      const { owner, runner, items } = yield* running("outcomes", 7)
      const answers = yield* K.settle(runner, [
        { ...of(items[0]), outcome: "completed", result: `{"r": 1}` },
        { ...of(items[1]), outcome: "failed", reason: "HandlerDied", result: `"why"` },
        { ...of(items[2]), outcome: "cancelled" },
        { ...of(items[3]), outcome: "retry", delayMs: 60_000 },
        { ...of(items[4]), outcome: "retry" },
        { ...of(items[5]), outcome: "hand-back", delayMs: 60_000 },
        { ...of(items[6]), outcome: "hand-back", delayMs: 0 }
      ])
      assert.deepStrictEqual(answers, [])
      const ids = items.map((item) => item.id)
      assert.deepStrictEqual(
        Object.values(
          Object.fromEntries(
            Object.entries(yield* K.placesOf(owner, ids)).toSorted(
              ([a], [b]) => ids.indexOf(a) - ids.indexOf(b)
            )
          )
        ),
        ["completed", "failed", "cancelled", "delayed", "ready", "delayed", "ready"]
      )
      assert.deepStrictEqual(
        yield* owner`
          SELECT d.outcome, d.reason, d.result::text AS result, d.attempt, d.failures, d.losses,
                 d.owner = ${runner.id}::uuid AS by_us, d.queue_id = ${runner.queueId}::int AS here
            FROM tenure.done d JOIN tenure.item i USING (id)
           WHERE d.id = ANY(${ids}::text[]::uuid[]) ORDER BY i.seq`,
        [
          { outcome: "completed", reason: null, result: `{"r": 1}` },
          { outcome: "failed", reason: "HandlerDied", result: `"why"` },
          { outcome: "cancelled", reason: null, result: null }
        ].map((row) => ({ ...row, attempt: 1, failures: 0, losses: 0, by_us: true, here: true }))
      )
      assert.deepStrictEqual(
        yield* owner`
          SELECT w.attempt, w.failures, w.losses, w.stuck, w.rank, w.seq = i.seq AS same_seq,
                 w.lane_id = ${runner.startedLane}::int AS started
            FROM (SELECT id, lane_id, rank, seq, attempt, failures, losses, stuck FROM tenure.delayed
                  UNION ALL
                  SELECT id, lane_id, rank, seq, attempt, failures, losses, stuck FROM tenure.ready) w
            JOIN tenure.item i USING (id)
           WHERE w.id = ANY(${ids}::text[]::uuid[]) ORDER BY i.seq`,
        [1, 1, 0, 0].map((failures) => ({
          attempt: 1,
          failures,
          losses: 0,
          stuck: 0,
          rank: 0,
          same_seq: true,
          started: true
        }))
      )
    })
  )

  it.effect("a repeated settle is answered with already, one of a retry with stale", () =>
    Effect.gen(function* () {
      const { runner, items } = yield* running("repeated", 4)
      const outcomes = ["completed", "failed", "cancelled", "retry"].map((outcome, n) => ({
        ...of(items[n]),
        outcome,
        delayMs: 60_000
      }))
      assert.deepStrictEqual(yield* K.settle(runner, outcomes), [])
      assert.deepStrictEqual(
        (yield* K.settle(runner, outcomes)).map((answer) => answer.status),
        ["already", "already", "already", "stale"]
      )
    })
  )

  it.effect("a locked row is answered with busy and does not hold up ninety-nine others", () =>
    Effect.gen(function* () {
      const { owner, runner, items } = yield* running("busy", 100)
      yield* owner`BEGIN`
      yield* owner`SELECT FROM tenure.claimed WHERE id = ${items[50]?.id ?? ""}::uuid FOR UPDATE`
      assert.deepStrictEqual(yield* K.settle(runner, items.map(of)), [
        { ...of(items[50]), status: "busy" }
      ])
      yield* owner`ROLLBACK`
      assert.deepStrictEqual(yield* K.settle(runner, [of(items[50])]), [])
    })
  )

  it.effect(
    "a settle behind a revoker has locked no work row: the two would wait for each other",
    () =>
      Effect.gen(function* () {
        const { owner, runner, items } = yield* running("lock order", 1)
        const pid = yield* K.pidOf(runner.sql)
        const revoker = yield* K.session("owner")
        yield* revoker`BEGIN`
        yield* revoker`SELECT FROM tenure.executor WHERE id = ${runner.id}::uuid FOR UPDATE`
        const waiting = yield* Effect.forkChild(K.settle(runner, [of(items[0])]))
        yield* K.whenBlocked(owner, pid)
        yield* revoker`SELECT FROM tenure.claimed WHERE id = ${of(items[0]).id}::uuid FOR UPDATE NOWAIT`
        yield* revoker`ROLLBACK`
        assert.deepStrictEqual(yield* Fiber.join(waiting), [])
      })
  )

  it.effect("an item that is twice in a batch is settled once, by its first outcome", () =>
    Effect.gen(function* () {
      const { owner, runner, items } = yield* running("twice", 3)
      const answers = yield* K.settle(runner, [
        { ...of(items[0]), result: "1" },
        { ...of(items[1]), result: "1" },
        { ...of(items[0]), outcome: "failed", result: "2" },
        { ...of(items[2]), outcome: "retry" },
        { ...of(items[2]), outcome: "completed" }
      ])
      assert.deepStrictEqual(answers, [
        { ...of(items[0]), status: "already" },
        { ...of(items[2]), status: "stale" }
      ])
      assert.deepStrictEqual(
        yield* owner`SELECT outcome, result::text AS result FROM tenure.done WHERE id = ${of(items[0]).id}::uuid`,
        [{ outcome: "completed", result: "1" }]
      )
      assert.strictEqual(yield* K.placeOf(owner, of(items[2]).id), "ready")
    })
  )

  it.effect(
    "two attempts of one item in a batch: the current one is settled, the old one is stale",
    () =>
      Effect.gen(function* () {
        const { owner, runner, items } = yield* running("both attempts", 1)
        yield* K.settle(runner, [{ ...of(items[0]), outcome: "hand-back" }])
        const [again] = yield* K.claim(runner, 1)
        const answers = yield* K.settle(runner, [
          { ...of(items[0]), outcome: "failed" },
          { ...of(again), outcome: "completed" }
        ])
        assert.deepStrictEqual(answers, [{ ...of(items[0]), status: "stale" }])
        assert.strictEqual(yield* K.placeOf(owner, of(again).id), "completed")
      })
  )

  it.effect(
    "an attempt that is over settles nothing, hands back nothing and stores no checkpoint",
    () =>
      Effect.gen(function* () {
        const { owner, runner, items } = yield* running("stale", 1)
        const other = yield* K.executor({ queue: "stale" })
        yield* K.settle(runner, [{ ...of(items[0]), outcome: "hand-back" }])
        const [current] = yield* K.claim(other, 1)
        const rows = owner`SELECT c.*, c.claimed_at::text AS claimed_at, c.xmin::text AS xmin
                           FROM tenure.claimed c WHERE id = ${of(current).id}::uuid`
        const before = yield* rows
        const pretenders = [
          { executor: runner, attempt: 1 },
          // The right number from the wrong hand, and the right hand with a wrong number.
          { executor: runner, attempt: 2 },
          { executor: other, attempt: 1 },
          { executor: other, attempt: 3 }
        ]
        for (const { executor, attempt } of pretenders) {
          for (const outcome of ["completed", "failed", "cancelled", "retry", "hand-back"]) {
            const stale = { id: of(current).id, attempt }
            assert.deepStrictEqual(yield* K.settle(executor, [{ ...stale, outcome }]), [
              { ...stale, status: "stale" }
            ])
          }
          assert.deepStrictEqual(
            yield* K.checkpoint(executor, [
              { id: of(current).id, attempt, name: "step", value: "1" }
            ]),
            [{ id: of(current).id, name: "step", status: "stale" }]
          )
        }
        assert.deepStrictEqual(yield* rows, before)
        assert.deepStrictEqual(
          yield* owner`SELECT FROM tenure.step WHERE item_id = ${of(current).id}::uuid`,
          []
        )
        const ghost = { id: randomUUID(), attempt: 1 }
        assert.deepStrictEqual(yield* K.settle(runner, [ghost]), [{ ...ghost, status: "stale" }])
        assert.deepStrictEqual(yield* K.settle(other, [of(current)]), [])
      })
  )

  it.effect("an outcome that does not exist is refused, and no item is lost by it", () =>
    Effect.gen(function* () {
      const { owner, runner, items } = yield* running("unknown", 2)
      assert.strictEqual(
        yield* K.stateOf(
          K.settle(runner, [of(items[0]), { ...of(items[1]), outcome: "complete" }])
        ),
        "23514"
      )
      assert.deepStrictEqual(
        Object.values(
          yield* K.placesOf(
            owner,
            items.map((item) => item.id)
          )
        ),
        ["claimed", "claimed"]
      )
    })
  )

  it.effect("results are any JSON, and one that is none refuses its batch whole", () =>
    Effect.gen(function* () {
      const { owner, runner, items } = yield* running("results", 4)
      const results = [String.raw`"\u0000"`, String.raw`["\ud800"]`, "1e999999"]
      assert.strictEqual(
        yield* K.stateOf(
          K.settle(
            runner,
            [...results, "{"].map((result, n) => ({ ...of(items[n]), result }))
          )
        ),
        "22P02"
      )
      assert.deepStrictEqual(
        new Set(
          Object.values(
            yield* K.placesOf(
              owner,
              items.map((item) => item.id)
            )
          )
        ),
        new Set(["claimed"])
      )
      yield* K.settle(
        runner,
        results.map((result, n) => ({ ...of(items[n]), result }))
      )
      assert.deepStrictEqual(
        (yield* owner<{ result: string }>`
          SELECT d.result::text AS result FROM tenure.done d JOIN tenure.item i USING (id)
           WHERE d.queue_id = ${runner.queueId}::int ORDER BY i.seq`).map((row) => row.result),
        results
      )
    })
  )

  it.effect("the request to cancel ends with the item, and stays while it is handed back", () =>
    Effect.gen(function* () {
      const { api, owner, runner, items } = yield* running("requests", 2)
      for (const item of items) yield* api`SELECT tenure.cancel(${item.id}::uuid)`
      yield* K.settle(runner, [
        { ...of(items[0]), outcome: "cancelled" },
        { ...of(items[1]), outcome: "hand-back" }
      ])
      assert.deepStrictEqual(yield* owner`SELECT id::text AS id FROM tenure.cancel_request`, [
        { id: of(items[1]).id }
      ])
    })
  )
})

/** In the transaction of whoever calls. */
const complete = (runner: K.Executor, item: K.Claimed | undefined, result: string | null = null) =>
  Effect.map(
    runner.sql<{ readonly status: string }>`
      SELECT tenure.complete_item(${of(item).id}::uuid, ${of(item).attempt}::int, ${result}::text) AS status`,
    ([row]) => row?.status
  )

layer(K.Kernel.layer, { excludeTestServices: true })("one item, completed by its handler", (it) => {
  it.effect("leaves what a settle would leave, with its transaction or not at all", () =>
    Effect.gen(function* () {
      const { api, owner, runner, items } = yield* running("one", 2)
      yield* api`SELECT tenure.cancel(${of(items[0]).id}::uuid)`
      yield* runner.sql`BEGIN`
      assert.strictEqual(yield* complete(runner, items[0], `{"r": 1}`), "settled")
      yield* runner.sql`ROLLBACK`
      assert.strictEqual(yield* K.placeOf(owner, of(items[0]).id), "claimed")
      assert.strictEqual(yield* complete(runner, items[0], `{"r": 1}`), "settled")
      yield* K.settle(runner, [{ ...of(items[1]), result: `{"r": 1}` }])
      const rows = yield* owner`
        SELECT d.outcome, d.reason, d.result::text AS result, d.attempt, d.failures, d.losses,
               d.owner = ${runner.id}::uuid AS by_us, d.queue_id = ${runner.queueId}::int AS here
          FROM tenure.done d WHERE d.queue_id = ${runner.queueId}::int`
      assert.lengthOf(rows, 2)
      assert.deepStrictEqual(rows[0], rows[1])
      assert.deepStrictEqual(yield* owner`SELECT FROM tenure.cancel_request`, [])
      assert.deepStrictEqual(
        yield* owner`SELECT FROM tenure.claimed WHERE queue_id = ${runner.queueId}::int`,
        []
      )
    })
  )

  it.effect("is told that it was before, that somebody holds it, or that its attempt is over", () =>
    Effect.gen(function* () {
      const { owner, runner, items } = yield* running("one again", 3)
      const other = yield* K.executor({ queue: "one again" })
      yield* complete(runner, items[0], "1")
      assert.strictEqual(yield* complete(runner, items[0], "2"), "already")
      yield* owner`BEGIN`
      yield* owner`SELECT FROM tenure.claimed WHERE id = ${of(items[1]).id}::uuid FOR UPDATE`
      assert.strictEqual(yield* complete(runner, items[1]), "busy")
      yield* owner`ROLLBACK`
      assert.strictEqual(yield* complete(other, items[1]), "stale")
      yield* K.settle(runner, [{ ...of(items[2]), outcome: "hand-back" }])
      assert.strictEqual(yield* complete(runner, items[2]), "stale")
      assert.deepStrictEqual(
        yield* owner`
          SELECT result::text AS result FROM tenure.done WHERE queue_id = ${runner.queueId}::int`,
        [{ result: "1" }]
      )
    })
  )

  it.effect("is refused to a revoked executor, and waits for a revoker without a lock", () =>
    Effect.gen(function* () {
      const { owner, runner, items } = yield* running("one fenced", 1)
      const pid = yield* K.pidOf(runner.sql)
      const revoker = yield* K.session("owner")
      yield* revoker`BEGIN`
      yield* revoker`SELECT FROM tenure.executor WHERE id = ${runner.id}::uuid FOR UPDATE`
      const waiting = yield* Effect.forkChild(complete(runner, items[0]))
      yield* K.whenBlocked(owner, pid)
      yield* revoker`SELECT FROM tenure.claimed WHERE id = ${of(items[0]).id}::uuid FOR UPDATE NOWAIT`
      yield* revoker`UPDATE tenure.executor SET state = 'revoking' WHERE id = ${runner.id}::uuid`
      yield* revoker`COMMIT`
      assert.strictEqual(yield* K.stateOf(Fiber.join(waiting)), "TN002")
      assert.strictEqual(yield* K.placeOf(owner, of(items[0]).id), "claimed")
    })
  )

  it.effect("ends its group", () =>
    Effect.gen(function* () {
      const { api, owner, runner } = yield* running("one of a group", 0)
      const [made] = yield* api<{ readonly id: string }>`SELECT tenure.make_group() AS id`
      const group = made?.id ?? ""
      yield* api`SELECT tenure.enqueue('one of a group', '1', json_build_object('group', ${group}::text)::jsonb)`
      yield* api`SELECT tenure.seal_group(${group}::uuid)`
      const [item] = yield* K.claim(runner, 1)
      assert.strictEqual(yield* complete(runner, item), "settled")
      assert.deepStrictEqual(
        yield* owner`
          SELECT completed, ended_at IS NOT NULL AS ended FROM tenure.item_group WHERE id = ${group}::uuid`,
        [{ completed: 1, ended: true }]
      )
    })
  )
})

layer(K.Kernel.layer, { excludeTestServices: true })("checkpoints", (it) => {
  it.effect("the first value of a name stays, and is what every attempt reads", () =>
    Effect.gen(function* () {
      const { owner, runner, items } = yield* running("names", 2)
      const item = of(items[0])
      const write = (attempt: number, name: string, value: string) =>
        K.checkpoint(runner, [{ id: item.id, attempt, name, value }])
      assert.deepStrictEqual(yield* write(1, "a", String.raw`"\u0000"`), [])
      assert.deepStrictEqual(yield* write(1, "a", "2"), [
        { id: item.id, name: "a", status: "exists" }
      ])
      yield* K.settle(runner, [{ ...item, outcome: "retry" }])
      yield* K.claim(runner, 1)
      assert.deepStrictEqual(yield* write(2, "a", "3"), [
        { id: item.id, name: "a", status: "exists" }
      ])
      assert.deepStrictEqual(yield* write(2, "b", "4"), [])
      assert.deepStrictEqual(
        yield* owner`SELECT name, value::text AS value FROM tenure.checkpoints(${item.id}::uuid) ORDER BY 1`,
        [
          { name: "a", value: String.raw`"\u0000"` },
          { name: "b", value: "4" }
        ]
      )
    })
  )

  it.effect("each of a batch has its own answer", () =>
    Effect.gen(function* () {
      const { runner, items } = yield* running("batch", 3)
      const [one, two, three] = items.map(of)
      if (one === undefined || two === undefined || three === undefined) return assert.fail()
      yield* K.checkpoint(runner, [{ ...one, name: "n", value: "1" }])
      yield* K.settle(runner, [two])
      const answers = yield* K.checkpoint(
        runner,
        [one, two, three].map((item) => ({ ...item, name: "n", value: "2" }))
      )
      assert.deepStrictEqual(answers, [
        { id: one.id, name: "n", status: "exists" },
        { id: two.id, name: "n", status: "stale" }
      ])
    })
  )

  it.effect("a settle does not pass a checkpoint that is being written", () =>
    Effect.gen(function* () {
      const { owner, runner, items } = yield* running("passing", 1)
      const second = yield* K.session("worker", runner.id)
      yield* runner.sql`BEGIN`
      yield* K.checkpoint(runner, [{ ...of(items[0]), name: "n", value: "1" }])
      assert.deepStrictEqual(
        yield* K.settle({ ...runner, sql: second }, [{ ...of(items[0]), outcome: "hand-back" }]),
        [{ ...of(items[0]), status: "busy" }]
      )
      yield* runner.sql`COMMIT`
      assert.deepStrictEqual(yield* K.settle({ ...runner, sql: second }, [of(items[0])]), [])
      assert.strictEqual(yield* K.placeOf(owner, of(items[0]).id), "completed")
    })
  )
})
