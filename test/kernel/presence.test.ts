/**
 * Goal: the database revokes an absent executor only when everything says that it has died, whoever
 * asks and however late; a look along the ring finds every one that is missing, and holds up nobody
 * (presence; I2, I3, K-129, K-163; rows 30 and 31 in part).
 * Method: real sessions that hold, lose and take the locks again, on a clock that the test moves; for
 * each refusal one scene that differs in nothing else from the one that is marked.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect, Exit, Queue, type Scope } from "effect"
import type { SqlError } from "effect/sql/SqlError"
import { randomUUID } from "node:crypto"
import * as Fixture from "../isolation/Fixture.ts"
import * as Isolation from "../isolation/Isolation.ts"
import { eventually, first, stateOf } from "./kernel.ts"

const { claim, renew, revoke } = Fixture.statements

const hold = (executor: string) => `SELECT tenure.hold_presence('${executor}') IS NOT NULL AS held`
const leave = (executor: string) => `SELECT tenure.leave_presence('${executor}', NULL)::text`
const markAbsent = (absent: string, watcher: string, observedAt: string) =>
  `SELECT tenure.mark_absent('${absent}', '${watcher}', '${observedAt}', '1 s') AS word`

interface Holder {
  readonly id: string
  readonly session: Isolation.Session
  /** What a death leaves of it: the session is over, and nobody has said anything. */
  readonly die: Effect.Effect<void, unknown>
}

/** A fixture whose server counts as started long ago, and executors that hold their locks. */
const scene = Effect.gen(function* () {
  const fixture = yield* Fixture.make
  yield* fixture.pass(60)
  const clock = fixture.value("SELECT tenure.clock()::text")
  const waitGone = (pid: number) =>
    eventually(
      `session ${pid} is over`,
      Effect.map(
        fixture.observer<{ gone: boolean }>`
          SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = ${pid}::int) AS gone`,
        (rows) => first(rows).gone
      )
    )
  /** One more session of an executor, which holds its lock. */
  const holds = Effect.fnUntraced(function* (id: string) {
    const session = yield* fixture.session({ executor: id })
    yield* session.sql.unsafe(hold(id))
    return session
  })
  const end = (session: Isolation.Session) =>
    Effect.andThen(
      fixture.observer`SELECT pg_terminate_backend(${session.pid}::int)`,
      waitGone(session.pid)
    )
  const holder: Effect.Effect<Holder, SqlError, Scope.Scope> = Effect.gen(function* () {
    const id = yield* fixture.executor
    const session = yield* holds(id)
    return { id, session, die: end(session) }
  })
  const ask = (absent: string, watcher: string, observedAt: string) =>
    fixture.value(markAbsent(absent, watcher, observedAt))
  return { fixture, clock, holder, holds, end, ask }
})
type Scene = Effect.Success<typeof scene>

/** The one scene in which an executor is marked: `changes` come before the question. */
const absence = Effect.fnUntraced(function* (
  { ask, clock, fixture, holder }: Scene,
  changes: {
    /** Before the member is missed. */
    readonly before?: (
      watcher: Holder,
      absent: Holder
    ) => Effect.Effect<unknown, unknown, Scope.Scope>
    /** When it is missed already, and the grace is over. */
    readonly after?: (
      watcher: Holder,
      absent: Holder,
      observedAt: string
    ) => Effect.Effect<unknown, unknown, Scope.Scope>
    readonly graceSeconds?: number
    readonly renews?: boolean
  } = {}
) {
  const watcher = yield* holder
  const absent = yield* holder
  yield* fixture.pass(5)
  yield* changes.before?.(watcher, absent) ?? Effect.void
  yield* absent.die
  const observedAt = yield* clock
  yield* fixture.pass(changes.graceSeconds ?? 2)
  if (changes.renews !== false) yield* watcher.session.sql.unsafe(renew(watcher.id))
  yield* changes.after?.(watcher, absent, observedAt) ?? Effect.void
  const word = yield* ask(absent.id, watcher.id, observedAt)
  const state = yield* fixture.value(`SELECT state FROM tenure.executor WHERE id = '${absent.id}'`)
  return { word, state, watcher, absent, observedAt }
})

