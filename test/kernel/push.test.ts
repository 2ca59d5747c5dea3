/**
 * Goal: who waits for an outcome is told of it, whenever he begins to wait.
 * Method: a listening session, and a waiter that registers at each moment of a settle. The order that
 * loses him is shown beside the one that does not.
 */
import { assert, layer } from "@effect/vitest"
import { Effect, Option, Queue } from "effect"
import { randomUUID } from "node:crypto"
import * as K from "./kernel.ts"

const channel = "tenure_test_waiter"

const outcomes = (sql: K.Sql, ids: ReadonlyArray<string>) =>
  sql<Record<string, unknown>>`
    SELECT o.id::text AS id, o.settled, o.outcome, o.reason, o.result::text AS result, o.attempt, o.losses
      FROM tenure.item_outcome(${[...ids]}::text[]::uuid[]) o`

const awaitItems = (sql: K.Sql, ids: ReadonlyArray<string>) =>
  sql`SELECT tenure.await_items(${[...ids]}::text[]::uuid[], ${channel})`

const notifySettled = (sql: K.Sql, ids: ReadonlyArray<string>) =>
  Effect.map(
    sql<{ told: number }>`SELECT tenure.notify_settled(${[...ids]}::text[]::uuid[]) AS told`,
    (rows) => K.first(rows).told
  )

const running = Effect.fnUntraced(function* (queue: string, count: number) {
  const api = yield* K.session("api")
  const runner = yield* K.executor({ queue })
  const second = { ...runner, sql: yield* K.session("worker", runner.id) }
  const listener = yield* K.session("api")
  const told = yield* listener.listen(channel)
  const ids = yield* K.enqueueMany(api, queue, count)
  yield* K.claim(runner, count)
  return { api, runner, second, told, ids }
})

