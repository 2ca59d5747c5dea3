/**
 * Goal: a dead letter is in one pair of hands at a time, comes back once and by one way, and goes only when
 * somebody says so and nobody has still to deal with it (D1 to D4; row 42; W-009 to W-012, K-118).
 * Method: sessions that take, answer and walk step by step; leases whose time is over; walks while new
 * letters come in.
 */
import { assert, layer } from "@effect/vitest"
import { Effect } from "effect"
import { randomUUID } from "node:crypto"
import { present } from "../support/present.ts"
import * as K from "./kernel.ts"

const zero = "00000000-0000-0000-0000-000000000000"

/** Makes dead letters of the items that wait, with an error each. */
const fail = Effect.fnUntraced(function* (
  runner: K.Executor,
  count: number,
  error = `{"_tag":"Refused"}`
) {
  const claimed = yield* K.claim(runner, count)
  yield* K.settle(
    runner,
    claimed.map(({ attempt, id }) => ({ id, attempt, outcome: "failed", result: error }))
  )
  return claimed.map(({ id }) => id)
})

const scene = Effect.fnUntraced(function* (queue: string, count: number) {
  const api = yield* K.session("api")
  const owner = yield* K.session("owner")
  const runner = yield* K.executor({ queue })
  // As a walk meets them: before PostgreSQL 18 ids of one millisecond are in no order.
  const ids = [...(yield* K.enqueueMany(api, queue, count))].sort()
  yield* fail(runner, count)
  return { api, owner, runner, ids }
})

interface Conditions {
  readonly reason?: string
  readonly before?: string
  readonly contains?: string
}

interface Taken {
  readonly id: string
  readonly lease: string
  readonly payload: string
}

const take = (sql: K.Sql, queue: string, max = 1, { before, contains, reason }: Conditions = {}) =>
  sql<Taken>`
    SELECT id::text AS id, lease::text AS lease, payload::text AS payload
      FROM tenure.take_dead_letters(${queue}, ${reason ?? null}::text, NULL, ${before ?? null}::text::timestamptz,
             ${contains ?? null}::text, '5 minutes', ${max}::int, 'somebody')`

const answerOf = (sql: K.Sql, call: string, { id, lease }: Taken) =>
  Effect.map(
    sql.unsafe<{ answer: string }>(`SELECT tenure.${call}('${id}', '${lease}')::text AS answer`),
    (rows) => K.first(rows).answer
  )

interface Walked {
  readonly processed: number
  readonly changed: number
  readonly next: string | null
}

const step = (
  sql: K.Sql,
  walk: "redrive" | "purge",
  queue: string,
  after: string | null,
  looked: number,
  { before, contains, reason }: Conditions = {}
) =>
  Effect.map(
    walk === "redrive"
      ? sql<Walked>`
          SELECT processed, reinjected AS changed, next_id::text AS next
            FROM tenure.redrive_dead_letters(${queue}, ${reason ?? null}::text, NULL,
                   ${before ?? null}::text::timestamptz, ${contains ?? null}::text, ${after}::text::uuid, ${looked}::int)`
      : sql<Walked>`
          SELECT processed, purged AS changed, next_id::text AS next
            FROM tenure.purge_dead_letters(${queue}, ${reason ?? null}::text, NULL,
                   ${before ?? null}::text::timestamptz, ${contains ?? null}::text, ${after}::text::uuid, ${looked}::int)`,
    K.first
  )

/** All of a queue at once. */
const whole = (sql: K.Sql, walk: "redrive" | "purge", queue: string, conditions: Conditions = {}) =>
  Effect.map(step(sql, walk, queue, null, 1000, conditions), ({ changed, processed }) => [
    processed,
    changed
  ])

const list = (sql: K.Sql, queue: string, after: string | null = null, looked = 1000) =>
  sql<{ id: string | null; reason: string; error: string; next: string | null }>`
    SELECT id::text AS id, reason, error::text AS error, cursor_id::text AS next
      FROM tenure.dead_letters(${queue}, NULL, NULL, NULL, NULL, ${after}::text::uuid, ${looked}::int, false)`

