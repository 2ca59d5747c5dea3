/**
 * The node process around the program: signals, the deadline of a shutdown, the exit code. The one
 * file that ends the process, and with `setTimeout`: a deadline that a finalizer can hold up is none.
 *
 *   running --signal, or the program stops by itself--> stopping --finalizers done--> exit, by ExitCode
 *      |                                                   |
 *      |                                                   +--budget over, or a second signal--> exit 70
 *      +--nobody caught it--> exit 71
 *
 * A forced exit runs no finalizer, so it never releases a lease: what was running may have written
 * half of its work outside the database, and counts as lost. Peers find out by themselves.
 *
 * A blocked event loop runs none of this: the watchdog's thread kills the process then, which also comes
 * two looks after each deadline here, if that has not ended it.
 */
import { Cause, Context, Effect, Exit, type Fiber, Logger, Runtime } from "effect"
import { StartupRefused } from "../database/StartupRefused.ts"
import { ExitCode, exitCodeOf, framesOf, summaryOf } from "./ExitCode.ts"

/** What the program tells the process it is the main of. Outside of one, nothing happens. */
export const Process = Context.Reference<{
  /** How long a shutdown after a signal may take. The longest one named counts. */
  readonly allowUnsafe: (budgetMillis: number) => void
  /** The program stops. When it still does after the budget, the process exits with `code`. */
  readonly stoppingUnsafe: (budgetMillis: number | undefined, code: number) => void
  /** How the program ended: of a fiber that a signal has interrupted, nothing else can be told. */
  readonly endedUnsafe: (exit: Exit.Exit<unknown, unknown>) => void
}>("tenure/main/Process", {
  defaultValue: () => ({
    allowUnsafe: () => {},
    stoppingUnsafe: () => {},
    endedUnsafe: () => {}
  })
})

export interface RunOptions {
  readonly disableErrorReporting?: boolean | undefined
}

/** Before an executor is there, nothing has to be drained. */
const bareBudgetMillis = 5000

/** npm passes a Ctrl-C on to a process that the terminal has sent it to already: the two are one. */
const sameSignalNanos = 500_000_000n

/** One JSON object a line for machines, colours for people. */
const logging = (stream: "stdout" | "stderr") =>
  Context.make(Logger.LogToStderr, stream === "stderr").pipe(
    Context.add(
      Logger.CurrentLoggers,
      new Set([
        process[stream].isTTY
          ? Logger.consolePretty()
          : stream === "stderr"
            ? Logger.withConsoleError(Logger.formatJson)
            : Logger.consoleJson,
        Logger.tracerLogger
      ])
    )
  )

export const run = <E>(
  program: Effect.Effect<unknown, E>,
  options: RunOptions = {},
  stream: "stdout" | "stderr" = "stdout"
): void => {
  let budgetMillis = bareBudgetMillis
  let firstSignalNanos: bigint | undefined
  let deadline: { readonly atNanos: bigint; readonly timer: NodeJS.Timeout } | undefined
  let outcome: Exit.Exit<unknown, unknown> | undefined
  let exiting = false
  const context = logging(stream)
  const log = (entry: Effect.Effect<void>): void => Effect.runSyncWith(context)(entry)
  // Nothing else may keep the process: a layer of clients alone has no open handle.
  const keepAlive = setInterval(() => {}, 2_147_483_647)

  const exit = (code: number): void => {
    if (exiting) return
    exiting = true
    clearInterval(keepAlive)
    // Where a pipe is written in the background, the last lines would be lost.
    process.stdout.write("", () => process.exit(code))
  }

  const forceExit = (code: number, reason: string): never => {
    try {
      log(
        Effect.logFatal("executor_shutdown: forced exit, the lease is left to expire").pipe(
          Effect.annotateLogs({ reason, exitCode: code })
        )
      )
    } finally {
      process.exit(code)
    }
  }

  // A lease that is lost during a drain leaves less time than the drain had.
  const exitWithin = (millis: number, code: number): void => {
    const atNanos = process.hrtime.bigint() + BigInt(Math.round(millis * 1e6))
    if (deadline !== undefined && deadline.atNanos <= atNanos) return
    clearTimeout(deadline?.timer)
    const reason = `the shutdown took longer than its ${millis} ms`
    deadline = { atNanos, timer: setTimeout(() => forceExit(code, reason), millis) }
  }

  const onSignal = (signal: NodeJS.Signals): void => {
    const nowNanos = process.hrtime.bigint()
    if (firstSignalNanos === undefined) {
      firstSignalNanos = nowNanos
      // A command has no executor to drain, and its user pressed the key himself.
      if (stream === "stdout") {
        log(
          Effect.logInfo("executor_shutdown: draining").pipe(
            Effect.annotateLogs({ signal, budgetMillis })
          )
        )
      }
      exitWithin(budgetMillis, ExitCode.forced)
      fiber.interruptUnsafe()
    } else if (nowNanos - firstSignalNanos > sameSignalNanos) {
      forceExit(ExitCode.forced, `a second ${signal}`)
    }
  }

  const onUncaught = (error: unknown): void => {
    if (exiting) return
    exiting = true
    // The reader of a command's output has seen enough, as `head` does.
    if (stream === "stderr" && isBrokenPipe(error)) process.exit(ExitCode.ended)
    try {
      log(report("uncaught: the process ends", error))
    } finally {
      process.exit(ExitCode.crashed)
    }
  }

  const fiber: Fiber.Fiber<unknown, E> = Effect.runForkWith(
    Context.add(context, Process, {
      allowUnsafe: (millis) => {
        budgetMillis = Math.max(budgetMillis, millis)
      },
      stoppingUnsafe: (millis, code) => exitWithin(millis ?? bareBudgetMillis, code),
      endedUnsafe: (ended) => {
        outcome = ended
      }
    })
  )(program)
  fiber.addObserver((exited) => {
    const ended = outcome !== undefined && Exit.hasInterrupts(exited) ? outcome : exited
    if (Exit.isFailure(ended) && options.disableErrorReporting !== true) explain(ended.cause, log)
    exit(exitCodeOf(ended))
  })
  process.on("SIGTERM", onSignal)
  process.on("SIGINT", onSignal)
  process.on("uncaughtException", onUncaught)
  process.on("unhandledRejection", onUncaught)
}

const isBrokenPipe = (error: unknown): boolean =>
  error instanceof Error && "code" in error && error.code === "EPIPE"

const explain = <E>(cause: Cause.Cause<E>, log: (entry: Effect.Effect<void>) => void): void => {
  if (Cause.hasInterruptsOnly(cause)) return
  const error = Cause.squash(cause)
  // A sentence for a person, with the cure in it; a stack would only hide that.
  if (error instanceof StartupRefused) process.stderr.write(`tenure: ${error.message}\n`)
  else if (Runtime.getErrorReported(error)) log(report("the process ends", error))
}

const report = (message: string, error: unknown): Effect.Effect<void> => {
  const stack = framesOf(error)
  return Effect.logFatal(`${message}: ${summaryOf(error)}`).pipe(
    Effect.annotateLogs(stack === undefined ? {} : { stack })
  )
}
