/**
 * Goal: a step runs once for its item, its stored result is what its schema says, the mistakes one can
 * make with it end in words, and nobody takes an effect without a receipt for one that was not done.
 * Method: the whole runtime; attempts that fail after a step.
 * Covers I6, K-079..K-081, K-137, K-157..K-161, row 40.
 */
import { assert, describe, it } from "@effect/vitest"
import { DateTime, Deferred, Effect, Exit, Layer, Option, Ref, Schedule, Schema } from "effect"
import { SqlClient } from "effect/sql"
import { Lease, Step, Tenure, WorkQueue } from "tenure"
import { FaultPoint } from "tenure/testing"
import { Attempt } from "../../src/queue/Step.ts"
import { layerRuntime } from "./runtime.ts"

class Work extends WorkQueue.make("work", { payload: {}, success: Schema.Unknown }) {}

const again = { retry: { times: 3, schedule: Schedule.spaced("1 millis") } }
const retryLater = Effect.fail(new WorkQueue.RetryLater({ cause: "again" }))

const outcome = <E, R>(
  queue: Layer.Layer<never, E, R>,
  settings: Partial<Tenure.Options["settings"]> = {}
) =>
  Effect.gen(function* () {
    const id = yield* Work.enqueue({})
    return { id, exit: yield* Effect.exit(Work.await(id)).pipe(Effect.timeout("15 seconds")) }
  }).pipe(Effect.provide(Layer.provideMerge(queue, layerRuntime({ settings }))))

