// The README's shape of a program, with everything a queue takes. It has to compile; it is never run.
import { NodeHttpClient } from "@effect/platform-node"
import { Effect, Layer, Schedule, Schema, Stream } from "effect"
import { HttpClient, type HttpClientError, HttpClientRequest } from "effect/http"
import { SqlClient, type SqlError } from "effect/sql"
import { DeadLetter, Lease, Progress, Step, Tenure, Wait, WorkQueue } from "tenure"

class ImageMissing extends Schema.TaggedError<ImageMissing>()("ImageMissing", {
  imageId: Schema.String
}) {}

export class Thumbnails extends WorkQueue.make("thumbnails", {
  payload: { imageId: Schema.String, width: Schema.Int },
  success: Schema.Struct({ url: Schema.String }),
  error: ImageMissing,
  idempotencyKey: ({ imageId, width }) => `${imageId}@${width}`
}) {}

const render = Effect.fn("render")(
  function* (url: string, width: number) {
    const response = yield* HttpClient.get(`http://renderer/?url=${url}&width=${width}`)
    return yield* response.text
  },
  Effect.mapError((cause) => new WorkQueue.RetryLater({ cause }))
)

export const ThumbnailsLive = Thumbnails.toLayer(
  Effect.fn("thumbnail")(function* ({ imageId, width }, item) {
    const sql = yield* SqlClient.SqlClient
    const [image] = yield* sql<{ url: string }>`SELECT url FROM image WHERE id = ${imageId}`
    if (image === undefined) return yield* new ImageMissing({ imageId })
    const url = yield* Step.run("render", render(image.url, width), { success: Schema.String })
    yield* sql`INSERT INTO thumbnail (id, image_id, url) VALUES (${item.id}, ${imageId}, ${url})`
    return { url }
  }),
  {
    concurrency: { perExecutor: 20, global: 100, perKey: 1 },
    rateLimit: { limit: 10_000, window: "1 hour", perKey: { limit: 100, window: "1 minute" } },
    fair: true,
    priorityAging: "10 minutes",
    retry: {
      times: 5,
      schedule: Schedule.exponential("1 second"),
      while: (error) => error._tag !== "ImageMissing"
    },
    timeout: "1 minute",
    recovery: "consecutive"
  }
)

// Rows of this application follow an item that no executor runs again.
export const QuarantineLive = Thumbnails.layerSettlement(
  Effect.fn("thumbnail.quarantined")(function* ({ imageId }, { executions, id }) {
    const sql = yield* SqlClient.SqlClient
    yield* sql`UPDATE image SET state = 'failed' WHERE id = ${imageId}`
    yield* Effect.logWarning("a thumbnail was given up").pipe(
      Effect.annotateLogs({ id, executions })
    )
  })
)

// What has failed is looked through, one by one and nobody else's meanwhile; or all of one cause at once.
export const sift: Effect.Effect<
  DeadLetter.Handled,
  SqlError.SqlError | HttpClientError.HttpClientError,
  SqlClient.SqlClient | HttpClient.HttpClient
> = DeadLetter.handle(Thumbnails, { max: 20, visibility: "10 minutes" }, ({ id }) =>
  Effect.map(HttpClient.get(`http://renderer/lost/${id}`), ({ status }) =>
    status === 404 ? "discard" : "reinject"
  )
)
export const redriven = DeadLetter.redrive(Thumbnails, {
  reason: "HandlerDied",
  errorContains: "ECONNRESET",
  newerThan: "2 days"
})
export const oldest = DeadLetter.list("thumbnails").pipe(Stream.take(10), Stream.runCollect)
export const late = Thumbnails.list({ state: "available", olderThan: "1 hour" })

class Prints extends WorkQueue.make("prints", {
  payload: { imageId: Schema.String, cents: Schema.Int },
  success: Schema.Struct({ state: Schema.Literals(["ordered", "refused", "unknown"]) })
}) {}

// A refusal is an answer; a failure would mean that nobody knows.
const Order = Schema.Union([
  Schema.TaggedStruct("Ordered", { receipt: Schema.String }),
  Schema.TaggedStruct("Refused", {})
])

const printer = Effect.fn("printer")(
  function* (key: string, imageId: string) {
    const response = yield* HttpClientRequest.post("http://printer/orders").pipe(
      HttpClientRequest.setHeader("idempotency-key", key),
      HttpClientRequest.bodyJsonUnsafe({ imageId }),
      HttpClient.execute
    )
    return response.status === 402
      ? { _tag: "Refused" as const }
      : { _tag: "Ordered" as const, receipt: yield* response.text }
  },
  Effect.mapError((cause) => new WorkQueue.RetryLater({ cause }))
)

