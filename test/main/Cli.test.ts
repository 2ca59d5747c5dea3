/**
 * Goal: the commands tell an operator the truth, and what to do about it.
 * Method: the command itself as a process, against real databases; one of them on a server where no
 * role can be made.
 * Covers K-118, K-119, K-215, K-216, the single-role case of the migrations, and fault points by name.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect, type Scope } from "effect"
import { fileURLToPath } from "node:url"
import { endpoint, start as startServer } from "../../src/database/EmbeddedPostgres.ts"
import { names } from "../../src/testing/FaultPoint.ts"
import * as K from "../kernel/kernel.ts"
import { present } from "../support/present.ts"
import { connect, emptyDatabase, freshDatabase } from "../support/Postgres.ts"
import { bin, start, worker } from "./Child.ts"

const tenure = (
  args: ReadonlyArray<string>,
  env: Readonly<Record<string, string>> = {}
): Effect.Effect<{ code: number | null; stdout: string; stderr: string }, never, Scope.Scope> =>
  Effect.gen(function* () {
    const child = yield* start([bin, ...args], { env })
    const { code } = yield* child.end
    return { code, stdout: child.stdout(), stderr: child.stderr() }
  })

const module = fileURLToPath(new URL("workerModule.ts", import.meta.url))

/** But the one that the servers of tests have on purpose. */
const problems = (stdout: string): ReadonlyArray<string> =>
  stdout.split("\n").filter((line) => line.startsWith("problem") && !line.includes("fsync is off"))

const past = (minutes: number) => `clock_timestamp() - interval '${minutes} minutes'`

describe("tenure migrate", () => {
  it.live("applies what is pending, once, to the database of DATABASE_URL", () =>
    Effect.gen(function* () {
      const database = yield* emptyDatabase
      const env = { DATABASE_URL: database.url }
      const first = yield* tenure(["migrate"], env)
      assert.strictEqual(first.code, 0, first.stderr)
      assert.include(first.stdout, "applied  0001_foundation.sql")
      assert.include(first.stderr, `using database ${database.name}`)
      assert.notInclude(first.stderr + first.stdout, new URL(database.url).password)
      const second = yield* tenure(["migrate", "--json"], env)
      const report = JSON.parse(second.stdout) as { applied: unknown; missingRoles: unknown }
      assert.deepStrictEqual([report.applied, report.missingRoles], [[], []])
    })
  )

  it.live(
    "says what is left unprotected when no role can be made, and everything else works",
    () =>
      Effect.gen(function* () {
        const server = yield* Effect.orDie(startServer({ durable: false }))
        const admin = yield* connect(endpoint(server, "postgres", "postgres"))
        for (const role of ["tenure_worker", "tenure_api"]) yield* admin.unsafe(`DROP ROLE ${role}`)
        const url = `postgresql://tenure:${server.password}@127.0.0.1:${server.port}/tenure`
        const { code, stdout, stderr } = yield* tenure(["migrate", "--url", url])
        assert.strictEqual(code, 0, stderr)
        assert.match(stdout, /Role tenure_worker is missing: .* dropping the fence/)
        assert.match(stdout, /Role tenure_api is missing: .* CREATE ROLE tenure_api NOLOGIN/)
        const examined = yield* tenure(["doctor", "--url", url])
        assert.deepStrictEqual(problems(examined.stdout), [])
        assert.include(examined.stdout, "warning  role tenure_worker is missing")

        const sql = yield* connect(endpoint(server, "tenure", "tenure"))
        const child = yield* worker({ url })
        yield* child.line("> executor")
        yield* sql`SELECT tenure.enqueue('letters', '{"text":"hello"}')`
        yield* child.line("> ended")
        yield* child.kill("SIGTERM")
        assert.strictEqual((yield* child.end).code, 0, child.stdout())
        assert.deepStrictEqual(yield* sql`SELECT outcome FROM tenure.done WHERE queue_id > 0`, [
          { outcome: "completed" }
        ])
      }),
    300_000
  )
})

