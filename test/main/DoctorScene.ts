/**
 * A database for one test of `tenure doctor`: what is wrong is made, must be found, is mended by what was
 * printed, and must be gone.
 */
import type { PgClient } from "@effect/sql-pg"
import { assert } from "@effect/vitest"
import { Effect, type Scope } from "effect"
import type { SqlError } from "effect/sql/SqlError"
import { randomUUID } from "node:crypto"
import type { Endpoint } from "../../src/database/Database.ts"
import type { StartupRefused } from "../../src/database/StartupRefused.ts"
import { type Facts, judge, type Limits } from "../../src/main/commands/Diagnosis.ts"
import { examine, limitsOf } from "../../src/main/commands/Doctor.ts"
import type { Finding } from "../../src/main/commands/Finding.ts"
import * as Postgres from "../support/Postgres.ts"

export interface Scene {
  readonly database: Postgres.FreshDatabase
  /** A superuser without identity. */
  readonly sql: PgClient.PgClient
  readonly owner: PgClient.PgClient
  readonly executor: (options?: ExecutorOptions) => Effect.Effect<string, SqlError>
  /** Hands in items so long ago, for a queue that an application runs, or nobody yet. */
  readonly enqueue: (options?: EnqueueOptions) => Effect.Effect<string, SqlError>
  /** As if this executor had claimed it. */
  readonly claim: (item: string, owner: string) => Effect.Effect<void, SqlError>
  readonly lane: (item: string, version: string, suspect?: boolean) => Effect.Effect<void, SqlError>
  readonly run: (statements: ReadonlyArray<string>) => Effect.Effect<void, SqlError>
}

export interface ExecutorOptions {
  readonly application?: string
  readonly version?: string
  readonly state?: string
  /** Seconds from now; negative for the past. */
  readonly heartbeat?: number
  readonly expires?: number
}

export interface EnqueueOptions {
  readonly queue?: string
  readonly application?: string | undefined
  readonly agoMinutes?: number
  readonly key?: string
  readonly globalLimit?: number
  readonly perKeyLimit?: number
}

export const sqlText = (value: string | number | undefined): string =>
  value === undefined ? "NULL" : typeof value === "number" ? String(value) : `'${value}'`

export const make: Effect.Effect<Scene, SqlError, Scope.Scope> = Effect.gen(function* () {
  const database = yield* Postgres.freshDatabase
  const sql = yield* Postgres.connect(database.superuser)
  const owner = yield* Postgres.connect(database.owner)
  const run: Scene["run"] = (statements) =>
    Effect.forEach(statements, (statement) => sql.unsafe(statement), { discard: true })
  return {
    database,
    sql,
    owner,
    run,
    executor: Effect.fnUntraced(function* (options: ExecutorOptions = {}) {
      const { application = "shop", expires = 70, heartbeat = -5, state = "active" } = options
      const id = randomUUID()
      yield* sql.unsafe(`
        INSERT INTO tenure.executor (id, application_name, application_version, state, registered_at, heartbeat_at,
                                     expires_at, revoked_at)
        SELECT '${id}', '${application}', '${options.version ?? "v1"}', '${state}', t - interval '1 hour',
               t + interval '${heartbeat} s', t + interval '${expires} s', CASE WHEN '${state}' = 'revoked' THEN t END
          FROM tenure.clock() t`)
      return id
    }),
    enqueue: Effect.fnUntraced(function* (options: EnqueueOptions = {}) {
      const { agoMinutes = 10, queue = "mail" } = options
      const application = "application" in options ? options.application : "shop"
      const key = options.key === undefined ? "{}" : JSON.stringify({ key: options.key })
      const [row] = yield* sql.unsafe<{ readonly id: string }>(
        `SELECT tenure.enqueue('${queue}', '{"secret": "not to be printed"}', '${key}') AS id`
      )
      const id = row?.id ?? ""
      yield* run([
        `UPDATE tenure.queue SET application_name = ${sqlText(application)},
                global_limit = ${sqlText(options.globalLimit)}, per_key_limit = ${sqlText(options.perKeyLimit)}
          WHERE name = '${queue}'`,
        `UPDATE tenure.item SET enqueued_at = enqueued_at - interval '${agoMinutes} min' WHERE id = '${id}'`
      ])
      return id
    }),
    claim: (item, holder) =>
      run([
        `WITH taken AS (DELETE FROM tenure.ready WHERE id = '${item}' RETURNING *)
         INSERT INTO tenure.claimed (id, queue_id, lane_id, owner, attempt, rank, seq, failures, losses, stuck, key,
                                     claimed_at)
         SELECT t.id, l.queue_id, t.lane_id, '${holder}', 1, t.rank, t.seq, 0, 0, 0, t.key, tenure.clock()
           FROM taken t JOIN tenure.lane l ON l.id = t.lane_id`
      ]),
    lane: (item, version, suspect = false) =>
      run([
        `UPDATE tenure.ready r SET lane_id = tenure.lane_id(i.queue_id, '${version}', ${suspect})
           FROM tenure.item i WHERE i.id = '${item}' AND r.id = i.id`
      ])
  }
})

export const diagnose = Effect.fnUntraced(function* (
  endpoint: Endpoint,
  changes: Partial<Limits> = {}
): Effect.fn.Return<{ facts: Facts; findings: ReadonlyArray<Finding> }, StartupRefused> {
  const limits = yield* limitsOf("default", { waiting: 60_000, again: 100, ...changes })
  const facts = yield* examine(endpoint, limits)
  return { facts, findings: judge(facts) }
})

/** All but the one problem that the servers of tests have on purpose. */
export const troubles = (findings: ReadonlyArray<Finding>): ReadonlyArray<Finding> =>
  findings.filter(({ code, level }) => level !== "ok" && code !== "server.fsync")

/** The only trouble there is, which must be this one. */
export const only = Effect.fnUntraced(function* (
  endpoint: Endpoint,
  level: Finding["level"],
  code: string,
  changes: Partial<Limits> = {}
) {
  const { facts, findings } = yield* diagnose(endpoint, changes)
  const found = troubles(findings)
  assert.deepStrictEqual(
    found.map((one) => [one.level, one.code]),
    [[level, code]]
  )
  assert.notInclude(JSON.stringify({ facts, findings }), "not to be printed")
  return found[0] as Finding
})

export const healthy = Effect.fnUntraced(function* (
  endpoint: Endpoint,
  changes: Partial<Limits> = {}
) {
  const { findings } = yield* diagnose(endpoint, changes)
  assert.deepStrictEqual(troubles(findings), [])
})
