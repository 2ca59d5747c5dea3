/**
 * `tenure queues`: what is in each queue, and a pause for those who need one. Counts stop at 10,000, so that
 * a million waiting rows cost nothing to look at.
 */
import { Console, Effect } from "effect"
import { Argument, Command } from "effect/cli"
import { waitOrRefuse } from "../../database/Startup.ts"
import { type QueueRow, readQueues } from "../../queue/ItemStore.ts"
import { pauseQueue, resumeQueue } from "../../queue/QueueStore.ts"
import { inWords } from "../../watchdog/Pending.ts"
import { changing, connected } from "./Change.ts"
import { json, layerDatabase, url } from "./Connection.ts"
import { formatTable } from "./Table.ts"

const countedMax = 10_000

const queue = Argument.String("queue")

const pause = Command.make(
  "pause",
  { queue, url },
  Effect.fnUntraced(
    function* ({ queue }) {
      const sql = yield* connected
      yield* changing(pauseQueue(sql, queue), "queues")
      yield* Console.log(
        `Queue ${queue} is paused: nothing is claimed from it until \`tenure queues resume\`. What runs goes on.`
      )
    },
    Effect.scoped,
    (effect, { url }) => Effect.provide(effect, layerDatabase(url))
  )
).pipe(Command.withDescription("Nothing is claimed any more; what runs goes on."))

const resume = Command.make(
  "resume",
  { queue, url },
  Effect.fnUntraced(
    function* ({ queue }) {
      const sql = yield* connected
      yield* changing(resumeQueue(sql, queue), "queues")
      yield* Console.log(`Queue ${queue} is not paused.`)
    },
    Effect.scoped,
    (effect, { url }) => Effect.provide(effect, layerDatabase(url))
  )
).pipe(Command.withDescription("Claims go on."))

export const queues = Command.make(
  "queues",
  { url, json },
  Effect.fnUntraced(
    function* ({ json }) {
      const sql = yield* connected
      const rows = yield* waitOrRefuse(readQueues(sql, countedMax), "queues")
      if (json) {
        return yield* Console.log(
          JSON.stringify({ countedMax, queues: rows.map(toJson) }, undefined, 2)
        )
      }
      if (rows.length === 0) return yield* Console.log("There is no queue.")
      yield* Console.log(
        formatTable(
          [
            "queue",
            "application_name",
            "waiting",
            "oldest_waiting",
            "delayed",
            "parked",
            "running",
            "failed",
            "paused",
            "limits"
          ],
          rows.map((one) => [
            one.queue,
            one.application_name,
            count(one.waiting),
            one.oldest_waiting_at &&
              inWords(one.observed_at.getTime() - one.oldest_waiting_at.getTime()),
            count(one.delayed, one.delayed_is_more),
            count(one.parked, one.parked_is_more),
            count(one.running),
            count(one.failed),
            one.settings["paused_at"] == null ? null : String(one.settings["paused_at"]),
            limitsOf(one)
          ])
        )
      )
    },
    Effect.scoped,
    (effect, { url }) => Effect.provide(effect, layerDatabase(url))
  )
).pipe(
  Command.withDescription("What is in each queue, its limits, and whether it is paused."),
  Command.withSubcommands([pause, resume])
)

/** Where counting has stopped, it says so. */
const count = (value: number, isMore = false): string => {
  const text = value.toLocaleString("en-US")
  return value >= countedMax || isMore ? `${text}+` : text
}

/** What the queue's row says beside who runs it, without what is not set. */
const others = new Set(["id", "name", "application_name", "paused_at"])

const settingsOf = ({ settings }: QueueRow): ReadonlyArray<readonly [string, unknown]> =>
  Object.entries(settings).filter(
    ([name, value]) => !others.has(name) && value !== null && value !== false
  )

const limitsOf = (row: QueueRow): string | null => {
  const limits = settingsOf(row).filter(([name]) => /limit$|window$/.test(name))
  return limits.length === 0
    ? null
    : limits.map(([name, value]) => `${name} ${String(value)}`).join(", ")
}

const toJson = (row: QueueRow) => ({
  queue: row.queue,
  application_name: row.application_name,
  waiting: row.waiting,
  oldest_waiting_at: row.oldest_waiting_at,
  delayed: row.delayed,
  delayed_is_more: row.delayed_is_more,
  parked: row.parked,
  parked_is_more: row.parked_is_more,
  running: row.running,
  failed: row.failed,
  paused_at: row.settings["paused_at"] ?? null,
  settings: Object.fromEntries(settingsOf(row)),
  observed_at: row.observed_at
})
