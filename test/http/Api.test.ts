/**
 * Goal: a process lets in over HTTP whom it may, says why it refuses, and repeats nothing that was sent.
 * Method: a whole process on a real database, and requests on a real socket.
 * Covers I-067 to I-070.
 */
import { assert, layer } from "@effect/vitest"
import { Context, Effect, Layer } from "effect"
import { HttpApi, OpenApi } from "effect/http-api"
import { randomUUID } from "node:crypto"
import { Api } from "tenure/http"
import { hashOf, type Role, roles } from "../../src/http/Token.ts"
import { present } from "../support/present.ts"
import * as World from "./api.ts"

class Process extends Context.Service<Process, World.Process>()("tenure/test/http/Process") {
  static readonly layer = Layer.effect(
    Process,
    World.process({ settings: { payloadMax: 1000, pollInterval: "1 hour" } })
  )
}

const secrets = Effect.gen(function* () {
  const world = yield* Process
  const made = yield* Effect.forEach(roles, (role) =>
    Effect.map(world.token(role), ({ secret }) => [role, secret] as const)
  )
  return { ...world, ...(Object.fromEntries(made) as Record<Role, string>) }
})

const some = randomUUID()

/** Every endpoint, by the roles that may use it. */
const endpoints: ReadonlyArray<
  readonly [method: string, path: string, admitted: ReadonlyArray<Role>]
> = [
  ["POST", "/sessions", ["worker"]],
  ["POST", `/sessions/${some}/pull`, ["worker"]],
  ["POST", `/sessions/${some}/heartbeat`, ["worker"]],
  ["DELETE", `/sessions/${some}`, ["worker"]],
  ["POST", `/sessions/${some}/items/${some}/activate`, ["worker"]],
  ["POST", `/sessions/${some}/items/${some}/extend`, ["worker"]],
  ["POST", `/sessions/${some}/items/${some}/complete`, ["worker"]],
  ["POST", `/sessions/${some}/items/${some}/fail`, ["worker"]],
  ["POST", `/sessions/${some}/items/${some}/business-error`, ["worker"]],
  ["POST", `/sessions/${some}/items/${some}/checkpoint`, ["worker"]],
  ["POST", "/items", ["organisation", "platform"]],
  ["GET", `/items/${some}`, ["organisation", "platform"]],
  ["GET", "/capacity/leases", ["platform"]],
  ["GET", "/capacity/sessions", ["platform"]],
  ["GET", "/capacity/queue", ["platform"]]
]

