/**
 * Durable queues: what producers and handlers agree on is a definition, how work is run is given with
 * the handler.
 *
 * Delivery is at least once, and the outcome exactly once: an item runs again when its executor was
 * lost before the outcome was stored, and every write of the earlier attempt through the fenced pool
 * is refused from then on. What a handler does outside the database may happen twice; `item.id` is
 * the same each time.
 *
 * A higher priority starts first, equal ones in the order of enqueue. An idempotency key holds while
 * its item is retained. A deadline ends waiting and running work. A failure for which `retry.while`
 * says no is final.
 */
import {
  type Brand,
  Cause,
  Context,
  DateTime,
  Duration,
  Effect,
  Exit,
  Layer,
  Option,
  Result,
  Schema,
  SchemaIssue,
  type Scope,
  Stream
} from "effect"
import type { NonEmptyReadonlyArray } from "effect/Array"
import { SqlClient, type SqlError } from "effect/sql"
import { DefinitionRejected, refuse, type StartupRefused } from "../database/StartupRefused.ts"
import { waitOrRefuse } from "../database/Startup.ts"
import { sqlState } from "../database/SqlState.ts"
import { Executor } from "../executor/Executor.ts"
import { Settlement } from "../recovery/Settlement.ts"
import { settlingQueue } from "../recovery/SettlementStore.ts"
import * as Batch from "./Batch.ts"
import * as Calendar from "./Calendar.ts"
import { Client } from "./Client.ts"
import * as Limits from "./Limits.ts"
import { Coding } from "./Coding.ts"
import {
  AlreadySettled,
  Cancelled,
  DeadlineExceeded,
  EnqueueRefused,
  GroupClosed,
  HandlerDied,
  IdempotencyConflict,
  ItemFailed,
  KeyRejected,
  PayloadNotJson,
  PayloadTooLarge,
  ProgressRefused,
  Quarantined,
  RetryLater,
  StaleAttempt,
  UnknownId
} from "./Errors.ts"
import * as Items from "./Items.ts"
import { groupFor } from "./Enqueuer.ts"
import type { GroupId } from "./Group.ts"
import { type Debounce, paceOf, type Throttle } from "./Pace.ts"
import { hint, payloadMax, stateOf, traceparent } from "./HandIn.ts"
import { reporter, type Reporting } from "./ProgressReports.ts"
import * as QueueStore from "./QueueStore.ts"
import { QueueRuntime } from "./QueueRuntime.ts"
import type { RetryPolicy } from "./RetryPolicy.ts"
import * as Runner from "./Runner.ts"
import { Scheduler } from "./Scheduler.ts"
import { Attempt } from "./Step.ts"
import { notJson, textOf, troubleOfKey } from "./Storable.ts"
import * as Verdict from "./Verdict.ts"
import type { AttemptFailure } from "./Verdict.ts"

export {
  AlreadySettled,
  Cancelled,
  DeadlineExceeded,
  EnqueueRefused,
  GroupClosed,
  HandlerDied,
  IdempotencyConflict,
  ItemFailed,
  KeyRejected,
  PayloadNotJson,
  PayloadTooLarge,
  ProgressRefused,
  Quarantined,
  RetryLater,
  StaleAttempt,
  UnknownId
}
export type { AttemptFailure, Debounce, RetryPolicy, Throttle }
export type { ListFilter } from "./Items.ts"
export type { Rate, RateLimit } from "./Limits.ts"

export type ItemId = string & Brand.Brand<"tenure/ItemId">
export const ItemId = Schema.String.pipe(Schema.brand("tenure/ItemId"))

export interface EnqueueOptions {
  /** Higher runs first. Default 0. */
  readonly priority?: number | undefined
  /** Not before: after a duration, or at an instant. */
  readonly delay?: Duration.Input | DateTime.Utc | undefined
  /** Not after: settled as `DeadlineExceeded` then, running or not. */
  readonly deadline?: Duration.Input | DateTime.Utc | undefined
  /** Overrides the definition's. */
  readonly key?: string | undefined
  readonly idempotencyKey?: string | undefined
  /** The last one of a burst, once the burst is over. Not with an idempotency key, a group or a `delay`. */
  readonly debounce?: Debounce | undefined
  /** The first one of a period, and no other. Not with an idempotency key or a group. */
  readonly throttle?: Throttle | undefined
  /**
   * Makes it a member. One that the idempotency key names already is none: it belongs to whoever handed
   * it in first.
   */
  readonly group?: GroupId | undefined
}

/** How work is run. Belongs to those who run it, so it is given with the handler, not in the definition. */
export interface Policy<E> extends Limits.Limits {
  /** `perExecutor` defaults to 10; `global` and `perKey` are unlimited without a number. */
  readonly concurrency?:
    | {
        readonly perExecutor?: number | undefined
        readonly global?: number | undefined
        /** 1 runs a key's items one after the other, though a retry may be overtaken. Keys take turns, see `fair`. */
        readonly perKey?: number | undefined
      }
    | undefined
  readonly retry?: RetryPolicy<E> | undefined
  /** One attempt's budget. */
  readonly timeout?: Duration.Input | undefined
  /**
   * The handler runs in one transaction with its outcome: what it writes through its `SqlClient`, and
   * that the item is completed, are committed once, or neither is. Each item is a commit of its own,
   * and has a connection of the pool for as long as it runs (`poolConnectionsMax`): for short handlers
   * that write. Durable steps are refused inside, and effects outside the database are not part of it.
   */
  readonly transaction?: boolean | undefined
  /** What ends an item whose executors are lost: so many of them in all, or since its last checkpoint. */
  readonly recovery?: "executions" | "consecutive" | undefined
}

