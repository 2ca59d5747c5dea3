/**
 * Durable waits of a handler: for a time, for an event, for the outcome of another item. A handler that
 * waits gives its slot back and costs one row, for minutes or for months, and goes on in whatever
 * process is there when the wait is over.
 *
 *   not begun --asked--> pending --parks--> (nobody runs it) --over--> asked again --stored--> replayed
 *                  |        |
 *                  |        +-- a short sleep: in this process, and asked again
 *                  +-- over already: stored --> replayed
 *
 * I6.  How a wait ended is decided once, by the database, stored as a step's result is, and replayed.
 * I13. No wait ends before its time by the database's clock, and its time is counted from the first
 *      attempt that began it.
 *
 * To park, the handler is interrupted: its finalizers run, and the next attempt begins at the top,
 * where finished steps and waits answer from what they have stored. So what comes before a wait belongs
 * into steps. An attempt that parks is no failure and no loss, and the recovery limit counts anew
 * after it. Cancelling, and the item's deadline, end a parked item as they end any other.
 *
 * Several at once: branches may wait beside each other, and the item wakes for the first that is over.
 * A step beside a wait is let end, and one may race it; what runs beside a wait outside of a step is
 * interrupted and begins anew. Which of two waits won a race is not stored: if something depends on it,
 * store it with a step (`Step.run("winner", Effect.succeed(winner), ..)`). `Effect.timeout` around a wait
 * begins anew with each attempt: use the wait's own `timeout`. Inside a step, a transaction or an
 * uninterruptible region nothing can wait: that dies with `WaitNotPossible`.
 */
import { Context, Duration, Effect, type Fiber, Option, Schema } from "effect"
import { SqlClient } from "effect/sql"
import type { SqlError } from "effect/sql/SqlError"
import { Attempt, busy, InsideStep, load, named, released, reserved, stepEnded } from "./Attempt.ts"
import { Coding } from "./Coding.ts"
import {
  AlreadySettled,
  type EnqueueRefused,
  type ItemFailed,
  PayloadTooLarge,
  StaleAttempt,
  StepNameReserved,
  UnknownId
} from "./Errors.ts"
import { hint, payloadMax, stateOf, traceparent } from "./HandIn.ts"
import { QueueRuntime } from "./QueueRuntime.ts"
import type { OutcomeRow } from "./QueueStore.ts"
import {
  type Asked,
  invoke as handIn,
  notifyWake,
  sendEvent,
  type WaitAnswer
} from "./WaitStore.ts"
import type { ItemId, WorkQueue } from "./WorkQueue.ts"

/** The time of a wait was over before what it waited for came. */
export class WaitTimedOut extends Schema.TaggedError<WaitTimedOut>()("WaitTimedOut", {
  item: Schema.String,
  wait: Schema.String,
  /** The item it waited for. It goes on by itself: cancel it if nobody needs it any more. */
  invoked: Schema.optional(Schema.String)
}) {
  override get message(): string {
    return `Item ${this.item} has waited for ${this.wait} in vain: its time is over.`
  }
}

/** A defect of the handler: it waits where its attempt could not be parked. */
export class WaitNotPossible extends Schema.TaggedError<WaitNotPossible>()("WaitNotPossible", {
  item: Schema.String,
  wait: Schema.String,
  within: Schema.Literals(["a step", "a transaction", "an uninterruptible region"])
}) {
  override get message(): string {
    return `Item ${this.item} waits for ${this.wait} inside ${this.within}: wait outside of it.`
  }
}

const timeoutMillis = (timeout: Duration.Input | undefined): number | null => {
  if (timeout === undefined) return null
  const millis = Duration.toMillis(timeout)
  return Number.isFinite(millis) ? Math.min(millis, centuryMillis) : null
}

/** The database adds it to its clock, and has years enough for that. */
const centuryMillis = 3_155_760_000_000

/** Where no attempt can be parked, or nothing. */
const obstacle = (fiber: Fiber.Fiber<unknown, unknown>): WaitNotPossible["within"] | undefined => {
  if (fiber.getRef(InsideStep) !== undefined) return "a step"
  const sql = Context.getOption(fiber.context as Context.Context<unknown>, SqlClient.SqlClient)
  if (
    Option.isSome(sql) &&
    Option.isSome(
      Context.getOption(
        fiber.context as Context.Context<unknown>,
        sql.value.transactionService as Context.Key<unknown, unknown>
      )
    )
  ) {
    return "a transaction"
  }
  // Not in the public type of a fiber, and nothing else tells.
  return "interruptible" in fiber && fiber.interruptible === false
    ? "an uninterruptible region"
    : undefined
}

interface Way {
  readonly kind: Asked["kind"]
  readonly durationMillis: number | null
  /** Up to so long it is waited for in this process. */
  readonly inMemoryMillis: number
  /** What has to be there before it is asked for. */
  readonly begin?: (attempt: Attempt["Service"]) => Effect.Effect<void, SqlError>
}

