/**
 * Goal: a handler that waits holds nothing meanwhile, goes on with what it was told, typed, and notices
 * nothing of who ran it before; and a wait where none is possible ends in words.
 * Method: the whole runtime, one or two of them on a database.
 * Covers I6, I13, I-034..I-036, design 5.
 */
import { assert, describe, it } from "@effect/vitest"
import {
  type Context,
  Effect,
  Exit,
  Fiber,
  Layer,
  Ref,
  References,
  Schedule,
  Schema,
  Scope
} from "effect"
import { SqlClient } from "effect/sql"
import { Step, Tenure, Wait, WorkQueue } from "tenure"
import { connect, freshDatabase, layerOf } from "../support/Postgres.ts"
import { layerRuntime } from "./runtime.ts"

class Parent extends WorkQueue.make("parent", {
  payload: { name: Schema.String },
  success: Schema.Unknown
}) {}

class Refused extends Schema.TaggedError<Refused>()("Refused", { why: Schema.String }) {}

class Child extends WorkQueue.make("child", {
  payload: { n: Schema.Int, at: Schema.Date },
  success: Schema.Date,
  error: Refused
}) {}

const soon = { inMemory: 0 } as const

const provide =
  <E>(queues: Layer.Layer<never, E, Tenure.Executor | SqlClient.SqlClient>) =>
  <A, E2>(
    test: Effect.Effect<A, E2, Tenure.Executor | Tenure.Client | SqlClient.SqlClient | Scope.Scope>
  ) =>
    test.pipe(
      Effect.scoped,
      Effect.provide(Layer.provideMerge(queues, layerRuntime())),
      Effect.timeout("40 seconds")
    )

/** What it fails with, as a value. */
const failureOf = <A, E, R>(effect: Effect.Effect<A, E, R>) =>
  Effect.match(effect, { onFailure: (error) => error, onSuccess: () => undefined })

const outcomeOf = (id: WorkQueue.ItemId) => Effect.exit(Parent.await(id))

const run = <R>(
  handler: (
    name: string,
    item: WorkQueue.Item
  ) => Effect.Effect<unknown, WorkQueue.AttemptFailure, R>,
  policy?: WorkQueue.Policy<never>
) => Parent.toLayer(({ name }, item) => handler(name, item), policy)

const outcome = <E>(queues: Layer.Layer<never, E, Tenure.Executor | SqlClient.SqlClient>) =>
  provide(queues)(Effect.flatMap(Parent.enqueue({ name: "a" }), outcomeOf))

const isParked = (id: string) =>
  Effect.gen(function* () {
    const sql = yield* SqlClient.SqlClient
    for (;;) {
      const [row] = yield* sql<{ place: string }>`
        SELECT place FROM tenure.item_place(${id}::uuid)`
      if (row?.place === "parked") return
      yield* Effect.sleep("5 millis")
    }
  })