/**
 * When a schedule hands in an item, and which. Give one of `cron`, `every` and `at`.
 *
 * `cron`: five fields, or six with seconds first, by the clock of `timeZone` (default UTC). When that clock
 * is moved: with every hour in it (`0 * * * *`) it fires whenever the clock shows a matching time, so an
 * hour that is repeated fires twice, as time passes. With certain hours (`30 2 * * *`) each matching time
 * fires once: one that is skipped at the moment at which the clock jumps over it, one that is repeated at
 * the first.
 *
 * `every`: in elapsed time, from one second up, counted from `anchor` (default 1970-01-01T00:00Z), so that all
 * processes have the same slots whenever they start. `at`: once; not if it has passed at the first start.
 */
export type ScheduleOptions<Payload> = (
  | {
      readonly cron: string
      readonly timeZone?: DateTime.TimeZone | string | undefined
      readonly every?: undefined
      readonly at?: undefined
    }
  | {
      readonly every: Duration.Input
      readonly anchor?: DateTime.DateTime | undefined
      readonly cron?: undefined
      readonly at?: undefined
    }
  | {
      readonly at: DateTime.DateTime
      readonly cron?: undefined
      readonly every?: undefined
    }
) & {
  /** The same each time, or made from the slot; of a trigger, that is the time at which it was asked for. */
  readonly payload: Payload | ((due: { readonly slot: DateTime.Utc }) => Payload)
  /**
   * Of the slots that passed while no process could fire them: `last` (the default) fires the latest, once,
   * `all` the latest thousand, `none` none that is a minute late or more.
   */
  readonly catchUp?: Calendar.CatchUp | undefined
  readonly priority?: number | undefined
  readonly key?: string | undefined
  /** Of each item, from when it is handed in. */
  readonly deadline?: Duration.Input | undefined
}

/** What a handler knows about the attempt it is. */
export interface Item<Report = never> extends Runner.ItemContext {
  readonly id: ItemId
  /**
   * Tells whoever watches how far the item is, in place of what it reported before. It waits for
   * nothing: five times a second at most the latest value is written, and the last one before the
   * outcome. At most 64 KiB.
   */
  readonly progress: (report: Report) => Effect.Effect<void, ProgressRefused>
}

/** How work is run that a handler takes many at once of. */
export interface BatchPolicy<E> extends Omit<Policy<E>, "concurrency" | "transaction"> {
  readonly batch: {
    /** At most so many items for one call. */
    readonly size: number
    /**
     * How long an item may wait for others, from the first one of its batch on; a full batch never waits.
     * Without it a batch is what is there.
     */
    readonly within?: Duration.Input | undefined
  }
  /** Counted in items, a batch as all of its items. `perExecutor` defaults to ten batches. */
  readonly concurrency?: Policy<E>["concurrency"]
}

/** One item of a batch. */
export interface BatchItem<Payload> {
  readonly payload: Payload
  readonly item: Item
}

/** What is known of an item, whatever its state. No payload. */
export interface ItemInfo extends Items.ItemInfo {
  readonly id: ItemId
}

/** What is known of an item that was running when too many executors were lost. */
export interface QuarantinedItem {
  readonly id: ItemId
  /** Executors that were lost with it. */
  readonly executions: number
  readonly limit: Quarantined["limit"]
  readonly key: Option.Option<string>
  readonly quarantinedAt: DateTime.Utc
}

export const TypeId = "~tenure/WorkQueue"
export type TypeId = typeof TypeId

export interface WorkQueue<
  Name extends string,
  Payload extends Schema.Top,
  Success extends Schema.Top,
  Error extends Schema.Top,
  Progress extends Schema.Top = Schema.Never
