/**
 * What a process offers over HTTP, as one value: the server is built from it, and so are the typed
 * client and the OpenAPI document. Nothing of the server is in here.
 *
 *   sessions   worker tokens: the pull protocol, for workers in any language
 *   items      organisation and platform tokens: handing in, and looking at what became of it
 *   capacity   platform tokens: what holds slots, and what waits for one
 *
 * A worker opens a session, pulls items into its free slots, activates each before it begins, sends one
 * heartbeat for all of them, and settles each under the attempt it was given:
 *
 *   waiting --pull--> reserved --activate--> running --complete, fail, business error--> settled
 *                        |                      |
 *                        +-- 30 s, or close     +-- 90 s without a heartbeat, or close: waiting again,
 *                            : waiting again        under another attempt
 *
 * An answer may be lost: every call but `open`, `pull` and `enqueue` may be repeated, and `enqueue` with
 * an idempotency key. Errors are sentences with a tag; none carries a payload.
 */
import { Context, Effect, type Redacted, Schema } from "effect"
import {
  HttpApi,
  HttpApiClient,
  HttpApiEndpoint,
  HttpApiGroup,
  HttpApiMiddleware,
  HttpApiSchema,
  HttpApiSecurity,
  OpenApi
} from "effect/http-api"
import { type HttpClient, HttpClientRequest } from "effect/http"
import type { Role } from "./Token.ts"

/** 400: the request is not of the shape that this endpoint takes. */
export class Malformed extends Schema.TaggedError<Malformed>()(
  "Malformed",
  { message: Schema.String },
  { httpApiStatus: 400, description: "The request has not the shape that this endpoint takes." }
) {}

/** 401: no token, or one that is unknown, revoked or expired. */
export class Unauthorized extends Schema.TaggedError<Unauthorized>()(
  "Unauthorized",
  { message: Schema.String },
  { httpApiStatus: 401, description: "No token, or one that is unknown, revoked or expired." }
) {}

/** 403: the token is good, and its role may not do this. */
export class Forbidden extends Schema.TaggedError<Forbidden>()(
  "Forbidden",
  { message: Schema.String },
  { httpApiStatus: 403, description: "The token is good, and its role may not do this." }
) {}

/** 404: no such session or item. A session that has ended is gone: open another one. */
export class NotFound extends Schema.TaggedError<NotFound>()(
  "NotFound",
  { message: Schema.String },
  { httpApiStatus: 404, description: "There is no such session, or no such item." }
) {}

/** 409: this execution may not write, and `reason` says why. Drop its result, if it is over. */
export class Stale extends Schema.TaggedError<Stale>()(
  "Stale",
  { item: Schema.String, executionSeq: Schema.Int, reason: Schema.String },
  { httpApiStatus: 409, description: "This execution may not write: nothing was changed." }
) {
  override get message(): string {
    return `Execution ${this.executionSeq} of item ${this.item} may not write: ${this.reason}.`
  }
}

/** 409: the idempotency key names an item with another payload, or the queue is another application's. */
export class Conflict extends Schema.TaggedError<Conflict>()(
  "Conflict",
  { message: Schema.String },
  { httpApiStatus: 409, description: "It contradicts what is there already: message says what." }
) {}

/** 413: the body is larger than this process takes. */
export class TooLarge extends Schema.TaggedError<TooLarge>()(
  "TooLarge",
  { message: Schema.String, bytesMax: Schema.Int },
  { httpApiStatus: 413, description: "The body is larger than this process takes." }
) {}

/** 503: not now, or not this process. Nothing is known of the call's effect: repeat it, after a pause. */
export class Unavailable extends Schema.TaggedError<Unavailable>()(
  "Unavailable",
  { message: Schema.String },
  { httpApiStatus: 503, description: "Not now, or not this process: repeat it after a pause." }
) {}

/** The token behind a request. */
export class Principal extends Context.Service<
  Principal,
  { readonly id: string; readonly role: Role; readonly name: string }
>()("tenure/http/Principal") {}

/** Asks for the token at each request. */
export class Authorization extends HttpApiMiddleware.Service<
  Authorization,
  { provides: Principal }
