/**
 * A database for one test of the SQL kernel: a copy of the migrated template with a clock that the
 * test moves, a fenced application table `app.note`, and a queue with its lanes. Sessions log in as
 * the real roles, because a superuser passes every check of rights.
 *
 * `mutate` puts a wrong form in place of a right one. It fails when the text it replaces is gone, so
 * that no counter-proof goes on proving something about a function that has changed.
 */
import { PgClient } from "@effect/sql-pg"
import { Effect, type Scope } from "effect"
import * as Reactivity from "effect/reactivity/Reactivity"
import type { SqlError } from "effect/sql/SqlError"
import { randomUUID } from "node:crypto"
import type { Endpoint } from "../../src/database/Database.ts"
import * as Postgres from "../support/Postgres.ts"
import type { Session } from "./Isolation.ts"

export interface SessionOptions {
  /** Without it the session has no identity. */
  readonly executor?: string
  readonly role?: Postgres.Role
  readonly startup?: Readonly<Record<string, string>>
}

export interface Fixture {
  readonly database: Postgres.FreshDatabase
  /** Owns every table and function. */
  readonly owner: PgClient.PgClient
  /** A superuser without identity: sees every lock. */
  readonly observer: PgClient.PgClient
  readonly session: (options?: SessionOptions) => Effect.Effect<Session, SqlError, Scope.Scope>
  /** Moves `tenure.clock()`, for every session and every snapshot at once. */
  readonly pass: (seconds: number) => Effect.Effect<void, SqlError>
  /** Registers an executor with a validity of 30 s. */
  readonly executor: Effect.Effect<string, SqlError>
  readonly enqueue: (count: number) => Effect.Effect<void, SqlError>
  /** Takes back all time, items and notes, and gives every executor a fresh lease. */
  readonly reset: Effect.Effect<void, SqlError>
  readonly mutate: (name: string, right: string, wrong: string) => Effect.Effect<void, SqlError>
  /** The one value of a statement, as the owner sees it. */
  readonly value: (statement: string) => Effect.Effect<string, SqlError>
}

/** One physical connection. */
export const connect = (
  database: Endpoint,
  startupParameters: Readonly<Record<string, string>>
): Effect.Effect<PgClient.PgClient, SqlError, Scope.Scope> =>
  PgClient.makeClient({ ...database.config, startupParameters }).pipe(
    Effect.provideServiceEffect(Reactivity.Reactivity, Reactivity.make)
  )

export const make: Effect.Effect<Fixture, SqlError, Scope.Scope> = Effect.gen(function* () {
  const database = yield* Postgres.freshDatabase
  const observer = yield* connect(database.superuser, {})
  // Deadlocks must show quickly, in the sessions that cannot set this for themselves too.
  yield* observer.unsafe(`ALTER DATABASE ${database.name} SET deadlock_timeout = '30ms'`)
  const owner = yield* connect(database.owner, {})
  for (const statement of scene) yield* owner.unsafe(statement)

  const value = (statement: string) =>
    Effect.map(owner.unsafe<Record<string, unknown>>(statement), (rows) =>
      rows.map((row) => Object.values(row).map(String).join(" ")).join("; ")
    )

  return {
    database,
    owner,
    observer,
    value,
    session: Effect.fnUntraced(function* (options: SessionOptions = {}) {
      const sql = yield* connect(database[options.role ?? "worker"], {
        // Where the order is wrong, a step must end before the test does.
        statement_timeout: "15s",
        application_name: `tenure test ${options.executor ?? ""}`,
        ...(options.executor === undefined ? {} : { "tenure.executor_id": options.executor }),
        ...options.startup
      })
      const rows = yield* sql<{ readonly pid: number }>`SELECT pg_backend_pid() AS pid`
      return { sql, pid: rows[0]?.pid ?? 0 }
    }),
    pass: (seconds) =>
      Effect.asVoid(
        owner.unsafe(
          `SELECT setval('app.clock_shift', last_value + ${seconds * 1000}) FROM app.clock_shift`
        )
      ),
    executor: Effect.suspend(() => {
      const id = randomUUID()
      return Effect.as(
        owner`SELECT tenure.register_executor(${id}, 'app', 'v1', '30 s', 'host', 1)`,
        id
      )
    }),
    enqueue: (count) =>
      Effect.asVoid(
        owner.unsafe(`
          SELECT cardinality(e.ids) FROM tenure.enqueue_all('work', array_fill('{}'::text, ARRAY[${count}])) e`)
      ),
    reset: Effect.asVoid(owner.unsafe("SELECT app.reset()")),
    mutate: Effect.fnUntraced(function* (name: string, right: string, wrong: string) {
      const text = yield* value(`SELECT pg_get_functiondef('${name}'::regproc)`)
      if (!text.includes(right)) throw new Error(`${name} no longer contains: ${right}`)
      yield* owner.unsafe(text.replace(right, wrong))
    })
  }
})

