/**
 * Goal: what a whole server can have wrong is found and mended by what is printed, and the command tells
 * scripts by its exit code.
 * Method: a server of the test's own that keeps what is committed, changed and started again; the command
 * as a process; a standby that was taken away.
 * Covers P-12, P-33 (slots), fault row 15, K-216.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect, Exit, Scope } from "effect"
import { appendFileSync, chmodSync, cpSync, mkdtempSync, rmSync, writeFileSync } from "node:fs"
import { tmpdir } from "node:os"
import { join } from "node:path"
import { Database, type Endpoint } from "../../src/database/Database.ts"
import { databaseName, role } from "../../src/database/EmbeddedCluster.ts"
import { endpoint, type Server, start } from "../../src/database/EmbeddedPostgres.ts"
import * as Migrations from "../../src/database/Migrations.ts"
import { connect } from "../support/Postgres.ts"
import type { Finding } from "../../src/main/commands/Finding.ts"
import { bin, start as startProcess } from "./Child.ts"
import { diagnose, healthy, only, troubles } from "./DoctorScene.ts"

const temporaryFolder = Effect.acquireRelease(
  Effect.sync(() => mkdtempSync(join(tmpdir(), "tenure-doctor-"))),
  (made) => Effect.sync(() => rmSync(made, { recursive: true, force: true }))
)

/** A server that is stopped when the effect ends. */
const whileRunning = <A, E>(
  directory: string,
  use: (server: Server) => Effect.Effect<A, E, Scope.Scope>
) => Effect.scoped(Effect.flatMap(Effect.orDie(start({ directory })), use))

const at = (server: Server, username: string): Endpoint => endpoint(server, username, databaseName)

const superuser = (server: Server) => connect(at(server, "postgres"), { connectionsMax: 1 })

/** The only trouble of a worker's login, mended as printed. */
const mended = Effect.fnUntraced(function* (
  server: Server,
  level: "warning" | "problem",
  code: string
) {
  const sql = yield* superuser(server)
  const found = yield* only(at(server, "worker"), level, code)
  for (const statement of found.sql ?? assert.fail("nothing to run")) yield* sql.unsafe(statement)
  return found
})

const command = (server: Server, ...args: ReadonlyArray<string>) =>
  Effect.gen(function* () {
    const url = `postgresql://worker:${server.password}@127.0.0.1:${server.port}/${databaseName}`
    const child = yield* startProcess([bin, "doctor", "--url", url, ...args])
    const { code } = yield* child.end
    return { code, stdout: child.stdout() }
  })

const set = Effect.fnUntraced(function* (server: Server, name: string, value: string) {
  const sql = yield* superuser(server)
  yield* sql.unsafe(`ALTER SYSTEM SET ${name} = ${value}`)
  yield* sql`SELECT pg_reload_conf()`
  yield* untilSet(server, name, value)
})

/** Until the server's processes have read a reloaded setting. */
const untilSet = (server: Server, name: string, value: string) =>
  Effect.gen(function* () {
    const sql = yield* superuser(server)
    for (;;) {
      const [row] = yield* sql.unsafe<Record<string, string>>(`SHOW ${name}`)
      if (row?.[name] === value) return
      yield* Effect.sleep("10 millis")
    }
  }).pipe(Effect.scoped)

