/**
 * Goal: a process waits for a database that is away, each time as somebody new, and ends at once with
 * one sentence when waiting would not help.
 * Method: real processes behind a relay that turns connections away; the pauses are a property.
 * Covers K-181, K-185..K-195, K-004, I3.
 */
import { assert, describe, it } from "@effect/vitest"
import { Duration, Effect, Schedule } from "effect"
import { startupBackoff } from "../../src/executor/Executor.ts"
import { administer, connect, emptyDatabase, freshDatabase } from "../support/Postgres.ts"
import { type Plan, worker } from "./Child.ts"
import * as Gate from "./Gate.ts"

const refusal = Effect.fnUntraced(function* (plan: Plan) {
  const child = yield* worker(plan)
  const { code } = yield* child.end
  const sentences = child.stderr().trim().split("\n")
  return { code, sentence: sentences.length === 1 ? sentences[0] : child.stderr(), child }
})

describe("the pauses between attempts to start", () => {
  it.effect("lie between the half and the whole of 1, 2, 4, 8, 16, 30 seconds", () =>
    Effect.gen(function* () {
      const pauses = yield* Effect.replicateEffect(onePause, 100)
      for (const [index, whole] of wholes.entries()) {
        const drawn = pauses.map((each) => each[index] ?? 0)
        assert.isAtLeast(Math.min(...drawn), whole / 2)
        assert.isAtMost(Math.max(...drawn), whole)
        // Jitter that is none would let replicas come back together.
        assert.isAbove(Math.max(...drawn) - Math.min(...drawn), whole / 4)
      }
    })
  )
})

const wholes = [1000, 2000, 4000, 8000, 16_000, 30_000, 30_000]

const onePause = Effect.gen(function* () {
  const step = yield* Schedule.toStep(startupBackoff)
  let nowMillis = 0
  const pauses: Array<number> = []
  for (let attempt = 0; attempt < wholes.length; attempt++) {
    const [, pause] = yield* step(nowMillis, undefined)
    pauses.push(Duration.toMillis(pause))
    nowMillis += Duration.toMillis(pause)
  }
  return pauses
})

describe("a process whose database cannot be reached", () => {
  it.live("tries again as a new executor each time, and starts when it can", () =>
    Effect.gen(function* () {
      const database = yield* freshDatabase
      const sql = yield* connect(database.owner)
      const turnedAway = new Set<string>()
      // Two identities are turned away, whatever they try.
      const gate = yield* Gate.open(database.worker, (id) => {
        if (id === undefined) return true
        if (turnedAway.size < 2) turnedAway.add(id)
        return !turnedAway.has(id)
      })
      const child = yield* worker({ url: gate.url })
      const id = yield* child.line("> executor")
      const distinct = [...new Set(gate.executorIds())]
      assert.strictEqual(distinct.length, 3)
      assert.strictEqual(distinct[2], id)
      const registered = yield* sql<{ readonly id: string }>`SELECT id FROM tenure.executor`
      assert.deepStrictEqual(
        registered.map((row) => row.id),
        [id]
      )
      assert.include(child.stdout(), "cannot be reached yet")
      assert.strictEqual(child.stderr(), "")
    })
  )

  it.live("ends at once on SIGTERM, having registered nobody", () =>
    Effect.gen(function* () {
      const database = yield* freshDatabase
      const sql = yield* connect(database.owner)
      const gate = yield* Gate.open(database.worker, () => false)
      const child = yield* worker({ url: gate.url })
      yield* child.line(`{"message":"executor_startup: the database cannot be reached yet"`)
      yield* child.kill("SIGTERM")
      assert.strictEqual((yield* child.end).code, 0, child.stdout())
      assert.deepStrictEqual(yield* sql`SELECT FROM tenure.executor`, [])
    })
  )
})

describe("a process that may not start says why in one sentence and exits with 78", () => {
  it.live("when its settings contradict each other", () =>
    Effect.gen(function* () {
      const { code, sentence } = yield* refusal({
        url: "postgresql://nobody@127.0.0.1:9/none",
        settings: { leaseRenewal: "1 second" }
      })
      assert.strictEqual(code, 78)
      assert.match(sentence ?? "", /leaseRenewal x 3 .* lower leaseRenewal to 600 ms/)
    })
  )

  it.live("when the password is wrong", () =>
    Effect.gen(function* () {
      const database = yield* freshDatabase
      const url = new URL(database.urlOf("worker"))
      url.password = "wrong"
      const { code, sentence } = yield* refusal({ url: url.href })
      assert.strictEqual(code, 78, sentence)
      assert.match(
        sentence ?? "",
        /password authentication failed .*check the role and its password/
      )
      assert.notInclude(sentence ?? "", "wrong@")
    })
  )

  it.live("when the database does not exist", () =>
    Effect.gen(function* () {
      const database = yield* freshDatabase
      const url = new URL(database.urlOf("worker"))
      url.pathname = "/no_such_database"
      const { code, sentence } = yield* refusal({ url: url.href })
      assert.strictEqual(code, 78, sentence)
      assert.match(sentence ?? "", /"no_such_database" does not exist/)
    })
  )

  it.live("when the schema is missing", () =>
    Effect.gen(function* () {
      const database = yield* emptyDatabase
      const { code, sentence } = yield* refusal({ url: database.urlOf("owner") })
      assert.strictEqual(code, 78, sentence)
      assert.match(sentence ?? "", /run `tenure migrate`/)
    })
  )

  it.live("when the role lacks the rights of a worker", () =>
    Effect.gen(function* () {
      const database = yield* freshDatabase
      const { code, sentence } = yield* refusal({ url: database.urlOf("api") })
      assert.strictEqual(code, 78, sentence)
      assert.match(sentence ?? "", /permission denied .*tenure doctor/)
    })
  )

  it.live("when the server is too old", () =>
    Effect.gen(function* () {
      const database = yield* freshDatabase
      const sql = yield* connect(database.superuser)
      // No older server is at hand: this one says so, to whoever looks here before pg_catalog.
      yield* sql`CREATE SCHEMA older`
      yield* sql`GRANT USAGE ON SCHEMA older TO PUBLIC`
      yield* sql.unsafe(`
        CREATE FUNCTION older.current_setting(name text) RETURNS text STABLE LANGUAGE sql AS $$
          SELECT CASE WHEN name = 'server_version_num' THEN '140011'
                      ELSE pg_catalog.current_setting(name) END $$`)
      yield* administer((admin) =>
        admin.unsafe(`ALTER DATABASE ${database.name} SET search_path = older, pg_catalog`)
      )
      const { code, sentence } = yield* refusal({ url: database.urlOf("worker") })
      assert.strictEqual(code, 78, sentence)
      assert.match(sentence ?? "", /version 14; use PostgreSQL 15 or newer/)
    })
  )
})