/** How the wait ended, as it is stored. */
const until = (name: string, way: Way): Effect.Effect<unknown, SqlError, Attempt> =>
  named(
    name,
    Effect.fnUntraced(function* (attempt) {
      const pending = (attempt.pending ??= new Map())
      const ask: Effect.Effect<WaitAnswer, SqlError> = Effect.gen(function* () {
        const stored = yield* load(attempt)
        if (stored.has(name)) return { status: "over", value: stored.get(name), due_in_ms: null }
        const within = yield* Effect.withFiber((fiber) => Effect.succeed(obstacle(fiber)))
        if (within !== undefined) {
          return yield* Effect.die(new WaitNotPossible({ item: attempt.id, wait: name, within }))
        }
        if (way.begin !== undefined) yield* way.begin(attempt)
        return yield* attempt.waits.push({
          id: attempt.id,
          attempt: attempt.attempt,
          name,
          kind: way.kind,
          durationMillis: way.durationMillis
        })
      })
      const asked = Effect.suspend(() => {
        // Of a wait that is over the branch goes on, as after a step.
        let release = stepEnded
        const noted = Effect.map(ask, (answer) => {
          if (answer.status === "pending") {
            const dueInMillis = answer.due_in_ms ?? undefined
            pending.set(name, { dueInMillis, parks: !isShort(way, dueInMillis) })
            release = released
          } else pending.delete(name)
          return answer
        })
        return busy(attempt, noted, (ended) => release(ended))
      })
      return yield* Effect.gen(function* () {
        for (;;) {
          const { due_in_ms, status, value } = yield* asked
          if (status === "over") return value
          if (status !== "pending") {
            return yield* Effect.die(new StaleAttempt({ id: attempt.id, attempt: attempt.attempt }))
          }
          const dueInMillis = due_in_ms ?? undefined
          // Otherwise it is parked by now, or will be when what runs beside it has ended.
          if (!isShort(way, dueInMillis)) return yield* Effect.never
          yield* Effect.sleep(Math.ceil(dueInMillis) + 1)
        }
      }).pipe(Effect.onExit(() => Effect.sync(() => pending.delete(name))))
    })
  )

const isShort = (way: Way, dueInMillis: number | undefined): dueInMillis is number =>
  dueInMillis !== undefined && dueInMillis <= way.inMemoryMillis

/**
 * Nothing, for that long, counted from the first attempt that came here. `inMemory`: the rest of a sleep
 * that is no longer than this keeps its slot; default 1 second, 0 for none. Such a sleep is no less
 * durable: its end was stored before.
 */
export const sleep = (
  name: string,
  duration: Duration.Input,
  options?: { readonly inMemory?: Duration.Input | undefined }
): Effect.Effect<void, SqlError, Attempt> =>
  Effect.asVoid(
    until(name, {
      kind: "sleep",
      durationMillis: timeoutMillis(duration),
      inMemoryMillis: Duration.toMillis(options?.inMemory ?? "1 second")
    })
  )

interface Ended {
  readonly value?: unknown
  readonly timedOut?: boolean
  readonly invoked?: string
}

/**
 * What `send` has told the item under that name, before this began or after. `success` says what it
 * is; without it the event carries nothing. An event that is there counts, even if the time is over.
 */
export const event: {
  <Success extends Schema.Top = Schema.Void>(
    name: string,
    options?: { readonly success?: Success | undefined; readonly timeout?: undefined }
  ): Effect.Effect<Success["Type"], SqlError, Attempt | Success["DecodingServices"]>
  <Success extends Schema.Top = Schema.Void>(
    name: string,
    options: { readonly success?: Success | undefined; readonly timeout: Duration.Input }
  ): Effect.Effect<Success["Type"], SqlError | WaitTimedOut, Attempt | Success["DecodingServices"]>
} = <Success extends Schema.Top = Schema.Void>(
  name: string,
  options?: {
    readonly success?: Success | undefined
    readonly timeout?: Duration.Input | undefined
  }
): Effect.Effect<Success["Type"], SqlError, Attempt | Success["DecodingServices"]> =>
  Effect.flatMap(
    until(name, {
      kind: "event",
      durationMillis: timeoutMillis(options?.timeout),
      inMemoryMillis: 0
    }),
    (stored): Effect.Effect<Success["Type"], never, Attempt | Success["DecodingServices"]> => {
      const ended = stored as Ended
      if (ended.timedOut === true) return timedOut(name, ended)
      const codec = Schema.toCodecJson((options?.success ?? Schema.Void) as Success)
      return Effect.orDie(Schema.decodeUnknownEffect(codec)(ended.value))
    }
  )

/** In the type of those calls alone that give a time. */
const timedOut = (name: string, ended: Ended): Effect.Effect<never, never, Attempt> =>
  Effect.flatMap(Attempt, ({ id }) =>
    Effect.fail(new WaitTimedOut({ item: id, wait: name, invoked: ended.invoked }) as never)
  )

interface InvokeOptions {
  /** Of the item that is handed in. */
  readonly priority?: number | undefined
  readonly key?: string | undefined
}

