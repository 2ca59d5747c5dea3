/**
 * `tenure dead-letters`: items that have failed for good, listed, brought back and purged, by the same
 * conditions. Payloads and errors as they are stored are printed only to who asks for them.
 */
import { Console, DateTime, Effect, Option, Stream } from "effect"
import { Argument, Command, Flag } from "effect/cli"
import { SqlClient } from "effect/sql"
import { waitOrRefuse } from "../../database/Startup.ts"
import * as DeadLetter from "../../queue/DeadLetter.ts"
import { queuesWithDeadLetters } from "../../queue/DeadLetterStore.ts"
import { readPayload } from "../../queue/ItemStore.ts"
import { age, changing, connected, max } from "./Change.ts"
import { refuseChange } from "./Refused.ts"
import { json, layerDatabase, url } from "./Connection.ts"
import { formatTable } from "./Table.ts"

const conditions = {
  reason: Flag.Literals("reason", [
    "DeclaredError",
    "HandlerDied",
    "DeadlineExceeded",
    "MAX_RECOVERY_ATTEMPTS_EXCEEDED",
    "EXECUTION_RECOVERY_EXHAUSTED"
  ]).pipe(
    Flag.withDescription("Why they failed; DeclaredError: their handler said so."),
    Flag.optional
  ),
  olderThan: age("older-than", "Failed at least so long ago:"),
  newerThan: age("newer-than", "Failed at most so long ago:"),
  errorContains: Flag.String("error-contains").pipe(
    Flag.withDescription("Part of the error as it is stored."),
    Flag.optional
  )
}

interface Conditions {
  readonly reason: Option.Option<DeadLetter.Reason>
  readonly olderThan: Option.Option<number>
  readonly newerThan: Option.Option<number>
  readonly errorContains: Option.Option<string>
}

const filterOf = (given: Conditions): DeadLetter.Filter => ({
  reason: Option.getOrUndefined(given.reason),
  olderThan: Option.getOrUndefined(given.olderThan),
  newerThan: Option.getOrUndefined(given.newerThan),
  errorContains: Option.getOrUndefined(given.errorContains)
})

const queue = Argument.String("queue")

const batch = Flag.Int("batch").pipe(
  Flag.withDescription("Items of one transaction, at most 1000."),
  Flag.withDefault(500)
)

const payload = Flag.Boolean("payload").pipe(
  Flag.withDescription("Prints payloads and errors as they are stored."),
  Flag.withDefault(false)
)

const list = Command.make(
  "list",
  { queue: Argument.optional(queue), ...conditions, url, json, max, payload },
  Effect.fnUntraced(
    function* (given) {
      const sql = yield* connected
      const queues = Option.isSome(given.queue)
        ? [given.queue.value]
        : yield* waitOrRefuse(queuesWithDeadLetters(sql), "dead-letters")
      const letters = yield* Stream.fromIterable(queues).pipe(
        Stream.flatMap((name) => DeadLetter.list(name, filterOf(given))),
        Stream.take(given.max),
        Stream.mapEffect((letter) =>
          Effect.map(
            given.payload ? readPayload(sql, letter.id) : Effect.succeed(undefined),
            (stored) => ({ letter, payload: stored?.payload ?? null })
          )
        ),
        Stream.runCollect,
        Effect.provideService(SqlClient.SqlClient, sql),
        (reading) => waitOrRefuse(reading, "dead-letters")
      )
      if (given.json) {
        return yield* Console.log(
          JSON.stringify(
            letters.map(({ letter, payload }) => toJson(letter, payload, given.payload)),
            undefined,
            2
          )
        )
      }
      if (letters.length === 0) return yield* Console.log("There are no such dead letters.")
      yield* Console.log(
        formatTable(
          [
            "item_id",
            "queue",
            "reason",
            "error",
            "failed_at",
            "attempt",
            "failures",
            "losses",
            "quarantine",
            "held_by",
            "held_until",
            ...(given.payload ? ["payload"] : [])
          ],
          letters.map(({ letter, payload }) => [
            letter.id,
            letter.queue,
            letter.reason,
            given.payload ? JSON.stringify(letter.error) : errorName(letter.error),
            DateTime.toDateUtc(letter.failedAt),
            letter.attempt,
            letter.failures,
            letter.losses,
            Option.getOrNull(letter.quarantine),
            Option.getOrNull(Option.map(letter.heldBy, ({ holder }) => holder)),
            Option.getOrNull(Option.map(letter.heldBy, ({ until }) => DateTime.toDateUtc(until))),
            ...(given.payload ? [JSON.stringify(payload)] : [])
          ])
        )
      )
      yield* Console.log(advice)
    },
    Effect.scoped,
    (effect, { url }) => Effect.provide(effect, layerDatabase(url))
  )
).pipe(
  Command.withDescription(
    "Lists them, of one queue or of all, in the order of hand-in. Shows no payload unless asked."
  )
)