> {
  new (_: never): {}
  readonly [TypeId]: TypeId
  readonly _tag: Name
  readonly payloadSchema: Payload
  readonly successSchema: Success
  readonly errorSchema: Error
  readonly progressSchema: Progress

  /** Of the library's own modules. */
  readonly [Coding]: Coding<Payload, Success, Error>

  /** @internal One item as the store takes it. */
  readonly "~item": (
    payload: Payload["~type.make.in"],
    options: EnqueueOptions
  ) => Effect.Effect<QueueStore.NewItem, EnqueueRefused, Payload["EncodingServices"]>

  /**
   * Hands in one item, in the transaction of the caller's `SqlClient` when one is open. After an error
   * outside a transaction whether it was accepted is not known: repeat it with an idempotency key.
   */
  readonly enqueue: (
    payload: Payload["~type.make.in"],
    options?: EnqueueOptions
  ) => Effect.Effect<
    ItemId,
    EnqueueRefused | SqlError.SqlError,
    SqlClient.SqlClient | Payload["EncodingServices"]
  >

  /** All or none, in one statement; ids in the order of the payloads. */
  readonly enqueueAll: (
    payloads: Iterable<Payload["~type.make.in"]>,
    options?: EnqueueOptions | ((payload: Payload["Type"]) => EnqueueOptions)
  ) => Effect.Effect<
    ReadonlyArray<ItemId>,
    EnqueueRefused | SqlError.SqlError,
    SqlClient.SqlClient | Payload["EncodingServices"]
  >

  /** Waits for the outcome: pushed, and through outages. Bound it with `Effect.timeout`. */
  readonly await: (
    id: ItemId
  ) => Effect.Effect<
    Success["Type"],
    Error["Type"] | ItemFailed | UnknownId,
    Client | Success["DecodingServices"] | Error["DecodingServices"]
  >

  /** The outcome if there is one already. */
  readonly poll: (
    id: ItemId
  ) => Effect.Effect<
    Option.Option<Exit.Exit<Success["Type"], Error["Type"] | ItemFailed>>,
    UnknownId | SqlError.SqlError,
    SqlClient.SqlClient | Success["DecodingServices"] | Error["DecodingServices"]
  >

  /**
   * What the item's handler reports, the latest value first, until the item has settled: pushed, and
   * through outages. Values that follow each other faster than they are taken are left out. Of an item
   * that has settled, the last one; of one that is tried again, those of its latest attempt that has
   * reported.
   */
  readonly progress: (
    id: ItemId
  ) => Stream.Stream<Progress["Type"], UnknownId, Client | Progress["DecodingServices"]>

  /** Running work is interrupted by its owner. `AlreadySettled` when the item settled first. */
  readonly cancel: (
    id: ItemId
  ) => Effect.Effect<void, AlreadySettled | UnknownId | SqlError.SqlError, SqlClient.SqlClient>

  /**
   * A failed or quarantined item becomes available again, with fresh counters and without a deadline that has
   * passed. One that somebody handles as a dead letter is left alone: `AlreadySettled`, as leased.
   */
  readonly retry: (
    id: ItemId
  ) => Effect.Effect<void, AlreadySettled | UnknownId | SqlError.SqlError, SqlClient.SqlClient>

  /**
   * The queue's items, newest first to the millisecond, page by page: each is met once, however it moves meanwhile. Those of a
   * state that few are in are found where they are; completed and cancelled ones are looked for among all.
   */
  readonly list: (
    filter?: Items.ListFilter
  ) => Stream.Stream<ItemInfo, SqlError.SqlError, SqlClient.SqlClient>

  /**
   * Nothing is claimed any more, in whatever process; items are accepted and wait. It holds for claims that
   * begin after the commit: what is claimed by then, running or about to, goes on. Again: no change.
   */
  readonly pause: Effect.Effect<void, SqlError.SqlError, SqlClient.SqlClient>

  /** Claims go on at the commit. */
  readonly resume: Effect.Effect<void, SqlError.SqlError, SqlClient.SqlClient>

  /** Runs the queue in this process. */
  readonly toLayer: <R>(
    handler: (
      payload: Payload["Type"],
      item: Item<Progress["Type"]>
    ) => Effect.Effect<Success["Type"], Error["Type"] | AttemptFailure, R>,
    policy?: Policy<Error["Type"]>
  ) => Layer.Layer<
    never,
    StartupRefused,
    | Executor
    | Exclude<R, Scope.Scope | Attempt>
    | Payload["DecodingServices"]
    | Success["EncodingServices"]
    | Error["EncodingServices"]
    | Progress["EncodingServices"]
  >

  /**
   * Runs the queue in this process, many items with one call. The handler gives one result for each, in
   * their order: each is settled or retried by its own. A failure of the whole call, or a result too few or
   * too many, which is a defect, is the result of each.
   *
   * What ends one item, a deadline or `cancel`, takes it out of the batch: its result is dropped, and the
   * call goes on for the others. `timeout` is the call's. An item of a batch has no steps: its handler
   * runs for others as well.
   */
  readonly toLayerBatch: <R>(
    handler: (
      batch: NonEmptyReadonlyArray<BatchItem<Payload["Type"]>>
    ) => Effect.Effect<
      ReadonlyArray<Result.Result<Success["Type"], Error["Type"] | AttemptFailure>>,
      Error["Type"] | AttemptFailure,
      R
    >,
    policy: BatchPolicy<Error["Type"]>
  ) => Layer.Layer<
    never,
    StartupRefused,
    | Executor
    | Exclude<R, Scope.Scope>
    | Payload["DecodingServices"]
    | Success["EncodingServices"]
    | Error["EncodingServices"]
  >

  /**
   * Settles the queue's quarantined items in the application's own rows, as failed, say, without
   * running the handler, in this process and whether it runs the queue or not. The effect runs in a
   * transaction of its `SqlClient`, in which the item leaves the quarantine: both are committed once,
   * or neither. Keep other effects out of it, it is repeated until it succeeds.
   *
   * Queues without one stay quarantined until `tenure quarantine close` or `retry`. Nothing runs the
   * item again but a retry, and by then its rows may have been settled as failed.
   */
  readonly layerSettlement: <E, R>(
    settle: (payload: Payload["Type"], quarantined: QuarantinedItem) => Effect.Effect<void, E, R>
  ) => Layer.Layer<
    never,
    StartupRefused,
    Executor | Exclude<R, Scope.Scope> | Payload["DecodingServices"]
  >

  /**
   * Hands in an item at each slot of a calendar, from any process that has this layer, whether it runs the
   * queue or not; each slot once, however many have it. `name` is the schedule's, unique in the database.
   *
   * Due by the database's clock. The slot is the item's identity: the definition's `idempotencyKey` does not
   * count here. A new version may change anything but the name: the definition that was registered last is in
   * force, and processes with another one fire nothing until those with it are gone.
   *
   * Refused: what is no cron expression or time zone, a time that never comes, an interval under a second.
   */
  readonly layerSchedule: (
    name: string,
    options: ScheduleOptions<Payload["~type.make.in"]>
  ) => Layer.Layer<never, StartupRefused, Executor | Payload["EncodingServices"]>
}

export interface Any {
  new (_: never): {}
  readonly [TypeId]: TypeId
  readonly _tag: string
  readonly payloadSchema: Schema.Top
  readonly successSchema: Schema.Top
  readonly errorSchema: Schema.Top
  readonly progressSchema: Schema.Top
}

type SchemaOf<S extends Schema.Struct.Fields | Schema.Top> = S extends Schema.Struct.Fields
  ? Schema.Struct<S>
  : S
type TypeOf<S extends Schema.Struct.Fields | Schema.Top> = S extends Schema.Struct.Fields
  ? Schema.Struct.Type<S>
  : S extends Schema.Top
    ? S["Type"]
    : never

