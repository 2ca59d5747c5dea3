/** `tenure audit`: what was done to items, queues and executors, by whom. Reads only. */
import { Console, Effect, Option } from "effect"
import { Command, Flag } from "effect/cli"
import { waitOrRefuse } from "../../database/Startup.ts"
import { type AuditRow, readAudit } from "../../queue/ItemStore.ts"
import { age, connected, isItemId, max } from "./Change.ts"
import { refuseCommand } from "./Refused.ts"
import { json, layerDatabase, url } from "./Connection.ts"
import { formatTable } from "./Table.ts"

export const audit = Command.make(
  "audit",
  {
    event: Flag.String("event").pipe(
      Flag.withDescription("Its name, or what stands before a point: dead_letter, item.cancelled."),
      Flag.optional
    ),
    item: Flag.String("item").pipe(Flag.withDescription("Of one item."), Flag.optional),
    queue: Flag.String("queue").pipe(Flag.withDescription("Of one queue."), Flag.optional),
    newerThan: age("newer-than", "At most so long ago:"),
    url,
    json,
    max
  },
  Effect.fnUntraced(
    function* (given) {
      const item = Option.getOrNull(given.item)
      if (item !== null && !isItemId(item)) return yield* refuseCommand(`${item} is not an item id`)
      const sql = yield* connected
      const filter = {
        event: Option.getOrNull(given.event),
        item,
        queue: Option.getOrNull(given.queue),
        newerThanMillis: Option.getOrNull(given.newerThan)
      }
      const events = yield* waitOrRefuse(readAudit(sql, filter, null, given.max), "audit")
      if (given.json) {
        return yield* Console.log(
          JSON.stringify(
            events.map((one) => ({ ...one, id: String(one.id) })),
            undefined,
            2
          )
        )
      }
      if (events.length === 0) return yield* Console.log("There are no such events.")
      yield* Console.log(
        formatTable(
          ["at", "event", "item_id", "queue", "actor", "application", "detail"],
          events.map((one) => [
            one.at,
            one.event,
            one.item_id,
            one.queue,
            one.actor,
            one.application,
            detailOf(one)
          ])
        )
      )
    },
    Effect.scoped,
    (effect, { url }) => Effect.provide(effect, layerDatabase(url))
  )
).pipe(Command.withDescription("Lists what was done and by whom, newest first."))

/** `attempt 3, reason HandlerDied`. */
export const detailOf = ({ detail }: Pick<AuditRow, "detail">): string | null =>
  typeof detail === "object" && detail !== null
    ? Object.entries(detail)
        .map(
          ([name, value]) => `${name} ${typeof value === "string" ? value : JSON.stringify(value)}`
        )
        .join(", ")
    : null
