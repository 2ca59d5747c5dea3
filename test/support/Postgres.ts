/**
 * Real databases for tests. Each is a copy of one migrated template, made in some 150 ms and dropped
 * when the scope closes, whoever is still connected to it. Tests log in as the roles that a deployment
 * has: for a superuser every guard is open.
 */
import { PgClient } from "@effect/sql-pg"
import { Clock, Effect, Layer, Redacted, type Scope } from "effect"
import * as Reactivity from "effect/reactivity/Reactivity"
import type { SqlError } from "effect/sql/SqlError"
import { randomBytes } from "node:crypto"
import { Database, type Endpoint, parseEndpoint } from "../../src/database/Database.ts"
import * as Pool from "../../src/database/Pool.ts"
import { fullJitter } from "../../src/database/Retry.ts"
import { classify } from "../../src/database/SqlState.ts"
import * as Watchdog from "../../src/testing/Watchdog.ts"

export type Role = "owner" | "worker" | "api" | "superuser"

export interface FreshDatabase extends Readonly<Record<Role, Endpoint>> {
  readonly name: string
  /** As the owner of the schema, for psql and child processes. */
  readonly url: string
  readonly urlOf: (role: Role) => string
}

/** A copy of the migrated template. */
export const freshDatabase: Effect.Effect<FreshDatabase, never, Scope.Scope> = Effect.suspend(() =>
  makeDatabase(required("TENURE_TEST_TEMPLATE"))
)

/** A database without any table of ours, for tests of the migrations themselves. */
export const emptyDatabase: Effect.Effect<FreshDatabase, never, Scope.Scope> = Effect.suspend(() =>
  makeDatabase("template0")
)

/** A copy of its own for each build of the layer, seen as `role`. */
export const layerDatabase = (role: Role = "worker"): Layer.Layer<Database> =>
  Layer.unwrap(Effect.map(freshDatabase, (database) => layerOf(database[role])))

/** Without the watchdog's thread: it would kill this process, and all the tests in it. */
export const layerOf = (database: Endpoint): Layer.Layer<Database> =>
  Layer.merge(Layer.succeed(Database, database), Watchdog.layerNone)

/** A pool with the limits a test wants: nothing may hang for longer than a test. */
export const connect = (
  database: Endpoint,
  options: Partial<Omit<Pool.Options, "database">> = {}
): Effect.Effect<PgClient.PgClient, never, Scope.Scope> =>
  Pool.make({
    applicationName: "tenure test",
    connectionsMax: 4,
    statementTimeout: "10 seconds",
    lockTimeout: "10 seconds",
    idleInTransactionTimeout: "15 seconds",
    ...options,
    database
  }).pipe(Effect.orDie)

/** Runs something as the superuser, outside every test's database. */
export const administer = <A>(
  use: (sql: PgClient.PgClient) => Effect.Effect<A, SqlError>
): Effect.Effect<A> =>
  PgClient.makeClient(endpointOf("superuser", "postgres").config).pipe(
    Effect.provideServiceEffect(Reactivity.Reactivity, Reactivity.make),
    Effect.flatMap(use),
    // A database that was just left counts as in use until its last session has ended.
    Effect.retry({
      schedule: fullJitter("20 millis", "200 millis"),
      times: 50,
      while: (error) => classify(error) === "retryTransaction"
    }),
    Effect.scoped,
    Effect.orDie,
    // Under a test's clock its waits would never end.
    Effect.provideService(Clock.Clock, Clock.Clock.defaultValue())
  )

const logins: Readonly<Record<Role, string>> = {
  owner: "tenure_test_owner",
  worker: "tenure_test_worker",
  api: "tenure_test_api",
  superuser: "superuser"
}

const makeDatabase = Effect.fnUntraced(function* (
  template: string
): Effect.fn.Return<FreshDatabase, never, Scope.Scope> {
  const name = `tenure_test_${randomBytes(6).toString("hex")}`
  yield* Effect.acquireRelease(
    administer((sql) =>
      sql.unsafe(`CREATE DATABASE ${name} TEMPLATE ${template} OWNER tenure_test_owner`)
    ),
    () => administer((sql) => sql.unsafe(`DROP DATABASE ${name} WITH (FORCE)`))
  )
  const urlOf = (role: Role): string => urlFor(logins[role], name)
  return {
    name,
    url: urlOf("owner"),
    urlOf,
    owner: endpointOf(logins.owner, name),
    worker: endpointOf(logins.worker, name),
    api: endpointOf(logins.api, name),
    superuser: endpointOf(logins.superuser, name)
  }
})

/** `superuser` stands for the role that TENURE_TEST_URL names. */
export const endpointOf = (username: string, database: string): Endpoint => {
  const parsed = parseEndpoint({ url: Redacted.make(urlFor(username, database)) })
  if (parsed._tag === "Failure") throw parsed.failure
  return parsed.success
}

const urlFor = (username: string, database: string): string => {
  const url = new URL(required("TENURE_TEST_URL"))
  if (username !== "superuser") {
    url.username = username
    if (url.password === "") url.password = "tenure"
  }
  url.pathname = `/${database}`
  return url.href
}

const required = (name: string): string => {
  const value = process.env[name]
  if (value === undefined)
    throw new Error(`${name} is not set: run vitest with test/vitest.config.ts`)
  return value
}