>()("tenure/http/Authorization", {
  requiredForClient: true,
  security: { bearer: HttpApiSecurity.bearer },
  error: [Unauthorized, Forbidden, Unavailable]
}) {}

/** What every endpoint may answer besides its own. */
export class Boundary extends HttpApiMiddleware.Service<Boundary>()("tenure/http/Boundary", {
  error: [Malformed, TooLarge, Unavailable]
}) {}

const Uuid = Schema.String.check(Schema.isUUID())
const ExecutionSeq = Schema.Int.check(Schema.isBetween({ minimum: 1, maximum: 2_147_483_647 }))
const Text = (max: number) => Schema.String.check(Schema.isMinLength(1), Schema.isMaxLength(max))
const Within = (minimum: number, maximum: number) =>
  Schema.Int.check(Schema.isBetween({ minimum, maximum }))

/** How long a pull may wait for an item, in milliseconds. */
export const waitMax = 30_000

const delayMax = 31_536_000_000

export const Session = Schema.Struct({
  id: Uuid,
  /** Send one heartbeat so often. Without one for `validityMillis` the session and its work are lost. */
  heartbeatMillis: Schema.Finite,
  validityMillis: Schema.Finite
})

export const Pulled = Schema.Struct({
  id: Uuid,
  /** Names this execution: every later call about the item carries it. */
  executionSeq: ExecutionSeq,
  queue: Schema.String,
  key: Schema.NullOr(Schema.String),
  payload: Schema.Json,
  /** Earlier executions that failed, and workers that were lost with it. */
  failures: Schema.Int,
  losses: Schema.Int,
  enqueuedAt: Schema.Date,
  /** Until the item's own deadline. */
  deadlineMillis: Schema.NullOr(Schema.Finite),
  /** Activate it within this time, or somebody else gets it. */
  reservedMillis: Schema.Finite,
  /** W3C trace context of whoever handed it in. */
  traceparent: Schema.NullOr(Schema.String)
})

const ofSession = { session: Uuid }
const ofItem = { session: Uuid, item: Uuid }
const Execution = Schema.Struct({ executionSeq: ExecutionSeq })

const Expiring = Schema.Struct({ expiresInMillis: Schema.Finite })

/** `already`: this execution was settled before, and the answer to that was lost. */
const Settled = Schema.Struct({
  status: Schema.Literals(["settled", "retried", "cancelled", "already"])
})

const open = HttpApiEndpoint.post("open", "/sessions", {
  payload: Schema.Struct({
    /** Who this is, for people. */
    worker: Text(200),
    /** Of its code: what it has started, only sessions of the same version go on with. Default "pull". */
    version: Schema.optionalKey(Text(200)),
    queues: Schema.Array(Text(200)).check(Schema.isMinLength(1), Schema.isMaxLength(100)),
    /** Items it may hold at once. */
    slots: Within(1, 1000),
    /** What ends an item whose workers are lost, for queues that nobody has run yet. */
    recovery: Schema.optionalKey(Schema.Literals(["executions", "consecutive"]))
  }),
  success: Session.pipe(HttpApiSchema.status(201)),
  error: Conflict
}).annotate(OpenApi.Summary, "Opens a session: this worker is there, and has so many slots.")

const pull = HttpApiEndpoint.post("pull", "/sessions/:session/pull", {
  params: ofSession,
  payload: Schema.Struct({
    /** Never more than there are free slots. */
    wanted: Within(1, 100),
    /** Answer as soon as there is one, and after this time at the latest. 0, the default: at once. */
    waitMillis: Schema.optionalKey(Within(0, waitMax))
  }),
  success: Schema.Struct({ items: Schema.Array(Pulled) }),
  error: NotFound
}).annotate(OpenApi.Summary, "Reserves items for this session, waiting for the first one.")

const heartbeat = HttpApiEndpoint.post("heartbeat", "/sessions/:session/heartbeat", {
  params: ofSession,
  success: Schema.Struct({
    /** Items of this session to be ended: settle each of them. */
    cancelled: Schema.Array(Uuid),
    expiresInMillis: Schema.Finite
  }),
  error: NotFound
}).annotate(OpenApi.Summary, "Still there: pushes every clock of the session.")

