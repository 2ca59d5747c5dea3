// What must not compile. Each directive fails the build if its line starts to compile.
// @effect-diagnostics *:off
import { PgClient } from "@effect/sql-pg"
import {
  Config,
  Context,
  Effect,
  Layer,
  Option,
  Redacted,
  Result,
  Schema,
  type Stream
} from "effect"
import type { NonEmptyReadonlyArray } from "effect/Array"
import { type SqlClient } from "effect/sql"
import { DeadLetter, Group, Progress, Schedules, Step, Tenure, Wait, WorkQueue } from "tenure"
import { Imports, Thumbnails, ThumbnailsLive } from "./gallery.ts"

type Equals<A, B> =
  (<T>() => T extends A ? 1 : 2) extends <T>() => T extends B ? 1 : 2 ? true : false
declare const assertType: <_T extends true>() => void
declare const id: WorkQueue.ItemId
class Smtp extends Context.Service<Smtp, { readonly send: Effect.Effect<void> }>()("Smtp") {}
class Unrelated extends Schema.TaggedError<Unrelated>()("Unrelated", {}) {}

export const payloadsAndOptions = () => {
  // @ts-expect-error: width is a number
  void Thumbnails.enqueue({ imageId: "a", width: "320" })
  // @ts-expect-error: width is missing
  void Thumbnails.enqueue({ imageId: "a" })
  // @ts-expect-error: an unknown option
  void Thumbnails.enqueue({ imageId: "a", width: 320 }, { retries: 3 })
  // @ts-expect-error: not a duration
  void Thumbnails.enqueue({ imageId: "a", width: 320 }, { delay: "soon" })
  // @ts-expect-error: an item id is not any string
  void Thumbnails.await("a")
  // @ts-expect-error: no idempotency key from a field that is not there
  void WorkQueue.make("q", { payload: { a: Schema.String }, idempotencyKey: ({ b }) => b })
  // @ts-expect-error: no key from a field that is not there
  void WorkQueue.make("q", { payload: { a: Schema.String }, key: ({ b }) => b })
}

export const deadLetters = () => {
  // @ts-expect-error: no reason that an item can fail for
  void DeadLetter.redrive(Thumbnails, { reason: "Unlucky" })
  // @ts-expect-error: what is not in one's hands is not brought back
  void DeadLetter.reinject(id)
  // @ts-expect-error: no decision
  void DeadLetter.handle(Thumbnails, {}, () => Effect.succeed("retry"))
  // @ts-expect-error: not a state of an item
  void Thumbnails.list({ state: "done" })
}

export const results = () => {
  const awaited = Thumbnails.await(id)
  assertType<Equals<Effect.Success<typeof awaited>, { readonly url: string }>>()
  assertType<
    Equals<Effect.Error<typeof awaited>["_tag"], "ImageMissing" | "ItemFailed" | "UnknownId">
  >()
  assertType<Equals<Effect.Services<typeof awaited>, Tenure.Client>>()
  const handed = Thumbnails.enqueue({ imageId: "a", width: 320 })
  assertType<Equals<Effect.Services<typeof handed>, SqlClient.SqlClient>>()
  // @ts-expect-error: the typed failure is not handled
  const unhandled: Effect.Effect<unknown, never, Tenure.Client> = awaited
  // @ts-expect-error: the declared failure remains after the runtime's are caught
  const half: Effect.Effect<unknown, never, Tenure.Client> = awaited.pipe(
    Effect.catchTags({ ItemFailed: () => Effect.void, UnknownId: () => Effect.void })
  )
  return [unhandled, half]
}

export const handlers = () => {
  // @ts-expect-error: url is missing in the success
  void Thumbnails.toLayer(() => Effect.succeed({ link: "x" }))
  // @ts-expect-error: a failure that the definition does not declare
  void Thumbnails.toLayer(() => Effect.fail(new Unrelated()))
  void Thumbnails.toLayer(
    Effect.fn(function* (payload) {
      // @ts-expect-error: the payload is inferred, and has no height
      yield* Effect.log(payload.height)
      return { url: "x" }
    })
  )
  void Thumbnails.toLayer(() => Effect.succeed({ url: "x" }), {
    // @ts-expect-error: `while` sees the declared error
    retry: { while: (error) => error._tag === "Unrelated" }
  })
  // @ts-expect-error: an unknown limit
  void Thumbnails.toLayer(() => Effect.succeed({ url: "x" }), { concurrency: { perWorker: 3 } })
  // @ts-expect-error: a rate has a window
  void Thumbnails.toLayer(() => Effect.succeed({ url: "x" }), { rateLimit: { limit: 3 } })
  // @ts-expect-error: a rate is for something
  void Thumbnails.toLayer(() => Effect.succeed({ url: "x" }), { rateLimit: {} })
  // @ts-expect-error: not a duration
  void Thumbnails.toLayer(() => Effect.succeed({ url: "x" }), { priorityAging: "often" })
}