const priorityMax = 1_000_000

/** Of what a claim takes. */
const batchSizeMax = 1000

export const make = <
  const Name extends string,
  Payload extends Schema.Struct.Fields | Schema.Top,
  Success extends Schema.Top = Schema.Void,
  Error extends Schema.Top = Schema.Never,
  Progress extends Schema.Top = Schema.Never
>(
  name: Name,
  options: {
    readonly payload: Payload
    readonly success?: Success | undefined
    readonly error?: Error | undefined
    /** What its handler may report with `item.progress`. */
    readonly progress?: Progress | undefined
    /** A second enqueue with this key returns the first item's id. */
    readonly idempotencyKey?: ((payload: TypeOf<Payload>) => string) | undefined
    /** What `concurrency.perKey` counts by. */
    readonly key?: ((payload: TypeOf<Payload>) => string) | undefined
  }
): WorkQueue<Name, SchemaOf<Payload>, Success, Error, Progress> => {
  checkName(name)
  const payloadSchema = (
    Schema.isSchema(options.payload)
      ? options.payload
      : Schema.Struct(options.payload as Schema.Struct.Fields)
  ) as SchemaOf<Payload>
  // A function, so that `class X extends make(..) {}` works; methods close over it and need no `this`.
  function Definition() {}
  const methods = operations<SchemaOf<Payload>, Success, Error, Progress>({
    name,
    payloadSchema,
    successSchema: (options.success ?? Schema.Void) as Success,
    errorSchema: (options.error ?? Schema.Never) as Error,
    progressSchema: options.progress,
    idempotencyKey: options.idempotencyKey as ((payload: unknown) => string) | undefined,
    key: options.key as ((payload: unknown) => string) | undefined
  })
  return Object.assign(Definition, {
    [TypeId]: TypeId,
    _tag: name,
    ...methods,
    toLayerBatch: batched<SchemaOf<Payload>["Type"], Success["Type"], Error["Type"]>(
      methods.toLayer
    )
  }) as unknown as WorkQueue<Name, SchemaOf<Payload>, Success, Error, Progress>
}

interface Definition<
  Payload extends Schema.Top,
  Success extends Schema.Top,
  Error extends Schema.Top,
  Progress extends Schema.Top
> {
  readonly name: string
  readonly payloadSchema: Payload
  readonly successSchema: Success
  readonly errorSchema: Error
  readonly progressSchema: Progress | undefined
  readonly idempotencyKey: ((payload: Payload["Type"]) => string) | undefined
  readonly key: ((payload: Payload["Type"]) => string) | undefined
}

const operations = <
  Payload extends Schema.Top,
  Success extends Schema.Top,
  Error extends Schema.Top,
  Progress extends Schema.Top
