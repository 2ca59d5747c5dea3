/**
 * A server of one test's own, that it may crash and start again: the shared one has other tests on it.
 * Has the roles and the tables that a deployment has.
 */
import { Effect, Redacted, Scope } from "effect"
import { mkdtempSync, rmSync } from "node:fs"
import { tmpdir } from "node:os"
import { join } from "node:path"
import { Database, type Endpoint, parseEndpoint } from "../../../src/database/Database.ts"
import { databaseName, role } from "../../../src/database/EmbeddedCluster.ts"
import { endpoint, start } from "../../../src/database/EmbeddedPostgres.ts"
import { running } from "../../../src/database/EmbeddedServer.ts"
import * as Migrations from "../../../src/database/Migrations.ts"
import { connect } from "../../support/Postgres.ts"
import type { Server } from "./World.ts"

export interface OwnServer extends Server {
  /** What a power failure leaves behind: no session is told anything, nothing is flushed in order. */
  readonly crash: Effect.Effect<void>
  /** On the same port. */
  readonly restart: Effect.Effect<void>
}

export const make: Effect.Effect<OwnServer, never, Scope.Scope> = Effect.gen(function* () {
  const scope = yield* Scope.Scope
  const directory = yield* Effect.acquireRelease(
    Effect.sync(() => mkdtempSync(join(tmpdir(), "tenure-faults-"))),
    (made) => Effect.sync(() => rmSync(made, { recursive: true, force: true }))
  )
  const options = { directory, durable: false }
  const server = yield* start(options)
  const at = (username: string) => endpoint(server, username, databaseName)
  const urlOf = (username: string) =>
    `postgresql://${username}:${server.password}@127.0.0.1:${server.port}/${databaseName}`
  const superuser = yield* connect(at("postgres"))
  for (const login of ["worker", "api"]) {
    yield* superuser.unsafe(
      `CREATE ROLE tenure_test_${login} LOGIN PASSWORD '${server.password}' IN ROLE tenure_${login}`
    )
  }
  yield* Migrations.run().pipe(Effect.provideService(Database, at(role)))
  return {
    worker: urlOf("tenure_test_worker"),
    api: urlOf("tenure_test_api"),
    superuser: at("postgres"),
    log: join(directory, "server.log"),
    crash: Effect.gen(function* () {
      const data = join(directory, "data")
      const { pid } = running(data) ?? server
      yield* Effect.sync(() => process.kill(pid, "SIGQUIT"))
      while (running(data)?.pid === pid) yield* Effect.sleep("10 millis")
    }),
    // It lives as long as the first start: what is checked afterwards needs it too.
    restart: Effect.asVoid(Effect.orDie(Scope.provide(start(options), scope)))
  }
}).pipe(Effect.orDie)

export const endpointAt = (url: string): Endpoint => {
  const parsed = parseEndpoint({ url: Redacted.make(url) })
  if (parsed._tag === "Failure") throw parsed.failure
  return parsed.success
}
