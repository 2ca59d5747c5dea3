/**
 * Goal: what is certain to have had no effect is tried again, and nothing else; what waiting cannot
 * mend ends a start-up with its reason (P-36, P-37).
 * Method: a real deadlock; errors made by hand under virtual time.
 */
import { assert, describe, it } from "@effect/vitest"
import { Deferred, Effect, Fiber, Logger, Ref, Schema } from "effect"
import * as Arbitrary from "effect/Arbitrary"
import { ConnectionError, SqlError, UnknownError } from "effect/sql/SqlError"
import { TestClock } from "effect/testing"
import { inTransaction, whileUnreachable } from "../../src/database/Retry.ts"
import { refusalOf, waitOrRefuse } from "../../src/database/Startup.ts"
import { connect, freshDatabase } from "../support/Postgres.ts"

const unreachable = new SqlError({ reason: new ConnectionError({ cause: new Error("refused") }) })
const raised = (code: string) =>
  new SqlError({
    reason: new UnknownError({ cause: Object.assign(new Error("the server says no"), { code }) })
  })

const quiet = Effect.provide(Logger.layer([]))

describe("inTransaction", () => {
  it.live("runs the whole transaction of a deadlock's victim again", () =>
    Effect.gen(function* () {
      const database = yield* freshDatabase
      const sql = yield* connect(database.owner)
      yield* sql`CREATE TABLE pair (id int PRIMARY KEY, value int NOT NULL)`
      yield* sql`INSERT INTO pair VALUES (1, 0), (2, 0)`
      const tries = yield* Ref.make(0)
      const locked = [yield* Deferred.make<void>(), yield* Deferred.make<void>()] as const
      const bump = (id: number) => sql`UPDATE pair SET value = value + 1 WHERE id = ${id}::int`
      // Each takes its own row, waits for the other to have taken its own, and then wants that one.
      const crossing = (own: 1 | 2, other: 1 | 2) =>
        inTransaction(
          sql,
          Effect.gen(function* () {
            yield* Ref.update(tries, (count) => count + 1)
            yield* bump(own)
            yield* Deferred.succeed(locked[own - 1 === 0 ? 0 : 1], undefined)
            yield* Deferred.await(locked[other - 1 === 0 ? 0 : 1])
            yield* bump(other)
          })
        )
      yield* Effect.all([crossing(1, 2), crossing(2, 1)], { concurrency: 2 })
      assert.strictEqual(yield* Ref.get(tries), 3)
      assert.deepStrictEqual(yield* sql`SELECT value FROM pair`, [{ value: 2 }, { value: 2 }])
    })
  )

  it.live("does not repeat inside an open transaction, whose locks would still be held", () =>
    Effect.gen(function* () {
      const database = yield* freshDatabase
      const sql = yield* connect(database.owner)
      const inner = yield* Ref.make(0)
      const outer = yield* Ref.make(0)
      const failing = Effect.andThen(
        Ref.update(inner, (count) => count + 1),
        Effect.flatMap(Ref.get(outer), (count) =>
          count < 3 ? Effect.fail(raised("40001")) : Effect.void
        )
      )
      yield* inTransaction(
        sql,
        Effect.andThen(
          Ref.update(outer, (count) => count + 1),
          inTransaction(sql, failing)
        )
      )
      assert.strictEqual(yield* Ref.get(outer), 3)
      assert.strictEqual(yield* Ref.get(inner), 3)
    })
  )

  it.live("does not repeat a transaction whose connection was lost", () =>
    Effect.gen(function* () {
      const database = yield* freshDatabase
      const sql = yield* connect(database.owner)
      const tries = yield* Ref.make(0)
      const lost = Effect.andThen(
        Ref.update(tries, (count) => count + 1),
        Effect.fail(unreachable)
      )
      yield* Effect.flip(inTransaction(sql, lost))
      assert.strictEqual(yield* Ref.get(tries), 1)
    })
  )
})

describe("whileUnreachable", () => {
  it.effect("waits for a server that comes back after an hour", () =>
    Effect.gen(function* () {
      const isUp = yield* Ref.make(false)
      const asking = Effect.flatMap(Ref.get(isUp), (up) =>
        up ? Effect.succeed("here") : Effect.fail(unreachable)
      )
      const fiber = yield* Effect.forkChild(whileUnreachable(asking, "test"))
      yield* TestClock.adjust("1 hour")
      assert.isUndefined(fiber.pollUnsafe())
      yield* Ref.set(isUp, true)
      yield* TestClock.adjust("5 seconds")
      assert.strictEqual(yield* Fiber.join(fiber), "here")
    }).pipe(quiet)
  )
})

describe("waitOrRefuse", () => {
  it.effect.prop(
    "refuses at once what waiting cannot mend",
    {
      state: Arbitrary.schema(
        Schema.Literals(["28P01", "28000", "42501", "3D000", "08P01", "25006", "57P04"])
      )
    },
    ({ state }) =>
      Effect.gen(function* () {
        const refused = yield* Effect.flip(waitOrRefuse(Effect.fail(raised(state)), "test"))
        assert(refused.reason._tag === "DatabaseRejected")
        assert.include(refused.message, "the server says no")
        assert.include(refused.message, state)
      })
  )

  it("finds no refusal in a deadlock, a broken constraint and a lost connection", () => {
    for (const error of [raised("40P01"), raised("23505"), unreachable]) {
      assert.isUndefined(refusalOf(error))
    }
  })
})
