/**
 * As whom the embedded server runs. PostgreSQL refuses to run as root, and a development container
 * usually is root.
 *
 *   not root                                              as ourselves
 *   root, the data belong to another user already         as that user
 *   root, `postgres` or `nobody` reaches data and binary  as that user
 *   root, nobody else gets in (a clone under /root)       as ourselves, in a user namespace where our
 *                                                         own number is not zero
 *
 * Every answer is tried out before it is given, by running the server binary in that way.
 */
import { Effect } from "effect"
import { execFileSync } from "node:child_process"
import { chownSync, mkdtempSync, readFileSync, rmSync, statSync } from "node:fs"
import { join } from "node:path"
import { type Binaries, refuseEmbedded } from "./EmbeddedBinaries.ts"
import type { StartupRefused } from "./StartupRefused.ts"

/** A way to start a program, and the owner its files must have. */
export interface ServerUser {
  readonly uid: number
  readonly gid: number
  readonly command: (
    program: string,
    parameters: ReadonlyArray<string>
  ) => readonly [string, ReadonlyArray<string>]
  readonly spawnAs: { readonly uid?: number; readonly gid?: number }
}

/** `data` need not exist; `directory`, which will hold it, must. */
export const choose = (
  binaries: Binaries,
  directory: string,
  data: string
): Effect.Effect<ServerUser, StartupRefused> =>
  Effect.suspend(() => {
    const uid = process.getuid?.() ?? 1
    const owner = ownerOf(data)
    const failures: Array<string> = []
    for (const user of candidates(uid, process.getgid?.() ?? 1, owner)) {
      const failure = tryOut(user, binaries, directory)
      if (failure === undefined) return Effect.succeed(user)
      failures.push(failure)
    }
    return Effect.fail(
      refuseEmbedded(
        `PostgreSQL cannot run here: ${failures.join("; ")}` +
          (uid === 0
            ? "; start the process as another user than root, or choose a directory that the user " +
              "`postgres` can reach"
            : "")
      )
    )
  })

const candidates = (
  uid: number,
  gid: number,
  owner: { readonly uid: number; readonly gid: number } | undefined
): ReadonlyArray<ServerUser> => {
  if (uid !== 0) return [direct(uid, gid)]
  if (owner !== undefined) return [owner.uid === 0 ? namespaced : dropped(owner.uid, owner.gid)]
  return [
    ...["postgres", "nobody"].flatMap((name) => {
      const found = lookUp(name)
      return found === undefined ? [] : [dropped(found.uid, found.gid)]
    }),
    namespaced
  ]
}

const plain = (
  program: string,
  parameters: ReadonlyArray<string>
): readonly [string, ReadonlyArray<string>] => [program, parameters]

const direct = (uid: number, gid: number): ServerUser => ({
  uid,
  gid,
  command: plain,
  spawnAs: {}
})

const dropped = (uid: number, gid: number): ServerUser => ({
  uid,
  gid,
  command: plain,
  spawnAs: { uid, gid }
})

// Files stay ours; only the server sees itself under the other number.
const namespaced: ServerUser = {
  uid: 0,
  gid: 0,
  command: (program, parameters) => [
    "unshare",
    ["--user", "--map-user=1000", "--map-group=1000", program, ...parameters]
  ],
  spawnAs: {}
}

/** Why this user cannot run the server here, or `undefined`. */
const tryOut = (user: ServerUser, binaries: Binaries, directory: string): string | undefined => {
  const trial = mkdtempSync(join(directory, "trial-"))
  try {
    chownSync(trial, user.uid, user.gid)
    const script = 'cd "$1" && : > file && "$2" --version'
    const [program, parameters] = user.command("/bin/sh", [
      "-c",
      script,
      "sh",
      trial,
      binaries.postgres
    ])
    execFileSync(program, parameters, {
      ...user.spawnAs,
      cwd: "/",
      stdio: ["ignore", "ignore", "pipe"],
      timeout: 10_000
    })
    return undefined
  } catch (error) {
    const text = error instanceof Error ? error.message : String(error)
    return text.replaceAll(/\s+/g, " ").trim()
  } finally {
    rmSync(trial, { recursive: true, force: true })
  }
}

const ownerOf = (path: string): { readonly uid: number; readonly gid: number } | undefined => {
  const found = statSync(path, { throwIfNoEntry: false })
  return found === undefined ? undefined : { uid: found.uid, gid: found.gid }
}

const lookUp = (name: string): { readonly uid: number; readonly gid: number } | undefined => {
  try {
    const line = readFileSync("/etc/passwd", "utf8")
      .split("\n")
      .find((entry) => entry.startsWith(`${name}:`))
    const fields = line?.split(":") ?? []
    const uid = Number(fields[2])
    return uid > 0 ? { uid, gid: Number(fields[3]) } : undefined
  } catch {
    return undefined
  }
}