export const PrintsLive = Prints.toLayer(
  Effect.fn("print")(function* ({ imageId }) {
    const sql = yield* SqlClient.SqlClient
    return yield* Step.send("order", {
      send: (key) => printer(key, imageId),
      success: Order
    }).pipe(
      Effect.map((order) =>
        order._tag === "Ordered" ? { state: "ordered" as const } : { state: "refused" as const }
      ),
      // Never sent again blindly: somebody asks the printer by that key.
      Effect.catchTag("OutcomeUnknown", ({ idempotencyKey }) =>
        sql`INSERT INTO unknown_order (image_id, key) VALUES (${imageId}, ${idempotencyKey})`.pipe(
          Effect.as({ state: "unknown" as const })
        )
      )
    )
  })
)

class Deliveries extends WorkQueue.make("deliveries", {
  payload: { imageId: Schema.String },
  success: Schema.Struct({ url: Schema.String, at: Schema.NullOr(Schema.Date) }),
  error: ImageMissing
}) {}

export const DeliveriesLive = Deliveries.toLayer(
  Effect.fn("delivery")(function* ({ imageId }) {
    // Typed as the other queue declares it; its declared failure is this one's, too.
    const { url } = yield* Wait.invoke("thumbnail", Thumbnails, { imageId, width: 320 }).pipe(
      Effect.catchTags({ EnqueueRefused: Effect.die, ItemFailed: Effect.die })
    )
    yield* Wait.sleep("until it is wanted", "2 days")
    const at = yield* Wait.event("delivered", { success: Schema.Date, timeout: "30 days" }).pipe(
      Effect.catchTag("WaitTimedOut", () => Effect.succeed(null))
    )
    return { url, at }
  })
)

export const delivered = (id: WorkQueue.ItemId) =>
  Wait.send(id, "delivered", new Date(), { success: Schema.Date })

export class Imports extends WorkQueue.make("imports", {
  payload: { file: Schema.String },
  progress: Schema.Struct({ rows: Schema.Int })
}) {}

const readRows = Effect.fn("readRows")(function* (rows: number) {
  yield* Progress.report(Imports, { rows })
})

export const ImportsLive = Imports.toLayer(
  Effect.fn("import")(function* (_, item) {
    yield* item.progress({ rows: 0 })
    yield* readRows(100)
  })
)

export const follow = (id: WorkQueue.ItemId) =>
  Imports.progress(id).pipe(
    Stream.runForEach(({ rows }) => Effect.log(`${rows} rows`)),
    Effect.andThen(Imports.await(id))
  )

export const upload = Effect.fn("upload")(function* (imageId: string, url: string) {
  const sql = yield* SqlClient.SqlClient
  return yield* sql.withTransaction(
    Effect.gen(function* () {
      yield* sql`INSERT INTO image (id, url) VALUES (${imageId}, ${url})`
      return yield* Thumbnails.enqueue({ imageId, width: 320 }, { priority: 10, delay: "1 minute" })
    })
  )
})

// Operations close over the definition and need no `this`.
const { enqueue } = Thumbnails
export const each = Effect.forEach([{ imageId: "a", width: 1 }], (payload) => enqueue(payload))

export const show = Effect.fn("show")(function* (id: WorkQueue.ItemId) {
  return yield* Thumbnails.await(id).pipe(
    Effect.catchTag("ImageMissing", ({ imageId }) =>
      Effect.succeed({ url: `/missing/${imageId}` })
    ),
    Effect.catchReason("ItemFailed", "Cancelled", () => Effect.succeed({ url: "/cancelled" }))
  )
})

export const program = Layer.mergeAll(
  ThumbnailsLive,
  QuarantineLive,
  PrintsLive,
  DeliveriesLive,
  ImportsLive,
  Tenure.layerHttp({ port: 8080 })
).pipe(
  Layer.provide(Lease.layerHttpClient),
  Layer.provide(NodeHttpClient.layerUndici),
  Layer.provide(Tenure.layer({ application: "gallery", version: "gallery-v1" })),
  Layer.provide(Tenure.layerPostgresConfig())
)
export const main = () => Tenure.runMain(program)
export const piped = () => program.pipe(Tenure.runMain({ disableErrorReporting: true }))