describe("tenure executors", () => {
  it.live("lists leases by newest heartbeat, and compares stuck work with the registry", () =>
    Effect.gen(function* () {
      const database = yield* freshDatabase
      const sql = yield* connect(database.superuser)
      const rows: ReadonlyArray<
        readonly [id: string, state: string, heartbeat: string, expires: string]
      > = [
        ["00000000-0000-0000-0000-00000000000a", "active", past(3), past(2)],
        ["00000000-0000-0000-0000-00000000000b", "active", past(0), past(-2)],
        ["00000000-0000-0000-0000-00000000000c", "released", past(9), past(8)]
      ]
      for (const [id, state, heartbeat, expires] of rows) {
        yield* sql.unsafe(
          `INSERT INTO tenure.executor (id, application_name, application_version, state,
                                        registered_at, heartbeat_at, expires_at, host, pid)
           VALUES ('${id}', 'shop', 'shop-v1', '${state}', ${past(10)}, ${heartbeat}, ${expires}, 'h', 7)`
        )
      }
      const { code, stderr, stdout } = yield* tenure(["executors", "--url", database.urlOf("api")])
      assert.strictEqual(code, 0, stderr)
      const lines = stdout.split("\n")
      for (const column of [
        "application_name",
        "application_version",
        "executor_id",
        "state",
        "heartbeat_at",
        "expires_at",
        "revoked_at",
        "claimed"
      ]) {
        assert.include(lines[0] ?? "", column)
      }
      assert.match(lines[1] ?? "", /0b .*active/)
      assert.match(lines[2] ?? "", /0a .*expired/)
      assert.match(lines[3] ?? "", /0c .*released/)
      assert.include(stdout, "No claimed work without a live lease.")
    })
  )

  it.live("shows work whose executor is expired or unknown, as JSON too", () =>
    Effect.gen(function* () {
      const database = yield* freshDatabase
      const sql = yield* connect(database.superuser)
      // A worker that is killed while it works leaves just that.
      const child = yield* worker({ url: database.urlOf("worker"), handler: "endless" })
      const id = yield* child.line("> executor")
      yield* sql`SELECT tenure.enqueue('letters', '{"text":"hello"}')`
      yield* child.line("> started")
      yield* child.kill("SIGKILL")
      yield* child.end
      yield* sql.unsafe(`UPDATE tenure.executor SET expires_at = ${past(1)} WHERE id = '${id}'`)
      const json = yield* tenure(["executors", "--json", "--url", database.url])
      const listed = JSON.parse(json.stdout) as {
        readonly executors: ReadonlyArray<{ executor_id: string; claimed: number; state: string }>
        readonly stuck: ReadonlyArray<Record<string, unknown>>
      }
      assert.deepInclude(listed.executors[0], { executor_id: id, claimed: 1, state: "expired" })
      assert.deepInclude(listed.stuck[0], {
        queue: "letters",
        items: 1,
        executor_id: id,
        state: "expired",
        application_name: "letters",
        application_version: "letters-v1"
      })
      assert.notInclude(json.stdout, "hello")
      yield* sql`DELETE FROM tenure.executor`
      const text = yield* tenure(["executors", "--url", database.url])
      assert.match(text.stdout, /letters +1 .*unknown/)
    })
  )

  it.live("says of each queue what waits for longest, and why", () =>
    Effect.gen(function* () {
      const database = yield* freshDatabase
      const sql = yield* connect(database.superuser)
      yield* sql`SELECT tenure.enqueue('letters', '{"text":"hello"}'), tenure.enqueue('letters', '{"text":"hello"}')`
      const seen = yield* tenure(["executors", "--url", database.urlOf("api")])
      assert.strictEqual(seen.code, 0, seen.stderr)
      assert.match(seen.stdout, /letters .*no executor has ever run this queue/)
      const [first] = yield* sql<{
        id: string
      }>`SELECT id::text AS id FROM tenure.item ORDER BY seq`
      const json = yield* tenure(["executors", "--json", "--url", database.urlOf("worker")])
      const { queues } = JSON.parse(json.stdout) as {
        readonly queues: ReadonlyArray<Record<string, unknown>>
      }
      assert.deepInclude(queues[0], {
        queue: "letters",
        waiting_id: first?.id,
        why: "no executor has ever run this queue"
      })
      assert.notInclude(json.stdout + seen.stdout, "hello")
    })
  )

  it.live("refuses a database without the schema, and says what to run", () =>
    Effect.gen(function* () {
      const database = yield* emptyDatabase
      const { code, stderr, stdout } = yield* tenure(["executors", "--url", database.url])
      assert.strictEqual(code, 78)
      assert.strictEqual(stdout, "")
      assert.include(stderr, "run `tenure migrate`")
    })
  )
})

