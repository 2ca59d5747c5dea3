/**
 * `tenure migrate`: creates or upgrades the schema, and says what a missing role leaves unprotected.
 * Safe to repeat and to run from several places at once; see Migrations.ts.
 */
import { Console, Effect } from "effect"
import { Command } from "effect/cli"
import * as Migrations from "../../database/Migrations.ts"
import { waitOrRefuse } from "../../database/Startup.ts"
import { grantRoles, roleFacts } from "./CommandStore.ts"
import { connect, json, layerDatabase, url } from "./Connection.ts"

/** What the roles protect, for who has to do without one of them. */
const lost: Readonly<Record<string, string>> = {
  tenure_worker:
    "workers have to log in as the owner of the schema, so nothing but their good behaviour keeps a " +
    "session without an identity from writing fenced tables, or a worker from dropping the fence. " +
    "Have an administrator run: CREATE ROLE tenure_worker NOLOGIN; then migrate again",
  tenure_api:
    "processes that only hand in work have to log in as a role that may do more than that. " +
    "Have an administrator run: CREATE ROLE tenure_api NOLOGIN; then migrate again"
}

export const migrate = Command.make(
  "migrate",
  { url, json },
  Effect.fnUntraced(
    function* ({ json }) {
      const report = yield* Migrations.run()
      const sql = yield* connect
      // Again on each run: an administrator may have made the roles since.
      const [missing, facts] = yield* waitOrRefuse(
        Effect.all([grantRoles(sql), roleFacts(sql)]),
        "migrate"
      )
      if (json) return yield* Console.log(JSON.stringify({ ...report, missingRoles: missing }))
      for (const file of report.applied) yield* Console.log(`applied  ${file}`)
      for (const file of report.adopted)
        yield* Console.log(`adopted  ${file} (psql had applied it)`)
      yield* Console.log(
        report.applied.length === 0
          ? `The schema is up to date: migration ${report.needed}.`
          : `The schema went from migration ${report.found} to ${report.needed}.`
      )
      for (const role of missing) {
        yield* Console.log(
          `Role ${role} is missing: ${lost[role] ?? "its rights are granted to nobody"}.`
        )
      }
      if (facts?.isSuperuser === true) {
        yield* Console.log(
          `${facts.role} is a superuser, for whom no fence holds: let workers log in as a member of tenure_worker.`
        )
      }
    },
    Effect.scoped,
    (effect, { url }) => Effect.provide(effect, layerDatabase(url, { migrate: false }))
  )
).pipe(
  Command.withDescription("Creates or upgrades the schema. Run it as the role that is to own it.")
)
