/**
 * Schedules by their name, for people and programs that have a `SqlClient` and not their code. What a
 * schedule is, `WorkQueue.layerSchedule` says.
 *
 * A trigger and a backfill are requests: whoever has the schedule's code serves them, at once when such a
 * process hears of them, within half a minute otherwise, and when one starts if there is none.
 */
import { DateTime, Effect, Option, Schema } from "effect"
import { SqlClient } from "effect/sql"
import type { SqlError } from "effect/sql/SqlError"
import * as Calendar from "./Calendar.ts"
import { UnknownId } from "./Errors.ts"
import * as ScheduleStore from "./ScheduleStore.ts"

export { UnknownId }

/** Nothing was done. */
export class ScheduleRefused extends Schema.TaggedError<ScheduleRefused>()("ScheduleRefused", {
  schedule: Schema.String,
  reason: Schema.Literals(["running", "tooManySlots", "tooManyRequests", "unreadable"]),
  detail: Schema.String
}) {
  override get message(): string {
    return `Schedule ${this.schedule}: ${this.detail}.`
  }
}

export interface Info {
  readonly name: string
  readonly queue: string
  readonly application: string
  readonly definition: string
  /** `finished`: no slot is left. `orphan`: no live executor has its code, or all have it in another form. */
  readonly state: "active" | "paused" | "finished" | "orphan"
  /** Live ones that have its code. */
  readonly executors: number
  readonly next: Option.Option<DateTime.Utc>
  readonly lastSlot: Option.Option<DateTime.Utc>
  readonly lastItem: Option.Option<string>
  /** Where the last slot's item is, or how it ended: `ready`, `claimed`, `completed`, and so on. */
  readonly lastState: Option.Option<string>
  /** Triggers and backfills that nobody has served yet. */
  readonly requests: number
}

/** No slot fires until `resume`; those that pass meanwhile are not made up. Nothing if it is paused. */
export const pause = (
  name: string
): Effect.Effect<void, UnknownId | SqlError, SqlClient.SqlClient> =>
  Effect.flatMap(SqlClient.SqlClient, (sql) =>
    Effect.flatMap(ScheduleStore.pause(sql, name), known(name))
  )

export const resume = (
  name: string
): Effect.Effect<void, UnknownId | SqlError, SqlClient.SqlClient> =>
  Effect.flatMap(SqlClient.SqlClient, (sql) =>
    Effect.flatMap(ScheduleStore.resume(sql, name), known(name))
  )

/**
 * One more item, now, and paused or not; no slot is moved by it. Answers whether a live process has the
 * code: without one it waits.
 */
export const trigger = (
  name: string
): Effect.Effect<
  { readonly hasRunner: boolean },
  UnknownId | ScheduleRefused | SqlError,
  SqlClient.SqlClient
> => Effect.flatMap(SqlClient.SqlClient, (sql) => requesting(sql, name))

/** Of one backfill. */
export const slotsMax = 10_000

/**
 * The slots from an instant on and before another that have passed, but for those that were fired and
 * whose item is retained still: so it may be repeated. Counts them all.
 */
export const backfill = Effect.fnUntraced(function* (
  name: string,
  range: { readonly from: DateTime.DateTime; readonly to: DateTime.DateTime }
): Effect.fn.Return<
  { readonly slots: number; readonly hasRunner: boolean },
  UnknownId | ScheduleRefused | SqlError,
  SqlClient.SqlClient
> {
  const sql = yield* SqlClient.SqlClient
  const row = yield* ScheduleStore.readDefinition(sql, name)
  if (row === undefined) return yield* unknown(name)
  const calendar = yield* Effect.mapError(
    Effect.fromResult(Calendar.parse(row.definition)),
    (detail) => new ScheduleRefused({ schedule: name, reason: "unreadable", detail })
  )
  const from = range.from.epochMilliseconds
  const to = Math.min(range.to.epochMilliseconds, row.now.getTime())
  const slots = Calendar.slotsFrom(calendar, from, to, slotsMax + 1)
  if (slots.length > slotsMax) {
    return yield* new ScheduleRefused({
      schedule: name,
      reason: "tooManySlots",
      detail: `that range has more than ${slotsMax} slots: take a smaller one, and the next when it is done`
    })
  }
  if (slots.length === 0) return { slots: 0, hasRunner: true }
  const { hasRunner } = yield* requesting(sql, name, { from, to })
  return { slots: slots.length, hasRunner }
})

/** Forgets a schedule whose code is gone. Its items stay. Refused while a live process has the code. */
export const remove = (
  name: string
): Effect.Effect<void, UnknownId | ScheduleRefused | SqlError, SqlClient.SqlClient> =>
  Effect.gen(function* () {
    const answer = yield* ScheduleStore.remove(yield* SqlClient.SqlClient, name)
    if (answer === "running") {
      return yield* new ScheduleRefused({
        schedule: name,
        reason: "running",
        detail: "a live process has its code and would register it again: pause it instead"
      })
    }
    yield* known(name)(answer)
  })

/** By name. */
export const list = (options?: {
  readonly max?: number | undefined
}): Effect.Effect<ReadonlyArray<Info>, SqlError, SqlClient.SqlClient> =>
  Effect.flatMap(SqlClient.SqlClient, (sql) =>
    Effect.map(ScheduleStore.list(sql, options?.max ?? 1000), (rows) =>
      rows.map((row) => ({
        name: row.name,
        queue: row.queue,
        application: row.application_name,
        definition: row.definition,
        state: row.state,
        executors: row.executors,
        next: utc(row.next_at),
        lastSlot: utc(row.last_slot),
        lastItem: Option.fromNullishOr(row.last_item),
        lastState: Option.fromNullishOr(row.last_state),
        requests: row.requests
      }))
    )
  )

const requesting = Effect.fnUntraced(function* (
  sql: SqlClient.SqlClient,
  name: string,
  range?: { readonly from: number; readonly to: number }
) {
  const { answer, has_runner } = yield* ScheduleStore.request(sql, name, range)
  if (answer === "unknown") return yield* unknown(name)
  if (answer === "full") {
    return yield* new ScheduleRefused({
      schedule: name,
      reason: "tooManyRequests",
      detail: "a hundred requests wait: nobody serves them, or not as fast as they come"
    })
  }
  return { hasRunner: has_runner }
})

const unknown = (name: string) => new UnknownId({ kind: "schedule", id: name })

const known = (name: string) => (answer: string) =>
  answer === "unknown" ? Effect.fail(unknown(name)) : Effect.void

const utc = (date: Date | null): Option.Option<DateTime.Utc> =>
  Option.map(Option.fromNullishOr(date), DateTime.fromDateUnsafe)
