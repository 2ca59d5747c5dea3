/**
 * Goal: an exhausted item is in quarantine together with its outcome, leaves it once, in the transaction
 * that writes the application's rows, or by an operator's hand, and never by itself (I9, Q1 to Q3, row 8,
 * K-112 to K-119).
 * Method: executors that are revoked by force, and sessions that settle step by step.
 */
import { assert, layer } from "@effect/vitest"
import { Effect, Fiber } from "effect"
import type { SqlError } from "effect/sql/SqlError"
import { randomUUID } from "node:crypto"
import * as K from "./kernel.ts"

/** An item whose four executors are gone, all but the last revocation of which is committed. */
const nearlyExhausted = Effect.fnUntraced(function* (
  queue: string,
  options: Partial<K.ExecutorOptions> = {}
) {
  const owner = yield* K.session("owner")
  const id = yield* K.enqueueOne(yield* K.session("api"), queue, `{"order":"${queue}"}`, {
    key: "k"
  })
  const last = yield* loseExecutors(queue, (options.recoveryMax ?? 4) - 1, options)
  return { owner, id, last }
})

/** Answers the executor that holds the item after so many losses. */
const loseExecutors = Effect.fnUntraced(function* (
  queue: string,
  times: number,
  options: Partial<K.ExecutorOptions> = {}
) {
  const owner = yield* K.session("owner")
  for (let turn = 0; ; turn++) {
    const runner = yield* K.executor({ queue, ...options })
    assert.strictEqual((yield* K.claim(runner, 1)).length, 1)
    if (turn === times) return runner
    yield* K.loseExecutor(owner, runner.id)
  }
})

const quarantined = Effect.fnUntraced(function* (queue: string) {
  const { id, last, owner } = yield* nearlyExhausted(queue)
  yield* K.loseExecutor(owner, last.id)
  return { id, owner, settler: yield* K.executor({ queue }) }
})

const rowsOf = (sql: K.Sql, id: string) => sql`
  SELECT q.state, q.executions, q.reason, q.failures, q.last_error_code, q.settled_by,
         q.quarantined_at = d.finished_at AND q.due_at = q.quarantined_at AS dated
    FROM tenure.quarantine q LEFT JOIN tenure.done d ON d.id = q.item_id WHERE q.item_id = ${id}::uuid`

const open = {
  state: "open",
  executions: 4,
  reason: "MAX_RECOVERY_ATTEMPTS_EXCEEDED",
  failures: 0,
  last_error_code: null,
  settled_by: null,
  dated: true
}

const look = (settler: K.Executor, queueIds: ReadonlyArray<number> = [settler.queueId], max = 10) =>
  settler.sql<{ item_id: string | null; failures: number; next_due_ms: number }>`
    SELECT t.item_id::text AS item_id, t.failures, t.next_due_ms
      FROM tenure.take_settlements(${K.array(queueIds)}::text::int[], '1 s', '5 min', ${max}::int) t`

const take = (...options: Parameters<typeof look>) =>
  Effect.map(look(...options), (rows) =>
    rows.flatMap((row) => (row.item_id === null ? [] : [{ ...row, item_id: row.item_id }]))
  )

const begin = (settler: K.Executor, id: string) =>
  settler.sql`SELECT payload::text AS payload, key, executions, reason FROM tenure.begin_settlement(${id}::uuid)`

const end = (settler: K.Executor, id: string) =>
  Effect.map(
    settler.sql<{ ended: boolean }>`SELECT tenure.end_settlement(${id}::uuid) AS ended`,
    (rows) => K.first(rows).ended
  )

const failed = (settler: K.Executor, id: string) =>
  Effect.map(
    settler.sql<{ open: boolean }>`SELECT tenure.settlement_failed(${id}::uuid, 'Timeout') AS open`,
    (rows) => K.first(rows).open
  )

const answerOf = (sql: K.Sql, call: "close_quarantine" | "retry_quarantined", id: string) =>
  Effect.map(
    sql.unsafe<{ answer: string }>(`SELECT tenure.${call}('${id}') AS answer`),
    (rows) => K.first(rows).answer
  )

