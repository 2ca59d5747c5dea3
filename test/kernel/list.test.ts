/**
 * Goal: a list of items is read page by page, each page bounded, and meets each item once, however items
 * move meanwhile; counts for people stop where they are told to.
 * Method: generated moves between the pages; counts of a queue beside others.
 */
import { assert, layer } from "@effect/vitest"
import { Effect, Schema } from "effect"
import * as K from "./kernel.ts"

interface Filter {
  readonly queue?: string
  readonly state?: string
  readonly key?: string
  readonly after?: string
  readonly before?: string
}

interface Row {
  readonly id: string | null
  readonly state: string
  readonly reason: string | null
  readonly next: string | null
}

const page = (sql: K.Sql, filter: Filter, cursor: string | null, looked: number) =>
  sql<Row>`
    SELECT id::text AS id, state, reason, next_cursor AS next
      FROM tenure.list_items(${filter.queue ?? null}::text, ${filter.state ?? null}::text, ${filter.key ?? null}::text,
             ${filter.after ?? null}::text::timestamptz, ${filter.before ?? null}::text::timestamptz,
             ${cursor}::text, ${looked}::int)`

/** All pages, with something done between two of them. */
const walk = Effect.fnUntraced(function* <E, R>(
  sql: K.Sql,
  filter: Filter,
  looked: number,
  between: Effect.Effect<unknown, E, R>
) {
  const seen: Array<Row & { readonly id: string }> = []
  let cursor: string | null = null
  do {
    const rows: ReadonlyArray<Row> = yield* page(sql, filter, cursor, looked)
    const found = rows.flatMap((row) => (row.id === null ? [] : [{ ...row, id: row.id }]))
    assert.isAtMost(found.length, looked)
    seen.push(...found)
    cursor = rows.at(-1)?.next ?? null
    yield* between
  } while (cursor !== null)
  return seen
})

const Move = Schema.Literals([
  "claim",
  "complete",
  "fail",
  "retry",
  "handBack",
  "cancel",
  "bringBack"
])

const move = Effect.fnUntraced(function* (which: typeof Move.Type, api: K.Sql, runner: K.Executor) {
  const { id } = (yield* api<{ id: string }>`
    SELECT id::text AS id FROM tenure.item WHERE queue_id = ${runner.queueId}::int ORDER BY random() LIMIT 1`)[0] ?? {
    id: ""
  }
  switch (which) {
    case "claim":
      return yield* K.claim(runner, 2)
    case "cancel":
      return yield* api`SELECT tenure.cancel(${id}::uuid)`
    case "bringBack":
      return yield* api`SELECT tenure.retry(${id}::uuid)`
    default: {
      const outcome = {
        complete: "completed",
        fail: "failed",
        retry: "retry",
        handBack: "hand-back"
      }[which]
      const claimed = yield* K.claim(runner, 2)
      return yield* K.settle(
        runner,
        claimed.map(({ attempt, id }) => ({
          id,
          attempt,
          outcome,
          ...(which === "retry" ? { delayMs: 3_600_000 } : {})
        }))
      )
    }
  }
})

let queues = 0

