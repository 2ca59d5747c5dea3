/**
 * Goal: nothing a session creates or puts on its search path changes what the fence reads, compares
 * or calls (row 39).
 * Method: temporary tables, operators and functions that would let a revoked executor through, in
 * front of ours; and the same attack on functions without their fixed path, where it succeeds.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect } from "effect"
import { sqlState } from "../../src/database/SqlState.ts"
import * as Fixture from "../isolation/Fixture.ts"
import type { Session } from "../isolation/Isolation.ts"

const scene = Effect.gen(function* () {
  const fixture = yield* Fixture.make
  const executor = yield* fixture.executor
  yield* fixture.owner.unsafe(Fixture.statements.mark(executor))
  yield* fixture.owner.unsafe(Fixture.statements.revoke(executor))
  // Everything compares as equal, nothing is null, and the clock stands still in the past.
  for (const statement of [
    "CREATE SCHEMA evil",
    "CREATE FUNCTION evil.always(text, text) RETURNS boolean LANGUAGE sql IMMUTABLE AS 'SELECT true'",
    "CREATE FUNCTION evil.always(uuid, uuid) RETURNS boolean LANGUAGE sql IMMUTABLE AS 'SELECT true'",
    "CREATE FUNCTION evil.never(text, text) RETURNS boolean LANGUAGE sql IMMUTABLE AS 'SELECT false'",
    "CREATE FUNCTION evil.one(text, text) RETURNS text LANGUAGE sql IMMUTABLE AS $$ SELECT 'one' $$",
    "CREATE OPERATOR evil.|| (LEFTARG = text, RIGHTARG = text, FUNCTION = evil.one)",
    "CREATE OPERATOR evil.= (LEFTARG = text, RIGHTARG = text, FUNCTION = evil.always)",
    "CREATE OPERATOR evil.= (LEFTARG = uuid, RIGHTARG = uuid, FUNCTION = evil.always)",
    "CREATE OPERATOR evil.<> (LEFTARG = text, RIGHTARG = text, FUNCTION = evil.never)",
    `CREATE FUNCTION evil.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS $$ SELECT 'epoch'::timestamptz $$`,
    `CREATE FUNCTION evil.current_setting(text, boolean) RETURNS text LANGUAGE sql AS $$ SELECT 'one' $$`,
    `CREATE FUNCTION evil.pg_current_xact_id_if_assigned() RETURNS text LANGUAGE sql AS $$ SELECT '1' $$`,
    "GRANT USAGE ON SCHEMA evil TO tenure_worker"
  ]) {
    yield* fixture.owner.unsafe(statement)
  }
  const session = yield* fixture.session({ executor })
  return { fixture, executor, session }
})

const shadow = (executor: string) => [
  `CREATE TEMP TABLE executor AS SELECT * FROM tenure.executor`,
  `UPDATE pg_temp.executor SET state = 'active', revoked_at = NULL, expires_at = 'infinity' WHERE id = '${executor}'`,
  "GRANT ALL ON pg_temp.executor TO PUBLIC"
]

const answerOf = (session: Session, statement: string) =>
  Effect.match(session.sql.unsafe<Record<string, unknown>>(statement).unprepared, {
    onSuccess: (rows) => String(Object.values(rows[0] ?? { ok: "ok" })[0]),
    onFailure: (error) => sqlState(error) ?? "connection lost"
  })

const attacks = [
  "SET search_path = evil, pg_catalog, public",
  "SET search_path = pg_temp, evil, tenure, pg_catalog",
  "SET search_path = evil"
]

describe("a revoked executor that shadows what the fence uses", () => {
  it.live("is refused all the same, and hears the truth about its lease", () =>
    Effect.gen(function* () {
      const { executor, fixture, session } = yield* scene
      for (const statement of shadow(executor)) yield* session.sql.unsafe(statement)
      // What the false operator makes of the executor and its transaction.
      yield* session.sql.unsafe("SELECT set_config('tenure.admitted', 'one', false)")
      for (const attack of attacks) {
        yield* session.sql.unsafe(attack)
        assert.strictEqual(yield* answerOf(session, Fixture.statements.write), "TN002", attack)
        assert.strictEqual(yield* answerOf(session, "SELECT tenure.admit()"), "TN002", attack)
        const lease = `SELECT tenure.lease_state('${executor}')`
        assert.strictEqual(yield* answerOf(session, lease), "revoked", attack)
        const renewal = Fixture.statements.renew(executor)
        assert.strictEqual(yield* answerOf(session, renewal), "revoked", attack)
      }
      assert.strictEqual(yield* fixture.value("SELECT count(*) FROM app.note"), "0")
    })
  )

  it.live("gets through a fence that does not name the schema of its comparison", () =>
    Effect.gen(function* () {
      const { fixture, session } = yield* scene
      yield* fixture.mutate("tenure.fence", "OPERATOR(pg_catalog.=)", "=")
      yield* session.sql.unsafe("SET search_path = evil, pg_catalog")
      assert.strictEqual(yield* answerOf(session, Fixture.statements.write), "ok")
    })
  )

  it.live("gets through a fence that names its table without a schema", () =>
    Effect.gen(function* () {
      const { executor, fixture, session } = yield* scene
      yield* fixture.mutate("tenure.admit", "FROM tenure.executor e", "FROM executor e")
      yield* fixture.owner.unsafe("ALTER FUNCTION tenure.admit() SET search_path = public, tenure")
      for (const statement of shadow(executor)) yield* session.sql.unsafe(statement)
      assert.strictEqual(yield* answerOf(session, Fixture.statements.write), "ok")
    })
  )

  it.live("finds no function with the owner's rights that leaves its path open", () =>
    Effect.gen(function* () {
      const { fixture } = yield* scene
      const open = yield* fixture.value(`
        SELECT p.proname FROM pg_proc p
         WHERE p.pronamespace = 'tenure'::regnamespace AND p.prosecdef
           -- It names every schema itself: the attacks above are on it.
           AND p.oid <> 'tenure.fence()'::regprocedure
           AND NOT coalesce(p.proconfig @> ARRAY['search_path=pg_catalog, pg_temp'], false)`)
      assert.strictEqual(open, "")
    })
  )
})
