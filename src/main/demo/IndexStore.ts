/**
 * What the folder held and what was indexed of it: the writes of `npm start`, and those of a worker.
 */
import { PgTypes } from "@effect/sql-pg"
import { Effect } from "effect"
import { SqlClient } from "effect/sql"
import { ints, texts } from "../../database/Parameters.ts"
import type { Chunk } from "./Documents.ts"
import type { Document } from "./Folder.ts"

export interface Known {
  readonly path: string
  readonly fingerprint: string
  readonly round: number
  readonly itemId: string
  readonly state: "waiting" | "indexed" | "refused"
  readonly problem: string | null
}

export const knownFiles = Effect.fnUntraced(function* (folder: string) {
  const sql = yield* SqlClient.SqlClient
  return yield* sql<Known>`
    SELECT path, fingerprint, round, item_id::text AS "itemId", state, problem
      FROM demo.file WHERE folder = ${folder}
     ORDER BY path`
})

export interface HandedIn {
  readonly path: string
  readonly fingerprint: string
  readonly round: number
  readonly itemId: string
}

export const recordHandedIn = Effect.fnUntraced(function* (
  folder: string,
  files: ReadonlyArray<HandedIn>
) {
  const sql = yield* SqlClient.SqlClient
  yield* sql`
    INSERT INTO demo.file AS f (folder, path, fingerprint, round, item_id)
    SELECT ${folder}, n.path, n.fingerprint, n.round, n.item_id::uuid
      FROM unnest(${texts(files.map((file) => file.path))},
                  ${texts(files.map((file) => file.fingerprint))},
                  ${ints(files.map((file) => file.round))},
                  ${texts(files.map((file) => file.itemId))}) AS n (path, fingerprint, round, item_id)
    ON CONFLICT (folder, path) DO UPDATE
      SET fingerprint = excluded.fingerprint, round = excluded.round, item_id = excluded.item_id,
          state = 'waiting', problem = NULL`
})

/** Files that are not in the folder any more, and what was indexed of them. */
export const forgetFiles = Effect.fnUntraced(function* (
  folder: string,
  paths: ReadonlyArray<string>
) {
  const sql = yield* SqlClient.SqlClient
  yield* sql`
    WITH gone AS (
      DELETE FROM demo.document
       WHERE folder = ${folder} AND path = ANY(${texts(paths)}) RETURNING item_id
    )
    DELETE FROM demo.chunk c USING gone g WHERE c.item_id = g.item_id`
  yield* sql`DELETE FROM demo.file WHERE folder = ${folder} AND path = ANY(${texts(paths)})`
})

/** `again` leaves no fingerprint, so that the next start hands the file in anew. */
export const recordOutcome = Effect.fnUntraced(function* (outcome: {
  readonly itemId: string
  readonly problem: string | null
  readonly again: boolean
}) {
  const sql = yield* SqlClient.SqlClient
  yield* sql`
    UPDATE demo.file
       SET state = ${outcome.problem === null ? "indexed" : "refused"}, problem = ${outcome.problem},
           fingerprint = CASE WHEN ${outcome.again} THEN '' ELSE fingerprint END
     WHERE item_id = ${PgTypes.uuid(outcome.itemId)}`
  // What an earlier content has left behind must not be found any more.
  if (outcome.problem !== null && !outcome.again) {
    yield* sql`
      WITH gone AS (
        DELETE FROM demo.document d USING demo.file f
         WHERE f.item_id = ${PgTypes.uuid(outcome.itemId)}
           AND d.folder = f.folder AND d.path = f.path
        RETURNING d.item_id
      )
      DELETE FROM demo.chunk c USING gone g WHERE c.item_id = g.item_id`
  }
})

/** Of about 600 KB: a transaction must end well before the lease that admits it, on any machine. */
const chunksPerTransaction = 400

