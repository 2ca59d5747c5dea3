/**
 * `tenure quarantine`: items that were running when too many executors were lost, and the two things a
 * person may do about one. Nothing else makes such an item available again.
 */
import { Console, Effect } from "effect"
import { Argument, Command } from "effect/cli"
import { waitOrRefuse } from "../../database/Startup.ts"
import {
  closeQuarantine,
  listQuarantine,
  retryQuarantined
} from "../../recovery/SettlementStore.ts"
import { changing, connected, connectFor, item as itemId, max } from "./Change.ts"
import { refuseChange } from "./Refused.ts"
import { json, layerDatabase, url } from "./Connection.ts"
import { formatTable } from "./Table.ts"

const item = itemId.pipe(Argument.withDescription("As `tenure quarantine list` shows it."))

const advice = `
Open ones are settled by their queue's layerSettlement, where it has one, and wait for a person otherwise.
Find out what they did to the processes that ran them, and fix that first. Then
  tenure quarantine retry <item id>   runs one again, with fresh counters: the protection begins anew
  tenure quarantine close <item id>   says that it was dealt with by hand: retention may drop it`

const list = Command.make(
  "list",
  { url, json, max },
  Effect.fnUntraced(
    function* ({ json, max }) {
      const sql = yield* connected
      const rows = yield* waitOrRefuse(listQuarantine(sql, max), "quarantine")
      if (json) return yield* Console.log(JSON.stringify(rows, undefined, 2))
      if (rows.length === 0) return yield* Console.log("No item is in quarantine.")
      yield* Console.log(
        formatTable(
          [
            "item_id",
            "queue",
            "state",
            "quarantined_at",
            "executions",
            "reason",
            "failures",
            "last_error",
            "settled_at",
            "settled_by"
          ],
          rows.map((one) => [
            one.item_id,
            one.queue,
            one.state,
            one.quarantined_at,
            one.executions,
            one.reason,
            one.failures,
            one.last_error_code,
            one.settled_at,
            one.settled_by
          ])
        )
      )
      if (rows.some(({ state }) => state === "open")) yield* Console.log(advice)
    },
    Effect.scoped,
    (effect, { url }) => Effect.provide(effect, layerDatabase(url))
  )
).pipe(Command.withDescription("Lists them, open ones first. Shows no payload."))

const retry = Command.make(
  "retry",
  { item, url },
  Effect.fnUntraced(
    function* ({ item }) {
      const sql = yield* connectFor(item)
      const [before] = yield* waitOrRefuse(listQuarantine(sql, 1, item), "quarantine")
      const answer = yield* changing(retryQuarantined(sql, item), "quarantine")
      if (answer === "busy") return yield* refuseChange(beingSettled(item))
      if (answer === "unknown") return yield* refuseChange(`there is no item ${item}`)
      if (answer === "taken") {
        return yield* refuseChange(
          `somebody handles item ${item}: \`tenure dead-letters list\` says who, and until when`
        )
      }
      if (answer !== "available") {
        return yield* refuseChange(`item ${item} is ${answer} and not in quarantine`)
      }
      yield* Console.log(
        `Item ${item} is available again, with fresh counters: the protection begins anew. If the cause is ` +
          `not fixed, it takes as many processes along as before.`
      )
      if (before?.state === "settled") {
        yield* Console.log(
          `It was settled at ${before.settled_at?.toISOString()} by ${before.settled_by}: ` +
            `its handler finds the application's rows as that has left them.`
        )
      }
    },
    Effect.scoped,
    (effect, { url }) => Effect.provide(effect, layerDatabase(url))
  )
).pipe(
  Command.withDescription(
    "Makes one available again, with fresh counters. Fix the cause first: this resets the protection."
  )
)

const close = Command.make(
  "close",
  { item, url },
  Effect.fnUntraced(
    function* ({ item }) {
      const sql = yield* connectFor(item)
      const answer = yield* changing(closeQuarantine(sql, item), "quarantine")
      if (answer === "busy") return yield* refuseChange(beingSettled(item))
      if (answer === "unknown") return yield* refuseChange(`item ${item} is not in quarantine`)
      if (answer === "settled") return yield* refuseChange(`item ${item} has been settled before`)
      yield* Console.log(
        `Item ${item} is closed: nobody settles it any more, and retention may drop it.`
      )
    },
    Effect.scoped,
    (effect, { url }) => Effect.provide(effect, layerDatabase(url))
  )
).pipe(Command.withDescription("Marks one as dealt with by hand, so that retention may drop it."))

export const quarantine = Command.make("quarantine").pipe(
  Command.withDescription("Items that were running when too many executors were lost."),
  Command.withSubcommands([list, retry, close])
)

const beingSettled = (item: string) =>
  `item ${item} is being settled at this moment; try again in a minute`
