/** The real command, as a person starts it, in a folder of its own. */
import { Effect, type Scope } from "effect"
import { spawn } from "node:child_process"
import { chmodSync, mkdirSync, mkdtempSync, rmSync, symlinkSync, writeFileSync } from "node:fs"
import { tmpdir } from "node:os"
import { join } from "node:path"
import { fileURLToPath } from "node:url"
import { execFileSync } from "node:child_process"

const script = fileURLToPath(new URL("../../src/main/bin.js", import.meta.url))

export interface Run {
  readonly pid: number
  /** All that was said so far. */
  readonly said: () => string
  readonly untilItSays: (pattern: RegExp) => Effect.Effect<void>
  readonly signal: (name: NodeJS.Signals) => Effect.Effect<void>
  readonly ended: Effect.Effect<{ readonly exitCode: number | null; readonly output: string }>
}

/** Killed with the scope if it has not ended by then. */
export const demo = (
  directory: string,
  parameters: ReadonlyArray<string>,
  environment: NodeJS.ProcessEnv = {}
): Effect.Effect<Run, never, Scope.Scope> =>
  Effect.acquireRelease(
    Effect.sync(() => {
      const { CI: _ci, DATABASE_URL: _url, ...inherited } = process.env
      const child = spawn(process.execPath, [script, "demo", ...parameters], {
        cwd: directory,
        env: { ...inherited, ...environment },
        stdio: ["ignore", "pipe", "pipe"]
      })
      let output = ""
      const waiting = new Set<() => void>()
      const hear = (text: Buffer) => {
        output += text.toString()
        for (const look of waiting) look()
      }
      child.stdout.on("data", hear)
      child.stderr.on("data", hear)
      const exit = new Promise<number | null>((resolve) => child.once("close", resolve))
      const when = (holds: () => boolean) =>
        Effect.callback<void>((resume) => {
          const look = () => {
            if (!holds()) return
            waiting.delete(look)
            resume(Effect.void)
          }
          waiting.add(look)
          look()
          void exit.then(() => resume(Effect.die(new Error(`it has ended without it:\n${output}`))))
        })
      return {
        pid: child.pid ?? 0,
        said: () => output,
        untilItSays: (pattern: RegExp) => when(() => pattern.test(output)),
        signal: (name: NodeJS.Signals) => Effect.sync(() => void child.kill(name)),
        ended: Effect.map(
          Effect.promise(() => exit),
          (exitCode) => ({ exitCode, output })
        )
      }
    }),
    (run) => Effect.andThen(run.signal("SIGKILL"), run.ended)
  )

export const temporaryFolder: Effect.Effect<string, never, Scope.Scope> = Effect.acquireRelease(
  Effect.sync(() => {
    const directory = mkdtempSync(join(tmpdir(), "tenure-demo-"))
    chmodSync(directory, 0o755)
    return directory
  }),
  (directory) => Effect.sync(() => rmSync(directory, { recursive: true, force: true }))
)

export const writeDocuments = (folder: string, count: number): void => {
  mkdirSync(join(folder, "good"), { recursive: true })
  for (let number = 1; number <= count; number++) {
    writeFileSync(
      join(folder, "good", `${number}.md`),
      `# Document ${number}\n\nIt says word${number} and interruption.\n`
    )
  }
}

/** One of each kind, and what is said about it. */
export const writeBadFiles = (folder: string): ReadonlyArray<RegExp> => {
  mkdirSync(folder, { recursive: true })
  writeFileSync(join(folder, "binary.bin"), "a\0b")
  writeFileSync(join(folder, "empty.txt"), "")
  writeFileSync(join(folder, "huge.txt"), "a".repeat(5 * 1_048_576 + 1))
  writeFileSync(join(folder, "latin1.txt"), Buffer.from([0x63, 0xe9, 0x0a]))
  symlinkSync("nowhere", join(folder, "dangling.txt"))
  execFileSync("mkfifo", [join(folder, "pipe")])
  return [
    /binary\.bin: it is not text/,
    /empty\.txt: it is empty/,
    /huge\.txt: it is larger than 5 MB \(5\.0 MB\)/,
    /latin1\.txt: it is not UTF-8/,
    /dangling\.txt: it cannot be read \(there is no such file or folder\)/,
    /pipe: it cannot be read \(it is not a regular file\)/
  ]
}

export const isAlive = (pid: number): boolean => {
  try {
    process.kill(pid, 0)
    return true
  } catch {
    return false
  }
}
