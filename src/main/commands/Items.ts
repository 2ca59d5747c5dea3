/**
 * `tenure items`: which items there are, what has become of one and why it waits, and what a person may do
 * about one. No payload and no value of a checkpoint is printed but with `--payload`.
 */
import { Console, Effect, Option, Stream } from "effect"
import { Command, Flag } from "effect/cli"
import { SqlClient } from "effect/sql"
import { waitOrRefuse } from "../../database/Startup.ts"
import * as ListedItems from "../../queue/Items.ts"
import {
  type ItemRow,
  readAudit,
  readCheckpointNames,
  readItem,
  readPayload,
  readWaitFacts
} from "../../queue/ItemStore.ts"
import { cancelItem, notifySettled, retryItem } from "../../queue/QueueStore.ts"
import { listQuarantine } from "../../recovery/SettlementStore.ts"
import { age, changing, connected, connectFor, item, max } from "./Change.ts"
import { refuseChange, refuseCommand } from "./Refused.ts"
import { json, layerDatabase, url } from "./Connection.ts"
import { formatHistory, historyOf, whyItem } from "./ItemHistory.ts"
import { formatCell, formatTable } from "./Table.ts"

const list = Command.make(
  "list",
  {
    queue: Flag.String("queue").pipe(Flag.withDescription("Of one queue."), Flag.optional),
    state: Flag.Literals("state", [
      "available",
      "leased",
      "delayed",
      "sleeping",
      "waiting",
      "waking",
      "completed",
      "failed",
      "cancelled"
    ]).pipe(Flag.withDescription("In one state."), Flag.optional),
    key: Flag.String("key").pipe(Flag.withDescription("Of one key."), Flag.optional),
    olderThan: age("older-than", "Handed in at least so long ago:"),
    newerThan: age("newer-than", "Handed in at most so long ago:"),
    url,
    json,
    max
  },
  Effect.fnUntraced(
    function* (given) {
      const sql = yield* connected
      const rows = yield* ListedItems.rows({
        queue: Option.getOrNull(given.queue),
        state: Option.getOrNull(given.state),
        key: Option.getOrNull(given.key),
        olderThanMillis: Option.getOrNull(given.olderThan),
        newerThanMillis: Option.getOrNull(given.newerThan)
      }).pipe(
        Stream.take(given.max),
        Stream.runCollect,
        Effect.provideService(SqlClient.SqlClient, sql),
        (reading) => waitOrRefuse(reading, "items")
      )
      if (given.json) {
        return yield* Console.log(JSON.stringify(rows.map(withoutCursor), undefined, 2))
      }
      if (rows.length === 0) return yield* Console.log("There are no such items.")
      yield* Console.log(
        formatTable(
          [
            "item_id",
            "queue",
            "state",
            "reason",
            "key",
            "priority",
            "attempt",
            "failures",
            "losses",
            "enqueued_at",
            "since"
          ],
          rows.map((one) => [
            one.id,
            one.queue,
            one.state,
            one.reason,
            one.key,
            one.priority,
            one.attempt,
            one.failures,
            one.losses,
            one.enqueued_at,
            one.finished_at ?? one.claimed_at ?? one.due_at
          ])
        )
      )
    },
    Effect.scoped,
    (effect, { url }) => Effect.provide(effect, layerDatabase(url))
  )
).pipe(Command.withDescription("Lists items, newest first, without payloads."))

const withoutCursor = ({ ...row }: ItemRow & { readonly next_cursor?: unknown }) => {
  const { next_cursor: _, ...rest } = row
  return rest
}

const checkpointsMax = 1000
const eventsMax = 1000

