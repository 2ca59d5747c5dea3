/**
 * Goal: whoever writes is known, once for each transaction, and user code cannot lose or leak that
 * knowledge by accident (I1, I3; rows 34 and 35).
 * Method: sessions of the real roles with every kind of identity; resets, savepoints, exception
 * blocks and changes of identity inside a transaction, watched by a revoker that must wait or pass.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect } from "effect"
import { sqlState } from "../../src/database/SqlState.ts"
import * as Fixture from "../isolation/Fixture.ts"
import * as Isolation from "../isolation/Isolation.ts"

const { mark, revoke, write } = Fixture.statements

const answerOf = (session: Isolation.Session, statement: string) =>
  // Unprepared: DISCARD ALL takes the prepared statements away from under the driver.
  Effect.match(session.sql.unsafe(statement).unprepared, {
    onSuccess: () => "ok",
    onFailure: (error) => sqlState(error) ?? "connection lost"
  })

const run = (session: Isolation.Session, ...all: ReadonlyArray<string>) =>
  Effect.forEach(all, (statement) => session.sql.unsafe(statement).unprepared, { discard: true })

const revoked = Effect.fnUntraced(function* (fixture: Fixture.Fixture, executor: string) {
  yield* fixture.owner.unsafe(mark(executor))
  yield* fixture.owner.unsafe(revoke(executor))
})

const become = (executor: string) => `SELECT set_config('tenure.executor_id', '${executor}', false)`

describe("an identity from the startup packet", () => {
  it.live("survives whatever user code resets, and the fence with it", () =>
    Effect.gen(function* () {
      const fixture = yield* Fixture.make
      const executor = yield* fixture.executor
      const session = yield* fixture.session({ executor })
      const identity = fixture.value
      const resets: ReadonlyArray<ReadonlyArray<string>> = [
        ["RESET ALL"],
        ["DISCARD ALL"],
        ["BEGIN", "SET LOCAL tenure.executor_id = 'another'", "COMMIT"],
        ["BEGIN", "SET tenure.executor_id = 'another'", "ROLLBACK"],
        ["SET tenure.executor_id = 'another'", "RESET tenure.executor_id"],
        ["SET SESSION AUTHORIZATION DEFAULT"]
      ]
      for (const reset of resets) {
        yield* run(session, ...reset)
        const rows = yield* session.sql.unsafe<{ readonly me: string }>(
          "SELECT current_setting('tenure.executor_id') AS me"
        ).unprepared
        assert.strictEqual(rows[0]?.me, executor, reset.join("; "))
        assert.strictEqual(yield* answerOf(session, write), "ok", reset.join("; "))
      }
      assert.strictEqual(yield* identity("SELECT count(*) FROM app.note"), String(resets.length))
      yield* revoked(fixture, executor)
      for (const reset of resets) {
        yield* run(session, ...reset)
        assert.strictEqual(yield* answerOf(session, write), "TN002", reset.join("; "))
      }
    })
  )

  it.live("set later instead, it is lost by a reset, and the session is refused", () =>
    Effect.gen(function* () {
      const fixture = yield* Fixture.make
      const session = yield* fixture.session()
      yield* run(session, become(yield* fixture.executor), write, "RESET ALL")
      assert.strictEqual(yield* answerOf(session, write), "TN004")
    })
  )
})

describe("a session of the worker role", () => {
  it.live("is refused without an executor, with an unknown one, and with a tombstone", () =>
    Effect.gen(function* () {
      const fixture = yield* Fixture.make
      const [revokedId, releasedId, expiredId] = [
        yield* fixture.executor,
        yield* fixture.executor,
        yield* fixture.executor
      ]
      yield* fixture.pass(31)
      yield* revoked(fixture, revokedId)
      yield* fixture.owner.unsafe(
        `UPDATE tenure.executor SET state = 'released' WHERE id = '${releasedId}'`
      )
      const identities: ReadonlyArray<readonly [executor: string | undefined, refusal: string]> = [
        [undefined, "TN004"],
        ["", "TN004"],
        ["00000000-0000-4000-8000-000000000000", "TN003"],
        ["not a uuid", "22P02"],
        [revokedId, "TN002"],
        [releasedId, "TN002"],
        [expiredId, "TN001"]
      ]
      for (const [executor, refusal] of identities) {
        const session = yield* fixture.session(executor === undefined ? {} : { executor })
        for (const statement of [write, "DELETE FROM app.note", "SELECT tenure.admit()"]) {
          assert.strictEqual(yield* answerOf(session, statement), refusal, String(executor))
        }
      }
      assert.strictEqual(yield* fixture.value("SELECT count(*) FROM app.note"), "0")
    })
  )

  it.live("stays refused after a local setting has left an empty string behind", () =>
    Effect.gen(function* () {
      const fixture = yield* Fixture.make
      const executor = yield* fixture.executor
      const worker = yield* fixture.session()
      const api = yield* fixture.session({ role: "api" })
      const before =
        (yield* worker.sql`SELECT current_setting('tenure.executor_id', true) AS me`)[0]
      assert.deepStrictEqual(before, { me: null })
      for (const session of [worker, api]) {
        yield* run(session, "BEGIN", become(executor).replace("false", "true"), write, "COMMIT")
        const after =
          (yield* session.sql`SELECT current_setting('tenure.executor_id', true) AS me`)[0]
        assert.deepStrictEqual(after, { me: "" })
      }
      assert.strictEqual(yield* answerOf(worker, write), "TN004")
      assert.strictEqual(yield* answerOf(api, write), "ok", "a client needs no executor")
    })
  )

  it.live(
    "keeps the fence when it changes its current role, and others pass without identity",
    () =>
      Effect.gen(function* () {
        const fixture = yield* Fixture.make
        const worker = yield* fixture.session()
        yield* run(worker, "SET ROLE tenure_worker")
        assert.strictEqual(yield* answerOf(worker, write), "TN004")
        for (const role of ["api", "owner", "superuser"] as const) {
          const session = yield* fixture.session({ role })
          assert.strictEqual(yield* answerOf(session, write), "ok", role)
        }
        const executor = yield* fixture.executor
        yield* revoked(fixture, executor)
        const superuser = yield* fixture.session({ role: "superuser", executor })
        assert.strictEqual(
          yield* answerOf(superuser, write),
          "TN002",
          "an identity binds everybody"
        )
      })
  )

  it.live("has no right to go round the fence", () =>
    Effect.gen(function* () {
      const fixture = yield* Fixture.make
      const session = yield* fixture.session({ executor: yield* fixture.executor })
      for (const statement of [
        "SET session_replication_role = replica",
        "ALTER TABLE app.note DISABLE TRIGGER tenure_fence",
        "UPDATE tenure.executor SET expires_at = 'infinity'",
        "INSERT INTO tenure.exempt_table (name, reason) VALUES ('app.note', 'none')",
        "DELETE FROM tenure.claimed",
        "TRUNCATE tenure.done",
        "CREATE OR REPLACE FUNCTION tenure.clock() RETURNS timestamptz LANGUAGE sql AS 'SELECT now()'"
      ]) {
        assert.strictEqual(yield* answerOf(session, statement), "42501", statement)
      }
    })
  )
})

describe("the mark of an admission inside a transaction", () => {
  const scene = Effect.gen(function* () {
    const fixture = yield* Fixture.make
    const executor = yield* fixture.executor
    const specOf = (writer: Isolation.Spec["steps"][string]) =>
      Effect.gen(function* () {
        return {
          observer: fixture.observer,
          reset: fixture.reset,
          sessions: {
            writer: yield* fixture.session({ executor }),
            revoker: yield* fixture.session({ executor: yield* fixture.executor })
          },
          steps: { writer, revoker: { mark: mark(executor), revoke: revoke(executor) } }
        } satisfies Isolation.Spec
      })
    return { fixture, executor, specOf }
  })

  const undone: ReadonlyArray<readonly [how: string, statements: ReadonlyArray<string>]> = [
    ["ROLLBACK TO", ["SAVEPOINT s", write, "ROLLBACK TO s"]],
    [
      "ROLLBACK TO a savepoint around a released one",
      ["SAVEPOINT s", "SAVEPOINT t", write, "RELEASE t", "ROLLBACK TO s"]
    ],
    [
      "an exception block",
      [
        `DO $$ BEGIN
           INSERT INTO app.note (text) VALUES ('written');
           RAISE EXCEPTION 'undone';
         EXCEPTION WHEN raise_exception THEN NULL; END $$`
      ]
    ]
  ]
  for (const [how, statements] of undone) {
    it.live(
      `is gone with the lock after ${how}: the revoker passes, the next write is refused`,
      () =>
        Effect.gen(function* () {
          const { fixture, specOf } = yield* scene
          const spec = yield* specOf({ undone: ["BEGIN", ...statements], write, end: "ROLLBACK" })
          const { lines } = yield* Isolation.run(spec, [
            "writer.undone",
            "revoker.mark",
            "revoker.revoke",
            "writer.write",
            "writer.end"
          ])
          assert.deepStrictEqual(lines.slice(1), [
            "revoker.mark: revoking",
            "revoker.revoke: revoked 0",
            "writer.write: TN002",
            "writer.end: ok"
          ])
          assert.strictEqual(yield* fixture.value("SELECT count(*) FROM app.note"), "0")
        })
    )
  }

  it.live(
    "stays when a later savepoint is undone: the revoker waits for the whole transaction",
    () =>
      Effect.gen(function* () {
        const { fixture, specOf } = yield* scene
        const spec = yield* specOf({
          partly: ["BEGIN", write, "SAVEPOINT s", write, "ROLLBACK TO s"],
          write,
          commit: "COMMIT"
        })
        const { lines } = yield* Isolation.run(spec, [
          "writer.partly",
          "revoker.mark",
          "revoker.revoke",
          "writer.write",
          "writer.commit"
        ])
        assert.deepStrictEqual(lines.slice(2), [
          "revoker.revoke: waits",
          "writer.write: ok",
          "writer.commit: ok",
          "revoker.revoke: revoked 0"
        ])
        assert.strictEqual(yield* fixture.value("SELECT count(*) FROM app.note"), "2")
      })
  )

  it.live("does not survive its transaction, chained or not", () =>
    Effect.gen(function* () {
      const { specOf } = yield* scene
      const spec = yield* specOf({
        chain: ["BEGIN", write, "COMMIT AND CHAIN"],
        write,
        end: "ROLLBACK",
        next: write
      })
      const { answer, waited } = yield* Isolation.run(spec, [
        "writer.chain",
        "revoker.mark",
        "revoker.revoke",
        "writer.write",
        "writer.end",
        "writer.next"
      ])
      assert.isFalse(waited("revoker.revoke"))
      assert.strictEqual(answer("writer.write"), "TN002")
      assert.strictEqual(answer("writer.next"), "TN002")
    })
  )

  const leftovers = (executor: string): ReadonlyArray<string> => [
    `${executor}/`,
    `${executor}/-`,
    `${executor}/0`,
    `${executor}/3`,
    executor,
    "/",
    ""
  ]

  it.live("is never matched by what a session has set itself", () =>
    Effect.gen(function* () {
      const { executor, fixture } = yield* scene
      yield* revoked(fixture, executor)
      const session = yield* fixture.session({ executor })
      for (const leftover of leftovers(executor)) {
        yield* session.sql`SELECT set_config('tenure.admitted', ${leftover}, false)`
        assert.strictEqual(yield* answerOf(session, write), "TN002", leftover)
      }
    })
  )

  it.live("would be matched if a transaction without a number counted as one", () =>
    Effect.gen(function* () {
      const { executor, fixture } = yield* scene
      yield* revoked(fixture, executor)
      yield* fixture.mutate(
        "tenure.fence",
        "pg_catalog.pg_current_xact_id_if_assigned()::pg_catalog.text",
        "coalesce(pg_catalog.pg_current_xact_id_if_assigned()::pg_catalog.text, '-')"
      )
      const session = yield* fixture.session({ executor })
      yield* session.sql`SELECT set_config('tenure.admitted', ${`${executor}/-`}, false)`
      assert.strictEqual(yield* answerOf(session, write), "ok")
    })
  )

  it.live("is one identity's: another one in the same transaction is looked at by itself", () =>
    Effect.gen(function* () {
      const { executor, fixture, specOf } = yield* scene
      const dead = yield* fixture.executor
      yield* revoked(fixture, dead)
      const session = yield* fixture.session({ executor })
      for (const [other, refusal] of [
        [dead, "TN002"],
        ["00000000-0000-4000-8000-000000000000", "TN003"],
        ["", "TN004"]
      ] as const) {
        yield* run(session, "BEGIN", write, become(other))
        assert.strictEqual(yield* answerOf(session, write), refusal)
        yield* run(session, "ROLLBACK")
      }
      // Two that are both alive: both are held until the end, whichever wrote last.
      const second = yield* fixture.executor
      const spec = yield* specOf({
        both: ["BEGIN", write, become(second), write, become(executor), write],
        commit: "COMMIT"
      })
      const { answer, waited } = yield* Isolation.run(
        {
          ...spec,
          sessions: { ...spec.sessions, other: yield* fixture.session({ role: "owner" }) },
          steps: { ...spec.steps, other: { mark: mark(second), revoke: revoke(second) } },
          reset: Effect.void
        },
        [
          "writer.both",
          "revoker.mark",
          "other.mark",
          "revoker.revoke",
          "other.revoke",
          "writer.commit"
        ]
      )
      assert.isTrue(waited("revoker.revoke") && waited("other.revoke"))
      assert.strictEqual(answer("writer.commit"), "ok")
    })
  )

  it.live("is not left behind by a revocation: the revoker's own writes are still fenced", () =>
    Effect.gen(function* () {
      const { executor, fixture } = yield* scene
      const victim = yield* fixture.executor
      const session = yield* fixture.session({ executor })
      yield* revoked(fixture, executor)
      // Revoking is safe whoever does it. Writing in the same transaction is not.
      for (const statement of [revoke(victim), revoke(executor), mark(victim), revoke(victim)]) {
        yield* run(session, "BEGIN", statement)
        assert.strictEqual(yield* answerOf(session, write), "TN002", statement)
        yield* run(session, "ROLLBACK")
      }
      yield* run(session, mark(victim))
      yield* run(session, "BEGIN", revoke(victim))
      assert.strictEqual(yield* answerOf(session, write), "TN002")
      yield* run(session, "ROLLBACK")
    })
  )

  it.live("is not left behind by a release either", () =>
    Effect.gen(function* () {
      const { executor, fixture } = yield* scene
      const other = yield* fixture.executor
      const session = yield* fixture.session({ executor })
      yield* run(session, "BEGIN", `SELECT state FROM tenure.release_executor('${executor}')`)
      assert.strictEqual(yield* answerOf(session, write), "TN002")
      yield* run(session, "ROLLBACK")
      yield* revoked(fixture, executor)
      yield* run(session, "BEGIN", `SELECT state FROM tenure.release_executor('${other}')`)
      assert.strictEqual(yield* answerOf(session, write), "TN002")
      yield* run(session, "ROLLBACK")
    })
  )
})
