/**
 * The files of an embedded server: made once, complete or not at all.
 *
 * A cluster is built under a name of its own and then moved into place. The move is atomic and fails
 * when somebody else's is there already, so simultaneous first starts need no lock: one wins, the
 * others throw theirs away. A crash in between leaves a `new-*` folder, which nothing takes for a
 * cluster, and which the next start removes.
 *
 * Only 127.0.0.1 is listened on, and only with a password: other people work on the same machine.
 */
import { Effect } from "effect"
import { execFile } from "node:child_process"
import { randomBytes, randomUUID } from "node:crypto"
import {
  chownSync,
  existsSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  renameSync,
  rmSync,
  writeFileSync
} from "node:fs"
import { join } from "node:path"
import { type Binaries, refuseEmbedded } from "./EmbeddedBinaries.ts"
import type { ServerUser } from "./EmbeddedUser.ts"
import type { StartupRefused } from "./StartupRefused.ts"

/** The role everything runs as, and its database. The superuser `postgres` has the same password. */
export const role = "tenure"
export const databaseName = "tenure"

export interface Cluster {
  readonly binaries: Binaries
  readonly user: ServerUser
  /** The data directory of the server. */
  readonly data: string
  readonly log: string
  /** Off for tests: a crash of the machine may then lose everything. */
  readonly durable: boolean
  readonly parameters: Readonly<Record<string, string>>
}

/** Makes the data directory unless it is there. Returns the password. */
export const initialise = Effect.fnUntraced(function* (
  cluster: Cluster,
  directory: string
): Effect.fn.Return<string, StartupRefused> {
  if (!existsSync(join(cluster.data, "PG_VERSION"))) yield* build(cluster, directory)
  return yield* Effect.try({
    try: () => readFileSync(passwordFile(cluster.data), "utf8").trim(),
    catch: () =>
      refuseEmbedded(
        `${cluster.data} holds a PostgreSQL that is not ours, or one of another user; choose ` +
          `another directory`
      )
  })
})

const build = Effect.fnUntraced(function* (
  cluster: Cluster,
  directory: string
): Effect.fn.Return<void, StartupRefused> {
  yield* Effect.sync(() => removeUnfinished(directory))
  const data = join(directory, `new-${process.pid}-${randomUUID()}`)
  const password = randomBytes(24).toString("hex")
  yield* Effect.gen(function* () {
    yield* Effect.sync(() => {
      mkdirSync(data, { mode: 0o700 })
      chownSync(data, cluster.user.uid, cluster.user.gid)
    })
    yield* execute(
      cluster.user,
      cluster.binaries.initdb,
      [
        "-D",
        data,
        "-U",
        "postgres",
        "--encoding=UTF8",
        "--no-locale",
        // No password file: the server's user could not read one of ours. The roles get theirs below.
        "--auth-local=reject",
        "--auth-host=scram-sha-256",
        ...(cluster.durable ? [] : ["--no-sync"])
      ],
      ""
    )
    yield* execute(
      cluster.user,
      cluster.binaries.postgres,
      ["--single", ...(cluster.durable ? [] : ["-F"]), "-D", data, "postgres"],
      firstStatements(password)
    )
    yield* Effect.sync(() => {
      writeFileSync(passwordFile(data), password, { mode: 0o600 })
      moveIntoPlace(data, cluster.data)
    })
  }).pipe(Effect.ensuring(Effect.sync(() => rmSync(data, { recursive: true, force: true }))))
})

export const passwordFile = (data: string): string => join(data, "tenure.password")

// Single-user mode takes one statement per line. The two group roles exist from the start, so that
// `tenure` need not be allowed to create roles and is no member of them: what it does without an
// executor's id is then not mistaken for a worker that forgot it.
const firstStatements = (password: string): string =>
  [
    `ALTER ROLE postgres PASSWORD '${password}'`,
    `CREATE ROLE ${role} LOGIN PASSWORD '${password}'`,
    "CREATE ROLE tenure_worker NOLOGIN",
    "CREATE ROLE tenure_api NOLOGIN",
    `CREATE DATABASE ${databaseName} OWNER ${role}`,
    ""
  ].join("\n")

const removeUnfinished = (directory: string): void => {
  for (const entry of readdirSync(directory)) {
    const maker = /^new-(\d+)-/.exec(entry)?.[1]
    if (maker === undefined || isAlive(Number(maker))) continue
    rmSync(join(directory, entry), { recursive: true, force: true })
  }
}

const moveIntoPlace = (from: string, to: string): void => {
  try {
    renameSync(from, to)
  } catch (error) {
    // Somebody else's cluster is there: ours is thrown away.
    if (!existsSync(join(to, "PG_VERSION"))) throw error
  }
}

const execute = (
  user: ServerUser,
  program: string,
  parameters: ReadonlyArray<string>,
  input: string
): Effect.Effect<void, StartupRefused> =>
  Effect.callback((resume) => {
    const [command, all] = user.command(program, parameters)
    const child = execFile(
      command,
      [...all],
      { ...user.spawnAs, cwd: "/", env: environment() },
      (error, _stdout, stderr) => {
        // Single-user mode reports a failed statement and still ends well.
        const failed = /^.*(?:ERROR|FATAL|PANIC):.*$/m.exec(stderr)?.[0]
        if (error === null && failed === undefined) return resume(Effect.void)
        const why = failed ?? (stderr.trim() === "" ? error?.message : stderr.trim())
        resume(Effect.fail(refuseEmbedded(`the data directory could not be made: ${why}`)))
      }
    )
    child.stdin?.on("error", () => {})
    child.stdin?.end(input)
    return Effect.sync(() => child.kill("SIGKILL"))
  })

/** Nothing of ours that PostgreSQL reads (PGPORT, PGDATA, LANG) reaches it. */
export const environment = (): NodeJS.ProcessEnv => ({
  PATH: process.env["PATH"] ?? "/usr/bin:/bin",
  LC_ALL: "C",
  TZ: "UTC"
})

export const isAlive = (pid: number): boolean => {
  try {
    process.kill(pid, 0)
    return true
  } catch (error) {
    return error instanceof Error && "code" in error && error.code === "EPERM"
  }
}
