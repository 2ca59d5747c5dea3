/**
 * PgBouncer itself: the system's, or the one of Debian's packages, unpacked into a temporary folder and
 * installed nowhere. `found` is undefined where neither can be had; what needs it is then not run, and
 * counted as such.
 */
import { Effect, type Scope } from "effect"
import { execFileSync, spawn } from "node:child_process"
import {
  chmodSync,
  existsSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  writeFileSync
} from "node:fs"
import { createServer, type AddressInfo } from "node:net"
import { tmpdir } from "node:os"
import { join } from "node:path"

export interface Found {
  readonly program: string
  /** Where libraries are that came with it. */
  readonly libraries: string | undefined
  readonly version: string
}

export interface Options {
  readonly mode: "transaction" | "session"
  /** Settings of clients that are left out; the others that it does not know are refused. */
  readonly ignored?: ReadonlyArray<string>
  /** Sessions for each user of each database. */
  readonly sessions?: number
}

/** With what it needs and a small system has not. */
const packages = ["pgbouncer", "libc-ares2", "libevent-2.1-7"]

const run = (
  program: string,
  args: ReadonlyArray<string>,
  cwd: string,
  libraries?: string
): string =>
  execFileSync(program, args, {
    cwd,
    encoding: "utf8",
    timeout: 120_000,
    stdio: ["ignore", "pipe", "ignore"],
    env: { ...process.env, ...(libraries === undefined ? {} : { LD_LIBRARY_PATH: libraries }) }
  })

const attempt = <A>(body: () => A): A | undefined => {
  try {
    return body()
  } catch {
    return undefined
  }
}

const versionOf = (program: string, libraries?: string) =>
  attempt(() => run(program, ["--version"], "/", libraries).split("\n")[0])

/** Once for a file of tests, before any of them. */
export const find = (): Found | undefined => {
  const system = versionOf("pgbouncer")
  if (system !== undefined) return { program: "pgbouncer", libraries: undefined, version: system }
  const folder = mkdtempSync(join(tmpdir(), "tenure-pgbouncer-"))
  chmodSync(folder, 0o755)
  process.once("exit", () => rmSync(folder, { recursive: true, force: true }))
  const download = () => run("apt-get", ["download", ...packages], folder)
  // A system that has never looked for packages knows none.
  const done =
    attempt(download) ??
    attempt(() => {
      run("apt-get", ["update"], folder)
      return download()
    })
  if (done === undefined) return undefined
  const program = join(folder, "usr", "sbin", "pgbouncer")
  const libraries = attempt(() => {
    for (const name of readdirSync(folder).filter((one) => one.endsWith(".deb"))) {
      run("dpkg", ["-x", name, folder], folder)
    }
    const parent = join(folder, "usr", "lib")
    return readdirSync(parent, { withFileTypes: true })
      .filter((entry) => entry.isDirectory() && entry.name.endsWith("-linux-gnu"))
      .map((entry) => join(parent, entry.name))
      .join(":")
  })
  if (libraries === undefined || !existsSync(program)) return undefined
  const version = versionOf(program, libraries)
  return version === undefined ? undefined : { program, libraries, version }
}

const freePort = Effect.callback<number>((resume) => {
  const server = createServer()
  server.listen(0, "127.0.0.1", () => {
    const { port } = server.address() as AddressInfo
    server.close(() => resume(Effect.succeed(port)))
  })
})

/** Between its clients and the server of these URLs, for the roles of these URLs. */
export const start = Effect.fnUntraced(function* (
  { libraries, program }: Found,
  urls: ReadonlyArray<string>,
  { ignored = [], mode, sessions = 2 }: Options
): Effect.fn.Return<{ readonly through: (url: string) => string }, never, Scope.Scope> {
  const port = yield* freePort
  const targets = urls.map((url) => new URL(url))
  const folder = yield* Effect.acquireRelease(
    Effect.sync(() => mkdtempSync(join(tmpdir(), "tenure-pgbouncer-"))),
    (made) => Effect.sync(() => rmSync(made, { recursive: true, force: true }))
  )
  const log = join(folder, "log")
  // It refuses to run as root.
  const asNobody = process.getuid?.() === 0 ? { uid: 65_534, gid: 65_534 } : {}
  yield* Effect.sync(() => {
    chmodSync(folder, 0o777)
    writeFileSync(
      join(folder, "users"),
      targets.map(({ password, username }) => `"${username}" "${password}"\n`).join("")
    )
    writeFileSync(
      join(folder, "ini"),
      [
        "[databases]",
        `* = host=${targets[0]?.hostname} port=${targets[0]?.port}`,
        "[pgbouncer]",
        "listen_addr = 127.0.0.1",
        `listen_port = ${port}`,
        "unix_socket_dir =",
        "auth_type = scram-sha-256",
        `auth_file = ${join(folder, "users")}`,
        `pool_mode = ${mode}`,
        `default_pool_size = ${sessions}`,
        `ignore_startup_parameters = ${ignored.join(", ")}`,
        `logfile = ${log}`,
        ""
      ].join("\n")
    )
  })
  yield* Effect.acquireRelease(
    Effect.sync(() =>
      spawn(program, ["-q", join(folder, "ini")], {
        stdio: "ignore",
        ...asNobody,
        env: { ...process.env, ...(libraries === undefined ? {} : { LD_LIBRARY_PATH: libraries }) }
      })
    ),
    (child) =>
      Effect.callback<void>((resume) => {
        if (child.exitCode !== null || child.signalCode !== null) return resume(Effect.void)
        child.once("exit", () => resume(Effect.void))
        child.kill("SIGKILL")
      })
  )
  yield* Effect.suspend(() =>
    existsSync(log) && readFileSync(log, "utf8").includes("process up")
      ? Effect.void
      : Effect.fail("not up yet")
  ).pipe(
    Effect.retry({ times: 500, while: () => Effect.as(Effect.sleep("20 millis"), true) }),
    Effect.orDie
  )
  return {
    through: (url) => {
      const redirected = new URL(url)
      redirected.hostname = "127.0.0.1"
      redirected.port = String(port)
      return redirected.href
    }
  }
})