const byId = ([one = ""]: ReadonlyArray<string>, [other = ""]: ReadonlyArray<string>) =>
  one < other ? -1 : 1

const eventsOf = (sql: K.Sql, id: string) =>
  Effect.map(
    sql<{ event: string }>`
      SELECT event FROM tenure.audit_event WHERE item_id = ${id}::uuid ORDER BY id`,
    (rows) => rows.map(({ event }) => event)
  )

const quarantine = Effect.fnUntraced(function* (queue: string) {
  const id = yield* K.enqueueOne(yield* K.session("api"), queue, "1")
  const lost = yield* K.executor({ queue, recoveryMax: 1 })
  yield* K.claim(lost, 1)
  yield* K.loseExecutor(yield* K.session("owner"), lost.id)
  return id
})

layer(K.Kernel.layer, { excludeTestServices: true })("dead letters", (it) => {
  it.effect("are what has failed for good, whatever the reason, in the order of hand-in", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const runner = yield* K.executor({ queue: "kinds" })
      yield* K.enqueueMany(api, "kinds", 5)
      const [declared, died, late, cancelled, completed] = yield* K.claim(runner, 5)
      yield* K.settle(runner, [
        { ...present(declared), outcome: "failed", result: `{"_tag":"Refused"}` },
        { ...present(died), outcome: "failed", reason: "HandlerDied" },
        { ...present(late), outcome: "failed", reason: "DeadlineExceeded" },
        { ...present(cancelled), outcome: "cancelled" },
        { ...present(completed) }
      ])
      const quarantined = yield* quarantine("kinds")
      const letters = yield* list(api, "kinds")
      assert.deepStrictEqual(
        letters.map(({ id, reason }) => [id, reason]),
        [
          [present(declared).id, "DeclaredError"],
          [present(died).id, "HandlerDied"],
          [present(late).id, "DeadlineExceeded"],
          [quarantined, "MAX_RECOVERY_ATTEMPTS_EXCEEDED"]
        ].sort(byId)
      )
      assert.include(
        letters.map(({ error }) => error),
        `{"_tag":"Refused"}`
      )
      assert.deepStrictEqual(yield* list(api, "nobody's queue"), [])
      for (const [conditions, expected] of [
        [{ reason: "DeclaredError" }, 1],
        [{ reason: "MAX_RECOVERY_ATTEMPTS_EXCEEDED" }, 1],
        [{ contains: `"Refused"` }, 1],
        [{ contains: "refused" }, 0],
        [{ before: "2001-01-01" }, 0],
        [{ before: "infinity" }, 4]
      ] as const) {
        yield* api`BEGIN`
        const [processed] = yield* whole(api, "redrive", "kinds", conditions)
        assert.strictEqual(processed, expected, JSON.stringify(conditions))
        yield* api`ROLLBACK`
      }
    })
  )

  it.effect("are listed page by page, each once, whatever comes and goes meanwhile", () =>
    Effect.gen(function* () {
      const { api, ids, runner } = yield* scene("pages", 7)
      const seen: Array<string> = []
      let after: string | null = null
      do {
        const page: ReadonlyArray<{ id: string | null; next: string | null }> = yield* list(
          api,
          "pages",
          after,
          2
        )
        seen.push(...page.flatMap(({ id }) => (id === null ? [] : [id])))
        after = page.at(-1)?.next ?? null
        // One that was seen comes back and fails again.
        yield* api`SELECT tenure.retry(${present(seen[0])}::uuid)`
        yield* fail(runner, 1)
      } while (after !== null)
      assert.deepStrictEqual(seen, [...ids])
    })
  )

  it.effect("are in one taker's hands at a time, however many look at once", () =>
    Effect.gen(function* () {
      const { api, ids } = yield* scene("takers", 60)
      const sessions = yield* Effect.all(Array.from({ length: 6 }, () => K.session("api")))
      const rounds = yield* Effect.forEach(
        sessions,
        (sql) => Effect.replicateEffect(take(sql, "takers", 3), 4),
        { concurrency: "unbounded" }
      )
      const taken = rounds.flat(2).map(({ id }) => id)
      assert.strictEqual(new Set(taken).size, taken.length, "none was given twice")
      const rest = yield* take(api, "takers", 1000)
      assert.deepStrictEqual([...taken, ...rest.map(({ id }) => id)].sort(), [...ids].sort())
      assert.deepStrictEqual(yield* take(api, "takers", 1000), [])
    })
  )

  it.effect("are passed over while somebody is about to take or to bring back one", () =>
    Effect.gen(function* () {
      const { api, ids } = yield* scene("locked", 3)
      const [first, second, third] = ids
      const other = yield* K.session("api")
      yield* other`BEGIN`
      yield* take(other, "locked")
      yield* other`SELECT tenure.retry(${present(second)}::uuid)`
      // Nobody waits for the other's transaction.
      assert.deepStrictEqual(
        (yield* take(api, "locked", 9)).map(({ id }) => id),
        [third]
      )
      assert.deepStrictEqual(yield* whole(api, "redrive", "locked"), [3, 0])
      assert.deepStrictEqual(yield* whole(api, "purge", "locked"), [3, 0])
      yield* other`ROLLBACK`
      assert.deepStrictEqual(
        (yield* take(api, "locked", 9)).map(({ id }) => id),
        [first, second]
      )
    })
  )

  it.effect("come back under the taker's lease, with their id, fresh counters and a history", () =>
    Effect.gen(function* () {
      const { api, owner, runner } = yield* scene("reinject", 0)
      const id = yield* K.enqueueOne(api, "reinject", `"payload"`, { deadlineMs: 60_000, key: "k" })
      const [claimed] = yield* K.claim(runner, 1)
      yield* K.settle(runner, [{ id, attempt: 1, outcome: "retry" }])
      assert.strictEqual(claimed?.id, id)
      yield* fail(runner, 1)
      // By now it is too late for it to run: to bring it back as it was would be to let it fail again.
      yield* owner`UPDATE tenure.item SET deadline_at = tenure.clock() - interval '1 s' WHERE id = ${id}::uuid`
      yield* owner`UPDATE tenure.deadline SET due_at = tenure.clock() - interval '1 s' WHERE id = ${id}::uuid`
      const taken = present((yield* take(api, "reinject"))[0])
      assert.deepStrictEqual([taken.id, taken.payload], [id, `"payload"`])
      assert.strictEqual(yield* answerOf(api, "reinject_dead_letter", taken), "available")
      assert.strictEqual(yield* answerOf(api, "reinject_dead_letter", taken), "ready", "once")
      yield* runner.sql`SELECT expired FROM tenure.expire_deadlines(100)`
      const [again] = yield* K.claim(runner, 1)
      assert.deepInclude(again, {
        id,
        attempt: 3,
        failures: 0,
        losses: 0,
        key: "k",
        payload: `"payload"`,
        deadline_in_ms: null
      })
      assert.deepStrictEqual(yield* eventsOf(owner, id), ["dead_letter.reinjected"])
      assert.deepStrictEqual(
        yield* owner`SELECT FROM tenure.dead_letter_lease WHERE item_id = ${id}::uuid`,
        []
      )
    })
  )

  it.effect("are out of his hands when his time is over: his answer changes nothing then", () =>
    Effect.gen(function* () {
      const { api, owner } = yield* scene("expiry", 1)
      const stale = present((yield* take(api, "expiry"))[0])
      assert.deepStrictEqual(yield* take(api, "expiry"), [])
      yield* owner`UPDATE tenure.dead_letter_lease SET expires_at = tenure.clock() - interval '1 s'`
      for (const call of ["reinject_dead_letter", "discard_dead_letter"]) {
        assert.strictEqual(yield* answerOf(api, call, stale), "stale", `${call}, expired`)
      }
      const taken = present((yield* take(api, "expiry"))[0])
      assert.strictEqual(taken.id, stale.id)
      for (const [call, refusal] of [
        ["reinject_dead_letter", "stale"],
        ["discard_dead_letter", "stale"],
        ["release_dead_letter", "false"]
      ] as const) {
        assert.strictEqual(yield* answerOf(api, call, stale), refusal, `${call}, another's`)
      }
      assert.strictEqual(yield* K.placeOf(owner, stale.id), "failed")
      assert.strictEqual(yield* answerOf(api, "release_dead_letter", taken), "true")
      assert.strictEqual((yield* take(api, "expiry"))[0]?.id, taken.id)
    })
  )

  it.effect("are touched by no retry, redrive or purge while they are in somebody's hands", () =>
    Effect.gen(function* () {
      const { api, owner, ids } = yield* scene("held", 2)
      const [held, free] = ids
      const taken = present((yield* take(api, "held"))[0])
      assert.strictEqual(taken.id, held)
      const retried = yield* api`SELECT tenure.retry(${taken.id}::uuid) AS answer`
      assert.deepStrictEqual(retried, [{ answer: "taken" }])
      assert.deepStrictEqual(yield* whole(api, "redrive", "held"), [2, 1])
      assert.deepStrictEqual(yield* whole(api, "purge", "held"), [1, 0])
      assert.deepStrictEqual(yield* K.placesOf(owner, ids), {
        [present(held)]: "failed",
        [present(free)]: "ready"
      })
      assert.strictEqual(yield* answerOf(api, "discard_dead_letter", taken), "purged")
      assert.strictEqual(yield* K.placeOf(owner, taken.id), "nowhere")
      assert.deepStrictEqual(yield* eventsOf(owner, taken.id), ["dead_letter.discarded"])
    })
  )

  it.effect(
    "are brought back in batches, and what fails meanwhile is not this walk's concern",
    () =>
      Effect.gen(function* () {
        const { api, ids, owner, runner } = yield* scene("walk", 25)
        const [{ before }] = (yield* owner`SELECT tenure.clock()::text AS before`) as unknown as [
          { before: string }
        ]
        let after: string | null = null
        let processed = 0
        let changed = 0
        let steps = 0
        do {
          const walked: Walked = yield* step(api, "redrive", "walk", after, 10, { before })
          assert.isAtMost(walked.processed, 10)
          processed += walked.processed
          changed += walked.changed
          after = walked.next
          steps++
          // New ones, and some of those that were brought back, which stand before the walk and behind it.
          yield* K.enqueueMany(api, "walk", 4)
          yield* fail(runner, 30)
          assert.isBelow(steps, 20, "the walk ends")
        } while (after !== null)
        assert.deepStrictEqual([processed, changed], [25, 25])
        const events = yield* Effect.forEach(ids, (id) => eventsOf(owner, id))
        assert.deepStrictEqual(
          events,
          ids.map(() => ["dead_letter.redriven"])
        )
        // Begun again, it finds what has failed since.
        const [left] = yield* whole(api, "redrive", "walk")
        assert.isAbove(left ?? 0, 0)
      })
  )

  it.effect("are found by a part of their error, whatever characters that has", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const runner = yield* K.executor({ queue: "texts" })
      const texts = [`a "quoted" word`, "back\\slash", "100 %_", "no such text", "line\nbreak"]
      for (const text of texts) {
        yield* K.enqueueOne(api, "texts", "1")
        yield* fail(runner, 1, JSON.stringify({ message: text }))
      }
      yield* K.enqueueOne(api, "texts", "1")
      yield* fail(runner, 1, String.raw`{"message":"a NUL \u0000"}`)
      for (const text of texts) {
        yield* api`BEGIN`
        assert.deepStrictEqual(
          yield* whole(api, "purge", "texts", { contains: text }),
          [1, 1],
          JSON.stringify(text)
        )
        yield* api`ROLLBACK`
      }
    })
  )

  it.effect("are purged with all that belongs to them, and nothing else is", () =>
    Effect.gen(function* () {
      const { api, owner, runner } = yield* scene("purge", 0)
      const { ids } = yield* K.enqueueAll(api, "purge", ["1", "2"], {
        idempotencyKeys: ["a", "b"],
        deadlinesMs: [60_000, 60_000]
      })
      const [purged, kept] = ids ?? []
      const claimed = yield* K.claim(runner, 2)
      yield* K.checkpoint(
        runner,
        claimed.map((one) => ({ ...one, name: "n", value: "1" }))
      )
      yield* owner`SELECT tenure.await_items(${[...(ids ?? [])]}::text[]::uuid[], 'nobody')`
      yield* K.settle(
        runner,
        claimed.map(({ attempt, id }) => ({
          id,
          attempt,
          outcome: id === purged ? "failed" : "completed"
        }))
      )
      const open = yield* quarantine("purge")
      assert.deepStrictEqual(yield* whole(api, "purge", "purge"), [2, 1])
      const left = yield* owner`
        SELECT (SELECT array_agg(id::text ORDER BY id) FROM tenure.item WHERE queue_id = ${runner.queueId}::int) AS item,
               (SELECT array_agg(id::text ORDER BY id) FROM tenure.done WHERE queue_id = ${runner.queueId}::int) AS done,
               (SELECT array_agg(item_id::text) FROM tenure.step WHERE item_id = ANY(${[...(ids ?? [])]}::text[]::uuid[])) AS step,
               (SELECT array_agg(key) FROM tenure.item_key WHERE queue_id = ${runner.queueId}::int) AS keys,
               (SELECT array_agg(item_id::text) FROM tenure.waiter) AS waiter,
               (SELECT array_agg(id::text) FROM tenure.deadline WHERE id = ANY(${[...(ids ?? [])]}::text[]::uuid[])) AS deadline`
      assert.deepStrictEqual(left, [
        {
          item: [kept, open],
          done: [kept, open],
          step: [kept],
          keys: ["b"],
          waiter: [kept],
          deadline: [kept]
        }
      ])
      // Somebody has dealt with it.
      yield* api`SELECT tenure.close_quarantine(${open}::uuid)`
      assert.deepStrictEqual(yield* whole(api, "purge", "purge"), [1, 1])
      assert.deepStrictEqual(yield* eventsOf(owner, open), [
        "quarantine.closed",
        "dead_letter.purged"
      ])
    })
  )

  it.effect("in quarantine come back as by a retry, and not while they are being settled", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const owner = yield* K.session("owner")
      const id = yield* quarantine("settling")
      const settler = yield* K.executor({ queue: "settling" })
      const taken = present((yield* take(api, "settling"))[0])
      yield* settler.sql`BEGIN`
      yield* settler.sql`SELECT key FROM tenure.begin_settlement(${id}::uuid)`
      assert.strictEqual(yield* answerOf(api, "reinject_dead_letter", taken), "busy")
      yield* answerOf(api, "release_dead_letter", taken)
      assert.deepStrictEqual(yield* whole(api, "redrive", "settling"), [1, 0])
      yield* settler.sql`ROLLBACK`
      assert.deepStrictEqual(yield* whole(api, "redrive", "settling"), [1, 1])
      assert.deepStrictEqual(
        yield* owner`SELECT FROM tenure.quarantine WHERE item_id = ${id}::uuid`,
        []
      )
      assert.deepInclude((yield* K.claim(settler, 1))[0], { id, attempt: 2, losses: 0 })
    })
  )

  it.effect(
    "what people do is in the audit when it is done, with who did it, and not otherwise",
    () =>
      Effect.gen(function* () {
        const { api, owner, ids, runner } = yield* scene("audit", 1)
        const id = present(ids[0])
        yield* api`BEGIN`
        yield* api`SELECT tenure.retry(${id}::uuid)`
        yield* api`ROLLBACK`
        assert.deepStrictEqual(yield* eventsOf(owner, id), [])
        yield* api`SELECT tenure.retry(${id}::uuid)`
        yield* K.claim(runner, 1)
        yield* api`SELECT tenure.cancel(${id}::uuid)`
        yield* K.settle(runner, [{ id, attempt: 2, outcome: "hand-back" }])
        yield* api`SELECT tenure.cancel(${id}::uuid)`
        yield* api`SELECT tenure.cancel(${id}::uuid)`
        yield* api`SELECT tenure.cancel(${zero}::uuid)`
        assert.deepStrictEqual(
          yield* owner`
          SELECT event, actor, application, queue FROM tenure.audit_events(NULL, ${id}::uuid, NULL, NULL, NULL, 9)`,
          ["item.cancelled", "item.cancel_requested", "item.retried"].map((event) => ({
            event,
            actor: "tenure_test_api",
            application: "tenure kernel api",
            queue: "audit"
          }))
        )
        yield* api`SELECT tenure.pause_queue('audit')`
        yield* api`SELECT tenure.resume_queue('audit'), tenure.resume_queue('audit')`
        assert.deepStrictEqual(
          yield* owner`SELECT event FROM tenure.audit_events('queue', NULL, 'audit', NULL, NULL, 9)`,
          [{ event: "queue.resumed" }, { event: "queue.paused" }]
        )
        // With work: who was revoked, and what became of it.
        const lost = yield* K.executor({ queue: "audit" })
        const idle = yield* K.executor({ queue: "audit" })
        yield* K.enqueueMany(api, "audit", 2)
        yield* K.claim(lost, 2)
        yield* K.loseExecutor(owner, lost.id)
        yield* K.loseExecutor(owner, idle.id)
        const revoked = yield* owner<{ detail: { executor: string; requeued: number } }>`
        SELECT detail FROM tenure.audit_events('executor.revoked', NULL, NULL, NULL, NULL, 9)`
        assert.deepInclude(
          revoked.map(({ detail }) => [detail.executor, detail.requeued]),
          [lost.id, 2]
        )
        assert.notInclude(
          revoked.map(({ detail }) => detail.executor),
          idle.id
        )
      })
  )

  it.effect("events of the audit are forgotten when they are old, the oldest first", () =>
    Effect.gen(function* () {
      const owner = yield* K.session("owner")
      yield* owner`SELECT tenure.audit('old', NULL, NULL, NULL) FROM generate_series(1, 5)`
      yield* owner`UPDATE tenure.audit_event SET at = tenure.clock() - interval '100 days' WHERE event = 'old'`
      // What came before them is older.
      yield* owner`UPDATE tenure.audit_event SET at = tenure.clock() - interval '101 days' WHERE event <> 'old'`
      yield* owner`SELECT tenure.audit('young', NULL, NULL, NULL)`
      const forget = (max: number) =>
        Effect.map(
          owner<{ n: number }>`
            SELECT tenure.forget_audit(tenure.clock() - interval '90 days', ${max}::int) AS n`,
          (rows) => K.first(rows).n
        )
      assert.strictEqual(yield* forget(2), 2)
      yield* forget(1000)
      assert.strictEqual(yield* forget(1000), 0)
      assert.deepStrictEqual(yield* owner`SELECT event FROM tenure.audit_event`, [
        { event: "young" }
      ])
    })
  )

  it.effect("are no business of a session of the worker role without an executor", () =>
    Effect.gen(function* () {
      const { api } = yield* scene("fenced", 1)
      const nobody = yield* K.session("worker")
      const taken = present((yield* take(api, "fenced"))[0])
      yield* answerOf(api, "release_dead_letter", taken)
      const unknown: Taken = { id: randomUUID(), lease: randomUUID(), payload: "" }
      for (const call of [
        take(nobody, "fenced"),
        answerOf(nobody, "reinject_dead_letter", taken),
        answerOf(nobody, "discard_dead_letter", taken),
        whole(nobody, "redrive", "fenced"),
        whole(nobody, "purge", "fenced")
      ]) {
        assert.strictEqual(yield* K.stateOf(call as Effect.Effect<unknown, unknown>), "TN004")
      }
      assert.strictEqual(yield* answerOf(api, "reinject_dead_letter", unknown), "unknown")
      assert.strictEqual(yield* answerOf(api, "discard_dead_letter", unknown), "unknown")
    })
  )
})
