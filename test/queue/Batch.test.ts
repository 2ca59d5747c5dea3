/**
 * Goal: a handler of batches gets as many items as there are, and each of them is settled, retried, ended
 * and given back as if it had run alone.
 * Method: the whole runtime in this process, on a database of its own; that something waits is shown by a
 * time that would never come.
 */
import { assert, describe, it } from "@effect/vitest"
import {
  Deferred,
  Duration,
  Effect,
  Exit,
  Latch,
  Layer,
  Option,
  Ref,
  Result,
  Schedule,
  Schema,
  Scope
} from "effect"
import { Tenure, WorkQueue } from "tenure"
import { connect, freshDatabase, layerOf } from "../support/Postgres.ts"
import { present } from "../support/present.ts"
import { layerRuntime } from "./runtime.ts"

class Bounced extends Schema.TaggedError<Bounced>()("Bounced", { to: Schema.Int }) {}

class Mails extends WorkQueue.make("mails", {
  payload: { to: Schema.Int },
  success: Schema.String,
  error: Bounced
}) {}

const serving = <A, E, R, E2, R2>(
  queue: Layer.Layer<never, E2, R2>,
  body: Effect.Effect<A, E, R>,
  options?: Partial<Tenure.Options>
) => body.pipe(Effect.provide(Layer.provideMerge(queue, layerRuntime(options))))

const mails = (count: number) => Array.from({ length: count }, (_, to) => ({ to }))

const outcomeOf = (id: WorkQueue.ItemId) =>
  Mails.await(id).pipe(Effect.exit, Effect.timeout("15 seconds"))

const outcomesOf = (ids: ReadonlyArray<WorkQueue.ItemId>) =>
  Effect.forEach(ids, outcomeOf, { concurrency: "unbounded" })

/** What the runtime itself says of an item that has no answer. */
const reasonOf = (exit: Exit.Exit<unknown, unknown>) =>
  Exit.findErrorOption(exit).pipe(
    Option.map((error) =>
      error instanceof WorkQueue.ItemFailed
        ? error.reason._tag === "HandlerDied"
          ? `HandlerDied: ${error.reason.message}`
          : error.reason._tag
        : error
    ),
    Option.getOrUndefined
  )

type Batch = ReadonlyArray<WorkQueue.BatchItem<{ readonly to: number }>>

const sentAll = (batch: Batch) => batch.map(({ payload }) => Result.succeed(`sent ${payload.to}`))

