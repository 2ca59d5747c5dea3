/**
 * Goal: the thread runs wherever the package does or says why not, brings nothing of the process along,
 * and kills the process whatever the main thread hangs in, also where it is process 1.
 * Method: threads in this process that judge nobody; processes with a thread and nothing else.
 * Covers K-042, K-043, K-208, P-15, P-20, rows 24 and 25.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect } from "effect"
import { spawn, spawnSync } from "node:child_process"
import { fileURLToPath } from "node:url"
import { start } from "../../src/watchdog/WatchdogThread.ts"

const ours = new URL("../../src/watchdog/thread.js", import.meta.url)
const beside = (name: string) => new URL(name, import.meta.url)

const refusalOf = (source: () => URL) =>
  Effect.flatMap(start(source), (thread) => thread.ready).pipe(Effect.scoped, Effect.flip)

describe("the watchdog's thread", () => {
  it.live("is up, beats, and ends with its scope, whatever it was about to do", () =>
    Effect.gen(function* () {
      const thread = yield* start(() => ours)
      yield* thread.ready
      const beat = thread.beatUnsafe()
      thread.armUnsafe({
        executorId: "nobody",
        watchdogNanos: 1_000_000_000n,
        pollNanos: 10_000_000n,
        forcedExitNanos: 3_600_000_000_000n,
        abandonAfterNanos: 0n
      })
      while (thread.beatUnsafe() < beat + 3) yield* Effect.sleep("5 millis")
      thread.firingUnsafe({ reason: "stubborn", subject: "work" })
    }).pipe(Effect.scoped)
  )

  it.live("refuses to start, with a sentence, where its file is missing or broken", () =>
    Effect.gen(function* () {
      const missing = yield* refusalOf(() => beside("bundle/thread.js"))
      assert.match(missing.message, /the watchdog's thread cannot run \(.*there is no file .*\);/)
      assert.include(missing.message, "leave the package tenure out of the bundle")
      const nowhere = yield* refusalOf(() => new URL("./thread.js", undefined))
      assert.include(nowhere.message, "the watchdog's thread cannot run")
      const broken = yield* refusalOf(() => beside("brokenThread.js"))
      assert.include(broken.message, "this thread does not start")
    })
  )

  it.live("gets neither the environment nor the loaders of its process", () =>
    Effect.gen(function* () {
      const refused = yield* refusalOf(() => beside("curiousThread.js"))
      assert.include(refused.message, `env {}, execArgv []`)
    })
  )
})

interface Killed {
  readonly code: number | null
  readonly signal: NodeJS.Signals | null
  readonly stderr: string
  readonly stdout: string
}

/** A process that blocks in the given way under a watchdog of 300 ms; its errors are read at the end. */
const blocked = (how: string, program = process.execPath, args: ReadonlyArray<string> = []) =>
  Effect.callback<Killed>((resume) => {
    const main = fileURLToPath(beside("blockedMain.ts"))
    const child = spawn(program, [...args, main, how], { stdio: ["ignore", "pipe", "pipe"] })
    let stdout = ""
    let stderr = ""
    child.stdout.on("data", (text: Buffer) => (stdout += text.toString()))
    child.on("exit", () => child.stderr.on("data", (text: Buffer) => (stderr += text.toString())))
    child.on("close", (code, signal) => resume(Effect.succeed({ code, signal, stdout, stderr })))
    return Effect.sync(() => child.kill("SIGKILL"))
  }).pipe(Effect.timeout("15 seconds"))

const entries = (stderr: string) =>
  stderr
    .split("\n")
    .filter((line) => line.startsWith("{"))
    .map((line) => JSON.parse(line) as { message: string; annotations: object })

describe("a process whose main thread is blocked", () => {
  it.live("is killed, and has said who it was and why, and nothing else", () =>
    Effect.gen(function* () {
      const killed = yield* blocked("spin")
      assert.deepInclude(killed, { code: null, signal: "SIGKILL" })
      const annotations = { executorId: "an-executor", reason: "eventLoop" }
      assert.deepStrictEqual(
        entries(killed.stderr).map(({ annotations, message }) => ({ message, annotations })),
        [
          { message: "executor_watchdog", annotations },
          { message: "executor_watchdog: killed, the lease is left to expire", annotations }
        ]
      )
    })
  )

  it.live("is killed when standard error is a pipe that is full", () =>
    Effect.gen(function* () {
      const killed = yield* blocked("fill")
      assert.strictEqual(killed.stdout, "full: EAGAIN\n")
      assert.deepInclude(killed, { code: null, signal: "SIGKILL" })
    })
  )

  // The kernel lets no signal of its own making kill process 1.
  const asProcessOne = ["--pid", "--fork", process.execPath]
  const canBeOne = spawnSync("unshare", [...asProcessOne, "--version"]).status === 0
  it.runIf(canBeOne)("is killed as process 1 of a container, too", () =>
    Effect.runPromise(
      Effect.gen(function* () {
        const killed = yield* blocked("spin", "unshare", asProcessOne)
        assert.strictEqual(killed.stdout, "pid 1\n")
        assert.strictEqual(killed.signal, "SIGTRAP")
        assert.strictEqual(entries(killed.stderr).length, 2)
      })
    )
  )
})
