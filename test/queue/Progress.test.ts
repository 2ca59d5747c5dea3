/**
 * Goal: whoever watches an item sees how far it is: the latest report first, each time something new, the
 * last one before the end; and the handler never waits for any of it.
 * Method: the whole runtime; a second process that watches, with hours between its polls; a database that
 * refuses for a while.
 */
import { assert, describe, it } from "@effect/vitest"
import {
  Deferred,
  Effect,
  Exit,
  Fiber,
  Latch,
  Layer,
  References,
  Schedule,
  Schema,
  Stream
} from "effect"
import { SqlClient } from "effect/sql"
import { Progress, Tenure, WorkQueue } from "tenure"
import { pauseMillis } from "../../src/queue/ProgressReports.ts"
import { connect, freshDatabase, layerOf } from "../support/Postgres.ts"
import { layerRuntime } from "./runtime.ts"

class Import extends WorkQueue.make("import", {
  payload: { name: Schema.String },
  success: Schema.String,
  progress: Schema.Struct({ rows: Schema.Number, at: Schema.optionalKey(Schema.Date) })
}) {}

class Other extends WorkQueue.make("other", {
  payload: {},
  progress: Schema.Struct({ rows: Schema.Number })
}) {}

class Silent extends WorkQueue.make("silent", { payload: {} }) {}

const serving = <A, E, R, E2, R2>(
  queue: Layer.Layer<never, E2, R2>,
  body: Effect.Effect<A, E, R>,
  options?: Partial<Tenure.Options>
) => body.pipe(Effect.provide(Layer.provideMerge(queue, layerRuntime(options))))

/** Everything that a watcher sees until the item has settled. */
const seenOf = (id: WorkQueue.ItemId) =>
  Import.progress(id).pipe(
    Stream.runCollect,
    Effect.map((seen) => seen.map(({ rows }) => rows)),
    Effect.timeout("30 seconds")
  )

const eventually = <E, R>(what: string, condition: Effect.Effect<boolean, E, R>) =>
  Effect.gen(function* () {
    while (!(yield* condition)) yield* Effect.sleep("5 millis")
  }).pipe(
    Effect.timeoutOrElse({
      duration: "30 seconds",
      orElse: () => Effect.die(new Error(`never: ${what}`))
    })
  )

const watchers = Effect.flatMap(SqlClient.SqlClient, (sql) =>
  Effect.map(sql`SELECT FROM tenure.progress_waiter`, (rows) => rows.length)
)

