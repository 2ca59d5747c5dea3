/**
 * What the machine's PostgreSQL reaches when each job is claimed and completed by two statements in a
 * transaction of its own, on a table with nothing but what that takes: no payload elsewhere, no results,
 * no fence, and pgbench, which costs next to nothing, as the client.
 */
import { Effect, type Scope } from "effect"
import { execFile } from "node:child_process"
import { existsSync, mkdtempSync, readdirSync, rmSync, writeFileSync } from "node:fs"
import { tmpdir } from "node:os"
import { join } from "node:path"
import { type Bench, execute } from "./Server.ts"

const jobs = 200_000
const seconds = 4

const script = `
BEGIN;
WITH c AS (SELECT id FROM job WHERE state = 0 ORDER BY id FOR UPDATE SKIP LOCKED LIMIT 1)
UPDATE job SET state = 1, owner = 'w' FROM c WHERE job.id = c.id RETURNING job.id \\gset
UPDATE job SET state = 2, done_at = now() WHERE id = :id;
COMMIT;
`

/** Where a distribution puts it beside the server, which the embedded one comes without. */
const pgbench = (): string | undefined => {
  const folder = "/usr/lib/postgresql"
  const installed = existsSync(folder)
    ? readdirSync(folder).map((one) => join(folder, one, "bin"))
    : []
  return [...installed, ...(process.env["PATH"] ?? "").split(":")]
    .map((one) => join(one, "pgbench"))
    .find((file) => existsSync(file))
}

/** Jobs a second, or `undefined` without pgbench. */
export const commitLimit = Effect.fnUntraced(function* (
  bench: Bench,
  connections: number
): Effect.fn.Return<number | undefined, never, Scope.Scope> {
  const program = pgbench()
  if (program === undefined) return undefined
  const sql = yield* bench.connect
  yield* execute(sql, [
    `CREATE TABLE job (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, state smallint NOT NULL DEFAULT 0,
                       owner text, done_at timestamptz)`,
    "CREATE INDEX job_ready ON job (id) WHERE state = 0",
    `INSERT INTO job (state) SELECT 0 FROM generate_series(1, ${jobs})`,
    "VACUUM ANALYZE job",
    "CHECKPOINT"
  ])
  const folder = mkdtempSync(join(tmpdir(), "tenure-bench-"))
  yield* Effect.addFinalizer(() => Effect.sync(() => rmSync(folder, { recursive: true })))
  const file = join(folder, "limit.sql")
  writeFileSync(file, script)
  const settings = ["-n", "-M", "prepared", "-c", `${connections}`, "-j", "2", "-T", `${seconds}`]
  return yield* Effect.callback<number>((resume) => {
    execFile(program, [...settings, "-f", file, bench.url], (error, output) => {
      const rate = /tps = ([\d.]+)/.exec(output)?.[1]
      resume(
        error === null && rate !== undefined
          ? Effect.succeed(Number(rate))
          : Effect.die(new Error(`pgbench has failed: ${error?.message ?? output}`))
      )
    })
  })
})
