/**
 * Goal: a lost executor's work goes on elsewhere as it was, a poison item ends in a visible state and
 * takes nobody with it, and nothing but a loss counts as one (I4, I9, rows 8 and 16, K-087 to K-099,
 * bug report 8). How revocations interleave with leases and fences is test/isolation.
 * Method: executors that are revoked by force, one after the other.
 */
import { assert, layer } from "@effect/vitest"
import { Effect } from "effect"
import * as K from "./kernel.ts"

const of = (item: K.Claimed | undefined) => ({ id: item?.id ?? "", attempt: item?.attempt ?? 0 })

const outcomeOf = (owner: K.Sql, id: string) =>
  owner`SELECT outcome, reason, attempt, failures, losses FROM tenure.done WHERE id = ${id}::uuid`

/** Loses `times` executors with the only item of a queue; `before` acts on it while it runs. */
const loseRepeatedly = Effect.fnUntraced(function* (
  options: K.ExecutorOptions,
  times: number,
  before: (
    runner: K.Executor,
    item: K.Claimed,
    turn: number
  ) => Effect.Effect<unknown, unknown> = () => Effect.void
) {
  const owner = yield* K.session("owner")
  const reports: Array<K.Revoked> = []
  for (let turn = 1; turn <= times; turn++) {
    const runner = yield* K.executor(options)
    const [item] = yield* K.claim(runner, 1)
    if (item === undefined) break
    yield* before(runner, item, turn)
    reports.push(yield* K.loseExecutor(owner, runner.id))
  }
  return reports
})

/**
 * A worker that runs what it has claimed in order, and a poison item that kills it. A process holds at
 * most `suspectsMax` suspects. Answers how often it died.
 */
const runUntilEmpty = Effect.fnUntraced(function* (
  queue: string,
  poison: string,
  suspectsMax: number
) {
  const owner = yield* K.session("owner")
  let deaths = 0
  let runner = yield* K.executor({ queue })
  for (;;) {
    const claimed = yield* K.claim(runner, 200, { suspects: suspectsMax })
    if (claimed.length === 0) return deaths
    const at = claimed.findIndex((item) => item.id === poison)
    yield* K.settle(runner, (at === -1 ? claimed : claimed.slice(0, at)).map(of))
    if (at === -1) continue
    deaths++
    yield* K.loseExecutor(owner, runner.id)
    runner = yield* K.executor({ queue })
  }
})

const counted = (owner: K.Sql, queue: string) =>
  owner`SELECT d.outcome, d.reason, count(*)::int AS n FROM tenure.done d
          JOIN tenure.queue q ON q.id = d.queue_id WHERE q.name = ${queue} GROUP BY 1, 2 ORDER BY 1`