layer(K.Kernel.layer, { excludeTestServices: true })("quarantine", (it) => {
  it.effect("holds an exhausted item from the commit of its outcome on, whatever the limit", () =>
    Effect.gen(function* () {
      const { id, last, owner } = yield* nearlyExhausted("both or none")
      const other = yield* K.session("owner")
      const seen = () =>
        Effect.map(
          other`SELECT (SELECT count(*)::int FROM tenure.done WHERE id = ${id}::uuid) AS done,
                       (SELECT count(*)::int FROM tenure.quarantine WHERE item_id = ${id}::uuid) AS quarantined`,
          K.first
        )
      yield* owner`BEGIN`
      yield* K.loseExecutor(owner, last.id)
      assert.deepStrictEqual(yield* seen(), { done: 0, quarantined: 0 })
      yield* owner`ROLLBACK`
      assert.deepStrictEqual(yield* seen(), { done: 0, quarantined: 0 })
      yield* K.loseExecutor(owner, last.id)
      assert.deepStrictEqual(yield* seen(), { done: 1, quarantined: 1 })
      assert.deepStrictEqual(yield* rowsOf(owner, id), [open])

      const consecutive = yield* nearlyExhausted("consecutive", {
        recoveryLimit: "consecutive",
        recoveryMax: 3
      })
      yield* K.loseExecutor(owner, consecutive.last.id)
      assert.deepStrictEqual(yield* rowsOf(owner, consecutive.id), [
        { ...open, executions: 3, reason: "EXECUTION_RECOVERY_EXHAUSTED" }
      ])
    })
  )

  it.effect("holds nothing that ended in another way", () =>
    Effect.gen(function* () {
      const owner = yield* K.session("owner")
      const api = yield* K.session("api")
      const { ids } = yield* K.enqueueAll(api, "others", ["1", "2", "3"], {
        deadlinesMs: [-1, null, null]
      })
      const runner = yield* K.executor({ queue: "others" })
      const claimed = yield* K.claim(runner, 3)
      yield* api`SELECT tenure.cancel(${ids?.[1] ?? ""}::uuid)`
      yield* K.settle(
        runner,
        claimed.slice(2).map(({ attempt, id }) => ({ id, attempt, outcome: "failed" }))
      )
      const report = yield* K.loseExecutor(owner, runner.id)
      assert.strictEqual(report.settled.length, 2)
      assert.deepStrictEqual(
        yield* owner`SELECT item_id FROM tenure.quarantine WHERE queue_id = ${runner.queueId}::int`,
        []
      )
    })
  )

  it.effect("is left by an operator's retry, settled or not, and a second one begins anew", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const { id, owner, settler } = yield* quarantined("again")
      yield* take(settler)
      assert.strictEqual(yield* answerOf(api, "retry_quarantined", id), "available")
      assert.deepStrictEqual(yield* rowsOf(owner, id), [])
      assert.deepStrictEqual(
        yield* owner`SELECT losses, stuck FROM tenure.ready WHERE id = ${id}::uuid`,
        [{ losses: 0, stuck: 0 }]
      )
      yield* K.loseExecutor(owner, (yield* loseExecutors("again", 3)).id)
      assert.deepStrictEqual(yield* rowsOf(owner, id), [open])

      yield* settler.sql`BEGIN`
      yield* begin(settler, id)
      yield* end(settler, id)
      yield* settler.sql`COMMIT`
      yield* api`SELECT tenure.retry(${id}::uuid)`
      assert.deepStrictEqual(yield* rowsOf(owner, id), [])
      yield* K.loseExecutor(owner, (yield* loseExecutors("again", 3)).id)
      assert.deepStrictEqual(yield* rowsOf(owner, id), [open])
    })
  )

  it.effect("says of what is not in it where it is, and changes nothing", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const runner = yield* K.executor({ queue: "elsewhere" })
      const waiting = yield* K.enqueueOne(api, "elsewhere", "1")
      const claimed = yield* K.claim(runner, 1)
      const [fails, completes] = yield* K.enqueueMany(api, "elsewhere", 2)
      yield* K.settle(
        runner,
        (yield* K.claim(runner, 2)).map(({ attempt, id }) => ({
          id,
          attempt,
          outcome: id === fails ? "failed" : "completed"
        }))
      )
      assert.strictEqual(claimed[0]?.id, waiting)
      const owner = yield* K.session("owner")
      const ids = [waiting, fails ?? "", completes ?? "", randomUUID()]
      const places = yield* K.placesOf(owner, ids)
      const answers = yield* Effect.forEach(ids, (id) => answerOf(api, "retry_quarantined", id))
      assert.deepStrictEqual(answers, ["claimed", "failed", "completed", "unknown"])
      for (const id of ids) {
        assert.strictEqual(yield* answerOf(api, "close_quarantine", id), "unknown")
      }
      assert.deepStrictEqual(yield* K.placesOf(owner, ids), places)
    })
  )

  it.effect("is left in the transaction that writes the application's rows, by one settler", () =>
    Effect.gen(function* () {
      const { id, owner, settler: first } = yield* quarantined("once")
      const second = yield* K.executor({ queue: "once" })
      yield* owner`CREATE TABLE failure (id uuid)`
      yield* owner`SELECT tenure.fence_table('failure')`
      yield* owner`GRANT SELECT, INSERT ON failure TO tenure_worker`
      const write = (settler: K.Executor) => settler.sql`INSERT INTO failure VALUES (${id}::uuid)`
      const written = owner<{ n: number }>`SELECT count(*)::int AS n FROM failure`

      yield* first.sql`BEGIN`
      assert.deepStrictEqual(yield* begin(first, id), [
        {
          payload: `{"order":"once"}`,
          key: "k",
          executions: 4,
          reason: "MAX_RECOVERY_ATTEMPTS_EXCEEDED"
        }
      ])
      yield* write(first)
      // Neither takes the other's, nor waits for it.
      yield* second.sql`BEGIN`
      assert.deepStrictEqual(yield* begin(second, id), [])
      yield* second.sql`ROLLBACK`
      assert.deepStrictEqual(yield* take(second), [])
      yield* end(first, id)
      yield* first.sql`ROLLBACK`
      assert.deepStrictEqual(yield* rowsOf(owner, id), [open])

      yield* second.sql`BEGIN`
      assert.strictEqual((yield* begin(second, id)).length, 1)
      yield* write(second)
      assert.isTrue(yield* end(second, id))
      yield* second.sql`COMMIT`
      assert.deepStrictEqual(yield* begin(first, id), [])
      assert.deepStrictEqual(yield* take(first), [])
      assert.deepStrictEqual(yield* written, [{ n: 1 }])
      assert.deepStrictEqual(yield* rowsOf(owner, id), [
        { ...open, state: "settled", settled_by: second.id }
      ])
    })
  )

  it.effect("charges a try before it begins, and postpones the next one: 1 s, doubled, 5 min", () =>
    Effect.gen(function* () {
      const { id, owner, settler } = yield* quarantined("pace")
      for (let failures = 1; failures <= 40; failures++) {
        const [taken, next] = yield* look(settler)
        assert.deepStrictEqual([taken?.item_id, taken?.failures], [id, failures])
        const whole = Math.min(300_000, 1000 * 2 ** (failures - 1))
        assert.isNull(next?.item_id)
        assert.isAtLeast(next?.next_due_ms ?? 0, whole / 2)
        assert.isAtMost(next?.next_due_ms ?? 0, whole)
        assert.deepStrictEqual(yield* take(settler), [], "not before its pause is over")
        yield* owner`UPDATE tenure.quarantine SET due_at = tenure.clock() WHERE item_id = ${id}::uuid`
      }
      yield* settler.sql`BEGIN`
      yield* take(settler)
      yield* begin(settler, id)
      yield* end(settler, id)
      yield* settler.sql`COMMIT`
      assert.deepStrictEqual(
        yield* owner`SELECT state, failures FROM tenure.quarantine WHERE item_id = ${id}::uuid`,
        [{ state: "settled", failures: 40 }]
      )
    })
  )

  it.effect("gives each settler items of its own, one of a queue, the longest due first", () =>
    Effect.gen(function* () {
      const owner = yield* K.session("owner")
      const settlers = yield* Effect.all(
        Array.from({ length: 4 }, (_, n) => K.executor({ queue: `shared ${n}` }))
      )
      const queueIds = settlers.map(({ queueId }) => queueId)
      yield* owner`
        INSERT INTO tenure.quarantine (item_id, queue_id, quarantined_at, executions, reason, due_at)
        SELECT gen_random_uuid(), u.id, tenure.clock(), 4, 'MAX_RECOVERY_ATTEMPTS_EXCEEDED',
               tenure.clock() - make_interval(secs => n * 4 + u.place)
          FROM unnest(${K.array(queueIds)}::text::int[]) WITH ORDINALITY u(id, place), generate_series(1, 20) n`
      const [first] = settlers
      if (first === undefined) return assert.fail()
      const queueOf = (id: string) =>
        owner`SELECT queue_id FROM tenure.quarantine WHERE item_id = ${id}::uuid`
      const some = yield* take(first, queueIds, 2)
      assert.deepStrictEqual(
        (yield* Effect.forEach(some, (row) => queueOf(row.item_id))).flat(),
        [{ queue_id: queueIds[3] }, { queue_id: queueIds[2] }],
        "of the queues that have waited longest"
      )
      const rounds = yield* Effect.forEach(
        settlers,
        (settler) => Effect.replicateEffect(take(settler, queueIds), 19),
        { concurrency: "unbounded" }
      )
      const taken = rounds.flat(2).map((row) => row.item_id)
      assert.strictEqual(new Set(taken).size, taken.length, "none was taken twice")
      yield* Effect.replicateEffect(take(first, queueIds), 20)
      assert.deepStrictEqual(
        yield* owner`SELECT failures, count(*)::int AS n FROM tenure.quarantine
                      WHERE queue_id = ANY(${K.array(queueIds)}::text::int[]) GROUP BY 1`,
        [{ failures: 1, n: 80 }],
        "and none was passed over"
      )
    })
  )

  it.effect("tells a failure from an answer that was lost, and waits for nobody to do so", () =>
    Effect.gen(function* () {
      const { id, owner, settler } = yield* quarantined("lost answer")
      const other = yield* K.executor({ queue: "lost answer" })
      yield* take(settler)
      assert.isTrue(yield* failed(settler, id))
      assert.deepStrictEqual(yield* rowsOf(owner, id), [
        { ...open, failures: 1, last_error_code: "Timeout", dated: false }
      ])
      yield* other.sql`BEGIN`
      yield* begin(other, id)
      assert.isTrue(yield* failed(settler, id), "in another's hands, and open")
      yield* end(other, id)
      yield* other.sql`COMMIT`
      assert.isFalse(yield* failed(settler, id), "settled")
      yield* owner`SELECT tenure.retry(${id}::uuid)`
      assert.isFalse(yield* failed(settler, id), "gone")
    })
  )

  it.effect(
    "is closed by hand once, and not while it is being settled; nor is it retried then",
    () =>
      Effect.gen(function* () {
        const { id, owner, settler } = yield* quarantined("by hand")
        const api = yield* K.session("api")
        yield* settler.sql`BEGIN`
        yield* begin(settler, id)
        yield* end(settler, id)
        // Nobody waits for what is the application's transaction.
        assert.strictEqual(yield* answerOf(api, "close_quarantine", id), "busy")
        assert.strictEqual(yield* answerOf(api, "retry_quarantined", id), "busy")
        yield* settler.sql`ROLLBACK`
        assert.strictEqual(yield* answerOf(api, "close_quarantine", id), "closed")
        assert.deepStrictEqual(yield* rowsOf(owner, id), [
          { ...open, state: "settled", settled_by: "tenure_test_api" }
        ])
        assert.strictEqual(yield* answerOf(api, "close_quarantine", id), "settled")
        assert.deepStrictEqual(yield* begin(settler, id), [])
      })
  )

  it.effect("waits with WorkQueue's own retry for the settlement that is in progress", () =>
    Effect.gen(function* () {
      const { id, owner, settler } = yield* quarantined("waits")
      const api = yield* K.session("api")
      const pid = yield* K.pidOf(api)
      yield* settler.sql`BEGIN`
      yield* begin(settler, id)
      const retrying = yield* Effect.forkChild(
        api<{ answer: string }>`SELECT tenure.retry(${id}::uuid) AS answer`
      )
      yield* K.whenBlocked(owner, pid)
      yield* end(settler, id)
      yield* settler.sql`COMMIT`
      assert.deepStrictEqual(yield* Fiber.join(retrying), [{ answer: "available" }])
      assert.deepStrictEqual(yield* rowsOf(owner, id), [])
      assert.strictEqual(yield* K.placeOf(owner, id), "ready")
    })
  )

  it.effect(
    "is no business of a revoked executor, of a session without one, or of another application",
    () =>
      Effect.gen(function* () {
        const { id, owner, settler } = yield* quarantined("fenced")
        const nobody = yield* K.session("worker")
        assert.strictEqual(
          yield* K.stateOf(nobody`SELECT key FROM tenure.begin_settlement(${id}::uuid)`),
          "TN004"
        )
        yield* K.loseExecutor(owner, settler.id)
        const calls: ReadonlyArray<Effect.Effect<unknown, SqlError>> = [
          take(settler),
          begin(settler, id),
          end(settler, id),
          failed(settler, id)
        ]
        for (const call of calls) assert.strictEqual(yield* K.stateOf(call), "TN002")
        assert.deepStrictEqual(yield* rowsOf(owner, id), [open])

        const other = yield* K.executor({ queue: "of another", application: "other" })
        assert.strictEqual(
          yield* K.stateOf(other.sql`SELECT tenure.settling_queue('fenced', 'other')`),
          "TN011"
        )
        assert.deepStrictEqual(
          yield* other.sql`SELECT tenure.settling_queue('of another', 'other') AS id`,
          [{ id: other.queueId }]
        )
        // Who settles a queue that nobody has run yet owns it.
        yield* other.sql`SELECT tenure.settling_queue('new', 'other')`
        assert.strictEqual(yield* K.stateOf(K.executor({ queue: "new" })), "TN011")
      })
  )
})
