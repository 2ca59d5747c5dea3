/** A process that has a watchdog of 300 ms and nothing else, and blocks. */
import { Effect } from "effect"
import { writeSync } from "node:fs"
import { start } from "../../src/watchdog/WatchdogThread.ts"

const how = process.argv[2]

const fillStderr = () => {
  try {
    for (;;) writeSync(2, `${"x".repeat(1023)}\n`)
  } catch (error) {
    writeSync(1, `full: ${(error as NodeJS.ErrnoException).code}\n`)
  }
}

await Effect.runPromise(
  Effect.scoped(
    Effect.gen(function* () {
      const thread = yield* start(() => new URL("../../src/watchdog/thread.js", import.meta.url))
      yield* thread.ready
      thread.armUnsafe({
        executorId: "an-executor",
        watchdogNanos: 300_000_000n,
        pollNanos: 20_000_000n,
        forcedExitNanos: 100_000_000n,
        abandonAfterNanos: 100_000_000n
      })
      thread.writeUnsafe({
        mainNanos: process.hrtime.bigint() + 300_000_000n,
        leaseNanos: 0n,
        uptimeNanos: 0n,
        actors: []
      })
      if (process.pid === 1) writeSync(1, "pid 1\n")
      if (how === "fill") fillStderr()
      for (;;);
    })
  )
)
