// Other compositions that have to compile; never run.
import { PgClient } from "@effect/sql-pg"
import { Config, DateTime, Effect, Layer, Redacted, Schema } from "effect"
import { HttpRouter, HttpServerResponse } from "effect/http"
import { SqlClient } from "effect/sql"
import { Lease, Schedules, Tenure, WorkQueue } from "tenure"
import { Api } from "tenure/http"

class Bounced extends Schema.TaggedError<Bounced>()("Bounced", { address: Schema.String }) {}
export class Mails extends WorkQueue.make("mails", {
  payload: Schema.Struct({ address: Schema.String, body: Schema.String }),
  error: Bounced,
  key: ({ address }) => address
}) {}

export const newsletter = (addresses: ReadonlyArray<string>) =>
  Mails.enqueueAll(
    addresses.map((address) => ({ address, body: "" })),
    ({ address }) => ({ priority: address.endsWith("@example.org") ? 10 : 0, delay: "10 minutes" })
  ).pipe(Effect.catchReason("EnqueueRefused", "PayloadTooLarge", () => Effect.succeed([])))

// A process that hands in and watches, without a lease.
export const client = Mails.enqueue({ address: "a", body: "b" }).pipe(
  Effect.flatMap(Mails.await),
  Effect.provide(
    Tenure.layerClient.pipe(
      Layer.provideMerge(PgClient.layerConfig({ url: Config.Redacted("DATABASE_URL") }))
    )
  )
)

export const MailsLive = Mails.toLayer(
  ({ address }) =>
    Effect.andThen(Lease.check, address === "" ? new Bounced({ address }) : Effect.void),
  { concurrency: { perKey: 1 } }
)

export const settings = Tenure.layerConfig({
  application: Config.succeed("shop"),
  version: Config.String("VERSION"),
  settings: { drain: Config.succeed("2 minutes" as const) }
})

export const ready = Tenure.layerReadiness(
  "ledger",
  Effect.gen(function* () {
    const sql = yield* SqlClient.SqlClient
    yield* sql`SELECT 1 FROM ledger`
  })
)

export const program = Layer.mergeAll(MailsLive, ready).pipe(
  Layer.provide(
    Tenure.layer({
      application: "shop",
      version: "shop-v1",
      accepts: ["shop-v0"],
      profile: "short",
      settings: { leaseValidity: "90 seconds", drain: "2 minutes" },
      unfenced: "warn"
    })
  ),
  Layer.provide(Tenure.layerPostgresConfig({ url: Config.Redacted("SHOP_DATABASE_URL") })),
  Layer.catchTag("StartupRefused", ({ reason }) =>
    Layer.effectDiscard(
      Effect.die(reason._tag === "SchemaRejected" ? `tenure migrate: ${reason.found}` : reason)
    )
  )
)

export const payout = Lease.verify.pipe(Effect.andThen(Lease.guard(Effect.void)))
export const anotherPool = Tenure.layerPool({ connectionsMax: 3, statementTimeout: "5 seconds" })

// Over HTTP: with routes of the application's own, and what a program in TypeScript does with it.
export const served = HttpRouter.serve(
  Layer.mergeAll(
    Tenure.layerRoutes,
    Tenure.layerApi,
    HttpRouter.add("GET", "/", HttpServerResponse.text("shop"))
  )
)

export const handIn = Effect.gen(function* () {
  const { items } = yield* Api.client({
    url: "http://localhost:8080",
    token: Redacted.make("tenure_organisation_")
  })
  return yield* items.enqueue({ payload: { queue: "mails", payload: { address: "a", body: "b" } } })
}).pipe(
  Effect.catchTag("Conflict", ({ message }) => Effect.logWarning(message)),
  Effect.catchTag(["Unauthorized", "Forbidden", "Unavailable"], ({ message }) =>
    Effect.die(message)
  )
)

export const digests = Layer.mergeAll(
  Mails.layerSchedule("digest", {
    cron: "0 7 * * 1-5",
    timeZone: DateTime.zoneMakeNamedUnsafe("Europe/Istanbul"),
    payload: ({ slot }) => ({ address: "a", body: DateTime.formatIso(slot) }),
    catchUp: "none",
    deadline: "6 hours"
  }),
  Mails.layerSchedule("ping", { every: "30 seconds", payload: { address: "a", body: "b" } }),
  Mails.layerSchedule("new-year", {
    at: DateTime.makeUnsafe("2027-01-01T00:00:00Z"),
    payload: { address: "a", body: "c" },
    priority: 5,
    key: "k"
  })
)
export const quiet = Effect.andThen(Schedules.pause("ping"), Schedules.list({ max: 10 }))