>(
  definition: Definition<Payload, Success, Error, Progress>
) => {
  const { name } = definition
  // Compiled once: a codec made at each call costs three times the decoding.
  const payloadCodec = Schema.toCodecJson(definition.payloadSchema)
  const encodePayload = Schema.encodeUnknownEffect(payloadCodec)
  const decodePayload = Schema.decodeUnknownEffect(payloadCodec)
  const successCodec = Schema.toCodecJson(definition.successSchema)
  const encodeSuccess = Schema.encodeUnknownEffect(successCodec)
  const decodeSuccess = Schema.decodeUnknownEffect(successCodec)
  const errorCodec = Schema.toCodecJson(definition.errorSchema)
  const encodeError = Schema.encodeUnknownEffect(errorCodec)
  const decodeError = Schema.decodeUnknownEffect(errorCodec)
  const progressSchema = (definition.progressSchema ?? Schema.Never) as Progress
  const decodeProgress = Schema.decodeUnknownEffect(Schema.toCodecJson(progressSchema))
  const report = reporter(progressSchema)

  const refuse = (reason: EnqueueRefused["reason"]) => new EnqueueRefused({ queue: name, reason })

  const checkKey = (option: KeyRejected["option"], key: string | null) => {
    const problem = key === null ? undefined : troubleOfKey(key)
    return problem === undefined ? key : refuse(new KeyRejected({ option, problem }))
  }

  // A payload that breaks its schema is the caller's bug; one that cannot even be looked at is refused.
  const makePayload = (input: Payload["~type.make.in"]): Payload["Type"] | EnqueueRefused => {
    try {
      return definition.payloadSchema.make(input)
    } catch (error) {
      if (error instanceof Error && SchemaIssue.isIssue(error.cause)) throw error
      return refuse(new PayloadNotJson({ detail: notJson(error).detail }))
    }
  }

  const refuseValue = (cause: Cause.Cause<unknown>) =>
    refuse(new PayloadNotJson({ detail: notJson(Cause.squash(cause)).detail }))

  const itemOf = (
    encoded: unknown,
    payload: Payload["Type"],
    options: EnqueueOptions,
    bytesMax: number,
    trace: string | null
  ): QueueStore.NewItem | EnqueueRefused => {
    const text = textOf(encoded ?? null, bytesMax)
    if (typeof text !== "string") {
      return refuse(
        text._tag === "TooLarge"
          ? new PayloadTooLarge({ bytes: text.bytes, bytesMax })
          : new PayloadNotJson({ detail: text.detail })
      )
    }
    const key = checkKey("key", options.key ?? definition.key?.(payload) ?? null)
    if (key instanceof EnqueueRefused) return key
    const idempotencyKey = checkKey(
      "idempotencyKey",
      options.idempotencyKey ?? definition.idempotencyKey?.(payload) ?? null
    )
    if (idempotencyKey instanceof EnqueueRefused) return idempotencyKey
    return {
      payload: text,
      priority: checkPriority(options.priority ?? 0),
      key,
      idempotencyKey,
      delayMillis: millisOf(options.delay),
      notBefore: instantOf(options.delay),
      deadlineMillis: millisOf(options.deadline),
      notAfter: instantOf(options.deadline),
      trace,
      pace: paceOf(options, idempotencyKey),
      group: options.group
    }
  }

  // What needs no fiber runs in none: that was half of what a bulk enqueue costs a process (5 of 10 us).
  const toNewItem = (
    payload: Payload["Type"],
    options: EnqueueOptions,
    bytesMax: number,
    trace: string | null
  ): Effect.Effect<QueueStore.NewItem, EnqueueRefused, Payload["EncodingServices"]> => {
    const finish = (encoded: unknown) => {
      const item = itemOf(encoded, payload, options, bytesMax, trace)
      return item instanceof EnqueueRefused ? Exit.fail(item) : Exit.succeed(item)
    }
    const encoding = encodeNow(payload)
    return isDone(encoding)
      ? finish(encoding.value)
      : encoding.pipe(Effect.catchCause(refuseValue), Effect.flatMap(finish))
  }

  const encodeNow = (payload: Payload["Type"]) => {
    try {
      return encodePayload(payload)
    } catch (error) {
      return Effect.die(error)
    }
  }

  const enqueueAll = Effect.fnUntraced(function* (
    inputs: Iterable<Payload["~type.make.in"]>,
    options: EnqueueOptions | ((payload: Payload["Type"]) => EnqueueOptions) = {}
  ) {
    const sql = yield* SqlClient.SqlClient
    const bytesMax = yield* payloadMax
    const trace = yield* traceparent
    const items: Array<QueueStore.NewItem> = []
    for (const input of inputs) {
      const payload = makePayload(input)
      if (payload instanceof EnqueueRefused) return yield* payload
      const of = typeof options === "function" ? options(payload) : options
      const made = toNewItem(payload, of, bytesMax, trace)
      items.push(isDone(made) ? made.value : yield* made)
    }
    const [first] = items
    if (first === undefined) return []
    const group = items.length === 1 ? yield* groupFor(sql, first) : undefined
    const enqueued = yield* (
      group === undefined ? QueueStore.enqueueAll(sql, name, items) : group.push(name, first)
    ).pipe(
      // Sealed after the look, and before the commit.
      Effect.catchIf(
        (error) => sqlState(error) === "TN030",
        () => groupClosed(name, items.find((item) => item.group != null)?.group ?? "")
      )
    )
    if (enqueued?.refused_group != null) return yield* groupClosed(name, enqueued.refused_group)
    if (enqueued?.ids == null) {
      return yield* refuse(
        new IdempotencyConflict({
          key: enqueued?.conflict_key ?? "",
          existing: enqueued?.conflict_id ?? ""
        })
      )
    }
    yield* sql.afterCommit(hint(sql, enqueued.queue_id, soonestMillis(items)))
    return enqueued.ids as ReadonlyArray<ItemId>
  })

  const decodeOutcome = Effect.fnUntraced(function* (row: QueueStore.OutcomeRow) {
    if (row.outcome === "completed") return yield* Effect.orDie(decodeSuccess(row.result))
    if (row.outcome === "failed" && row.reason === null) {
      return yield* Effect.fail(yield* Effect.orDie(decodeError(row.result)))
    }
    return yield* new ItemFailed({ id: row.id, reason: reasonOf(row) })
  })

  return {
    payloadSchema: definition.payloadSchema,
    successSchema: definition.successSchema,
    errorSchema: definition.errorSchema,
    progressSchema,
    [Coding]: { toNewItem, decodeOutcome },

    "~item": (input: Payload["~type.make.in"], options: EnqueueOptions) =>
      Effect.flatMap(payloadMax, (bytesMax) => {
        const payload = makePayload(input)
        return payload instanceof EnqueueRefused
          ? Effect.fail(payload)
          : toNewItem(payload, options, bytesMax, null)
      }),

    enqueueAll,

    enqueue: (payload: Payload["~type.make.in"], options?: EnqueueOptions) =>
      Effect.map(enqueueAll([payload], options), (ids) => ids[0]),

    await: (id: ItemId) =>
      Effect.flatMap(Client, (client) => Effect.flatMap(client.outcome(id), decodeOutcome)),

    poll: Effect.fnUntraced(function* (id: ItemId) {
      const sql = yield* SqlClient.SqlClient
      const [row] = QueueStore.isId(id) ? yield* QueueStore.readOutcomes(sql, [id]) : []
      if (row === undefined) return yield* new UnknownId({ kind: "item", id })
      if (!row.settled) return Option.none()
      return Option.some(yield* Effect.exit(decodeOutcome(row)))
    }),

    progress: (id: ItemId) =>
      Stream.unwrap(Effect.map(Client, (client) => client.progress(id))).pipe(
        Stream.mapEffect(({ value }) => Effect.orDie(decodeProgress(value)))
      ),

    cancel: Effect.fnUntraced(function* (id: ItemId) {
      const sql = yield* SqlClient.SqlClient
      const answer = QueueStore.isId(id) ? yield* QueueStore.cancelItem(sql, id) : "unknown"
      if (answer === "unknown") return yield* new UnknownId({ kind: "item", id })
      if (answer !== "cancelled" && answer !== "requested") {
        return yield* new AlreadySettled({ id, state: stateOf(answer) })
      }
      // Once more after the commit: who began to wait before it was not seen inside the transaction.
      if (answer === "cancelled") {
        yield* sql.afterCommit(Effect.ignore(QueueStore.notifySettled(sql, [id])))
      }
    }),

    retry: Effect.fnUntraced(function* (id: ItemId) {
      const sql = yield* SqlClient.SqlClient
      const answer = QueueStore.isId(id) ? yield* QueueStore.retryItem(sql, id) : "unknown"
      if (answer === "unknown") return yield* new UnknownId({ kind: "item", id })
      if (answer !== "available") return yield* new AlreadySettled({ id, state: stateOf(answer) })
    }),

    list: (filter?: Items.ListFilter) =>
      Items.list(name, filter) as Stream.Stream<ItemInfo, SqlError.SqlError, SqlClient.SqlClient>,

    pause: Effect.flatMap(SqlClient.SqlClient, (sql) =>
      Effect.asVoid(QueueStore.pauseQueue(sql, name))
    ),

    resume: Effect.flatMap(SqlClient.SqlClient, (sql) =>
      Effect.asVoid(QueueStore.resumeQueue(sql, name))
    ),

    toLayer: <R>(
      handler: (
        payload: Payload["Type"],
        item: Item<Progress["Type"]>
      ) => Effect.Effect<Success["Type"], Error["Type"] | AttemptFailure, R>,
      policy: Policy<Error["Type"]> = {}
    ) =>
      Layer.effectDiscard(
        Effect.gen(function* () {
          const { runtime, sql } = yield* servingRuntime(name)
          const { executor } = runtime
          const limits = Limits.encode(policy, policy.concurrency?.perKey !== undefined)
          if (Result.isFailure(limits)) {
            return yield* definitionRejected(name, "invalidPolicy", limits.failure)
          }
          const lanes = yield* QueueStore.registerQueue(executor.pools.work, {
            queue: name,
            application: executor.application,
            version: executor.version,
            accepts: executor.accepts,
            globalLimit: policy.concurrency?.global ?? null,
            perKeyLimit: policy.concurrency?.perKey ?? null,
            limits: limits.success,
            recoveryLimit: policy.recovery ?? "executions",
            recoveryMax:
              policy.recovery === "consecutive"
                ? executor.settings.recoveriesMax
                : executor.settings.executionsMax
          }).pipe(refuseOthersQueue(name), (registering) =>
            waitOrRefuse(registering, `queue ${name}`)
          )
          const resultMax = executor.settings.payloadMax
          const handle =
            definition.progressSchema === undefined
              ? (handler as Handler<Payload, Success, Error, R>)
              : reporting(name, runtime.progress, report, handler)
          const runner = yield* Runner.make<Error["Type"], Exclude<R, Scope.Scope | Attempt>>(
            runtime,
            {
              queue: name,
              lanes,
              slots: policy.concurrency?.perExecutor ?? 10,
              attemptTimeoutMillis:
                policy.timeout === undefined
                  ? executor.settings.attemptTimeout
                  : Duration.toMillis(policy.timeout),
              limited:
                policy.concurrency?.global !== undefined ||
                policy.concurrency?.perKey !== undefined,
              rated: Limits.isRated(policy),
              retry: policy.retry,
              transaction: policy.transaction,
              handle: (encoded, item) => {
                const handled = andThen(decodePayload(encoded), (payload) =>
                  Effect.flatMap(handle(payload, item), (success) =>
                    andThen(encodeSuccess(success), (result) =>
                      Effect.succeed(bounded(result, resultMax))
                    )
                  )
                )
                return (
                  policy.transaction === true ? withOutcome(sql, item, handled) : handled
                ) as never
              },
              encodeError: (error) =>
                Effect.map(encodeError(error), (failure) => bounded(failure, resultMax)) as never
            }
          )
          yield* runtime.serve(runner)
        })
      ),

    layerSettlement: <E, R>(
      settle: (payload: Payload["Type"], quarantined: QuarantinedItem) => Effect.Effect<void, E, R>
    ) =>
      Layer.effectDiscard(
        Effect.gen(function* () {
          const { executor, sql } = yield* guardedExecutor(name)
          const settlement = yield* Effect.serviceOption(Settlement)
          if (Option.isNone(settlement)) return yield* notOurs
          const queueId = yield* settlingQueue(
            executor.pools.work,
            name,
            executor.application
          ).pipe(refuseOthersQueue(name), (declaring) => waitOrRefuse(declaring, `queue ${name}`))
          if (settlement.value.servesUnsafe(queueId)) return yield* handledTwice(name)
          const context = yield* Effect.context<
            Exclude<R, Scope.Scope> | Payload["DecodingServices"]
          >()
          yield* settlement.value.serve({
            queue: name,
            queueId,
            sql,
            settle: (row) =>
              Effect.flatMap(decodePayload(row.payload), (payload) =>
                settle(payload, {
                  id: row.id as ItemId,
                  executions: row.executions,
                  limit: row.reason,
                  key: Option.fromNullishOr(row.key),
                  quarantinedAt: DateTime.fromDateUnsafe(row.quarantined_at)
                })
              ).pipe(Effect.scoped, Effect.provideContext(context)) as Effect.Effect<void, unknown>
          })
        })
      ),

    layerSchedule: (schedule: string, options: ScheduleOptions<Payload["~type.make.in"]>) =>
      Layer.effectDiscard(
        Effect.gen(function* () {
          const { settings } = yield* Executor
          const scheduler = yield* Effect.serviceOption(Scheduler)
          if (Option.isNone(scheduler)) return yield* notOurs
          const calendar = yield* calendarOf(schedule, options)
          if (!(yield* scheduler.value.reserve(schedule))) return yield* handledTwice(schedule)
          const context = yield* Effect.context<Payload["EncodingServices"]>()
          const { payload } = options
          const toItem = (slot: number) =>
            Effect.suspend(() => {
              const input: Payload["~type.make.in"] = isMade(payload)
                ? payload({ slot: DateTime.makeUnsafe(slot) })
                : payload
              const { deadline, key, priority } = options
              return toNewItem(
                definition.payloadSchema.make(input),
                { deadline, key, priority },
                settings.payloadMax,
                null
              )
            }).pipe(Effect.provideContext(context))
          // What is the same each time is found wrong now, and not at three in the night.
          if (!isMade(payload)) {
            yield* Effect.catch(toItem(0), ({ reason }) =>
              definitionRejected(schedule, "invalidSchedule", reason.message)
            )
          }
          yield* scheduler.value
            .serve({
              name: schedule,
              queue: name,
              calendar,
              catchUp: options.catchUp ?? "last",
              toItem
            })
            .pipe(refuseOthersQueue(schedule), (serving) =>
              waitOrRefuse(serving, `schedule ${schedule}`)
            )
        })
      )
  }
}

