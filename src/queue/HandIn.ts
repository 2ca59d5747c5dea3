/** What everything that hands in items, or asks for them, has in common. */
import { Effect, Option } from "effect"
import type { SqlClient } from "effect/sql"
import { Executor } from "../executor/Executor.ts"
import type { AlreadySettled } from "./Errors.ts"
import { QueueRuntime } from "./QueueRuntime.ts"
import * as QueueStore from "./QueueStore.ts"
import { Waker } from "./Waker.ts"

/** Without an executor in the process, whose settings say otherwise. */
const payloadMaxDefault = 1_048_576

/** Bytes of one payload. */
export const payloadMax = Effect.map(
  Effect.serviceOption(Executor),
  Option.match({
    onNone: () => payloadMaxDefault,
    onSome: (executor) => executor.settings.payloadMax
  })
)

/** The current span as W3C trace context, so that the item's spans join it in whatever process. */
export const traceparent = Effect.map(Effect.option(Effect.currentSpan), (span) =>
  Option.match(span, {
    onNone: () => null,
    onSome: ({ sampled, spanId, traceId }) =>
      sampled ? `00-${traceId.padStart(32, "0")}-${spanId}-01` : null
  })
)

/** In a runtime's process the waker coalesces; without one the hint is a statement of its own. */
export const hint = (
  sql: SqlClient.SqlClient,
  queueId: number,
  dueInMillis: number | undefined
): Effect.Effect<void> =>
  Effect.flatMap(Effect.serviceOption(Waker), (waker) =>
    Effect.flatMap(Effect.serviceOption(QueueRuntime), (runtime) => {
      if (Option.isNone(waker)) return Effect.ignore(QueueStore.notifyWork(sql, [queueId]))
      if (Option.isSome(runtime)) {
        runtime.value.hintUnsafe(queueId)
        if (dueInMillis !== undefined) runtime.value.dueInUnsafe(dueInMillis)
      }
      waker.value.workUnsafe(queueId)
      return Effect.void
    })
  )

export const stateOf = (answer: string): AlreadySettled["state"] => {
  switch (answer) {
    case "ready":
      return "available"
    case "claimed":
    // Somebody handles it as a dead letter.
    case "taken":
      return "leased"
    case "delayed":
    case "parked":
    case "completed":
    case "cancelled":
      return answer
    default:
      return "failed"
  }
}
