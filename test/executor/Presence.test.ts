/**
 * Goal: the ring of presence finds whoever dies, whatever dies with it, and nobody else: not who
 * blinks, not who was cut off together with its watcher, not who is slower to come back when a
 * server has started again; and it costs the database nothing but its looks (presence; K-163, P-9,
 * P-33; rows 30 and 31 in part; bug: kernel deadlock of the ring).
 * Method: members with the real listening session, watch and renewal, many in one process. Whom they
 * have marked is read from the registry; what must not happen is given several looks to happen in.
 */
import { assert, describe, it } from "@effect/vitest"
import { Clock, Effect, Exit, Layer, References, Scope } from "effect"
import { Tenure } from "tenure"
import { randomUUID } from "node:crypto"
import * as Actor from "../../src/actor/Actor.ts"
import { Database } from "../../src/database/Database.ts"
import * as Listener from "../../src/database/Listener.ts"
import * as Pool from "../../src/database/Pool.ts"
import { ExecutorId } from "../../src/executor/Executor.ts"
import { registerExecutor, renewLease } from "../../src/executor/ExecutorStore.ts"
import * as Presence from "../../src/executor/Presence.ts"
import * as Fixture from "../isolation/Fixture.ts"
import { eventually, first } from "../kernel/kernel.ts"
import { layerRuntime } from "../queue/runtime.ts"
import { connect, freshDatabase } from "../support/Postgres.ts"

const graceMillis = 300
const sessionNames = "application_name LIKE 'tenure listener%'"

interface Member {
  readonly id: string
  readonly presence: Presence.Presence
  /** The process ends: its sockets close, and nothing is said. */
  readonly die: Effect.Effect<void>
  readonly report: () => Actor.Report
  readonly renewals: () => number
}

const member = Effect.fnUntraced(function* (fixture: Fixture.Fixture) {
  const scope = yield* Effect.acquireRelease(Scope.make(), (made) => Scope.close(made, Exit.void))
  return yield* Effect.gen(function* () {
    const id = ExecutorId.make(randomUUID())
    const sessions = {
      database: fixture.database.worker,
      executorId: id,
      statementTimeout: "5 seconds",
      lockTimeout: "5 seconds",
      idleInTransactionTimeout: "5 seconds"
    } as const
    const work = yield* Pool.make({
      ...sessions,
      applicationName: `tenure work ${id}`,
      connectionsMax: 1
    })
    yield* registerExecutor(work, {
      executorId: id,
      application: "app",
      version: "v1",
      validityMillis: 75_000,
      host: "host",
      pid: 1
    })
    let renewals = 0
    const renewal = yield* Actor.make({
      name: "renewal",
      step: Effect.map(renewLease(work, id, 75_000), () => ({ renewals: ++renewals })),
      cadence: Infinity
    })
    const presence = yield* Presence.make({
      executor: {
        id,
        version: "v1",
        accepts: [],
        settings: { presenceGrace: graceMillis, abandonAfter: 5000, watchdog: 45_000 },
        pools: { work }
      },
      renewUnsafe: renewal.wakeUnsafe,
      markedUnsafe: () => {}
    })
    if (presence === undefined) throw new Error("presence is off")
    yield* Effect.forkScoped(
      Listener.run({
        connection: Pool.connectionConfig({
          ...sessions,
          applicationName: `tenure listener ${id}`
        }),
        channels: ["quiet"],
        beside: presence.hold,
        onNotification: () => Effect.void,
        onUp: Effect.void,
        onHeard: () => Effect.void,
        onDown: Effect.sync(presence.lostUnsafe),
        quietMillis: 60_000,
        answerWithin: 5000
      })
    )
    yield* Effect.orDie(Effect.andThen(renewal.start, presence.actor.start))
    const made: Member = {
      id,
      presence,
      // The watch first: the end of the session must find nobody who could tell of it.
      die: Effect.andThen(presence.actor.stop({ within: 0 }), Scope.close(scope, Exit.void)),
      report: () => presence.actor.progress().lastReport ?? {},
      renewals: () => renewals
    }
    return made
  }).pipe(Scope.provide(scope), Effect.provideService(References.MinimumLogLevel, "Error"))
})