layer(K.Kernel.layer, { excludeTestServices: true })("recovery", (it) => {
  it.effect("an item goes on with everything it had", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const owner = yield* K.session("owner")
      const lost = yield* K.executor({ queue: "keeps" })
      const heir = yield* K.executor({ queue: "keeps" })
      const payload = String.raw`{"a" : "\u0000"}`
      const { ids } = yield* K.enqueueAll(api, "keeps", [payload], {
        priorities: [7],
        keys: ["k"],
        idempotencyKeys: ["once"],
        deadlinesMs: [600_000]
      })
      const id = ids?.[0] ?? ""
      yield* K.claim(lost, 1)
      yield* K.settle(lost, [{ id, attempt: 1, outcome: "retry" }])
      const [before] = yield* K.claim(lost, 1)
      yield* K.checkpoint(lost, [{ id, attempt: 2, name: "step", value: "1" }])
      const item = owner`SELECT i.*, i.id::text AS id, i.payload::text AS payload, i.enqueued_at::text AS at,
                                i.deadline_at::text AS deadline, i.seq::text AS seq,
                                d.due_at = i.deadline_at AS watched,
                                k.item_id = i.id AS key_is_held
                           FROM tenure.item i JOIN tenure.deadline d USING (id)
                           JOIN tenure.item_key k ON k.queue_id = i.queue_id AND k.key = i.idempotency_key
                          WHERE i.id = ${id}::uuid`
      const stored = yield* item
      assert.strictEqual(stored.length, 1)
      const report = yield* K.loseExecutor(owner, lost.id)
      assert.deepStrictEqual(report, {
        state: "revoked",
        requeued: 1,
        cancelled: 0,
        exhausted: [],
        settled: []
      })
      assert.deepStrictEqual(yield* item, stored)
      assert.strictEqual(yield* K.enqueueOne(api, "keeps", payload, { idempotencyKey: "once" }), id)
      const [after] = yield* K.claim(heir, 1)
      assert.deepStrictEqual(
        { ...after, deadline_in_ms: 0 },
        {
          ...before,
          attempt: 3,
          losses: 1,
          lane_id: heir.suspectLane,
          deadline_in_ms: 0
        }
      )
      assert.strictEqual(after?.payload, payload)
      assert.strictEqual(after?.failures, 1)
      assert.isAbove(after?.deadline_in_ms ?? 0, 500_000)
      assert.deepStrictEqual(
        yield* owner`SELECT name, value::text AS value FROM tenure.checkpoints(${id}::uuid)`,
        [{ name: "step", value: "1" }]
      )
    })
  )

  it.effect("touches nothing that its executor did not hold", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const owner = yield* K.session("owner")
      const lost = yield* K.executor({ queue: "others" })
      const neighbour = yield* K.executor({ queue: "others" })
      const ids = yield* K.enqueueMany(api, "others", 7)
      const [completed, failed, cancelled, retried] = yield* K.claim(lost, 4)
      yield* K.claim(neighbour, 1)
      yield* K.settle(lost, [
        { ...of(completed) },
        { ...of(failed), outcome: "failed" },
        { ...of(cancelled), outcome: "cancelled" },
        { ...of(retried), outcome: "retry", delayMs: 60_000 }
      ])
      const [held] = yield* K.claim(lost, 1)
      const before = yield* K.placesOf(owner, ids)
      assert.strictEqual((yield* K.loseExecutor(owner, lost.id)).requeued, 1)
      assert.deepStrictEqual(yield* K.placesOf(owner, ids), { ...before, [of(held).id]: "ready" })
      assert.strictEqual((yield* K.loseExecutor(owner, lost.id)).requeued, 0, "again")
      assert.deepStrictEqual(
        yield* owner`SELECT attempt, losses FROM tenure.ready WHERE id = ${of(held).id}::uuid`,
        [{ attempt: 1, losses: 1 }]
      )
    })
  )

  it.effect("an item that four executors were lost with is quarantined, and visible", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const owner = yield* K.session("owner")
      const id = yield* K.enqueueOne(api, "poison", "1")
      const reports = yield* loseRepeatedly({ queue: "poison" }, 10)
      assert.deepStrictEqual(
        reports.map((report) => [report.requeued, report.exhausted, report.settled]),
        [
          [1, [], []],
          [1, [], []],
          [1, [], []],
          [0, [id], [id]]
        ]
      )
      assert.deepStrictEqual(yield* outcomeOf(owner, id), [
        {
          outcome: "failed",
          reason: "MAX_RECOVERY_ATTEMPTS_EXCEEDED",
          attempt: 4,
          failures: 0,
          losses: 4
        }
      ])
      // An operator may give it another four.
      yield* api`SELECT tenure.retry(${id}::uuid)`
      assert.strictEqual((yield* loseRepeatedly({ queue: "poison" }, 10)).length, 4)
    })
  )

  it.effect("with the limit on consecutive losses a checkpoint begins the count anew", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const owner = yield* K.session("owner")
      const options = {
        queue: "consecutive",
        recoveryLimit: "consecutive",
        recoveryMax: 10
      } as const
      const id = yield* K.enqueueOne(api, "consecutive", "1")
      const reports = yield* loseRepeatedly(options, 100, (runner, item, turn) =>
        turn === 9 || turn === 15
          ? K.checkpoint(runner, [{ ...of(item), name: `step ${turn}`, value: "1" }])
          : Effect.void
      )
      // The loss of a run that has moved on counts as none: 15 and then ten more.
      assert.strictEqual(reports.length, 25)
      assert.deepStrictEqual(reports.at(-1)?.exhausted, [id])
      assert.deepStrictEqual(yield* outcomeOf(owner, id), [
        {
          outcome: "failed",
          reason: "EXECUTION_RECOVERY_EXHAUSTED",
          attempt: 25,
          failures: 0,
          losses: 25
        }
      ])
    })
  )

  it.effect("with the limit on executions a checkpoint saves nobody", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      yield* K.enqueueOne(api, "executions", "1")
      const reports = yield* loseRepeatedly({ queue: "executions" }, 100, (runner, item, turn) =>
        K.checkpoint(runner, [{ ...of(item), name: `step ${turn}`, value: "1" }])
      )
      assert.strictEqual(reports.length, 4)
    })
  )

  it.effect("twenty hand-backs and retries are no loss", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const owner = yield* K.session("owner")
      yield* K.enqueueOne(api, "no loss", "1")
      const runner = yield* K.executor({ queue: "no loss" })
      for (let turn = 0; turn < 20; turn++) {
        const [item] = yield* K.claim(runner, 1)
        assert.strictEqual(item?.losses, 0)
        yield* K.settle(runner, [{ ...of(item), outcome: turn % 2 === 0 ? "hand-back" : "retry" }])
      }
      assert.deepStrictEqual(
        yield* owner`SELECT attempt, failures, losses, stuck FROM tenure.ready r
                       JOIN tenure.lane l ON l.id = r.lane_id WHERE l.queue_id = ${runner.queueId}::int`,
        [{ attempt: 20, failures: 10, losses: 0, stuck: 0 }]
      )
    })
  )

  it.effect("waits longer after each loss, and never less than the grace", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const owner = yield* K.session("owner")
      const delays = Effect.fnUntraced(function* (queue: string, graceMs: number) {
        const id = yield* K.enqueueOne(api, queue, "1")
        const seen: Array<number> = []
        for (let turn = 0; turn < 3; turn++) {
          const runner = yield* K.executor({ queue })
          yield* K.claim(runner, 1)
          yield* K.loseExecutor(owner, runner.id, { backoffMs: 5_000, graceMs })
          const rows = yield* owner<{ ms: number }>`
            SELECT round(extract(epoch FROM d.due_at - e.revoked_at) * 1000)::int AS ms
              FROM tenure.delayed d, tenure.executor e
             WHERE d.id = ${id}::uuid AND e.id = ${runner.id}::uuid`
          yield* owner`UPDATE tenure.delayed SET due_at = tenure.clock() - interval '1 ms'`
          seen.push(rows[0]?.ms ?? 0)
          yield* owner`SELECT promoted FROM tenure.promote(100)`
        }
        return seen
      })
      assert.deepStrictEqual(yield* delays("backoff", 0), [0, 5_000, 30_000])
      assert.deepStrictEqual(yield* delays("grace", 7_000), [7_000, 7_000, 30_000])
    })
  )

  it.effect("a lost item that was to be cancelled is, and one past its deadline fails of it", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const owner = yield* K.session("owner")
      const lost = yield* K.executor({ queue: "verdicts" })
      const { ids } = yield* K.enqueueAll(api, "verdicts", ["1", "2", "3", "4"], {
        deadlinesMs: [null, -1, -1, 60_000]
      })
      const [asked, late, both, neither] = ids ?? []
      yield* K.claim(lost, 4)
      for (const id of [asked, both]) yield* api`SELECT tenure.cancel(${id ?? ""}::uuid)`
      const report = yield* K.loseExecutor(owner, lost.id)
      assert.deepStrictEqual(
        { ...report, settled: report.settled.toSorted() },
        {
          state: "revoked",
          requeued: 1,
          cancelled: 2,
          exhausted: [],
          settled: [asked ?? "", late ?? "", both ?? ""].toSorted()
        }
      )
      assert.deepStrictEqual(
        yield* K.placesOf(
          owner,
          [asked, late, both, neither].map((id) => id ?? "")
        ),
        {
          [asked ?? ""]: "cancelled",
          [late ?? ""]: "failed",
          [both ?? ""]: "cancelled",
          [neither ?? ""]: "ready"
        }
      )
      assert.deepStrictEqual(yield* outcomeOf(owner, late ?? ""), [
        { outcome: "failed", reason: "DeadlineExceeded", attempt: 1, failures: 0, losses: 1 }
      ])
      assert.deepStrictEqual(yield* owner`SELECT FROM tenure.cancel_request`, [])
    })
  )

  it.effect(
    "a poison item among a thousand is quarantined alone; without the bound on suspects it takes its neighbours along",
    () =>
      Effect.gen(function* () {
        const api = yield* K.session("api")
        const owner = yield* K.session("owner")
        const alone = yield* K.enqueueMany(api, "alone", 1000)
        assert.strictEqual(yield* runUntilEmpty("alone", alone[5] ?? "", 1), 4)
        assert.deepStrictEqual(yield* counted(owner, "alone"), [
          { outcome: "completed", reason: null, n: 999 },
          { outcome: "failed", reason: "MAX_RECOVERY_ATTEMPTS_EXCEEDED", n: 1 }
        ])
        assert.deepStrictEqual(
          yield* owner`SELECT max(d.losses)::int AS most FROM tenure.done d JOIN tenure.queue q ON q.id = d.queue_id
                      WHERE q.name = 'alone' AND d.outcome = 'completed'`,
          [{ most: 1 }]
        )

        const together = yield* K.enqueueMany(api, "together", 1000)
        assert.strictEqual(yield* runUntilEmpty("together", together[5] ?? "", 200), 4)
        const [completed, failed] = yield* counted(owner, "together")
        assert.deepStrictEqual([completed?.["n"], failed?.["n"]], [805, 195])
      }),
    300_000
  )
})