export const pausing = () => {
  assertType<Equals<Effect.Services<typeof Thumbnails.pause>, SqlClient.SqlClient>>()
  // @ts-expect-error: it needs a database
  const anywhere: Effect.Effect<void, unknown> = Thumbnails.resume
  return anywhere
}

export const paces = () => {
  // @ts-expect-error: a burst has an end
  void Thumbnails.enqueue({ imageId: "a", width: 320 }, { debounce: { key: "a" } })
  // @ts-expect-error: a period is a duration
  void Thumbnails.enqueue({ imageId: "a", width: 320 }, { throttle: { key: "a", period: "soon" } })
  // @ts-expect-error: a group id is not any string
  void Thumbnails.enqueue({ imageId: "a", width: 320 }, { group: "a" })
}

export const batches = () => {
  const batch = { batch: { size: 10, within: "1 second" } } as const
  const layer = Thumbnails.toLayerBatch(
    Effect.fn(function* (items) {
      assertType<
        Equals<
          typeof items,
          NonEmptyReadonlyArray<WorkQueue.BatchItem<typeof Thumbnails.payloadSchema.Type>>
        >
      >()
      yield* (yield* Smtp).send
      return items.map(({ payload }) => Result.succeed({ url: payload.imageId }))
    }),
    batch
  )
  assertType<Equals<Layer.Services<typeof layer>, Tenure.Executor | Smtp>>()
  // @ts-expect-error: the size is missing
  void Thumbnails.toLayerBatch(() => Effect.succeed([]))
  // @ts-expect-error: one result for all
  void Thumbnails.toLayerBatch(() => Effect.succeed({ url: "x" }), batch)
  // @ts-expect-error: a result that is none
  void Thumbnails.toLayerBatch(() => Effect.succeed([{ url: "x" }]), batch)
  // @ts-expect-error: a failure that the definition does not declare
  void Thumbnails.toLayerBatch(() => Effect.succeed([Result.fail(new Unrelated())]), batch)
  const Stepping = Thumbnails.toLayerBatch(
    () => Effect.as(Step.run("x", Effect.void), [Result.succeed({ url: "x" })]),
    batch
  )
  const Runtime = Tenure.layer({ application: "a", version: "a-v1" }).pipe(
    Layer.provide(Tenure.layerPostgres({ url: Redacted.make("postgres://") }))
  )
  // @ts-expect-error: an item of a batch has no steps
  Stepping.pipe(Layer.provide(Runtime), Tenure.runMain)
}

export const groups = () => {
  class Summary extends WorkQueue.make("summary", {
    payload: { book: Schema.String, group: Group.Ended }
  }) {}
  const made = Group.make({ onDone: { queue: Summary, payload: { book: "a" } } })
  assertType<Equals<Effect.Success<typeof made>, Group.GroupId>>()
  assertType<Equals<Effect.Services<typeof made>, SqlClient.SqlClient>>()
  // @ts-expect-error: the callback's payload has no field for the counts
  void Group.make({ onDone: { queue: Thumbnails, payload: { imageId: "a", width: 1 } } })
  // @ts-expect-error: book is missing
  void Group.make({ onDone: { queue: Summary, payload: {} } })
  // @ts-expect-error: an item is no group
  void Group.await(id)
}

export const steps = () => {
  const outside = Step.run("x", Effect.succeed(1), { success: Schema.Int })
  // @ts-expect-error: a step needs the attempt that only a handler has
  const run: Effect.Effect<number, unknown> = outside
  // @ts-expect-error: the step's result is not what its schema says
  void Step.run("y", Effect.succeed("1"), { success: Schema.Int })
  return run
}