/** Members that have all seen each other, on a server that counts as started long ago. */
const ring = Effect.fnUntraced(function* (size: number) {
  const fixture = yield* Fixture.make
  yield* fixture.pass(60)
  const members = yield* Effect.forEach(
    Array.from({ length: size }, () => fixture),
    member,
    { concurrency: 4 }
  )
  yield* haveMet(members)
  return { fixture, members }
})

const haveMet = (members: ReadonlyArray<Member>) =>
  eventually(
    "all have seen each other",
    Effect.sync(() => members.every((one) => one.report()["members"] === members.length - 1))
  )

const ofAll = (members: ReadonlyArray<Member>, name: string) =>
  members.reduce((sum, one) => sum + (one.report()[name] ?? 0), 0)

/** Time for whatever is wrong to go wrong: several looks of everybody, and more than the grace. */
const looksPass = Effect.fnUntraced(function* (members: ReadonlyArray<Member>) {
  const steps = () => members.map((one) => one.presence.actor.progress().steps)
  const before = steps()
  const startedNanos = yield* Clock.monotonicTimeNanos
  yield* eventually(
    "everybody has looked several times",
    Effect.map(
      Clock.monotonicTimeNanos,
      (nanos) =>
        Number(nanos - startedNanos) / 1e6 > 2 * graceMillis &&
        steps().every((count, index) => count >= (before[index] ?? 0) + 3)
    )
  )
})

const states = (fixture: Fixture.Fixture) =>
  Effect.map(
    fixture.owner<{ state: string; count: number }>`
      SELECT state, count(*)::int AS count FROM tenure.executor GROUP BY state ORDER BY state`,
    (rows) => Object.fromEntries(rows.map(({ count, state }) => [state, count]))
  )

const marked = (fixture: Fixture.Fixture, count: number) =>
  eventually(
    `${count} are marked`,
    Effect.map(states(fixture), ({ revoking }) => revoking === count)
  )

const deadlocks = (fixture: Fixture.Fixture) =>
  fixture.value("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")

/** Ends listening sessions as an administrator does: each process learns of its own at once. */
const dropSessions = (fixture: Fixture.Fixture, members: ReadonlyArray<Member>) =>
  fixture.observer.unsafe(`
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
     WHERE ${sessionNames} AND datname = current_database()
       AND (${members.map(({ id }) => `application_name LIKE '%${id}'`).join(" OR ")})`)

const held = (fixture: Fixture.Fixture, members: ReadonlyArray<Member>) =>
  Effect.map(
    fixture.owner<{ id: string; held: string }>`
      SELECT executor_id AS id, held_at::text AS held FROM tenure.presence WHERE held_at IS NOT NULL`,
    (rows) => members.map(({ id }) => rows.find((row) => row.id === id)?.held)
  )

/** Until each of them holds its lock in a later session than in `before`. */
const areBack = (
  fixture: Fixture.Fixture,
  members: ReadonlyArray<Member>,
  before: ReadonlyArray<string | undefined>
) =>
  eventually(
    "all are back",
    Effect.map(held(fixture, members), (now) =>
      now.every((at, index) => at !== undefined && at !== before[index])
    )
  )