describe("tenure quarantine", () => {
  /** Two items that their executor was lost with, and one that waits. */
  const scene = Effect.gen(function* () {
    const database = yield* freshDatabase
    const sql = yield* K.sessionOf(database, "owner")
    const runner = yield* K.executorOf(database, { queue: "orders", recoveryMax: 1 })
    const failed = yield* K.enqueueOne(sql, "orders", `"a-secret"`)
    yield* K.claim(runner, 1)
    yield* K.settle(runner, [{ id: failed, attempt: 1, outcome: "failed" }])
    const enqueued = yield* K.enqueueAll(sql, "orders", [`"a-secret"`, `"a-secret"`])
    yield* K.claim(runner, 2)
    const waiting = yield* K.enqueueOne(sql, "orders", `"a-secret"`)
    yield* K.loseExecutor(sql, runner.id)
    const [first, second] = enqueued.ids ?? []
    return { database, sql, failed, waiting, first: present(first), second: present(second) }
  })

  it.live("lists what is in it, without payloads, and says what a person can do", () =>
    Effect.gen(function* () {
      const { database, first, second, sql, waiting } = yield* scene
      yield* sql`SELECT tenure.close_quarantine(${first}::uuid)`
      const url = database.urlOf("api")
      const { code, stderr, stdout } = yield* tenure(["quarantine", "list", "--url", url])
      assert.strictEqual(code, 0, stderr)
      const lines = stdout.split("\n")
      assert.match(lines[1] ?? "", new RegExp(`${second} +orders +open .*MAX_RECOVERY_ATTEMPTS`))
      assert.match(lines[2] ?? "", new RegExp(`${first} +orders +settled .*tenure_test_owner`))
      assert.notInclude(stdout, waiting)
      assert.include(stdout, "fix that first")
      const json = yield* tenure(["quarantine", "list", "--json", "--url", url])
      const listed = JSON.parse(json.stdout) as ReadonlyArray<{ item_id: string; state: string }>
      assert.deepStrictEqual(
        listed.map((one) => [one.item_id, one.state]),
        [
          [second, "open"],
          [first, "settled"]
        ]
      )
      assert.notInclude(stdout + json.stdout, "a-secret")
    })
  )

  it.live("retries what is in it, and says that this resets the protection; refuses the rest", () =>
    Effect.gen(function* () {
      const { database, failed, first, second, sql } = yield* scene
      const url = database.urlOf("api")
      const { code, stderr, stdout } = yield* tenure(["quarantine", "retry", first, "--url", url])
      assert.strictEqual(code, 0, stderr)
      assert.include(stdout, `Item ${first} is available again, with fresh counters`)
      assert.include(stdout, "If the cause is not fixed")
      assert.strictEqual(yield* K.placeOf(sql, first), "ready")
      const stranger = "00000000-0000-0000-0000-000000000000"
      for (const [item, reason] of [
        [failed, "is failed and not in quarantine"],
        [stranger, "there is no item"],
        ["x", "x is not an item id"]
      ] as const) {
        const refused = yield* tenure(["quarantine", "retry", item, "--url", url])
        assert.strictEqual(refused.code, 1)
        assert.include(refused.stderr, `nothing was changed: `)
        assert.include(refused.stderr, reason)
      }
      // Workers have no business here: their login is for sessions with an executor.
      const asWorker = yield* tenure([
        "quarantine",
        "retry",
        second,
        "--url",
        database.urlOf("worker")
      ])
      assert.strictEqual(asWorker.code, 1)
      assert.include(asWorker.stderr, "a login with tenure_api")
      assert.strictEqual(yield* K.placeOf(sql, second), "failed")

      yield* sql`SELECT tenure.close_quarantine(${second}::uuid)`
      const settled = yield* tenure(["quarantine", "retry", second, "--url", url])
      assert.match(settled.stdout, /It was settled at 20.* by tenure_test_owner/)
    })
  )

  it.live("closes what is in it, once, and not while it is being settled", () =>
    Effect.gen(function* () {
      const { database, first, second, sql } = yield* scene
      const url = database.urlOf("api")
      const closed = yield* tenure(["quarantine", "close", first, "--url", url])
      assert.strictEqual(closed.code, 0, closed.stderr)
      assert.include(closed.stdout, `Item ${first} is closed`)
      const again = yield* tenure(["quarantine", "close", first, "--url", url])
      assert.strictEqual(again.code, 1)
      assert.include(again.stderr, "has been settled before")
      yield* sql`SELECT tenure.retry(${first}::uuid)`
      const gone = yield* tenure(["quarantine", "close", first, "--url", url])
      assert.include(gone.stderr, "is not in quarantine")
      yield* sql`BEGIN`
      yield* sql`SELECT FROM tenure.quarantine WHERE item_id = ${second}::uuid FOR UPDATE`
      const busy = yield* tenure(["quarantine", "close", second, "--url", url])
      assert.strictEqual(busy.code, 1)
      assert.include(busy.stderr, "is being settled at this moment")
      yield* sql`ROLLBACK`
    })
  )
})

