/**
 * Goal: no window of its rate, wherever it begins, holds more starts than the rate allows, of a queue or of
 * a key, whoever claims; what is free again is told and given; and what is stored of it stays small (R1, R2,
 * K-063).
 * Method: a clock that stands still until it is set, and a list of all starts to compare with; concurrent
 * sessions in real time, whose starts the database has noted; the same claim without its lock, which passes
 * the rate at once.
 */
import { assert, layer } from "@effect/vitest"
import { Context, Effect, Fiber, Layer, Schema } from "effect"
import type { Encoded } from "../../src/queue/Limits.ts"
import { freshDatabase } from "../support/Postgres.ts"
import * as K from "./kernel.ts"

const theLock = "PERFORM pg_advisory_xact_lock(1413828181, claimed_queue);"

const of = ({ id, attempt }: K.Claimed) => ({ id, attempt })

/** What the last row of a claim says, if there is one. */
const told = (rows: ReadonlyArray<K.Claimed>) => {
  const last = rows.at(-1)
  return last === undefined || last.id !== null
    ? undefined
    : { dueMs: last.deadline_in_ms, held: last.cancel_requested }
}

const items = (rows: ReadonlyArray<K.Claimed>) => rows.filter((row) => row.id !== null)

/** A database whose clock stands still. */
class Stopped extends Context.Service<
  Stopped,
  { readonly api: K.Sql; readonly clock: K.StoppedClock; readonly owner: K.Sql }
>()("tenure/test/Stopped") {
  static readonly layer = Layer.effect(
    Stopped,
    Effect.gen(function* () {
      const owner = yield* K.session("owner")
      return { api: yield* K.session("api"), clock: yield* K.stopClock(owner), owner }
    })
  ).pipe(Layer.provideMerge(K.Kernel.layer))
}

let queues = 0

/** A queue with these limits and its executors; the clock goes on from where it is. */
const scene = Effect.fnUntraced(function* (limits: Encoded, executors = 1) {
  const { api, clock, owner } = yield* Stopped
  const queue = `q${queues++}`
  const runners = yield* Effect.all(
    Array.from({ length: executors }, () => K.executor({ queue, limits, validity: "400 days" }))
  )
  const begun = clock.atMillis()
  return {
    api,
    begun,
    owner,
    queue,
    runners,
    runner: K.first(runners),
    /** So many milliseconds after its beginning. */
    setClock: (millis: number) => clock.set(begun + millis),
    startsOf: (runner: K.Executor) =>
      Effect.map(
        owner<{ n: number; started: number }>`
          SELECT count(*)::int AS n, coalesce(sum(started), 0)::int AS started
            FROM tenure.rate_log WHERE queue_id = ${runner.queueId}::int`,
        K.first
      )
  }
})

const seesWork = Effect.fnUntraced(function* (runner: K.Executor) {
  const [seen] = yield* runner.sql<{ is_held: boolean; has_fresh: boolean }>`
    SELECT is_held, has_fresh FROM tenure.observe_queues(ARRAY['v1'], ARRAY[${runner.queueId}::int],
      ARRAY[]::int[], ARRAY[]::int[], ARRAY[]::float8[])`
  return seen !== undefined && !seen.is_held && seen.has_fresh
})

const Step = Schema.Struct({
  advanceMs: Schema.Int.check(Schema.isBetween({ minimum: 0, maximum: 700 })),
  wanted: Schema.Int.check(Schema.isBetween({ minimum: 1, maximum: 6 })),
  who: Schema.Int.check(Schema.isBetween({ minimum: 0, maximum: 1 }))
})

