/**
 * Goal: in a queue whose handlers run in a transaction, what a handler writes and that its item is
 * completed are one commit or none (I4, I5).
 * Method: the whole runtime in this process, with a fenced table of the application.
 */
import { assert, describe, it } from "@effect/vitest"
import { Cause, Effect, Exit, Layer, Option, Schedule, Schema, type Scope } from "effect"
import { SqlClient } from "effect/sql"
import { Step, Tenure, WorkQueue } from "tenure"
import type { Attempt } from "../../src/queue/Step.ts"
import { Database } from "../../src/database/Database.ts"
import * as Pool from "../../src/database/Pool.ts"
import { connect, freshDatabase } from "../support/Postgres.ts"

class Refused extends Schema.TaggedError<Refused>()("Refused", {}) {}

class Book extends WorkQueue.make("book", {
  payload: { amount: Schema.Int },
  success: Schema.Int,
  error: Refused
}) {}

const write = (id: string, amount: number) =>
  Effect.flatMap(
    SqlClient.SqlClient,
    (sql) => sql`INSERT INTO booking (item, amount) VALUES (${id}::uuid, ${amount}::int)`
  )

/** What a handler may ask for here. */
type Needed = SqlClient.SqlClient | Tenure.Executor | Scope.Scope | Attempt

const serving = Effect.fnUntraced(function* (
  handler: (
    payload: { readonly amount: number },
    item: WorkQueue.Item
  ) => Effect.Effect<number, Refused | WorkQueue.AttemptFailure, Needed>,
  retries = 0
) {
  const database = yield* freshDatabase
  const owner = yield* connect(database.owner)
  yield* owner`CREATE TABLE booking (item uuid NOT NULL, amount int NOT NULL)`
  yield* owner`SELECT tenure.fence_table('booking')`
  yield* owner`GRANT SELECT, INSERT ON booking TO tenure_worker`
  const context = yield* Layer.build(
    Book.toLayer(handler, {
      transaction: true,
      retry: { times: retries, schedule: Schedule.spaced("10 millis") }
    }).pipe(
      Layer.provideMerge(
        Tenure.layer({ application: "app", version: "v1", settings: { drain: 100 } })
      ),
      Layer.provide(Layer.succeed(Database, database.worker))
    )
  )
  return { database, owner, context }
})

describe("a handler in a transaction", () => {
  it.live("is committed with its outcome, each item by itself", () =>
    Effect.gen(function* () {
      const { context, owner } = yield* serving(({ amount }, item) =>
        Effect.as(write(item.id, amount), amount * 2)
      )
      yield* Effect.gen(function* () {
        const ids = yield* Book.enqueueAll([1, 2, 3].map((amount) => ({ amount })))
        const results = yield* Effect.forEach(ids, Book.await)
        assert.deepStrictEqual(results, [2, 4, 6])
      }).pipe(Effect.provideContext(context))
      assert.deepStrictEqual(
        yield* owner`
          SELECT count(*)::int AS items, count(DISTINCT b.xmin::text)::int AS commits
            FROM booking b JOIN tenure.done d ON d.id = b.item AND d.xmin::text = b.xmin::text`,
        [{ items: 3, commits: 3 }]
      )
    }).pipe(Effect.scoped)
  )

  it.live("that fails leaves nothing of what it wrote, and its next attempt begins anew", () =>
    Effect.gen(function* () {
      const { context, owner } = yield* serving(
        ({ amount }, item) =>
          Effect.andThen(
            write(item.id, amount),
            item.attempt < 3 ? Effect.fail(new Refused()) : Effect.succeed(item.attempt)
          ),
        2
      )
      yield* Effect.gen(function* () {
        assert.strictEqual(yield* Book.await(yield* Book.enqueue({ amount: 5 })), 3)
      }).pipe(Effect.provideContext(context))
      assert.deepStrictEqual(yield* owner`SELECT amount FROM booking`, [{ amount: 5 }])
    }).pipe(Effect.scoped)
  )

  it.live("whose attempt is over by then leaves nothing either", () =>
    Effect.gen(function* () {
      const { context, owner } = yield* serving(({ amount }, item) =>
        Effect.gen(function* () {
          yield* write(item.id, amount)
          if (item.attempt > 1) return item.attempt
          // Given back behind its back, by another session of the same executor.
          const executor = yield* Tenure.Executor
          const other = yield* Pool.make({
            database: executor.database,
            executorId: executor.id,
            applicationName: "tenure test",
            connectionsMax: 1,
            statementTimeout: "10 seconds",
            lockTimeout: "10 seconds",
            idleInTransactionTimeout: "10 seconds"
          })
          yield* other`
            SELECT id FROM tenure.settle(ARRAY[${item.id}::uuid], ARRAY[1], ARRAY['hand-back'], NULL, NULL,
                                         ARRAY[(SELECT c.lane_id FROM tenure.claimed c WHERE c.id = ${item.id}::uuid)],
                                         NULL)`
          return item.attempt
        })
      )
      yield* Effect.gen(function* () {
        assert.strictEqual(yield* Book.await(yield* Book.enqueue({ amount: 5 })), 2)
      }).pipe(Effect.provideContext(context))
      assert.deepStrictEqual(yield* owner`SELECT amount FROM booking`, [{ amount: 5 }])
    }).pipe(Effect.scoped)
  )

  it.live("runs no durable steps: their results would outlive a rollback", () =>
    Effect.gen(function* () {
      const { context, owner } = yield* serving(({ amount }, item) =>
        Effect.as(Step.run("write", Effect.asVoid(write(item.id, amount))), 0)
      )
      const exit = yield* Effect.gen(function* () {
        return yield* Effect.exit(Book.await(yield* Book.enqueue({ amount: 5 })))
      }).pipe(Effect.provideContext(context))
      const failure = Exit.isFailure(exit) ? Cause.findErrorOption(exit.cause) : Option.none()
      assert.include(String(Option.getOrUndefined(failure)), "in a transaction")
      assert.deepStrictEqual(yield* owner`SELECT amount FROM booking`, [])
    }).pipe(Effect.scoped)
  )
})