describe("a handler that waits", () => {
  it.live("gives its slot to others, and its steps are not repeated", () =>
    Effect.gen(function* () {
      const log = yield* Ref.make<ReadonlyArray<string>>([])
      const note = (what: string) => Ref.update(log, (all) => [...all, what])
      const first = yield* Ref.make<WorkQueue.ItemId | undefined>(undefined)
      const queue = run(
        Effect.fnUntraced(function* (name, item) {
          if (name === "second") {
            // With one slot, this runs only because the first one has given it back.
            const id = yield* Ref.get(first)
            if (id === undefined) return yield* Effect.die("handed in too early")
            yield* Wait.send(id, "go", 7, { success: Schema.Int }).pipe(Effect.orDie)
            return "sent"
          }
          yield* Step.run("before", note(`before in attempt ${item.attempt}`))
          yield* Effect.addFinalizer(() => note(`closed attempt ${item.attempt}`))
          yield* Wait.sleep("nap", "20 millis", soon)
          const told = yield* Wait.event("go", { success: Schema.Int })
          yield* Step.run("after", note(`after in attempt ${item.attempt}`))
          return [told, item.isLastAttempt]
        }),
        { concurrency: { perExecutor: 1 }, retry: { times: 1 } }
      )
      yield* Effect.gen(function* () {
        const id = yield* Parent.enqueue({ name: "first" })
        yield* Ref.set(first, id)
        const second = yield* Parent.enqueue({ name: "second" })
        assert.strictEqual(yield* Parent.await(second), "sent")
        assert.deepStrictEqual(yield* Parent.await(id), [7, false])
      }).pipe(provide(queue))
      const seen = yield* Ref.get(log)
      assert.deepStrictEqual(
        seen.filter((one) => one.startsWith("before")),
        ["before in attempt 1"]
      )
      assert.strictEqual(seen.filter((one) => one.startsWith("after")).length, 1)
      assert.strictEqual(seen[1], "closed attempt 1")
    })
  )

  it.live("for another item gets its typed outcome, and hands it in once", () =>
    Effect.gen(function* () {
      const ran = yield* Ref.make(0)
      const children = Child.toLayer(
        Effect.fnUntraced(function* ({ at, n }) {
          yield* Ref.update(ran, (count) => count + 1)
          if (n === 1) return yield* new Refused({ why: "odd" })
          if (n === 2) return yield* Effect.die("a bug")
          return new Date(at.getTime() + n)
        })
      )
      const parents = run(
        Effect.fnUntraced(function* () {
          const at = new Date(1000)
          const good = yield* Effect.orDie(Wait.invoke("good", Child, { n: 0, at }))
          const refused = yield* failureOf(Wait.invoke("refused", Child, { n: 1, at }))
          const died = yield* failureOf(Wait.invoke("died", Child, { n: 2, at }))
          yield* Wait.sleep("once more", "1 millis", soon)
          return [
            good.getTime(),
            refused?._tag === "Refused" ? refused.why : refused?._tag,
            died?._tag === "ItemFailed" ? died.reason._tag : died?._tag
          ]
        })
      )
      assert.deepStrictEqual(
        yield* outcome(Layer.merge(parents, children)),
        Exit.succeed([1000, "odd", "HandlerDied"])
      )
      assert.strictEqual(yield* Ref.get(ran), 3)
    })
  )

  it.live("in vain is told so in a typed error, and what it has invoked goes on", () =>
    Effect.gen(function* () {
      const exit = yield* outcome(
        run(
          Effect.fnUntraced(function* () {
            const event = yield* failureOf(Wait.event("never", { timeout: "10 millis" }))
            const child = yield* failureOf(
              // Nobody runs that queue.
              Wait.invoke("slow", Child, { n: 0, at: new Date(0) }, { timeout: "10 millis" })
            )
            if (event?._tag !== "WaitTimedOut" || child?._tag !== "WaitTimedOut") {
              return yield* Effect.die("another error")
            }
            const sql = yield* SqlClient.SqlClient
            const [row] =
              yield* sql`SELECT place FROM tenure.item_place(${child.invoked ?? ""}::uuid)`
            return [event.wait, event.invoked ?? null, child.wait, row]
          })
        )
      )
      assert.deepStrictEqual(exit, Exit.succeed(["never", null, "slow", { place: "ready" }]))
    })
  )

  it.live("for a moment only keeps its slot", () =>
    Effect.gen(function* () {
      const exit = yield* outcome(
        run((_, item) =>
          Effect.gen(function* () {
            const sql = yield* SqlClient.SqlClient
            const before = yield* sql<{
              at: number
            }>`SELECT extract(epoch FROM tenure.clock())::float8 AS at`
            yield* Wait.sleep("short", "30 millis")
            const after = yield* sql<{
              at: number
            }>`SELECT extract(epoch FROM tenure.clock())::float8 AS at`
            return [item.attempt, (after[0]?.at ?? 0) - (before[0]?.at ?? 0) >= 0.03]
          })
        )
      )
      assert.deepStrictEqual(exit, Exit.succeed([1, true]))
    })
  )

  it.live("in several branches parks for all of them, after the step that runs beside them", () =>
    Effect.gen(function* () {
      const steps = yield* Ref.make(0)
      const queue = run((_, item) =>
        Effect.all(
          [
            Wait.event("a", { success: Schema.Int }),
            Wait.event("b", { success: Schema.Int }),
            Step.run(
              "long",
              Effect.andThen(
                Effect.sleep("150 millis"),
                Ref.updateAndGet(steps, (count) => count + 1)
              ),
              { success: Schema.Int }
            ).pipe(
              // The branch goes on to its next one before anything parks.
              Effect.flatMap((n) =>
                Step.run("next", Effect.as(Effect.sleep("10 millis"), [n, item.attempt]), {
                  success: Schema.Array(Schema.Int)
                })
              )
            )
          ],
          { concurrency: "unbounded" }
        )
      )
      const { answer, attempt } = yield* Effect.gen(function* () {
        const id = yield* Parent.enqueue({ name: "a" })
        yield* isParked(id)
        const sql = yield* SqlClient.SqlClient
        const [row] = yield* sql<{ attempt: number }>`SELECT attempt FROM tenure.parked`
        for (const [name, value] of [
          ["b", 2],
          ["a", 1]
        ] as const) {
          assert.isTrue(yield* Wait.send(id, name, value, { success: Schema.Int }))
          if (name === "b") yield* isParked(id)
        }
        return { answer: yield* Parent.await(id), attempt: row?.attempt }
      }).pipe(provide(queue))
      assert.deepStrictEqual(answer, [1, 2, [1, 1]])
      assert.strictEqual(attempt, 1)
      assert.strictEqual(yield* Ref.get(steps), 1)
    })
  )

  it.live("may race a step, which wins without a park", () =>
    Effect.gen(function* () {
      const exit = yield* outcome(
        run((_, item) =>
          Effect.gen(function* () {
            const winner = yield* Effect.raceFirst(
              Wait.event("stop", { success: Schema.String }),
              Step.run("work", Effect.as(Effect.sleep("50 millis"), "done"), {
                success: Schema.String
              })
            )
            yield* Effect.sleep("150 millis")
            return [winner, item.attempt]
          })
        )
      )
      assert.deepStrictEqual(exit, Exit.succeed(["done", 1]))
    })
  )

  it.live("fails, is retried and waits again with the counters of its failures alone", () =>
    Effect.gen(function* () {
      const exit = yield* outcome(
        run(
          (_, item) =>
            Effect.gen(function* () {
              yield* Wait.sleep("one", "1 millis", soon)
              if (!item.isLastAttempt) return yield* new WorkQueue.RetryLater({ cause: "again" })
              yield* Wait.sleep("two", "1 millis", soon)
              return item.attempt
            }),
          { retry: { times: 1, schedule: Schedule.spaced("1 millis") } }
        )
      )
      // Parked, failed, parked, done.
      assert.deepStrictEqual(exit, Exit.succeed(4))
    })
  )
})