/** Statements of the kernel, on the items of the queue `work`. */
export const statements = {
  write: "INSERT INTO app.note (text) VALUES ('written')",
  claim: (count: number) => `
    SELECT count(c.id) AS claimed, bool_or(c.cancel_requested) AS cancelled
      FROM app.lanes l, tenure.claim(l.queue_id, ARRAY[l.unstarted, l.started], ARRAY[-1, -1], ARRAY[0, 0],
        ${count}, ARRAY[l.suspect], 1) c`,
  settle: (outcome: string) => `
    SELECT s.status FROM app.lanes l, tenure.settle(
      ARRAY(SELECT i.id FROM tenure.item i ORDER BY i.seq),
      ARRAY(SELECT 1 FROM tenure.item), ARRAY(SELECT '${outcome}' FROM tenure.item),
      ARRAY(SELECT NULL::text FROM tenure.item), ARRAY(SELECT '1' FROM tenure.item),
      ARRAY(SELECT l.started FROM tenure.item), ARRAY(SELECT 0::float8 FROM tenure.item)) s`,
  checkpoint: `
    SELECT c.status FROM tenure.checkpoint(ARRAY(SELECT id FROM tenure.item), ARRAY[1], ARRAY['step'],
      ARRAY['1']) c`,
  cancel: "SELECT tenure.cancel((SELECT id FROM tenure.item))",
  renew: (executor: string) => `SELECT tenure.renew_lease('${executor}', '30 s')`,
  mark: (executor: string) => `SELECT tenure.mark_revoking('${executor}', true)`,
  revoke: (executor: string) =>
    `SELECT r.state, r.requeued FROM tenure.revoke('${executor}', '5 s', '0 s') r`,
  /** Where the items are: one letter each, in their order. */
  places: `
    SELECT coalesce(string_agg(p.place, ' ' ORDER BY i.seq), 'none')
      FROM tenure.item i LEFT JOIN LATERAL tenure.item_place(i.id) p ON true`
} as const

// The shift is a sequence and not a row: an older snapshot must see it as well, because it stands for
// time that passes, and time passes for everybody.
const scene = [
  "CREATE SCHEMA app",
  "CREATE SEQUENCE app.clock_shift MINVALUE -1000000000 START 0",
  "SELECT setval('app.clock_shift', 0)",
  `CREATE OR REPLACE FUNCTION tenure.clock() RETURNS timestamptz LANGUAGE sql VOLATILE PARALLEL SAFE AS $$
     SELECT pg_catalog.clock_timestamp() + (SELECT last_value FROM app.clock_shift) * interval '1 ms' $$`,
  "CREATE TABLE app.note (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, text text NOT NULL)",
  "SELECT tenure.fence_table('app.note')",
  `CREATE TABLE app.lanes AS
     SELECT q.queue_id, q.unstarted_lane AS unstarted, q.started_lane AS started, q.suspect_lane AS suspect
       FROM tenure.register_queue('work', 'app', 'v1', '{}', NULL, NULL, 'executions', 4) q`,
  `CREATE FUNCTION app.reset() RETURNS void LANGUAGE plpgsql AS $$
   BEGIN
     DELETE FROM app.note;
     DELETE FROM tenure.ready; DELETE FROM tenure.claimed; DELETE FROM tenure.delayed; DELETE FROM tenure.parked;
     DELETE FROM tenure.done; DELETE FROM tenure.step; DELETE FROM tenure.item;
     DELETE FROM tenure.cancel_request;
     PERFORM setval('app.clock_shift', 0);
     UPDATE tenure.executor SET state = 'active', revoked_at = NULL, expires_at = tenure.clock() + interval '30 s';
   END $$`,
  "GRANT USAGE ON SCHEMA app TO tenure_worker, tenure_api",
  "GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON ALL TABLES IN SCHEMA app TO tenure_worker, tenure_api",
  "GRANT SELECT ON ALL SEQUENCES IN SCHEMA app TO tenure_worker, tenure_api"
]