export const progress = () => {
  const watched = Imports.progress(id)
  assertType<Equals<Stream.Success<typeof watched>, { readonly rows: number }>>()
  assertType<Equals<Stream.Error<typeof watched>, WorkQueue.UnknownId>>()
  assertType<Equals<Stream.Services<typeof watched>, Tenure.Client>>()
  void Imports.toLayer((_, item) => item.progress({ rows: 1 }))
  // @ts-expect-error: not what the queue's progress is
  void Imports.toLayer((_, item) => item.progress({ rows: "1" }))
  // @ts-expect-error: a field is missing
  void Imports.toLayer((_, item) => item.progress({}))
  void Thumbnails.toLayer((_, item) =>
    // @ts-expect-error: the queue declares no progress
    Effect.as(item.progress({ rows: 1 }), { url: "x" })
  )
  // @ts-expect-error: nor can it be reported in another way
  void Progress.report(Thumbnails, { rows: 1 })
  // @ts-expect-error: not what the queue's progress is
  void Progress.report(Imports, { lines: 1 })
  const reported = Progress.report(Imports, { rows: 1 })
  // @ts-expect-error: progress is reported by an attempt, which only a handler has
  const outside: Effect.Effect<void, WorkQueue.ProgressRefused> = reported
  const unknown = Thumbnails.progress(id)
  assertType<Equals<Stream.Success<typeof unknown>, never>>()
  return outside
}

export const sending = () => {
  const send = (key: string): Effect.Effect<string, Unrelated, Smtp> =>
    key === "" ? new Unrelated() : Effect.succeed(key)
  const resolve = () => Effect.succeedSome("receipt")
  const unresolved = Step.send("x", { send, success: Schema.String })
  const resolved = Step.send("y", { send, resolve, success: Schema.String })
  type Always = "Unrelated" | "SqlError" | "LeaseLost" | "LeaseUnverified"
  assertType<Equals<Effect.Error<typeof unresolved>["_tag"], Always | "OutcomeUnknown">>()
  assertType<Equals<Effect.Error<typeof resolved>["_tag"], Always>>()
  assertType<Equals<Effect.Success<typeof resolved>, string>>()
  const key = Step.idempotencyKey("x")
  assertType<Equals<Effect.Success<typeof key>, string>>()
  // @ts-expect-error: a key belongs to the attempt that only a handler has
  const outside: Effect.Effect<string> = key
  // @ts-expect-error: the receipt is not what its schema says
  void Step.send("z", { send: () => Effect.succeed(1), success: Schema.String })
  // @ts-expect-error: an answer is a receipt, or none
  void Step.send("z", { send, resolve: () => Effect.succeed("receipt"), success: Schema.String })
  const wrong = () => Effect.succeed(Option.some(1))
  // @ts-expect-error: nor is it of another type than the receipt
  void Step.send("z", { send, resolve: wrong, success: Schema.String })
  const blind = Effect.as(Step.send("z", { send: () => Effect.void }), { url: "x" })
  // @ts-expect-error: that the outcome may be unknown is not handled
  void Thumbnails.toLayer(() => blind)
  void Thumbnails.toLayer(() =>
    Effect.as(Step.send("z", { send: () => Effect.void, resolve: () => Effect.succeedNone }), {
      url: "x"
    })
  )
  return outside
}

export const waits = () => {
  const patient = Wait.event("x", { success: Schema.Int })
  const hasty = Wait.event("x", { success: Schema.Int, timeout: "1 day" })
  assertType<Equals<Effect.Success<typeof patient>, number>>()
  assertType<Equals<Effect.Error<typeof patient>["_tag"], "SqlError">>()
  assertType<Equals<Effect.Error<typeof hasty>["_tag"], "SqlError" | "WaitTimedOut">>()
  const invoked = Wait.invoke("x", Thumbnails, { imageId: "a", width: 1 })
  assertType<Equals<Effect.Success<typeof invoked>, { readonly url: string }>>()
  assertType<
    Equals<
      Effect.Error<typeof invoked>["_tag"],
      "ImageMissing" | "ItemFailed" | "EnqueueRefused" | "SqlError"
    >
  >()
  // @ts-expect-error: only a handler can wait
  const outside: Effect.Effect<void, unknown> = Wait.sleep("x", "1 day")
  // @ts-expect-error: not a duration
  void Wait.sleep("x", "soon")
  // @ts-expect-error: the other queue's payload
  void Wait.invoke("x", Thumbnails, { imageId: "a" })
  // @ts-expect-error: an item id is not any string
  void Wait.send("a", "x")
  // @ts-expect-error: the event is not what its schema says
  void Wait.send(id, "x", "1", { success: Schema.Int })
  // @ts-expect-error: that the time may be over is not handled
  void Thumbnails.toLayer(() => Effect.as(hasty, { url: "x" }))
  void Thumbnails.toLayer(() => Effect.as(patient, { url: "x" }))
  return outside
}

