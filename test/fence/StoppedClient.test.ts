/**
 * Goal: an executor whose process has stopped in the middle of a fenced transaction holds up its
 * revocation for a bounded time only, and nothing of it is committed (I2; rows 12, 13 and 15).
 * Method: a real client process under SIGSTOP; real limits of the server, because they are the
 * subject; and a server of its own where transactions may be left prepared.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect, Fiber } from "effect"
import { type ChildProcess, spawn } from "node:child_process"
import { randomUUID } from "node:crypto"
import { mkdtempSync, rmSync } from "node:fs"
import { tmpdir } from "node:os"
import { join } from "node:path"
import { fileURLToPath } from "node:url"
import { Database } from "../../src/database/Database.ts"
import { endpoint, start } from "../../src/database/EmbeddedPostgres.ts"
import * as Migrations from "../../src/database/Migrations.ts"
import { sqlState } from "../../src/database/SqlState.ts"
import { pace } from "../support/pace.ts"
import * as Fixture from "../isolation/Fixture.ts"
import type * as Isolation from "../isolation/Isolation.ts"

const { claim, mark, places, revoke } = Fixture.statements

const client = Effect.fnUntraced(function* (
  fixture: Fixture.Fixture,
  executor: string,
  startup: Readonly<Record<string, string>>,
  ways: ReadonlyArray<string>
) {
  const file = fileURLToPath(new URL("stubbornClient.ts", import.meta.url))
  const child = yield* Effect.acquireRelease(
    Effect.sync(() =>
      spawn(
        process.execPath,
        [file, fixture.database.urlOf("worker"), executor, JSON.stringify(startup), ...ways],
        { stdio: ["ignore", "pipe", "inherit"] }
      )
    ),
    (spawned) => Effect.sync(() => spawned.kill("SIGKILL"))
  )
  yield* isOpen(child)
  return child
})

const isOpen = (child: ChildProcess) =>
  Effect.callback<void>((resume) => {
    child.stdout?.once("data", () => resume(Effect.void))
    child.once("exit", (code) => resume(Effect.die(new Error(`the client ended with ${code}`))))
  })

/** How many backends of the executor satisfy a condition. */
const backends = (fixture: Fixture.Fixture, executor: string, condition = "true") =>
  Effect.map(
    fixture.observer.unsafe<{ readonly count: number }>(`
      SELECT count(*)::int AS count FROM pg_stat_activity
       WHERE application_name = 'tenure test ${executor}' AND ${condition}`),
    (rows) => rows[0]?.count ?? 0
  )

const awaitBackends = (
  fixture: Fixture.Fixture,
  executor: string,
  condition: string,
  wanted: number
) => Effect.repeat(backends(fixture, executor, condition), { until: (count) => count === wanted })

/** Who keeps a session waiting, as soon as somebody does. */
const seenWaiting = (fixture: Fixture.Fixture, session: Isolation.Session) =>
  Effect.repeat(
    Effect.map(
      fixture.observer<{ readonly blockers: ReadonlyArray<number> }>`
        SELECT pg_blocking_pids(${session.pid}) AS blockers`,
      (rows) => rows[0]?.blockers ?? []
    ),
    { until: (blockers) => blockers.length > 0 }
  )

const version = (fixture: Fixture.Fixture) =>
  Effect.map(fixture.value("SHOW server_version_num"), Number)

const scene = Effect.gen(function* () {
  const fixture = yield* Fixture.make
  const executor = yield* fixture.executor
  yield* fixture.enqueue(2)
  const claimed = Effect.flatMap(fixture.session({ executor }), ({ sql }) => sql.unsafe(claim(2)))
  yield* Effect.scoped(claimed)
  const peer = yield* fixture.executor
  const revoker = yield* fixture.session({ executor: peer, startup: { lock_timeout: "2s" } })
  const helper = yield* fixture.session({ executor: peer })
  yield* awaitBackends(fixture, executor, "true", 0)
  return { fixture, executor, revoker, helper }
})

