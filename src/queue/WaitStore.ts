/** All SQL of durable waits, as one function for each statement. No policy. */
import { PgTypes } from "@effect/sql-pg"
import { Effect } from "effect"
import type { SqlClient } from "effect/sql"
import { floats, ints, texts, uuids } from "../database/Parameters.ts"

/** A wait of a claimed item. Times are milliseconds; null waits for ever. */
export interface Asked {
  readonly id: string
  readonly attempt: number
  readonly name: string
  readonly kind: "sleep" | "event" | "invoke"
  readonly durationMillis: number | null
}

export interface WaitAnswer {
  readonly status: "over" | "pending" | "stale" | "unknown"
  /** How it ended. */
  readonly value: unknown
  readonly due_in_ms: number | null
}

/** Begins waits and asks whether they are over. Answers in the order of the questions. */
export const askWaits = (sql: SqlClient.SqlClient, asked: ReadonlyArray<Asked>) =>
  Effect.map(
    sql<WaitAnswer & { readonly place: number }>`
      SELECT place, status, value, due_in_ms
        FROM tenure.ask_waits(
          ${uuids(asked.map((one) => one.id))}, ${ints(asked.map((one) => one.attempt))},
          ${texts(asked.map((one) => one.name))}, ${texts(asked.map((one) => one.kind))},
          ${floats(asked.map((one) => one.durationMillis))})`,
    (rows) => {
      const answers: Array<WaitAnswer> = []
      for (const row of rows) answers[row.place - 1] = row
      return answers
    }
  )

export interface Invocation {
  readonly item: string
  readonly attempt: number
  readonly name: string
  readonly timeoutMillis: number | null
  readonly queue: string
  /** Encoded JSON. */
  readonly payload: string
  readonly priority: number
  readonly key: string | null
  readonly trace: string | null
}

/** Hands in the item to wait for, unless an earlier attempt has. Its queue, if it was handed in now. */
export const invoke = (sql: SqlClient.SqlClient, invocation: Invocation) =>
  Effect.map(
    sql<{ readonly status: "begun" | "stale"; readonly queue_id: number | null }>`
      SELECT status, queue_id
        FROM tenure.invoke(
          ${PgTypes.uuid(invocation.item)}, ${PgTypes.int4(invocation.attempt)}, ${invocation.name},
          ${PgTypes.float8(invocation.timeoutMillis)}, ${invocation.queue}, ${invocation.payload},
          ${PgTypes.int4(invocation.priority)}, ${PgTypes.text(invocation.key)},
          ${PgTypes.text(invocation.trace)})`,
    ([row]) => row ?? { status: "stale" as const, queue_id: null }
  )

export interface Parking {
  readonly id: string
  readonly attempt: number
  /** Where it is available again when it wakes. */
  readonly lane: number
  readonly waits: ReadonlyArray<string>
}

/** Only what is not simply parked is returned. */
export const parkItems = (sql: SqlClient.SqlClient, parkings: ReadonlyArray<Parking>) =>
  sql<{
    readonly id: string
    readonly attempt: number
    readonly status: "due" | "busy" | "stale"
  }>`
    SELECT id, attempt, status
      FROM tenure.park(
        ${uuids(parkings.map((one) => one.id))}, ${ints(parkings.map((one) => one.attempt))},
        ${ints(parkings.map((one) => one.lane))},
        ${texts(parkings.map((one) => JSON.stringify(one.waits)))})`

/** `sent`, `already`, `unknown`, or the outcome the item has. */
export const sendEvent = (
  sql: SqlClient.SqlClient,
  event: { readonly item: string; readonly name: string; readonly value: string }
) =>
  Effect.map(
    sql<{ readonly answer: string }>`
      SELECT tenure.signal(${PgTypes.uuid(event.item)}, ${event.name}, ${event.value}::text::json) AS answer`,
    ([row]) => row?.answer ?? "unknown"
  )

/** What the executor has taken becomes available; what is gone meanwhile is left out. */
export const dispatchWaits = (
  sql: SqlClient.SqlClient,
  executorId: string,
  ids: ReadonlyArray<string>
) =>
  Effect.map(
    sql<{ readonly dispatched: number; readonly queue_ids: ReadonlyArray<number> }>`
      SELECT dispatched, queue_ids
        FROM tenure.dispatch_waits(${PgTypes.uuid(executorId)}, ${uuids(ids)})`,
    ([row]) => row ?? { dispatched: 0, queue_ids: [] }
  )

/** On the channel of work, for every executor that listens: something was told to a parked item. */
export const wakePayload = "wake"

export const notifyWake = (sql: SqlClient.SqlClient) =>
  sql`SELECT pg_notify('tenure_work', ${wakePayload})`
