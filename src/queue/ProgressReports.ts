/**
 * What the attempts of this process report, on its way into the database.
 *
 *   reported --its pause over--> sent --written--> written --reported again--> reported
 *       ^                         |                                |
 *       +--- reported meanwhile --+                                +--attempt ended--> gone
 *
 * A report replaces the one that has not left yet, so a handler may report as often as it likes: it
 * never waits, and an item is written five times a second at most. Reports of all items leave together,
 * and apart from outcomes and checkpoints.
 *
 * When an attempt ends, its last report leaves at once and before its outcome, which waits for that
 * for a moment at most. What has not left is memory: after a crash the report before it is shown.
 */
import { Cause, Clock, Effect, Exit, Schema, type Scope } from "effect"
import type { SqlError } from "effect/sql/SqlError"
import { abandonAfter } from "../database/Deadline.ts"
import { ProgressRefused } from "./Errors.ts"
import * as GroupCommit from "./GroupCommit.ts"
import type { ProgressReport } from "./QueueStore.ts"
import { notJson, textOf } from "./Storable.ts"

/** Of one attempt. */
export interface Reporting {
  /** After the end it does nothing. */
  readonly reportUnsafe: (value: string) => void
  /** Completes when the last report is written, or not soon. */
  readonly end: Effect.Effect<void>
}

export interface ProgressReports {
  readonly begin: (id: string, attempt: number) => Reporting
}

/** Between two reports of one item. */
export const pauseMillis = 200

/** People read it, and every watcher gets it again and again. */
export const bytesMax = 65_536

export const make = Effect.fnUntraced(function* (options: {
  /** Answers, in the order of the rows, whether the attempt still holds its claim. */
  readonly write: (
    reports: ReadonlyArray<ProgressReport>
  ) => Effect.Effect<ReadonlyArray<boolean>, SqlError>
  readonly isRowError: (error: SqlError) => boolean
  readonly writtenUnsafe: (id: string) => void
  readonly later: (millis: number, run: () => void) => void
  /** How long an outcome waits for the report before it. */
  readonly endWithinMillis: number
}): Effect.fn.Return<ProgressReports, never, Scope.Scope> {
  const clock = yield* Clock.Clock
  const nowMillis = () => Number(clock.monotonicTimeNanosUnsafe()) / 1e6
  const group = yield* GroupCommit.make<ProgressReport, boolean, SqlError, never>({
    groupMax: 1000,
    bytesMax: 4_194_304,
    sizeOf: (row) => 64 + row.value.length,
    isRowError: options.isRowError,
    write: options.write
  })

  const begin = (id: string, attempt: number): Reporting => {
    let number = 0
    // Not sent yet.
    let value: string | undefined
    let isSent = false
    let isWaiting = false
    let isEnding = false
    let sentMillis = -Infinity
    let ended = () => {}

    const send = () => {
      if (value === undefined || isSent) return
      const report = { id, attempt, number, value }
      value = undefined
      isSent = true
      sentMillis = nowMillis()
      group.pushUnsafe(report, (exit) => {
        isSent = false
        if (Exit.isSuccess(exit) && exit.value) options.writtenUnsafe(id)
        // Refused, or not to be written at all: the next one would not fare better.
        else value = undefined
        if (value === undefined) ended()
        else next()
      })
    }

    const next = () => {
      if (value === undefined || isSent) return
      const restMillis = isEnding ? 0 : sentMillis + pauseMillis - nowMillis()
      if (restMillis <= 0) return send()
      if (isWaiting) return
      isWaiting = true
      options.later(restMillis, () => {
        isWaiting = false
        send()
      })
    }

    return {
      reportUnsafe: (report) => {
        if (isEnding) return
        number++
        value = report
        next()
      },
      end: Effect.suspend(() => {
        isEnding = true
        if (value === undefined && !isSent) return Effect.void
        const written = Effect.callback<void>((resume) => {
          ended = () => resume(Effect.void)
          next()
        })
        // Where nothing can be interrupted, too: the handler may have been.
        return Effect.ignore(abandonAfter(written, options.endWithinMillis))
      })
    }
  }

  return { begin }
})

/** How the values of a queue are reported. The codec is compiled once. */
export const reporter = <Progress extends Schema.Top>(schema: Progress) => {
  const encode = Schema.encodeUnknownEffect(Schema.toCodecJson(schema))
  return (
    id: string,
    reporting: Reporting,
    value: unknown
  ): Effect.Effect<void, ProgressRefused, Progress["EncodingServices"]> => {
    const refuse = (error: Error) =>
      Effect.fail(new ProgressRefused({ id, problem: error.message }))
    return Effect.suspend(() => encode(value)).pipe(
      Effect.catchCause((cause) =>
        Cause.hasInterruptsOnly(cause) ? Effect.interrupt : refuse(notJson(Cause.squash(cause)))
      ),
      Effect.flatMap((encoded) => {
        const text = textOf(encoded ?? null, bytesMax)
        if (typeof text !== "string") return refuse(text)
        reporting.reportUnsafe(text)
        return Effect.void
      })
    )
  }
}