layer(Process.layer, { timeout: "60 seconds", excludeTestServices: true })("the API", (it) => {
  it.effect("lets a role do what it is for, and says whose credentials it wants otherwise", () =>
    Effect.gen(function* () {
      const world = yield* secrets
      for (const [method, path, admitted] of endpoints) {
        for (const role of roles) {
          const answer = yield* world.call(method, path, {
            token: world[role],
            ...(method === "POST" ? { body: {} } : {})
          })
          const which = `${method} ${path} as ${role}: ${answer.text}`
          if (admitted.includes(role)) {
            assert.notInclude([401, 403, 500], answer.status, which)
          } else {
            assert.strictEqual(answer.status, 403, which)
            assert.strictEqual(answer.body["_tag"], "Forbidden")
            assert.include(
              answer.body["message"],
              `${admitted[0]} credentials required here: this token's role is ${role}`
            )
          }
        }
      }
    })
  )

  it.effect("says 401 without a token, and of one that is unknown, revoked or expired, which", () =>
    Effect.gen(function* () {
      const { call, sql, token } = yield* Process
      const path = `/items/${some}`
      const without = yield* call("GET", path)
      assert.strictEqual(without.status, 401)
      assert.strictEqual(without.headers.get("www-authenticate"), "Bearer")
      assert.include(without.text, "Authorization: Bearer")
      const unknown = yield* call("GET", path, { token: "tenure_platform_made-up" })
      assert.deepStrictEqual([unknown.status, unknown.body["_tag"]], [401, "Unauthorized"])
      assert.notInclude(unknown.text, "made-up")

      const { id, secret } = yield* token("organisation")
      assert.strictEqual((yield* call("GET", path, { token: secret })).status, 404)
      yield* sql`SELECT tenure.revoke_token(${id}::uuid)`
      const revoked = yield* call("GET", path, { token: secret })
      assert.strictEqual(revoked.status, 401)
      assert.strictEqual(revoked.body["message"], `token ${id} is revoked`)

      const short = yield* token("organisation", { validMillis: 86_400_000 })
      assert.strictEqual((yield* call("GET", path, { token: short.secret })).status, 404)
      yield* sql`UPDATE tenure.token SET expires_at = clock_timestamp() WHERE id = ${short.id}::uuid`
      const expired = yield* call("GET", path, { token: short.secret })
      assert.deepStrictEqual(
        [expired.status, expired.body["message"]],
        [401, `token ${short.id} is expired`]
      )
    })
  )

  it.effect("knows a secret by its hash alone, and notes that it was used", () =>
    Effect.gen(function* () {
      const { call, sql, token } = yield* Process
      const { id, secret } = yield* token("organisation")
      const row = sql<{ row: string; hash: string; used: boolean }>`
        SELECT t::text AS row, encode(t.hash, 'hex') AS hash, t.last_used_at IS NOT NULL AS used
          FROM tenure.token t WHERE t.id = ${id}::uuid`
      const made = present((yield* row)[0])
      assert.deepInclude(made, { hash: hashOf(secret), used: false })
      assert.notInclude(made.row, secret.slice(-43))
      yield* call("GET", `/items/${some}`, { token: secret })
      assert.isTrue(present((yield* row)[0]).used)
    })
  )

  it.effect("names the place of what is wrong in a request, and repeats nothing of it", () =>
    Effect.gen(function* () {
      const { call, organisation, worker } = yield* secrets
      const bodies: ReadonlyArray<readonly [body: unknown, place: string]> = [
        [{ worker: "a-secret", queues: "a-secret", slots: 1 }, "queues"],
        [{ worker: "w", queues: ["q"], slots: "a-secret" }, "slots"],
        [{ worker: "w", queues: [], slots: 1 }, "queues"],
        [`{"worker": "a-secret`, "openapi.json"],
        [undefined, "openapi.json"]
      ]
      for (const [body, place] of bodies) {
        const answer = yield* call("POST", "/sessions", { token: worker, body })
        assert.deepStrictEqual(
          [answer.status, answer.body["_tag"]],
          [400, "Malformed"],
          answer.text
        )
        assert.include(answer.text, place)
        assert.notInclude(answer.text, "a-secret")
      }
      const path = yield* call("GET", "/items/no-id", { token: organisation })
      assert.deepStrictEqual([path.status, path.body["_tag"]], [400, "Malformed"])
      const nul = yield* call("POST", "/items", {
        token: organisation,
        body: { queue: "a\0b", payload: 1 }
      })
      assert.deepStrictEqual([nul.status, nul.body["_tag"]], [400, "Malformed"])
    })
  )

  it.effect("says 413 to what is too large, before and after it was read", () =>
    Effect.gen(function* () {
      const { call, organisation } = yield* secrets
      // Beyond the limit of a body, and only beyond that of a payload.
      for (const size of [100_000, 2000]) {
        const answer = yield* call("POST", "/items", {
          token: organisation,
          body: { queue: "q", payload: "x".repeat(size) }
        })
        assert.strictEqual(answer.status, 413, answer.text)
        assert.deepInclude(answer.body, { _tag: "TooLarge", bytesMax: 1000 })
      }
    })
  )

  it.effect("knows no session and no item that never was", () =>
    Effect.gen(function* () {
      const { call, organisation, worker } = yield* secrets
      const session = yield* call("POST", `/sessions/${some}/heartbeat`, { token: worker })
      assert.deepStrictEqual([session.status, session.body["_tag"]], [404, "NotFound"])
      assert.include(session.text, "open another one")
      const opened = yield* call("POST", "/sessions", {
        token: worker,
        body: { worker: "w", queues: ["none"], slots: 1 }
      })
      const item = yield* call(
        "POST",
        `/sessions/${String(opened.body["id"])}/items/${some}/activate`,
        { token: worker, body: { executionSeq: 1 } }
      )
      assert.deepStrictEqual([item.status, item.body["_tag"]], [404, "NotFound"])
      assert.strictEqual(
        (yield* call("GET", `/items/${some}`, { token: organisation })).status,
        404
      )
    })
  )

  it.effect("refuses a queue that another application runs", () =>
    Effect.gen(function* () {
      const { call, sql, worker } = yield* secrets
      yield* sql`SELECT tenure.enqueue('theirs', '1')`
      yield* sql`UPDATE tenure.queue SET application_name = 'other' WHERE name = 'theirs'`
      const answer = yield* call("POST", "/sessions", {
        token: worker,
        body: { worker: "w", queues: ["theirs"], slots: 1 }
      })
      assert.deepStrictEqual([answer.status, answer.body["_tag"]], [409, "Conflict"])
      assert.include(answer.text, "belongs to the application other")
    })
  )

  it.effect("hands in once under an idempotency key, and tells another payload apart", () =>
    Effect.gen(function* () {
      const { call, organisation } = yield* secrets
      const enqueue = (payload: unknown) =>
        call("POST", "/items", {
          token: organisation,
          body: { queue: "keys", payload, idempotencyKey: "k" }
        })
      const first = yield* enqueue({ a: 1 })
      assert.deepStrictEqual((yield* enqueue({ a: 1 })).body, first.body)
      const other = yield* enqueue({ a: "a-secret" })
      assert.deepStrictEqual([other.status, other.body["_tag"]], [409, "Conflict"])
      assert.include(other.text, String(first.body["id"]))
      assert.notInclude(other.text, "a-secret")
      const seen = yield* call("GET", `/items/${String(first.body["id"])}`, {
        token: organisation
      })
      assert.deepInclude(seen.body, { state: "waiting", result: null })
    })
  )

  it.effect("shows to a platform what is held, who is there and what waits, without payloads", () =>
    Effect.gen(function* () {
      const world = yield* secrets
      const { call, organisation, platform, sql, worker } = world
      const enqueue = (delayMillis: number) =>
        call("POST", "/items", {
          token: organisation,
          body: { queue: "seen", payload: "a-secret", delayMillis }
        })
      const held = yield* enqueue(0)
      const session = yield* World.session(world, worker, { queues: ["seen"], slots: 3 })
      const item = present((yield* session.pull({ wanted: 1 })).items[0])
      yield* session.activate(item)
      const waits = yield* enqueue(3_600_000)
      const see = (what: string) =>
        Effect.map(call("GET", `/capacity/${what}?max=1000`, { token: platform }), (answer) => {
          assert.strictEqual(answer.status, 200, answer.text)
          assert.notInclude(answer.text, "a-secret")
          return JSON.parse(answer.text) as ReadonlyArray<Record<string, unknown>>
        })
      const lease = (yield* see("leases")).find((one) => one["item"] === held.body["id"])
      assert.deepInclude(lease, {
        queue: "seen",
        worker: "test",
        session: session.id,
        executionSeq: 1,
        state: "active"
      })
      const there = (yield* see("sessions")).find((one) => one["session"] === session.id)
      assert.deepInclude(there, { worker: "test", slots: 3, active: 1, reserved: 0 })
      assert.deepStrictEqual(present(there)["queues"], ["seen"])
      const queued = (yield* see("queue")).find((one) => one["item"] === waits.body["id"])
      const [row] = yield* sql<{ due_at: Date }>`
        SELECT due_at FROM tenure.delayed WHERE id = ${String(waits.body["id"])}::uuid`
      assert.strictEqual(present(queued)["eligibleAt"], present(row).due_at.toISOString())
    })
  )

  it.effect("describes every endpoint in a document that a generator can read", () =>
    Effect.gen(function* () {
      const { url } = yield* Process
      const document = yield* Effect.promise(() =>
        fetch(`${url}/tenure/v1/openapi.json`).then(
          (response) => response.json() as Promise<OpenApi.OpenAPISpec>
        )
      )
      assert.strictEqual(document.openapi.split(".")[0], "3")
      const described = Object.entries(document.paths).flatMap(([path, methods]) =>
        Object.keys(methods).map((method) => `${method.toUpperCase()} ${path}`)
      )
      const declared: Array<string> = []
      HttpApi.reflect(Api.Api, {
        onGroup: () => {},
        onEndpoint: ({ endpoint }) => {
          declared.push(`${endpoint.method} ${endpoint.path.replaceAll(/:(\w+)/g, "{$1}")}`)
        }
      })
      assert.deepStrictEqual(described.sort(), declared.sort())
      assert.strictEqual(declared.length, endpoints.length)
      assert.deepStrictEqual(document, JSON.parse(JSON.stringify(OpenApi.fromApi(Api.Api))))
      assert.strictEqual(
        (
          document.components.securitySchemes["bearer"] as { scheme?: string }
        ).scheme?.toLowerCase(),
        "bearer"
      )
    })
  )
})