describe("an absent executor", () => {
  it.live("is marked, once, and its work goes to the next with its row of presence", () =>
    Effect.gen(function* () {
      const made = yield* scene
      const { fixture } = made
      yield* fixture.enqueue(2)
      const { absent, observedAt, state, watcher, word } = yield* absence(made, {
        before: (_, { session }) => session.sql.unsafe(claim(2))
      })
      assert.deepStrictEqual([word, state], ["marked", "revoking"])
      assert.strictEqual(yield* made.ask(absent.id, watcher.id, observedAt), "revoking")
      const scanned = `SELECT r.id = '${absent.id}' FROM tenure.recoverable_executors('app', ARRAY['v1'], 10) r`
      assert.strictEqual(yield* fixture.value(scanned), "true")
      assert.strictEqual(yield* fixture.value(revoke(absent.id)), "revoked 2")
      const rows = `SELECT count(*) FROM tenure.presence WHERE executor_id = '${absent.id}'`
      assert.strictEqual(yield* fixture.value(rows), "0")
    })
  )

  it.live(
    "is refused with a word of its own for each thing that speaks for it",
    () =>
      Effect.gen(function* () {
        const made = yield* scene
        const { clock, end, fixture, holds } = made
        const owner = (statement: string) => fixture.owner.unsafe(statement)
        const started = yield* fixture.value("SELECT pg_postmaster_start_time()::text")
        const cases: ReadonlyArray<
          readonly [word: string, changes: Parameters<typeof absence>[1]]
        > = [
          ["early", { graceSeconds: 0.5 }],
          ["renewed", { after: (_, { id }) => owner(renew(id)) }],
          ["left", { before: (_, { id, session }) => session.sql.unsafe(leave(id)) }],
          [
            "left",
            {
              after: (_, { id }) => owner(`DELETE FROM tenure.presence WHERE executor_id = '${id}'`)
            }
          ],
          ["present", { after: (_, { id }) => holds(id) }],
          ["returned", { after: (_, { id }) => Effect.flatMap(holds(id), end) }],
          ["revoking", { after: (_, { id }) => owner(Fixture.statements.mark(id)) }],
          ["released", { after: (_, { id }) => owner(`SELECT tenure.release_executor('${id}')`) }],
          [
            "busy",
            {
              after: () =>
                Effect.flatMap(fixture.session({ role: "owner" }), ({ sql }) =>
                  Effect.andThen(
                    sql.unsafe("BEGIN"),
                    sql.unsafe("SELECT pg_advisory_xact_lock(1413828182, 0)")
                  )
                )
            }
          ],
          [
            "restarted",
            {
              after: (_, { id }) =>
                owner(`UPDATE tenure.presence SET held_at = '${started}'::timestamptz - interval '1 s'
                        WHERE executor_id = '${id}'`)
            }
          ],
          ["unfit", { renews: false }],
          ["unfit", { after: ({ id }) => owner(Fixture.statements.mark(id)) }],
          [
            "unfit",
            {
              after: ({ id }) =>
                owner(`UPDATE tenure.executor SET expires_at = tenure.clock() WHERE id = '${id}'`)
            }
          ],
          ["alone", { after: ({ die }) => die }],
          ["alone", { before: ({ id, session }) => session.sql.unsafe(leave(id)) }],
          ["alone", { after: ({ id, session }) => session.sql.unsafe(hold(id)) }],
          [
            "alone",
            { after: ({ id }) => owner(`DELETE FROM tenure.presence WHERE executor_id = '${id}'`) }
          ]
        ]
        for (const [expected, changes] of cases) {
          const { state, word } = yield* Effect.scoped(absence(made, changes))
          assert.strictEqual(word, expected)
          const untouched = ["revoking", "released"].includes(expected) ? expected : "active"
          assert.strictEqual(state, untouched, expected)
        }
        assert.strictEqual(yield* made.ask(randomUUID(), randomUUID(), yield* clock), "unknown")
      }),
    300_000
  )

  it.live(
    "is spared for fifteen seconds after the server was started, and by an older snapshot",
    () =>
      Effect.gen(function* () {
        const made = yield* scene
        const { fixture } = made
        // 5 s and 2 s pass in the scene itself: 9 s after the start at the end, then 16.
        yield* fixture.owner.unsafe(`
        SELECT setval('app.clock_shift',
          (extract(epoch FROM pg_postmaster_start_time() - clock_timestamp()) * 1000 + 2000)::bigint)`)
        const { absent, observedAt, watcher, word } = yield* absence(made)
        assert.strictEqual(word, "restarted")
        yield* fixture.pass(7)
        const snapshot = yield* fixture.session({ executor: watcher.id })
        yield* snapshot.sql.unsafe("BEGIN ISOLATION LEVEL REPEATABLE READ")
        const refused = snapshot.sql.unsafe(markAbsent(absent.id, watcher.id, observedAt))
        assert.strictEqual(yield* stateOf(refused), "TN010")
        assert.strictEqual(yield* made.ask(absent.id, watcher.id, observedAt), "marked")
      })
  )

  it.live("is not found by a clock that jumps, however far", () =>
    Effect.gen(function* () {
      const made = yield* scene
      const { fixture } = made
      const forward = yield* absence(made, { after: () => fixture.pass(3600) })
      assert.strictEqual(forward.word, "unfit", "the lease of the watcher is over as well")
      const back = yield* absence(made, { after: () => fixture.pass(-3600) })
      assert.strictEqual(back.word, "early")
    })
  )
})

