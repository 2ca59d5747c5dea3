/**
 * Goal: the main of a process keeps the promises of a shutdown: it drains, gives the lease back last,
 * and gives nothing back when it has to be forced.
 * Method: real processes, real signals; what became of the lease and the work is read in the database.
 * Covers K-043, K-162..K-167, K-181, K-184, K-185, I10.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect, type Scope } from "effect"
import type { PgClient } from "@effect/sql-pg"
import { connect, type FreshDatabase, freshDatabase } from "../support/Postgres.ts"
import { type Child, type Plan, worker } from "./Child.ts"

interface World {
  readonly database: FreshDatabase
  readonly sql: PgClient.PgClient
  readonly child: Child
  readonly id: string
}

/** A worker that has started, with one letter enqueued. */
const working = (plan: Omit<Plan, "url">): Effect.Effect<World, never, Scope.Scope> =>
  Effect.gen(function* () {
    const database = yield* freshDatabase
    const sql = yield* connect(database.owner)
    const child = yield* worker({ ...plan, url: database.urlOf("worker") })
    const id = yield* child.line("> executor")
    yield* Effect.orDie(sql`SELECT tenure.enqueue('letters', '{"text":"hello"}')`)
    yield* child.line("> started")
    return { database, sql, child, id }
  })

const leaseOf = ({ id, sql }: World) =>
  Effect.map(
    sql<{ readonly state: string }>`SELECT state FROM tenure.executor WHERE id = ${id}::uuid`,
    (rows) => rows[0]?.state
  )

const claims = ({ sql }: World) =>
  Effect.map(
    sql<{
      readonly count: number
    }>`SELECT count(*)::int AS count FROM tenure.claimed WHERE queue_id > 0`,
    (rows) => rows[0]?.count
  )

/** With room for a busy machine: these processes are to end in order. */
const calm = { leaseValidity: "8 seconds", forcedExit: "3 seconds", drain: "3 seconds" } as const

