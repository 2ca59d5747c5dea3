/**
 * Goal: schedules of whole processes. Each slot is one item however many processes have the schedule, at
 * its time by the database's clock, after a time in which nobody lived, and across versions; what cannot
 * be a schedule is refused at the start; a process without schedules sends nothing for them.
 * Method: one or two runtimes on one database, whose clock is moved; never this process' clock.
 */
import { assert, describe, it } from "@effect/vitest"
import { Context, DateTime, Effect, Exit, Layer, Option, References, Schema, Scope } from "effect"
import { SqlClient } from "effect/sql"
import { Schedules, Tenure, WorkQueue } from "tenure"
import { Scheduler } from "../../src/queue/Scheduler.ts"
import { connect, type FreshDatabase, freshDatabase, layerOf } from "../support/Postgres.ts"
import { present } from "../support/present.ts"
import { layerRuntime } from "./runtime.ts"

const minute = 60_000
const hour = 60 * minute

/** Each item says which slot it is for. One key for all: it must not swallow any. */
class Reports extends WorkQueue.make("reports", {
  payload: { slot: Schema.Number },
  idempotencyKey: () => "the same"
}) {}

const slotOf = ({ slot }: { readonly slot: DateTime.Utc }) => ({ slot: slot.epochMilliseconds })

type Scheduling = Layer.Layer<never, Tenure.StartupRefused, Tenure.Executor>

/** A process until its scope closes, or `stop` does. */
const start = Effect.fnUntraced(function* (
  database: FreshDatabase,
  schedules: Scheduling,
  options: Partial<Tenure.Options> = {}
) {
  const scope = yield* Scope.fork(yield* Effect.scope)
  const context = yield* schedules.pipe(
    Layer.provideMerge(
      Tenure.layer({
        application: "app",
        version: "v1",
        ...options,
        // Its lease outlives the jumps of the clock.
        settings: { leaseValidity: "1 day", drain: 100 }
      }).pipe(
        Layer.provide(layerOf(database.worker)),
        Layer.provideMerge(Layer.succeed(References.MinimumLogLevel, "Fatal" as const))
      )
    ),
    Layer.buildWithScope(scope)
  )
  const { actor } = Option.getOrThrow(
    Context.getOption(context as unknown as Context.Context<Scheduler>, Scheduler)
  )
  // Woken by a notification, not by its half minute.
  yield* Effect.provideContext(
    Effect.flatMap(Tenure.Client, (client) => client.ready),
    context
  )
  return { actor, context, stop: Scope.close(scope, Exit.void) }
})

/** The database, its clock to be moved, and what was handed in. */
const world = Effect.gen(function* () {
  const database = yield* freshDatabase
  const owner = yield* connect(database.owner)
  yield* owner`CREATE SEQUENCE tenure.shift MINVALUE -1000000000000 START 0`
  yield* owner.unsafe(`
    CREATE OR REPLACE FUNCTION tenure.clock() RETURNS timestamptz LANGUAGE sql VOLATILE SECURITY DEFINER AS $$
      SELECT pg_catalog.clock_timestamp() + (SELECT last_value FROM tenure.shift) * interval '1 ms' $$`)
  let shifted = 0
  const shiftBy = (millis: number) =>
    Effect.suspend(() => {
      shifted += Math.round(millis)
      return owner`SELECT setval('tenure.shift', ${shifted}::bigint)`
    })
  const now = Effect.map(
    owner<{ now: number }>`SELECT (extract(epoch FROM tenure.clock()) * 1000)::float8 AS now`,
    ([row]) => present(row).now
  )
  const slots = Effect.map(
    owner<{ slot: number }>`
      SELECT (i.payload ->> 'slot')::float8 AS slot FROM tenure.item i
        JOIN tenure.queue q ON q.id = i.queue_id AND q.name = 'reports' ORDER BY i.seq`,
    (rows) => rows.map((row) => row.slot)
  )
  const asOperator = <A, E>(effect: Effect.Effect<A, E, SqlClient.SqlClient>) =>
    Effect.provideService(effect, SqlClient.SqlClient, owner)
  return { asOperator, database, now, owner, shiftBy, slots }
})

