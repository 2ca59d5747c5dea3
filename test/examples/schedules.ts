import { DateTime, Effect, Layer, Schema } from "effect"
import { Schedules, WorkQueue } from "tenure"

class Report extends WorkQueue.make("report", { payload: { until: Schema.DateTimeUtc } }) {}

export const ReportsLive = Layer.mergeAll(
  Report.toLayer(({ until }) => Effect.logInfo(`the report until ${DateTime.formatIso(until)}`)),
  Report.layerSchedule("nightly-report", {
    cron: "0 3 * * *", // or { every: "15 minutes" }, or { at: DateTime.makeUnsafe("2027-01-01T08:00:00Z") }
    timeZone: "Europe/Istanbul",
    payload: ({ slot }) => ({ until: slot }) // or the payload itself
  })
)

// By name, wherever there is a SqlClient; or `tenure schedules backfill nightly-report --from … --to …`.
export const again = Schedules.backfill("nightly-report", {
  from: DateTime.makeUnsafe("2025-11-01T00:00:00Z"),
  to: DateTime.makeUnsafe("2025-11-08T00:00:00Z")
})