describe("a parked item", () => {
  it.live("is cancelled and passes its deadline as any other", () =>
    Effect.gen(function* () {
      const forever = run(() => Wait.event("never"))
      yield* Effect.gen(function* () {
        const cancelled = yield* Parent.enqueue({ name: "a" })
        yield* isParked(cancelled)
        const awaiting = yield* Effect.forkChild(outcomeOf(cancelled))
        yield* Parent.cancel(cancelled)
        const late = yield* Parent.enqueue({ name: "b" }, { deadline: "1 second" })
        yield* isParked(late)
        for (const [exit, reason] of [
          [yield* Fiber.join(awaiting), "it was cancelled"],
          [yield* outcomeOf(late), "its deadline passed"]
        ] as const) {
          assert.include(String(Exit.isFailure(exit) && exit.cause), reason)
        }
        const settled = yield* Effect.flip(Wait.send(cancelled, "never"))
        assert.strictEqual(settled._tag, "AlreadySettled")
      }).pipe(provide(forever))
    })
  )

  it.live("goes on in another process when the one that parked it is gone", () =>
    Effect.gen(function* () {
      const database = yield* freshDatabase
      const executor = () =>
        Layer.fresh(
          Layer.provideMerge(
            run((_, item) => Effect.as(Wait.event("go"), item.attempt)),
            Tenure.layer({
              application: "app",
              version: "app-v1",
              settings: { drain: 100, pollInterval: "500 millis" }
            })
          )
        ).pipe(
          Layer.provide(layerOf(database.worker)),
          Layer.provideMerge(Layer.succeed(References.MinimumLogLevel, "Error" as const))
        )
      const sql = yield* connect(database.api)
      const id = yield* Effect.provideService(
        Parent.enqueue({ name: "a" }),
        SqlClient.SqlClient,
        sql
      )
      const scope = yield* Scope.fork(yield* Effect.scope)
      yield* Layer.buildWithScope(executor(), scope)
      yield* Effect.provideService(isParked(id), SqlClient.SqlClient, sql)
      yield* Scope.close(scope, Exit.void)
      // By SQL, as any language would, while nobody is there.
      yield* sql`SELECT tenure.signal(${id}::uuid, 'go')`
      const context = yield* Layer.build(executor())
      assert.strictEqual(
        yield* Effect.provideContext(Parent.await(id), context as Context.Context<Tenure.Client>),
        2
      )
    }).pipe(Effect.scoped, Effect.timeout("40 seconds"))
  )
})

