/**
 * Dead letters: items that have failed for good, whatever the reason, until somebody brings them back,
 * purges them, or retention drops them with their bucket.
 *
 *   failed --take--> in somebody's hands, for a time --reinject--> available, with fresh counters
 *     ^                          |                   +--discard--> gone
 *     +--release, the time over--+
 *
 * Who looks at one to handle it takes it: nobody else gets it, and no retry, redrive or purge touches it,
 * until he is done with it or his time is over. Then his answer changes nothing, and he is told so by
 * `false`, which is no error: another one has it. An item that is brought back keeps its id; the audit says
 * who did it. What is in quarantine is brought back as by a retry, and never purged while it is open.
 *
 * All of it needs a `SqlClient` alone, of the role that hands in, and joins its transaction.
 */
import { DateTime, Duration, Effect, Option, Stream } from "effect"
import { SqlClient, type SqlError } from "effect/sql"
import * as Store from "./DeadLetterStore.ts"
import type { Any, ItemId } from "./WorkQueue.ts"

/** Its handler's declared error, or who decided it instead. */
export type Reason =
  | "DeclaredError"
  | "HandlerDied"
  | "DeadlineExceeded"
  | "MAX_RECOVERY_ATTEMPTS_EXCEEDED"
  | "EXECUTION_RECOVERY_EXHAUSTED"

export interface Filter {
  readonly reason?: Reason | undefined
  /** Failed at least so long ago. */
  readonly olderThan?: Duration.Input | undefined
  /** Failed at most so long ago. */
  readonly newerThan?: Duration.Input | undefined
  /** Part of the error as it is stored, which is JSON. */
  readonly errorContains?: string | undefined
}

export interface Letter {
  readonly id: ItemId
  readonly queue: string
  readonly reason: Reason
  /** As it is stored; null when nothing was said. */
  readonly error: unknown
  readonly key: Option.Option<string>
  readonly attempt: number
  readonly failures: number
  readonly losses: number
  readonly enqueuedAt: DateTime.Utc
  readonly failedAt: DateTime.Utc
}

export interface Listed extends Letter {
  readonly quarantine: Option.Option<"open" | "settled">
  readonly heldBy: Option.Option<{ readonly holder: string; readonly until: DateTime.Utc }>
}

/** In the caller's hands. */
export interface Taken extends Letter {
  readonly lease: string
  /** As it was handed in, encoded. */
  readonly payload: unknown
}

export interface TakeOptions extends Filter {
  /** At most 1,000. Default 1. */
  readonly max?: number | undefined
  /** How long nobody else gets them: a second to a day. Default 5 minutes. */
  readonly visibility?: Duration.Input | undefined
  /** Shown to others. Default: the name of the session. */
  readonly holder?: string | undefined
}

export interface WalkOptions extends Filter {
  /** Letters of one statement, and so of one transaction: at most 1,000, the default 500. */
  readonly batch?: number | undefined
}

/** A queue by its definition or by its name. */
export type Queue = string | Any

const pageMax = 500

/**
 * Those of a queue, in the order of hand-in to the millisecond. Read page by page, and each is met once, whatever is brought
 * back or fails meanwhile.
 */
export const list = (
  queue: Queue,
  filter: Filter = {}
): Stream.Stream<Listed, SqlError.SqlError, SqlClient.SqlClient> =>
  Stream.unwrap(
    Effect.gen(function* () {
      const sql = yield* SqlClient.SqlClient
      const name = nameOf(queue)
      const encoded = yield* encode(sql, name, filter)
      return Stream.paginate(null as string | null, (after) =>
        Effect.map(
          Store.listDeadLetters(sql, {
            filter: encoded,
            after,
            lookedMax: pageMax,
            withPayload: false
          }),
          ({ next, rows }) =>
            [rows.map((row) => listed(name, row)), Option.fromNullishOr(next)] as const
        )
      )
    })
  )

/** Takes the oldest ones that match and are in nobody's hands. */
export const take = Effect.fnUntraced(function* (
  queue: Queue,
  options: TakeOptions = {}
): Effect.fn.Return<ReadonlyArray<Taken>, SqlError.SqlError, SqlClient.SqlClient> {
  const sql = yield* SqlClient.SqlClient
  const name = nameOf(queue)
  const rows = yield* Store.takeDeadLetters(sql, {
    filter: yield* encode(sql, name, options),
    visibilityMillis: visibilityOf(options.visibility ?? "5 minutes"),
    takenMax: countOf(options.max ?? 1),
    holder: options.holder ?? null
  })
  return rows.map((row): Taken => ({
    ...letter(name, row),
    lease: row.lease,
    payload: row.payload
  }))
})

/** Gives it back before its time is over. `false`: it was not the caller's any more. */
export const release = (
  taken: Taken
): Effect.Effect<boolean, SqlError.SqlError, SqlClient.SqlClient> =>
  Effect.flatMap(SqlClient.SqlClient, (sql) => Store.releaseDeadLetter(sql, taken.id, taken.lease))

/**
 * Makes it available again. `false`: it was not the caller's any more, or it is being settled at this
 * moment; nothing was changed.
 */
export const reinject = (
  taken: Taken
): Effect.Effect<boolean, SqlError.SqlError, SqlClient.SqlClient> =>
  Effect.flatMap(SqlClient.SqlClient, (sql) =>
    Effect.map(
      Store.reinjectDeadLetter(sql, taken.id, taken.lease),
      (answer) => answer === "available"
    )
  )

