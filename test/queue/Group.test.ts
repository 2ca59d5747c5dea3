/**
 * Goal: what the README says of groups, debounce and throttle holds for a program written as a user writes
 * it. What happens under concurrency is proved in `kernel/groups` and `kernel/pace`.
 * Method: the whole runtime in this process, on a database of its own.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect, Layer, Option, Schema } from "effect"
import { SqlClient } from "effect/sql"
import { Group, WorkQueue } from "tenure"
import { paceOf } from "../../src/queue/Pace.ts"
import { present } from "../support/present.ts"
import { layerRuntime } from "./runtime.ts"

class Page extends WorkQueue.make("page", { payload: { n: Schema.Int } }) {}
class Stats extends WorkQueue.make("stats", { payload: { n: Schema.Int }, success: Schema.Int }) {}
class Report extends WorkQueue.make("report", {
  payload: { book: Schema.String, group: Group.Ended },
  success: Schema.String,
  key: ({ book }) => book
}) {}

const PageLive = Page.toLayer(({ n }) => (n < 0 ? Effect.die("torn") : Effect.void))
const StatsLive = Stats.toLayer(({ n }) => Effect.succeed(n))
const ReportLive = Report.toLayer(({ book, group }, item) =>
  Effect.succeed(
    `${book}: ${group.completed} of ${group.completed + group.failed + group.cancelled}, key ${Option.getOrThrow(item.key)}`
  )
)

const serving = <A, E, R, E2, R2>(
  queues: Layer.Layer<never, E2, R2>,
  body: Effect.Effect<A, E, R>
) => body.pipe(Effect.provide(Layer.provideMerge(queues, layerRuntime())))

describe("a group", () => {
  it.live(
    "hands in its callback with the counts when its members have ended, of whatever queues",
    () =>
      serving(
        Layer.mergeAll(PageLive, StatsLive, ReportLive),
        Effect.gen(function* () {
          const sql = yield* SqlClient.SqlClient
          const group = yield* sql.withTransaction(
            Effect.gen(function* () {
              const made = yield* Group.make({
                onDone: { queue: Report, payload: { book: "Emma" }, priority: 5 }
              })
              yield* Page.enqueueAll([{ n: 1 }, { n: 2 }, { n: -1 }], { group: made })
              yield* Stats.enqueue({ n: 1 }, { group: made })
              const [late] = yield* Page.enqueueAll([{ n: 3 }], { group: made, delay: "1 hour" })
              yield* Page.cancel(present(late))
              yield* Group.seal(made)
              return made
            })
          )
          const ended = yield* Effect.timeout(Group.await(group), "15 seconds")
          assert.deepStrictEqual(ended, { id: group, completed: 3, failed: 1, cancelled: 1 })
          const status = yield* Group.status(group)
          assert.deepInclude(status, {
            members: 5,
            completed: 3,
            failed: 1,
            cancelled: 1,
            isSealed: true
          })
          assert.isTrue(Option.isSome(status.endedAt))
          const report = yield* Report.await(Option.getOrThrow(status.callback))
          assert.strictEqual(report, "Emma: 3 of 5, key Emma")
        })
      )
  )

  it.live("that is sealed or unknown takes nobody, and an unknown one is named as such", () =>
    serving(
      Layer.empty,
      Effect.gen(function* () {
        const group = yield* Group.make()
        const open = yield* Group.status(group)
        assert.deepInclude(open, { members: 0, isSealed: false })
        yield* Group.seal(group)
        assert.isTrue(Option.isNone((yield* Group.status(group)).callback))
        const refused = yield* Effect.flip(Page.enqueue({ n: 1 }, { group }))
        assert.isTrue(
          refused._tag === "EnqueueRefused" &&
            refused.reason._tag === "GroupClosed" &&
            refused.reason.group === group
        )
        const unknown = Group.GroupId.make("01890000-0000-7000-8000-000000000000")
        const asked = [
          yield* Effect.flip(Group.await(unknown)),
          yield* Effect.flip(Group.status(unknown)),
          yield* Effect.flip(Group.seal(unknown))
        ]
        for (const error of asked) {
          assert.isTrue(error._tag === "UnknownId" && error.kind === "group")
        }
      })
    )
  )
})

describe("a debounced item", () => {
  it.live("is the last of its burst, and the answer to every call", () =>
    serving(
      StatsLive,
      Effect.gen(function* () {
        // With one statement, so that no busy machine makes two bursts of it.
        const ids = yield* Stats.enqueueAll([{ n: 1 }, { n: 2 }, { n: 3 }], {
          debounce: { key: "k", delay: "300 millis", maxWait: "1 minute" }
        })
        assert.strictEqual(new Set(ids).size, 1)
        assert.strictEqual(yield* Effect.timeout(Stats.await(present(ids[0])), "15 seconds"), 3)
        const next = yield* Stats.enqueue({ n: 4 }, { debounce: { key: "k", delay: "1 hour" } })
        assert.notStrictEqual(next, ids[0])
      })
    )
  )
})

describe("a throttled item", () => {
  it.live("is the first of its period, and the answer to every call", () =>
    serving(
      StatsLive,
      Effect.gen(function* () {
        const ids = yield* Effect.forEach([1, 2, 3], (n) =>
          Stats.enqueue({ n }, { throttle: { key: "k", period: "1 hour" } })
        )
        assert.strictEqual(new Set(ids).size, 1)
        assert.strictEqual(yield* Effect.timeout(Stats.await(present(ids[0])), "15 seconds"), 1)
        assert.strictEqual(
          yield* Stats.enqueue({ n: 4 }, { throttle: { key: "k", period: "1 hour" } }),
          ids[0]
        )
      })
    )
  )
})

describe("a call that contradicts itself", () => {
  const debounce = { key: "k", delay: 10 }
  const throttle = { key: "k", period: 10 }
  for (const [name, options] of Object.entries({
    "both a debounce and a throttle": { debounce, throttle },
    "a debounce and another delay": { debounce, delay: 1 },
    "a debounce in a group": { debounce, group: "g" },
    "a throttle with an idempotency key": { throttle, idempotencyKey: "k" },
    "an empty key": { debounce: { key: "", delay: 10 } },
    "no delay": { debounce: { key: "k", delay: 0 } },
    "a period without an end": { throttle: { key: "k", period: "Infinity" as const } },
    "a longest wait of nothing": { debounce: { ...debounce, maxWait: 0 } }
  })) {
    it(`is a bug of the caller: ${name}`, () => {
      assert.throws(() => paceOf(options, options.idempotencyKey ?? null), RangeError)
    })
  }

  it("is none without either, whatever else it says", () => {
    assert.isNull(paceOf({ delay: 1, group: "g" }, "k"))
  })
})