describe("tenure doctor", () => {
  it.live("exits with 1 when a table has no fence, and names the cure", () =>
    Effect.gen(function* () {
      const database = yield* freshDatabase
      const sql = yield* connect(database.owner)
      yield* sql`CREATE TABLE invoice (id int)`
      yield* sql`GRANT INSERT ON invoice TO tenure_worker`
      const sick = yield* tenure(["doctor", "--url", database.urlOf("worker")])
      assert.strictEqual(sick.code, 1)
      assert.include(sick.stdout, "problem  public.invoice has no fence")
      yield* sql`SELECT tenure.fence_table('invoice')`
      const healthy = yield* tenure(["doctor", "--url", database.urlOf("worker")])
      assert.deepStrictEqual(problems(healthy.stdout), [])
      assert.notInclude(healthy.stdout, "warning")
    })
  )

  it.live("says that a role lacks the rights of a worker", () =>
    Effect.gen(function* () {
      const database = yield* freshDatabase
      const { code, stdout } = yield* tenure(["doctor", "--url", database.urlOf("api")])
      assert.strictEqual(code, 1)
      assert.include(stdout, "GRANT tenure_worker TO tenure_test_api")
    })
  )
})

describe("tenure worker", () => {
  it.live("runs the layer of a module, and drains on SIGTERM", () =>
    Effect.gen(function* () {
      const database = yield* freshDatabase
      const sql = yield* connect(database.owner)
      const child = yield* start([bin, "worker", module], {
        env: { DATABASE_URL: database.urlOf("worker") }
      })
      yield* child.line("> executor")
      yield* child.kill("SIGTERM")
      assert.strictEqual((yield* child.end).code, 0, child.stdout())
      assert.deepStrictEqual(yield* sql`SELECT state FROM tenure.executor`, [{ state: "released" }])
    })
  )

  it.live("is ended by its watchdog when the module blocks it", () =>
    Effect.gen(function* () {
      const database = yield* freshDatabase
      const child = yield* start([bin, "worker", module, "--export", "stuck"], {
        env: { DATABASE_URL: database.urlOf("worker") }
      })
      const id = yield* child.line("> executor")
      // By a signal, which has no code.
      assert.strictEqual((yield* child.end).code, null, child.stdout())
      assert.match(child.stderr(), new RegExp(`"executor_watchdog".*${id}.*"eventLoop"`))
    })
  )

  it.live("says which layers a module has when it has not the one asked for", () =>
    Effect.gen(function* () {
      const { code, stderr } = yield* tenure(["worker", module, "--export", "nothing"])
      assert.strictEqual(code, 78)
      assert.include(stderr, "exports no layer named nothing; its layers are layer")
      const absent = yield* tenure(["worker", "absent.ts"])
      assert.strictEqual(absent.code, 78)
      assert.include(absent.stderr, "there is no file absent.ts")
    })
  )
})

describe("tenure fault-points", () => {
  it.live("lists all of them", () =>
    Effect.gen(function* () {
      const { stdout } = yield* tenure(["fault-points"])
      assert.deepStrictEqual(stdout.trim().split("\n"), [...names])
    })
  )
})
