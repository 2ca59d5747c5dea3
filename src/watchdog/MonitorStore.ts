/** All SQL of the queue monitor. No policy: what a look means is decided by `Starvation`. */
import { PgTypes } from "@effect/sql-pg"
import type { SqlClient } from "effect/sql"
import { floats, ints, texts } from "../database/Parameters.ts"

export interface Observation {
  readonly queue: number
  readonly is_full: boolean
  /** Paused, or its rate is used up. */
  readonly is_held: boolean
  readonly has_fresh: boolean
  readonly has_suspect: boolean
  /** Null when nobody's monitor has told of one, or when nothing could be claimed anyway. */
  readonly last_claim_ms: number | null
}

/** One statement for all queues: notes the claims of this executor, then looks. */
export const observeQueues = (
  sql: SqlClient.SqlClient,
  look: {
    readonly versions: ReadonlyArray<string>
    readonly queues: ReadonlyArray<number>
    /** Those of the queues in which an item that somebody has locked does not count. */
    readonly unlocked: ReadonlyArray<number>
    readonly claimed: ReadonlyArray<{ readonly queueId: number; readonly agoMillis: number }>
  }
) => sql<Observation>`
  SELECT queue, is_full, is_held, has_fresh, has_suspect, last_claim_ms
    FROM tenure.observe_queues(
      ${texts(look.versions)}, ${ints(look.queues)}, ${ints(look.unlocked)},
      ${ints(look.claimed.map((one) => one.queueId))},
      ${floats(look.claimed.map((one) => one.agoMillis))})`

/** What waits on a queue, what is claimed, and what is known of why. */
export interface QueueFacts {
  readonly queue: string
  readonly application_name: string | null
  readonly global_limit: number | null
  readonly per_key_limit: number | null
  readonly paused_at: Date | null
  readonly rate_limit: number | null
  readonly rate_window_ms: number | null
  readonly is_rate_full: boolean
  readonly is_full: boolean
  readonly has_startable: boolean
  /** Of those that could be claimed, the one that was handed in first. */
  readonly waiting_id: string | null
  readonly waiting_since: Date | null
  readonly waiting_version: string | null
  readonly waiting_is_suspect: boolean | null
  readonly claimed: number | null
  /** The one that was claimed first. */
  readonly claimed_id: string | null
  readonly claimed_by: string | null
  readonly claimed_since: Date | null
  readonly last_claim_at: Date | null
  /** With a live lease: of the queue's application, and those of the waiting item's version. */
  readonly executors: number
  readonly executors_of_version: number
  /** By the database's clock. */
  readonly observed_at: Date
}

/** Of every queue that has work, the one that has kept it for longest first. */
export const queueFacts = (sql: SqlClient.SqlClient, rowsMax: number) => sql<QueueFacts>`
  SELECT queue, application_name, global_limit, per_key_limit, paused_at, rate_limit, rate_window_ms,
         is_rate_full, is_full, has_startable, waiting_id, waiting_since, waiting_version, waiting_is_suspect, claimed, claimed_id, claimed_by,
         claimed_since, last_claim_at, executors, executors_of_version, observed_at
    FROM tenure.queue_facts()
   ORDER BY least(waiting_since, claimed_since), queue LIMIT ${PgTypes.int4(rowsMax)}`
