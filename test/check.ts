/**
 * `npm run check`: everything that can be said about the sources without running them. Each check
 * prints its name and its verdict, a failed one also why; the exit code is 1 when one has failed.
 */
import { spawnSync } from "node:child_process"
import { readdirSync, readFileSync } from "node:fs"
import { join, relative, sep } from "node:path"
import { fileURLToPath } from "node:url"
import { violations } from "./tooling/Direction.ts"
import { violationsInCode, violationsInSchema } from "./tooling/SqlClock.ts"

const root = fileURLToPath(new URL("..", import.meta.url))

/** The output of a tool that says no, or nothing. */
const tool = (name: string, ...args: ReadonlyArray<string>): string | undefined => {
  const { error, status, stderr, stdout } = spawnSync(
    join(root, "node_modules", ".bin", name),
    args,
    // The tools run under this Node, whatever the machine has of its own.
    { cwd: root, encoding: "utf8", env: { ...process.env, PATH: path() }, maxBuffer: 1e8 }
  )
  if (status === 0) return undefined
  return error === undefined ? `${stdout}${stderr}` : `${name}: ${error.message}`
}

const path = (): string =>
  [join(root, "node_modules", ".bin"), process.env["PATH"] ?? ""].join(
    process.platform === "win32" ? ";" : ":"
  )

const files = (folder: string, ending: string): ReadonlyArray<{ path: string; text: string }> =>
  readdirSync(join(root, folder), { recursive: true, encoding: "utf8" })
    .filter((file) => file.endsWith(ending))
    .sort()
    .map((file) => ({
      path: relative(join(root, folder), join(root, folder, file))
        .split(sep)
        .join("/"),
      text: readFileSync(join(root, folder, file), "utf8")
    }))

const lines = (found: ReadonlyArray<string>): string | undefined =>
  found.length === 0 ? undefined : found.join("\n")

interface Lock {
  readonly packages: Readonly<
    Record<
      string,
      Readonly<
        Record<
          "dependencies" | "optionalDependencies",
          Readonly<Record<string, string>> | undefined
        >
      >
    >
  >
}

/**
 * What `npm ci` refuses a lock file for. `npm install` leaves out an optional package that its registry
 * does not have, such as one for another platform, and says nothing.
 */
const missingFromLock = (): ReadonlyArray<string> => {
  const { packages } = JSON.parse(readFileSync(join(root, "package-lock.json"), "utf8")) as Lock
  const isThere = (from: string, name: string): boolean => {
    if (packages[`${from === "" ? "" : `${from}/`}node_modules/${name}`] !== undefined) return true
    return (
      from !== "" && isThere(from.includes("/") ? from.slice(0, from.lastIndexOf("/")) : "", name)
    )
  }
  return Object.entries(packages).flatMap(([from, { dependencies, optionalDependencies }]) =>
    Object.keys({ ...dependencies, ...optionalDependencies })
      .filter((name) => !isThere(from, name))
      .map(
        (name) => `package-lock.json has no entry for ${name}, which ${from || "the project"} names`
      )
  )
}

const checks: ReadonlyArray<readonly [name: string, run: () => string | undefined]> = [
  ["types", () => tool("tsc", "-p", ".")],
  ["types of the package", () => tool("tsc", "-p", "src", "--noEmit")],
  ["lint", () => tool("oxlint", "--deny-warnings")],
  ["format", () => tool("oxfmt", "--check", "src", "test", "bench")],
  [
    "Effect diagnostics",
    () =>
      tool(
        "effect-tsgo",
        "diagnostics",
        "--project",
        "tsconfig.json",
        "--strict",
        "--severity",
        "error,warning",
        "--format",
        "text"
      )
  ],
  ["lock file", () => lines(missingFromLock())],
  ["direction of dependencies", () => lines(violations(files("src", ".ts")))],
  [
    "clock in SQL",
    () =>
      lines([
        ...files("schema", ".sql").flatMap(({ path, text }) =>
          violationsInSchema(`schema/${path}`, text)
        ),
        ...files("src", ".ts").flatMap(({ path, text }) => violationsInCode(`src/${path}`, text))
      ])
  ]
]

let failed = 0
for (const [name, run] of checks) {
  const started = process.hrtime.bigint()
  const problem = run()
  const seconds = Number((process.hrtime.bigint() - started) / 100_000_000n) / 10
  if (problem !== undefined) {
    failed++
    console.log(problem.trimEnd())
  }
  console.log(`${problem === undefined ? "ok    " : "failed"}  ${name} (${seconds} s)`)
}
console.log(failed === 0 ? "All checks passed." : `${failed} of ${checks.length} checks failed.`)
process.exitCode = failed === 0 ? 0 : 1