const advice = `
Find out why they failed, and mend that first. Then
  tenure dead-letters redrive <queue>   runs them again, with fresh counters; with the same conditions as list
  tenure dead-letters purge <queue>     removes them for good
What is in somebody's hands (held_by) is left alone until its time is over.`

/** The name of an error, never what it carries. */
const errorName = (error: unknown): string | null => {
  if (typeof error !== "object" || error === null) return null
  if ("_tag" in error && typeof error._tag === "string") return error._tag.slice(0, 60)
  return "name" in error && typeof error.name === "string" ? error.name.slice(0, 60) : null
}

const toJson = (letter: DeadLetter.Listed, payload: unknown, withPayload: boolean) => ({
  item_id: letter.id,
  queue: letter.queue,
  reason: letter.reason,
  error: withPayload ? letter.error : errorName(letter.error),
  key: Option.getOrNull(letter.key),
  failed_at: DateTime.toDateUtc(letter.failedAt),
  enqueued_at: DateTime.toDateUtc(letter.enqueuedAt),
  attempt: letter.attempt,
  failures: letter.failures,
  losses: letter.losses,
  quarantine: Option.getOrNull(letter.quarantine),
  held_by: Option.getOrNull(Option.map(letter.heldBy, ({ holder }) => holder)),
  held_until: Option.getOrNull(Option.map(letter.heldBy, ({ until }) => DateTime.toDateUtc(until))),
  ...(withPayload ? { payload } : {})
})

const redrive = Command.make(
  "redrive",
  { queue, ...conditions, batch, url, json },
  Effect.fnUntraced(
    function* (given) {
      const sql = yield* connected
      if (given.batch < 1 || given.batch > 1000) {
        return yield* refuseChange("a batch is between 1 and 1000 items")
      }
      const { processed, reinjected } = yield* changing(
        DeadLetter.redrive(given.queue, { ...filterOf(given), batch: given.batch }).pipe(
          Effect.provideService(SqlClient.SqlClient, sql)
        ),
        "dead-letters"
      )
      if (given.json) return yield* Console.log(JSON.stringify({ processed, reinjected }))
      yield* Console.log(
        `${reinjected} of ${processed} items of queue ${given.queue} are available again, with fresh counters.`
      )
      if (processed > reinjected) yield* Console.log(passedOver(processed - reinjected))
    },
    Effect.scoped,
    (effect, { url }) => Effect.provide(effect, layerDatabase(url))
  )
).pipe(
  Command.withDescription(
    "Makes those that match available again, in batches. Cut off, it is called again and goes on."
  )
)

const purge = Command.make(
  "purge",
  {
    queue,
    ...conditions,
    batch,
    all: Flag.Boolean("all").pipe(
      Flag.withDescription("Without any condition: every dead letter of the queue."),
      Flag.withDefault(false)
    ),
    url,
    json
  },
  Effect.fnUntraced(
    function* (given) {
      const filter = filterOf(given)
      if (!given.all && Object.values(filter).every((condition) => condition === undefined)) {
        return yield* refuseChange(
          "it removes items for good: give a condition, or --all for every dead letter of the queue"
        )
      }
      if (given.batch < 1 || given.batch > 1000) {
        return yield* refuseChange("a batch is between 1 and 1000 items")
      }
      const sql = yield* connected
      const { processed, purged } = yield* changing(
        DeadLetter.purge(given.queue, { ...filter, batch: given.batch }).pipe(
          Effect.provideService(SqlClient.SqlClient, sql)
        ),
        "dead-letters"
      )
      if (given.json) return yield* Console.log(JSON.stringify({ processed, purged }))
      yield* Console.log(`${purged} of ${processed} items of queue ${given.queue} are gone.`)
      if (processed > purged) yield* Console.log(passedOver(processed - purged))
    },
    Effect.scoped,
    (effect, { url }) => Effect.provide(effect, layerDatabase(url))
  )
).pipe(
  Command.withDescription(
    "Removes those that match, with errors and checkpoints, for good. What is in quarantine and open stays."
  )
)

const passedOver = (count: number): string =>
  `${count} were passed over: in somebody's hands, or in quarantine and not dealt with.`

export const deadLetters = Command.make("dead-letters").pipe(
  Command.withDescription("Items that have failed for good."),
  Command.withSubcommands([list, redrive, purge])
)