describe("tenure doctor on a server", () => {
  it.live(
    "exits with 0 or 1, and each setting of the server is mended as printed",
    () =>
      Effect.gen(function* () {
        const directory = yield* temporaryFolder
        yield* whileRunning(
          directory,
          Effect.fnUntraced(function* (server) {
            const sql = yield* superuser(server)
            for (const login of ["worker", "another"]) {
              yield* sql.unsafe(
                `CREATE ROLE ${login} LOGIN PASSWORD '${server.password}' IN ROLE tenure_worker`
              )
            }
            yield* Migrations.run().pipe(Effect.provideService(Database, at(server, role)))
            const well = yield* command(server)
            assert.strictEqual(well.code, 0, well.stdout)
            assert.notMatch(well.stdout, /^(problem|warning)/m)

            // Not by `only`: the servers of all other tests have this one on purpose.
            yield* set(server, "fsync", "off")
            const ill = yield* command(server, "--json")
            assert.strictEqual(ill.code, 1)
            const { findings } = JSON.parse(ill.stdout) as { findings: ReadonlyArray<Finding> }
            const found = findings.filter(({ level }) => level === "problem")
            assert.deepStrictEqual(
              found.map(({ code }) => code),
              ["server.fsync"]
            )
            for (const statement of found[0]?.sql ?? []) yield* sql.unsafe(statement)
            yield* untilSet(server, "fsync", "on")
            assert.strictEqual((yield* command(server)).code, 0)

            for (const name of ["autovacuum", "track_counts"]) {
              yield* set(server, name, "off")
              yield* mended(server, "problem", "server.autovacuum")
              yield* untilSet(server, name, "on")
              yield* healthy(at(server, "worker"))
            }

            // A worker of another login, whose sessions this one could not end.
            const other = yield* connect(at(server, "another"), {
              applicationName: "tenure work x"
            })
            yield* other`SELECT 1`
            assert.match(
              (yield* mended(server, "warning", "grant.signal")).text,
              /log in as another too/
            )
            yield* healthy(at(server, "worker"))

            yield* sql`DROP OWNED BY tenure_api`
            yield* sql`DROP ROLE tenure_api`
            yield* mended(server, "warning", "role.noApiRole")
            yield* healthy(at(server, "worker"))

            yield* sql`
              INSERT INTO tenure.executor (id, application_name, application_version, registered_at, heartbeat_at, expires_at)
              SELECT gen_random_uuid(), 'shop', 'v1', t, t, t + interval '75 s'
                FROM tenure.clock() t, generate_series(1, 10)`
            const short = yield* mended(server, "warning", "connections.server")
            assert.match(
              short.text,
              /leaves 197 connections, and 10 executors of up to 20 may want 200/
            )
            // The test's server has its number on the command line, which wins; the file is right.
            assert.deepStrictEqual(
              yield* sql`SELECT setting FROM pg_file_settings WHERE name = 'max_connections' AND sourcefile LIKE '%auto.conf'`,
              [{ setting: "223" }]
            )
            yield* sql`DELETE FROM tenure.executor`
            yield* sql`ALTER SYSTEM SET max_prepared_transactions = 2`
          })
        )
        yield* whileRunning(
          directory,
          Effect.fnUntraced(function* (server) {
            const sql = yield* superuser(server)
            yield* only(at(server, "worker"), "problem", "prepared.allowed")
            yield* sql`BEGIN`
            yield* sql`CREATE TABLE left_behind (id int)`
            yield* sql`PREPARE TRANSACTION 'it''s'`
            const found = troubles((yield* diagnose(at(server, "worker"))).findings)
            assert.deepStrictEqual(
              found.map(({ code, level }) => [level, code]),
              [
                ["problem", "prepared.open"],
                ["problem", "prepared.allowed"]
              ]
            )
            for (const statement of found.flatMap((one) => one.sql ?? []))
              yield* sql.unsafe(statement)
          })
        )
        yield* whileRunning(directory, (server) => healthy(at(server, "worker")))
      }),
    300_000
  )

  it.live(
    "finds a replication slot whose standby is gone",
    () =>
      Effect.gen(function* () {
        const [directory, copy] = [yield* temporaryFolder, yield* temporaryFolder]
        const { password } = yield* whileRunning(
          directory,
          Effect.fnUntraced(function* (server) {
            const sql = yield* superuser(server)
            yield* sql.unsafe(
              `CREATE ROLE worker LOGIN PASSWORD '${server.password}' IN ROLE tenure_worker`
            )
            yield* Migrations.run().pipe(Effect.provideService(Database, at(server, role)))
            yield* sql`SELECT slot_name::text FROM pg_create_physical_replication_slot('standby', true)`
            return server
          })
        )
        // Stopped, so a copy of its files is a standby's beginning.
        cpSync(directory, copy, { recursive: true, preserveTimestamps: true })
        chmodSync(join(copy, "data"), 0o700)
        writeFileSync(join(copy, "data", "standby.signal"), "")
        const scope = yield* Scope.fork(yield* Effect.scope)
        const primary = yield* Effect.orDie(Scope.provide(start({ directory }), scope))
        appendFileSync(
          join(copy, "data", "postgresql.auto.conf"),
          `primary_conninfo = 'host=127.0.0.1 port=${primary.port} user=postgres password=${password}'
           primary_slot_name = 'standby'
           hot_standby_feedback = on
           wal_receiver_status_interval = 1\n`
        )
        const sql = yield* superuser(primary)
        yield* whileRunning(copy, () =>
          Effect.gen(function* () {
            for (;;) {
              const held = yield* sql`SELECT FROM pg_replication_slots WHERE xmin IS NOT NULL`
              if (held.length > 0) return
              yield* Effect.sleep("20 millis")
            }
          })
        )
        for (;;) {
          const used = yield* sql`SELECT FROM pg_replication_slots WHERE active`
          if (used.length === 0) break
          yield* Effect.sleep("20 millis")
        }
        const found = yield* mended(primary, "problem", "horizon.slot")
        assert.match(found.text, /replication slot standby is used by nobody and keeps every row/)
        yield* healthy(at(primary, "worker"))
        yield* Scope.close(scope, Exit.void)
      }),
    300_000
  )
})