/** Two executors, both missed by the other since the same instant, both renewed since by themselves. */
const pair = Effect.gen(function* () {
  const made = yield* scene
  const { clock, fixture, holder } = made
  const holders = [yield* holder, yield* holder] as const
  const sessions = {
    first: yield* fixture.session({ executor: holders[0].id }),
    second: yield* fixture.session({ executor: holders[1].id })
  }
  yield* fixture.pass(5)
  return { ...made, holders, sessions, observedAt: yield* clock }
})

describe("two executors that ask at the same time", () => {
  const steps = (absent: string, watcher: string, observedAt: string) => ({
    mark: ["BEGIN", markAbsent(absent, watcher, observedAt)],
    seal: "COMMIT"
  })

  it.live("about each other mark nobody when their sessions dropped together, in any order", () =>
    Effect.gen(function* () {
      const { fixture, holders, observedAt, sessions } = yield* pair
      const [a, b] = holders
      for (const { die } of holders) yield* die
      yield* fixture.pass(2)
      const spec: Isolation.Spec = {
        observer: fixture.observer,
        reset: Effect.void,
        sessions,
        steps: { first: steps(b.id, a.id, observedAt), second: steps(a.id, b.id, observedAt) }
      }
      // Only the other's renewal would speak for it: without one the two look dead to each other.
      yield* fixture.mutate("tenure.mark_absent", "OR own.heartbeat_at <= observed_at THEN", "THEN")
      const findings = yield* Isolation.prove(spec, ({ answer }) =>
        Effect.succeed(
          Isolation.brokenRules({
            "nobody is marked":
              answer("first.mark") !== "marked" && answer("second.mark") !== "marked",
            "nobody deadlocks": !`${answer("first.mark")} ${answer("second.mark")}`.includes(
              "40P01"
            )
          })
        )
      )
      assert.strictEqual(findings.length, 6)
    })
  )

  it.live("about each other mark one at most, though nothing else speaks for either", () =>
    Effect.gen(function* () {
      const { fixture, holders, observedAt, sessions } = yield* pair
      const [a, b] = holders
      for (const { die } of holders) yield* die
      yield* fixture.pass(2)
      // Whatever a watcher has to prove of itself is left out, but the one thing that is asked of both.
      yield* fixture.mutate("tenure.mark_absent", "OR own.heartbeat_at <= observed_at THEN", "THEN")
      yield* fixture.mutate(
        "tenure.mark_absent",
        "own.held_at IS NULL OR own.held_at > observed_at - grace",
        "false"
      )
      yield* fixture.mutate(
        "tenure.mark_absent",
        "OR pg_try_advisory_xact_lock_shared(1413828182, own.key) THEN",
        "THEN"
      )
      const spec: Isolation.Spec = {
        observer: fixture.observer,
        reset: fixture.owner`UPDATE tenure.executor SET state = 'active'`,
        sessions,
        steps: { first: steps(b.id, a.id, observedAt), second: steps(a.id, b.id, observedAt) }
      }
      const judge: Isolation.Judge = ({ answer }) =>
        Effect.sync(() => {
          const answers = [answer("first.mark"), answer("second.mark")]
          return Isolation.brokenRules({
            "one is marked": answers.filter((word) => word === "marked").length === 1,
            "nobody waits for the other": answers.every((word) =>
              ["marked", "busy", "unfit"].includes(word)
            )
          })
        })
      yield* Isolation.prove(spec, judge)
      // And the wrong form: two marks at a time.
      yield* fixture.mutate(
        "tenure.mark_absent",
        "IF NOT pg_try_advisory_xact_lock(1413828182, 0) THEN RETURN 'busy'; END IF;",
        ""
      )
      const findings = yield* Isolation.explore(spec, judge)
      assert.isTrue(findings.some(({ broken }) => broken.includes("one is marked")))
    })
  )

  it.live(
    "one to mark and one to renew: the renewal is seen, or finds the mark, in any order",
    () =>
      Effect.gen(function* () {
        const made = yield* scene
        const { fixture } = made
        const { absent, observedAt, watcher, word } = yield* absence(made, { graceSeconds: 0.5 })
        assert.strictEqual(word, "early")
        const sessions = {
          first: yield* fixture.session({ executor: watcher.id }),
          second: yield* fixture.session({ executor: absent.id })
        }
        yield* fixture.pass(2)
        const heartbeat = yield* fixture.value(
          `SELECT heartbeat_at::text FROM tenure.executor WHERE id = '${absent.id}'`
        )
        const spec: Isolation.Spec = {
          observer: fixture.observer,
          reset: fixture.owner.unsafe(`
          UPDATE tenure.executor SET state = 'active', heartbeat_at = '${heartbeat}' WHERE id = '${absent.id}'`),
          sessions,
          steps: {
            first: steps(absent.id, watcher.id, observedAt),
            second: { renew: ["BEGIN", renew(absent.id)], seal: "COMMIT" }
          }
        }
        const judge: Isolation.Judge = ({ answer }) => {
          const answers = `${answer("first.mark")} ${answer("second.renew")}`
          return Effect.succeed(
            Isolation.brokenRules({
              "one of them has its way": ["marked revoking", "renewed renewed"].includes(answers)
            })
          )
        }
        yield* Isolation.prove(spec, judge)
        yield* fixture.mutate(
          "tenure.mark_absent",
          "WHERE e.id = absent FOR NO KEY UPDATE;",
          "WHERE e.id = absent;"
        )
        const findings = yield* Isolation.explore(spec, judge)
        assert.isTrue(findings.some(({ broken }) => broken.length > 0))
      })
  )
})