const close = HttpApiEndpoint.delete("close", "/sessions/:session", {
  params: ofSession,
  success: Schema.Struct({
    /** Items that others may have now. */
    handedBack: Schema.Int
  }),
  error: NotFound
}).annotate(OpenApi.Summary, "Ends the session in order, and hands back what it holds.")

const activate = HttpApiEndpoint.post("activate", "/sessions/:session/items/:item/activate", {
  params: ofItem,
  payload: Execution,
  success: Schema.Struct({
    expiresInMillis: Schema.Finite,
    /** What earlier executions have stored: steps that need not run again. */
    checkpoints: Schema.Array(Schema.Struct({ name: Schema.String, value: Schema.Json }))
  }),
  error: [NotFound, Stale]
}).annotate(OpenApi.Summary, "Begins: the reservation becomes a lease. Refused when it is over.")

const extend = HttpApiEndpoint.post("extend", "/sessions/:session/items/:item/extend", {
  params: ofItem,
  payload: Schema.Struct({ executionSeq: ExecutionSeq, millis: Within(1, 86_400_000) }),
  success: Expiring,
  error: [NotFound, Stale]
}).annotate(OpenApi.Summary, "Keeps one item for so long from now, heartbeat or not.")

const complete = HttpApiEndpoint.post("complete", "/sessions/:session/items/:item/complete", {
  params: ofItem,
  payload: Schema.Struct({ executionSeq: ExecutionSeq, result: Schema.optionalKey(Schema.Json) }),
  success: Settled,
  error: [NotFound, Stale]
}).annotate(OpenApi.Summary, "Settles it with a result.")

const fail = HttpApiEndpoint.post("fail", "/sessions/:session/items/:item/fail", {
  params: ofItem,
  payload: Schema.Struct({
    executionSeq: ExecutionSeq,
    /** What went wrong, for people. */
    message: Text(1000),
    /** Tries that are left after this one. 0: this failure is final. */
    retriesLeft: Within(0, 1_000_000),
    /** Not before, from now. */
    delayMillis: Schema.optionalKey(Within(0, delayMax))
  }),
  success: Settled,
  error: [NotFound, Stale]
}).annotate(OpenApi.Summary, "It went wrong: try it again, or not.")

const businessError = HttpApiEndpoint.post(
  "businessError",
  "/sessions/:session/items/:item/business-error",
  {
    params: ofItem,
    payload: Schema.Struct({
      executionSeq: ExecutionSeq,
      /** The tag of the queue's declared error. */
      code: Text(200),
      /** Its fields. */
      fields: Schema.optionalKey(Schema.JsonObject)
    }),
    success: Settled,
    error: [NotFound, Stale]
  }
).annotate(OpenApi.Summary, "Settles it with an error that is an answer: who waits for it gets it.")

const checkpoint = HttpApiEndpoint.post("checkpoint", "/sessions/:session/items/:item/checkpoint", {
  params: ofItem,
  payload: Schema.Struct({
    executionSeq: ExecutionSeq,
    name: Text(1000),
    value: Schema.Json
  }),
  success: Schema.Struct({
    /** The value that stays: the first one written under this name. */
    value: Schema.Json
  }),
  error: [NotFound, Stale]
}).annotate(OpenApi.Summary, "Stores a step's result, once: it survives the loss of the worker.")

export const ItemState = Schema.Struct({
  id: Uuid,
  state: Schema.Literals(["waiting", "running", "completed", "failed", "cancelled"]),
  /** Of a failed one that did not answer by itself. */
  reason: Schema.NullOr(Schema.String),
  result: Schema.Json
})

