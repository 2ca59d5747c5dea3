/**
 * Goal: what the README says of queues holds for a program written as a user writes it.
 * Method: the whole runtime in this process, logged in as the worker role, on a database of its own.
 * Covers K-104, K-105, K-120..K-123, I5, I7 and the semantics of `WorkQueue`.
 */
import { assert, describe, it } from "@effect/vitest"
import {
  Cause,
  DateTime,
  Deferred,
  Duration,
  Effect,
  Exit,
  Fiber,
  Latch,
  Layer,
  Option,
  Ref,
  Result,
  Schedule,
  Schema,
  Stream
} from "effect"
import { SqlClient } from "effect/sql"
import { Tenure, WorkQueue } from "tenure"
import { layerRuntime } from "./runtime.ts"
import { present } from "../support/present.ts"

class Refused extends Schema.TaggedError<Refused>()("Refused", { code: Schema.Int }) {}

class Greet extends WorkQueue.make("greet", {
  payload: { name: Schema.String, at: Schema.optionalKey(Schema.Date) },
  success: Schema.Struct({ text: Schema.String, at: Schema.optionalKey(Schema.Date) }),
  error: Refused
}) {}

/** Runs `body` beside the queue, and ends with it. */
const serving = <A, E, R, E2, R2>(
  queue: Layer.Layer<never, E2, R2>,
  body: Effect.Effect<A, E, R>,
  options?: Partial<Tenure.Options>
) => body.pipe(Effect.provide(Layer.provideMerge(queue, layerRuntime(options))))

const failureOf = <A, E>(exit: Exit.Exit<A, E>): E => {
  assert.isTrue(Exit.isFailure(exit))
  return Option.getOrThrow(Cause.findErrorOption((exit as Exit.Failure<A, E>).cause))
}

const runItem = <A, E, R>(
  id: WorkQueue.ItemId,
  queue: { readonly await: (id: WorkQueue.ItemId) => Effect.Effect<A, E, R> }
) => queue.await(id).pipe(Effect.exit, Effect.timeout("15 seconds"))

