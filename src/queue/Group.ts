/**
 * Groups of items, of any queues, and a callback when all of them have ended.
 *
 *   made --members handed in--> open --seal--> sealed --the last member ends--> ended, callback handed in
 *
 * G1. A group ends once, in the transaction in which its last member ends, in whatever way: completed,
 *     failed, cancelled, past its deadline or in quarantine. The callback is handed in by that transaction,
 *     exactly once, with the counts.
 * G2. A member counts once. A failed one that `retry` brings back before the group's end is waited for
 *     again; after it, it runs, and the counts stay and the callback does not come again.
 *
 * A sealed group without members ends at once. A group is retained as long as an item that has ended; one
 * that is never sealed goes, without a callback, when nothing of it is alive: make, hand in and seal in
 * one transaction, or seal again after a crash.
 */
import { type Brand, DateTime, Effect, Option, Schema } from "effect"
import { SqlClient, type SqlError } from "effect/sql"
import { Client } from "./Client.ts"
import { type EnqueueRefused, GroupClosed, UnknownId } from "./Errors.ts"
import * as GroupStore from "./GroupStore.ts"
import type { NewItem } from "./QueueStore.ts"
import { traceparent } from "./HandIn.ts"
import type { EnqueueOptions, ItemId } from "./WorkQueue.ts"

export { GroupClosed }

export type GroupId = string & Brand.Brand<"tenure/GroupId">
export const GroupId = Schema.String.pipe(Schema.brand("tenure/GroupId"))

/** How a group has ended: the field `group` of its callback's payload. Failed ones without an answer are `failed`. */
export const Ended = Schema.Struct({
  id: GroupId,
  completed: Schema.Int,
  failed: Schema.Int,
  cancelled: Schema.Int
})
export type Ended = typeof Ended.Type

export interface Status {
  /** Handed in so far. */
  readonly members: number
  readonly completed: number
  readonly failed: number
  readonly cancelled: number
  readonly isSealed: boolean
  readonly endedAt: Option.Option<DateTime.Utc>
  /** The item of the callback, once the group has ended. */
  readonly callback: Option.Option<ItemId>
}

/** A queue whose payload has a field `group: Group.Ended`. */
interface CallbackQueue<Payload extends Schema.Top> {
  readonly _tag: string
  readonly payloadSchema: Payload
  readonly "~item": (
    payload: Payload["~type.make.in"],
    options: EnqueueOptions
  ) => Effect.Effect<NewItem, EnqueueRefused, Payload["EncodingServices"]>
}

type TakesEnded = Schema.Top & { readonly "~type.make.in": { readonly group: Ended } }

export interface Callback<Payload extends TakesEnded> {
  readonly queue: CallbackQueue<Payload>
  /** All but the field `group`, which the group's end adds. */
  readonly payload: Omit<Payload["~type.make.in"], "group">
  readonly priority?: number | undefined
  /** Overrides the definition's. */
  readonly key?: string | undefined
}

/** A new group, open. In the transaction of the caller's `SqlClient` when one is open, as all of these. */
export const make = Effect.fnUntraced(function* <Payload extends TakesEnded = never>(options?: {
  readonly onDone: Callback<Payload>
}): Effect.fn.Return<
  GroupId,
  EnqueueRefused | SqlError.SqlError,
  SqlClient.SqlClient | Payload["EncodingServices"]
> {
  const sql = yield* SqlClient.SqlClient
  const callback = options === undefined ? undefined : yield* encode(options.onDone)
  return (yield* GroupStore.makeGroup(sql, callback, yield* traceparent)) as GroupId
})

/** No more members from now on. Once is enough, again changes nothing. */
export const seal = Effect.fnUntraced(function* (
  id: GroupId
): Effect.fn.Return<void, UnknownId | SqlError.SqlError, SqlClient.SqlClient> {
  const sql = yield* SqlClient.SqlClient
  if ((yield* GroupStore.sealGroup(sql, id)) === "unknown") return yield* unknown(id)
})

export const status = Effect.fnUntraced(function* (
  id: GroupId
): Effect.fn.Return<Status, UnknownId | SqlError.SqlError, SqlClient.SqlClient> {
  const sql = yield* SqlClient.SqlClient
  const row = yield* GroupStore.readGroup(sql, id)
  if (row === undefined) return yield* unknown(id)
  return {
    members: row.members,
    completed: row.completed,
    failed: row.failed,
    cancelled: row.cancelled,
    isSealed: row.is_sealed,
    endedAt: Option.map(Option.fromNullishOr(row.ended_at), DateTime.fromDateUnsafe),
    callback: Option.fromNullishOr(row.callback_id as ItemId | null)
  }
})

const awaitEnd = Effect.fnUntraced(function* (
  id: GroupId
): Effect.fn.Return<Ended, UnknownId, Client> {
  const client = yield* Client
  const row = yield* Effect.catchTag(client.outcome(id), "UnknownId", () => unknown(id))
  return yield* Effect.orDie(decodeEnded(row.result))
})

export {
  /** Waits for the group's end, not for its callback: pushed, and through outages. */
  awaitEnd as await
}

const decodeEnded = Schema.decodeUnknownEffect(Ended)

const unknown = (id: GroupId) => Effect.fail(new UnknownId({ kind: "group", id }))

/** Stands for the end until there is one. */
const placeholder: Ended = { id: GroupId.make(""), completed: 0, failed: 0, cancelled: 0 }

const encode = Effect.fnUntraced(function* <Payload extends TakesEnded>(
  callback: Callback<Payload>
) {
  const { key, payload, priority, queue } = callback
  const item = yield* queue["~item"]({ ...payload, group: placeholder }, { key, priority })
  const { group, ...rest } = JSON.parse(item.payload) as Record<string, unknown>
  // Another encoding of the field would be missed at the end, when nobody is there to be told.
  if (JSON.stringify(group) !== JSON.stringify(placeholder)) {
    return yield* Effect.die(
      new Error(`queue ${queue._tag}: the field group of its payload is not Group.Ended`)
    )
  }
  return {
    queue: queue._tag,
    payload: JSON.stringify(rest),
    priority: item.priority,
    key: item.key
  } satisfies GroupStore.NewCallback
})
