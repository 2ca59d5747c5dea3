/**
 * Why a process ended, as the number and the words its supervisor gets. Pure.
 *
 *    0  ended, or drained after a signal or `executor.drain`
 *    1  failed: the layer, or a loop that crashed too often
 *   70  forced exit: the drain outlived its budget, or a second signal came. The lease is left to expire
 *   71  crashed: an exception or a rejection that nobody caught. The lease is left to expire
 *   72  the watchdog ended it; the log says why
 *   75  the lease was lost: start the process again, as a new executor
 *   78  start-up refused: a restart does not help, a person has to change something
 *  130  a command was interrupted
 */
import { Cause, Exit, Runtime } from "effect"
import { StartupRefused } from "../database/StartupRefused.ts"
import { LeaseLost } from "../executor/HeldLease.ts"
import { WatchdogFired } from "../executor/WatchdogFired.ts"

export const ExitCode = {
  ended: 0,
  failed: 1,
  forced: 70,
  crashed: 71,
  watchdogFired: 72,
  leaseLost: 75,
  refused: 78,
  interrupted: 130
} as const

export const exitCodeOf = (exit: Exit.Exit<unknown, unknown>): number => {
  if (Exit.isSuccess(exit)) return ExitCode.ended
  if (Cause.hasInterruptsOnly(exit.cause)) return ExitCode.interrupted
  const error = Cause.squash(exit.cause)
  if (error instanceof StartupRefused) return ExitCode.refused
  if (error instanceof LeaseLost) return ExitCode.leaseLost
  if (error instanceof WatchdogFired) return ExitCode.watchdogFired
  return Runtime.getErrorExitCode(error)
}

/** Where the error came from, without the text of it: that is in `summaryOf`, and bounded there. */
export const framesOf = (error: unknown): string | undefined => {
  if (!(error instanceof Error) || error.stack === undefined) return undefined
  const frames = error.stack.split("\n").filter((line) => /^\s+at /.test(line))
  return frames.length === 0 ? undefined : frames.slice(0, 12).join("\n")
}

/**
 * One bounded line. Of a value that is no `Error` only the tag: its fields may be somebody's data,
 * and a log is no place for them.
 */
export const summaryOf = (error: unknown): string => {
  if (error instanceof Error) {
    const line = error.message === "" ? error.name : `${error.name}: ${error.message}`
    return line.length > 300 ? `${line.slice(0, 299)}~` : line
  }
  if (typeof error === "object" && error !== null && "_tag" in error) return String(error._tag)
  return `a failure that is no Error (${typeof error})`
}
