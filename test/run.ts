/**
 * `npm test`, `npm run test:long` and `npm run test:soak`: the tests in their tiers, and a count that
 * hides nothing.
 *
 *   gate   every test but those below, on the embedded PostgreSQL 18; the types; and the SQL once more
 *          on PostgreSQL 15 where the system brings it
 *   long   `*.long.test.ts`, and the SQL on PostgreSQL 15 to 17, which are installed at first use
 *   soak   `*.soak.test.ts`: a quarter of an hour of kills, pauses and restarts
 *
 * With `DATABASE_URL` the tests use that server instead of the embedded one; it has to be a
 * superuser's, because they make roles and databases, all of them named tenure_*.
 *
 * With file names behind `--`, only those run. The last line is always `N passed, N failed`; what this
 * machine could not run stands above it. The exit code is 1 when something has failed.
 */
import { spawnSync } from "node:child_process"
import { existsSync, mkdtempSync, readFileSync, rmSync } from "node:fs"
import { tmpdir } from "node:os"
import { delimiter, join, relative } from "node:path"
import { fileURLToPath } from "node:url"
import { makeLinks } from "../src/database/EmbeddedBinaries.ts"

const root = fileURLToPath(new URL("..", import.meta.url))
const bin = join(root, "node_modules", ".bin")
const args = process.argv.slice(2)
const long = args.includes("--long")
const soak = args.includes("--soak")
const filters = args.filter((arg) => !arg.startsWith("--"))

/**
 * What starts processes and judges them by their clocks: one file after the other, and two tests of it at a
 * time. A dozen processes on two cores outlive no lease, and rightly so.
 */
const processFolders = ["demo", "executor", "faults", "main", "pull", "watchdog"]

/** One process, and 75 s of waiting: beside everything else. */
const waiting = "test/faults/ProductionLease.test.ts"

/** What depends on the server's release: our SQL, and the fence around it. */
const sqlFolders = ["test/kernel", "test/fence", "test/database/Migrations.test.ts"]

const totals = { passed: 0, failed: 0 }
/** Said once more at the end: of a long output, often only the end is kept. */
const failures: Array<string> = []
const notRun: Array<string> = []

interface Results {
  readonly testResults: ReadonlyArray<{
    readonly name: string
    readonly status: string
    readonly message: string
    readonly assertionResults: ReadonlyArray<{
      readonly status: "passed" | "failed" | "skipped" | "pending" | "todo" | "disabled"
      readonly fullName: string
      readonly failureMessages?: ReadonlyArray<string>
    }>
  }>
}

const given = process.env["TENURE_TEST_URL"] ?? process.env["DATABASE_URL"]
const server = given === undefined ? "the embedded PostgreSQL 18" : "the server of DATABASE_URL"

const environment = (more: Readonly<Record<string, string>> = {}): NodeJS.ProcessEnv => ({
  ...process.env,
  // A release that is asked for by its binaries is a server of its own.
  TENURE_TEST_URL: "TENURE_TEST_PG" in more ? undefined : given,
  PATH: [bin, process.env["PATH"] ?? ""].join(delimiter),
  ...more
})

/** One run of vitest, with its own output as it is. */
const vitest = (
  title: string,
  patterns: ReadonlyArray<string>,
  more: Readonly<Record<string, string>> = {}
): void => {
  console.log(`\n== ${title}`)
  const folder = mkdtempSync(join(tmpdir(), "tenure-test-"))
  const file = join(folder, "results.json")
  const config = join("test", "vitest.config.ts")
  const { status } = spawnSync(
    process.execPath,
    [
      join(root, "node_modules", "vitest", "vitest.mjs"),
      ...["run", "--config", config, "--passWithNoTests"],
      ...["--reporter=default", "--reporter=json", `--outputFile.json=${file}`],
      ...patterns
    ],
    { cwd: root, env: environment(more), stdio: "inherit" }
  )
  const failedBefore = totals.failed
  if (existsSync(file)) count(title, JSON.parse(readFileSync(file, "utf8")) as Results)
  // Ended without a result, or failed for what belongs to no test, such as an unhandled rejection.
  if (status !== 0 && totals.failed === failedBefore) {
    totals.failed++
    console.log(`vitest ended with ${status ?? "a signal"} and no failed test: see above`)
  }
  rmSync(folder, { recursive: true, force: true })
}

