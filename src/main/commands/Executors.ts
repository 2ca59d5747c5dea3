/**
 * `tenure executors`: who holds a lease, which claimed work belongs to nobody who does, and what has
 * waited or run for longest on each queue. Reads only, as a worker, as the API or as the owner.
 */
import { Console, Effect } from "effect"
import { Command, Flag } from "effect/cli"
import * as Migrations from "../../database/Migrations.ts"
import { waitOrRefuse } from "../../database/Startup.ts"
import { listExecutors, listStuckWork } from "../../executor/ExecutorStore.ts"
import { type QueueFacts, queueFacts } from "../../watchdog/MonitorStore.ts"
import { ago, whyWaiting } from "../../watchdog/Pending.ts"
import { connect, json, layerDatabase, url } from "./Connection.ts"
import { formatTable } from "./Table.ts"

const max = Flag.Int("max").pipe(
  Flag.withDescription("Rows of each table at most."),
  Flag.withDefault(100)
)

export const executors = Command.make(
  "executors",
  { url, json, max },
  Effect.fnUntraced(
    function* ({ json, max }) {
      const sql = yield* connect
      yield* Migrations.check(sql)
      const [listed, stuck, pending] = yield* waitOrRefuse(
        Effect.all([listExecutors(sql, max), listStuckWork(sql, max), queueFacts(sql, max)]),
        "executors"
      )
      if (json) {
        const queues = pending.map((facts) => ({ ...facts, why: whyWaiting(facts) ?? null }))
        return yield* Console.log(
          JSON.stringify({ executors: listed, stuck, queues }, undefined, 2)
        )
      }
      yield* Console.log(
        formatTable(
          [
            "application_name",
            "application_version",
            "executor_id",
            "state",
            "heartbeat_at",
            "expires_at",
            "revoked_at",
            "claimed",
            "host",
            "pid"
          ],
          listed.map((one) => [
            one.application_name,
            one.application_version,
            one.executor_id,
            one.state,
            one.heartbeat_at,
            one.expires_at,
            one.revoked_at,
            one.claimed,
            one.host,
            one.pid
          ])
        )
      )
      yield* printPending(pending)
      if (stuck.length === 0) return yield* Console.log("\nNo claimed work without a live lease.")
      yield* Console.log("\nClaimed work whose executor holds no live lease:")
      yield* Console.log(
        formatTable(
          [
            "queue",
            "items",
            "oldest_claimed_at",
            "executor_id",
            "state",
            "application_name",
            "application_version"
          ],
          stuck.map((one) => [
            one.queue,
            one.items,
            one.oldest_claimed_at,
            one.executor_id,
            one.state,
            one.application_name,
            one.application_version
          ])
        )
      )
      yield* Console.log(
        "\nexpired, revoking and revoked ones are taken over by the next scan of a live executor of the same\n" +
          "application and version; unknown ones by nobody: look for who wrote such an owner."
      )
    },
    Effect.scoped,
    (effect, { url }) => Effect.provide(effect, layerDatabase(url))
  )
).pipe(
  Command.withDescription(
    "Lists leases, newest heartbeat first, work without a live lease, and what waits on each queue and why."
  )
)

const printPending = (pending: ReadonlyArray<QueueFacts>): Effect.Effect<void> =>
  pending.length === 0
    ? Console.log("\nNo work waits, and none is claimed.")
    : Effect.andThen(
        Console.log("\nOf each queue, what waits and what is claimed for longest:"),
        Console.log(
          formatTable(
            [
              "queue",
              "waiting_for",
              "item",
              "claimed",
              "claimed_for",
              "item",
              "by",
              "why it waits"
            ],
            pending.map((facts) => [
              facts.queue,
              facts.waiting_since && ago(facts, facts.waiting_since),
              facts.waiting_id,
              facts.claimed,
              facts.claimed_since && ago(facts, facts.claimed_since),
              facts.claimed_id,
              facts.claimed_by,
              whyWaiting(facts) ?? null
            ])
          )
        )
      )
