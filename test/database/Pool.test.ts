/**
 * Goal: what makes a session a worker's cannot be taken away by user code on it.
 * Method: real sessions of a pool, and the resets that poolers and applications issue. Covers P-27
 * and row 34 of the fault matrix.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect } from "effect"
import { abandonAfter } from "../../src/database/Deadline.ts"
import type * as Pool from "../../src/database/Pool.ts"
import { connect, freshDatabase } from "../support/Postgres.ts"

const settings = (sql: Effect.Success<ReturnType<typeof Pool.make>>) =>
  sql<Record<string, string | null>>`
    SELECT current_setting('tenure.executor_id', true) AS executor,
           current_setting('default_transaction_isolation') AS isolation,
           current_setting('statement_timeout') AS statement,
           current_setting('lock_timeout') AS lock,
           current_setting('idle_in_transaction_session_timeout') AS idle,
           current_setting('idle_session_timeout') AS quiet,
           current_setting('client_connection_check_interval') AS probe,
           current_setting('tcp_keepalives_idle') AS silence,
           current_setting('transaction_timeout', true) AS transaction,
           current_setting('application_name') AS name`.pipe(Effect.map((rows) => rows[0]))

describe("Pool", () => {
  it.live("serves a finalizer whose connection was lost, while its scope closes", () =>
    Effect.gen(function* () {
      const database = yield* freshDatabase
      const superuser = yield* connect(database.superuser)
      const answers: Array<unknown> = []
      yield* Effect.scoped(
        Effect.gen(function* () {
          const sql = yield* connect(database.worker, { applicationName: "closing" })
          yield* sql`SELECT 1`
          yield* Effect.addFinalizer(() =>
            Effect.gen(function* () {
              yield* superuser`
                SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'closing'`
              // The first one may still go to the lost connection.
              yield* Effect.ignore(sql`SELECT 1`)
              answers.push(...(yield* sql`SELECT 2 AS two`))
            }).pipe(abandonAfter("20 seconds"), Effect.ignore)
          )
        })
      )
      assert.deepStrictEqual(answers, [{ two: 2 }])
    }).pipe(Effect.scoped)
  )

  it.live("keeps identity and limits through every reset that user code can issue", () =>
    Effect.gen(function* () {
      const database = yield* freshDatabase
      // What the database sets for everybody is not for ours.
      const superuser = yield* connect(database.superuser)
      yield* superuser.unsafe(`ALTER DATABASE ${database.name} SET idle_session_timeout = '20s'`)
      const sql = yield* connect(database.worker, {
        applicationName: "orders",
        executorId: "executor-1",
        connectionsMax: 1,
        statementTimeout: "1500 millis",
        lockTimeout: "700 millis",
        transactionTimeout: "20 seconds",
        keepaliveAfter: "75 seconds"
      })
      const before = yield* settings(sql)
      assert.deepInclude(before, {
        executor: "executor-1",
        isolation: "read committed",
        statement: "1500ms",
        lock: "700ms",
        idle: "15s",
        quiet: "0",
        probe: "1s",
        silence: "75",
        name: "orders"
      })
      const version = yield* sql<{ readonly number: number }>`
        SELECT current_setting('server_version_num')::int AS number`
      const knowsIt = (version[0]?.number ?? 0) >= 170_000
      assert.strictEqual(before?.["transaction"], knowsIt ? "20s" : null)
      for (const reset of ["RESET ALL", "DISCARD ALL"]) {
        yield* sql`SET tenure.executor_id = 'somebody else'`
        yield* sql`SET statement_timeout = 0`
        yield* sql`SET default_transaction_isolation = 'serializable'`
        yield* sql.unsafe(reset).unprepared
        assert.deepStrictEqual(yield* settings(sql), before, reset)
      }
      yield* sql
        .withTransaction(
          Effect.andThen(sql`SET tenure.executor_id = 'somebody else'`, Effect.fail("undo"))
        )
        .pipe(Effect.ignore)
      assert.deepStrictEqual(yield* settings(sql), before, "a rolled back SET")
    })
  )
})