describe("a batch", () => {
  it.live("that is full starts at once, whatever it may wait for", () =>
    Effect.gen(function* () {
      const sizes = yield* Ref.make<ReadonlyArray<number>>([])
      yield* serving(
        Mails.toLayerBatch(
          (batch) =>
            Effect.as(
              Ref.update(sizes, (all) => [...all, batch.length]),
              sentAll(batch)
            ),
          { batch: { size: 3, within: "1 hour" } }
        ),
        Effect.gen(function* () {
          const ids = yield* Mails.enqueueAll(mails(6))
          const outcomes = yield* outcomesOf(ids)
          assert.deepStrictEqual(
            outcomes,
            mails(6).map(({ to }) => Exit.succeed(`sent ${to}`))
          )
        })
      )
      assert.deepStrictEqual(yield* Ref.get(sizes), [3, 3])
    })
  )

  it.live(
    "that does not fill starts when its first item has waited, also one that never could",
    () =>
      Effect.gen(function* () {
        const sizes = yield* Ref.make<ReadonlyArray<number>>([])
        const handler = (batch: Batch) =>
          Effect.as(
            Ref.update(sizes, (all) => [...all, batch.length]),
            sentAll(batch)
          )
        yield* serving(
          Mails.toLayerBatch(handler, { batch: { size: 100, within: "300 millis" } }),
          Effect.gen(function* () {
            const ids = yield* Mails.enqueueAll(mails(4))
            assert.isTrue((yield* outcomesOf(ids)).every(Exit.isSuccess))
          })
        )
        assert.deepStrictEqual(yield* Ref.get(sizes), [4])
        yield* Ref.set(sizes, [])
        yield* serving(
          // Two slots are never a hundred items: two of them are full.
          Mails.toLayerBatch(handler, {
            batch: { size: 100, within: "1 hour" },
            concurrency: { perExecutor: 2 }
          }),
          Effect.gen(function* () {
            const ids = yield* Mails.enqueueAll(mails(4))
            assert.isTrue((yield* outcomesOf(ids)).every(Exit.isSuccess))
          })
        )
        assert.deepStrictEqual(yield* Ref.get(sizes), [2, 2])
      })
  )

  it.live("without a time to wait is what is there", () =>
    Effect.gen(function* () {
      const sizes = yield* Ref.make<ReadonlyArray<number>>([])
      yield* serving(
        Mails.toLayerBatch(
          (batch) =>
            Effect.as(
              Ref.update(sizes, (all) => [...all, batch.length]),
              sentAll(batch)
            ),
          { batch: { size: 100 } }
        ),
        Effect.gen(function* () {
          const ids = yield* Mails.enqueueAll(mails(40))
          assert.isTrue((yield* outcomesOf(ids)).every(Exit.isSuccess))
        })
      )
      assert.deepStrictEqual(yield* Ref.get(sizes), [40])
    })
  )

  it.live("gives each item its own result, and what failed is tried again without the others", () =>
    Effect.gen(function* () {
      const attempts = yield* Ref.make<ReadonlyArray<string>>([])
      yield* serving(
        Mails.toLayerBatch(
          (batch) =>
            Effect.as(
              Ref.update(attempts, (all) => [
                ...all,
                ...batch.map(({ item, payload }) => `${payload.to}/${item.attempt}`)
              ]),
              batch.map(({ item, payload }) => {
                if (payload.to === 0) return Result.succeed("sent")
                if (payload.to === 1 && item.attempt === 1) {
                  return Result.fail(
                    new WorkQueue.RetryLater({ cause: "full", after: Duration.millis(1) })
                  )
                }
                return payload.to === 3
                  ? Result.fail(new Bounced({ to: payload.to }))
                  : Result.succeed(`sent at ${item.attempt}`)
              })
            ),
          {
            batch: { size: 4, within: "100 millis" },
            retry: { times: 1, schedule: Schedule.spaced("1 millis") }
          }
        ),
        Effect.gen(function* () {
          const ids = yield* Mails.enqueueAll(mails(4))
          assert.deepStrictEqual(yield* outcomesOf(ids), [
            Exit.succeed("sent"),
            Exit.succeed("sent at 2"),
            Exit.succeed("sent at 1"),
            Exit.fail(new Bounced({ to: 3 }))
          ])
        })
      )
      assert.deepStrictEqual([...(yield* Ref.get(attempts))].toSorted(), [
        "0/1",
        "1/1",
        "1/2",
        "2/1",
        "3/1",
        "3/2"
      ])
    })
  )

  it.live(
    "whose call fails is tried again as a whole, and a wrong number of results is a defect",
    () =>
      Effect.gen(function* () {
        const calls = yield* Ref.make(0)
        yield* serving(
          Mails.toLayerBatch(
            (batch) =>
              Effect.flatMap(
                Ref.updateAndGet(calls, (n) => n + 1),
                (
                  call
                ): Effect.Effect<
                  ReadonlyArray<Result.Result<string, Bounced>>,
                  WorkQueue.RetryLater
                > =>
                  batch.some(({ payload }) => payload.to === 9)
                    ? Effect.succeed([])
                    : call === 1
                      ? new WorkQueue.RetryLater({ cause: "down", after: Duration.millis(1) })
                      : Effect.succeed(sentAll(batch))
              ),
            { batch: { size: 3, within: "100 millis" } }
          ),
          Effect.gen(function* () {
            const ids = yield* Mails.enqueueAll(mails(3))
            assert.isTrue((yield* outcomesOf(ids)).every(Exit.isSuccess))
            assert.strictEqual(yield* Ref.get(calls), 2)
            const wrong = yield* Mails.enqueueAll([{ to: 9 }, { to: 1 }])
            for (const outcome of yield* outcomesOf(wrong)) {
              assert.strictEqual(
                reasonOf(outcome),
                "HandlerDied: Error: the batch handler gave 0 results for 2 items"
              )
            }
          })
        )
        assert.strictEqual(yield* Ref.get(calls), 3)
      })
  )

  it.live("goes on without an item that is cancelled or late, and ends when none is left", () =>
    Effect.gen(function* () {
      const started = yield* Deferred.make<void>()
      const release = yield* Latch.make()
      const interrupted = yield* Ref.make(0)
      yield* serving(
        Mails.toLayerBatch(
          (batch) =>
            batch.some(({ payload }) => payload.to === 9)
              ? Effect.onInterrupt(Effect.never, () => Ref.update(interrupted, (n) => n + 1))
              : Deferred.succeed(started, undefined).pipe(
                  Effect.andThen(release.await),
                  Effect.as(sentAll(batch))
                ),
          { batch: { size: 3, within: "1 hour" } }
        ),
        Effect.gen(function* () {
          const ids = yield* Mails.enqueueAll(mails(3), ({ to }) =>
            to === 2 ? { deadline: "500 millis" } : {}
          )
          yield* Deferred.await(started)
          yield* Mails.cancel(present(ids[0]))
          assert.strictEqual(reasonOf(yield* outcomeOf(present(ids[0]))), "Cancelled")
          assert.strictEqual(reasonOf(yield* outcomeOf(present(ids[2]))), "DeadlineExceeded")
          yield* release.open
          assert.deepStrictEqual(yield* outcomeOf(present(ids[1])), Exit.succeed("sent 1"))
          const all = yield* Mails.enqueueAll([{ to: 9 }, { to: 1 }, { to: 2 }], {
            deadline: "400 millis"
          })
          for (const outcome of yield* outcomesOf(all)) {
            assert.strictEqual(reasonOf(outcome), "DeadlineExceeded")
          }
        })
      )
      assert.strictEqual(yield* Ref.get(interrupted), 1)
    })
  )

  it.live("that runs out of its time is interrupted once, and each item tried again", () =>
    Effect.gen(function* () {
      const interrupted = yield* Ref.make(0)
      yield* serving(
        Mails.toLayerBatch(
          (batch) =>
            batch.some(({ item }) => item.attempt === 1)
              ? Effect.onInterrupt(Effect.never, () => Ref.update(interrupted, (n) => n + 1))
              : Effect.succeed(sentAll(batch)),
          {
            batch: { size: 3, within: "1 hour" },
            timeout: "200 millis",
            retry: { times: 1, schedule: Schedule.spaced("1 millis") }
          }
        ),
        Effect.gen(function* () {
          const ids = yield* Mails.enqueueAll(mails(3))
          assert.isTrue((yield* outcomesOf(ids)).every(Exit.isSuccess))
        })
      )
      assert.strictEqual(yield* Ref.get(interrupted), 1)
    })
  )

  it.live("whose process stops is given back once its call has ended, uncounted", () =>
    Effect.gen(function* () {
      const database = yield* freshDatabase
      const owner = yield* connect(database.owner)
      const started = yield* Deferred.make<void>()
      const claimedAtEnd = yield* Ref.make<ReadonlyArray<unknown>>([])
      const scope = yield* Scope.make()
      const context = yield* Layer.buildWithScope(
        Layer.provideMerge(
          Mails.toLayerBatch(
            () =>
              Effect.onInterrupt(
                Effect.andThen(Deferred.succeed(started, undefined), Effect.never),
                () =>
                  // Slow to stop: nobody else may have the items yet.
                  Effect.sleep("300 millis").pipe(
                    Effect.andThen(
                      Effect.orDie(owner`SELECT FROM tenure.claimed WHERE queue_id > 0`)
                    ),
                    Effect.flatMap((rows) => Ref.set(claimedAtEnd, rows))
                  )
              ),
            { batch: { size: 3, within: "1 hour" } }
          ),
          Layer.fresh(
            Tenure.layer({ application: "app", version: "app-v1", settings: { drain: 100 } })
          ).pipe(Layer.provideMerge(layerOf(database.worker)))
        ),
        scope
      )
      yield* Mails.enqueueAll(mails(3)).pipe(Effect.provideContext(context))
      yield* Deferred.await(started)
      // One more waits for a batch that is not there.
      yield* Mails.enqueue({ to: 9 }).pipe(Effect.provideContext(context))
      yield* Scope.close(scope, Exit.void)
      assert.strictEqual((yield* Ref.get(claimedAtEnd)).length, 3)
      const ready = yield* owner`SELECT failures, losses FROM tenure.ready WHERE lane_id > 0`
      assert.deepStrictEqual(
        ready,
        Array.from({ length: 4 }, () => ({ failures: 0, losses: 0 }))
      )
    }).pipe(Effect.scoped)
  )
})