const count = (title: string, results: Results): void => {
  for (const file of results.testResults) {
    // A file that cannot be loaded has no tests to fail.
    const name = relative(root, file.name)
    if (file.status === "failed" && file.assertionResults.length === 0) {
      totals.failed++
      failures.push(`${name} (${title})\n${file.message}`)
    }
    for (const { fullName, status, failureMessages = [] } of file.assertionResults) {
      if (status === "passed") totals.passed++
      else if (status === "failed") {
        totals.failed++
        failures.push(`${name}: ${fullName} (${title})\n${failureMessages.join("\n")}`)
      } else notRun.push(`${name}: ${fullName} (${title})`)
    }
  }
}

const types = (): void => {
  console.log("\n== types, with the examples that must not compile")
  const { status, stdout } = spawnSync(process.execPath, [join(bin, "tsc"), "-p", "."], {
    cwd: root,
    env: environment(),
    encoding: "utf8"
  })
  if (status === 0) totals.passed++
  else {
    totals.failed++
    console.log(stdout)
  }
}

const onRelease = (release: number, directory: string): void => {
  vitest(`PostgreSQL ${release}`, [...sqlFolders, ...excludeLong], { TENURE_TEST_PG: directory })
}

const excludeLong = ["--exclude", "**/*.long.test.ts", "--exclude", "**/*.soak.test.ts"]

const gate = (): void => {
  types()
  const isProcess = `test/{${processFolders.join(",")}}/!(ProductionLease)**`
  vitest(`${server}, processes`, [
    ...processFolders.map((folder) => `test/${folder}/`),
    ...["--exclude", waiting, "--maxWorkers=1", "--maxConcurrency=2"],
    ...excludeLong
  ])
  vitest(server, ["--exclude", isProcess, ...excludeLong])
  const directory = "/usr/lib/postgresql/15/bin"
  if (existsSync(join(directory, "initdb"))) onRelease(15, directory)
  else notRun.push(`${sqlFolders.join(", ")} on PostgreSQL 15: ${directory} is not there`)
}

const longTier = (): void => {
  vitest(`${server}, the long tests`, [".long.test.ts"])
  const releases = join(root, "test", "releases")
  console.log("\n== installing PostgreSQL 15 to 17")
  const npm = spawnSync("npm", ["ci", "--ignore-scripts", "--no-audit", "--no-fund"], {
    cwd: releases,
    env: environment(),
    stdio: "inherit"
  })
  for (const release of [15, 16, 17]) {
    const native = join(
      releases,
      "node_modules",
      `postgres-${release}-${process.platform}-${process.arch}`,
      "native"
    )
    if (npm.status === 0 && existsSync(native)) {
      makeLinks(native)
      onRelease(release, join(native, "bin"))
    } else notRun.push(`${sqlFolders.join(", ")} on PostgreSQL ${release}: it cannot be installed`)
  }
}

/** Some tests ask for more than npm brings. */
const lacks = (): ReadonlyArray<string> => {
  const missing: Array<string> = []
  if (spawnSync("psql", ["--version"]).status !== 0) missing.push("psql")
  if (process.getuid?.() !== 0) missing.push("the rights of root, for tests of other users")
  return missing
}

if (filters.length > 0) vitest("as asked", filters)
else if (soak) vitest(`${server}, the soak`, [".soak.test.ts"])
else if (long) longTier()
else gate()

if (notRun.length > 0) {
  console.log(`\nNot run on this machine (it lacks: ${lacks().join(", ") || "see each line"}):`)
  for (const line of notRun) console.log(`  ${line}`)
}
if (failures.length > 0) console.log(`\nFailed:\n\n${failures.join("\n\n")}`)
console.log(`\n${notRun.length} not run`)
console.log(`${totals.passed} passed, ${totals.failed} failed`)
process.exitCode = totals.failed === 0 && totals.passed > 0 ? 0 : 1
