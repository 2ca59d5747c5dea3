/** The facts of capacity as the API and the command show them. */
import { Effect } from "effect"
import type { SqlClient } from "effect/sql"
import * as CapacityStore from "../capacity/CapacityStore.ts"

export const listLeases = (sql: SqlClient.SqlClient, max: number) =>
  Effect.map(CapacityStore.leases(sql, max), (rows) =>
    rows.map((row) => ({
      item: row.item_id,
      queue: row.queue,
      session: row.session,
      worker: row.worker,
      executionSeq: row.execution_seq,
      state: row.state,
      key: row.key,
      losses: row.losses,
      reservedAt: row.reserved_at,
      activatedAt: row.activated_at,
      expiresAt: row.expires_at
    }))
  )

export const listSessions = (sql: SqlClient.SqlClient, max: number) =>
  Effect.map(CapacityStore.sessions(sql, max), (rows) =>
    rows.map((row) => ({
      session: row.id,
      application: row.application_name,
      worker: row.worker,
      version: row.version,
      queues: row.queues,
      slots: row.slots,
      reserved: row.reserved,
      active: row.active,
      openedAt: row.opened_at,
      heartbeatAt: row.heartbeat_at,
      expiresAt: row.expires_at
    }))
  )

export const listQueued = (sql: SqlClient.SqlClient, max: number) =>
  Effect.map(CapacityStore.queued(sql, max), (rows) =>
    rows.map((row) => ({
      item: row.item_id,
      queue: row.queue,
      executionSeq: row.execution_seq,
      version: row.version,
      key: row.key,
      losses: row.losses,
      eligibleAt: row.eligible_at
    }))
  )
