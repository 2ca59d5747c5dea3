/**
 * Goal: an operator gets a token, sees through a process or in the database what holds slots and what
 * waits, and is told in words when the token is not good enough for that.
 * Method: the commands as processes, against a process that serves the API and its database.
 * Covers I-067 to I-071.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect, type Scope } from "effect"
import * as World from "../http/api.ts"
import { present } from "../support/present.ts"
import { freshDatabase } from "../support/Postgres.ts"
import { bin, start } from "./Child.ts"

const tenure = (
  args: ReadonlyArray<string>,
  env: Readonly<Record<string, string>> = {}
): Effect.Effect<{ code: number | null; stdout: string; stderr: string }, never, Scope.Scope> =>
  Effect.gen(function* () {
    const child = yield* start([bin, ...args], {
      env: { TENURE_URL: "", TENURE_TOKEN: "", ...env }
    })
    const { code } = yield* child.end
    return { code, stdout: child.stdout(), stderr: child.stderr() }
  })

describe("tenure token", () => {
  it.live(
    "makes one whose secret is printed once, lists it without, and revokes it",
    () =>
      Effect.gen(function* () {
        const database = yield* freshDatabase
        const env = { DATABASE_URL: database.url }
        const made = yield* tenure(
          ["token", "create", "--role", "platform", "--name", "ops", "--expires", "90 days"],
          env
        )
        assert.strictEqual(made.code, 0, made.stderr)
        // Alone on its stream, for a variable of a shell.
        assert.match(made.stdout, /^tenure_platform_[\w-]{43}\n$/)
        const secret = made.stdout.trim()
        assert.notInclude(made.stderr, secret)
        const id = present(/token ([0-9a-f-]{36}) of role platform/.exec(made.stderr)?.[1])
        const listed = yield* tenure(["token", "list"], env)
        assert.match(listed.stdout, new RegExp(`${id} +platform +ops +usable`))
        assert.notInclude(listed.stdout, secret)
        const [revoked, worker] = yield* Effect.all(
          [
            tenure(["token", "revoke", id], env),
            tenure(["token", "create", "--role", "worker"], {
              DATABASE_URL: database.urlOf("worker")
            })
          ],
          { concurrency: 2 }
        )
        assert.strictEqual(revoked.code, 0, revoked.stderr)
        assert.strictEqual(worker.code, 1, worker.stdout)
        assert.include(worker.stderr, "by the role that owns the schema")
      }).pipe(Effect.scoped),
    120_000
  )
})

describe("tenure capacity", () => {
  it.live(
    "asks a process with a platform's token, and the database without one",
    () =>
      Effect.gen(function* () {
        // Six commands start meanwhile, on a slow machine for longer than a session lives without a heartbeat.
        const long = { pullHeartbeat: "1 minute", pullLease: "10 minutes" } as const
        const world = yield* World.process({ settings: { ...long, pullReservation: "10 minutes" } })
        const [worker, organisation, platform] = yield* Effect.all([
          world.token("worker"),
          world.token("organisation"),
          world.token("platform")
        ])
        yield* world.sql`SELECT tenure.enqueue('seen', '"a-secret"'), tenure.enqueue('seen', '"a-secret"', '{"delayMs": 3600000}')`
        const session = yield* World.session(world, worker.secret, { queues: ["seen"] })
        const item = present((yield* session.pull()).items[0])
        const remote = (secret: string) => ({ TENURE_URL: world.url, TENURE_TOKEN: secret })
        const [leases, sessions, queue, refused, without, direct] = yield* Effect.all(
          [
            tenure(["capacity", "leases"], remote(platform.secret)),
            tenure(["capacity", "sessions", "--json"], remote(platform.secret)),
            tenure(["capacity", "queue"], remote(platform.secret)),
            tenure(["capacity", "leases"], remote(organisation.secret)),
            tenure(["capacity", "leases"], { TENURE_URL: world.url }),
            tenure(["capacity", "queue", "--json", "--url", world.database.urlOf("api")], {
              TENURE_URL: world.url
            })
          ],
          { concurrency: 2 }
        )
        assert.match(
          leases.stdout,
          new RegExp(`${item.id} +seen +test +${session.id}`),
          leases.stderr
        )
        const [there] = JSON.parse(sessions.stdout) as ReadonlyArray<Record<string, unknown>>
        assert.deepInclude(there, { session: session.id, slots: 10, reserved: 1, active: 0 })
        const [row] = yield* world.sql<{ due_at: Date }>`SELECT due_at FROM tenure.delayed`
        const eligibleAt = present(row).due_at.toISOString()
        assert.include(queue.stdout, eligibleAt, queue.stderr)
        assert.strictEqual(refused.code, 1)
        assert.include(refused.stderr, "platform credentials required here")
        assert.strictEqual(refused.stdout, "")
        assert.strictEqual(without.code, 78)
        assert.include(without.stderr, "tenure token create --role platform")
        const [waits] = JSON.parse(direct.stdout) as ReadonlyArray<Record<string, unknown>>
        assert.strictEqual(present(waits)["eligibleAt"], eligibleAt)
        for (const { stderr, stdout } of [leases, sessions, queue, refused, without, direct]) {
          assert.notInclude(stdout + stderr, "a-secret")
          assert.notInclude(stdout + stderr, platform.secret)
        }
      }).pipe(Effect.scoped),
    120_000
  )
})