const until = <E, R>(condition: Effect.Effect<boolean, E, R>) =>
  Effect.gen(function* () {
    while (!(yield* condition)) yield* Effect.sleep("10 millis")
  }).pipe(Effect.timeout("30 seconds"))

const infoOf = (name: string) =>
  Effect.map(Schedules.list(), (all) => present(all.find((one) => one.name === name)))

describe("a schedule", () => {
  it.live("fires at its local time by the database's clock, once for two processes", () =>
    Effect.gen(function* () {
      const { asOperator, database, now, shiftBy, slots } = yield* world
      const nightly = Reports.layerSchedule("nightly", {
        cron: "0 3 * * *",
        timeZone: "Europe/Istanbul",
        payload: slotOf
      })
      const processes = [yield* start(database, nightly), yield* start(database, nightly)]
      const info = yield* asOperator(infoOf("nightly"))
      assert.deepInclude(info, {
        queue: "reports",
        application: "app",
        definition: "cron 0 3 * * * Europe/Istanbul",
        state: "active",
        executors: 2
      })
      const due = Option.getOrThrow(info.next).epochMilliseconds
      assert.strictEqual(due % (24 * hour), 0, "03:00 there is midnight of UTC")
      // Hours from what this process takes for the time.
      yield* shiftBy(due - (yield* now) - 1500)
      for (const { actor } of processes) yield* actor.wake
      yield* until(Effect.map(slots, ({ length }) => length > 0))
      yield* until(
        asOperator(
          Effect.map(
            infoOf("nightly"),
            ({ next }) => Option.getOrThrow(next).epochMilliseconds === due + 24 * hour
          )
        )
      )
      assert.deepStrictEqual(yield* slots, [due])
    }).pipe(Effect.scoped)
  )

  it.live("fires every slot, in order, while two processes compete for each", () =>
    Effect.gen(function* () {
      const { database, slots } = yield* world
      const often = Reports.layerSchedule("often", {
        every: "1 second",
        catchUp: "all",
        payload: slotOf
      })
      yield* start(database, often)
      yield* start(database, often)
      yield* until(Effect.map(slots, ({ length }) => length >= 4))
      const fired = yield* slots
      const first = present(fired[0])
      assert.strictEqual(first % 1000, 0)
      assert.deepStrictEqual(
        fired,
        fired.map((_, n) => first + n * 1000)
      )
    }).pipe(Effect.scoped)
  )

  it.live("after a time in which nobody lived makes up the last slot, or all of them", () =>
    Effect.gen(function* () {
      const { database, now, shiftBy, slots } = yield* world
      const hourly = (catchUp: "last" | "all") =>
        Reports.layerSchedule(`hourly, ${catchUp}`, { every: "1 hour", catchUp, payload: slotOf })
      const both = Layer.merge(hourly("last"), hourly("all"))
      const first = yield* start(database, both)
      yield* first.stop
      assert.deepStrictEqual(yield* slots, [])
      yield* shiftBy(4 * hour)
      const last = Math.floor((yield* now) / hour) * hour
      yield* start(database, both)
      yield* until(Effect.map(slots, ({ length }) => length >= 5))
      const missed = [3, 2, 1, 0].map((n) => last - n * hour)
      assert.deepStrictEqual(
        (yield* slots).toSorted((a, b) => a - b),
        [...missed, last]
      )
    }).pipe(Effect.scoped)
  )

  it.live("is paused, resumed, triggered and filled up by name, and shows what became of it", () =>
    Effect.gen(function* () {
      const { asOperator, database, now, shiftBy, slots } = yield* world
      const ran: Array<number> = []
      const process = yield* start(
        database,
        Layer.merge(
          Reports.layerSchedule("hourly", { every: "1 hour", payload: slotOf }),
          Reports.toLayer(({ slot }) => Effect.sync(() => void ran.push(slot)))
        )
      )
      const next = Math.ceil((yield* now) / hour) * hour
      yield* asOperator(Schedules.pause("hourly"))
      assert.strictEqual((yield* asOperator(infoOf("hourly"))).state, "paused")
      yield* shiftBy(2 * hour)
      yield* process.actor.ask({ deadline: "10 seconds" })
      assert.deepStrictEqual(yield* slots, [], "paused")
      yield* asOperator(Schedules.resume("hourly"))
      yield* until(
        asOperator(
          Effect.map(
            infoOf("hourly"),
            (info) => Option.getOrThrow(info.next).epochMilliseconds === next + 2 * hour
          )
        )
      )
      assert.deepStrictEqual(yield* slots, [], "what passed meanwhile is not made up")

      const asked = yield* now
      assert.deepStrictEqual(yield* asOperator(Schedules.trigger("hourly")), { hasRunner: true })
      yield* until(Effect.sync(() => ran.length === 1))
      assert.isAtLeast(present(ran[0]), Math.floor(asked))
      assert.isTrue(Option.isNone((yield* asOperator(infoOf("hourly"))).lastSlot))

      const range = {
        from: DateTime.makeUnsafe(next - 2 * hour),
        to: DateTime.makeUnsafe(next + 100 * hour)
      }
      for (let turn = 0; turn < 2; turn++) {
        const filled = yield* asOperator(Schedules.backfill("hourly", range))
        assert.deepStrictEqual(filled, { slots: 4, hasRunner: true })
        yield* until(asOperator(Effect.map(infoOf("hourly"), ({ requests }) => requests === 0)))
      }
      const filled = [-2, -1, 0, 1].map((n) => next + n * hour)
      yield* until(Effect.sync(() => ran.length === 5))
      assert.deepStrictEqual((yield* slots).slice(1), filled)

      yield* shiftBy(hour)
      yield* process.actor.wake
      yield* until(
        asOperator(
          Effect.map(infoOf("hourly"), ({ lastState }) => Option.contains(lastState, "completed"))
        )
      )
      const info = yield* asOperator(infoOf("hourly"))
      assert.deepStrictEqual(info.lastSlot, Option.some(DateTime.makeUnsafe(next + 2 * hour)))
      const id = Option.getOrThrow(info.lastItem) as WorkQueue.ItemId
      assert.isTrue(Option.isSome(yield* asOperator(Reports.poll(id))))

      const tooMany = yield* Effect.flip(
        asOperator(
          Schedules.backfill("hourly", { ...range, from: DateTime.makeUnsafe("1980-01-01") })
        )
      )
      assert.match(tooMany.message, /Schedule hourly: that range has more than 10000 slots/)
      assert.strictEqual(
        (yield* Effect.flip(asOperator(Schedules.trigger("nobody's"))))._tag,
        "UnknownId"
      )
      const running = yield* Effect.flip(asOperator(Schedules.remove("hourly")))
      assert.match(running.message, /a live process has its code/)
      yield* process.stop
      assert.strictEqual((yield* asOperator(infoOf("hourly"))).state, "orphan")
      assert.deepStrictEqual(yield* asOperator(Schedules.trigger("hourly")), { hasRunner: false })
      yield* asOperator(Schedules.remove("hourly"))
      assert.deepStrictEqual(yield* asOperator(Schedules.list()), [])
      assert.strictEqual((yield* slots).length, 6)
    }).pipe(Effect.scoped)
  )

  it.live(
    "follows the version that came last, and falls back to the older one when it is gone",
    () =>
      Effect.gen(function* () {
        const { asOperator, database, slots } = yield* world
        const defined = (every: "1 hour" | "2 hours") =>
          Reports.layerSchedule("moved", { every, payload: { slot: every === "1 hour" ? 1 : 2 } })
        yield* start(database, defined("1 hour"))
        const newer = yield* start(database, defined("2 hours"), { version: "v2" })
        const { definition, executors } = yield* asOperator(infoOf("moved"))
        assert.deepStrictEqual([definition, executors], ["every 7200 s", 1])
        yield* asOperator(Schedules.trigger("moved"))
        yield* until(Effect.map(slots, ({ length }) => length === 1))
        yield* newer.stop
        // Who asks wakes the one that is left.
        yield* asOperator(Schedules.trigger("moved"))
        yield* until(Effect.map(slots, ({ length }) => length === 2))
        assert.deepStrictEqual(yield* slots, [2, 1])
        assert.strictEqual((yield* asOperator(infoOf("moved"))).definition, "every 3600 s")
      }).pipe(Effect.scoped)
  )

  it.live("whose payload cannot be made stays due, and keeps no other from firing", () =>
    Effect.gen(function* () {
      const { asOperator, database, now, shiftBy, slots } = yield* world
      let broken = true
      const process = yield* start(
        database,
        Layer.merge(
          Reports.layerSchedule("a broken one", {
            every: "1 hour",
            payload: ({ slot }) => {
              if (broken) throw new Error("not today")
              return { slot: -slot.epochMilliseconds }
            }
          }),
          Reports.layerSchedule("another", { every: "1 hour", payload: slotOf })
        )
      )
      const next = Math.ceil((yield* now) / hour) * hour
      yield* shiftBy(hour)
      yield* process.actor.wake
      yield* until(Effect.map(slots, ({ length }) => length === 1))
      assert.deepStrictEqual(yield* slots, [next])
      const info = yield* asOperator(infoOf("a broken one"))
      assert.strictEqual(Option.getOrThrow(info.next).epochMilliseconds, next)
      broken = false
      yield* process.actor.wake
      yield* until(Effect.map(slots, ({ length }) => length === 2))
      assert.deepStrictEqual(yield* slots, [next, -next])
    }).pipe(Effect.scoped)
  )
})

