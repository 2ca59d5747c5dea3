/**
 * How a database error ends while a process starts: an unreachable server is waited for, what waiting
 * cannot mend becomes a refusal with its reason, and anything else is our bug.
 */
import { Effect } from "effect"
import { isSqlError, type SqlError } from "effect/sql/SqlError"
import { whileUnreachable } from "./Retry.ts"
import { classify, sqlState } from "./SqlState.ts"
import { DatabaseRejected, refuse, type StartupRefused } from "./StartupRefused.ts"

export const waitOrRefuse = <A, E, R>(
  effect: Effect.Effect<A, E, R>,
  operation: string
): Effect.Effect<A, Exclude<E, SqlError> | StartupRefused, R> =>
  effect.pipe(
    // Turned into a refusal first: a read-only server would otherwise be waited for without end.
    Effect.mapError((error) => (isSqlError(error) ? (refusalOf(error) ?? error) : error)),
    (refusing) => whileUnreachable(refusing, operation),
    Effect.catch((error) =>
      isSqlError(error)
        ? Effect.die(error)
        : Effect.fail(error as Exclude<E, SqlError> | StartupRefused)
    )
  )

/** The refusal an error stands for, or `undefined` when it stands for none. */
export const refusalOf = (error: SqlError): StartupRefused | undefined => {
  const state = sqlState(error)
  if (state === "25006") return rejected("readOnly", error)
  if (classify(error) !== "refused") return undefined
  switch (state) {
    case "08P01":
      return rejected("transactionPooler", error)
    case "3D000":
    case "57P04":
      return rejected("otherEndpoint", error)
    default:
      return rejected("rolePrivileges", error)
  }
}

const rejected = (problem: DatabaseRejected["problem"], error: SqlError): StartupRefused =>
  refuse(new DatabaseRejected({ problem, detail: serverMessage(error) }))

/** What the server said: names and settings, never a row. */
export const serverMessage = (error: SqlError): string => {
  const cause = error.reason.cause
  const text = cause instanceof Error ? cause.message : error.message
  const state = sqlState(error)
  return state === undefined ? text : `${text} (SQLSTATE ${state})`
}