describe("a ring of presence", () => {
  for (const size of [1, 2, 3, 20]) {
    it.live(
      `of ${size} stays as it is while nobody dies, and then finds all who die at once`,
      () =>
        Effect.gen(function* () {
          const { fixture, members } = yield* ring(size)
          yield* looksPass(members)
          assert.deepStrictEqual(yield* states(fixture), { active: size })
          assert.deepStrictEqual([ofAll(members, "missing"), ofAll(members, "refused")], [0, 0])
          const [survivor, ...dying] = members
          yield* Effect.forEach(dying, ({ die }) => die, { concurrency: "unbounded" })
          if (dying.length > 0) yield* marked(fixture, dying.length)
          // It is whole again: somebody who comes and dies is found as well.
          const next = yield* member(fixture)
          yield* haveMet([survivor, next].filter((one) => one !== undefined))
          yield* next.die
          yield* marked(fixture, size)
          assert.deepStrictEqual(yield* states(fixture), { active: 1, revoking: size })
          assert.strictEqual(yield* deadlocks(fixture), "0")
        }),
      300_000
    )
  }

  it.live("finds a member whose place is taken by its own replacement at once", () =>
    Effect.gen(function* () {
      const { fixture, members } = yield* ring(3)
      // The last one looks at the first, and whoever comes stands between them.
      yield* members[0]?.die ?? Effect.void
      yield* member(fixture)
      yield* marked(fixture, 1)
      assert.deepStrictEqual(yield* states(fixture), { active: 3, revoking: 1 })
    })
  )

  it.live("lets VACUUM remove dead rows and an index be built concurrently beside it", () =>
    Effect.gen(function* () {
      const { fixture, members } = yield* ring(3)
      const size = "SELECT pg_relation_size('app.note')"
      const refill = "INSERT INTO app.note (text) SELECT 'row' FROM generate_series(1, 10000)"
      yield* fixture.owner.unsafe("ALTER TABLE app.note SET (autovacuum_enabled = off)")
      yield* fixture.owner.unsafe(refill)
      // A poll may be under way at any moment; none of them may hold a snapshot for long.
      for (let round = 0; round < 3; round++) {
        yield* fixture.owner.unsafe("DELETE FROM app.note")
        yield* fixture.owner.unsafe("VACUUM app.note")
        assert.strictEqual(yield* fixture.value(size), "0")
        yield* fixture.owner.unsafe(refill)
        yield* fixture.owner.unsafe(`CREATE INDEX CONCURRENTLY note_${round} ON app.note (text)`)
        yield* looksPass(members)
      }
      // The other way to watch: a session that waits for its neighbour keeps every dead row.
      const waiter = yield* fixture.session({ role: "owner" })
      const key = yield* fixture.value("SELECT min(key) FROM tenure.presence")
      yield* Effect.forkScoped(
        Effect.ignore(waiter.sql.unsafe(`SELECT pg_advisory_xact_lock_shared(1413828182, ${key})`))
      )
      yield* eventually(
        "it waits",
        Effect.map(
          fixture.observer<{ waits: boolean }>`
            SELECT cardinality(pg_blocking_pids(${waiter.pid}::int)) > 0 AS waits`,
          (rows) => first(rows).waits
        )
      )
      yield* fixture.owner.unsafe("DELETE FROM app.note")
      yield* fixture.owner.unsafe("VACUUM app.note")
      assert.notStrictEqual(yield* fixture.value(size), "0")
      yield* fixture.observer`SELECT pg_terminate_backend(${waiter.pid}::int)`
    })
  )

  it.live("marks nobody when sessions drop, one or all together: each says so, and renews", () =>
    Effect.gen(function* () {
      const { fixture, members } = yield* ring(2)
      for (const dropped of [members, members.slice(0, 1), members.slice(1), members]) {
        const before = yield* held(fixture, dropped)
        const renewals = dropped.map((one) => one.renewals())
        yield* dropSessions(fixture, dropped)
        yield* areBack(fixture, dropped, before)
        yield* eventually(
          "each has renewed",
          Effect.sync(() => dropped.every((one, index) => one.renewals() > (renewals[index] ?? 0)))
        )
        yield* haveMet(members)
      }
      yield* looksPass(members)
      assert.deepStrictEqual(yield* states(fixture), { active: 2 })
    })
  )

  it.live("does not take for dead who says that it cannot get its session back", () =>
    Effect.gen(function* () {
      const { fixture, members } = yield* ring(2)
      const [other, cutOff] = members
      if (other === undefined || cutOff === undefined) return
      const limit = (connections: number) =>
        fixture.observer.unsafe(
          `ALTER DATABASE ${fixture.database.name} CONNECTION LIMIT ${connections}`
        )
      const before = yield* held(fixture, [cutOff])
      yield* limit(1)
      yield* dropSessions(fixture, [cutOff])
      yield* eventually(
        "it says so",
        Effect.map(held(fixture, [cutOff]), ([at]) => at === undefined)
      )
      yield* looksPass([other])
      assert.deepStrictEqual(yield* states(fixture), { active: 2 })
      yield* limit(-1)
      yield* areBack(fixture, [cutOff], before)
      yield* haveMet(members)
    })
  )

  it.live("leaves to the lease who does not come back when every session was lost", () =>
    Effect.gen(function* () {
      const { fixture, members } = yield* ring(3)
      const [lost, ...others] = members
      if (lost === undefined) return
      const before = yield* held(fixture, others)
      // As when the server starts again: all locks are free, and one of the processes is gone too.
      yield* Effect.all([dropSessions(fixture, others), lost.die], { concurrency: "unbounded" })
      yield* areBack(fixture, others, before)
      yield* looksPass(others)
      assert.deepStrictEqual(yield* states(fixture), { active: 3 })
      assert.isDefined((yield* held(fixture, [lost]))[0], "it has not said that it left")
      assert.deepStrictEqual(
        others.map((one) => one.report()["missing"]),
        [0, 0]
      )
    })
  )

  it.live("judges nobody by a clock that jumps", () =>
    Effect.gen(function* () {
      const { fixture, members } = yield* ring(2)
      for (const seconds of [50, -40, -3600]) {
        yield* fixture.pass(seconds)
        const before = yield* held(fixture, members)
        yield* dropSessions(fixture, members)
        yield* areBack(fixture, members, before)
        yield* looksPass(members)
        assert.deepStrictEqual(yield* states(fixture), { active: 2 }, `${seconds} s`)
      }
    })
  )

  it.live("is taken up again by a member that finds itself taken out of it", () =>
    Effect.gen(function* () {
      const { fixture, members } = yield* ring(2)
      const before = yield* held(fixture, members)
      // What was sent for an earlier session, and comes late.
      yield* fixture.owner.unsafe("UPDATE tenure.presence SET held_at = NULL")
      yield* areBack(fixture, members, before)
      yield* haveMet(members)
    })
  )

  it.live("is left in order: nobody looks at who has said so, and takes its end for a death", () =>
    Effect.gen(function* () {
      const { fixture, members } = yield* ring(2)
      const [leaving, other] = members
      if (leaving === undefined || other === undefined) return
      yield* leaving.presence.leave
      yield* leaving.die
      yield* looksPass([other])
      assert.deepStrictEqual(yield* states(fixture), { active: 2 })
      assert.strictEqual(other.report()["members"], 0)
    })
  )
})

