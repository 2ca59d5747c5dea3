/**
 * One server for a whole run, with one migrated database to copy from. vitest runs this before any
 * test file, and its workers inherit the environment variables it sets.
 *
 * TENURE_TEST_URL, when it is set already, names a server to use instead: a superuser's URL.
 * TENURE_TEST_PG names a directory with `initdb` and `postgres` of another release.
 */
import { Effect, Exit, Redacted, Scope } from "effect"
import { randomBytes } from "node:crypto"
import { join } from "node:path"
import { Database, parseEndpoint } from "../../src/database/Database.ts"
import { inDirectory } from "../../src/database/EmbeddedBinaries.ts"
import { start } from "../../src/database/EmbeddedPostgres.ts"
import * as Migrations from "../../src/database/Migrations.ts"
import { administer, endpointOf } from "./Postgres.ts"

let scope: Scope.Closeable | undefined

export const setup = async (): Promise<void> => {
  scope = Scope.makeUnsafe()
  await Effect.runPromise(Scope.provide(prepare, scope))
}

export const teardown = async (): Promise<void> => {
  if (scope !== undefined) await Effect.runPromise(Scope.close(scope, Exit.void))
}

const prepare = Effect.gen(function* () {
  if (process.env["TENURE_TEST_URL"] === undefined) {
    const directory = process.env["TENURE_TEST_PG"]
    const server = yield* start({
      durable: false,
      binaries: directory === undefined ? undefined : inDirectory(directory)
    })
    process.env["TENURE_TEST_LOG"] = join(server.directory, "server.log")
    process.env["TENURE_TEST_URL"] =
      `postgresql://postgres:${server.password}@127.0.0.1:${server.port}/postgres`
  }
  const template = `tenure_template_${randomBytes(4).toString("hex")}`
  process.env["TENURE_TEST_TEMPLATE"] = template
  const password = passwordOf(process.env["TENURE_TEST_URL"])
  yield* administer((sql) =>
    Effect.gen(function* () {
      // Made beforehand, so that the owner is not their creator and thereby a member.
      for (const group of ["tenure_worker", "tenure_api"]) yield* makeRole(sql, group, "NOLOGIN")
      const login = `LOGIN PASSWORD '${password}'`
      yield* makeRole(sql, "tenure_test_owner", login)
      yield* makeRole(sql, "tenure_test_worker", `${login} IN ROLE tenure_worker`)
      yield* makeRole(sql, "tenure_test_api", `${login} IN ROLE tenure_api`)
      yield* sql.unsafe(`CREATE DATABASE ${template} OWNER tenure_test_owner`)
    })
  )
  yield* Effect.addFinalizer(() =>
    administer((sql) => sql.unsafe(`DROP DATABASE ${template} WITH (FORCE)`))
  )
  yield* Migrations.run().pipe(
    Effect.provideService(Database, endpointOf("tenure_test_owner", template))
  )
})

const makeRole = (
  sql: Parameters<Parameters<typeof administer>[0]>[0],
  name: string,
  attributes: string
) =>
  Effect.gen(function* () {
    const found = yield* sql`SELECT FROM pg_roles WHERE rolname = ${name}`
    if (found.length === 0) yield* sql.unsafe(`CREATE ROLE ${name} ${attributes}`)
  })

const passwordOf = (url: string): string => {
  const parsed = parseEndpoint({ url: Redacted.make(url) })
  const password = parsed._tag === "Success" ? parsed.success.password : undefined
  return password === undefined ? "tenure" : Redacted.value(password)
}
