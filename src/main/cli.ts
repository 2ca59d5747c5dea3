/**
 * The command `tenure`, one file for each of its subcommands in commands/. What they print goes to
 * standard output, and what they log to standard error, except for `worker`, which logs as any
 * worker does. The exit codes are the ones of `ExitCode.ts`.
 */
import * as NodeServices from "@effect/platform-node/NodeServices"
import { Effect, References } from "effect"
import { Command } from "effect/cli"
import { readFileSync } from "node:fs"
import { capacity } from "./commands/Capacity.ts"
import { audit } from "./commands/Audit.ts"
import { deadLetters } from "./commands/DeadLetters.ts"
import { doctor } from "./commands/Doctor.ts"
import { executors } from "./commands/Executors.ts"
import { faultPoints } from "./commands/FaultPoints.ts"
import { items } from "./commands/Items.ts"
import { migrate } from "./commands/Migrate.ts"
import { quarantine } from "./commands/Quarantine.ts"
import { token } from "./commands/Token.ts"
import { schedules } from "./commands/Schedules.ts"
import { queues } from "./commands/Queues.ts"
import { worker } from "./commands/Worker.ts"
import { command as demo } from "./demo/Demo.ts"
import { run } from "./Process.ts"

const tenure = Command.make("tenure").pipe(
  Command.withDescription("Durable work on the PostgreSQL you already run."),
  Command.withSubcommands([
    worker,
    migrate,
    executors,
    queues,
    items,
    deadLetters,
    quarantine,
    schedules,
    token,
    capacity,
    audit,
    doctor,
    faultPoints,
    demo
  ])
)

// The same distance from src/main and from the published dist/main.
const { version } = JSON.parse(
  readFileSync(new URL("../../package.json", import.meta.url), "utf8")
) as { readonly version: string }

const program = Command.run(tenure, { version }).pipe(Effect.provide(NodeServices.layer))

if (process.argv[2] === "worker") run(program)
else {
  run(program.pipe(Effect.provideService(References.MinimumLogLevel, "Warn")), {}, "stderr")
}