describe("a client that is stopped inside a fenced transaction", () => {
  it.live("between two statements is ended by the idle timeout, and the revocation follows", () =>
    Effect.gen(function* () {
      const { executor, fixture, revoker } = yield* scene
      const limits = { idle_in_transaction_session_timeout: "700ms" }
      const child = yield* client(fixture, executor, limits, ["idle"])
      child.kill("SIGSTOP")
      yield* revoker.sql.unsafe(mark(executor))
      const revocation = yield* Effect.forkChild(revoker.sql.unsafe(revoke(executor)))
      assert.lengthOf(yield* seenWaiting(fixture, revoker), 1)
      assert.deepStrictEqual(yield* Fiber.join(revocation), [{ state: "revoked", requeued: 2 }])
      assert.strictEqual(yield* fixture.value("SELECT count(*) FROM app.note"), "0")
    })
  )

  it.live("inside a large result or a COPY is bounded by no timeout, and freed in one round", () =>
    Effect.gen(function* () {
      const { executor, fixture, helper, revoker } = yield* scene
      // All twelve have to begin within it.
      const limitMillis = 1500 * pace
      const ways = Array.from({ length: 12 }, (_, index) => (index % 2 === 0 ? "result" : "copy"))
      const child = yield* client(
        fixture,
        executor,
        {
          statement_timeout: `${limitMillis}ms`,
          idle_in_transaction_session_timeout: `${limitMillis}ms`,
          ...((yield* version(fixture)) >= 170_000
            ? { transaction_timeout: `${limitMillis}ms` }
            : {})
        },
        ways
      )
      yield* awaitBackends(fixture, executor, "state = 'active'", 12)
      child.kill("SIGSTOP")
      yield* awaitBackends(fixture, executor, "wait_event = 'ClientWrite'", 6)

      yield* revoker.sql.unsafe(mark(executor))
      const first = yield* Effect.forkChild(Effect.flip(revoker.sql.unsafe(revoke(executor))))
      const blockers = yield* seenWaiting(fixture, revoker)
      assert.lengthOf(blockers, 1, "the server names one of the twelve at a time")
      assert.strictEqual(sqlState(yield* Fiber.join(first)), "55P03", "its own lock_timeout")
      const since = `clock_timestamp() - interval '${limitMillis + 500} ms'`
      yield* awaitBackends(fixture, executor, `query_start < ${since}`, 12)
      assert.strictEqual(yield* backends(fixture, executor), 12, "all outlive their limits")

      const second = yield* Effect.forkChild(revoker.sql.unsafe(revoke(executor)))
      yield* seenWaiting(fixture, revoker)
      const ended = yield* helper.sql`SELECT tenure.terminate_sessions(${executor}) AS count`
      assert.deepStrictEqual(ended, [{ count: 12 }])
      assert.deepStrictEqual(yield* Fiber.join(second), [{ state: "revoked", requeued: 2 }])
      assert.strictEqual(yield* fixture.value("SELECT count(*) FROM app.note"), "0")
      assert.strictEqual(yield* fixture.value(places), "ready ready")
    })
  )

  it.live("under another name is still ended, as the one that blocks", () =>
    Effect.gen(function* () {
      const { executor, fixture, helper, revoker } = yield* scene
      const hidden = yield* fixture.session({ executor })
      yield* hidden.sql.unsafe("SET application_name = 'mine'")
      yield* hidden.sql.unsafe("BEGIN")
      yield* hidden.sql.unsafe(Fixture.statements.write)
      yield* revoker.sql.unsafe(mark(executor))
      const revocation = yield* Effect.forkChild(revoker.sql.unsafe(revoke(executor)))
      assert.deepStrictEqual(yield* seenWaiting(fixture, revoker), [hidden.pid])
      const ended = yield* helper.sql`
        SELECT tenure.terminate_sessions(${executor}) AS named,
               tenure.terminate_sessions(${executor}, ${revoker.pid}) AS blocking`
      assert.deepStrictEqual(ended, [{ named: 0, blocking: 1 }])
      assert.deepStrictEqual(yield* Fiber.join(revocation), [{ state: "revoked", requeued: 2 }])
    })
  )
})

describe("a transaction that was left prepared", () => {
  // Prepared transactions need a setting that the server takes only when it starts.
  const server = Effect.gen(function* () {
    const directory = yield* Effect.acquireRelease(
      Effect.sync(() => mkdtempSync(join(tmpdir(), "tenure-prepared-"))),
      (path) => Effect.sync(() => rmSync(path, { recursive: true, force: true }))
    )
    const begin = Effect.map(start({ directory, durable: false }), (running) =>
      endpoint(running, "postgres", "postgres")
    )
    const configure = Effect.gen(function* () {
      const sql = yield* Fixture.connect(yield* begin, {})
      yield* sql.unsafe("ALTER SYSTEM SET max_prepared_transactions = 2")
    })
    yield* Effect.scoped(configure)
    const database = yield* begin
    yield* Effect.provideService(Migrations.run(), Database, database)
    return database
  })

  it.live("holds up the revocation, is freed by no termination, and can be named", () =>
    Effect.gen(function* () {
      const database = yield* server
      const sql = yield* Fixture.connect(database, { lock_timeout: "300ms" })
      const executor = randomUUID()
      yield* sql`SELECT tenure.register_executor(${executor}, 'app', 'v1', '30 s', 'host', 1)`
      const leave = Effect.gen(function* () {
        const left = yield* Fixture.connect(database, { "tenure.executor_id": executor })
        yield* left.unsafe("BEGIN")
        yield* left.unsafe("DELETE FROM tenure.waiter WHERE false")
        yield* left.unsafe("PREPARE TRANSACTION 'left behind'")
      })
      yield* Effect.scoped(leave)

      yield* sql.unsafe(mark(executor))
      const failed = yield* Effect.flip(sql.unsafe(revoke(executor)))
      assert.strictEqual(sqlState(failed), "55P03")
      assert.deepStrictEqual(
        yield* sql`
          SELECT tenure.terminate_sessions(${executor}) AS ended, tenure.lease_state(${executor}) AS state,
                 (SELECT string_agg(p.gid, '; ') FROM pg_prepared_xacts p) AS prepared`,
        [{ ended: 0, state: "revoking", prepared: "left behind" }]
      )
      yield* sql.unsafe("ROLLBACK PREPARED 'left behind'")
      assert.deepStrictEqual(yield* sql.unsafe(revoke(executor)), [
        { state: "revoked", requeued: 0 }
      ])
    })
  )
})
