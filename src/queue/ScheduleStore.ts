/** All SQL of schedules. No policy: which slots are due, and what becomes of missed ones, is decided by the callers. */
import { PgTypes } from "@effect/sql-pg"
import { Effect } from "effect"
import type { SqlClient } from "effect/sql"
import { floats, instants, ints, texts } from "../database/Parameters.ts"
import type { NewItem } from "./QueueStore.ts"

/** What is told on the channel of work when a trigger or a backfill is asked for. */
export const schedulesPayload = "schedules"

/** A schedule as an executor has it. */
export interface Identity {
  readonly name: string
  readonly queue: string
  readonly definition: string
}

/** What the database knows of it. Instants are milliseconds of the epoch. */
export interface State {
  readonly name: string
  readonly isKnown: boolean
  /** The definition in force is the one asked about. */
  readonly isMine: boolean
  /** A live executor has the definition in force. */
  readonly hasRunner: boolean
  readonly definition: string | null
  readonly paused: boolean
  readonly now: number
  readonly next: number | undefined
  readonly last: number | undefined
  readonly resumed: number | undefined
  readonly request: Request | undefined
}

export interface Request {
  readonly id: bigint
  readonly kind: "trigger" | "backfill"
  readonly from: number
  /** Exclusive. Of a backfill alone. */
  readonly to: number
}

interface StateRow {
  readonly name: string
  readonly is_known: boolean
  readonly is_mine: boolean
  readonly has_runner: boolean
  readonly definition: string | null
  readonly paused: boolean
  readonly now_ms: number
  readonly next_ms: number | null
  readonly last_ms: number | null
  readonly resumed_ms: number | null
  readonly request_id: bigint | null
  readonly request_kind: Request["kind"] | null
  readonly request_from_ms: number | null
  readonly request_to_ms: number | null
}

/** One statement for all of a process; a row for each. */
export const readStates = (sql: SqlClient.SqlClient, schedules: ReadonlyArray<Identity>) =>
  Effect.map(
    sql<StateRow>`
      SELECT name, is_known, is_mine, has_runner, definition, paused, now_ms, next_ms, last_ms, resumed_ms,
             request_id, request_kind, request_from_ms, request_to_ms
        FROM tenure.schedule_states(
          ${texts(schedules.map((one) => one.name))}, ${texts(schedules.map((one) => one.queue))},
          ${texts(schedules.map((one) => one.definition))})`,
    (rows) =>
      rows.map((row): State => {
        const { request_from_ms, request_id, request_kind, request_to_ms } = row
        return {
          name: row.name,
          isKnown: row.is_known,
          isMine: row.is_mine,
          hasRunner: row.has_runner,
          definition: row.definition,
          paused: row.paused,
          // Slots are whole milliseconds: rounded up, one would count as due before its time.
          now: Math.floor(row.now_ms),
          next: row.next_ms ?? undefined,
          last: row.last_ms ?? undefined,
          resumed: row.resumed_ms ?? undefined,
          request:
            request_id === null || request_kind === null
              ? undefined
              : {
                  id: request_id,
                  kind: request_kind,
                  from: request_from_ms ?? 0,
                  to: request_to_ms ?? 0
                }
        }
      })
  )

/** Fails with TN011 for a schedule of another application. */
export const register = (
  sql: SqlClient.SqlClient,
  schedule: Identity,
  application: string,
  next: number | undefined,
  seen: Pick<State, "definition" | "next">
) =>
  Effect.map(
    sql<{ readonly answer: "registered" | "moved" }>`
      SELECT tenure.register_schedule(
        ${schedule.name}, ${schedule.queue}, ${application}, ${schedule.definition},
        ${PgTypes.timestamptz(next ?? null)}, ${PgTypes.text(seen.definition)},
        ${PgTypes.timestamptz(seen.next ?? null)}) AS answer`,
    ([row]) => row?.answer ?? "moved"
  )

export const unregister = (sql: SqlClient.SqlClient, name: string) =>
  sql`SELECT tenure.unregister_schedule(${name})`

export type Answer = "fired" | "moved" | "other" | "paused" | "early" | "busy"

export interface Fired {
  readonly answer: Answer
  readonly enqueued: number
  /** Null when nothing was enqueued. */
  readonly queue_id: number | null
}

export interface Slot {
  readonly at: number
  readonly item: NewItem
}

const nothing: Fired = { answer: "moved", enqueued: 0, queue_id: null }

const deadlines = (slots: ReadonlyArray<Slot>): PgTypes.Parameter | null =>
  slots.some(({ item }) => item.deadlineMillis !== null)
    ? floats(slots.map(({ item }) => item.deadlineMillis))
    : null

