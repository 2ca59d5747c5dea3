/**
 * Durable steps of a handler: the result is written once, under the attempt and the fence, and read
 * back instead of running the step again when another executor goes on with the item.
 *
 *   not run --runs, result written--> checkpoint --any later attempt--> replayed
 *
 *   not sent --intent written--> sent? --answered--> receipt --any later attempt--> replayed
 *                                 |  ^                 ^
 *       found by a later attempt: |  +--- nothing ---+ | it was done
 *                                 +-- resolve: asks -+-+
 *                                 +-- no resolve: OutcomeUnknown
 *
 * I6. A checkpoint is written at most once and replayed verbatim; a step without one may run again.
 *
 * A crash between what the step did outside and its checkpoint runs it again. Whether the provider has
 * done it then is not known, and neither the end of the attempt nor that of its lease proves that it
 * has not. `run` is for what may be repeated, under the key of `idempotencyKey`; `send` is for what may
 * not be repeated blindly. Failures are not stored: the attempt's retry runs the step again.
 */
import { Cause, DateTime, Effect, Option, Schema } from "effect"
import type { SqlError } from "effect/sql/SqlError"
import type { HeldLease, LeaseLost, LeaseUnverified } from "../executor/HeldLease.ts"
import { reach } from "../testing/FaultPoint.ts"
import { Attempt, busy, InsideStep, load, named, reserved, stepEnded } from "./Attempt.ts"
import {
  StaleAttempt,
  StepInTransaction,
  StepNameRejected,
  StepNameReserved,
  StepNameReused,
  StepResultRefused
} from "./Errors.ts"
import { notJson, textOf } from "./Storable.ts"

export {
  Attempt,
  StepInTransaction,
  StepNameRejected,
  StepNameReserved,
  StepNameReused,
  StepResultRefused
}

/**
 * An effect was about to be sent, and nothing is known of it since: the provider may have done it, or
 * not, or may still be doing it. Do not repeat it. Ask the provider by the idempotency key, or let a
 * person ask.
 */
export class OutcomeUnknown extends Schema.TaggedError<OutcomeUnknown>()("OutcomeUnknown", {
  item: Schema.String,
  step: Schema.String,
  idempotencyKey: Schema.String,
  /** By the clock of the process that sent it. */
  since: Schema.DateTimeUtc
}) {
  override get message(): string {
    return (
      `Item ${this.item}: whether ${this.step} was done is unknown since ${DateTime.formatIso(this.since)}. ` +
      `Ask the provider by the key ${this.idempotencyKey} before anything is repeated.`
    )
  }
}

type StepFailure = SqlError | LeaseLost | LeaseUnverified

type Coding<Success extends Schema.Top> = Success["DecodingServices"] | Success["EncodingServices"]

const intentOf = (name: string): string => `${reserved}intent/${name}`

const keyOf = (attempt: Attempt["Service"], name: string): string => `${attempt.id}/${name}`

/** For a provider: the same in every attempt of the item, on every executor. */
export const idempotencyKey = (name: string): Effect.Effect<string, never, Attempt> =>
  Effect.map(Attempt, (attempt) => keyOf(attempt, name))

/** The one step of that name in the attempt, which is not parked before it has ended. */
const step = <A, E, R>(
  name: string,
  body: (attempt: Attempt["Service"]) => Effect.Effect<A, E, R>
): Effect.Effect<A, E, R | Attempt> =>
  named(name, (attempt) => busy(attempt, body(attempt), stepEnded))

const write = Effect.fnUntraced(function* (
  attempt: Attempt["Service"],
  name: string,
  value: string
) {
  const answer = yield* attempt.checkpoints.push({
    id: attempt.id,
    attempt: attempt.attempt,
    name,
    value
  })
  if (answer === "stale") {
    return yield* Effect.die(new StaleAttempt({ id: attempt.id, attempt: attempt.attempt }))
  }
  yield* reach("queue.checkpoint.committed")
})

const receiptOf = <Success extends Schema.Top = Schema.Void>(
  attempt: Attempt["Service"],
  name: string,
  success: Success | undefined
) => {
  const codec = Schema.toCodecJson((success ?? Schema.Void) as Success)
  return {
    replay: (stored: unknown) => Effect.orDie(Schema.decodeUnknownEffect(codec)(stored)),
    keep: Effect.fnUntraced(function* (result: Success["Type"]) {
      // Not a failure of the step: it has run, and would run again.
      const refuse = (error: Error) =>
        Effect.die(new StepResultRefused({ item: attempt.id, step: name, problem: error.message }))
      const encoded = yield* Schema.encodeUnknownEffect(codec)(result).pipe(
        Effect.catchCause((cause) => refuse(notJson(Cause.squash(cause))))
      )
      const text = textOf(encoded ?? null, attempt.resultMax)
      if (typeof text !== "string") return yield* refuse(text)
      yield* write(attempt, name, text)
      return result
    })
  }
}

/**
 * Runs `effect` once for the item, over all its attempts. `success` says how its result is stored;
 * without it the result must be nothing.
 */