layer(Stopped.layer, { excludeTestServices: true, timeout: "60 seconds" })(
  "the rate of a queue",
  (it) => {
    it.effect.prop(
      "is never passed in any window, and never given away by more than a thousandth of it",
      { steps: Schema.Array(Step).check(Schema.isMinLength(10), Schema.isMaxLength(40)) },
      ({ steps }) =>
        Effect.scoped(
          Effect.gen(function* () {
            const limit = 7
            const windowMs = 1000
            const { api, queue, runners, setClock } = yield* scene(
              { rateLimit: limit, rateWindowMs: windowMs },
              2
            )
            yield* K.enqueueMany(api, queue, 300)
            const starts: Array<number> = []
            let at = 0
            for (const { advanceMs, wanted, who } of steps) {
              at += advanceMs
              yield* setClock(at)
              const runner = runners[who] ?? K.first(runners)
              const count = items(yield* K.claimRows(runner, wanted)).length
              const within = (ms: number) => starts.filter((one) => one > at - ms).length
              assert.isAtMost(within(windowMs) + count, limit)
              assert.isAtLeast(count, Math.min(wanted, limit - within(windowMs * 1.001)))
              for (let n = 0; n < count; n++) starts.push(at)
            }
          })
        ),
      { arbitrary: { runs: 10 } }
    )

    it.effect("holds for eight sessions at once, in real time", () =>
      Effect.gen(function* () {
        const database = yield* freshDatabase
        const api = yield* K.sessionOf(database, "api")
        const owner = yield* K.sessionOf(database, "owner")
        const limits = { rateLimit: 25, rateWindowMs: 400 }
        const runners = yield* Effect.all(
          Array.from({ length: 8 }, () => K.executorOf(database, { queue: "q", limits }))
        )
        yield* K.enqueueMany(api, "q", 2000)
        const count = owner<{ n: number }>`SELECT count(*)::int AS n FROM tenure.claimed`
        yield* Effect.forEach(
          runners,
          (runner) =>
            Effect.gen(function* () {
              while (K.first(yield* count).n < 100) yield* K.claim(runner, 3)
            }),
          { concurrency: "unbounded" }
        )
        // Each start counts those of the window that it ends.
        const [most] = yield* owner<{ n: number }>`
        SELECT max(n)::int AS n FROM (
          SELECT count(*) OVER (ORDER BY claimed_at RANGE BETWEEN interval '399.999 ms' PRECEDING AND CURRENT ROW) AS n
            FROM tenure.claimed) w`
        assert.strictEqual(most?.n, 25, "reached and not passed")
      })
    )

    it.effect("is counted behind the claim in progress; without the lock it doubles", () =>
      Effect.gen(function* () {
        const database = yield* freshDatabase
        const api = yield* K.sessionOf(database, "api")
        const owner = yield* K.sessionOf(database, "owner")
        const options = { queue: "q", limits: { rateLimit: 20, rateWindowMs: 600_000 } }
        const one = yield* K.executorOf(database, options)
        const two = yield* K.executorOf(database, options)
        yield* K.enqueueMany(api, "q", 100)
        yield* one.sql`BEGIN`
        assert.lengthOf(yield* K.claim(one, 50), 20)
        const pid = yield* K.pidOf(two.sql)
        const second = yield* Effect.forkChild(K.claim(two, 50))
        yield* K.whenBlocked(owner, pid)
        yield* one.sql`COMMIT`
        assert.lengthOf(yield* Fiber.join(second), 0)
        yield* owner`TRUNCATE tenure.claimed, tenure.rate_log`

        yield* K.spoil(owner, "claim", theLock, "")
        yield* one.sql`BEGIN`
        const claimed = (yield* K.claim(one, 20)).length + (yield* K.claim(two, 20)).length
        yield* one.sql`COMMIT`
        assert.strictEqual(claimed, 40)
      })
    )

    it.effect(
      "tells when the next one may start, is no starvation until then, and gives it then",
      () =>
        Effect.gen(function* () {
          const { api, queue, runner, setClock } = yield* scene({
            rateLimit: 3,
            rateWindowMs: 60_000
          })
          yield* K.enqueueMany(api, queue, 10)
          assert.isTrue(yield* seesWork(runner))
          const some = yield* K.claimRows(runner, 2)
          assert.isUndefined(told(items(some)))
          assert.deepStrictEqual(told(some), { dueMs: null, held: false })
          yield* setClock(10_000)
          const rest = yield* K.claimRows(runner, 5)
          assert.lengthOf(items(rest), 1)
          assert.isTrue(told(rest)?.held)
          assert.closeTo(told(rest)?.dueMs ?? 0, 50_000, 1)
          assert.isFalse(yield* seesWork(runner))
          yield* setClock(59_000)
          const none = yield* K.claimRows(runner, 5)
          assert.lengthOf(items(none), 0)
          assert.closeTo(told(none)?.dueMs ?? 0, 1000, 1)
          yield* setClock(60_001)
          assert.isTrue(yield* seesWork(runner))
          assert.lengthOf(
            items(yield* K.claimRows(runner, 5)),
            2,
            "the third was ten seconds later"
          )
        })
    )

    it.effect("counts a claim that is handed back, and the next attempt as one more", () =>
      Effect.gen(function* () {
        const { api, queue, runner } = yield* scene({ rateLimit: 3, rateWindowMs: 60_000 })
        yield* K.enqueueMany(api, queue, 1)
        for (let turn = 0; turn < 3; turn++) {
          const claimed = yield* K.claim(runner, 1)
          assert.lengthOf(claimed, 1)
          yield* K.settle(
            runner,
            claimed.map((item) => ({ ...of(item), outcome: "hand-back" }))
          )
        }
        assert.lengthOf(yield* K.claim(runner, 1), 0)
      })
    )

    it.effect("waits for one more window at most when the clock is set back", () =>
      Effect.gen(function* () {
        const { api, queue, runner, setClock, startsOf } = yield* scene({
          rateLimit: 3,
          rateWindowMs: 60_000
        })
        yield* K.enqueueMany(api, queue, 10)
        assert.lengthOf(yield* K.claim(runner, 2), 2)
        yield* setClock(-3_600_000)
        assert.lengthOf(yield* K.claim(runner, 5), 1, "what was started has not been forgotten")
        yield* setClock(-3_600_000 + 59_000)
        assert.lengthOf(yield* K.claim(runner, 5), 0)
        yield* setClock(-3_600_000 + 60_100)
        assert.lengthOf(yield* K.claim(runner, 5), 3)
        assert.strictEqual((yield* startsOf(runner)).started, 3)
      })
    )

    it.effect("is kept in a thousand rows, which go when they are over", () =>
      Effect.gen(function* () {
        const { begun, owner, runner, setClock, startsOf } = yield* scene({
          rateLimit: 50_000,
          rateWindowMs: 1_000_000
        })
        const rows = startsOf(runner)
        // Two and a half windows of it, with a start every 0.3 s.
        yield* owner.unsafe(`
        DO $$ BEGIN
          FOR n IN 1..8000 LOOP
            PERFORM setval('tenure.test_clock', ${begun} + n * 300);
            PERFORM tenure.note_starts(${runner.queueId}, '${runner.id}',
              tenure.begin_start(${runner.queueId}, '1000 s', NULL), 1, '1000 s', NULL);
          END LOOP;
        END $$`)
        const { n, started } = yield* rows
        assert.isAtMost(n, 1002)
        assert.isAtLeast(started, 3333)
        // Nobody claims any more, and nothing is over yet: retention leaves it alone.
        yield* owner`SELECT made FROM tenure.retain(interval '7 days')`
        assert.isAtLeast((yield* rows).started, 3333)
        yield* setClock(8000 * 300 + 1_002_000)
        yield* owner`SELECT made FROM tenure.retain(interval '7 days')`
        assert.deepStrictEqual(yield* rows, { n: 0, started: 0 })
      })
    )

    it.effect("is the last registered one, and none when that has none", () =>
      Effect.gen(function* () {
        const { api, queue, runner } = yield* scene({ rateLimit: 2, rateWindowMs: 60_000 })
        yield* K.enqueueMany(api, queue, 20)
        assert.lengthOf(yield* K.claim(runner, 9), 2)
        yield* K.executor({ queue, limits: { rateLimit: 5, rateWindowMs: 60_000 } })
        assert.lengthOf(yield* K.claim(runner, 9), 3)
        yield* K.executor({ queue })
        const free = yield* K.claimRows(runner, 9)
        assert.lengthOf(free, 9, "and no row that says how to go on")
      })
    )
  }
)

