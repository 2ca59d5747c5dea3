/**
 * Items as people ask for them: a stream of what is known of each, newest first, without payloads.
 *
 * Read page by page, and each item is met once, however it moves meanwhile: a page goes on after what never
 * changes of an item. Its state is the one that it had when its page was read, so of a state that items enter
 * and leave, those that enter behind the reader are not met.
 */
import { DateTime, Duration, Effect, Option, Stream } from "effect"
import { SqlClient, type SqlError } from "effect/sql"
import { type ItemFilter, type ItemRow, type ItemState, listItems } from "./ItemStore.ts"

export interface ListFilter {
  readonly state?: ItemState | undefined
  readonly key?: string | undefined
  /** Handed in at least so long ago. */
  readonly olderThan?: Duration.Input | undefined
  /** Handed in at most so long ago. */
  readonly newerThan?: Duration.Input | undefined
}

export interface ItemInfo {
  readonly id: string
  readonly queue: string
  readonly state: ItemState
  readonly priority: number
  readonly key: Option.Option<string>
  readonly attempt: number
  readonly failures: number
  /** Executors that were lost with it. */
  readonly losses: number
  /** Who runs it, or who settled it. */
  readonly owner: Option.Option<string>
  /** Of a failed one: `DeclaredError`, or who decided it instead. */
  readonly reason: Option.Option<string>
  readonly enqueuedAt: DateTime.Utc
  readonly deadlineAt: Option.Option<DateTime.Utc>
  /** Of a delayed one. */
  readonly dueAt: Option.Option<DateTime.Utc>
  readonly claimedAt: Option.Option<DateTime.Utc>
  readonly finishedAt: Option.Option<DateTime.Utc>
}

/** Looked at by one statement. */
const pageMax = 500

export const rows = (
  filter: ItemFilter
): Stream.Stream<ItemRow, SqlError.SqlError, SqlClient.SqlClient> =>
  Stream.unwrap(
    Effect.map(SqlClient.SqlClient, (sql) =>
      Stream.paginate(null as string | null, (after) =>
        Effect.map(
          listItems(sql, { filter, after, lookedMax: pageMax }),
          ({ next, rows }) => [rows, Option.fromNullishOr(next)] as const
        )
      )
    )
  )

export const list = (
  queue: string,
  filter: ListFilter = {}
): Stream.Stream<ItemInfo, SqlError.SqlError, SqlClient.SqlClient> =>
  Stream.map(
    rows({
      queue,
      state: filter.state ?? null,
      key: filter.key ?? null,
      olderThanMillis: millis(filter.olderThan),
      newerThanMillis: millis(filter.newerThan)
    }),
    info
  )

const millis = (duration: Duration.Input | undefined): number | null =>
  duration === undefined ? null : Duration.toMillis(duration)

const info = (row: ItemRow): ItemInfo => ({
  id: row.id,
  queue: row.queue,
  state: row.state as ItemState,
  priority: row.priority,
  key: Option.fromNullishOr(row.key),
  attempt: row.attempt ?? 0,
  failures: row.failures ?? 0,
  losses: row.losses ?? 0,
  owner: Option.fromNullishOr(row.owner),
  reason: Option.fromNullishOr(row.reason),
  enqueuedAt: DateTime.fromDateUnsafe(row.enqueued_at),
  deadlineAt: instant(row.deadline_at),
  dueAt: instant(row.due_at),
  claimedAt: instant(row.claimed_at),
  finishedAt: instant(row.finished_at)
})

const instant = (date: Date | null): Option.Option<DateTime.Utc> =>
  Option.map(Option.fromNullishOr(date), DateTime.fromDateUnsafe)