describe("an item", () => {
  it.live("gives its decoded result to whoever awaits it, and to later polls", () =>
    serving(
      Greet.toLayer(({ at, name }) =>
        Effect.succeed({ text: `hello ${name}`, ...(at ? { at } : {}) })
      ),
      Effect.gen(function* () {
        const at = new Date(1234)
        const id = yield* Greet.enqueue({ name: "Ada", at })
        assert.deepStrictEqual(yield* Greet.await(id), { text: "hello Ada", at })
        const polled = Option.getOrThrow(yield* Greet.poll(id))
        assert.deepStrictEqual(polled, Exit.succeed({ text: "hello Ada", at }))
      })
    )
  )

  it.live("of a queue without a result ends with nothing, for whoever awaits or polls it", () => {
    class Silent extends WorkQueue.make("silent", { payload: {} }) {}
    return serving(
      Silent.toLayer(() => Effect.void),
      Effect.gen(function* () {
        const id = yield* Silent.enqueue({})
        assert.isUndefined(yield* Silent.await(id))
        assert.deepStrictEqual(Option.getOrThrow(yield* Silent.poll(id)), Exit.void)
      })
    )
  })

  it.live("keeps NUL characters, lone surrogates and emoji of its payload and result", () =>
    serving(
      Greet.toLayer(({ name }) => Effect.succeed({ text: name })),
      Effect.gen(function* () {
        const name = "a\u0000b\ud800c\u{1f600}"
        const id = yield* Greet.enqueue({ name })
        assert.strictEqual((yield* Greet.await(id)).text, name)
      })
    )
  )

  it.live("fails with its handler's declared failure, at once when no policy retries it", () =>
    serving(
      Greet.toLayer(() => Effect.fail(new Refused({ code: 7 }))),
      Effect.gen(function* () {
        const id = yield* Greet.enqueue({ name: "x" })
        const failure = failureOf(yield* runItem(id, Greet))
        assert.deepStrictEqual(failure, new Refused({ code: 7 }))
      })
    )
  )

  it.live("is retried as the policy says, and a failure for which `while` says no is final", () =>
    Effect.gen(function* () {
      const attempts = yield* Ref.make<ReadonlyArray<[string, number, boolean]>>([])
      yield* serving(
        Greet.toLayer(
          ({ name }, item) =>
            Effect.andThen(
              Ref.update(
                attempts,
                (all) => [...all, [name, item.attempt, item.isLastAttempt] as const] as never
              ),
              Effect.fail(new Refused({ code: name === "final" ? 1 : 2 }))
            ),
          {
            retry: {
              times: 2,
              schedule: Schedule.spaced("10 millis"),
              while: ({ code }) => code !== 1
            }
          }
        ),
        Effect.gen(function* () {
          const [tried, final] = yield* Greet.enqueueAll([{ name: "tried" }, { name: "final" }])
          assert.strictEqual(failureOf(yield* runItem(present(tried), Greet))._tag, "Refused")
          assert.strictEqual(failureOf(yield* runItem(present(final), Greet))._tag, "Refused")
        })
      )
      const seen = yield* Ref.get(attempts)
      assert.deepStrictEqual(
        seen.filter(([name]) => name === "tried"),
        [
          ["tried", 1, false],
          ["tried", 2, false],
          ["tried", 3, true]
        ]
      )
      assert.strictEqual(seen.filter(([name]) => name === "final").length, 1)
    })
  )

  it.live("whose handler dies tells so without the payload, and is not retried", () =>
    serving(
      Greet.toLayer(() => Effect.die(new Error("boom"))),
      Effect.gen(function* () {
        const id = yield* Greet.enqueue({ name: "secret-payload" })
        const failure = failureOf(yield* runItem(id, Greet))
        assert.strictEqual(failure._tag, "ItemFailed")
        assert.include(failure.message, "Error: boom")
        assert.notInclude(failure.message, "secret-payload")
      })
    )
  )

  it.live(
    "whose result cannot be encoded or is too large dies with the reason and loses nothing",
    () =>
      serving(
        Greet.toLayer(({ name }) =>
          Effect.succeed(name === "large" ? { text: "x".repeat(2000) } : ({ text: 5 } as never))
        ),
        Effect.gen(function* () {
          const ids = yield* Greet.enqueueAll([{ name: "large" }, { name: "wrong" }])
          const [large, wrong] = yield* Effect.forEach(ids, (id) => runItem(id, Greet))
          assert.include(failureOf(present(large)).message, "the limit is 1000")
          assert.strictEqual(failureOf(present(wrong))._tag, "ItemFailed")
        }),
        { settings: { payloadMax: 1000 } }
      )
  )

  it.live("asks to be retried later, overriding the schedule once", () =>
    serving(
      Greet.toLayer(
        ({ name }, item) =>
          item.attempt === 1
            ? Effect.fail(new WorkQueue.RetryLater({ cause: "busy", after: Duration.millis(1) }))
            : Effect.succeed({ text: `${name} ${item.attempt}` }),
        { retry: { times: 1, schedule: Schedule.spaced("1 hour") } }
      ),
      Effect.gen(function* () {
        const id = yield* Greet.enqueue({ name: "later" })
        assert.deepStrictEqual(yield* runItem(id, Greet), Exit.succeed({ text: "later 2" }))
      })
    )
  )

  it.live("that runs out of its attempt's time is interrupted and tried again", () =>
    Effect.gen(function* () {
      const interrupted = yield* Ref.make(0)
      yield* serving(
        Greet.toLayer(
          ({ name }, item) =>
            item.attempt === 1
              ? Effect.onInterrupt(Effect.never, () => Ref.update(interrupted, (n) => n + 1))
              : Effect.succeed({ text: name }),
          { timeout: "200 millis", retry: { times: 1, schedule: Schedule.spaced("1 millis") } }
        ),
        Effect.gen(function* () {
          const id = yield* Greet.enqueue({ name: "slow" })
          assert.deepStrictEqual(yield* runItem(id, Greet), Exit.succeed({ text: "slow" }))
        })
      )
      assert.strictEqual(yield* Ref.get(interrupted), 1)
    })
  )

  it.live("whose deadline passes ends as DeadlineExceeded, waiting or running", () =>
    serving(
      Greet.toLayer(() => Effect.never, { concurrency: { perExecutor: 1 } }),
      Effect.gen(function* () {
        const running = yield* Greet.enqueue({ name: "running" }, { deadline: "400 millis" })
        const waiting = yield* Greet.enqueue({ name: "waiting" }, { deadline: "500 millis" })
        const until = DateTime.add(yield* DateTime.now, { seconds: 1 })
        const delayed = yield* Greet.enqueue(
          { name: "delayed" },
          { delay: "1 hour", deadline: until }
        )
        for (const id of [running, waiting, delayed]) {
          const failure = failureOf(yield* runItem(id, Greet))
          assert.isTrue(failure._tag === "ItemFailed" && failure.reason._tag === "DeadlineExceeded")
        }
      })
    )
  )

  it.live("whose deadline has passed already is never started", () =>
    Effect.gen(function* () {
      const started = yield* Ref.make(0)
      yield* serving(
        Greet.toLayer(({ name }) =>
          Effect.as(
            Ref.update(started, (n) => n + 1),
            { text: name }
          )
        ),
        Effect.gen(function* () {
          const id = yield* Greet.enqueue({ name: "late" }, { deadline: 0 })
          const failure = failureOf(yield* runItem(id, Greet))
          assert.isTrue(failure._tag === "ItemFailed" && failure.reason._tag === "DeadlineExceeded")
        })
      )
      assert.strictEqual(yield* Ref.get(started), 0)
    })
  )

  it.live("is cancelled while it waits and while it runs; the first terminal commit wins", () =>
    Effect.gen(function* () {
      const started = yield* Deferred.make<void>()
      yield* serving(
        Greet.toLayer(
          ({ name }) =>
            name === "quick"
              ? Effect.succeed({ text: name })
              : Effect.andThen(Deferred.succeed(started, undefined), Effect.never),
          { concurrency: { perExecutor: 1 } }
        ),
        Effect.gen(function* () {
          const quick = yield* Greet.enqueue({ name: "quick" })
          yield* Greet.await(quick)
          const running = yield* Greet.enqueue({ name: "running" })
          yield* Deferred.await(started)
          const waiting = yield* Greet.enqueue({ name: "waiting" })
          const late = yield* Effect.flip(Greet.cancel(quick))
          assert.isTrue(late._tag === "AlreadySettled" && late.state === "completed")
          for (const id of [waiting, running]) {
            yield* Greet.cancel(id)
            const failure = failureOf(yield* runItem(id, Greet))
            assert.isTrue(failure._tag === "ItemFailed" && failure.reason._tag === "Cancelled")
          }
        })
      )
    })
  )

  it.live("that is cancelled as it ends has one outcome, and who cancels is not told another", () =>
    serving(
      Greet.toLayer(({ name }) => Effect.as(Effect.yieldNow, { text: name }), {
        concurrency: { perExecutor: 50 }
      }),
      Effect.gen(function* () {
        // Of three the first has ended, the second waits, and of the third nobody knows.
        yield* Effect.forEach(
          Array.from({ length: 300 }, (_, n) => n),
          Effect.fnUntraced(function* (n) {
            const id = yield* Greet.enqueue(
              { name: String(n) },
              n % 3 === 1 ? { delay: "1 hour" } : {}
            )
            if (n % 3 === 0) yield* Greet.await(id)
            const told = yield* Greet.cancel(id).pipe(
              Effect.as("asked"),
              Effect.catchTag("AlreadySettled", ({ state }) => Effect.succeed(state))
            )
            if (n % 3 !== 2) assert.strictEqual(told, n % 3 === 0 ? "completed" : "asked")
            const exit = yield* runItem(id, Greet)
            const outcome = Exit.isSuccess(exit) ? exit.value.text : failureOf(exit)._tag
            if (n % 3 === 1) assert.strictEqual(outcome, "ItemFailed")
            if (told === "completed") assert.strictEqual(outcome, String(n))
            else assert.include(["ItemFailed", String(n)], outcome)
            assert.deepStrictEqual(yield* Greet.poll(id), Option.some(exit))
          }),
          { concurrency: 20, discard: true }
        )
      })
    )
  )

  it.live("that nobody knows is answered with UnknownId", () =>
    serving(
      Layer.empty,
      Effect.gen(function* () {
        // One that is none must not disturb those who wait beside it.
        const texts = ["01890000-0000-7000-8000-000000000000", "", "nobody", "a\0", "'; --"]
        for (const id of texts.map((text) => WorkQueue.ItemId.make(text))) {
          const asked = [
            yield* Effect.flip(Greet.await(id)),
            yield* Effect.flip(Stream.runDrain(Greet.progress(id))),
            yield* Effect.flip(Greet.poll(id)),
            yield* Effect.flip(Greet.cancel(id)),
            yield* Effect.flip(Greet.retry(id))
          ]
          assert.deepStrictEqual(new Set(asked.map((error) => error._tag)), new Set(["UnknownId"]))
        }
      })
    )
  )

  it.live(
    "that failed becomes available again when an operator retries it, with fresh counters",
    () =>
      Effect.gen(function* () {
        const fixed = yield* Ref.make(false)
        yield* serving(
          Greet.toLayer(({ name }) =>
            Effect.flatMap(Ref.get(fixed), (isFixed) =>
              isFixed ? Effect.succeed({ text: name }) : Effect.fail(new Refused({ code: 1 }))
            )
          ),
          Effect.gen(function* () {
            const id = yield* Greet.enqueue({ name: "again" })
            yield* runItem(id, Greet)
            yield* Ref.set(fixed, true)
            yield* Greet.retry(id)
            assert.deepStrictEqual(yield* runItem(id, Greet), Exit.succeed({ text: "again" }))
            assert.strictEqual((yield* Effect.flip(Greet.retry(id)))._tag, "AlreadySettled")
          })
        )
      })
  )
})