interface Look {
  readonly present: ReadonlyArray<string>
  readonly missing: ReadonlyArray<string>
  readonly newcomers: ReadonlyArray<string>
  readonly is_round: boolean
  readonly held: boolean
}

const look = (
  { sql }: Isolation.Session,
  watcher: string,
  options: {
    readonly everyone?: boolean
    readonly followed?: ReadonlyArray<string>
    readonly versions?: string
  } = {}
) =>
  Effect.map(
    sql.unsafe<Look>(`
      SELECT w.present::text[], w.missing::text[], w.newcomers::text[], w.is_round, w.held_at IS NOT NULL AS held
        FROM tenure.watch_presence('${watcher}', '{${options.versions ?? "v1"}}', ${options.everyone ?? false},
               '{${(options.followed ?? []).join(",")}}') w`),
    first
  )

describe("a look along the ring", () => {
  it.live(
    "ends at the first who is there and looks further, and reports the missing before it",
    () =>
      Effect.gen(function* () {
        const { fixture, holder } = yield* scene
        const [a, b, c, d] = yield* Effect.all([holder, holder, holder, holder])
        const asker = yield* fixture.session({ executor: a.id })
        yield* fixture.pass(11)
        assert.deepInclude(yield* look(asker, a.id), {
          present: [b.id],
          missing: [],
          is_round: false
        })
        // Around the end of the ring.
        assert.deepInclude(yield* look(asker, d.id), { present: [a.id], missing: [] })
        yield* b.die
        yield* c.die
        assert.deepInclude(yield* look(asker, a.id), { present: [d.id], missing: [b.id, c.id] })
        yield* d.die
        const alone = yield* look(asker, a.id)
        assert.deepInclude(alone, { present: [], missing: [b.id, c.id, d.id], is_round: true })
        yield* a.die
        assert.deepInclude(yield* look(asker, a.id), { present: [], missing: [], held: false })
      })
  )

  it.live("passes those who may not look further: newcomers, and other versions", () =>
    Effect.gen(function* () {
      const { fixture, holder, holds } = yield* scene
      const a = yield* holder
      const other = randomUUID()
      yield* fixture.owner`SELECT tenure.register_executor(${other}, 'app', 'v0', '30 s', 'host', 1)`
      yield* holds(other)
      const b = yield* holder
      yield* fixture.pass(11)
      const newcomer = yield* holder
      const asker = yield* fixture.session({ executor: a.id })
      const versions = "v1,v0"
      assert.deepInclude(yield* look(asker, a.id, { versions }), { present: [other, b.id] })
      assert.deepInclude(yield* look(asker, a.id), { present: [b.id] }, "not of its ring")
      assert.deepInclude(yield* look(asker, b.id), { present: [newcomer.id, a.id] })
      const round = yield* look(asker, a.id, { versions, everyone: true })
      assert.deepInclude(round, { present: [other, b.id, newcomer.id], is_round: true })
      yield* newcomer.die
      assert.deepInclude(yield* look(asker, a.id, { everyone: true }), {
        missing: [newcomer.id],
        newcomers: [newcomer.id]
      })
      // Behind somebody who is there, it is asked for by name.
      assert.deepInclude(yield* look(asker, a.id), { present: [b.id], missing: [] })
      assert.deepInclude(yield* look(asker, a.id, { followed: [newcomer.id] }), {
        present: [b.id],
        missing: [newcomer.id]
      })
    })
  )

  it.live("leaves out whoever has left, is revoked or expired, or is of another application", () =>
    Effect.gen(function* () {
      const { fixture, holder, holds } = yield* scene
      const a = yield* holder
      const [left, marked, expired, there] = yield* Effect.all([holder, holder, holder, holder])
      const foreign = randomUUID()
      yield* fixture.owner`SELECT tenure.register_executor(${foreign}, 'other', 'v1', '30 s', 'host', 1)`
      yield* holds(foreign)
      yield* left.session.sql.unsafe(leave(left.id))
      yield* fixture.owner.unsafe(Fixture.statements.mark(marked.id))
      yield* fixture.owner.unsafe(
        `UPDATE tenure.executor SET expires_at = tenure.clock() WHERE id = '${expired.id}'`
      )
      const asker = yield* fixture.session({ executor: a.id })
      const followed = [left.id, marked.id, expired.id]
      assert.deepInclude(yield* look(asker, a.id, { everyone: true, followed }), {
        present: [there.id],
        missing: [],
        is_round: true
      })
    })
  )

  it.live("is bounded: a hundred of the missing at a time, and that is no round", () =>
    Effect.gen(function* () {
      const { fixture, holder } = yield* scene
      const a = yield* holder
      yield* fixture.owner.unsafe(`
        INSERT INTO tenure.executor (id, application_name, application_version, registered_at, heartbeat_at, expires_at)
        SELECT gen_random_uuid(), 'app', 'v1', c.at, c.at, c.at + interval '30 s'
          FROM generate_series(1, 120), LATERAL (SELECT tenure.clock() AS at) c`)
      yield* fixture.owner.unsafe(`
        INSERT INTO tenure.presence (executor_id, held_at)
        SELECT e.id, tenure.clock() FROM tenure.executor e WHERE e.id <> '${a.id}'`)
      const asker = yield* fixture.session({ executor: a.id })
      const { is_round, missing } = yield* look(asker, a.id, { everyone: true })
      assert.deepStrictEqual([missing.length, is_round], [100, false])
    })
  )

  it.live("keeps the owner out for the length of the statement only", () =>
    Effect.gen(function* () {
      const { fixture, holder, holds } = yield* scene
      const [a, b] = yield* Effect.all([holder, holder])
      yield* b.die
      const asker = yield* fixture.session({ executor: a.id })
      yield* asker.sql.unsafe("BEGIN")
      assert.deepInclude(yield* look(asker, a.id), { missing: [b.id] })
      // Watchers do not keep each other out.
      const other = yield* fixture.session({ executor: a.id })
      assert.deepInclude(yield* look(other, a.id), { missing: [b.id] })
      const back = yield* fixture.session({ executor: b.id })
      assert.deepStrictEqual(yield* back.sql.unsafe(hold(b.id)), [{ held: false }])
      yield* asker.sql.unsafe("COMMIT")
      assert.deepStrictEqual(yield* back.sql.unsafe(hold(b.id)), [{ held: true }])
      assert.deepInclude(yield* look(asker, a.id), { present: [b.id], missing: [] })
      // Owners exclude each other.
      const twice = yield* Effect.exit(holds(b.id))
      assert.isTrue(Exit.isSuccess(twice))
      assert.strictEqual(
        yield* fixture.value(`
          SELECT count(DISTINCT l.pid) FROM pg_locks l JOIN tenure.presence p ON p.key::oid = l.objid
            AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
           WHERE l.locktype = 'advisory' AND l.classid = 1413828182 AND p.executor_id = '${b.id}'`),
        "1"
      )
    })
  )
})