/** One transaction. `seen` is the next slot as the caller has read it, `next` the one to come. */
export const fire = (
  sql: SqlClient.SqlClient,
  schedule: Identity,
  seen: number,
  slots: ReadonlyArray<Slot>,
  next: number | undefined
) =>
  Effect.map(
    sql<Fired>`
      SELECT answer, enqueued, queue_id
        FROM tenure.fire_schedule(
          ${schedule.name}, ${schedule.queue}, ${schedule.definition}, ${PgTypes.timestamptz(seen)},
          ${instants(slots.map((slot) => slot.at))}, ${texts(slots.map(({ item }) => item.payload))},
          ${ints(slots.map(({ item }) => item.priority))}, ${texts(slots.map(({ item }) => item.key))},
          ${deadlines(slots)}::float8[], ${PgTypes.timestamptz(next ?? null)})`,
    ([row]) => row ?? nothing
  )

/** One transaction. `rest` is where a backfill goes on; nothing when the request is over. */
export const serveRequest = (
  sql: SqlClient.SqlClient,
  request: Request,
  schedule: Identity,
  slots: ReadonlyArray<Slot>,
  rest: number | undefined
) =>
  Effect.map(
    sql<Fired>`
      SELECT answer, enqueued, queue_id
        FROM tenure.serve_schedule_request(
          ${PgTypes.int8(request.id)}, ${schedule.name}, ${schedule.queue}, ${schedule.definition},
          ${instants(slots.map((slot) => slot.at))}, ${texts(slots.map(({ item }) => item.payload))},
          ${ints(slots.map(({ item }) => item.priority))}, ${texts(slots.map(({ item }) => item.key))},
          ${deadlines(slots)}::float8[], ${PgTypes.timestamptz(rest ?? null)})`,
    ([row]) => row ?? nothing
  )

/** `paused`, `already` or `unknown`. */
export const pause = (sql: SqlClient.SqlClient, name: string) =>
  Effect.map(
    sql<{ readonly answer: string }>`SELECT tenure.pause_schedule(${name}) AS answer`,
    ([row]) => row?.answer ?? "unknown"
  )

/** `resumed`, `already` or `unknown`. */
export const resume = (sql: SqlClient.SqlClient, name: string) =>
  Effect.map(
    sql<{ readonly answer: string }>`SELECT tenure.resume_schedule(${name}) AS answer`,
    ([row]) => row?.answer ?? "unknown"
  )

/** An item now, or the slots of a range that have passed. `requested`, `full` or `unknown`. */
export const request = (
  sql: SqlClient.SqlClient,
  name: string,
  range?: { readonly from: number; readonly to: number }
) =>
  Effect.map(
    sql<{ readonly answer: string; readonly has_runner: boolean }>`
      SELECT answer, has_runner
        FROM tenure.request_schedule(
          ${name}, ${PgTypes.timestamptz(range?.from ?? null)}, ${PgTypes.timestamptz(range?.to ?? null)})`,
    ([row]) => row ?? { answer: "unknown", has_runner: false }
  )

/** `removed`, `running` while a live executor has its code, or `unknown`. */
export const remove = (sql: SqlClient.SqlClient, name: string) =>
  Effect.map(
    sql<{ readonly answer: string }>`SELECT tenure.remove_schedule(${name}) AS answer`,
    ([row]) => row?.answer ?? "unknown"
  )

/** The definition in force, and the time; no row for an unknown one. */
export const readDefinition = (sql: SqlClient.SqlClient, name: string) =>
  Effect.map(
    sql<{ readonly definition: string; readonly now: Date }>`
      SELECT s.definition, (SELECT tenure.clock()) AS now FROM tenure.schedule s WHERE s.name = ${name}`,
    ([row]) => row
  )

export interface ListedRow {
  readonly name: string
  readonly queue: string
  readonly application_name: string
  readonly definition: string
  readonly state: "active" | "paused" | "finished" | "orphan"
  readonly executors: number
  readonly next_at: Date | null
  readonly last_slot: Date | null
  readonly last_item: string | null
  /** Where the last slot's item is, or how it ended; null past its retention. */
  readonly last_state: string | null
  /** Not served yet. */
  readonly requests: number
}

/** By name. An executor counts when it is live and has the definition in force. */
export const list = (sql: SqlClient.SqlClient, rowsMax: number) =>
  sql<ListedRow>`
    SELECT s.name, s.queue, s.application_name, s.definition,
           CASE WHEN r.executors = 0 THEN 'orphan' WHEN s.paused THEN 'paused'
                WHEN s.next_at IS NULL THEN 'finished' ELSE 'active' END AS state,
           r.executors, s.next_at, s.last_slot, s.last_item::text AS last_item,
           (SELECT coalesce(p.outcome, p.place) FROM tenure.item_place(s.last_item) p) AS last_state,
           (SELECT count(*)::int FROM tenure.schedule_request q WHERE q.schedule_name = s.name) AS requests
      FROM tenure.schedule s
     CROSS JOIN LATERAL (
       SELECT count(*)::int AS executors
         FROM tenure.schedule_runner x JOIN tenure.executor e ON e.id = x.executor_id
        WHERE x.schedule_name = s.name AND x.queue = s.queue AND x.definition = s.definition
          AND e.state = 'active' AND e.expires_at > (SELECT tenure.clock())) r
     ORDER BY s.name LIMIT ${PgTypes.int4(rowsMax)}`