describe("enqueue", () => {
  it.live("joins the caller's transaction: rolled back, nothing is there", () =>
    serving(
      Layer.empty,
      Effect.gen(function* () {
        const sql = yield* SqlClient.SqlClient
        const id = yield* Ref.make<Option.Option<WorkQueue.ItemId>>(Option.none())
        yield* Effect.exit(
          sql.withTransaction(
            Effect.gen(function* () {
              yield* Ref.set(id, Option.some(yield* Greet.enqueue({ name: "gone" })))
              return yield* Effect.fail("rollback")
            })
          )
        )
        const gone = Option.getOrThrow(yield* Ref.get(id))
        assert.strictEqual((yield* Effect.flip(Greet.poll(gone)))._tag, "UnknownId")
      })
    )
  )

  it.live("wakes its queue when the caller's transaction commits, not before", () =>
    serving(
      Greet.toLayer(({ name }) => Effect.succeed({ text: name })),
      Effect.gen(function* () {
        const sql = yield* SqlClient.SqlClient
        const id = yield* sql.withTransaction(
          Effect.tap(Greet.enqueue({ name: "held" }), () => Effect.sleep("200 millis"))
        )
        // Without a hint after the commit it would be found in an hour.
        assert.deepStrictEqual(yield* runItem(id, Greet), Exit.succeed({ text: "held" }))
      }),
      { settings: { pollInterval: "1 hour" } }
    )
  )

  it.live("starts a higher priority first, and equal ones in the order of enqueue", () =>
    Effect.gen(function* () {
      const order = yield* Ref.make<ReadonlyArray<string>>([])
      const gate = yield* Latch.make(false)
      yield* serving(
        Greet.toLayer(
          ({ name }) =>
            name === "gate"
              ? Effect.as(gate.await, { text: name })
              : Effect.as(
                  Ref.update(order, (all) => [...all, name]),
                  { text: name }
                ),
          { concurrency: { perExecutor: 1 } }
        ),
        Effect.gen(function* () {
          yield* Greet.enqueue({ name: "gate" }, { priority: 100 })
          const ids = yield* Greet.enqueueAll(
            ["a0", "b5", "c0", "d-5", "e5"].map((name) => ({ name })),
            ({ name }) => ({ priority: Number(name.slice(1)) })
          )
          yield* gate.open
          yield* Effect.forEach(ids, (id) => runItem(id, Greet))
        })
      )
      assert.deepStrictEqual(yield* Ref.get(order), ["b5", "e5", "a0", "c0", "d-5"])
    })
  )

  it.live("waits for its delay, however it is given", () =>
    serving(
      Greet.toLayer(({ name }, item) =>
        Effect.succeed({ text: name, at: DateTime.toDateUtc(item.enqueuedAt) })
      ),
      Effect.gen(function* () {
        const before = yield* Effect.clockWith((clock) => clock.monotonicTimeNanos)
        const at = DateTime.add(yield* DateTime.now, { milliseconds: 300 })
        const ids = [
          yield* Greet.enqueue({ name: "for" }, { delay: "300 millis" }),
          yield* Greet.enqueue({ name: "until" }, { delay: at })
        ]
        yield* Effect.forEach(ids, (id) => runItem(id, Greet), { concurrency: 2 })
        const after = yield* Effect.clockWith((clock) => clock.monotonicTimeNanos)
        assert.isAbove(Number(after - before) / 1e6, 290)
      })
    )
  )

  it.live(
    "with a known idempotency key gives the first item; another payload is a typed conflict",
    () =>
      serving(
        Greet.toLayer(({ name }) => Effect.succeed({ text: name })),
        Effect.gen(function* () {
          const first = yield* Greet.enqueue({ name: "once" }, { idempotencyKey: "k" })
          yield* Greet.await(first)
          assert.strictEqual(yield* Greet.enqueue({ name: "once" }, { idempotencyKey: "k" }), first)
          const conflict = yield* Effect.flip(
            Greet.enqueue({ name: "other" }, { idempotencyKey: "k" })
          )
          assert.isTrue(
            conflict._tag === "EnqueueRefused" &&
              conflict.reason._tag === "IdempotencyConflict" &&
              conflict.reason.existing === first
          )
        })
      )
  )

  it.live("refuses a payload over the limit and writes nothing", () =>
    serving(
      Layer.empty,
      Effect.gen(function* () {
        const refused = yield* Effect.flip(
          Greet.enqueueAll([{ name: "fits" }, { name: "x".repeat(2000) }])
        )
        assert.isTrue(
          refused._tag === "EnqueueRefused" && refused.reason._tag === "PayloadTooLarge"
        )
        const sql = yield* SqlClient.SqlClient
        assert.deepStrictEqual(yield* sql`SELECT id FROM tenure.item WHERE queue_id > 0`, [])
      }),
      { settings: { payloadMax: 1000 } }
    )
  )

  it.live("by SQL alone, from any driver's transaction, is the same item", () =>
    serving(
      Greet.toLayer(({ name }) => Effect.succeed({ text: name })),
      Effect.gen(function* () {
        const sql = yield* SqlClient.SqlClient
        const [row] = yield* sql<{ id: WorkQueue.ItemId }>`
          SELECT tenure.enqueue('greet', '{"name": "sql"}', '{"priority": 5, "idempotencyKey": "s"}') AS id`
        const { id } = present(row)
        assert.deepStrictEqual(yield* runItem(id, Greet), Exit.succeed({ text: "sql" }))
        assert.strictEqual(yield* Greet.enqueue({ name: "sql" }, { idempotencyKey: "s" }), id)
        const unknown = yield* Effect.result(
          sql`SELECT tenure.enqueue('greet', '{}', '{"prio": 5}')`
        )
        assert.isTrue(Result.isFailure(unknown))
      })
    )
  )
})