describe("a step", () => {
  it.live("runs once over all attempts, and what has no checkpoint runs again", () =>
    Effect.gen(function* () {
      const runs = yield* Ref.make<ReadonlyArray<string>>([])
      const run = (name: string) => Ref.update(runs, (all) => [...all, name])
      const { exit } = yield* outcome(
        Work.toLayer(
          Effect.fnUntraced(function* (_, item) {
            yield* Step.run("nothing", run("nothing"))
            const at = yield* Step.run("date", Effect.as(run("date"), new Date(7)), {
              success: Schema.Date
            })
            yield* run("between")
            if (item.attempt === 1) return yield* retryLater
            // Its own failure is no checkpoint.
            yield* Step.run(
              "flaky",
              Effect.andThen(run("flaky"), item.attempt === 2 ? retryLater : Effect.void)
            )
            return at.getTime()
          }),
          again
        )
      )
      assert.deepStrictEqual(exit, Exit.succeed(7))
      assert.deepStrictEqual(yield* Ref.get(runs), [
        "nothing",
        "date",
        "between",
        "between",
        "flaky",
        "between",
        "flaky"
      ])
    })
  )

  it.live("whose name is used twice dies naming it, instead of sharing a result", () =>
    Effect.gen(function* () {
      const { exit } = yield* outcome(
        Work.toLayer(() =>
          Effect.andThen(Step.run("same", Effect.void), Step.run("same", Effect.void))
        )
      )
      assert.include(String(Exit.isFailure(exit) && exit.cause), "two steps named same")
    })
  )

  it.live("that begins with ~ dies naming it: such names are not the handler's", () =>
    Effect.gen(function* () {
      const { exit } = yield* outcome(Work.toLayer(() => Step.run("~intent/charge", Effect.void)))
      assert.include(String(Exit.isFailure(exit) && exit.cause), "does not begin with ~")
    })
  )

  it.live("that has failed can be retried in the same attempt", () =>
    Effect.gen(function* () {
      const tries = yield* Ref.make(0)
      const { exit } = yield* outcome(
        Work.toLayer((_, { attempt }) =>
          Effect.gen(function* () {
            const count = yield* Ref.updateAndGet(tries, (all) => all + 1)
            return count < 3 ? yield* retryLater : count
          }).pipe(
            (trying) => Step.run("flaky", trying, { success: Schema.Int }),
            Effect.retry({ times: 5 }),
            Effect.map((count) => [attempt, count])
          )
        )
      )
      assert.deepStrictEqual(exit, Exit.succeed([1, 3]))
    })
  )

  it.live("of many that run at once are all stored", () =>
    Effect.gen(function* () {
      const ran = yield* Ref.make(0)
      const { exit, id } = yield* outcome(
        Work.toLayer(
          Effect.fnUntraced(function* (_, item) {
            const all = yield* Effect.forEach(
              Array.from({ length: 300 }, (_, n) => n),
              (n) =>
                Step.run(
                  `n${n}`,
                  Effect.as(
                    Ref.update(ran, (count) => count + 1),
                    n
                  ),
                  { success: Schema.Int }
                ),
              { concurrency: "unbounded" }
            )
            if (item.attempt === 1) return yield* retryLater
            return all.length
          }),
          again
        )
      )
      assert.deepStrictEqual(exit, Exit.succeed(300))
      assert.strictEqual(yield* Ref.get(ran), 300)
      assert.isString(id)
    })
  )

  it.live("of an attempt that is over is refused, and nothing of it is stored", () =>
    Effect.gen(function* () {
      const { exit } = yield* outcome(
        Work.toLayer(
          Effect.fnUntraced(function* (_, item) {
            if (item.attempt === 1) {
              // As if this attempt had been taken away: the database knows a later one.
              const attempt = yield* Attempt
              yield* Step.run("early", Effect.void)
              const answer = yield* attempt.checkpoints.push({
                id: item.id,
                attempt: 0,
                name: "stale",
                value: "1"
              })
              return answer
            }
            return "unexpected"
          })
        )
      )
      assert.deepStrictEqual(exit, Exit.succeed("stale"))
    })
  )

  it.live("of an attempt that was taken away ends the attempt, and the next one decides", () =>
    Effect.gen(function* () {
      const wentOn = yield* Ref.make<ReadonlyArray<number>>([])
      const { exit } = yield* outcome(
        Work.toLayer(
          Effect.fnUntraced(function* (_, item) {
            const sql = yield* SqlClient.SqlClient
            if (item.attempt === 1) {
              yield* sql`
                SELECT id FROM tenure.settle(ARRAY[${item.id}::uuid], ARRAY[1], ARRAY['hand-back'], NULL, NULL,
                  (SELECT ARRAY[lane_id] FROM tenure.claimed WHERE queue_id > 0), NULL)`
            }
            yield* Step.run("late", Effect.void)
            yield* Ref.update(wentOn, (all) => [...all, item.attempt])
            return item.attempt
          })
        )
      )
      assert.deepStrictEqual(exit, Exit.succeed(2))
      assert.deepStrictEqual(yield* Ref.get(wentOn), [2])
    })
  )

  it.live("commits beside the handler's own writes, in the order they were made", () =>
    Effect.gen(function* () {
      const { exit } = yield* outcome(
        Work.toLayer(
          Effect.fnUntraced(function* (_, item) {
            yield* Step.run("one", Effect.succeed("x"), { success: Schema.String })
            const sql = yield* SqlClient.SqlClient
            const rows = yield* sql<{ name: string; value: unknown }>`
              SELECT name, value FROM tenure.step WHERE item_id = ${item.id}::uuid`
            return rows
          })
        )
      )
      assert.deepStrictEqual(exit, Exit.succeed([{ name: "one", value: "x" }]))
    })
  )
})