layer(K.Kernel.layer, { excludeTestServices: true })("a list of items", (it) => {
  it.effect.prop(
    "meets each item once, and of a state none twice, however they move between the pages",
    {
      moves: Schema.Array(Move).check(Schema.isMinLength(5), Schema.isMaxLength(20)),
      looked: Schema.Int.check(Schema.isBetween({ minimum: 1, maximum: 4 })),
      state: Schema.Literals(["available", "leased", "delayed", "failed", "completed"])
    },
    ({ looked, moves, state }) =>
      Effect.scoped(
        Effect.gen(function* () {
          const queue = `list ${queues++}`
          const api = yield* K.session("api")
          const runner = yield* K.executor({ queue })
          const ids = yield* K.enqueueMany(api, queue, 9, {
            priorities: [0, 5, 0, 5, 0, 9, 0, 0, 5]
          })
          const left = [...moves]
          const next = Effect.suspend(() => {
            const which = left.shift()
            return which === undefined ? Effect.void : move(which, api, runner)
          })
          for (let n = 0; n < 3; n++) yield* next
          const places = yield* K.placesOf(api, ids)
          const all = yield* walk(api, { queue }, looked, next)
          assert.deepStrictEqual(all.map(({ id }) => id).sort(), [...ids].sort())
          // What has stayed where it was is met; what moves is met once at most.
          const before = yield* K.placesOf(api, ids)
          const some = yield* walk(api, { queue, state }, looked, next)
          const after = yield* K.placesOf(api, ids)
          const met = some.map(({ id }) => id)
          assert.strictEqual(new Set(met).size, met.length)
          const place = { available: "ready", leased: "claimed" }[state as string] ?? state
          for (const id of ids) {
            if (
              before[id] === place &&
              after[id] === place &&
              left.length === 0 &&
              moves.length < 8
            ) {
              assert.include(met, id)
            }
          }
          assert.isDefined(places)
        })
      ),
    { arbitrary: { runs: 6 }, timeout: 60_000 }
  )

  it.effect("knows queues, states, keys and ages, and no item of a private queue", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const runner = yield* K.executor({ queue: "mine" })
      const probe = yield* K.probeOf(runner)
      yield* probe.sql`SELECT tenure.begin_probe()::text`
      const ids = yield* K.enqueueMany(api, "mine", 4, { keys: ["a", "b", "a", null] })
      const other = yield* K.enqueueOne(api, "others", "1")
      const delayed = yield* K.enqueueOne(api, "mine", "1", { delayMs: 60_000 })
      const [first, second] = yield* K.claim(runner, 2)
      yield* K.settle(runner, [
        { ...K.first([first]), outcome: "failed", reason: "HandlerDied" }
      ] as never)
      const idsOf = (filter: Filter) =>
        Effect.map(walk(api, filter, 100, Effect.void), (rows) => rows.map(({ id }) => id))
      // Before PostgreSQL 18 ids of one millisecond are in no order.
      const newestFirst = [delayed, ...ids].sort().reverse()
      assert.deepStrictEqual(yield* idsOf({ queue: "mine" }), newestFirst)
      assert.deepStrictEqual(yield* idsOf({ queue: "mine", state: "available" }), [ids[3], ids[2]])
      assert.deepStrictEqual(yield* idsOf({ queue: "mine", state: "leased" }), [second?.id])
      assert.deepStrictEqual(yield* idsOf({ queue: "mine", state: "delayed" }), [delayed])
      assert.deepStrictEqual(yield* idsOf({ queue: "mine", state: "failed" }), [first?.id])
      assert.deepStrictEqual(
        yield* idsOf({ queue: "mine", key: "a" }),
        [ids[2], ids[0]].sort().reverse()
      )
      assert.deepStrictEqual(yield* idsOf({ queue: "mine", before: "2001-01-01" }), [])
      assert.deepStrictEqual(yield* idsOf({ queue: "mine", after: "infinity" }), [])
      assert.deepStrictEqual(yield* idsOf({ queue: "mine", before: "infinity" }), newestFirst)
      assert.deepStrictEqual(yield* idsOf({ queue: "nobody's" }), [])
      const everywhere = yield* idsOf({})
      assert.include(everywhere, delayed)
      assert.include(everywhere, other)
      assert.isEmpty(
        yield* api`SELECT FROM tenure.list_items(NULL, NULL, NULL, NULL, NULL, NULL, 1000) WHERE queue IS NULL AND id IS NOT NULL`
      )
    })
  )

  it.effect("counts of queues stop where they are told to, and say of what waits for longest", () =>
    Effect.gen(function* () {
      const api = yield* K.session("api")
      const runner = yield* K.executor({ queue: "counted", globalLimit: 50 })
      yield* K.enqueueMany(api, "counted", 9)
      yield* K.enqueueMany(api, "counted", 9, { delaysMs: Array.from({ length: 9 }, () => 60_000) })
      const claimed = yield* K.claim(runner, 4)
      yield* K.settle(
        runner,
        claimed.slice(1).map(({ attempt, id }) => ({ id, attempt, outcome: "failed" }))
      )
      yield* api`SELECT tenure.pause_queue('counted')`
      const overview = (countedMax: number) =>
        Effect.map(
          api<Record<string, unknown> & { oldest: boolean }>`
            SELECT waiting, delayed, delayed_is_more, parked, parked_is_more, running, failed, oldest_waiting_at <= observed_at AS oldest,
                   settings ->> 'global_limit' AS global_limit, settings ->> 'paused_at' IS NOT NULL AS paused
              FROM tenure.queue_overview(${countedMax}::int) WHERE queue = 'counted'`,
          K.first
        )
      const rest = { oldest: true, global_limit: "50", paused: true }
      const all = yield* overview(1000)
      assert.deepStrictEqual(all, {
        ...rest,
        waiting: 5,
        delayed: 9,
        delayed_is_more: false,
        parked: 0,
        parked_is_more: false,
        running: 1,
        failed: 3
      })
      const few = yield* overview(2)
      assert.deepInclude(few, { waiting: 2, delayed_is_more: true, running: 1, failed: 2 })
    })
  )
})
