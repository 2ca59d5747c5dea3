/**
 * Goal: a deadline ends when it says, whatever the database does (P-16, rows 17 and 18).
 * Method: a backend stopped with SIGSTOP for the real thing; virtual time for the rest.
 */
import { assert, describe, it } from "@effect/vitest"
import { Deferred, Duration, Effect, Exit, Fiber } from "effect"
import { TestClock } from "effect/testing"
import { abandonAfter } from "../../src/database/Deadline.ts"
import { connect, freshDatabase } from "../support/Postgres.ts"

describe("abandonAfter", () => {
  it.live("returns on time while the backend is stopped and cannot answer", () =>
    Effect.gen(function* () {
      const database = yield* freshDatabase
      const sql = yield* connect(database.owner, { connectionsMax: 1 })
      const rows = yield* sql<{ readonly pid: number }>`SELECT pg_backend_pid() AS pid`
      const pid = rows[0]?.pid ?? 0
      // Registered after the pool, so that the backend goes on before the pool wants to close it.
      yield* Effect.acquireRelease(
        Effect.sync(() => process.kill(pid, "SIGSTOP")),
        () => Effect.sync(() => process.kill(pid, "SIGCONT"))
      )
      const [took, abandoned] = yield* Effect.timed(
        Effect.flip(abandonAfter(sql`SELECT 1`, "300 millis"))
      )
      assert.strictEqual(abandoned._tag, "Abandoned")
      assert.isBelow(Duration.toMillis(took), 5_000, "sooner than the driver gives up")
    })
  )

  it.effect("gives the result of work that ends in time, success or failure", () =>
    Effect.gen(function* () {
      assert.strictEqual(yield* abandonAfter(Effect.succeed(1), "1 second"), 1)
      assert.strictEqual(yield* Effect.flip(abandonAfter(Effect.fail("no"), "1 second")), "no")
    })
  )

  it.effect("does not wait for a finalizer of the work, which still runs to its end", () =>
    Effect.gen(function* () {
      const cleanedUp = yield* Deferred.make<void>()
      const work = Effect.never.pipe(
        Effect.onInterrupt(() =>
          Effect.andThen(Effect.sleep("1 hour"), Deferred.succeed(cleanedUp, undefined))
        )
      )
      const fiber = yield* Effect.forkChild(Effect.flip(abandonAfter(work, "5 seconds")))
      yield* TestClock.adjust("5 seconds")
      const abandoned = yield* Fiber.join(fiber)
      assert.strictEqual(abandoned.afterMillis, 5_000)
      assert.isFalse(yield* Deferred.isDone(cleanedUp))
      yield* TestClock.adjust("1 hour")
      yield* Deferred.await(cleanedUp)
    })
  )

  it.effect("ends on time where nothing can be interrupted, as in a finalizer", () =>
    Effect.gen(function* () {
      const fiber = yield* Effect.forkChild(
        Effect.uninterruptible(Effect.flip(abandonAfter(Effect.never, "5 seconds")))
      )
      yield* TestClock.adjust("5 seconds")
      assert.strictEqual((yield* Fiber.join(fiber))._tag, "Abandoned")
    })
  )

  it.effect("tells the work to stop when its caller is interrupted, and does not wait either", () =>
    Effect.gen(function* () {
      const told = yield* Deferred.make<void>()
      const work = Effect.never.pipe(
        Effect.onInterrupt(() => Effect.andThen(Deferred.succeed(told, undefined), Effect.never))
      )
      const fiber = yield* Effect.forkChild(abandonAfter(work, "1 day"), { startImmediately: true })
      yield* Fiber.interrupt(fiber)
      assert.isTrue(Exit.isFailure(yield* Fiber.await(fiber)))
      yield* Deferred.await(told)
    })
  )
})
