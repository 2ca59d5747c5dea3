/**
 * Goal: `Lease` refuses as soon as something is known against the lease, and the database decides.
 * Method: a whole executor as the worker role; its lease is expired and revoked from outside.
 * Covers K-016, K-053..K-055, K-075, K-133, K-137, K-165, K-173, I3, P-18.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect, Exit, Fiber, Layer, Redacted, Result } from "effect"
import { HttpClient, HttpClientResponse } from "effect/http"
import { SqlClient } from "effect/sql"
import { Lease, Tenure } from "tenure"
import { Database } from "../../src/database/Database.ts"
import { connect, freshDatabase, layerOf } from "../support/Postgres.ts"
import { layerRuntime } from "../queue/runtime.ts"

const admin = Effect.flatMap(Database, (database) => connect({ ...database, ...asOwner(database) }))

const asOwner = (database: Database["Service"]) => {
  const config = { ...database.config, username: "tenure_test_owner" }
  return { username: "tenure_test_owner", config }
}

const revoke = Effect.fnUntraced(function* (id: string) {
  const sql = yield* admin
  yield* sql`SELECT tenure.mark_revoking(${id}::uuid, true)`
  yield* sql`SELECT state FROM tenure.revoke(${id}::uuid, '0', '0')`
})

describe("a lease", () => {
  it.live("is held after start, and each start is a new executor", () =>
    Effect.gen(function* () {
      const ids = yield* Effect.forEach([1, 2], () =>
        Effect.gen(function* () {
          yield* Lease.check
          yield* Lease.verify
          return (yield* Tenure.Executor).id
        }).pipe(Effect.provide(Layer.fresh(layerRuntime())))
      )
      assert.strictEqual(new Set(ids).size, 2)
    })
  )

  it.live(
    "that a peer has revoked is refused by verify, by the fence, and from then on by check",
    () =>
      Effect.gen(function* () {
        const { id } = yield* Tenure.Executor
        const sql = yield* SqlClient.SqlClient
        yield* revoke(id)
        const written = yield* Effect.result(sql`SELECT tenure.enqueue('q', '1')`)
        assert.isTrue(Result.isFailure(written))
        const verified = yield* Effect.flip(Lease.verify)
        assert.isTrue(verified._tag === "LeaseLost" && verified.cause === "revoked")
        assert.strictEqual((yield* Effect.flip(Lease.check))._tag, "LeaseLost")
      }).pipe(Effect.provide(layerRuntime()), Effect.scoped)
  )

  it.live("that is lost interrupts what it guards", () =>
    Effect.gen(function* () {
      const { id } = yield* Tenure.Executor
      const guarded = yield* Effect.forkChild(Lease.guard(Effect.never))
      yield* Effect.yieldNow
      yield* revoke(id)
      // Whoever learns of it first ends all that is guarded.
      yield* Effect.ignore(Lease.verify)
      const exit = yield* Effect.exit(Effect.timeout(Fiber.join(guarded), "10 seconds"))
      assert.isTrue(Exit.isFailure(exit) && String(exit.cause).includes("LeaseLost"))
    }).pipe(Effect.provide(layerRuntime()), Effect.scoped)
  )

  it.live("guards the HttpClient: a refused request is never sent and dies with the reason", () =>
    Effect.gen(function* () {
      let sent = 0
      const upstream = Layer.succeed(
        HttpClient.HttpClient,
        HttpClient.make((request) => {
          sent++
          return Effect.succeed(HttpClientResponse.fromWeb(request, new Response("ok")))
        })
      )
      const client = Lease.layerHttpClient.pipe(Layer.provide(upstream))
      const get = HttpClient.get("http://provider.invalid/").pipe(Effect.provide(client))
      yield* get
      yield* revoke((yield* Tenure.Executor).id)
      yield* Effect.ignore(Lease.verify)
      const refused = yield* Effect.exit(get)
      assert.isTrue(Exit.isFailure(refused) && String(refused.cause).includes("LeaseLost"))
      assert.strictEqual(sent, 1)
    }).pipe(Effect.provide(layerRuntime()), Effect.scoped)
  )

  it.live("is released at shutdown, last, and its tombstone stays", () =>
    Effect.gen(function* () {
      const database = yield* freshDatabase
      const id = yield* Effect.map(Tenure.Executor, (executor) => executor.id).pipe(
        Effect.provide(
          Tenure.layer({ application: "app", version: "app-v1" }).pipe(
            Layer.provide(layerOf(database.worker))
          )
        )
      )
      const sql = yield* connect(database.owner)
      const rows = yield* sql`SELECT id, state FROM tenure.executor`
      assert.deepStrictEqual(rows, [{ id, state: "released" }])
      const answer = yield* sql`SELECT tenure.renew_lease(${id}::uuid, '1 hour') AS answer`
      assert.deepStrictEqual(answer, [{ answer: "released" }])
    }).pipe(Effect.scoped)
  )
})

describe("a guarded pool", () => {
  it.live("accepts other credentials, and refuses another database, host or port", () =>
    Effect.gen(function* () {
      const database = yield* Database
      const password = Redacted.value(database.password ?? Redacted.make("tenure"))
      const url = (host: string, port: number, name: string) =>
        `postgresql://tenure_test_owner:${password}@${host}:${port}/${name}`
      const build = (text: string) =>
        Effect.result(
          Effect.scoped(
            Layer.build(
              Layer.fresh(Tenure.layerPool({ connectionsMax: 1, url: Redacted.make(text) }))
            )
          )
        )
      assert.isTrue(
        Result.isSuccess(yield* build(url(database.host, database.port, database.database)))
      )
      for (const other of [
        url(database.host, database.port, "postgres"),
        url(database.host, database.port + 1, database.database),
        url("localhost", database.port, database.database),
        url(`${database.host},10.0.0.1`, database.port, database.database)
      ]) {
        const refused = yield* build(other)
        assert.isTrue(
          Result.isFailure(refused) && refused.failure.message.includes("otherEndpoint")
        )
      }
    }).pipe(Effect.provide(layerRuntime()))
  )
})
