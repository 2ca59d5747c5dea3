/**
 * Goal: however an item ends, and whoever ends it, those who wait for it are told at once.
 * Method: a process that waits, with an hour between its polls; a process that runs the queue; and
 * executors that are lost, for what ends with them.
 */
import { assert, describe, it } from "@effect/vitest"
import { Cause, Deferred, Effect, Exit, Fiber, Layer, References, Schedule, Schema } from "effect"
import { Tenure, WorkQueue } from "tenure"
import * as K from "../kernel/kernel.ts"
import { connect, freshDatabase, layerOf } from "../support/Postgres.ts"

const way = { payload: { way: Schema.String }, success: Schema.String } as const

class Ends extends WorkQueue.make("ends", { ...way, error: Schema.Struct({ code: Schema.Int }) }) {}
/** Its handler never ends by itself. */
class Slow extends WorkQueue.make("slow", way) {}
/** Nobody runs it but those who are lost. */
class Lost extends WorkQueue.make("lost", way) {}

const tagOf = (exit: Exit.Exit<unknown, unknown>): string => {
  if (Exit.isSuccess(exit)) return "completed"
  const error = Cause.squash(exit.cause) as {
    readonly code?: number
  } & Partial<WorkQueue.ItemFailed>
  return error.code === undefined ? (error.reason?._tag ?? String(error)) : "declared"
}

describe("an outcome is pushed", () => {
  it.live(
    "to whoever waits, in another process, for every way in which an item can end",
    () =>
      Effect.gen(function* () {
        const database = yield* freshDatabase
        const gate = yield* Deferred.make<void>()
        const executor = () =>
          Layer.fresh(
            Tenure.layer({
              application: "app",
              version: "v1",
              settings: { pollInterval: "1 hour", drain: 100, recoveryScan: "1 second" }
            })
          ).pipe(
            Layer.provide(layerOf(database.worker)),
            Layer.provideMerge(Layer.succeed(References.MinimumLogLevel, "None" as const))
          )
        const waiter = yield* Layer.build(executor())
        const worker = yield* Layer.build(
          Ends.toLayer(
            Effect.fnUntraced(function* ({ way }) {
              yield* Deferred.await(gate)
              if (way === "declared") return yield* Effect.fail({ code: 7 })
              if (way === "died") return yield* Effect.die(new Error("x"))
              if (way === "given up") return yield* new WorkQueue.RetryLater({ cause: "again" })
              if (way === "interrupted itself") return yield* Effect.interrupt
              if (way !== "completed") return yield* Effect.never
              return way
            }),
            {
              concurrency: { perExecutor: 20 },
              retry: { times: 1, schedule: Schedule.spaced("1 millis"), while: () => false }
            }
          ).pipe(
            Layer.merge(
              Slow.toLayer(() => Effect.never, { timeout: "300 millis", retry: { times: 0 } })
            ),
            Layer.provideMerge(executor())
          )
        )
        for (const context of [waiter, worker]) {
          yield* Effect.flatMap(Tenure.Client, ({ ready }) => ready).pipe(
            Effect.provideContext(context)
          )
        }
        const sql = yield* connect(database.superuser)
        const hand = (
          queue: { readonly enqueueAll: typeof Ends.enqueueAll },
          ways: ReadonlyArray<string>,
          options: (way: string) => WorkQueue.EnqueueOptions = () => ({})
        ) =>
          queue
            .enqueueAll(
              ways.map((one) => ({ way: one })),
              ({ way }) => options(way)
            )
            .pipe(
              Effect.map((ids) => ids.map((id, at) => [ways[at] ?? "", id] as const)),
              Effect.provideContext(waiter)
            )

        // One after the other, so that each lost executor takes the one that was handed in for it.
        const lost: Array<readonly [string, WorkQueue.ItemId]> = []
        const ghosts: Array<string> = []
        for (const how of ["Quarantined", "Cancelled", "DeadlineExceeded"]) {
          const [one] = yield* hand(Lost, [how], () =>
            how === "DeadlineExceeded" ? { deadline: "50 millis" } : {}
          )
          assert(one !== undefined)
          lost.push(one)
          const ghost = yield* K.executorOf(database, { queue: "lost", recoveryMax: 1 })
          yield* K.claim(ghost, 1)
          if (how === "Cancelled") yield* sql`SELECT tenure.cancel(${one[1]}::uuid)`
          ghosts.push(ghost.id)
        }
        const running = yield* hand(Ends, [
          "completed",
          "declared",
          "died",
          "given up",
          "interrupted itself",
          "cancelled while it runs"
        ])
        const slow = yield* hand(Slow, ["timed out"], () => ({ delay: "2 seconds" }))
        const waiting = yield* hand(
          Ends,
          ["cancelled while it waits", "late while it waits"],
          (one) => ({
            delay: "1 hour",
            ...(one.startsWith("late") ? { deadline: "3 seconds" } : {})
          })
        )
        const late = yield* hand(Ends, ["late while it runs"], () => ({ deadline: "1 second" }))
        const all = [...lost, ...running, ...slow, ...waiting, ...late]

        const awaited = yield* Effect.forEach(all, ([name, id]) =>
          (lost.some(([, other]) => other === id) ? Lost : Ends).await(id).pipe(
            Effect.exit,
            Effect.map((exit) => [name, tagOf(exit)] as const),
            Effect.timeoutOrElse({
              duration: "30 seconds",
              orElse: () => Effect.succeed([name, "nobody told"] as const)
            }),
            Effect.provideContext(waiter),
            Effect.forkChild({ startImmediately: true })
          )
        )
        yield* K.eventually(
          "all are registered, or have ended",
          Effect.map(
            sql`SELECT item_id FROM tenure.waiter
                UNION SELECT id FROM tenure.done WHERE queue_id > 0`,
            (rows) => rows.length === all.length
          )
        )
        yield* Deferred.succeed(gate, undefined)
        for (const id of ghosts) yield* sql`SELECT tenure.mark_revoking(${id}::uuid, true)`
        for (const [name, id] of all) {
          if (!name.startsWith("cancelled")) continue
          yield* Ends.cancel(id).pipe(Effect.provideContext(worker))
        }
        const ended = Object.fromEntries(yield* Effect.forEach(awaited, Fiber.join))
        assert.deepStrictEqual(ended, {
          Quarantined: "Quarantined",
          Cancelled: "Cancelled",
          DeadlineExceeded: "DeadlineExceeded",
          completed: "completed",
          declared: "declared",
          died: "HandlerDied",
          "given up": "HandlerDied",
          "interrupted itself": "HandlerDied",
          "timed out": "HandlerDied",
          "cancelled while it runs": "Cancelled",
          "cancelled while it waits": "Cancelled",
          "late while it runs": "DeadlineExceeded",
          "late while it waits": "DeadlineExceeded"
        })
      }).pipe(Effect.scoped),
    300_000
  )
})