describe("a queue", () => {
  class Counted extends WorkQueue.make("counted", {
    payload: { key: Schema.String },
    key: ({ key }) => key
  }) {}

  const counting = (policy: WorkQueue.Policy<never>) =>
    Effect.gen(function* () {
      const running = new Map<string, number>()
      const highest = new Map<string, number>()
      const count = (name: string, by: number) => {
        const now = (running.get(name) ?? 0) + by
        running.set(name, now)
        highest.set(name, Math.max(now, highest.get(name) ?? 0))
      }
      yield* serving(
        Counted.toLayer(
          ({ key }) =>
            Effect.acquireUseRelease(
              Effect.sync(() => (count(key, 1), count("all", 1))),
              () => Effect.sleep("5 millis"),
              () => Effect.sync(() => (count(key, -1), count("all", -1)))
            ),
          policy
        ),
        Effect.gen(function* () {
          const ids = yield* Counted.enqueueAll(
            Array.from({ length: 60 }, (_, index) => ({ key: `k${index % 3}` }))
          )
          yield* Effect.forEach(ids, (id) => runItem(id, Counted), { concurrency: "unbounded" })
        })
      )
      return highest
    })

  it.live("never runs more than its limits for the process, for all, and for a key", () =>
    Effect.gen(function* () {
      assert.strictEqual((yield* counting({ concurrency: { perExecutor: 7 } })).get("all"), 7)
      assert.strictEqual(
        (yield* counting({ concurrency: { perExecutor: 20, global: 4 } })).get("all"),
        4
      )
      const keyed = yield* counting({ concurrency: { perExecutor: 20, perKey: 1 } })
      assert.deepStrictEqual(
        ["k0", "k1", "k2"].map((key) => keyed.get(key)),
        [1, 1, 1]
      )
    })
  )

  it.live(
    "has one handler in a process, one application in a database, and only the fenced pool",
    () =>
      Effect.gen(function* () {
        const live = Greet.toLayer(() => Effect.succeed({ text: "" }))
        const build = <E, R>(layer: Layer.Layer<never, E, R>) => Effect.flip(Layer.build(layer))
        yield* Effect.gen(function* () {
          yield* Layer.build(live)
          const twice = yield* build(Greet.toLayer(() => Effect.succeed({ text: "" })))
          assert.include(twice.message, "duplicateHandler")
          const sql = yield* SqlClient.SqlClient
          const unguarded = { ...sql, config: {} } as unknown as SqlClient.SqlClient
          const refused = yield* build(
            Counted.toLayer(() => Effect.void).pipe(
              Layer.provide(Layer.succeed(SqlClient.SqlClient, unguarded))
            )
          )
          assert.include(refused.message, "unguardedSqlClient")
          const other = yield* build(
            Greet.toLayer(() => Effect.succeed({ text: "" })).pipe(
              Layer.provide(
                Layer.fresh(Tenure.layer({ application: "other", version: "other-v1" }))
              )
            )
          )
          assert.include(other.message, "belongs to the application app")
        }).pipe(Effect.scoped, Effect.provide(layerRuntime()))
      })
  )

  it.live("lets a process without a lease hand in and watch", () =>
    Effect.gen(function* () {
      yield* Effect.gen(function* () {
        const client = Tenure.layerClient
        yield* Effect.gen(function* () {
          const id = yield* Greet.enqueue({ name: "watched" })
          const fiber = yield* Effect.forkChild(Greet.await(id))
          yield* Layer.build(Greet.toLayer(({ name }) => Effect.succeed({ text: name })))
          assert.strictEqual((yield* Fiber.join(fiber)).text, "watched")
        }).pipe(Effect.provide(Layer.fresh(client)))
      }).pipe(Effect.scoped, Effect.provide(layerRuntime()))
    })
  )
})
