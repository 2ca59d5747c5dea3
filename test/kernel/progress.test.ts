/**
 * Goal: whoever watches an item sees what the attempt that has it reports, and nothing of an earlier one;
 * reports are fenced, decide nothing, and go with their item's bucket (P1, P2).
 * Method: scripted sessions; a listener for what is told.
 */
import { assert, layer } from "@effect/vitest"
import { Effect, Option, Queue } from "effect"
import * as K from "./kernel.ts"

const channel = "tenure_test_watcher"

interface Report {
  readonly id: string
  readonly attempt: number
  readonly number: number
  readonly value: string
}

/** The attempts that were refused. */
const report = (executor: K.Executor, reports: ReadonlyArray<Report>) =>
  executor.sql<{ readonly id: string; readonly attempt: number }>`
    SELECT r.id::text AS id, r.attempt
      FROM tenure.report_progress(
        ${K.array(reports.map((one) => one.id))}::text::uuid[],
        ${K.array(reports.map((one) => one.attempt))}::text::int[],
        ${K.array(reports.map((one) => one.number))}::text::int[],
        ${K.array(reports.map((one) => one.value))}::text::text[]) r`

const shown = (
  sql: K.Sql,
  id: string,
  known: readonly [attempt: number, number: number] = [0, 0]
) =>
  Effect.map(
    sql<{ readonly value: string }>`
      SELECT p.value::text AS value
        FROM tenure.item_progress(${K.array([id])}::text::uuid[],
          ${K.array([known[0]])}::text::int[], ${K.array([known[1]])}::text::int[]) p`,
    (rows) => rows[0]?.value
  )

const watch = (sql: K.Sql, id: string) =>
  sql`SELECT tenure.watch_progress(${K.array([id])}::text::uuid[], ${channel})`

const notify = (sql: K.Sql, id: string) =>
  Effect.map(
    sql<{ readonly told: number }>`
      SELECT tenure.notify_progress(${K.array([id])}::text::uuid[]) AS told`,
    (rows) => K.first(rows).told
  )

const running = Effect.fnUntraced(function* (queue: string) {
  const api = yield* K.session("api")
  const runner = yield* K.executor({ queue })
  const id = yield* K.enqueueOne(api, queue, "1")
  yield* K.claim(runner, 1)
  return { api, runner, id }
})

