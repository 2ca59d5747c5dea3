/** Questions to the index: what was proven, how much there is, and where a word stands. */
import { Effect } from "effect"
import { SqlClient } from "effect/sql"
import type { SqlError } from "effect/sql/SqlError"
import { texts } from "../../database/Parameters.ts"

export interface Evidence {
  /** Of the files of this show. */
  readonly documents: number
  readonly chunks: number
  /** Items that were written more than once. */
  readonly duplicates: number
  /** Files that count as indexed and are not in the index whole. */
  readonly incomplete: number
  /** Writes that were committed after a peer had taken over. */
  readonly late: number
}

/** What the tables prove, whatever the workers have told. */
export const evidence = Effect.fnUntraced(function* (
  folder: string,
  items: ReadonlyArray<string>
): Effect.fn.Return<Evidence, SqlError, SqlClient.SqlClient> {
  const sql = yield* SqlClient.SqlClient
  const [row] = yield* sql<Evidence>`
    WITH shown AS MATERIALIZED (
      SELECT f.state, d.item_id, d.bytes, d.chunk_count, w.writes, s.chunks, s.bytes AS stored
        FROM unnest(${texts(items)}) AS i (id)
        JOIN demo.file f ON f.folder = ${folder} AND f.item_id = i.id::uuid
        LEFT JOIN demo.document d ON d.folder = f.folder AND d.path = f.path AND d.item_id = f.item_id
       CROSS JOIN LATERAL (
         SELECT count(*)::int AS writes FROM demo.indexed_log l WHERE l.item_id = f.item_id) w
       CROSS JOIN LATERAL (
         SELECT count(*)::int AS chunks, sum(octet_length(c.body)) AS bytes
           FROM demo.chunk c WHERE c.item_id = d.item_id) s
    )
    SELECT count(*) FILTER (WHERE state = 'indexed')::int AS documents,
           coalesce(sum(chunks) FILTER (WHERE state = 'indexed'), 0)::int AS chunks,
           count(*) FILTER (WHERE writes > 1)::int AS duplicates,
           count(*) FILTER (WHERE state = 'indexed' AND (
             item_id IS NULL OR writes = 0 OR chunks <> chunk_count OR stored IS DISTINCT FROM bytes))::int
             AS incomplete,
           (SELECT count(*)::int
              FROM demo.indexed_log l JOIN tenure.executor e ON e.id = l.executor_id
             WHERE e.revoked_at < l.written_at) AS late
      FROM shown`
  return row ?? { documents: 0, chunks: 0, duplicates: 0, incomplete: 0, late: 0 }
})

export const totals = Effect.gen(function* () {
  const sql = yield* SqlClient.SqlClient
  const [row] = yield* sql<{ readonly documents: number; readonly chunks: number }>`
    SELECT (SELECT count(*)::int FROM demo.document) AS documents,
           (SELECT coalesce(sum(d.chunk_count), 0)::int FROM demo.document d) AS chunks`
  return row ?? { documents: 0, chunks: 0 }
})

export interface Hit {
  readonly folder: string
  readonly path: string
  readonly title: string
  readonly heading: string
  readonly line: number
  readonly rank: number
  readonly snippet: string
  /** Documents that match, shown or not. */
  readonly found: number
}

/** Marks around the words that were found; taken out of the text itself first. */
export const marks = { start: "\u0001", stop: "\u0002" } as const

/** The best chunk of each document. */
export const search = Effect.fnUntraced(function* (query: string, limit: number) {
  const sql = yield* SqlClient.SqlClient
  const options = `StartSel=${marks.start}, StopSel=${marks.stop}, MaxFragments=2, MaxWords=28, MinWords=12, FragmentDelimiter=" ... "`
  return yield* sql<Hit>`
    WITH asked AS MATERIALIZED (
      SELECT websearch_to_tsquery('english', ${query}) AS query
    ), ranked AS MATERIALIZED (
      SELECT c.item_id, c.number, ts_rank_cd(c.search, a.query, 1) AS rank,
             row_number() OVER (
               PARTITION BY c.item_id
               ORDER BY ts_rank_cd(c.search, a.query, 1) DESC, c.number) AS place
        FROM asked a
        JOIN demo.chunk c ON c.search @@ a.query
        JOIN demo.document d ON d.item_id = c.item_id
    ), best AS MATERIALIZED (
      SELECT r.item_id, r.number, r.rank, count(*) OVER ()::int AS found
        FROM ranked r WHERE r.place = 1
       ORDER BY r.rank DESC, r.item_id
       LIMIT ${limit}::int
    )
    SELECT d.folder, d.path, d.title, c.heading, c.line, b.rank::float8 AS rank, b.found,
           ts_headline('english', translate(c.body, ${marks.start + marks.stop}, ''), a.query, ${options})
             AS snippet
      FROM best b
      JOIN demo.chunk c ON c.item_id = b.item_id AND c.number = b.number
      JOIN demo.document d ON d.item_id = b.item_id
     CROSS JOIN asked a
     ORDER BY b.rank DESC, b.item_id`
})