const show = Command.make(
  "show",
  {
    item,
    url,
    json,
    payload: Flag.Boolean("payload").pipe(
      Flag.withDescription("Prints the payload and the result as well."),
      Flag.withDefault(false)
    )
  },
  Effect.fnUntraced(
    function* (given) {
      const sql = yield* connectFor(given.item)
      const read = yield* waitOrRefuse(
        Effect.all({
          detail: readItem(sql, given.item),
          wait: readWaitFacts(sql, given.item),
          checkpoints: readCheckpointNames(sql, given.item, checkpointsMax),
          quarantine: Effect.map(listQuarantine(sql, 1, given.item), ([row]) => row),
          audit: readAudit(
            sql,
            { event: null, item: given.item, queue: null, newerThanMillis: null },
            null,
            eventsMax
          ),
          stored: given.payload ? readPayload(sql, given.item) : Effect.succeed(undefined)
        }),
        "items"
      )
      const { audit, checkpoints, detail, quarantine, stored, wait } = read
      if (detail === undefined) return yield* refuseCommand(`there is no item ${given.item}`)
      const why = whyItem(detail, wait, quarantine)
      const history = historyOf(detail, checkpoints, quarantine, audit)
      if (given.json) {
        return yield* Console.log(
          JSON.stringify(
            { ...detail, why, checkpoints, history, ...(given.payload ? stored : {}) },
            undefined,
            2
          )
        )
      }
      const fields = Object.entries(detail).filter(([, value]) => value !== null)
      yield* Console.log(
        fields.map(([name, value]) => `${name.padEnd(16)} ${formatCell(value)}`).join("\n")
      )
      yield* Console.log(`\n${why}`)
      if (checkpoints.length > 0) {
        yield* Console.log(`\nCheckpoints: ${checkpoints.map(({ name }) => name).join(", ")}`)
      }
      yield* Console.log(`\n${formatHistory(history)}`)
      if (stored !== undefined) {
        yield* Console.log(
          `\npayload ${JSON.stringify(stored.payload)}\nresult  ${JSON.stringify(stored.result)}`
        )
      }
    },
    Effect.scoped,
    (effect, { url }) => Effect.provide(effect, layerDatabase(url))
  )
).pipe(
  Command.withDescription("Shows one item: its state, why it is in it, and what was done to it.")
)

const retry = Command.make(
  "retry",
  { item, url },
  Effect.fnUntraced(
    function* ({ item }) {
      const sql = yield* connectFor(item)
      const answer = yield* changing(retryItem(sql, item), "items")
      if (answer === "unknown") return yield* refuseChange(`there is no item ${item}`)
      if (answer === "taken") {
        return yield* refuseChange(
          `somebody handles item ${item}: \`tenure dead-letters list\` says who, and until when`
        )
      }
      if (answer !== "available") {
        return yield* refuseChange(
          `item ${item} is ${stateOf(answer)}, and only a failed one is retried`
        )
      }
      yield* Console.log(`Item ${item} is available again, with fresh counters.`)
    },
    Effect.scoped,
    (effect, { url }) => Effect.provide(effect, layerDatabase(url))
  )
).pipe(
  Command.withDescription(
    "Makes a failed one available again, with fresh counters: fix the cause first."
  )
)

const cancel = Command.make(
  "cancel",
  { item, url },
  Effect.fnUntraced(
    function* ({ item }) {
      const sql = yield* connectFor(item)
      const answer = yield* changing(cancelItem(sql, item), "items")
      switch (answer) {
        case "unknown":
          return yield* refuseChange(`there is no item ${item}`)
        case "cancelled":
          // Once more after the commit, for who began to wait before it.
          yield* Effect.ignore(notifySettled(sql, [item]))
          return yield* Console.log(`Item ${item} is cancelled.`)
        case "requested":
          return yield* Console.log(
            `Item ${item} runs: its executor has been asked to stop it, and does within its cancelGrace.`
          )
        default:
          return yield* refuseChange(`item ${item} is ${stateOf(answer)} already`)
      }
    },
    Effect.scoped,
    (effect, { url }) => Effect.provide(effect, layerDatabase(url))
  )
).pipe(Command.withDescription("Ends one that waits, and asks the executor of one that runs."))

/** The public name of where an item is. */
const stateOf = (place: string): string =>
  place === "ready" ? "available" : place === "claimed" ? "leased" : place

export const items = Command.make("items").pipe(
  Command.withDescription("Items: which there are, why one waits, retry and cancel."),
  Command.withSubcommands([list, show, retry, cancel])
)
