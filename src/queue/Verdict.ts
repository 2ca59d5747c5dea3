/**
 * What becomes of an attempt that has ended. Decided from how the handler ended; the policy says
 * whether another attempt follows.
 *
 *   success                                    completed, or committed by the handler's own transaction
 *   declared failure, no policy or final       failed, with the failure as result
 *   declared failure, attempts left            retry
 *   database error, RetryLater, timeout        retry while attempts are left, then failed (HandlerDied)
 *   a report of progress that JSON cannot hold failed (HandlerDied): so does it at each attempt
 *   the lease not confirmed                    hand-back: an outage is not the item's fault
 *   anything else (a defect)                   failed (HandlerDied): a bug does not go away by itself
 *   the lease lost, the attempt over           nothing is stored
 */
import { Cause, Duration, Effect } from "effect"
import { isSqlError, type SqlError } from "effect/sql/SqlError"
import { classify, sqlState } from "../database/SqlState.ts"
import { LeaseLost, LeaseUnverified } from "../executor/HeldLease.ts"
import type { Lost } from "../executor/TrustWindow.ts"
import { ProgressRefused, RetryLater, StaleAttempt } from "./Errors.ts"
import type { Outcome, Reason } from "./QueueStore.ts"
import { delayMillis, type RetryPolicy, triesAgain } from "./RetryPolicy.ts"
import * as Storable from "./Storable.ts"

/** What any handler may fail with besides its declared error: the runtime classifies and retries it. */
export type AttemptFailure = SqlError | LeaseLost | LeaseUnverified | RetryLater | ProgressRefused

export interface Settle {
  readonly _tag: "Settle"
  /** `park`: it waits, and nobody runs it meanwhile. Decided by its waits, and not by how it ended. */
  readonly outcome: Outcome | "park"
  readonly reason: Reason | null
  readonly result: string | null
  readonly delayMillis: number
  /** Of `park`: the waits. */
  readonly waits?: ReadonlyArray<string>
}

/** Nothing may be stored: the lease is lost, or the attempt is not ours any more. */
export interface Drop {
  readonly _tag: "Drop"
  readonly lost: Lost | undefined
}

/** The outcome is stored already, in the handler's own transaction. */
export interface Committed {
  readonly _tag: "Committed"
}

export type Verdict = Settle | Drop | Committed

export const committed: Committed = { _tag: "Committed" }

export const settle = (
  outcome: Settle["outcome"],
  rest: {
    readonly reason?: Reason
    readonly result?: string | null
    readonly delayMillis?: number
    readonly waits?: ReadonlyArray<string>
  } = {}
): Settle => ({
  _tag: "Settle",
  outcome,
  reason: rest.reason ?? null,
  result: rest.result ?? null,
  delayMillis: rest.delayMillis ?? 0,
  ...(rest.waits === undefined ? {} : { waits: rest.waits })
})

const messageMax = 1000

/** Bounded and always encodable, so that recording a failure cannot itself fail. */
export const died = (message: string): Settle =>
  settle("failed", {
    reason: "HandlerDied",
    result: JSON.stringify({ message: message.slice(0, messageMax) })
  })

/** What the fence's refusal says of the lease; other states of our class are no refusal by it. */
export const lostByFence = (error: SqlError): Lost | undefined => {
  switch (sqlState(error)) {
    case "TN001":
      return "expired"
    case "TN002":
    case "TN003":
    case "TN004":
      return "revoked"
    default:
      return undefined
  }
}

const retryOrDie = <E>(
  policy: RetryPolicy<E> | undefined,
  failures: number,
  message: string,
  afterMillis?: number
): Effect.Effect<Verdict> =>
  triesAgain(policy, failures, undefined)
    ? Effect.map(
        afterMillis === undefined
          ? delayMillis(policy?.schedule, failures)
          : Effect.succeed(afterMillis),
        (millis) => settle("retry", { delayMillis: millis })
      )
    : Effect.succeed(died(message))

/** A hand-back that waits a moment, so that an outage is no busy loop. */
const unverifiedPauseMillis = 1000

export interface Failure<E> {
  readonly policy: RetryPolicy<E> | undefined
  /** Failures of the item, this one included. */
  readonly failures: number
  readonly encodeError: (error: E) => Effect.Effect<string, unknown>
}

/** A policy that throws, or an error that cannot even be looked at, must not leave the item without an end. */
const always = (judging: () => Effect.Effect<Verdict>): Effect.Effect<Verdict> =>
  Effect.catchDefect(Effect.suspend(judging), (defect) =>
    Effect.succeed(died(`its failure could not be judged: ${describe(defect)}`))
  )

export const ofTimeout = <E>(failure: Omit<Failure<E>, "encodeError">): Effect.Effect<Verdict> =>
  always(() => retryOrDie(failure.policy, failure.failures, "the attempt ran out of its time"))

export const ofCause = <E>(
  cause: Cause.Cause<E | AttemptFailure>,
  failure: Failure<E>
): Effect.Effect<Verdict> => always(() => judge(cause, failure))

const judge = <E>(
  cause: Cause.Cause<E | AttemptFailure>,
  failure: Failure<E>
): Effect.Effect<Verdict> => {
  const reason = cause.reasons.find((one) => one._tag !== "Interrupt")
  if (reason === undefined) return Effect.succeed(died("the handler interrupted itself"))
  // Infrastructure errors are recognised as defects as well: people write orDie, and a client whose
  // error type has no room for ours must.
  const error: unknown = reason._tag === "Fail" ? reason.error : reason.defect
  if (error instanceof LeaseLost) return Effect.succeed({ _tag: "Drop", lost: error.cause as Lost })
  if (error instanceof StaleAttempt) return Effect.succeed({ _tag: "Drop", lost: undefined })
  if (error instanceof LeaseUnverified) {
    return Effect.succeed(settle("hand-back", { delayMillis: unverifiedPauseMillis }))
  }
  if (error instanceof RetryLater) {
    const after = error.after === undefined ? undefined : Duration.toMillis(error.after)
    return retryOrDie(failure.policy, failure.failures, describe(error.cause), after)
  }
  if (isSqlError(error)) {
    const lost = lostByFence(error)
    if (lost !== undefined) return Effect.succeed({ _tag: "Drop", lost })
    if (reason._tag === "Fail" || classify(error) !== "defect") {
      return retryOrDie(failure.policy, failure.failures, describe(error))
    }
  }
  if (reason._tag === "Die" || error instanceof ProgressRefused) {
    return Effect.succeed(died(describe(error)))
  }
  return ofDeclared(error as E, failure)
}

const ofDeclared = <E>(error: E, failure: Failure<E>): Effect.Effect<Verdict> =>
  triesAgain(failure.policy, failure.failures, { error })
    ? Effect.map(delayMillis(failure.policy?.schedule, failure.failures), (millis) =>
        settle("retry", { delayMillis: millis })
      )
    : failure.encodeError(error).pipe(
        Effect.map((result): Verdict => settle("failed", { result })),
        Effect.catchCause((unencodable) =>
          Effect.succeed(
            died(`its failure could not be encoded: ${describe(Cause.squash(unencodable))}`)
          )
        )
      )

const describe = (error: unknown): string => Storable.describe(error, messageMax)