describe("progress", () => {
  it.live("is seen by each who watches: the latest first, what is new, and then the end", () =>
    Effect.gen(function* () {
      const steps = [yield* Latch.make(false), yield* Latch.make(false)] as const
      yield* serving(
        Import.toLayer(
          Effect.fnUntraced(function* ({ name }, item) {
            yield* item.progress({ rows: 1, at: new Date(1234) })
            yield* steps[0].await
            yield* Progress.report(Import, { rows: 2 })
            yield* steps[1].await
            return name
          })
        ),
        Effect.gen(function* () {
          const id = yield* Import.enqueue({ name: "x" })
          const [first] = yield* Import.progress(id).pipe(Stream.take(1), Stream.runCollect)
          assert.deepStrictEqual(first, { rows: 1, at: new Date(1234) })
          const before = yield* Effect.forkChild(seenOf(id), { startImmediately: true })
          yield* eventually(
            "the first one watches",
            Effect.map(watchers, (count) => count === 1)
          )
          const two = yield* Deferred.make<void>()
          const after = yield* Import.progress(id).pipe(
            Stream.tap(({ rows }) => (rows === 2 ? Deferred.succeed(two, undefined) : Effect.void)),
            Stream.runCollect,
            Effect.forkChild({ startImmediately: true })
          )
          yield* steps[0].open
          yield* Deferred.await(two)
          yield* steps[1].open
          assert.deepStrictEqual(yield* Fiber.join(before), [1, 2])
          assert.strictEqual((yield* Fiber.join(after)).at(-1)?.rows, 2)
          // It has settled: the last report is what is left of it.
          assert.deepStrictEqual(yield* seenOf(id), [2])
          yield* eventually(
            "nobody is registered",
            Effect.map(watchers, (count) => count === 0)
          )
        })
      )
    })
  )

  it.live("of an item that nobody knows is UnknownId, and of a queue without reports the end", () =>
    serving(
      Silent.toLayer(() => Effect.void),
      Effect.gen(function* () {
        const unknown = WorkQueue.ItemId.make("01890000-0000-7000-8000-000000000000")
        const failure = yield* Import.progress(unknown).pipe(Stream.runDrain, Effect.flip)
        assert.strictEqual(failure._tag, "UnknownId")
        const id = yield* Silent.enqueue({})
        const seen = yield* Silent.progress(id).pipe(
          Stream.runCollect,
          Effect.timeout("30 seconds")
        )
        assert.deepStrictEqual(seen, [])
        const sql = yield* SqlClient.SqlClient
        assert.deepStrictEqual(yield* sql`SELECT FROM tenure.progress`, [])
      })
    )
  )

  it.live(
    "that is reported all the time is written now and then, and its last value in the end",
    () =>
      Effect.gen(function* () {
        const reports = 100_000
        yield* serving(
          Import.toLayer(
            Effect.fnUntraced(function* ({ name }, item) {
              for (let rows = 1; rows <= reports; rows++) {
                yield* item.progress({ rows })
                if (rows % 1000 === 0) yield* Effect.sleep("2 millis")
              }
              return name
            })
          ),
          Effect.gen(function* () {
            const started = yield* Effect.clockWith((clock) => clock.monotonicTimeNanos)
            const id = yield* Import.enqueue({ name: "x" })
            const seen = yield* seenOf(id)
            const ended = yield* Effect.clockWith((clock) => clock.monotonicTimeNanos)
            assert.strictEqual(seen.at(-1), reports)
            assert.deepStrictEqual(
              [...seen].sort((a, b) => a - b),
              seen
            )
            // The first, one in each pause, and the last.
            const elapsedMillis = Number(ended - started) / 1e6
            assert.isAtMost(seen.length, elapsedMillis / pauseMillis + 2)
          })
        )
      })
  )

  it.live("is the last value also of a handler that ends at once, or fails", () =>
    serving(
      Import.toLayer(
        Effect.fnUntraced(function* ({ name }, item) {
          for (const rows of [1, 2, 3]) yield* item.progress({ rows })
          return name === "dies" ? yield* Effect.die(new Error("x")) : name
        })
      ),
      Effect.gen(function* () {
        const ids = yield* Import.enqueueAll([{ name: "ends" }, { name: "dies" }])
        const seen = yield* Effect.forEach(ids, seenOf, { concurrency: 2 })
        assert.deepStrictEqual(
          seen.map((one) => one.at(-1)),
          [3, 3]
        )
      })
    )
  )

  it.live(
    "is that of the latest attempt, and what an attempt reports behind its end is nothing",
    () =>
      Effect.gen(function* () {
        const gate = yield* Latch.make(false)
        let late: Effect.Effect<unknown, unknown> = Effect.void
        yield* serving(
          Import.toLayer(
            Effect.fnUntraced(function* ({ name }, item) {
              yield* item.progress({ rows: 100 * item.attempt })
              if (item.attempt > 1) return name
              late = Effect.andThen(gate.await, item.progress({ rows: -1 }))
              return yield* new WorkQueue.RetryLater({ cause: "again" })
            }),
            { retry: { times: 1, schedule: Schedule.spaced("1 millis") } }
          ),
          Effect.gen(function* () {
            const id = yield* Import.enqueue({ name: "x" })
            assert.strictEqual((yield* seenOf(id)).at(-1), 200)
            yield* gate.open
            yield* late
            yield* Effect.sleep(2 * pauseMillis)
            assert.deepStrictEqual(yield* seenOf(id), [200])
          })
        )
      })
  )

  it.live(
    "keeps no handler waiting while the database does not take it, and its outcome for a moment",
    () =>
      Effect.gen(function* () {
        const database = yield* freshDatabase
        const reported = yield* Deferred.make<void>()
        const gate = yield* Deferred.make<void>()
        const admin = yield* connect(database.superuser)
        yield* Effect.gen(function* () {
          const id = yield* Import.enqueue({ name: "x" })
          yield* admin.withTransaction(
            Effect.gen(function* () {
              // No report gets into the table as long as this lasts.
              yield* admin`LOCK TABLE tenure.progress IN ACCESS EXCLUSIVE MODE`
              yield* Deferred.succeed(gate, undefined)
              yield* Deferred.await(reported)
              // Long enough for an outcome that did not wait for the report.
              for (let turn = 0; turn < 20; turn++) {
                const ended = yield* admin`SELECT FROM tenure.done WHERE id = ${id}::uuid`
                if (ended.length > 0) break
                yield* Effect.sleep("10 millis")
              }
            })
          )
          assert.strictEqual((yield* seenOf(id)).at(-1), 1000)
          assert.deepStrictEqual(yield* Effect.exit(Import.await(id)), Exit.succeed("x"))
        }).pipe(
          Effect.provide(
            Import.toLayer(
              Effect.fnUntraced(function* ({ name }, item) {
                yield* Deferred.await(gate)
                for (let rows = 1; rows <= 1000; rows++) yield* item.progress({ rows })
                yield* Deferred.succeed(reported, undefined)
                return name
              })
            ).pipe(
              Layer.provideMerge(
                Tenure.layer({ application: "app", version: "app-v1", settings: { drain: 100 } })
              ),
              Layer.provide(layerOf(database.worker)),
              Layer.provideMerge(Layer.succeed(References.MinimumLogLevel, "Error" as const))
            )
          )
        )
      }).pipe(Effect.scoped)
  )

  it.live("cannot be reported for another queue's item, nor more than 64 KiB of it", () =>
    Effect.gen(function* () {
      const tags: Array<string> = []
      class Texts extends WorkQueue.make("texts", { payload: {}, progress: Schema.String }) {}
      yield* serving(
        Texts.toLayer(
          Effect.fnUntraced(function* (_, item) {
            yield* item.progress("fits")
            yield* item
              .progress("x".repeat(70_000))
              .pipe(
                Effect.catchTag("ProgressRefused", ({ _tag }) =>
                  Effect.sync(() => void tags.push(_tag))
                )
              )
            yield* Progress.report(Other, { rows: 1 }).pipe(
              Effect.catchDefect((defect) =>
                Effect.sync(() => void tags.push((defect as { readonly _tag: string })._tag))
              )
            )
          })
        ),
        Effect.gen(function* () {
          const id = yield* Texts.enqueue({})
          const seen = yield* Stream.runCollect(Texts.progress(id))
          assert.strictEqual(seen.at(-1), "fits")
        })
      )
      assert.deepStrictEqual(tags, ["ProgressRefused", "ProgressOfOtherQueue"])
    })
  )

  it.live("is pushed to another process, whose poll is an hour away", () =>
    Effect.gen(function* () {
      const database = yield* freshDatabase
      const gates = [yield* Latch.make(false), yield* Latch.make(false)] as const
      const quietly = Layer.succeed(References.MinimumLogLevel, "Error" as const)
      const executor = () =>
        Layer.fresh(
          Tenure.layer({
            application: "app",
            version: "app-v1",
            settings: { pollInterval: "1 hour", drain: 100 }
          })
        ).pipe(Layer.provide(layerOf(database.worker)), Layer.provideMerge(quietly))
      const watcher = yield* Layer.build(executor())
      const worker = yield* Layer.build(
        Import.toLayer(
          Effect.fnUntraced(function* ({ name }, item) {
            yield* gates[0].await
            yield* item.progress({ rows: 1 })
            yield* gates[1].await
            yield* item.progress({ rows: 2 })
            return name
          })
        ).pipe(Layer.provideMerge(executor()))
      )
      for (const context of [watcher, worker]) {
        yield* Effect.flatMap(Tenure.Client, ({ ready }) => ready).pipe(
          Effect.provideContext(context)
        )
      }
      const id = yield* Import.enqueue({ name: "x" }).pipe(Effect.provideContext(watcher))
      const one = yield* Deferred.make<void>()
      const seen = yield* Import.progress(id).pipe(
        Stream.map(({ rows }) => rows),
        Stream.tap((rows) => (rows === 1 ? Deferred.succeed(one, undefined) : Effect.void)),
        Stream.runCollect,
        Effect.timeout("30 seconds"),
        Effect.provideContext(watcher),
        Effect.forkChild({ startImmediately: true })
      )
      yield* eventually(
        "it is registered",
        Effect.map(watchers, (count) => count === 1).pipe(Effect.provideContext(worker))
      )
      yield* gates[0].open
      yield* Deferred.await(one).pipe(Effect.timeout("30 seconds"))
      yield* gates[1].open
      assert.deepStrictEqual(yield* Fiber.join(seen), [1, 2])
    }).pipe(Effect.scoped)
  )
})