layer(K.Kernel.layer, { excludeTestServices: true })("result push", (it) => {
  it.effect("an outcome is told once to each who waits, and what is not waited for to nobody", () =>
    Effect.gen(function* () {
      const { api, runner, told, ids } = yield* running("told", 3)
      const [one, two, three] = ids
      yield* awaitItems(api, [one ?? "", two ?? ""])
      yield* awaitItems(api, [one ?? ""])
      yield* K.settle(runner, [
        { id: one ?? "", attempt: 1, result: "1" },
        { id: three ?? "", attempt: 1 }
      ])
      assert.strictEqual(yield* notifySettled(runner.sql, [one ?? "", three ?? ""]), 1)
      assert.strictEqual((yield* Queue.take(told)).payload, one)
      assert.strictEqual(yield* notifySettled(runner.sql, [one ?? ""]), 0)
      assert.deepStrictEqual(
        (yield* outcomes(api, [one ?? "", two ?? "", randomUUID()])).toSorted(
          (a, b) => Number(b.settled) - Number(a.settled)
        ),
        [
          {
            id: one ?? "",
            settled: true,
            outcome: "completed",
            reason: null,
            result: "1",
            attempt: 1,
            losses: 0
          },
          {
            id: two ?? "",
            settled: false,
            outcome: null,
            reason: null,
            result: null,
            attempt: null,
            losses: null
          }
        ]
      )
    })
  )

  it.effect(
    "a waiter between settle and commit is told when waiters are read after it, and lost when before",
    () =>
      Effect.gen(function* () {
        const { api, runner, told, ids } = yield* running("between", 2)
        const [wrong, right] = ids

        // Waiters read inside the settling transaction: each of the two looks before the other is there.
        yield* runner.sql`BEGIN`
        yield* K.settle(runner, [{ id: wrong ?? "", attempt: 1 }])
        assert.strictEqual(yield* notifySettled(runner.sql, [wrong ?? ""]), 0)
        yield* awaitItems(api, [wrong ?? ""])
        assert.strictEqual((yield* outcomes(api, [wrong ?? ""]))[0]?.settled, false)
        yield* runner.sql`COMMIT`
        assert.strictEqual(Option.isNone(yield* Queue.poll(told)), true)

        yield* runner.sql`BEGIN`
        yield* K.settle(runner, [{ id: right ?? "", attempt: 1 }])
        yield* awaitItems(api, [right ?? ""])
        assert.strictEqual((yield* outcomes(api, [right ?? ""]))[0]?.settled, false)
        yield* runner.sql`COMMIT`
        assert.strictEqual(yield* notifySettled(runner.sql, [right ?? ""]), 1)
        assert.strictEqual((yield* Queue.take(told)).payload, right)
      })
  )

  it.effect("whatever the order of the four steps, one of the two sees the other", () =>
    Effect.gen(function* () {
      // The settler commits (s), then reads waiters (n); the waiter registers (w), then reads outcomes (r).
      for (const order of ["snwr", "swnr", "swrn", "wsnr", "wsrn", "wrsn"]) {
        const { api, runner, ids } = yield* running(`order ${order}`, 1)
        const id = ids[0] ?? ""
        let toldCount = 0
        let hasSeen = false
        for (const step of order) {
          if (step === "s") yield* K.settle(runner, [{ id, attempt: 1 }])
          if (step === "n") toldCount = yield* notifySettled(runner.sql, [id])
          if (step === "w") yield* awaitItems(api, [id])
          if (step === "r") hasSeen = (yield* outcomes(api, [id]))[0]?.settled === true
        }
        assert.isTrue(toldCount === 1 || hasSeen, order)
      }
    })
  )

  it.effect("a cancel and a passed deadline tell those who wait already", () =>
    Effect.gen(function* () {
      const { api, runner, told } = yield* running("endings", 0)
      const cancelled = yield* K.enqueueOne(api, "endings", "1")
      const late = yield* K.enqueueOne(api, "endings", "1", { deadlineMs: -1 })
      yield* awaitItems(api, [cancelled, late])
      yield* api`SELECT tenure.cancel(${cancelled}::uuid)`
      assert.strictEqual((yield* Queue.take(told)).payload, cancelled)
      // By whoever sweeps, after the commit, as a settle does.
      const swept = yield* runner.sql<{ ids: ReadonlyArray<string> }>`
        SELECT ids::text[] AS ids FROM tenure.expire_deadlines(10)`
      assert.deepStrictEqual(swept[0]?.ids, [late])
      assert.strictEqual(yield* notifySettled(runner.sql, [late]), 1)
      assert.strictEqual((yield* Queue.take(told)).payload, late)
    })
  )

  it.effect("who no longer waits is not told", () =>
    Effect.gen(function* () {
      const { api, runner, ids } = yield* running("forgotten", 1)
      yield* awaitItems(api, ids)
      yield* api`SELECT tenure.forget_items(${[...ids]}::text[]::uuid[], ${channel})`
      yield* K.settle(runner, [{ id: ids[0] ?? "", attempt: 1 }])
      assert.strictEqual(yield* notifySettled(runner.sql, ids), 0)
    })
  )

  it.effect(
    "an outcome that is settled while many register is told to every one of them or seen by him",
    () =>
      Effect.gen(function* () {
        const { api, runner, told, ids } = yield* running("many", 200)
        let seen = 0
        yield* Effect.all(
          [
            Effect.forEach(ids, (id) =>
              Effect.gen(function* () {
                yield* awaitItems(api, [id])
                if ((yield* outcomes(api, [id]))[0]?.settled === true) seen++
              })
            ),
            Effect.forEach(ids, (id) =>
              Effect.andThen(
                K.settle(runner, [{ id, attempt: 1 }]),
                notifySettled(runner.sql, [id])
              )
            )
          ],
          { concurrency: "unbounded" }
        )
        const payloads = new Set<string>()
        yield* api`SELECT pg_notify(${channel}, 'end')`
        for (;;) {
          const { payload } = yield* Queue.take(told)
          if (payload === "end") break
          payloads.add(payload)
        }
        assert.isAtLeast(payloads.size + seen, 200)
      })
  )
})