layer(K.Kernel.layer, { excludeTestServices: true })("release", (it) => {
  const release = (runner: K.Executor) =>
    Effect.map(
      runner.sql<{ state: string; handed_back: number }>`
        SELECT * FROM tenure.release_executor(${runner.id}::uuid)`,
      K.first
    )

  it.effect("gives everything back without a loss, and ends the lease with it", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const owner = yield* K.session("owner")
      const lost = yield* K.executor({ queue: "release" })
      const runner = yield* K.executor({ queue: "release" })
      const heir = yield* K.executor({ queue: "release" })
      const ids = yield* K.enqueueMany(api, "release", 10)
      yield* K.claim(lost, 1)
      yield* K.loseExecutor(owner, lost.id)
      const held = yield* K.claim(runner, 10)
      assert.deepStrictEqual(yield* release(runner), { state: "released", handed_back: 10 })
      assert.deepStrictEqual(
        (yield* K.claim(heir, 10, { suspects: 10 })).map((row) => [
          row.id,
          row.attempt,
          row.losses,
          row.seq
        ]),
        held.map((row) => [row.id, row.attempt + 1, row.losses, row.seq])
      )
      assert.deepStrictEqual(
        yield* owner`SELECT DISTINCT lane_id FROM tenure.claimed WHERE losses > 0 AND owner = ${heir.id}::uuid`,
        [{ lane_id: heir.suspectLane }]
      )
      assert.strictEqual(new Set(Object.values(yield* K.placesOf(owner, ids))).size, 1)
      // A tombstone: neither does it claim again, nor is it revoked.
      assert.strictEqual(yield* K.stateOf(K.claim(runner, 1)), "TN002")
      assert.strictEqual((yield* K.loseExecutor(owner, runner.id)).state, "released")
      assert.deepStrictEqual(yield* release(runner), { state: "released", handed_back: 0 })
    })
  )

  it.effect("leaves an expired executor to its revoker, who counts the loss", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const owner = yield* K.session("owner")
      const runner = yield* K.executor({ queue: "too late" })
      yield* K.enqueueOne(api, "too late", "1")
      yield* K.claim(runner, 1)
      yield* owner`UPDATE tenure.executor SET expires_at = tenure.clock() WHERE id = ${runner.id}::uuid`
      assert.deepStrictEqual(yield* release(runner), { state: "active", handed_back: 0 })
      assert.strictEqual((yield* K.loseExecutor(owner, runner.id)).requeued, 1)
    })
  )
})