describe("a worker process", () => {
  it.live("lets running work end on SIGTERM, gives its lease back and exits with 0", () =>
    Effect.gen(function* () {
      const world = yield* working({ handler: "slow", settings: calm })
      yield* world.child.kill("SIGTERM")
      const { code } = yield* world.child.end
      assert.strictEqual(code, 0, world.child.stdout())
      assert.include(world.child.stdout(), "> ended")
      assert.strictEqual(yield* leaseOf(world), "released")
      assert.strictEqual(yield* claims(world), 0)
    })
  )

  it.live("takes a Ctrl-C that arrives twice at once for one", () =>
    Effect.gen(function* () {
      const world = yield* working({ handler: "slow", settings: calm })
      // Two kinds, because two of one that are both on their way arrive as one.
      yield* world.child.kill("SIGINT")
      yield* world.child.kill("SIGTERM")
      assert.strictEqual((yield* world.child.end).code, 0)
      assert.strictEqual(yield* leaseOf(world), "released")
    })
  )

  it.live("hands back what outlives the drain and obeys, and gives its lease back", () =>
    Effect.gen(function* () {
      const world = yield* working({
        handler: "endless",
        settings: { ...calm, drain: "300 millis" }
      })
      yield* world.child.kill("SIGTERM")
      assert.strictEqual((yield* world.child.end).code, 0)
      assert.strictEqual(yield* leaseOf(world), "released")
      const waiting = yield* world.sql`SELECT FROM tenure.ready`
      assert.strictEqual(waiting.length, 1)
    })
  )

  it.live("is forced to exit when work obeys nobody, and leaves the lease to expire", () =>
    Effect.gen(function* () {
      const world = yield* working({
        handler: "deaf",
        settings: { drain: "500 millis", forcedExit: "300 millis" }
      })
      yield* world.child.kill("SIGTERM")
      assert.strictEqual((yield* world.child.end).code, 70, world.child.stdout())
      assert.strictEqual(yield* leaseOf(world), "active")
      assert.strictEqual(yield* claims(world), 1)
    })
  )

  it.live("leaves the lease to expire even when the budget would be long enough", () =>
    Effect.gen(function* () {
      const world = yield* working({
        handler: "deaf",
        settings: { drain: "300 millis", forcedExit: "700 millis", cancelGrace: "50 millis" }
      })
      yield* world.child.kill("SIGTERM")
      assert.strictEqual((yield* world.child.end).code, 70, world.child.stdout())
      assert.strictEqual(yield* leaseOf(world), "active")
      assert.strictEqual(yield* claims(world), 1)
    })
  )

  it.live("is forced to exit when a finalizer hangs", () =>
    Effect.gen(function* () {
      const world = yield* working({
        misfortune: "hungFinalizer",
        settings: { drain: "300 millis" }
      })
      yield* world.child.kill("SIGTERM")
      assert.strictEqual((yield* world.child.end).code, 70)
      assert.strictEqual(yield* leaseOf(world), "active")
    })
  )

  it.live("is forced to exit by a second signal, and leaves the lease to expire", () =>
    Effect.gen(function* () {
      const world = yield* working({ handler: "endless", settings: { drain: "20 seconds" } })
      yield* world.child.kill("SIGTERM")
      yield* world.child.line(`{"message":"executor_shutdown: draining"`)
      yield* Effect.sleep("600 millis") // Sooner it would count as the same signal.
      yield* world.child.kill("SIGTERM")
      const { code, millis } = yield* world.child.end
      assert.strictEqual(code, 70)
      assert.isBelow(millis, 20_000, "sooner than the drain would have ended")
      assert.strictEqual(yield* leaseOf(world), "active")
    })
  )

  it.live("exits with 75 when its lease is revoked from outside", () =>
    Effect.gen(function* () {
      const world = yield* working({ handler: "endless" })
      yield* world.sql`SELECT tenure.mark_revoking(${world.id}::uuid, true)`
      const { code } = yield* world.child.end
      assert.strictEqual(code, 75, world.child.stdout())
      assert.match(String(yield* leaseOf(world)), /^revok/)
    })
  )

  it.live("exits with 75 when its lease is revoked while it drains", () =>
    Effect.gen(function* () {
      const world = yield* working({ handler: "endless", settings: { drain: "20 seconds" } })
      yield* world.child.kill("SIGTERM")
      yield* world.sql`SELECT tenure.mark_revoking(${world.id}::uuid, true)`
      const { code, millis } = yield* world.child.end
      assert.strictEqual(code, 75, world.child.stdout())
      assert.isBelow(millis, 20_000, "sooner than the drain would have ended")
    })
  )

  it.live("drains and exits with 0 when the application asks for it", () =>
    Effect.gen(function* () {
      const database = yield* freshDatabase
      const sql = yield* connect(database.owner)
      const child = yield* worker({ misfortune: "drain", url: database.urlOf("worker") })
      assert.strictEqual((yield* child.end).code, 0, child.stdout())
      const states = yield* sql`SELECT state FROM tenure.executor`
      assert.deepStrictEqual(states, [{ state: "released" }])
    })
  )

  it.live(
    "exits with 71 when a rejection or an exception is caught by nobody, and leaves the lease to expire",
    () =>
      Effect.gen(function* () {
        const database = yield* freshDatabase
        const sql = yield* connect(database.owner)
        for (const misfortune of ["rejection", "exception"] as const) {
          const child = yield* worker({ misfortune, url: database.urlOf("worker") })
          assert.strictEqual((yield* child.end).code, 71, child.stdout())
          assert.match(child.stdout(), /nobody (waits for|catches) me/)
        }
        const states = yield* sql`SELECT state FROM tenure.executor`
        assert.deepStrictEqual(states, [{ state: "active" }, { state: "active" }])
      })
  )

  it.live("exits with 1 when its layer fails, and prints no field of the failure", () =>
    Effect.gen(function* () {
      const database = yield* freshDatabase
      const child = yield* worker({ misfortune: "failure", url: database.urlOf("worker") })
      assert.strictEqual((yield* child.end).code, 1, child.stdout() + child.stderr())
      assert.include(child.stdout(), "PayloadInside")
      assert.notInclude(child.stdout() + child.stderr(), "a-secret")
    })
  )

  it.live("logs one JSON object a line when nobody is looking", () =>
    Effect.gen(function* () {
      const world = yield* working({ settings: calm })
      yield* world.child.kill("SIGTERM")
      yield* world.child.end
      const entries = world.child
        .stdout()
        .split("\n")
        .filter((line) => line !== "" && !line.startsWith("> "))
        .map(
          (line) => JSON.parse(line) as { message: string; annotations: { executorId?: string } }
        )
      for (const operation of ["executor_startup", "executor_shutdown"]) {
        const entry = entries.find(({ message }) => message === operation)
        assert.strictEqual(entry?.annotations.executorId, world.id, operation)
      }
      assert.notInclude(world.child.stdout(), "hello")
    })
  )
})
