/**
 * `npm run bench -- <name> [part ...] [--json] [--quick]`: runs one benchmark, or parts of it, on a server
 * of its own and prints one table, or one JSON object a line. Without a name it says which there are.
 *
 * Messages about the run go to standard error, so that standard output is nothing but results.
 */
import { Effect, type Scope } from "effect"
import * as executors from "./executors.ts"
import * as fairness from "./fairness.ts"
import * as fence from "./fence.ts"
import * as idle from "./idle.ts"
import * as limits from "./limits.ts"
import * as presence from "./presence.ts"
import * as queue from "./queue.ts"
import { json, type Report, type Row, table } from "./Report.ts"
import * as Server from "./Server.ts"
import * as resume from "./resume.ts"
import * as takeover from "./takeover.ts"

interface Benchmark {
  readonly claim: string
  /** What may be asked for alone. */
  readonly parts?: ReadonlyArray<string>
  readonly run: (server: Server.Server, report: Report) => Effect.Effect<void, never, Scope.Scope>
}

const benchmarks: Readonly<Record<string, Benchmark>> = {
  executors: {
    claim: "a scan and a renewal with up to 1,000 executors, without and with a long history",
    run: executors.run
  },
  fairness: {
    claim: "how long small keys wait behind a huge one",
    run: fairness.run
  },
  fence: { claim: "what the fence costs a write", run: fence.run },
  idle: {
    claim: "statements, connections and memory of executors that have nothing to do",
    run: idle.run
  },
  limits: {
    claim: "a thousand keys of one, and ten at a time over eight processes, beside DBOS",
    run: limits.run
  },
  presence: {
    claim: "how soon a process's end is seen, and what looking costs",
    run: presence.run
  },
  queue: {
    claim: "enqueue, drain and latency of no-op items, beside graphile-worker, pg-boss and DBOS",
    parts: queue.parts,
    run: queue.run
  },
  resume: {
    claim: "how soon the items of a killed pull worker are executed elsewhere",
    run: resume.run
  },
  takeover: {
    claim: "how soon lost work goes on elsewhere, beside Effect's cluster and DBOS",
    run: takeover.run
  }
}

const usage = [
  "Usage: npm run bench -- <name> [part ...] [--json] [--quick]",
  "",
  ...Object.entries(benchmarks).map(
    ([name, { claim, parts = [] }]) =>
      `  ${name.padEnd(9)}  ${claim}${parts.length === 0 ? "" : `; in parts: ${parts.join(", ")}`}`
  ),
  "",
  "--json   one object a line: bench, workload, system, metric, value, ratio",
  "--quick  every row with less of everything",
  "",
  "Runs on an embedded PostgreSQL 18, or on the server DATABASE_URL names."
].join("\n")

const say = (line: string) => Effect.sync(() => process.stderr.write(`${line}\n`))
const print = (line: string) => process.stdout.write(`${line}\n`)

const run = Effect.fnUntraced(function* (
  name: string,
  benchmark: Benchmark,
  flags: { readonly json: boolean; readonly quick: boolean; readonly parts: ReadonlyArray<string> }
): Effect.fn.Return<void, never, Scope.Scope> {
  const rows: Array<Row> = []
  const leftOut: Array<string> = []
  yield* say(`${name}: ${benchmark.claim}${flags.quick ? " (quick)" : ""}`)
  const server = yield* Server.make()
  yield* benchmark.run(server, {
    quick: flags.quick,
    wants: (part) => flags.parts.length === 0 || flags.parts.includes(part),
    row: (row) => {
      if (flags.json) print(json(name, row))
      else process.stderr.write(`  ${row.workload} ${row.system} ${row.metric}\n`)
      rows.push(row)
    },
    note: (line) => process.stderr.write(`  ${line}\n`),
    leftOut: (workload, why) => leftOut.push(`${workload}: ${why}`)
  })
  if (!flags.json) print(table(rows))
  for (const line of leftOut) yield* say(`left out by --quick: ${line}`)
})

const main = Effect.suspend(() => {
  const names = process.argv.slice(2).filter((argument) => !argument.startsWith("--"))
  const flags = new Set(process.argv.slice(2).filter((argument) => argument.startsWith("--")))
  const [name, ...parts] = names
  const known = name === undefined ? undefined : benchmarks[name]
  const unknown =
    [...flags].find((flag) => flag !== "--json" && flag !== "--quick") ??
    parts.find((part) => known?.parts?.includes(part) !== true)
  if (name === undefined && unknown === undefined) return Effect.sync(() => print(usage))
  if (known === undefined || unknown !== undefined || name === undefined) {
    return Effect.sync(() => {
      process.stderr.write(`unknown: ${unknown ?? names.join(" ")}\n\n${usage}\n`)
      process.exitCode = 2
    })
  }
  return Effect.scoped(
    run(name, known, { json: flags.has("--json"), quick: flags.has("--quick"), parts })
  )
})

await Effect.runPromise(main)