/**
 * A worker's write. What makes the document an indexed one is a single transaction, which the fence
 * admits or refuses as a whole. Only the first chunks of a very long one are written before it, where
 * nobody finds them yet.
 *
 * Nothing is written when an earlier attempt has committed and died before its outcome was stored (it
 * is in the log), nor when the file was handed in anew meanwhile, or is gone.
 */
export const writeDocument = Effect.fnUntraced(function* (write: {
  readonly item: { readonly id: string; readonly attempt: number }
  readonly executorId: string
  readonly folder: string
  readonly document: Document
  readonly title: string
  readonly chunks: ReadonlyArray<Chunk>
}) {
  const { chunks, document, executorId, folder, item } = write
  const sql = yield* SqlClient.SqlClient
  const id = PgTypes.uuid(item.id)
  const ahead = Math.floor((chunks.length - 1) / chunksPerTransaction) * chunksPerTransaction
  if (ahead > 0) {
    if (yield* discardChunks(sql, item.id)) return
    for (let at = 0; at < ahead; at += chunksPerTransaction) {
      yield* insertChunks(sql, item.id, chunks.slice(at, at + chunksPerTransaction))
    }
  }
  yield* sql.withTransaction(
    Effect.gen(function* () {
      const logged = yield* sql`
        INSERT INTO demo.indexed_log (item_id, attempt, executor_id, folder, path)
        SELECT f.item_id, ${item.attempt}::int, ${PgTypes.uuid(executorId)}, f.folder, f.path
          FROM demo.file f
         WHERE f.folder = ${folder} AND f.path = ${document.path} AND f.item_id = ${id}
           AND NOT EXISTS (SELECT FROM demo.indexed_log l WHERE l.item_id = f.item_id)
           FOR SHARE OF f
        RETURNING item_id`
      if (logged.length === 0) return
      if (ahead === 0) yield* sql`DELETE FROM demo.chunk WHERE item_id = ${id}`
      yield* insertChunks(sql, item.id, chunks.slice(ahead))
      yield* sql`
        DELETE FROM demo.chunk c USING demo.document d
         WHERE d.folder = ${folder} AND d.path = ${document.path} AND c.item_id = d.item_id`
      yield* sql`
        INSERT INTO demo.document AS d
          (folder, path, item_id, fingerprint, title, bytes, chunk_count)
        VALUES (${folder}, ${document.path}, ${id}, ${document.fingerprint}, ${write.title},
                ${document.bytes}::int, ${chunks.length}::int)
        ON CONFLICT (folder, path) DO UPDATE
          SET item_id = excluded.item_id, fingerprint = excluded.fingerprint,
              title = excluded.title, bytes = excluded.bytes, chunk_count = excluded.chunk_count`
    })
  )
})

/** What an attempt that was lost has left. Answers whether there is nothing to write any more. */
const discardChunks = (sql: SqlClient.SqlClient, item: string) =>
  Effect.map(
    sql<{ readonly done: boolean }>`
      WITH discarded AS (
        DELETE FROM demo.chunk c
         WHERE c.item_id = ${PgTypes.uuid(item)}
           AND NOT EXISTS (SELECT FROM demo.indexed_log l WHERE l.item_id = c.item_id)
      )
      SELECT EXISTS (SELECT FROM demo.indexed_log l WHERE l.item_id = ${PgTypes.uuid(item)}) AS done`,
    ([row]) => row?.done === true
  )

const insertChunks = (sql: SqlClient.SqlClient, item: string, chunks: ReadonlyArray<Chunk>) => sql`
  INSERT INTO demo.chunk (item_id, number, line, heading, body)
  SELECT ${PgTypes.uuid(item)}, c.number, c.line, c.heading, c.body
    FROM unnest(${ints(chunks.map((chunk) => chunk.number))},
                ${ints(chunks.map((chunk) => chunk.line))},
                ${texts(chunks.map((chunk) => chunk.heading))},
                ${texts(chunks.map((chunk) => chunk.text))}) AS c (number, line, heading, body)`
