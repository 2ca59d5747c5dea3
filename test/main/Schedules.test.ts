/**
 * Goal: a person sees the schedules of a database and acts on one, from the command line, and is told what
 * that means.
 * Method: the command as it is published, against rows that no process has the code of.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect } from "effect"
import { connect, freshDatabase } from "../support/Postgres.ts"
import { bin, start } from "./Child.ts"

describe("tenure schedules", () => {
  it.live(
    "lists them, fills one up, refuses what it cannot read, and removes an orphan",
    () =>
      Effect.gen(function* () {
        const database = yield* freshDatabase
        const owner = yield* connect(database.owner)
        yield* owner`
          INSERT INTO tenure.schedule (name, queue, application_name, definition, next_at, updated_at)
          VALUES ('nightly', 'reports', 'app', 'cron 0 3 * * * Europe/Istanbul', '2125-11-30T00:00Z', tenure.clock()),
                 ('strange', 'reports', 'app', 'at every full moon', '2125-11-30T00:00Z', tenure.clock())`
        const tenure = (...args: ReadonlyArray<string>) =>
          Effect.gen(function* () {
            const child = yield* start([bin, "schedules", ...args], {
              env: { DATABASE_URL: database.url }
            })
            const { code } = yield* child.end
            return { code, stdout: child.stdout(), stderr: child.stderr() }
          })
        const [from, to] = ["--from=2025-11-01T00:00:00Z", "--to=2025-11-08T00:00:00Z"]
        const [listed, filled, unread, removed] = yield* Effect.all(
          [
            tenure("list"),
            tenure("backfill", "nightly", from, to),
            tenure("backfill", "strange", from, to),
            tenure("remove", "strange")
          ],
          { concurrency: 1 }
        )
        assert.strictEqual(listed.code, 0, listed.stderr)
        assert.match(
          listed.stdout,
          /nightly +reports +app +cron 0 3 \* \* \* Europe\/Istanbul +orphan +0 +2125-11-30T00:00:00.000Z/
        )
        assert.match(listed.stdout, /tenure schedules remove <name>/)
        assert.match(filled.stdout, /7 slots are asked for.* No live process has its code/)
        assert.strictEqual(unread.code, 1)
        assert.match(
          unread.stderr,
          /nothing was changed: Schedule strange: the time of a schedule is an instant/
        )
        assert.match(removed.stdout, /Schedule strange is forgotten/)
        assert.deepStrictEqual(
          yield* owner`
            SELECT s.name, r.kind, r.to_at FROM tenure.schedule s
              JOIN tenure.schedule_request r ON r.schedule_name = s.name ORDER BY r.id`,
          [
            {
              name: "nightly",
              kind: "backfill",
              to_at: new Date("2025-11-08T00:00:00Z")
            }
          ]
        )
      }),
    120_000
  )
})
