/**
 * Proves the tests: `npm run test:mutants -- [--why] [words of a name]`. First the tests that the list
 * names must pass on the sources as they are; then each mutant is put into a copy of the sources, and its
 * test must fail there. Exit code 1 when one survives, or when a text or a test does not exist. With
 * --why it prints what the test said: a mutant that is no valid SQL dies as well and proves nothing.
 *
 * A copy, so that nothing in the repository is ever wrong, not even when this is killed. One PostgreSQL
 * serves all runs, TENURE_TEST_URL if that is set.
 */
import { Effect, Exit, Scope } from "effect"
import { spawn } from "node:child_process"
import { cp, mkdtemp, readFile, rm, symlink, writeFile } from "node:fs/promises"
import { tmpdir } from "node:os"
import { join } from "node:path"
import { fileURLToPath } from "node:url"
import { start } from "../../src/database/EmbeddedPostgres.ts"
import { mutate } from "./mutate.ts"
import { type Mutant, mutants } from "./mutants.ts"

const root = fileURLToPath(new URL("../..", import.meta.url))
const atOnce = 2
const isCurious = process.argv.includes("--why")

interface Ran {
  readonly file: string
  readonly name: string
  readonly failed: boolean
}

/** The files of the tests that ran, and what each said; none at all when the run itself failed. */
const vitest = async (
  directory: string,
  files: ReadonlyArray<string>,
  name: string | undefined
): Promise<{ readonly ran: ReadonlyArray<Ran>; readonly output: string }> => {
  const report = join(directory, "report.json")
  const output = await new Promise<string>((resolve) => {
    const child = spawn(
      process.execPath,
      [
        join(root, "node_modules/vitest/vitest.mjs"),
        "run",
        "--config=test/vitest.config.ts",
        "--reporter=json",
        ...(isCurious ? ["--reporter=default"] : []),
        `--outputFile=${report}`,
        "--no-file-parallelism",
        ...(name === undefined ? [] : ["-t", name.replaceAll(/[.*+?^${}()|[\]\\]/g, "\\$&")]),
        ...files
      ],
      {
        cwd: directory,
        stdio: ["ignore", "pipe", "pipe"],
        env: { ...process.env, NO_COLOR: "1" }
      }
    )
    const chunks: Array<string> = []
    child.stdout.on("data", (chunk) => chunks.push(String(chunk)))
    child.stderr.on("data", (chunk) => chunks.push(String(chunk)))
    child.on("close", () => resolve(chunks.join("")))
  })
  const text = await readFile(report, "utf8").catch(() => `{"testResults":[]}`)
  await rm(report, { force: true })
  const parsed = JSON.parse(text) as {
    testResults: Array<{
      name: string
      assertionResults: Array<{
        status: string
        fullName: string
      }>
    }>
  }
  const ran = parsed.testResults.flatMap(({ assertionResults, name: file }) =>
    assertionResults
      .filter(({ status }) => status === "passed" || status === "failed")
      .map(({ fullName, status }) => ({
        file,
        name: fullName,
        failed: status === "failed"
      }))
  )
  return { ran, output }
}

/** A copy of what the tests need, with the installed packages of this one. */
const copySources = async (): Promise<string> => {
  const directory = await mkdtemp(join(tmpdir(), "tenure-mutant-"))
  for (const part of ["schema", "src", "test", "package.json", "tsconfig.json"]) {
    await cp(join(root, part), join(directory, part), {
      recursive: true,
      filter: (source) => !source.includes("node_modules")
    })
  }
  await symlink(join(root, "node_modules"), join(directory, "node_modules"))
  return directory
}

const runMutant = async (mutant: Mutant, directory: string): Promise<string | undefined> => {
  const original = await readFile(join(root, mutant.file), "utf8")
  const mutated = mutate(original, mutant)
  if (typeof mutated !== "string") return mutated.problem
  await writeFile(join(directory, mutant.file), mutated)
  const { output, ran } = await vitest(directory, [mutant.test.file], mutant.test.name)
  await writeFile(join(directory, mutant.file), original)
  if (ran.length === 0) return `no test ran:\n${output.slice(0, 2000)}`
  const failures = ran.filter(({ failed }) => failed)
  if (isCurious) {
    const told = output
      .split("\n")
      .filter((line) => /^(\w+Error|Caused by: Error|Error|BROKEN)/.test(line))
    console.log(`\n${mutant.name}\n${[...new Set(told)].slice(0, 8).join("\n")}`)
  }
  return failures.length > 0 ? undefined : "survived"
}

const main = async (): Promise<number> => {
  const words = process.argv
    .slice(2)
    .filter((word) => word !== "--why")
    .join(" ")
  const chosen = mutants.filter(({ name }) => name.includes(words))
  const directories = await Promise.all(Array.from({ length: atOnce }, copySources))
  try {
    const [first] = directories
    if (first === undefined || chosen.length === 0) {
      console.log(`no mutant is called: ${words}`)
      return 1
    }
    const files = [...new Set(chosen.map(({ test }) => test.file))]
    const sound = await vitest(first, files, undefined)
    const named = (mutant: Mutant) =>
      sound.ran.filter(
        ({ file, name }) => file.endsWith(mutant.test.file) && name.includes(mutant.test.name)
      )
    const unsound = chosen.filter(
      (mutant) => named(mutant).length === 0 || named(mutant).some(({ failed }) => failed)
    )
    if (unsound.length > 0) {
      for (const { test } of unsound) {
        console.log(`does not pass without a mutant: ${test.file}: ${test.name}`)
      }
      if (sound.ran.length === 0) console.log(sound.output)
      return 1
    }
    let killed = 0
    const rest = [...chosen]
    await Promise.all(
      directories.map(async (directory) => {
        for (let mutant = rest.shift(); mutant !== undefined; mutant = rest.shift()) {
          const problem = await runMutant(mutant, directory)
          if (problem === undefined) killed++
          console.log(`${problem === undefined ? "killed  " : "SURVIVED"} ${mutant.name}`)
          if (problem !== undefined && problem !== "survived") console.log(`         ${problem}`)
          if (problem !== undefined)
            console.log(`         by ${mutant.test.file}: ${mutant.test.name}`)
        }
      })
    )
    console.log(`${killed} of ${chosen.length} mutants killed, ${chosen.length - killed} survived`)
    return killed === chosen.length ? 0 : 1
  } finally {
    for (const directory of directories) await rm(directory, { recursive: true, force: true })
  }
}

const scope = Scope.makeUnsafe()
if (process.env["TENURE_TEST_URL"] === undefined) {
  const server = await Effect.runPromise(Scope.provide(start({ durable: false }), scope))
  process.env["TENURE_TEST_URL"] =
    `postgresql://postgres:${server.password}@127.0.0.1:${server.port}/postgres`
}
process.exitCode = await main().finally(() => Effect.runPromise(Scope.close(scope, Exit.void)))