layer(K.Kernel.layer, { excludeTestServices: true })("progress", (it) => {
  it.effect("is the latest report of the latest attempt, whatever comes late", () =>
    Effect.gen(function* () {
      const { api, id, runner } = yield* running("latest")
      assert.isUndefined(yield* shown(api, id))
      assert.deepStrictEqual(yield* report(runner, [{ id, attempt: 1, number: 3, value: "3" }]), [])
      // On a connection that was given up, and is not as dead as it seemed.
      yield* report(runner, [{ id, attempt: 1, number: 2, value: "2" }])
      assert.strictEqual(yield* shown(api, id), "3")
      assert.isUndefined(yield* shown(api, id, [1, 3]), "known already")
      yield* K.settle(runner, [{ id, attempt: 1, outcome: "retry" }])
      yield* K.claim(runner, 1)
      assert.strictEqual(yield* shown(api, id), "3", "until the next attempt reports")
      yield* report(runner, [{ id, attempt: 2, number: 1, value: "1" }])
      assert.strictEqual(yield* shown(api, id), "1")
      yield* K.settle(runner, [{ id, attempt: 2 }])
      assert.strictEqual(yield* shown(api, id), "1", "it stays with the outcome")
    })
  )

  it.effect("is refused to who does not hold the attempt, one by one", () =>
    Effect.gen(function* () {
      const { api, id, runner } = yield* running("refused")
      const other = yield* K.executor({ queue: "refused" })
      const waiting = yield* K.enqueueOne(api, "refused", "1")
      const reports = [
        { id, attempt: 1, number: 1, value: "1" },
        { id, attempt: 2, number: 1, value: "2" },
        { id: waiting, attempt: 0, number: 1, value: "3" },
        { id: waiting, attempt: 1, number: 1, value: "4" }
      ]
      const refused = yield* report(runner, reports)
      assert.deepStrictEqual(
        new Set(refused.map((one) => `${one.id}/${one.attempt}`)),
        new Set(reports.slice(1).map((one) => `${one.id}/${one.attempt}`))
      )
      assert.strictEqual((yield* report(other, reports)).length, reports.length)
      assert.strictEqual(yield* shown(api, id), "1")
      assert.isUndefined(yield* shown(api, waiting))
      yield* K.settle(runner, [{ id, attempt: 1 }])
      assert.strictEqual((yield* report(runner, reports.slice(0, 1))).length, 1)
    })
  )

  it.effect("of a lost executor is refused by the fence, and of its item's next owner shown", () =>
    Effect.gen(function* () {
      const { api, id, runner } = yield* running("lost")
      yield* report(runner, [{ id, attempt: 1, number: 9, value: "9" }])
      const next = yield* K.executor({ queue: "lost" })
      yield* K.loseExecutor(next.sql, runner.id)
      assert.strictEqual(
        yield* K.stateOf(report(runner, [{ id, attempt: 1, number: 10, value: "10" }])),
        "TN002"
      )
      yield* K.claim(next, 1)
      yield* report(next, [{ id, attempt: 2, number: 1, value: "1" }])
      assert.strictEqual(yield* shown(api, id), "1")
    })
  )

  it.effect("is told once to each who watches, and by itself to nobody", () =>
    Effect.gen(function* () {
      const { api, id, runner } = yield* running("told")
      const listener = yield* K.session("api")
      const told = yield* listener.listen(channel)
      yield* report(runner, [{ id, attempt: 1, number: 1, value: "1" }])
      assert.strictEqual(yield* notify(runner.sql, id), 0)
      yield* watch(api, id)
      yield* watch(api, id)
      yield* report(runner, [{ id, attempt: 1, number: 2, value: "2" }])
      assert.strictEqual(yield* notify(runner.sql, id), 1)
      assert.strictEqual((yield* Queue.take(told)).payload, `progress ${id}`)
      assert.strictEqual(yield* notify(runner.sql, id), 0)
      yield* watch(api, id)
      yield* api`SELECT tenure.forget_progress(${K.array([id])}::text::uuid[], ${channel})`
      assert.strictEqual(yield* notify(runner.sql, id), 0)
      assert.isTrue(Option.isNone(yield* Queue.poll(told)))
    })
  )

  it.effect("whatever the order of the four steps, the watcher is told or sees it", () =>
    Effect.gen(function* () {
      // The attempt reports (s), then reads watchers (n); the watcher registers (w), then reads (r).
      for (const order of ["snwr", "swnr", "swrn", "wsnr", "wsrn", "wrsn"]) {
        const { api, id, runner } = yield* running(`order ${order}`)
        let toldCount = 0
        let hasSeen = false
        for (const step of order) {
          if (step === "s") yield* report(runner, [{ id, attempt: 1, number: 1, value: "1" }])
          if (step === "n") toldCount = yield* notify(runner.sql, id)
          if (step === "w") yield* watch(api, id)
          if (step === "r") hasSeen = (yield* shown(api, id)) === "1"
        }
        assert.isTrue(toldCount === 1 || hasSeen, order)
      }
    })
  )

  it.effect("keeps no settle waiting, and is not kept by one", () =>
    Effect.gen(function* () {
      const { api, id, runner } = yield* running("beside")
      const second = { ...runner, sql: yield* K.session("worker", runner.id) }
      yield* runner.sql`BEGIN`
      yield* report(runner, [{ id, attempt: 1, number: 1, value: "1" }])
      assert.deepStrictEqual(yield* K.settle(second, [{ id, attempt: 1 }]), [])
      yield* runner.sql`COMMIT`
      assert.strictEqual(yield* K.placeOf(api, id), "completed")
      assert.strictEqual(yield* shown(api, id), "1")
    })
  )

  it.effect("leaves no row for items without reports", () =>
    Effect.gen(function* () {
      const { api, id, runner } = yield* running("silent")
      const owner = yield* K.session("owner")
      yield* K.settle(runner, [{ id, attempt: 1 }])
      assert.isUndefined(yield* shown(api, id))
      const rows = yield* owner`
        SELECT FROM tenure.progress WHERE item_id = ${id}::uuid
        UNION ALL SELECT FROM tenure.progress_waiter WHERE item_id = ${id}::uuid`
      assert.strictEqual(rows.length, 0)
    })
  )
})