/**
 * A handler of batches as one of items, each of which waits for its own result. The runner's budget is
 * longer than the call's, so that it ends only what the call's end did not.
 */
const batched =
  <Payload, Success, Error>(
    toLayer: (
      handler: (payload: Payload, item: Item) => Effect.Effect<Success, Error | AttemptFailure>,
      policy: Policy<Error>
    ) => Layer.Layer<never, StartupRefused, unknown>
  ) =>
  <R>(
    handler: (
      batch: NonEmptyReadonlyArray<BatchItem<Payload>>
    ) => Effect.Effect<
      ReadonlyArray<Result.Result<Success, Error | AttemptFailure>>,
      Error | AttemptFailure,
      R
    >,
    policy: BatchPolicy<Error>
  ) =>
    Layer.unwrap(
      Effect.gen(function* () {
        const { settings } = yield* Executor
        const size = checkSize(policy.batch.size)
        const slots = policy.concurrency?.perExecutor ?? 10 * size
        const withinMillis = Duration.toMillis(policy.batch.within ?? 0)
        const timeoutMillis =
          policy.timeout === undefined ? settings.attemptTimeout : Duration.toMillis(policy.timeout)
        const join = yield* Batch.make<Payload, Success, Error, R>({
          // More than can run at the same time never come together.
          size: Math.min(size, slots, policy.concurrency?.global ?? Infinity),
          withinMillis,
          timeoutMillis,
          handle: (batch) => handler(batch as NonEmptyReadonlyArray<BatchItem<Payload>>)
        })
        return toLayer(join, {
          ...policy,
          concurrency: { ...policy.concurrency, perExecutor: slots },
          timeout: timeoutMillis + withinMillis + 1000
        })
      })
    )

