/**
 * Goal: a show that ends before its time, by Ctrl-C or by a kill of the whole command, loses nothing:
 * the next start goes on. A second one beside it is refused.
 * Method: the real command on a PostgreSQL of DATABASE_URL. Nothing may be left running: a worker that
 * was frozen when its parent died neither.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect, Schedule } from "effect"
import { connect, freshDatabase } from "../support/Postgres.ts"
import { demo, isAlive, temporaryFolder, writeDocuments } from "./command.ts"

const documents = 40

const prepared = (documents: number) =>
  Effect.gen(function* () {
    const directory = yield* temporaryFolder
    const database = yield* freshDatabase
    writeDocuments(directory, documents)
    const sql = yield* connect(database.owner)
    return {
      sql,
      start: demo(directory, ["--dir", "good"], { DATABASE_URL: database.url }),
      directory
    }
  })

const pids = (output: string): ReadonlyArray<number> =>
  [...output.matchAll(/\(pid (\d+)\)/g)].map(([, pid]) => Number(pid))

describe("a show that is ended early", () => {
  it.live(
    "drains on Ctrl-C, keeps a second one out meanwhile, and is completed by the next",
    () =>
      Effect.gen(function* () {
        const { sql, start } = yield* prepared(documents)
        const first = yield* start
        yield* first.untilItSays(/is killed with SIGKILL/)
        // The documents wait for its leave, and would all be indexed before a second command has started.
        yield* first.signal("SIGSTOP")
        const beside = yield* Effect.flatMap(start, (run) => run.ended)
        yield* first.signal("SIGCONT")
        assert.strictEqual(beside.exitCode, 1, beside.output)
        assert.include(beside.output, `pid ${first.pid} on`)
        yield* first.untilItSays(/is frozen with SIGSTOP/)
        // As npm does: it passes on what the terminal has sent already.
        yield* first.signal("SIGINT")
        yield* first.signal("SIGINT")
        const stopped = yield* first.ended
        assert.strictEqual(stopped.exitCode, 130, stopped.output)
        assert.include(stopped.output, "`npm start` goes on with it")
        assert.deepStrictEqual(pids(stopped.output).filter(isAlive), [])
        const [before] = yield* sql<{ readonly documents: number }>`
          SELECT count(*)::int AS documents FROM demo.document`
        assert.isAbove(before?.documents ?? 0, 0)
        assert.isBelow(before?.documents ?? documents, documents)

        const second = yield* Effect.flatMap(start, (run) => run.ended)
        assert.strictEqual(second.exitCode, 0, second.output)
        assert.match(second.output, /left by an earlier start/)
        const [after] = yield* sql`
          SELECT (SELECT count(*)::int FROM demo.document) AS documents,
                 (SELECT count(*)::int FROM demo.indexed_log) AS writes,
                 (SELECT count(DISTINCT item_id)::int FROM demo.indexed_log) AS items,
                 (SELECT count(*)::int FROM demo.file WHERE state <> 'indexed') AS open`
        assert.deepStrictEqual(after, { documents, writes: documents, items: documents, open: 0 })
      }).pipe(Effect.scoped),
    300_000
  )

  it.live(
    "leaves no process behind when the command itself is killed while a worker is frozen",
    () =>
      Effect.gen(function* () {
        const { start } = yield* prepared(documents)
        const run = yield* start
        yield* run.untilItSays(/is frozen with SIGSTOP/)
        yield* run.signal("SIGKILL")
        const { output } = yield* run.ended
        const named = pids(output)
        assert.isNotEmpty(named)
        yield* Effect.suspend(() =>
          named.some(isAlive) ? Effect.fail("still there") : Effect.void
        ).pipe(Effect.retry(Schedule.spaced("50 millis")), Effect.timeout("15 seconds"))
      }).pipe(Effect.scoped),
    300_000
  )
})
