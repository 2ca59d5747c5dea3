/** How a command ends that could not do what it was asked: with its reason printed, and exit code 1. */
import { Console, Effect, Runtime, Schema } from "effect"

/** Why has been printed. */
export class CommandRefused extends Schema.TaggedError<CommandRefused>()("CommandRefused", {
  reason: Schema.String
}) {
  override readonly [Runtime.errorReported] = false

  override get message(): string {
    return this.reason
  }
}

export const refuseCommand = (reason: string) =>
  Effect.andThen(Console.error(`tenure: ${reason}`), Effect.fail(new CommandRefused({ reason })))

export const refuseChange = (reason: string) => refuseCommand(`nothing was changed: ${reason}`)