/** Removes it and all that belongs to it. `false`: not the caller's any more, or in quarantine and open. */
export const discard = (
  taken: Taken
): Effect.Effect<boolean, SqlError.SqlError, SqlClient.SqlClient> =>
  Effect.flatMap(SqlClient.SqlClient, (sql) =>
    Effect.map(Store.discardDeadLetter(sql, taken.id, taken.lease), (answer) => answer === "purged")
  )

export type Decision = "reinject" | "discard" | "keep"

export interface Handled {
  /** Taken and decided. */
  readonly processed: number
  readonly reinjected: number
  readonly discarded: number
}

/**
 * Takes some and decides about each, one after the other. Whatever becomes of the decision, each is given
 * back at the end: on success, failure and interruption.
 */
export const handle = <E, R>(
  queue: Queue,
  options: TakeOptions,
  decide: (taken: Taken) => Effect.Effect<Decision, E, R>
): Effect.Effect<Handled, E | SqlError.SqlError, R | SqlClient.SqlClient> =>
  Effect.acquireUseRelease(
    take(queue, options),
    (letters) =>
      Effect.reduce(
        letters,
        () => none,
        (handled: Handled, one) =>
          Effect.flatMap(decide(one), (decision) =>
            Effect.map(act(one, decision), (changed) => ({
              processed: handled.processed + 1,
              reinjected: handled.reinjected + (changed && decision === "reinject" ? 1 : 0),
              discarded: handled.discarded + (changed && decision === "discard" ? 1 : 0)
            }))
          )
      ),
    // One that was brought back or is gone has no lease any more.
    (letters) => Effect.forEach(letters, release, { discard: true })
  )

const none: Handled = { processed: 0, reinjected: 0, discarded: 0 }

const act = (taken: Taken, decision: Decision) =>
  decision === "reinject"
    ? reinject(taken)
    : decision === "discard"
      ? discard(taken)
      : Effect.succeed(false)

/**
 * Brings back all that match and had failed when it began, in batches. It passes over what is in
 * somebody's hands: `processed` counts those too, `reinjected` does not. Interrupted, it is begun again
 * and finds what is left.
 */
export const redrive = (
  queue: Queue,
  options: WalkOptions = {}
): Effect.Effect<
  { readonly processed: number; readonly reinjected: number },
  SqlError.SqlError,
  SqlClient.SqlClient
> =>
  Effect.map(walk(Store.redriveDeadLetters, queue, options), ({ changed, processed }) => ({
    processed,
    reinjected: changed
  }))

/** As `redrive`, and away with them: items, errors, checkpoints. What is in quarantine and open stays. */
export const purge = (
  queue: Queue,
  options: WalkOptions = {}
): Effect.Effect<
  { readonly processed: number; readonly purged: number },
  SqlError.SqlError,
  SqlClient.SqlClient
> =>
  Effect.map(walk(Store.purgeDeadLetters, queue, options), ({ changed, processed }) => ({
    processed,
    purged: changed
  }))

const walk = Effect.fnUntraced(function* (
  step: (
    sql: SqlClient.SqlClient,
    step: Store.Step
  ) => Effect.Effect<Store.Walked, SqlError.SqlError>,
  queue: Queue,
  options: WalkOptions
) {
  const sql = yield* SqlClient.SqlClient
  const lookedMax = countOf(options.batch ?? 500)
  const encoded = yield* encode(sql, nameOf(queue), options)
  // What fails after this is met by the walk as well, and passed over: so it ends.
  const filter = {
    ...encoded,
    failedBefore: encoded.failedBefore ?? (yield* Store.instantAgo(sql, 0))
  }
  let processed = 0
  let changed = 0
  let after: string | null = null
  do {
    const walked: Store.Walked = yield* step(sql, { filter, after, lookedMax })
    processed += walked.processed
    changed += walked.changed
    after = walked.next
  } while (after !== null)
  return { processed, changed }
})

const nameOf = (queue: Queue): string => (typeof queue === "string" ? queue : queue._tag)

const encode = Effect.fnUntraced(function* (
  sql: SqlClient.SqlClient,
  queue: string,
  { errorContains, newerThan, olderThan, reason }: Filter
) {
  const filter: Store.Filter = {
    queue,
    reason: reason ?? null,
    failedAfter:
      newerThan === undefined ? null : yield* Store.instantAgo(sql, Duration.toMillis(newerThan)),
    failedBefore:
      olderThan === undefined ? null : yield* Store.instantAgo(sql, Duration.toMillis(olderThan)),
    errorContains: errorContains ?? null
  }
  return filter
})

const countOf = (count: number): number => {
  if (Number.isInteger(count) && count >= 1 && count <= 1000) return count
  throw new RangeError("a number of dead letters is an integer between 1 and 1000")
}

const visibilityOf = (visibility: Duration.Input): number => {
  const millis = Duration.toMillis(visibility)
  if (millis >= 1000 && millis <= 86_400_000) return millis
  throw new RangeError("a dead letter is taken for a second at least and a day at most")
}

const letter = (queue: string, row: Store.DeadLetterRow): Letter => ({
  id: row.id as ItemId,
  queue,
  reason: row.reason as Reason,
  error: row.error,
  key: Option.fromNullishOr(row.key),
  attempt: row.attempt,
  failures: row.failures,
  losses: row.losses,
  enqueuedAt: DateTime.fromDateUnsafe(row.enqueued_at),
  failedAt: DateTime.fromDateUnsafe(row.failed_at)
})

const listed = (queue: string, row: Store.ListedRow): Listed => ({
  ...letter(queue, row),
  quarantine: Option.fromNullishOr(row.quarantine),
  heldBy: Option.fromNullishOr(
    row.holder !== null && row.held_until !== null
      ? { holder: row.holder, until: DateTime.fromDateUnsafe(row.held_until) }
      : null
  )
})