describe("an executor", () => {
  const rows = Effect.gen(function* () {
    const { pools } = yield* Tenure.Executor
    return first(
      yield* pools.work<{ count: number; held: number }>`
        SELECT count(*)::int AS count, count(held_at)::int AS held FROM tenure.presence`
    )
  })

  it.live("takes part from its start", () =>
    eventually(
      "it holds its lock",
      Effect.map(rows, ({ count, held }) => count === 1 && held === 1)
    ).pipe(Effect.provide(layerRuntime()), Effect.scoped)
  )

  it.live("says that it leaves, also when work that does not stop keeps its lease", () =>
    Effect.gen(function* () {
      const database = yield* freshDatabase
      const owner = yield* connect(database.owner)
      const standing = owner<{ state: string; held: boolean }>`
        SELECT e.state, p.held_at IS NOT NULL AS held
          FROM tenure.executor e JOIN tenure.presence p ON p.executor_id = e.id`
      const runtime = Tenure.layer({ application: "app", version: "v1" }).pipe(
        Layer.provide(Layer.succeed(Database, database.worker)),
        Layer.provide(Layer.succeed(References.MinimumLogLevel, "Error" as const))
      )
      yield* Effect.gen(function* () {
        const { lease } = yield* Tenure.Executor
        yield* eventually(
          "it holds its lock",
          Effect.map(standing, ([row]) => row?.held === true)
        )
        lease.keepUnsafe()
      }).pipe(Effect.provide(runtime), Effect.scoped)
      // Not a death: its peers must wait for its lease, as they do without presence.
      assert.deepStrictEqual(yield* standing, [{ state: "active", held: false }])
    })
  )

  it.live("takes no part when its grace is infinite", () =>
    Effect.gen(function* () {
      const client = yield* Tenure.Client
      yield* client.ready
      const { pools } = yield* Tenure.Executor
      // The listening session is up by then, and would have been asked to hold the lock.
      yield* pools.work`SELECT pg_notify('tenure_work', '1')`
      assert.deepStrictEqual(yield* rows, { count: 0, held: 0 })
    }).pipe(
      Effect.provide(layerRuntime({ settings: { presenceGrace: "Infinity" } })),
      Effect.scoped
    )
  )
})
