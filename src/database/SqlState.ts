/**
 * What a database error asks of the caller. The driver's own `isRetryable` is not enough: it calls a
 * server that is starting up or has no connection left final, and a lost COMMIT retryable.
 *
 *   retryTransaction   the whole transaction again, after a short jitter, several times
 *   reconnect          the session or the server is gone: again after a long jitter. A COMMIT that
 *                      ends so is ambiguous: read the row by its token before anything is repeated
 *   timeout            a limit of ours or a cancel; the two share one code, so the caller's own
 *                      deadline decides which it was
 *   fenced             this process may not write any more: never retried
 *   conflict           a constraint answered: a decision, not an accident
 *   refused            credentials, rights, or a database that does not exist: stop and say so
 *   defect             our bug
 *
 * Nothing is retried inside a nested transaction: only the outermost one can start again.
 */
import type { SqlError } from "effect/sql/SqlError"

export type ErrorClass =
  | "retryTransaction"
  | "reconnect"
  | "timeout"
  | "fenced"
  | "conflict"
  | "refused"
  | "defect"

/** The five characters the server sent, or `undefined` when the connection broke without them. */
export const sqlState = (error: SqlError): string | undefined => {
  const cause = error.reason.cause
  if (typeof cause !== "object" || cause === null || !("code" in cause)) return undefined
  // A socket error has a code as well (ECONNREFUSED); only the server's are of this shape.
  return typeof cause.code === "string" && /^[0-9A-Z]{5}$/.test(cause.code) ? cause.code : undefined
}

export const classify = (error: SqlError): ErrorClass => {
  const state = sqlState(error)
  if (state !== undefined) return classifyState(state)
  return error.reason._tag === "ConnectionError" ? "reconnect" : "defect"
}

/** The classes of states, for code that has a state and no error: a log, a function's answer. */
export const classifyState = (state: string): ErrorClass =>
  byState.get(state) ?? byClass.get(state.slice(0, 2)) ?? "defect"

/** Data exceptions and limits of one value: the row's fault, not the statement's. */
export const isRowError = (error: SqlError): boolean => {
  const state = sqlState(error) ?? ""
  return state.startsWith("22") || state.startsWith("54") || state.startsWith("23")
}

const byState: ReadonlyMap<string, ErrorClass> = new Map([
  ["40001", "retryTransaction"], // serialization failure
  ["40P01", "retryTransaction"], // deadlock
  ["55P03", "retryTransaction"], // lock timeout, or NOWAIT
  ["57014", "timeout"], // statement timeout, or a cancel
  ["25P04", "timeout"], // transaction_timeout: the session is gone as well
  ["25P03", "timeout"], // idle_in_transaction_session_timeout: likewise
  ["57P01", "reconnect"], // shutdown by an administrator, or a terminated backend
  ["57P02", "reconnect"], // a crash of another backend
  ["57P03", "reconnect"], // starting up, shutting down or in recovery
  ["57P05", "reconnect"], // idle_session_timeout
  ["25006", "reconnect"], // a standby, or a primary that was demoted: the address will move
  ["55000", "reconnect"], // the database does not accept connections now
  ["55006", "retryTransaction"], // object in use: a template that is being copied
  ["08P01", "refused"], // a pooler that does not pass our startup parameters on
  ["57P04", "refused"], // the database was dropped
  ["42501", "refused"], // insufficient privilege
  ["3D000", "refused"], // no such database
  ["0LP01", "refused"], // grant not allowed
  ["0P000", "refused"] // no such role
])

const byClass: ReadonlyMap<string, ErrorClass> = new Map([
  ["08", "reconnect"], // connection exceptions
  ["53", "reconnect"], // out of connections, memory or disk
  ["58", "reconnect"], // the operating system failed the server: I/O
  ["23", "conflict"], // constraints
  ["28", "refused"], // authentication
  ["TN", "fenced"]
])
