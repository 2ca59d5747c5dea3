/**
 * Starts a server on a cluster and stops it again.
 *
 *   stopped --launch--> starting --ready--> running --SIGINT--> stopping --> stopped
 *
 * The server stands in a session of its own: a terminal's Ctrl-C reaches the application first, which
 * may then still write. PostgreSQL's own `postmaster.pid` says who runs: it holds process, port and
 * state, a second server on the same files refuses to start, and a dead one's is taken over.
 */
import { Effect } from "effect"
import { spawn } from "node:child_process"
import { closeSync, openSync, readFileSync, statSync, unlinkSync, writeFileSync } from "node:fs"
import { createServer } from "node:net"
import { join } from "node:path"
import { refuseEmbedded } from "./EmbeddedBinaries.ts"
import { type Cluster, environment, isAlive } from "./EmbeddedCluster.ts"
import type { StartupRefused } from "./StartupRefused.ts"

export interface Running {
  readonly pid: number
  readonly port: number
  readonly ready: boolean
}

/** Who serves these files, by `postmaster.pid`. A file whose process is gone counts as nobody. */
export const running = (data: string): Running | undefined => {
  const file = join(data, "postmaster.pid")
  const text = readIfThere(file)
  if (text === undefined) return undefined
  const lines = text.split("\n")
  const pid = Number(lines[0])
  if (!Number.isInteger(pid) || pid <= 0) return undefined
  if (!isPostgres(pid)) {
    // The number may belong to another program by now, in a container even to ourselves, and the
    // server would then refuse to start. Removed only while it still says the same.
    if (isAlive(pid) && readIfThere(file) === text) unlinkSync(file)
    return undefined
  }
  return { pid, port: Number(lines[3] ?? 0), ready: lines[7]?.trim() === "ready" }
}

export interface Launched {
  readonly hasExited: () => boolean
  /** Ends a server that was launched to die with us, and waits for it. */
  readonly end: Effect.Effect<void>
}

/**
 * `bound` ties the server and the folder to this process: a shell between us waits for the end of a
 * pipe that only we hold open, so that even SIGKILL leaves neither behind.
 */
export const launch = (
  cluster: Cluster,
  port: number,
  bound: string | undefined
): Effect.Effect<Launched> =>
  Effect.sync(() => {
    const server = [cluster.binaries.postgres, ...parameters(cluster, port)]
    const [program, ...rest] =
      bound === undefined ? server : ["/bin/sh", "-c", boundScript, bound, ...server]
    const [command, all] = cluster.user.command(program ?? "", rest)
    const log = openSync(cluster.log, logIsLarge(cluster.log) ? "w" : "a")
    const child = spawn(command, [...all], {
      ...cluster.user.spawnAs,
      cwd: "/",
      env: environment(),
      detached: true,
      stdio: [bound === undefined ? "ignore" : "pipe", log, log]
    })
    closeSync(log)
    let exited = false
    const observers: Array<() => void> = []
    const onExit = () => {
      exited = true
      for (const observer of observers.splice(0)) observer()
    }
    child.on("error", onExit)
    child.on("exit", onExit)
    child.stdin?.on("error", () => {})
    // Neither the child nor the pipe keeps this process alive.
    child.unref()
    return {
      hasExited: () => exited,
      end: Effect.callback<void>((resume) => {
        if (exited) return resume(Effect.void)
        child.ref()
        observers.push(() => resume(Effect.void))
        child.stdin?.end()
      })
    }
  })

// $0 is the folder, the rest the server. The descriptor is closed for the server itself, or it would
// hold the pipe open together with us. The folder goes only when the pipe has ended: a server that did
// not start leaves it for the next try.
const boundScript = `
exec 3<&0
"$@" 3<&- </dev/null & server=$!
{ read -r _ <&3; kill -INT "$server"; exit 0; } 2>/dev/null & watcher=$!
exec 3<&-
wait "$server"
kill "$watcher" 2>/dev/null
wait "$watcher" && rm -rf "$0"
`

const parameters = (cluster: Cluster, port: number): ReadonlyArray<string> => [
  "-D",
  cluster.data,
  "-p",
  String(port),
  "-c",
  "listen_addresses=127.0.0.1",
  "-c",
  "unix_socket_directories=",
  "-c",
  "max_connections=200",
  "-c",
  "log_checkpoints=off",
  ...(cluster.durable ? [] : ["-c", "fsync=off", "-c", "full_page_writes=off"]),
  ...Object.entries(cluster.parameters).flatMap(([name, value]) => ["-c", `${name}=${value}`])
]

/** Until the server accepts connections: its port, or `undefined` when it went away instead. */
export const awaitReady = Effect.fnUntraced(function* (
  cluster: Cluster,
  launched: Launched | undefined
): Effect.fn.Return<Running | undefined, StartupRefused> {
  // Two minutes: after a crash the server first repeats what its log holds.
  for (let turn = 0; turn < 6_000; turn++) {
    const server = running(cluster.data)
    if (server?.ready === true) return server
    if (server === undefined && (launched === undefined || launched.hasExited())) return undefined
    yield* Effect.sleep("20 millis")
  }
  return yield* refuseEmbedded(`PostgreSQL did not get ready; see ${cluster.log}`)
})

/** A fast shutdown: open transactions are rolled back, everything committed is on disk. */
export const stop = Effect.fnUntraced(function* (data: string): Effect.fn.Return<void> {
  const server = running(data)
  if (server === undefined) return
  yield* Effect.sync(() => signal(server.pid, "SIGINT"))
  for (let turn = 0; turn < 500; turn++) {
    // The file goes last. The process may stay for a while as one whose end nobody has read.
    if (running(data)?.pid !== server.pid) return
    yield* Effect.sleep("20 millis")
  }
  yield* Effect.sync(() => signal(server.pid, "SIGQUIT"))
})

/** The port of the last time when it is free, so that addresses people have noted stay good. */
export const choosePort = Effect.fnUntraced(function* (data: string): Effect.fn.Return<number> {
  const file = join(data, "tenure.port")
  const before = Number(readIfThere(file) ?? 0)
  const port = (yield* listenOnce(before)) ?? (yield* listenOnce(0)) ?? 0
  yield* Effect.sync(() => writeFileSync(file, String(port)))
  return port
})

const listenOnce = (port: number): Effect.Effect<number | undefined> =>
  Effect.callback((resume) => {
    const server = createServer()
    server.on("error", () => resume(Effect.undefined))
    server.listen(port, "127.0.0.1", () => {
      const address = server.address()
      server.close(() =>
        resume(
          Effect.succeed(typeof address === "object" && address !== null ? address.port : undefined)
        )
      )
    })
  })

export const lastLines = (log: string): string =>
  (readIfThere(log) ?? "").trimEnd().split("\n").slice(-3).join(" | ")

const logIsLarge = (log: string): boolean =>
  (statSync(log, { throwIfNoEntry: false })?.size ?? 0) > 10_000_000

const readIfThere = (file: string): string | undefined => {
  try {
    return readFileSync(file, "utf8")
  } catch {
    return undefined
  }
}

const signal = (pid: number, name: NodeJS.Signals): void => {
  try {
    process.kill(pid, name)
  } catch {
    // It has ended by itself.
  }
}

// Where there is no /proc, being alive has to do.
const isPostgres = (pid: number): boolean => {
  if (!isAlive(pid)) return false
  if (process.platform !== "linux") return true
  const status = readIfThere(`/proc/${pid}/stat`)
  return status !== undefined && /^\d+ \(postgres\) [^ZX]/.test(status)
}
