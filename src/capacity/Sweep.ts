/**
 * Loop 1, the capacity sweep: takes back the slots of pull sessions whose clocks have run out. One of
 * two loops that recover work without its process's end being seen; the other one has what was woken and
 * not dispatched. What tells them apart is in their SQL.
 *
 * Every executor runs it, nobody is elected: each takes what no other holds at this moment.
 */
import { Effect, type Scope } from "effect"
import type { SqlError } from "effect/sql/SqlError"
import * as Actor from "../actor/Actor.ts"
import { type Abandoned, abandonAfter } from "../database/Deadline.ts"
import type { Executor } from "../executor/Executor.ts"
import * as CapacityStore from "./CapacityStore.ts"

/** One statement takes back so many reservations and leases; a full one is followed by another at once. */
const rowsMax = 500

/** Audit events are kept for so long at least, and one sweep in so many removes older ones. */
const auditKeepMillis = 90 * 86_400_000
const sweepsPerTrim = 60

export interface Options {
  readonly executor: Executor["Service"]
  /** Ids that have an outcome now, for whoever waits for them; and whether items were quarantined. */
  readonly onSettled: (swept: CapacityStore.Swept) => Effect.Effect<void>
}

export const make = (
  options: Options
): Effect.Effect<Actor.Actor<SqlError | Abandoned>, never, Scope.Scope> => {
  const { settings } = options.executor
  let sweeps = 0
  return Actor.make({
    name: "capacity_sweep",
    step: Effect.suspend(() => sweep(options, sweeps++ % sweepsPerTrim === 0)),
    cadence: (report) => (isFull(report) ? 0 : settings.capacityScan),
    progressWithin: Math.max(settings.watchdog, settings.capacityScan)
  })
}

const isFull = (report: Actor.Report): boolean =>
  Math.max((report["reservations"] ?? 0) + (report["leases"] ?? 0), report["sessions"] ?? 0) >=
  rowsMax

export const sweep = Effect.fnUntraced(function* (options: Options, trims: boolean) {
  const { application, pools, settings } = options.executor
  const within = abandonAfter(settings.watchdog / 2)
  const swept = yield* CapacityStore.sweep(pools.work, {
    application,
    backoffMillis: settings.recoveryScan,
    graceMillis: settings.capacityGrace,
    // By then a living worker has heard of it in three heartbeats.
    cancelGraceMillis: settings.pullLease,
    rowsMax
  }).pipe(within)
  const trimmed = trims
    ? yield* CapacityStore.trimAudit(pools.work, auditKeepMillis, rowsMax).pipe(within)
    : 0
  if (swept.leases > 0) {
    yield* Effect.logInfo("capacity_sweep").pipe(
      Effect.annotateLogs({
        leases: swept.leases,
        recovered: swept.recovered,
        cancelled: swept.cancelled,
        exhausted: swept.exhausted.length
      })
    )
  }
  for (const item of swept.exhausted) {
    yield* Effect.logError("workflow_recovery_exhausted").pipe(Effect.annotateLogs({ item }))
  }
  yield* options.onSettled(swept)
  return {
    reservations: swept.reservations,
    leases: swept.leases,
    recovered: swept.recovered,
    cancelled: swept.cancelled,
    exhausted: swept.exhausted.length,
    sessions: swept.sessions,
    trimmed
  }
})
