/**
 * Goal: every error lands in the class whose answer is right for it (P-36).
 * Method: a table of states with a property over each class, and errors that a real server raises,
 * because the driver decides what reaches us of them.
 */
import { PgClient } from "@effect/sql-pg"
import { assert, describe, it } from "@effect/vitest"
import { Effect, Fiber, Redacted, Schema } from "effect"
import * as Reactivity from "effect/reactivity/Reactivity"
import type { SqlError } from "effect/sql/SqlError"
import { createServer } from "node:net"
import { classify, classifyState, sqlState } from "../../src/database/SqlState.ts"
import { connect, freshDatabase } from "../support/Postgres.ts"

const table = {
  retryTransaction: ["40001", "40P01", "55P03", "55006"],
  reconnect: [
    "57P01",
    "57P02",
    "57P03",
    "57P05",
    "25006",
    "55000",
    "08000",
    "08006",
    "53300",
    "53400",
    "58030"
  ],
  timeout: ["57014", "25P03", "25P04"],
  fenced: ["TN001", "TN002", "TN099"],
  conflict: ["23505", "23503", "23514", "23P01"],
  refused: ["28000", "28P01", "42501", "3D000", "08P01", "0P000", "57P04"],
  defect: ["42601", "42P01", "22P02", "P0001", "XX000", "00000", "25P02", "TM001"]
} as const

describe("classify", () => {
  it.each(Object.entries(table))("puts the states it knows into %s", (expected, states) => {
    for (const state of states) assert.strictEqual(classifyState(state), expected, state)
  })

  it.prop(
    "decides whole classes by their first two characters",
    { suffix: Schema.String.check(Schema.isPattern(/^[0-46-9A-OQ-Z]{3}$/)) },
    ({ suffix }) => {
      assert.strictEqual(classifyState(`08${suffix}`), "reconnect")
      assert.strictEqual(classifyState(`53${suffix}`), "reconnect")
      assert.strictEqual(classifyState(`23${suffix}`), "conflict")
      assert.strictEqual(classifyState(`28${suffix}`), "refused")
      assert.strictEqual(classifyState(`TN${suffix}`), "fenced")
      assert.strictEqual(classifyState(`42${suffix}`), "defect")
    }
  )

  it.live("reads the state of every kind of error that a server raises", () =>
    Effect.gen(function* () {
      const database = yield* freshDatabase
      const sql = yield* connect(database.owner)
      yield* sql`CREATE TABLE item (id int PRIMARY KEY, amount int CHECK (amount > 0))`
      yield* sql`INSERT INTO item VALUES (1, 1)`
      const raised = (text: string) =>
        sql.unsafe(text).pipe(
          Effect.flip,
          Effect.map((error) => [sqlState(error), classify(error)])
        )
      const raise = (state: string) =>
        raised(`DO $$ BEGIN RAISE 'no' USING ERRCODE = '${state}'; END $$`)
      assert.deepStrictEqual(yield* raised("INSERT INTO item VALUES (1, 1)"), ["23505", "conflict"])
      assert.deepStrictEqual(yield* raised("INSERT INTO item VALUES (2, 0)"), ["23514", "conflict"])
      assert.deepStrictEqual(yield* raised("SELEC 1"), ["42601", "defect"])
      assert.deepStrictEqual(yield* raised("SELECT pg_read_file('PG_VERSION')"), [
        "42501",
        "refused"
      ])
      for (const [expected, states] of Object.entries(table)) {
        for (const state of states) {
          if (state === "00000") continue
          assert.deepStrictEqual(yield* raise(state), [state, expected])
        }
      }
    })
  )

  it.live("tells limits, lost sessions and deadlocks of a real server apart", () =>
    Effect.gen(function* () {
      const database = yield* freshDatabase
      const sql = yield* connect(database.owner, {
        statementTimeout: "100 millis",
        lockTimeout: "50 millis"
      })
      yield* sql`CREATE TABLE item (id int PRIMARY KEY)`
      const kind = (effect: Effect.Effect<unknown, SqlError>) =>
        Effect.map(Effect.flip(effect), classify)
      assert.strictEqual(yield* kind(sql`SELECT pg_sleep(5)`), "timeout")
      const blocked = sql.withTransaction(
        Effect.andThen(
          sql`LOCK TABLE item`,
          kind(
            Effect.scoped(
              Effect.flatMap(sql.reserve, (other) =>
                other.execute("SELECT id FROM item", [], undefined)
              )
            )
          )
        )
      )
      assert.strictEqual(yield* blocked, "retryTransaction")
      const killed = yield* Effect.forkChild(
        kind(sql`SELECT pg_terminate_backend(pg_backend_pid())`)
      )
      assert.strictEqual(yield* Fiber.join(killed), "reconnect")
    })
  )

  it.live(
    "asks for a reconnect when nobody listens, and refuses a wrong password and database",
    () =>
      Effect.gen(function* () {
        const database = yield* freshDatabase
        const connecting = (config: PgClient.PgClientConfig) =>
          PgClient.makeClient({ ...database.owner.config, ...config }).pipe(
            Effect.provideServiceEffect(Reactivity.Reactivity, Reactivity.make),
            Effect.scoped,
            Effect.flip,
            Effect.map((error) => [sqlState(error), classify(error)])
          )
        const port = yield* unusedPort
        assert.deepStrictEqual(yield* connecting({ port }), [undefined, "reconnect"])
        assert.deepStrictEqual(yield* connecting({ password: Redacted.make("wrong") }), [
          "28P01",
          "refused"
        ])
        assert.deepStrictEqual(yield* connecting({ database: "nowhere" }), ["3D000", "refused"])
      })
  )
})

const unusedPort = Effect.callback<number>((resume) => {
  const server = createServer()
  server.listen(0, "127.0.0.1", () => {
    const address = server.address()
    const port = typeof address === "object" && address !== null ? address.port : 0
    server.close(() => resume(Effect.succeed(port)))
  })
})
