/**
 * Goal: who counts as a worker is who works as one: not who may hand the role out, as the migrating
 * role of a managed server may, and also who takes the role on by SET ROLE (P-24, P-26; row 35).
 * Method: logins made for the test, with each kind of membership, writing without an executor.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect } from "effect"
import { randomBytes } from "node:crypto"
import { sqlState } from "../../src/database/SqlState.ts"
import { administer, connect, endpointOf, freshDatabase } from "../support/Postgres.ts"

/** A login with that membership, and what it gets when it writes without an executor. */
const writing = Effect.fnUntraced(function* (
  membership: string,
  before: ReadonlyArray<string> = []
) {
  const login = `tenure_test_${randomBytes(5).toString("hex")}`
  const database = yield* freshDatabase
  const password = database.url.split(":")[2]?.split("@")[0] ?? ""
  yield* Effect.acquireRelease(
    administer((sql) => sql.unsafe(`CREATE ROLE ${login} LOGIN NOINHERIT PASSWORD '${password}'`)),
    () => administer((sql) => sql.unsafe(`DROP ROLE ${login}`))
  )
  yield* administer((sql) => sql.unsafe(membership.replace("$login", login)))
  const owner = yield* connect(database.owner)
  yield* owner.unsafe("CREATE TABLE note (text text)")
  yield* owner.unsafe("SELECT tenure.fence_table('note')")
  yield* owner.unsafe("GRANT ALL ON note TO PUBLIC")
  yield* Effect.addFinalizer(() => Effect.orDie(owner.unsafe("DROP TABLE note")))
  const sql = yield* connect(endpointOf(login, database.name), { connectionsMax: 1 })
  for (const statement of before) yield* sql.unsafe(statement)
  return yield* Effect.match(sql.unsafe("INSERT INTO note VALUES ('x')"), {
    onSuccess: () => "written",
    onFailure: (error) => sqlState(error) ?? "connection lost"
  })
}, Effect.scoped)

const serverVersion = administer((sql) =>
  Effect.map(
    sql<{ readonly version: number }>`SELECT current_setting('server_version_num')::int AS version`,
    ([row]) => row?.version ?? 0
  )
)

describe("a session without an executor", () => {
  it.live("of a role that may only grant the worker role writes: it migrates", () =>
    Effect.gen(function* () {
      // Before PostgreSQL 16 the creator of a role is no member of it, and there is no such membership.
      const membership =
        (yield* serverVersion) >= 160_000
          ? "GRANT tenure_worker TO $login WITH ADMIN TRUE, INHERIT FALSE, SET FALSE"
          : "ALTER ROLE $login CREATEROLE"
      assert.strictEqual(yield* writing(membership), "written")
    })
  )

  it.live("that has taken the worker role on is refused, as one that has it from the start", () =>
    Effect.gen(function* () {
      const grant = "GRANT tenure_worker TO $login"
      assert.strictEqual(yield* writing(grant, ["SET ROLE tenure_worker"]), "TN004")
      const inheriting = "ALTER ROLE $login INHERIT"
      assert.strictEqual(yield* writing(inheriting), "written")
    })
  )
})
