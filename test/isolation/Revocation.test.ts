/**
 * Goal: any number of scanners may revoke at once, die at any point and disagree, and still each
 * executor is revoked once, with all its work handed back (I2, I4; rows 14 and 16).
 * Method: scripted scanners, some of them killed, and ten at once over several victims. The forms
 * that are commonly tried instead are shown to fail in the same scene.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect } from "effect"
import * as Fixture from "./Fixture.ts"
import * as Isolation from "./Isolation.ts"

const { claim, mark, places, revoke, write } = Fixture.statements

const scene = Effect.gen(function* () {
  const fixture = yield* Fixture.make
  const executors = {
    victim: yield* fixture.executor,
    first: yield* fixture.executor,
    second: yield* fixture.executor
  }
  const sessions = {
    victim: yield* fixture.session({ executor: executors.victim }),
    first: yield* fixture.session({ executor: executors.first }),
    second: yield* fixture.session({ executor: executors.second }),
    helper: yield* fixture.session({ executor: executors.second })
  }
  const specOf = (steps: Isolation.Spec["steps"], items = 3): Isolation.Spec => ({
    observer: fixture.observer,
    reset: Effect.andThen(fixture.reset, fixture.enqueue(items)),
    sessions,
    steps
  })
  return { fixture, executors, sessions, specOf }
})

const scan = "SELECT r.state FROM tenure.recoverable_executors('app', ARRAY['v1'], 10) r"
const losses = "SELECT coalesce(string_agg(r.losses::text, ' '), 'none') FROM tenure.ready r"
const killBackend = (session: Isolation.Session) => `SELECT pg_terminate_backend(${session.pid})`

describe("a hung writer", () => {
  it.live("is found by both scanners, waited for, and freed by ending its sessions", () =>
    Effect.gen(function* () {
      const { executors, fixture, specOf } = yield* scene
      const { victim } = executors
      const { lines } = yield* Isolation.run(
        specOf({
          victim: { claim: claim(3), write: ["BEGIN", write], next: write },
          first: { scan, mark: mark(victim), revoke: revoke(victim) },
          second: { scan, mark: mark(victim), revoke: revoke(victim) },
          helper: { terminate: `SELECT tenure.terminate_sessions('${victim}')`, look: places }
        }),
        [
          "victim.claim",
          "victim.write",
          "first.mark",
          "first.scan",
          "second.scan",
          "second.mark",
          "first.revoke",
          "second.revoke",
          "helper.terminate",
          "first",
          "second",
          "helper.look"
        ]
      )
      assert.deepStrictEqual(lines.slice(0, 8), [
        "victim.claim: 3 false",
        "victim.write: ok",
        "first.mark: revoking",
        "first.scan: revoking",
        "second.scan: revoking",
        "second.mark: revoking",
        "first.revoke: waits",
        "second.revoke: waits"
      ])
      assert.sameMembers(lines.slice(8), [
        "helper.terminate: 1",
        "first.revoke: revoked 3",
        "second.revoke: revoked 0",
        "helper.look: ready ready ready"
      ])
      assert.strictEqual(yield* fixture.value(losses), "1 1 1")
      assert.strictEqual(yield* fixture.value("SELECT count(*) FROM app.note"), "0")
    })
  )

  it.live("stays unseen by a scan with SKIP LOCKED", () =>
    Effect.gen(function* () {
      const { fixture, specOf } = yield* scene
      const owner = yield* fixture.session({ role: "owner" })
      const spec = specOf({
        victim: { write: ["BEGIN", write], end: "ROLLBACK" },
        first: { expire: fixture.pass(31), scan },
        owner: {
          scan: `SELECT count(*) FROM (
            SELECT FROM tenure.executor e WHERE e.expires_at <= tenure.clock() FOR UPDATE SKIP LOCKED) x`
        }
      })
      const { answer } = yield* Isolation.run({ ...spec, sessions: { ...spec.sessions, owner } }, [
        "victim.write",
        "first.expire",
        "owner.scan",
        "first.scan",
        "victim.end"
      ])
      assert.strictEqual(answer("owner.scan"), "2", "the two scanners' own, and not the hung one")
      assert.strictEqual(answer("first.scan"), "active; active; active")
    })
  )
})

describe("two executors that revoke each other", () => {
  it.live("both succeed in every order, and nobody deadlocks", () =>
    Effect.gen(function* () {
      const { executors, fixture, specOf } = yield* scene
      const stepsOf = (other: string) => ({
        mark: mark(other),
        barrier: ["BEGIN", revoke(other)],
        seal: "COMMIT"
      })
      const spec = specOf({ first: stepsOf(executors.second), second: stepsOf(executors.first) }, 1)
      const findings = yield* Isolation.prove(
        spec,
        Effect.fnUntraced(function* ({ answer }) {
          const states = yield* fixture.value(
            "SELECT string_agg(state, ' ' ORDER BY state) FROM tenure.executor"
          )
          return Isolation.brokenRules({
            "both are revoked": states === "active revoked revoked",
            "nobody deadlocks":
              answer("first.barrier") === "revoked 0" && answer("second.barrier") === "revoked 0"
          })
        })
      )
      assert.strictEqual(findings.length, 20)
    })
  )

  it.live("deadlock when the fence has admitted them first", () =>
    Effect.gen(function* () {
      const { executors, specOf } = yield* scene
      const stepsOf = (other: string) => ({
        admit: ["BEGIN", "SELECT tenure.admit()"],
        mark: mark(other),
        barrier: revoke(other),
        seal: "COMMIT"
      })
      const spec = specOf({ first: stepsOf(executors.second), second: stepsOf(executors.first) }, 1)
      const { lines } = yield* Isolation.run(spec, [
        "first.admit",
        "second.admit",
        "first.mark",
        "second.mark",
        "first.barrier",
        "second.barrier",
        "first.seal",
        "second.seal"
      ])
      assert.strictEqual(
        lines.filter((line) => line.endsWith(": 40P01")).length,
        1,
        lines.join("\n")
      )
    })
  )
})

describe("claims that the barrier waits for", () => {
  const steps = (victim: string, revocation: Isolation.Step) => ({
    victim: { claim: ["BEGIN", claim(10)], commit: "COMMIT" },
    first: { mark: mark(victim) },
    second: { revoke: revocation }
  })
  const order = ["victim.claim", "first.mark", "second.revoke", "victim.commit"]

  it.live("are all handed back", () =>
    Effect.gen(function* () {
      const { executors, specOf } = yield* scene
      const { lines } = yield* Isolation.run(
        specOf(steps(executors.victim, revoke(executors.victim)), 10),
        order
      )
      assert.deepStrictEqual(lines, [
        "victim.claim: 10 false",
        "first.mark: revoking",
        "second.revoke: waits",
        "victim.commit: ok",
        "second.revoke: revoked 10"
      ])
    })
  )

  it.live("are missed by a revocation in one statement", () =>
    Effect.gen(function* () {
      const { executors, fixture, specOf } = yield* scene
      const spec = specOf(
        steps(
          executors.victim,
          `WITH victim AS MATERIALIZED (
             SELECT id FROM tenure.executor WHERE id = '${executors.victim}' FOR UPDATE
           ), removed AS (
             DELETE FROM tenure.claimed c USING victim v WHERE c.owner = v.id RETURNING c.id)
           SELECT (SELECT count(*) FROM victim) AS victims, (SELECT count(*) FROM removed) AS removed`
        ),
        10
      )
      const owner = yield* fixture.session({ role: "owner" })
      const { answer } = yield* Isolation.run(
        { ...spec, sessions: { ...spec.sessions, second: owner } },
        order
      )
      assert.strictEqual(answer("second.revoke"), "1 0")
    })
  )
})

describe("a scanner that dies", () => {
  it.live("between the two steps leaves a fenced executor, which the next scan finishes", () =>
    Effect.gen(function* () {
      const { executors, sessions, specOf } = yield* scene
      const { lines } = yield* Isolation.run(
        specOf({
          victim: { claim: claim(3), write },
          first: { mark: mark(executors.victim) },
          helper: { kill: killBackend(sessions.first) },
          second: { scan, revoke: revoke(executors.victim), look: places }
        }),
        [
          "victim.claim",
          "first.mark",
          "helper.kill",
          "victim.write",
          "second.scan",
          "second.revoke",
          "second.look"
        ]
      )
      assert.deepStrictEqual(lines.slice(3), [
        "victim.write: TN002",
        "second.scan: revoking",
        "second.revoke: revoked 3",
        "second.look: ready ready ready"
      ])
    })
  )

  it.live("inside its transaction takes everything back, and the one behind it does it all", () =>
    Effect.gen(function* () {
      const { executors, fixture, sessions, specOf } = yield* scene
      const { victim } = executors
      const { lines } = yield* Isolation.run(
        specOf({
          victim: { claim: claim(3) },
          first: { mark: mark(victim), revoke: ["BEGIN", revoke(victim)] },
          second: { revoke: revoke(victim), look: places },
          helper: { kill: killBackend(sessions.first) }
        }),
        [
          "victim.claim",
          "first.mark",
          "first.revoke",
          "second.revoke",
          "helper.kill",
          "second",
          "second.look"
        ]
      )
      assert.deepStrictEqual(lines.slice(2), [
        "first.revoke: revoked 3",
        "second.revoke: waits",
        "helper.kill: true",
        "second.revoke: revoked 3",
        "second.look: ready ready ready"
      ])
      assert.strictEqual(yield* fixture.value(losses), "1 1 1", "one loss, not two")
    })
  )
})

describe("many scanners at once", () => {
  for (const scanners of [2, 10]) {
    it.live(
      `${scanners} of them revoke each executor once, though one dies inside its transaction`,
      () =>
        Effect.gen(function* () {
          const fixture = yield* Fixture.make
          yield* fixture.enqueue(15)
          const victims = yield* Effect.replicateEffect(fixture.executor, 5)
          for (const victim of victims) {
            const session = yield* fixture.session({ executor: victim })
            yield* session.sql.unsafe(claim(3))
          }
          yield* fixture.pass(31)
          const peer = yield* fixture.executor
          const scanner = Effect.gen(function* () {
            const { sql } = yield* fixture.session({ executor: peer })
            let requeued = 0
            const found = yield* sql<{ readonly id: string }>`
            SELECT r.id FROM tenure.recoverable_executors('app', ARRAY['v1'], 10) r`
            for (const { id } of found) {
              yield* sql`SELECT tenure.mark_revoking(${id})`
              const rows = yield* sql<{ readonly requeued: number }>`
              SELECT r.requeued FROM tenure.revoke(${id}, '5 s', '0 s') r`
              requeued += rows[0]?.requeued ?? 0
            }
            return requeued
          })
          // Killed while the others queue behind it.
          const dying = yield* fixture.session({ executor: peer })
          yield* dying.sql.unsafe(mark(victims[0] ?? ""))
          yield* dying.sql.unsafe("BEGIN")
          yield* dying.sql.unsafe(revoke(victims[0] ?? ""))
          const killed = fixture.observer
            .unsafe(`
          SELECT pg_terminate_backend(${dying.pid}) FROM pg_locks l
           WHERE NOT l.granted AND ${dying.pid} = ANY(pg_blocking_pids(l.pid)) LIMIT 1`)
            .pipe(Effect.repeat({ until: (rows) => rows.length > 0 }))
          const [requeued] = yield* Effect.all(
            [
              Effect.all(
                Array.from({ length: scanners }, () => scanner),
                { concurrency: "unbounded" }
              ),
              killed
            ],
            { concurrency: "unbounded" }
          )
          assert.strictEqual(
            requeued.reduce((sum, count) => sum + count, 0),
            15
          )
          assert.strictEqual(
            yield* fixture.value("SELECT count(*), min(losses), max(losses) FROM tenure.ready"),
            "15 1 1"
          )
          assert.strictEqual(
            yield* fixture.value("SELECT count(*) FROM tenure.executor WHERE state = 'revoked'"),
            "5"
          )
          assert.strictEqual(
            yield* fixture.value(
              "SELECT count(*) FROM tenure.recoverable_executors('app', ARRAY['v1'], 10)"
            ),
            "0"
          )
        })
    )
  }
})

describe("a scanner with an old list", () => {
  it.live("does nothing to an executor that has renewed, was never known, or is a tombstone", () =>
    Effect.gen(function* () {
      const { executors, fixture, sessions } = yield* scene
      const { sql } = sessions.first
      yield* fixture.enqueue(3)
      yield* sessions.victim.sql.unsafe(claim(3))
      const answers = Effect.fnUntraced(function* (id: string) {
        yield* sql`SELECT tenure.mark_revoking(${id})`
        const rows = yield* sql`
          SELECT r.state, r.requeued FROM tenure.revoke(${id}, '5 s', '0 s') r`
        return Object.values(rows[0] ?? {})
      })
      assert.deepStrictEqual(yield* answers(executors.victim), ["active", 0])
      assert.deepStrictEqual(yield* answers("00000000-0000-4000-8000-000000000000"), ["unknown", 0])
      yield* sessions.second.sql`SELECT tenure.release_executor(${executors.second})`
      assert.deepStrictEqual(yield* answers(executors.second), ["released", 0])
      assert.strictEqual(yield* fixture.value(places), "claimed claimed claimed")
      assert.strictEqual(
        yield* fixture.value(`SELECT tenure.lease_state('${executors.victim}')`),
        "active"
      )
    })
  )

  it.live("robs a healthy executor when the state is not looked at under the lock", () =>
    Effect.gen(function* () {
      const { executors, fixture, sessions } = yield* scene
      yield* fixture.mutate(
        "tenure.revoke",
        "IF state NOT IN ('revoking', 'revoked', 'released') THEN RETURN; END IF;",
        ""
      )
      yield* fixture.enqueue(3)
      yield* sessions.victim.sql.unsafe(claim(3))
      yield* sessions.first.sql.unsafe(revoke(executors.victim))
      assert.strictEqual(yield* fixture.value(places), "ready ready ready")
    })
  )

  it.live("cannot bring an identity back: it is registered once", () =>
    Effect.gen(function* () {
      const { executors, sessions } = yield* scene
      const { lines } = yield* Isolation.run(
        {
          observer: sessions.helper.sql,
          reset: Effect.void,
          sessions,
          steps: {
            first: {
              mark: mark(executors.victim),
              revoke: revoke(executors.victim),
              renew: Fixture.statements.renew(executors.victim),
              register: `SELECT tenure.register_executor('${executors.victim}', 'app', 'v1', '30 s', 'h', 1)`
            }
          }
        },
        ["first.mark", "first.revoke", "first.renew", "first.register"]
      )
      assert.deepStrictEqual(lines, [
        "first.mark: revoking",
        "first.revoke: revoked 0",
        "first.renew: revoked",
        "first.register: 23505"
      ])
    })
  )
})