describe("an effect that is sent", () => {
  /** A provider that keeps what it has done under each key, and fails after it at the first calls. */
  const provider = (failures: number) =>
    Effect.map(Ref.make<ReadonlyArray<string>>([]), (calls) => {
      const done = new Map<string, string>()
      return {
        calls: Ref.get(calls),
        done,
        note: (what: string) => Ref.update(calls, (all) => [...all, what]),
        send: (key: string) =>
          Effect.gen(function* () {
            const before = yield* Ref.getAndUpdate(calls, (all) => [...all, `send ${key}`])
            if (!done.has(key)) done.set(key, `receipt ${done.size + 1}`)
            return before.length < failures ? yield* retryLater : (done.get(key) ?? "")
          }),
        find: (key: string) =>
          Effect.as(
            Ref.update(calls, (all) => [...all, `find ${key}`]),
            Option.fromNullishOr(done.get(key))
          )
      }
    })

  it.live("is sent once under the item's key, and its receipt replayed to later attempts", () =>
    Effect.gen(function* () {
      const world = yield* provider(0)
      const { exit, id } = yield* outcome(
        Work.toLayer(
          Effect.fnUntraced(function* (_, item) {
            const receipt = yield* Step.send("charge", {
              send: (key) =>
                Effect.gen(function* () {
                  // Durable before anything is sent, under this attempt.
                  const sql = yield* SqlClient.SqlClient
                  const rows = yield* Effect.orDie(
                    sql`SELECT name, attempt FROM tenure.step WHERE item_id = ${item.id}::uuid`
                  )
                  assert.deepStrictEqual(rows, [{ name: "~intent/charge", attempt: 1 }])
                  assert.strictEqual(yield* Step.idempotencyKey("charge"), key)
                  return yield* world.send(key)
                }),
              success: Schema.String
            }).pipe(Effect.catchTag("OutcomeUnknown", () => Effect.succeed("unexpected")))
            if (item.attempt < 3) return yield* retryLater
            return receipt
          }),
          again
        )
      )
      assert.deepStrictEqual(exit, Exit.succeed("receipt 1"))
      assert.deepStrictEqual(yield* world.calls, [`send ${id}/charge`])
    })
  )

  it.live("and has failed is asked for by the next attempt, and the answer is its receipt", () =>
    Effect.gen(function* () {
      const world = yield* provider(1)
      const { exit, id } = yield* outcome(
        Work.toLayer(
          Effect.fnUntraced(function* (_, item) {
            const receipt = yield* Step.send("charge", {
              send: world.send,
              resolve: world.find,
              success: Schema.String
            })
            if (item.attempt < 4) return yield* retryLater
            return receipt
          }),
          again
        )
      )
      assert.deepStrictEqual(exit, Exit.succeed("receipt 1"))
      assert.deepStrictEqual(yield* world.calls, [`send ${id}/charge`, `find ${id}/charge`])
    })
  )

  it.live("is sent again under the same key when nothing was done, in the same attempt too", () =>
    Effect.gen(function* () {
      const world = yield* provider(3)
      const { exit, id } = yield* outcome(
        Work.toLayer(
          (_, item) =>
            Step.send("charge", {
              send: world.send,
              resolve: (key) => Effect.as(world.note(`asked ${key}`), Option.none()),
              success: Schema.String
            }).pipe(
              Effect.retry({ times: 1 }),
              Effect.map((receipt) => [receipt, item.attempt])
            ),
          again
        )
      )
      const [sent, asked] = [`send ${id}/charge`, `asked ${id}/charge`]
      assert.deepStrictEqual(exit, Exit.succeed(["receipt 1", 2]))
      assert.deepStrictEqual(yield* world.calls, [sent, asked, sent, asked, sent])
    })
  )

  it.live(
    "without a way to ask is unknown after a failure, for the handler to take as a state",
    () =>
      Effect.gen(function* () {
        const world = yield* provider(1)
        const began = yield* DateTime.now
        const { exit, id } = yield* outcome(
          Work.toLayer((_, item) =>
            Step.send("charge", { send: world.send, success: Schema.String }).pipe(
              Effect.retry({ times: 3, while: (error) => error._tag === "RetryLater" }),
              Effect.catchTag("OutcomeUnknown", ({ idempotencyKey, since, step }) =>
                Effect.succeed([
                  item.attempt,
                  step,
                  idempotencyKey,
                  since.epochMilliseconds >= began.epochMilliseconds
                ])
              )
            )
          )
        )
        assert.deepStrictEqual(exit, Exit.succeed([1, "charge", `${id}/charge`, true]))
        assert.deepStrictEqual(yield* world.calls, [`send ${id}/charge`])
      })
  )

  it.live(
    "is unknown to whoever awaits the item, when the queue declares that as its failure",
    () =>
      Effect.gen(function* () {
        class Paid extends WorkQueue.make("paid", { payload: {}, error: Step.OutcomeUnknown }) {}
        const world = yield* provider(1)
        const queue = Paid.toLayer(
          () => Effect.asVoid(Step.send("charge", { send: world.send, success: Schema.String })),
          { retry: { ...again.retry, while: () => false } }
        )
        const [id, failure] = yield* Effect.gen(function* () {
          const id = yield* Paid.enqueue({})
          return [id, yield* Effect.flip(Paid.await(id))] as const
        }).pipe(Effect.provide(Layer.provideMerge(queue, layerRuntime())))
        assert.instanceOf(failure, Step.OutcomeUnknown)
        assert.deepInclude(failure, { item: id, step: "charge", idempotencyKey: `${id}/charge` })
        assert.deepStrictEqual(yield* world.calls, [`send ${id}/charge`])
      })
  )

  it.live(
    "is refused with a lease in doubt, after its intent was stored, with nothing in between",
    () =>
      Effect.gen(function* () {
        const world = yield* provider(0)
        // As if the connection to the database broke at that moment.
        let stored = 0
        const doubt = Layer.succeed(FaultPoint.FaultPoint, (at) =>
          Effect.gen(function* () {
            if (at !== "queue.checkpoint.committed" || ++stored > 1) return
            const attempt = yield* Effect.serviceOption(Attempt)
            if (Option.isSome(attempt)) attempt.value.lease.doubtUnsafe()
          })
        )
        const refusals = yield* Ref.make<ReadonlyArray<string>>([])
        const { exit, id } = yield* outcome(
          Work.toLayer((_, item) =>
            Step.send("charge", {
              send: world.send,
              resolve: world.find,
              success: Schema.String
            }).pipe(
              Effect.tapError((error) => Ref.update(refusals, (all) => [...all, error._tag])),
              Effect.map((receipt) => [receipt, item.attempt])
            )
          ).pipe(Layer.provide(doubt)),
          { leaseRenewal: "300 millis" }
        )
        assert.deepStrictEqual(yield* Ref.get(refusals), ["LeaseUnverified"])
        assert.deepStrictEqual(exit, Exit.succeed(["receipt 1", 2]))
        // That nothing was sent is not known to the next attempt, so it asks.
        assert.deepStrictEqual(yield* world.calls, [`find ${id}/charge`, `send ${id}/charge`])
      })
  )

  it.live("is interrupted when the lease is lost, also where nothing else interrupts", () =>
    Effect.gen(function* () {
      const sending = yield* Deferred.make<void>()
      const interrupted = yield* Deferred.make<void>()
      const queue = Work.toLayer(() =>
        Step.send("charge", {
          send: () =>
            Effect.andThen(Deferred.succeed(sending, undefined), Effect.never).pipe(
              Effect.onInterrupt(() => Deferred.succeed(interrupted, undefined))
            ),
          resolve: () => Effect.succeedNone
        }).pipe(Effect.uninterruptible)
      )
      yield* Effect.gen(function* () {
        yield* Work.enqueue({})
        yield* Deferred.await(sending)
        const { lease } = yield* Tenure.Executor
        yield* lease.close("revoked")
        yield* Deferred.await(interrupted)
        assert.instanceOf(yield* Effect.flip(Lease.check), Lease.LeaseLost)
      }).pipe(Effect.provide(Layer.provideMerge(queue, layerRuntime())))
    })
  )
})
