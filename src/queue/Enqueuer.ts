/**
 * Single enqueues of concurrent fibers leave in one statement, by group commit, each with its own
 * durable answer: 64 fibers that each sent their own were bound by commits.
 *
 * Only outside a transaction, on the client that is grouped here, and without a key of its own, for
 * idempotency, debounce or throttle: one whose key somebody's open transaction holds waits for that, and
 * would keep the others waiting. Nor as a member of a group, which may be sealed: all would be refused.
 *
 * An enqueue that is interrupted before its statement has left is not handed in; after that it is.
 */
import { Context, Effect, Option, type Scope } from "effect"
import type { SqlClient } from "effect/sql"
import { ConnectionError, SqlError } from "effect/sql/SqlError"
import { abandonAfter } from "../database/Deadline.ts"
import { isRowError } from "../database/SqlState.ts"
import * as GroupCommit from "./GroupCommit.ts"
import { enqueueAll, type Enqueued, type NewItem } from "./QueueStore.ts"

export class Enqueuer extends Context.Service<
  Enqueuer,
  {
    readonly sql: SqlClient.SqlClient
    readonly push: (queue: string, item: NewItem) => Effect.Effect<Enqueued, SqlError>
  }
>()("tenure/queue/Enqueuer") {}

/** On a connection that has gone silent everybody would wait for ever. */
const silenceMillis = 10_000

export const make = Effect.fnUntraced(function* (
  sql: SqlClient.SqlClient
): Effect.fn.Return<Enqueuer["Service"], never, Scope.Scope> {
  // Not those of whoever comes first: its spans would be the parents of everybody's statements.
  const context = yield* Effect.context<Scope.Scope>()
  // As many as there are definitions of queues in the process.
  const groups = new Map<string, GroupCommit.GroupCommit<NewItem, Enqueued, SqlError>>()

  const groupOf = Effect.fnUntraced(function* (queue: string) {
    const group = yield* GroupCommit.make<NewItem, Enqueued, SqlError, never>({
      groupMax: 1000,
      bytesMax: 4_194_304,
      sizeOf: (item) => 128 + item.payload.length,
      isRowError,
      write: (items) =>
        enqueueAll(sql, queue, items).pipe(
          abandonAfter(silenceMillis),
          Effect.catchTag("Abandoned", unanswered),
          Effect.map((enqueued) =>
            items.map((_, at): Enqueued => ({
              queue_id: enqueued?.queue_id ?? 0,
              ids: enqueued?.ids?.slice(at, at + 1) ?? null,
              conflict_key: null,
              conflict_id: null,
              refused_group: null
            }))
          )
        )
    }).pipe(Effect.provideContext(context))
    groups.set(queue, group)
    return group
  })

  return {
    sql,
    push: (queue, item) =>
      Effect.suspend(() => {
        const group = groups.get(queue)
        return group === undefined
          ? Effect.flatMap(groupOf(queue), (made) => made.push(item))
          : group.push(item)
      })
  }
})

/** What this call may go through, if it may. */
export const groupFor = (sql: SqlClient.SqlClient, item: NewItem) =>
  Effect.gen(function* () {
    const enqueuer = yield* Effect.serviceOption(Enqueuer)
    if (Option.isNone(enqueuer) || enqueuer.value.sql !== sql) return undefined
    if (item.idempotencyKey !== null) return undefined
    if (item.pace != null || item.group != null) return undefined
    const transaction = yield* Effect.serviceOption(sql.transactionService)
    return Option.isSome(transaction) ? undefined : enqueuer.value
  })

const unanswered = (cause: unknown) =>
  Effect.fail(
    new SqlError({
      reason: new ConnectionError({
        cause,
        message: "the enqueue was not answered: whether the item was accepted is unknown",
        operation: "enqueue"
      })
    })
  )