/**
 * Hands in an item of another queue, once over all attempts, and waits for its outcome: its success, its
 * declared failure, or `ItemFailed`. When the time is over, or this item ends, the other one goes on.
 */
export const invoke: {
  <
    Name extends string,
    Payload extends Schema.Top,
    Success extends Schema.Top,
    Error extends Schema.Top
  >(
    name: string,
    queue: WorkQueue<Name, Payload, Success, Error>,
    payload: Payload["~type.make.in"],
    options?: InvokeOptions & { readonly timeout?: undefined }
  ): Effect.Effect<
    Success["Type"],
    Error["Type"] | ItemFailed | EnqueueRefused | SqlError,
    Attempt | Payload["EncodingServices"] | Success["DecodingServices"] | Error["DecodingServices"]
  >
  <
    Name extends string,
    Payload extends Schema.Top,
    Success extends Schema.Top,
    Error extends Schema.Top
  >(
    name: string,
    queue: WorkQueue<Name, Payload, Success, Error>,
    payload: Payload["~type.make.in"],
    options: InvokeOptions & { readonly timeout: Duration.Input }
  ): Effect.Effect<
    Success["Type"],
    Error["Type"] | ItemFailed | EnqueueRefused | WaitTimedOut | SqlError,
    Attempt | Payload["EncodingServices"] | Success["DecodingServices"] | Error["DecodingServices"]
  >
} = <
  Name extends string,
  Payload extends Schema.Top,
  Success extends Schema.Top,
  Error extends Schema.Top
>(
  name: string,
  queue: WorkQueue<Name, Payload, Success, Error>,
  payload: Payload["~type.make.in"],
  options: InvokeOptions & { readonly timeout?: Duration.Input | undefined } = {}
) =>
  Effect.gen(function* () {
    const { decodeOutcome, toNewItem } = queue[Coding]
    const {
      key,
      payload: encoded,
      priority,
      trace
    } = yield* toNewItem(
      queue.payloadSchema.make(payload),
      { priority: options.priority, key: options.key },
      yield* payloadMax,
      yield* traceparent
    )
    const context = yield* Effect.context<never>()
    const durationMillis = timeoutMillis(options.timeout)
    const ended = (yield* until(name, {
      kind: "invoke",
      durationMillis,
      inMemoryMillis: 0,
      begin: (attempt) =>
        Effect.flatMap(
          handIn(attempt.sql, {
            item: attempt.id,
            attempt: attempt.attempt,
            name,
            timeoutMillis: durationMillis,
            queue: queue._tag,
            payload: encoded,
            priority,
            key,
            trace
          }),
          ({ queue_id }) =>
            queue_id === null
              ? Effect.void
              : Effect.provideContext(hint(attempt.sql, queue_id, undefined), context)
        )
    })) as Ended
    if (ended.timedOut === true) return yield* timedOut(name, ended)
    return yield* decodeOutcome(ended.value as OutcomeRow)
  })

/**
 * Tells an item that something has happened, in the transaction of the caller's `SqlClient` when one is
 * open. Kept until the item waits for it. False: that name was told before, or waited for in vain, and
 * nothing has changed. Any language tells with `SELECT tenure.signal(item, 'delivered', '{"at": 7}')`.
 */
export const send = Effect.fnUntraced(function* <Success extends Schema.Top = Schema.Void>(
  id: ItemId,
  name: string,
  value?: Success["Type"],
  options?: { readonly success?: Success | undefined }
): Effect.fn.Return<
  boolean,
  AlreadySettled | UnknownId | PayloadTooLarge | SqlError,
  SqlClient.SqlClient | Success["EncodingServices"]
> {
  if (name.startsWith(reserved)) {
    return yield* Effect.die(new StepNameReserved({ item: id, step: name }))
  }
  const sql = yield* SqlClient.SqlClient
  const codec = Schema.toCodecJson((options?.success ?? Schema.Void) as Success)
  const encoded = yield* Effect.orDie(Schema.encodeUnknownEffect(codec)(value))
  const text = JSON.stringify(encoded ?? null)
  const bytes = Buffer.byteLength(text)
  const bytesMax = yield* payloadMax
  if (bytes > bytesMax) return yield* new PayloadTooLarge({ bytes, bytesMax })
  const answer = yield* sendEvent(sql, { item: id, name, value: text })
  if (answer === "unknown") return yield* new UnknownId({ kind: "item", id })
  if (answer === "already") return false
  if (answer !== "sent") return yield* new AlreadySettled({ id, state: stateOf(answer) })
  yield* sql.afterCommit(wake(sql))
  return true
})

/** Any process may wake the item: this one if it can, else whoever listens. */
const wake = (sql: SqlClient.SqlClient): Effect.Effect<void> =>
  Effect.flatMap(Effect.serviceOption(QueueRuntime), (runtime) =>
    Option.isSome(runtime)
      ? Effect.sync(() => runtime.value.dueInUnsafe(0))
      : Effect.ignore(notifyWake(sql))
  )
