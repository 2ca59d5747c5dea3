/**
 * The tables of the demo, and the lock that lets one show at a time work on them.
 *
 * They are fenced like Tenure's own, so a worker whose lease has ended cannot write them. The log has
 * no unique constraint on the item: it is there to find duplicates, not to prevent them.
 */
import { Effect } from "effect"
import { SqlClient } from "effect/sql"
import type { SqlError } from "effect/sql/SqlError"

const tables = [
  // One row a file of a folder, as it was handed in last. Written by `npm start` alone.
  `CREATE TABLE demo.file (
     folder      text NOT NULL,
     path        text NOT NULL,
     fingerprint text NOT NULL,
     round       int  NOT NULL,
     item_id     uuid NOT NULL,
     state       text NOT NULL DEFAULT 'waiting'
       CONSTRAINT file_state CHECK (state IN ('waiting', 'indexed', 'refused')),
     problem     text,
     PRIMARY KEY (folder, path),
     CONSTRAINT only_refused_has_a_problem CHECK ((state = 'refused') = (problem IS NOT NULL))
   )`,
  // One row a file that is indexed. The item names the edition: its chunks are the ones to be found.
  `CREATE TABLE demo.document (
     folder      text NOT NULL,
     path        text NOT NULL,
     item_id     uuid NOT NULL CONSTRAINT edition_once UNIQUE,
     fingerprint text NOT NULL,
     title       text NOT NULL,
     bytes       int  NOT NULL,
     chunk_count int  NOT NULL,
     PRIMARY KEY (folder, path)
   )`,
  `CREATE TABLE demo.chunk (
     item_id uuid     NOT NULL,
     number  int      NOT NULL,
     line    int      NOT NULL,
     heading text     NOT NULL,
     body    text     NOT NULL,
     search  tsvector NOT NULL GENERATED ALWAYS AS (
       setweight(to_tsvector('english', heading), 'A') || to_tsvector('english', body)) STORED,
     PRIMARY KEY (item_id, number)
   )`,
  // A short list of what is pending: whoever fills it sorts it in, within a worker's time for a statement.
  `CREATE INDEX chunk_for_search ON demo.chunk USING gin (search)
     WITH (gin_pending_list_limit = 512)`,
  `CREATE TABLE demo.indexed_log (
     item_id     uuid        NOT NULL,
     attempt     int         NOT NULL,
     executor_id uuid        NOT NULL,
     folder      text        NOT NULL,
     path        text        NOT NULL,
     written_at  timestamptz NOT NULL DEFAULT clock_timestamp()
   )`,
  "CREATE INDEX indexed_log_for_item ON demo.indexed_log (item_id)",
  ...["file", "document", "chunk", "indexed_log"].map(
    (table) => `SELECT tenure.fence_table('demo.${table}')`
  )
]

export const isThere = Effect.flatMap(SqlClient.SqlClient, (sql) =>
  Effect.map(
    sql<{ readonly there: boolean }>`SELECT to_regclass('demo.indexed_log') IS NOT NULL AS there`,
    ([row]) => row?.there === true
  )
)

/** All or nothing, and only one show at a time comes here. */
export const createTables = Effect.gen(function* () {
  if (yield* isThere) return
  const sql = yield* SqlClient.SqlClient
  yield* sql.withTransaction(
    Effect.gen(function* () {
      yield* sql`CREATE SCHEMA IF NOT EXISTS demo`
      for (const statement of tables) yield* sql.unsafe(statement)
    })
  )
})

// The letters TNDM. Held by a session for as long as a show goes on, so it is gone with its process.
const lockNamespace = 0x544e444d
const lockKey = 1

export const tryLock = (sql: SqlClient.SqlClient): Effect.Effect<boolean, SqlError> =>
  Effect.map(
    sql<{ readonly taken: boolean }>`
      SELECT pg_try_advisory_lock(${lockNamespace}::int, ${lockKey}::int) AS taken`,
    ([row]) => row?.taken === true
  )

/** The name that the session with the lock goes by. */
export const lockHolder = (sql: SqlClient.SqlClient): Effect.Effect<string | undefined, SqlError> =>
  Effect.map(
    sql<{ readonly name: string }>`
      SELECT a.application_name AS name
        FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
       WHERE l.locktype = 'advisory' AND l.granted
         AND l.classid = ${lockNamespace}::int::oid AND l.objid = ${lockKey}::int::oid
         AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
       LIMIT 1`,
    ([row]) => row?.name
  )