describe("an event", () => {
  it.live("is told once, to an item that is there, and is no larger than a payload", () =>
    Effect.gen(function* () {
      const queue = run(() =>
        Wait.event("go", { success: Schema.Date }).pipe(Effect.map((at) => at.getTime()))
      )
      yield* Effect.gen(function* () {
        const id = yield* Parent.enqueue({ name: "a" }, { delay: "1 hour" })
        const sql = yield* SqlClient.SqlClient
        yield* Effect.ignore(
          sql.withTransaction(
            Effect.andThen(
              Wait.send(id, "go", new Date(1), { success: Schema.Date }),
              Effect.fail("rolled back")
            )
          )
        )
        assert.isTrue(yield* Wait.send(id, "go", new Date(2), { success: Schema.Date }))
        assert.isFalse(yield* Wait.send(id, "go", new Date(3), { success: Schema.Date }))
        const large = yield* Effect.flip(
          Wait.send(id, "large", "x".repeat(1_048_577), { success: Schema.String })
        )
        assert.strictEqual(large._tag, "PayloadTooLarge")
        const unknown = yield* Effect.flip(
          Wait.send("00000000-0000-7000-8000-000000000000" as WorkQueue.ItemId, "go")
        )
        assert.strictEqual(unknown._tag, "UnknownId")
        const early = yield* Parent.enqueue({ name: "b" })
        yield* Wait.send(early, "go", new Date(4), { success: Schema.Date })
        assert.strictEqual(yield* Parent.await(early), 4)
      }).pipe(provide(queue))
    })
  )
})

describe("a wait where none is possible", () => {
  const cases = {
    "inside a step": [Step.run("s", Effect.orDie(Wait.sleep("w", "1 hour"))), "inside a step"],
    "inside a transaction": [
      Effect.flatMap(SqlClient.SqlClient, (sql) => sql.withTransaction(Wait.sleep("w", "1 hour"))),
      "inside a transaction"
    ],
    "inside an uninterruptible region": [
      Effect.uninterruptible(Wait.sleep("w", "1 hour")),
      "inside an uninterruptible region"
    ],
    "with the name of a step": [
      Effect.andThen(Step.run("w", Effect.void), Wait.sleep("w", "1 hour")),
      "two steps named w"
    ],
    "with a reserved name": [Wait.sleep("~w", "1 hour"), "does not begin with ~"]
  } as const

  for (const [where, [wait, words]] of Object.entries(cases)) {
    it.live(`${where} ends the item in words`, () =>
      Effect.gen(function* () {
        const exit = yield* outcome(
          run(() => wait as Effect.Effect<void, WorkQueue.AttemptFailure>)
        )
        assert.include(String(Exit.isFailure(exit) && exit.cause), words)
      })
    )
  }
})