const enqueue = HttpApiEndpoint.post("enqueue", "/items", {
  payload: Schema.Struct({
    queue: Text(200),
    payload: Schema.Json,
    /** Higher runs first. Default 0. */
    priority: Schema.optionalKey(Within(-1_000_000, 1_000_000)),
    key: Schema.optionalKey(Text(1000)),
    idempotencyKey: Schema.optionalKey(Text(1000)),
    delayMillis: Schema.optionalKey(Within(0, Number.MAX_SAFE_INTEGER)),
    deadlineMillis: Schema.optionalKey(Within(0, Number.MAX_SAFE_INTEGER))
  }),
  success: Schema.Struct({ id: Uuid }).pipe(HttpApiSchema.status(201)),
  error: Conflict
}).annotate(OpenApi.Summary, "Hands in one item.")

const look = HttpApiEndpoint.get("look", "/items/:item", {
  params: { item: Uuid },
  success: ItemState,
  error: NotFound
}).annotate(OpenApi.Summary, "What became of an item.")

/** Rows at most. */
const Max = { max: Schema.optionalKey(Within(1, 10_000)) }

export const LeaseFacts = Schema.Struct({
  item: Schema.String,
  queue: Schema.String,
  session: Schema.String,
  worker: Schema.NullOr(Schema.String),
  executionSeq: Schema.Int,
  state: Schema.Literals(["reserved", "active"]),
  key: Schema.NullOr(Schema.String),
  losses: Schema.Int,
  reservedAt: Schema.Date,
  activatedAt: Schema.NullOr(Schema.Date),
  expiresAt: Schema.Date
})

export const SessionFacts = Schema.Struct({
  session: Schema.String,
  application: Schema.String,
  worker: Schema.String,
  version: Schema.String,
  queues: Schema.Array(Schema.String),
  slots: Schema.Int,
  reserved: Schema.Int,
  active: Schema.Int,
  openedAt: Schema.Date,
  heartbeatAt: Schema.Date,
  expiresAt: Schema.Date
})

export const QueuedFacts = Schema.Struct({
  item: Schema.String,
  queue: Schema.String,
  executionSeq: Schema.Int,
  version: Schema.NullOr(Schema.String),
  key: Schema.NullOr(Schema.String),
  losses: Schema.Int,
  /** Null: at once. */
  eligibleAt: Schema.NullOr(Schema.Date)
})

export class Api extends HttpApi.make("tenure")
  .add(
    HttpApiGroup.make("sessions").add(
      open,
      pull,
      activate,
      heartbeat,
      extend,
      complete,
      fail,
      businessError,
      checkpoint,
      close
    ),
    HttpApiGroup.make("items").add(enqueue, look),
    HttpApiGroup.make("capacity").add(
      HttpApiEndpoint.get("leases", "/capacity/leases", {
        query: Max,
        success: Schema.Array(LeaseFacts)
      }).annotate(OpenApi.Summary, "Slots that are held, by whom, and until when."),
      HttpApiEndpoint.get("sessions", "/capacity/sessions", {
        query: Max,
        success: Schema.Array(SessionFacts)
      }).annotate(OpenApi.Summary, "Sessions of pull workers."),
      HttpApiEndpoint.get("queue", "/capacity/queue", {
        query: Max,
        success: Schema.Array(QueuedFacts)
      }).annotate(OpenApi.Summary, "What waits for a slot, and from when on it may have one.")
    )
  )
  .middleware(Boundary)
  .middleware(Authorization)
  .prefix("/tenure/v1")
  .annotateMerge(
    OpenApi.annotations({
      title: "Tenure",
      version: "1",
      description: "Durable work on PostgreSQL: workers in any language, handing in, looking."
    })
  ) {}

export type Client = HttpApiClient.ForApi<typeof Api>

/** The client that the API's value gives, on whatever `HttpClient` there is. */
export const client = (options: {
  /** Where a process with `Tenure.layerApi` answers, such as `http://localhost:8080`. */
  readonly url: string
  readonly token: Redacted.Redacted
}): Effect.Effect<Client, never, HttpClient.HttpClient> =>
  HttpApiClient.make(Api, { baseUrl: options.url }).pipe(
    Effect.provide(
      HttpApiMiddleware.layerClient(Authorization, ({ next, request }) =>
        next(HttpClientRequest.bearerToken(request, options.token))
      )
    )
  )
