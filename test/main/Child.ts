/** Starts a process, and lets a test wait for a line it prints and for its end. */
import { Deferred, Duration, Effect, type Scope } from "effect"
import { spawn } from "node:child_process"
import { fileURLToPath } from "node:url"
import type { Settings } from "../../src/executor/Settings.ts"

export interface Plan {
  readonly url: string
  readonly handler?: "quick" | "slow" | "endless" | "deaf"
  readonly misfortune?: "rejection" | "exception" | "drain" | "failure" | "hungFinalizer"
  readonly settings?: Partial<Settings>
}

export interface Child {
  readonly kill: (signal: NodeJS.Signals) => Effect.Effect<void>
  /** The rest of the first line that starts so. Dies when the process ends without it. */
  readonly line: (start: string) => Effect.Effect<string>
  readonly end: Effect.Effect<{ readonly code: number | null; readonly millis: number }>
  readonly stdout: () => string
  readonly stderr: () => string
}

export const worker = (plan: Plan): Effect.Effect<Child, never, Scope.Scope> =>
  start([fileURLToPath(new URL("workerMain.ts", import.meta.url)), JSON.stringify(plan)])

export const bin = fileURLToPath(new URL("../../src/main/bin.js", import.meta.url))

/** Killed at the end of the scope if it is still there. */
export const start = (
  args: ReadonlyArray<string>,
  options: {
    readonly cwd?: string | undefined
    readonly env?: Readonly<Record<string, string>> | undefined
    readonly program?: string | undefined
  } = {}
): Effect.Effect<Child, never, Scope.Scope> =>
  Effect.map(
    Effect.acquireRelease(
      Effect.sync(() => {
        const { DATABASE_URL: _, ...env } = process.env
        const child = spawn(options.program ?? process.execPath, args, {
          cwd: options.cwd,
          env: { ...env, ...options.env },
          stdio: ["ignore", "pipe", "pipe"]
        })
        const output = { stdout: "", stderr: "" }
        const lookers = new Set<() => void>()
        const ended = Deferred.makeUnsafe<number | null>()
        for (const name of ["stdout", "stderr"] as const) {
          child[name].setEncoding("utf8").on("data", (text: string) => {
            output[name] += text
            for (const look of lookers) look()
          })
        }
        child.on("close", (code) => {
          Deferred.doneUnsafe(ended, Effect.succeed(code))
          for (const look of lookers) look()
        })
        return { child, output, lookers, ended }
      }),
      ({ child, ended }) =>
        Effect.andThen(
          Effect.sync(() => child.kill("SIGKILL")),
          Deferred.await(ended)
        )
    ),
    ({ child, output, lookers, ended }): Child => ({
      kill: (signal) => Effect.sync(() => void child.kill(signal)),
      line: (start) =>
        Effect.callback<string>((resume) => {
          const look = () => {
            const found = output.stdout.split("\n").find((line) => line.startsWith(start))
            if (found !== undefined) {
              lookers.delete(look)
              resume(Effect.succeed(found.slice(start.length).trim()))
            } else if (child.exitCode !== null) {
              lookers.delete(look)
              resume(Effect.die(new Error(`it ended without "${start}":\n${all(output)}`)))
            }
          }
          lookers.add(look)
          look()
        }),
      end: Effect.map(Effect.timed(Deferred.await(ended)), ([took, code]) => ({
        code,
        millis: Duration.toMillis(took)
      })),
      stdout: () => output.stdout,
      stderr: () => output.stderr
    })
  )

const all = (output: { readonly stdout: string; readonly stderr: string }) =>
  `${output.stdout}\n${output.stderr}`
