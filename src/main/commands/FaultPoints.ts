/** `tenure fault-points`: where a test of an application may stop, delay or kill its process. */
import { Console } from "effect"
import { Command } from "effect/cli"
import { names } from "../../testing/FaultPoint.ts"

export const faultPoints = Command.make("fault-points", {}, () =>
  Console.log(names.join("\n"))
).pipe(Command.withDescription("Lists the places where tests may stop, delay or kill a process."))