export const run = <E, R, Success extends Schema.Top = Schema.Void>(
  name: string,
  effect: Effect.Effect<Success["Type"], E, R>,
  options?: { readonly success?: Success | undefined }
): Effect.Effect<Success["Type"], E | StepFailure, R | Attempt | Coding<Success>> =>
  step(
    name,
    Effect.fnUntraced(function* (attempt) {
      const receipt = receiptOf(attempt, name, options?.success)
      const stored = yield* load(attempt)
      if (stored.has(name)) return yield* receipt.replay(stored.get(name))
      yield* attempt.lease.check
      const result = yield* Effect.provideService(effect, InsideStep, name)
      yield* reach("queue.step.returned")
      return yield* receipt.keep(result)
    })
  )

interface Sending<E, R, Success extends Schema.Top> {
  readonly send: (idempotencyKey: string) => Effect.Effect<Success["Type"], E, R>
  readonly success?: Success | undefined
}

interface Resolving<E, R, Success extends Schema.Top> {
  readonly resolve: (idempotencyKey: string) => Effect.Effect<Option.Option<Success["Type"]>, E, R>
}

/**
 * Sends something to the outside that must not be repeated blindly: a payment, a letter, an upload.
 *
 * That it is about to be sent is stored first, then the lease is checked, and with nothing in between
 * `send` runs, for as long as the lease holds. Its answer is the receipt, stored and replayed as a
 * step's result. Whoever finds that it was about to be sent, and no receipt, does not know the outcome:
 * a later attempt after a crash, a lost lease or a timeout, and the same attempt when `send` has failed.
 * It then asks with `resolve`: the receipt if it was done, which is stored; nothing if the provider has
 * certainly done nothing, and `send` runs again under the same key. Without `resolve` it fails with
 * `OutcomeUnknown`, which the handler has to take as a state of its own.
 *
 * - A provider that repeats nothing under a known key needs no question:
 *   `resolve: () => Effect.succeedNone`.
 * - A refusal that is final (a declined card) is an answer: make it a value of `success`, so that it is
 *   stored. A failure of `send` means that the outcome is not known.
 *
 * ```ts
 * const charge = Step.send("charge", { send: (key) => pay(key, cents), success: Charged }).pipe(
 *   Effect.catchTag("OutcomeUnknown", (unknown) =>
 *     sql`UPDATE orders SET charge = 'unknown', charge_key = ${unknown.idempotencyKey} WHERE id = ${orderId}`
 *       .pipe(Effect.as({ _tag: "Unknown" as const }))
 *   )
 * )
 * ```
 *
 * What is unknown is resolved later by whoever can: a person, or an item of another queue that asks the
 * provider by the key in that row; or this item's own next attempt (`RetryLater`), with a `resolve`. A
 * queue that declares it in its `error` ends the item with it, when its `retry.while` says no.
 */
export const send: {
  <E, R, E2, R2, Success extends Schema.Top = Schema.Void>(
    name: string,
    options: Sending<E, R, Success> & Resolving<E2, R2, Success>
  ): Effect.Effect<Success["Type"], E | E2 | StepFailure, R | R2 | Attempt | Coding<Success>>
  <E, R, Success extends Schema.Top = Schema.Void>(
    name: string,
    options: Sending<E, R, Success> & { readonly resolve?: undefined }
  ): Effect.Effect<Success["Type"], E | StepFailure | OutcomeUnknown, R | Attempt | Coding<Success>>
} = <E, R, E2, R2, Success extends Schema.Top = Schema.Void>(
  name: string,
  options: Sending<E, R, Success> & {
    readonly resolve?: Resolving<E2, R2, Success>["resolve"] | undefined
  }
): Effect.Effect<Success["Type"], E | E2 | StepFailure, R | R2 | Attempt | Coding<Success>> =>
  step(
    name,
    Effect.fnUntraced(function* (attempt) {
      const { lease } = attempt
      const key = keyOf(attempt, name)
      const intent = intentOf(name)
      const receipt = receiptOf(attempt, name, options.success)
      const stored = yield* load(attempt)
      if (stored.has(name)) return yield* receipt.replay(stored.get(name))
      const since = stored.get(intent)
      if (since === undefined) {
        // Refused here, it is certain that nothing was sent.
        yield* lease.check
        const now = DateTime.formatIso(yield* DateTime.now)
        yield* write(attempt, intent, JSON.stringify(now))
        stored.set(intent, now)
      } else if (options.resolve === undefined) {
        const unknown = new OutcomeUnknown({
          item: attempt.id,
          step: name,
          idempotencyKey: key,
          since: DateTime.makeUnsafe(String(since))
        })
        // In the type of those calls alone that can come here.
        return yield* Effect.fail(unknown as never)
      } else {
        const { resolve } = options
        const found = yield* underLease(lease, () =>
          Effect.provideService(resolve(key), InsideStep, name)
        )
        if (Option.isSome(found)) return yield* receipt.keep(found.value)
      }
      const result = yield* underLease(lease, () =>
        Effect.provideService(options.send(key), InsideStep, name)
      )
      yield* reach("queue.step.returned")
      return yield* receipt.keep(result)
    })
  )

/** Begins in the turn in which the lease was checked, and is interrupted when it is lost. */
const underLease = <A, E, R>(lease: HeldLease, begin: () => Effect.Effect<A, E, R>) =>
  Effect.raceFirst(
    Effect.suspend((): Effect.Effect<A, E | LeaseLost | LeaseUnverified, R> => {
      const refused = lease.checkUnsafe()
      return refused === undefined ? begin() : Effect.fail(refused)
    }),
    lease.lost
  )