const checkSize = (size: number): number => {
  if (Number.isInteger(size) && size > 0 && size <= batchSizeMax) return size
  throw new RangeError(`a batch has between 1 and ${batchSizeMax} items`)
}

const groupClosed = (queue: string, group: string) =>
  new EnqueueRefused({ queue, reason: new GroupClosed({ group }) })

const isMade = <A>(
  payload: A | ((due: { readonly slot: DateTime.Utc }) => A)
): payload is (due: { readonly slot: DateTime.Utc }) => A => typeof payload === "function"

const calendarOf = (schedule: string, options: ScheduleOptions<unknown>) =>
  Effect.mapError(
    Effect.fromResult(
      schedule.length < 1 || schedule.length > 200
        ? Result.fail("a schedule's name has 1 to 200 characters")
        : options.cron !== undefined
          ? Calendar.cron(options.cron, options.timeZone)
          : options.every !== undefined
            ? Calendar.every(options.every, options.anchor?.epochMilliseconds)
            : Calendar.once(options.at.epochMilliseconds)
    ),
    (detail) =>
      refuse(new DefinitionRejected({ definition: schedule, problem: "invalidSchedule", detail }))
  )

type Handler<
  Payload extends Schema.Top,
  Success extends Schema.Top,
  Error extends Schema.Top,
  R
> = (
  payload: Payload["Type"],
  item: Runner.ItemContext
) => Effect.Effect<Success["Type"], Error["Type"] | AttemptFailure, R>

/** The handler with something to report to. Only queues that declare progress pay for it. */
const reporting =
  <Payload extends Schema.Top, Success extends Schema.Top, Error extends Schema.Top, Report, R, R2>(
    queue: string,
    reports: QueueRuntime["Service"]["progress"],
    report: (
      id: string,
      reporting: Reporting,
      value: unknown
    ) => Effect.Effect<void, ProgressRefused, R2>,
    handler: (
      payload: Payload["Type"],
      item: Item<Report>
    ) => Effect.Effect<Success["Type"], Error["Type"] | AttemptFailure, R>
  ): Handler<Payload, Success, Error, R | R2 | Attempt> =>
  (payload, item) =>
    Effect.contextWith((context: Context.Context<R2 | Attempt>) => {
      const own = reports.begin(item.id, item.attempt)
      const progress = (value: unknown) =>
        Effect.provideContext(report(item.id, own, value), context)
      Context.get(context, Attempt).progress = { queue, report: progress }
      return Effect.onExit(
        handler(payload, { ...item, id: item.id as ItemId, progress }),
        () => own.end
      )
    })

/** Most codecs answer at once, and what is there already needs no operators: 1 us for each item. */
const andThen = <A, B, E, E2, R, R2>(
  coding: Effect.Effect<A, E, R>,
  next: (value: A) => Effect.Effect<B, E2, R2>
): Effect.Effect<B, E2, R | R2> =>
  Exit.isExit(coding) && Exit.isSuccess(coding)
    ? next(coding.value as A)
    : Effect.flatMap(Effect.orDie(coding), next)

