/**
 * A process that takes part in the embedded server of the directory it is given (or in a temporary
 * one), says so in one line of JSON, and closes in order when its standard input ends.
 */
import { Effect } from "effect"
import { start } from "../../src/database/EmbeddedPostgres.ts"

const directory = process.argv[2]

const inputEnded = Effect.callback<void>((resume) => {
  process.stdin.resume()
  process.stdin.on("end", () => resume(Effect.void))
})

await Effect.runPromise(
  Effect.scoped(
    Effect.gen(function* () {
      const server = yield* start({ durable: false, directory })
      console.log(JSON.stringify(server))
      yield* inputEnded
    })
  )
)
