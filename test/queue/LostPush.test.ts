/**
 * Goal: an outcome that nobody told of is found within the interval, however busy the client is.
 * Method: a watcher without a listener, so that no notification arrives, which is told of another item
 * all the time. This is what an executor leaves that dies between its outcome and the telling.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect, Fiber, Schema } from "effect"
import { SqlClient } from "effect/sql"
import * as Client from "../../src/queue/Client.ts"
import * as WorkQueue from "../../src/queue/WorkQueue.ts"
import { connect, freshDatabase } from "../support/Postgres.ts"

class Numbers extends WorkQueue.make("numbers", { payload: { number: Schema.Int } }) {}

describe("watching", () => {
  it.live("finds an outcome nobody told of, although it is told of others all the time", () =>
    Effect.gen(function* () {
      const sql = yield* connect((yield* freshDatabase).owner)
      const [silent, busy] = yield* Numbers.enqueueAll([{ number: 1 }, { number: 2 }]).pipe(
        Effect.provideService(SqlClient.SqlClient, sql)
      )
      assert(silent !== undefined && busy !== undefined)
      const watching = yield* Client.make({ sql, channel: "nobody_listens", pollMillis: 200 })
      yield* watching.actor.start
      yield* Effect.forkScoped(watching.outcome(busy))
      const awaited = yield* Effect.forkScoped(watching.outcome(silent))
      while ((yield* sql`SELECT FROM tenure.waiter`).length < 2) yield* Effect.yieldNow
      yield* Effect.sync(() => watching.toldUnsafe(busy)).pipe(
        Effect.andThen(Effect.sleep("20 millis")),
        Effect.forever,
        Effect.forkScoped
      )
      yield* Numbers.cancel(silent).pipe(Effect.provideService(SqlClient.SqlClient, sql))
      const row = yield* Effect.timeout(Fiber.join(awaited), "5 seconds")
      assert.strictEqual(row.outcome, "cancelled")
    }).pipe(Effect.scoped)
  )
})