/** The executor of this process, if the pool that the application's effects would get is its fenced one. */
const guardedExecutor = Effect.fnUntraced(function* (queue: string) {
  const executor = yield* Executor
  const given = yield* Effect.serviceOption(SqlClient.SqlClient)
  const sql: SqlClient.SqlClient = Option.getOrElse(given, () => executor.pools.application)
  if (identityOf(sql) !== executor.id) {
    return yield* definitionRejected(
      queue,
      "unguardedSqlClient",
      "its handler would get a SqlClient without this executor's identity: use the one of Tenure.layer, or Tenure.layerPool"
    )
  }
  return { executor, sql }
})

const notOurs = Effect.die(new Error("this Executor was not made by Tenure.layer"))

const handledTwice = (queue: string) =>
  definitionRejected(queue, "duplicateHandler", "this process runs it already")

const refuseOthersQueue =
  (queue: string) =>
  <A, R>(registering: Effect.Effect<A, SqlError.SqlError, R>) =>
    Effect.catchIf(
      registering,
      (error) => sqlState(error) === "TN011",
      (error) => definitionRejected(queue, "otherShape", describeSql(error))
    )

const servingRuntime = Effect.fnUntraced(function* (queue: string) {
  const { sql } = yield* guardedExecutor(queue)
  const runtime = yield* Effect.serviceOption(QueueRuntime)
  if (Option.isNone(runtime)) return yield* notOurs
  if (runtime.value.runners().some((runner) => runner.claimer.name === `queue_claimer ${queue}`)) {
    return yield* handledTwice(queue)
  }
  return { runtime: runtime.value, sql }
})

/** A lost answer to the COMMIT fails the attempt, and its outcome is then answered `already`. */
const withOutcome = <E, R>(
  sql: SqlClient.SqlClient,
  { attempt, id }: Runner.ItemContext,
  handled: Effect.Effect<string | null, E, R>
) =>
  sql.withTransaction(
    Effect.flatMap(handled, (result) =>
      Effect.flatMap(
        QueueStore.completeItem(sql, { id, attempt, result }),
        // Whoever holds the row takes the item away.
        (status) =>
          status === "settled"
            ? Effect.succeed(Verdict.committed)
            : Effect.die(new StaleAttempt({ id, attempt }))
      )
    )
  )

const identityOf = (sql: SqlClient.SqlClient): string | undefined => {
  const config = "config" in sql ? sql.config : undefined
  if (typeof config !== "object" || config === null || !("startupParameters" in config))
    return undefined
  return (config.startupParameters as Readonly<Record<string, string>> | undefined)?.[
    "tenure.executor_id"
  ]
}

const definitionRejected = (
  definition: string,
  problem: DefinitionRejected["problem"],
  detail: string
) => Effect.fail(refuse(new DefinitionRejected({ definition, problem, detail })))

const describeSql = (error: SqlError.SqlError): string =>
  error.reason.cause instanceof Error ? error.reason.cause.message : error.message

/** JSON text of a result. Where there is none it is the handler's bug, and the item says so. */
const bounded = (encoded: unknown, bytesMax: number): string | null => {
  if (encoded === undefined) return null
  const text = textOf(encoded, bytesMax)
  if (typeof text === "string") return text
  throw new Error(`its result cannot be stored: ${text.message}`)
}

/** Before anything is written under it: the columns that hold it are of type `text`. */
const checkName = (name: string): void => {
  const problem = name.length > 200 ? "has more than 200 characters" : troubleOfKey(name)
  if (problem !== undefined) throw new RangeError(`the name of a queue ${problem}`)
}

const checkPriority = (priority: number): number => {
  if (Number.isInteger(priority) && Math.abs(priority) <= priorityMax) return priority
  throw new RangeError(`a priority is an integer between -${priorityMax} and ${priorityMax}`)
}

const isInstant = (when: Duration.Input | DateTime.Utc): when is DateTime.Utc =>
  typeof when === "object" && when !== null && "epochMilliseconds" in when

const isDone = <A, E, R>(effect: Effect.Effect<A, E, R>): effect is Exit.Success<A, E> =>
  Exit.isExit(effect) && Exit.isSuccess(effect)

const millisOf = (when: Duration.Input | DateTime.Utc | undefined): number | null =>
  when === undefined || isInstant(when) ? null : Duration.toMillis(when)

const instantOf = (when: Duration.Input | DateTime.Utc | undefined): number | null =>
  when === undefined || !isInstant(when) ? null : when.epochMilliseconds

/** When the first of them falls due; instants are left to the regular look at the table. */
const soonestMillis = (items: ReadonlyArray<QueueStore.NewItem>): number | undefined => {
  let soonest = Infinity
  for (const { deadlineMillis, delayMillis, pace } of items) {
    const debounced =
      pace?.kind === "debounce" ? Math.min(pace.millis, pace.millisMax ?? Infinity) : Infinity
    soonest = Math.min(soonest, debounced, delayMillis ?? Infinity, deadlineMillis ?? Infinity)
  }
  return Number.isFinite(soonest) ? soonest : undefined
}

const reasonOf = (row: QueueStore.OutcomeRow): ItemFailed["reason"] => {
  if (row.outcome === "cancelled") return new Cancelled()
  switch (row.reason) {
    case "DeadlineExceeded":
      return new DeadlineExceeded()
    case "MAX_RECOVERY_ATTEMPTS_EXCEEDED":
    case "EXECUTION_RECOVERY_EXHAUSTED":
      return new Quarantined({ executions: row.losses ?? 0, limit: row.reason })
    default:
      return new HandlerDied({ message: messageOf(row.result) })
  }
}

const messageOf = (result: unknown): string =>
  typeof result === "object" && result !== null && "message" in result
    ? String(result.message)
    : "the handler died"