describe("a process", () => {
  it.live("does not start with what is no schedule, and says why in a sentence", () =>
    Effect.gen(function* () {
      const database = yield* freshDatabase
      const payload = { slot: 1 }
      const good = { every: "1 hour", payload } as const
      const twice = Reports.layerSchedule("b", good)
      const refusals: ReadonlyArray<readonly [Scheduling, RegExp]> = [
        [
          Reports.layerSchedule("a", { cron: "0 25 * * *", payload }),
          /^Definition a rejected \(invalidSchedule\): "0 25 \* \* \*" is no cron expression: .* 0 and 23, not "25"\.$/
        ],
        [
          Reports.layerSchedule("a", { cron: "0 3 * * *", timeZone: "Europe/Stambul", payload }),
          /^Definition a rejected \(invalidSchedule\): there is no time zone "Europe\/Stambul"\.$/
        ],
        [Reports.layerSchedule("a", { every: "10 millis", payload }), /one second or more/],
        [Reports.layerSchedule("", good), /1 to 200 characters/],
        [Layer.merge(twice, Layer.fresh(twice)), /this process runs it already/],
        [
          WorkQueue.make("letters", { payload: { text: Schema.String } }).layerSchedule("a", {
            every: "1 hour",
            payload: { text: "x".repeat(2_000_000) }
          }),
          /the payload is 1\.91 MiB/
        ]
      ]
      const { context } = yield* start(database, Reports.layerSchedule("mine", good))
      for (const [schedules, sentence] of refusals) {
        const refused = yield* Layer.build(schedules).pipe(
          Effect.scoped,
          Effect.provideContext(context),
          Effect.flip
        )
        assert.strictEqual(refused._tag, "StartupRefused")
        assert.match(refused.message, sentence)
      }
      const stranger = start(database, Reports.layerSchedule("mine", good), {
        application: "other"
      })
      assert.match(
        (yield* Effect.flip(Effect.scoped(stranger))).message,
        /schedule mine belongs to the application app/
      )
    }).pipe(Effect.scoped)
  )

  it.live("without schedules does not ask for any, and owes nothing", () =>
    Effect.gen(function* () {
      const { actor } = Option.getOrThrow(yield* Effect.serviceOption(Scheduler))
      yield* until(Effect.sync(() => actor.progress().steps > 0))
      assert.deepInclude(actor.progress(), { steps: 1, deadlineNanos: undefined })
      assert.deepInclude(actor.progress().lastReport, { looked: 0, nextMillis: Infinity })
    }).pipe(Effect.provide(layerRuntime()))
  )
})
