/**
 * `tenure schedules`: the schedules of a database, when they fire next and what became of the last time,
 * and what a person may do about one.
 */
import { Console, DateTime, Effect, Option } from "effect"
import { Argument, Command, Flag } from "effect/cli"
import { SqlClient } from "effect/sql"
import type { SqlError } from "effect/sql/SqlError"
import { waitOrRefuse } from "../../database/Startup.ts"
import * as Schedules from "../../queue/Schedules.ts"
import { changing, connected } from "./Change.ts"
import { json, layerDatabase, url } from "./Connection.ts"
import { refuseChange } from "./Refused.ts"
import { formatTable } from "./Table.ts"

const name = Argument.String("name").pipe(
  Argument.withDescription("As `tenure schedules list` shows it.")
)

const max = Flag.Int("max").pipe(Flag.withDescription("Rows at most."), Flag.withDefault(100))

const orphans = `
No live process has the code of an orphan in this form. If it is gone for good:
  tenure schedules remove <name>`

const list = Command.make(
  "list",
  { url, json, max },
  Effect.fnUntraced(
    function* ({ json, max }) {
      const sql = yield* connected
      const rows = yield* waitOrRefuse(
        Effect.provideService(Schedules.list({ max }), SqlClient.SqlClient, sql),
        "schedules"
      )
      const cells = rows.map((one) => ({
        name: one.name,
        queue: one.queue,
        application: one.application,
        definition: one.definition,
        state: one.state,
        executors: one.executors,
        next: isoOf(one.next),
        last_slot: isoOf(one.lastSlot),
        last_item: Option.getOrNull(one.lastItem),
        last_state: Option.getOrNull(one.lastState),
        requests: one.requests
      }))
      if (json) return yield* Console.log(JSON.stringify(cells, undefined, 2))
      const [first] = cells
      if (first === undefined) return yield* Console.log("There is no schedule.")
      yield* Console.log(formatTable(Object.keys(first), cells.map(Object.values)))
      if (rows.some(({ state }) => state === "orphan")) yield* Console.log(orphans)
    },
    Effect.scoped,
    (effect, { url }) => Effect.provide(effect, layerDatabase(url))
  )
).pipe(
  Command.withDescription(
    "Lists them by name: the next slot, the last one, its item and its outcome."
  )
)

const pause = Command.make(
  "pause",
  { name, url },
  Effect.fnUntraced(
    function* ({ name }) {
      yield* change(Schedules.pause(name))
      yield* Console.log(
        `Schedule ${name} is paused: no slot fires until it is resumed, and none of them is made up then.`
      )
    },
    Effect.scoped,
    (effect, { url }) => Effect.provide(effect, layerDatabase(url))
  )
).pipe(Command.withDescription("Fires no slot until it is resumed."))

const resume = Command.make(
  "resume",
  { name, url },
  Effect.fnUntraced(
    function* ({ name }) {
      yield* change(Schedules.resume(name))
      yield* Console.log(
        `Schedule ${name} goes on with its next slot; \`tenure schedules backfill\` makes up what has passed.`
      )
    },
    Effect.scoped,
    (effect, { url }) => Effect.provide(effect, layerDatabase(url))
  )
).pipe(Command.withDescription("Goes on with the next slot."))

const trigger = Command.make(
  "trigger",
  { name, url },
  Effect.fnUntraced(
    function* ({ name }) {
      const { hasRunner } = yield* change(Schedules.trigger(name))
      yield* Console.log(`Schedule ${name}: one more item is asked for. ${served(hasRunner)}`)
    },
    Effect.scoped,
    (effect, { url }) => Effect.provide(effect, layerDatabase(url))
  )
).pipe(Command.withDescription("Hands in one more item, now, and moves no slot."))

const instant = (flag: string, description: string) =>
  Flag.String(flag).pipe(Flag.withDescription(description))

const backfill = Command.make(
  "backfill",
  {
    name,
    from: instant("from", "The first instant, as 2026-01-31T00:00:00Z."),
    to: instant("to", "The instant before which it ends; not later than now."),
    url
  },
  Effect.fnUntraced(
    function* ({ from, name, to }) {
      const range = { from: yield* instantOf(from), to: yield* instantOf(to) }
      const { hasRunner, slots } = yield* change(Schedules.backfill(name, range))
      if (slots === 0) return yield* refuseChange(`schedule ${name} has no slot in that range`)
      yield* Console.log(
        `Schedule ${name}: ${slots} slots are asked for, of which those are left out that were fired and ` +
          `whose item is still there. ${served(hasRunner)}`
      )
    },
    Effect.scoped,
    (effect, { url }) => Effect.provide(effect, layerDatabase(url))
  )
).pipe(Command.withDescription("Hands in the items of slots that have passed. May be repeated."))

const remove = Command.make(
  "remove",
  { name, url },
  Effect.fnUntraced(
    function* ({ name }) {
      yield* change(Schedules.remove(name))
      yield* Console.log(`Schedule ${name} is forgotten; its items stay.`)
    },
    Effect.scoped,
    (effect, { url }) => Effect.provide(effect, layerDatabase(url))
  )
).pipe(Command.withDescription("Forgets one whose code is gone."))

export const schedules = Command.make("schedules").pipe(
  Command.withDescription("What is handed in at set times."),
  Command.withSubcommands([list, pause, resume, trigger, backfill, remove])
)

const served = (hasRunner: boolean): string =>
  hasRunner
    ? "A live process serves that at once, or within half a minute."
    : "No live process has its code: that waits until one starts."

const isoOf = (instant: Option.Option<DateTime.Utc>): string | null =>
  Option.getOrNull(Option.map(instant, DateTime.formatIso))

const instantOf = (text: string) =>
  Option.match(DateTime.make(text), {
    onNone: () => refuseChange(`${text} is no instant: write it as 2026-01-31T00:00:00Z`),
    onSome: Effect.succeed
  })

const change = Effect.fnUntraced(function* <A>(
  act: Effect.Effect<
    A,
    Schedules.UnknownId | Schedules.ScheduleRefused | SqlError,
    SqlClient.SqlClient
  >
) {
  const sql = yield* connected
  return yield* act.pipe(
    Effect.provideService(SqlClient.SqlClient, sql),
    Effect.catchTags({
      UnknownId: ({ id }) => refuseChange(`there is no schedule ${id}`),
      ScheduleRefused: ({ message }) => refuseChange(message)
    }),
    (acting) => changing(acting, "schedules")
  )
})