export const schedules = () => {
  const payload = { imageId: "cover", width: 640 }
  const nightly = Thumbnails.layerSchedule("cover", { cron: "0 3 * * *", payload })
  assertType<Equals<Layer.Services<typeof nightly>, Tenure.Executor>>()
  void Thumbnails.layerSchedule("cover", { every: "1 hour", payload: () => payload })
  // @ts-expect-error: width is missing
  void Thumbnails.layerSchedule("cover", { every: "1 hour", payload: { imageId: "cover" } })
  // @ts-expect-error: nor is it made from the slot
  void Thumbnails.layerSchedule("cover", { every: "1 hour", payload: ({ slot }) => ({ slot }) })
  // @ts-expect-error: one calendar
  void Thumbnails.layerSchedule("cover", { cron: "0 3 * * *", every: "1 hour", payload })
  // @ts-expect-error: and not none
  void Thumbnails.layerSchedule("cover", { payload })
  // @ts-expect-error: not a duration
  void Thumbnails.layerSchedule("cover", { every: "often", payload })
  // @ts-expect-error: no such policy
  void Thumbnails.layerSchedule("cover", { every: "1 hour", payload, catchUp: "some" })
  const triggered = Schedules.trigger("cover")
  assertType<Equals<Effect.Services<typeof triggered>, SqlClient.SqlClient>>()
}

export const settlements = () => {
  const settling = Thumbnails.layerSettlement(
    Effect.fn(function* (payload, quarantined) {
      assertType<Equals<typeof payload, typeof Thumbnails.payloadSchema.Type>>()
      assertType<Equals<typeof quarantined, WorkQueue.QuarantinedItem>>()
      yield* (yield* Smtp).send
      return yield* Effect.when(new Unrelated(), Effect.succeed(payload.width === 0)).pipe(
        Effect.asVoid
      )
    })
  )
  assertType<Equals<Layer.Services<typeof settling>, Tenure.Executor | Smtp>>()
}

export const missingLayers = () => {
  const WithSmtp = Thumbnails.toLayer(
    Effect.fn(function* () {
      yield* (yield* Smtp).send
      return { url: "x" }
    })
  )
  assertType<Equals<Layer.Services<typeof WithSmtp>, Tenure.Executor | Smtp>>()
  const Runtime = Tenure.layer({ application: "a", version: "a-v1" }).pipe(
    Layer.provide(Tenure.layerPostgres({ url: Redacted.make("postgres://") }))
  )
  // @ts-expect-error: Smtp is missing
  WithSmtp.pipe(Layer.provide(Runtime), Tenure.runMain)
  const Stepping = Thumbnails.layerSettlement(() => Step.run("x", Effect.void))
  // @ts-expect-error: a settlement is no attempt, and has no steps
  Stepping.pipe(Layer.provide(Runtime), Tenure.runMain)
  // @ts-expect-error: HttpClient is missing
  ThumbnailsLive.pipe(Layer.provide(Runtime), Tenure.runMain)
  // @ts-expect-error: the database is missing
  WithSmtp.pipe(Layer.provide(Tenure.layer({ application: "a", version: "a-v1" })), Tenure.runMain)
  const OnClient = WithSmtp.pipe(
    Layer.provide(Tenure.layerClient),
    Layer.provide(PgClient.layerConfig({}))
  )
  // @ts-expect-error: a client cannot run work
  Tenure.runMain(OnClient)
  // @ts-expect-error: the version is missing
  void Tenure.layer({ application: "a" })
  // @ts-expect-error: an unknown setting
  void Tenure.layer({ application: "a", version: "a-v1", settings: { leaseTimeout: "1 minute" } })
  // @ts-expect-error: a secret is not a string
  void Tenure.layerPostgresConfig({ url: Config.String("DATABASE_URL") })
}
