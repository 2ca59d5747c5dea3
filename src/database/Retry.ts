/**
 * The two retries the database layer knows. Both add full jitter: replicas that failed together would
 * otherwise come back together (P-37).
 *
 * Only what certainly took no effect is repeated here. A connection lost during COMMIT is not: the
 * caller reads the row by its token first (P-34).
 */
import { Duration, Effect, Option, Random, Schedule } from "effect"
import type { SqlClient } from "effect/sql"
import { isSqlError, type SqlError } from "effect/sql/SqlError"
import { classify, sqlState } from "./SqlState.ts"

/** A delay drawn evenly from nothing to `base` doubled per attempt, and never above `cap`. */
export const fullJitter = (base: Duration.Input, cap: Duration.Input): Schedule.Schedule<unknown> =>
  Schedule.min([Schedule.exponential(base), Schedule.spaced(cap)]).pipe(
    Schedule.modifyDelay(({ duration }) =>
      Effect.map(Random.next, (share) => Duration.millis(Duration.toMillis(duration) * share))
    )
  )

/**
 * Runs `effect` in a transaction, and the whole of it again after a deadlock, a serialization failure
 * or a lock timeout. Inside an open transaction it is a savepoint and is not repeated: the locks that
 * made it fail belong to the outer transaction.
 */
export const inTransaction = <A, E, R>(
  sql: SqlClient.SqlClient,
  effect: Effect.Effect<A, E, R>
): Effect.Effect<A, E | SqlError, R> =>
  Effect.flatMap(Effect.serviceOption(sql.transactionService), (outer) => {
    const once = sql.withTransaction(effect)
    if (Option.isSome(outer)) return once
    return Effect.retry(once, {
      schedule: fullJitter("5 millis", "500 millis"),
      times: 10,
      while: (error) => isSqlError(error) && classify(error) === "retryTransaction"
    })
  })

/** Waits, for as long as it takes, for a server that cannot be reached. For start-up only. */
export const whileUnreachable = <A, E, R>(
  effect: Effect.Effect<A, E, R>,
  operation: string
): Effect.Effect<A, E, R> =>
  effect.pipe(
    Effect.tapError((error) =>
      isUnreachable(error)
        ? Effect.logWarning("the database cannot be reached yet; trying again").pipe(
            Effect.annotateLogs({ operation, sqlState: sqlState(error), reason: error.message })
          )
        : Effect.void
    ),
    Effect.retry({ schedule: fullJitter("100 millis", "5 seconds"), while: isUnreachable })
  )

const isUnreachable = (error: unknown): error is SqlError =>
  isSqlError(error) && classify(error) === "reconnect"