layer(Stopped.layer, { excludeTestServices: true, timeout: "60 seconds" })(
  "the rate of a key",
  (it) => {
    it.effect("holds back the key and nobody else, and tells when", () =>
      Effect.gen(function* () {
        const { api, queue, runner, setClock } = yield* scene({
          keyRateLimit: 2,
          keyRateWindowMs: 60_000
        })
        const ids = yield* K.enqueueMany(api, queue, 8, {
          keys: ["a", "a", "a", "a", "b", null, null, null]
        })
        const claimed: Array<string> = []
        let rows: ReadonlyArray<K.Claimed> = []
        for (let turn = 0; turn < 4; turn++) {
          rows = yield* K.claimRows(runner, 10)
          claimed.push(...items(rows).map((row) => row.id))
          yield* K.settle(runner, items(rows).map(of))
        }
        assert.sameMembers(
          claimed,
          [0, 1, 4, 5, 6, 7].map((n) => ids[n] ?? "")
        )
        assert.isFalse(told(rows)?.held)
        assert.closeTo(told(rows)?.dueMs ?? 0, 60_000, 1)
        assert.isFalse(yield* seesWork(runner), "what a rate holds back is no work for a monitor")
        yield* K.enqueueMany(api, queue, 1, { keys: ["c"] })
        assert.isTrue(yield* seesWork(runner))
        assert.lengthOf(yield* K.claim(runner, 10), 1)
        yield* setClock(60_001)
        assert.isTrue(yield* seesWork(runner))
        assert.lengthOf(yield* K.claim(runner, 10), 1)
        assert.lengthOf(yield* K.claim(runner, 10), 1)
        assert.lengthOf(yield* K.claim(runner, 10), 0)
      })
    )

    it.effect("and that of its queue both hold, for any number of keys and claimers", () =>
      Effect.gen(function* () {
        const { api, owner, queue, runners, setClock } = yield* scene(
          {
            rateLimit: 40,
            rateWindowMs: 10_000,
            keyRateLimit: 3,
            keyRateWindowMs: 20_000,
            takesTurns: true
          },
          4
        )
        yield* K.enqueueMany(api, queue, 600, {
          keys: Array.from({ length: 600 }, (_, n) => `k${n % 30}`)
        })
        for (let second = 0; second < 30; second++) {
          yield* setClock(second * 1000)
          yield* Effect.forEach(runners, (runner) => K.claim(runner, 7), {
            concurrency: "unbounded"
          })
        }
        const most = (partition: string, seconds: number) =>
          Effect.map(
            owner.unsafe<{ n: number }>(`
            SELECT max(n)::int AS n FROM (
              SELECT count(*) OVER (${partition} ORDER BY claimed_at
                RANGE BETWEEN interval '${seconds * 1000 - 0.001} ms' PRECEDING AND CURRENT ROW) AS n
                FROM tenure.claimed WHERE queue_id = ${K.first(runners).queueId}) w`),
            (rows) => K.first(rows).n
          )
        assert.strictEqual(yield* most("", 10), 40)
        assert.strictEqual(yield* most("PARTITION BY key", 20), 3)
      })
    )
  }
)