describe("the row of presence", () => {
  it.live("is written by an executor that may write, and by nobody later", () =>
    Effect.gen(function* () {
      const { fixture, holder } = yield* scene
      const a = yield* holder
      const held = `SELECT held_at IS NOT NULL FROM tenure.presence WHERE executor_id = '${a.id}'`
      yield* fixture.owner.unsafe(Fixture.statements.mark(a.id))
      assert.strictEqual(yield* stateOf(a.session.sql.unsafe(hold(a.id))), "TN002")
      assert.strictEqual(yield* stateOf(a.session.sql.unsafe(leave(a.id))), "TN002")
      assert.strictEqual(yield* fixture.value(held), "true")
      yield* fixture.owner.unsafe(revoke(a.id))
      assert.strictEqual(yield* stateOf(a.session.sql.unsafe(hold(a.id))), "TN002")
      assert.strictEqual(yield* fixture.value(held), "")
      const direct = "INSERT INTO tenure.presence (executor_id) VALUES (gen_random_uuid())"
      assert.strictEqual(yield* stateOf((yield* holder).session.sql.unsafe(direct)), "42501")
    })
  )

  it.live("goes with an orderly release", () =>
    Effect.gen(function* () {
      const { fixture, holder } = yield* scene
      const a = yield* holder
      yield* a.session.sql.unsafe(`SELECT tenure.release_executor('${a.id}')`)
      assert.strictEqual(yield* fixture.value("SELECT count(*) FROM tenure.presence"), "0")
    })
  )

  it.live("is not emptied by what was sent for the session before", () =>
    Effect.gen(function* () {
      const { end, fixture, holder, holds } = yield* scene
      const a = yield* holder
      const heldAt = `SELECT held_at::text FROM tenure.presence WHERE executor_id = '${a.id}'`
      const before = yield* fixture.value(heldAt)
      yield* end(a.session)
      const { sql } = yield* holds(a.id)
      yield* sql`SELECT tenure.leave_presence(${a.id}, ${before}::timestamptz)`
      const after = yield* fixture.value(heldAt)
      assert.isTrue(after !== "null" && after !== before)
      yield* sql`SELECT tenure.leave_presence(${a.id}, ${after}::timestamptz)`
      assert.strictEqual(yield* fixture.value(heldAt), "null")
    })
  )
})

describe("work that comes back", () => {
  for (const [way, statement] of [
    ["from an orderly release", (id: string) => `SELECT tenure.release_executor('${id}')`],
    ["from a revocation", revoke]
  ] as const) {
    it.live(`${way} is announced to whoever runs its queue, by the commit itself`, () =>
      Effect.gen(function* () {
        const { fixture, holder } = yield* scene
        yield* fixture.enqueue(1)
        const a = yield* holder
        yield* a.session.sql.unsafe(claim(1))
        if (statement === revoke) yield* fixture.owner.unsafe(Fixture.statements.mark(a.id))
        const queue = yield* fixture.observer.listen("tenure_work")
        yield* fixture.owner.unsafe(statement(a.id))
        const { payload } = yield* Effect.timeout(Queue.take(queue), "5 seconds")
        assert.strictEqual(payload, yield* fixture.value("SELECT queue_id FROM app.lanes"))
      })
    )
  }
})
