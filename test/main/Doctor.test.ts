/**
 * Goal: whatever is wrong is found, called by its reason, and mended by the very command that is printed.
 * Method: each trouble is made in a database of its own, and is then the only one found; what was
 * printed is run; then none is left. What concerns a whole server is in DoctorServer.test.ts.
 * Covers P-3 (the alarm), P-12, P-22 (partitions), P-33 (old snapshots), K-214, K-218.
 */
import { assert, describe, it } from "@effect/vitest"
import { Clock, Duration, Effect, type Scope } from "effect"
import { randomBytes, randomUUID } from "node:crypto"
import * as Migrations from "../../src/database/Migrations.ts"
import { Database } from "../../src/database/Database.ts"
import { judge } from "../../src/main/commands/Diagnosis.ts"
import { examine, limitsOf } from "../../src/main/commands/Doctor.ts"
import type { Finding } from "../../src/main/commands/Finding.ts"
import {
  administer,
  connect,
  emptyDatabase,
  endpointOf,
  freshDatabase
} from "../support/Postgres.ts"
import { diagnose, healthy, make, only, type Scene, troubles } from "./DoctorScene.ts"

interface Case {
  readonly is: Finding["level"]
  readonly code: string
  readonly words: RegExp
  readonly made: (scene: Scene) => Effect.Effect<unknown, unknown, Scope.Scope>
  /** Where no statement mends it. */
  readonly mended?: (scene: Scene) => Effect.Effect<unknown, unknown, Scope.Scope>
  readonly as?: "owner" | "superuser"
}

/** Found by a worker's login, alone; run as printed, and gone. */
const proves = ({ as = "superuser", code, is, made, mended, words }: Case) =>
  Effect.gen(function* () {
    const scene = yield* make
    yield* healthy(scene.database.worker)
    yield* made(scene)
    const found = yield* only(scene.database.worker, is, code)
    assert.match(found.text, words)
    if (mended === undefined) {
      const sql = as === "owner" ? scene.owner : scene.sql
      for (const statement of found.sql ?? assert.fail("nothing to run"))
        yield* sql.unsafe(statement)
    } else {
      assert.isUndefined(found.sql)
      assert.isDefined(found.action)
      yield* mended(scene)
    }
    yield* healthy(scene.database.worker)
    return scene
  })

const count = (scene: Scene, from: string) =>
  Effect.map(
    scene.sql.unsafe<{ readonly n: number }>(`SELECT count(*)::int AS n FROM ${from}`),
    ([row]) => row?.n
  )

describe.concurrent("rights and fences", () => {
  it.live("a partition that was made after the fence", () =>
    proves({
      is: "problem",
      code: "fence.missing",
      words: /^public\."year's" has no fence/,
      as: "owner",
      made: ({ owner }) =>
        Effect.forEach(
          [
            "CREATE TABLE event (at date NOT NULL) PARTITION BY RANGE (at)",
            "SELECT tenure.fence_table('event')",
            `CREATE TABLE "year's" PARTITION OF event FOR VALUES FROM ('2026-01-01') TO ('2027-01-01')`,
            `GRANT INSERT ON event, "year's" TO tenure_worker`
          ],
          (statement) => owner.unsafe(statement)
        )
    })
  )

  it.live("a table that no worker may write needs no fence, whoever asks", () =>
    Effect.gen(function* () {
      const { database, owner } = yield* make
      yield* owner`CREATE TABLE ledger (id int)`
      const asOwner = yield* diagnose(database.owner)
      assert.notInclude(
        asOwner.findings.map(({ code }) => code),
        "fence.missing"
      )
      yield* owner`GRANT UPDATE (id) ON ledger TO tenure_worker`
      for (const role of ["owner", "superuser", "worker"] as const) {
        const { findings } = yield* diagnose(database[role])
        assert.include(
          findings.map(({ text }) => text).join("\n"),
          "public.ledger has no fence",
          role
        )
      }
    })
  )

  const grants: ReadonlyArray<readonly [what: string, grant: string, words: RegExp]> = [
    [
      "a table",
      "UPDATE ON tenure.executor TO tenure_worker",
      /^tenure_worker may UPDATE on TABLE tenure.executor/
    ],
    [
      "a column",
      "INSERT (name) ON tenure.exempt_table TO tenure_api",
      /^tenure_api may INSERT on TABLE tenure.exempt_table/
    ],
    ["the schema", "CREATE ON SCHEMA tenure TO PUBLIC", /^PUBLIC may CREATE on SCHEMA tenure/],
    [
      "a function of workers, to a client",
      "EXECUTE ON FUNCTION tenure.mark_revoking TO tenure_api",
      /^tenure_api may EXECUTE on FUNCTION tenure.mark_revoking\(uuid,boolean\)/
    ],
    [
      "a function, to everybody",
      "EXECUTE ON FUNCTION tenure.create_buckets TO PUBLIC",
      /^PUBLIC may EXECUTE on FUNCTION/
    ]
  ]
  for (const [what, grant, words] of grants) {
    it.live(`a right that goes round the functions: ${what}`, () =>
      proves({
        is: "problem",
        code: "grant.wrong",
        words,
        as: "owner",
        made: ({ owner }) => owner.unsafe(`GRANT ${grant}`)
      })
    )
  }

  it.live("a worker role that was made after the functions", () =>
    proves({
      is: "problem",
      code: "grant.missing",
      words: /may not call .*tenure\.claim/,
      as: "owner",
      made: ({ owner }) =>
        owner.unsafe("REVOKE EXECUTE ON FUNCTION tenure.claim, tenure.settle FROM tenure_worker")
    })
  )

  it.live("a login without the rights of a worker, one that owns everything, and a superuser", () =>
    Effect.gen(function* () {
      const { database, sql } = yield* make
      const login = yield* temporaryLogin("tenure_api")
      const found = yield* only(endpointOf(login, database.name), "problem", "role.noRights")
      for (const statement of found.sql ?? []) yield* sql.unsafe(statement)
      yield* healthy(endpointOf(login, database.name))
      yield* only(database.owner, "warning", "role.ownsSchema")
      yield* only(database.superuser, "warning", "role.superuser")
    })
  )

  it.live("a schema that is missing", () =>
    Effect.gen(function* () {
      const database = yield* emptyDatabase
      const found = yield* only(database.owner, "problem", "schema.other")
      assert.match(found.action ?? "", /tenure migrate/)
      yield* Migrations.run().pipe(Effect.provideService(Database, database.owner))
      yield* only(database.owner, "warning", "role.ownsSchema")
    })
  )
})

/** Removed with the scope: roles belong to the server. */
const temporaryLogin = (group: string) =>
  Effect.acquireRelease(
    Effect.sync(() => `tenure_test_${randomBytes(4).toString("hex")}`).pipe(
      Effect.tap((name) =>
        administer((sql) =>
          sql.unsafe(`CREATE ROLE ${name} LOGIN PASSWORD '${password}' IN ROLE ${group}`)
        )
      )
    ),
    (name) => administer((sql) => sql.unsafe(`DROP ROLE ${name}`))
  )

const password = new URL(process.env["TENURE_TEST_URL"] ?? "postgresql://x:tenure@x").password

describe.concurrent("settings", () => {
  const settings: ReadonlyArray<
    readonly [name: string, value: string, level: Finding["level"], code: string]
  > = [
    ["default_transaction_read_only", "on", "problem", "default.readOnly"],
    ["default_transaction_isolation", "'serializable'", "warning", "default.isolation"],
    ["idle_session_timeout", "'20s'", "warning", "default.idleSession"],
    ["synchronous_commit", "off", "problem", "server.synchronousCommit"]
  ]
  for (const [name, value, level, code] of settings) {
    it.live(`${name} of a database, of a role, and of a role in a database`, () =>
      Effect.gen(function* () {
        const { database, sql } = yield* make
        const login = yield* temporaryLogin("tenure_worker")
        const places = [
          `DATABASE ${database.name}`,
          `ROLE ${login}`,
          `ROLE ${login} IN DATABASE ${database.name}`
        ]
        for (const place of places) {
          yield* sql.unsafe(`ALTER ${place} SET ${name} = ${value}`)
          const found = yield* only(endpointOf(login, database.name), level, code)
          assert.lengthOf(found.sql ?? [], 1)
          for (const statement of found.sql ?? []) yield* sql.unsafe(statement)
          yield* healthy(endpointOf(login, database.name))
        }
      })
    )
  }

  it.live("connection limits that executors will meet", () =>
    Effect.gen(function* () {
      const { database, executor, sql } = yield* make
      const login = yield* temporaryLogin("tenure_worker")
      const endpoint = endpointOf(login, database.name)
      for (const place of [`DATABASE ${database.name}`, `ROLE ${login}`]) {
        yield* sql.unsafe(`ALTER ${place} CONNECTION LIMIT 10`)
        const code = place.startsWith("ROLE") ? "connections.role" : "connections.database"
        const found = yield* only(endpoint, "problem", code)
        for (const statement of found.sql ?? []) yield* sql.unsafe(statement)
        yield* healthy(endpoint)
      }
      // Enough for one and the one that replaces it.
      yield* Effect.replicateEffect(executor(), 3)
      yield* sql.unsafe(`ALTER DATABASE ${database.name} CONNECTION LIMIT -1`)
      const found = yield* only(endpoint, "warning", "connections.role")
      assert.match(found.text, /leaves 40 connections, and 3 executors of up to 20 may want 60/)
    })
  )

  it.live("autovacuum that leaves a table out", () =>
    proves({
      is: "problem",
      code: "vacuum.off",
      words: /^autovacuum is off for tenure.ready/,
      as: "owner",
      made: ({ owner }) => owner.unsafe("ALTER TABLE tenure.ready SET (autovacuum_enabled = off)")
    })
  )

  it.live("a server that cannot bound a transaction", () =>
    Effect.gen(function* () {
      const { database, run } = yield* make
      // No older server is at hand: this one says so to whoever looks here before pg_catalog.
      yield* run([
        "CREATE SCHEMA older",
        "GRANT USAGE ON SCHEMA older TO PUBLIC",
        `CREATE FUNCTION older.current_setting(name text) RETURNS text STABLE LANGUAGE sql AS $$
           SELECT CASE WHEN name = 'server_version_num' THEN '160009' ELSE pg_catalog.current_setting(name) END $$`,
        `ALTER DATABASE ${database.name} SET search_path = older, pg_catalog`
      ])
      const found = yield* only(database.worker, "warning", "server.noTransactionTimeout")
      assert.include(found.text, "outlast its lease")
    })
  )

  it.live("a server that is away is a finding and not a wait", () =>
    Effect.gen(function* () {
      const limits = yield* limitsOf()
      const { worker } = yield* freshDatabase
      const facts = yield* examine({ ...worker, config: { ...worker.config, port: 1 } }, limits)
      assert.deepStrictEqual(
        judge(facts).map(({ code, level }) => [level, code]),
        [["problem", "server.unreachable"]]
      )
    })
  )
})

describe.concurrent("time", () => {
  it.live("a snapshot that is held for long", () =>
    Effect.gen(function* () {
      const { database, sql } = yield* make
      const pinned = yield* connect(database.worker, {
        connectionsMax: 1,
        applicationName: "report"
      })
      yield* pinned`BEGIN ISOLATION LEVEL REPEATABLE READ`
      yield* pinned`SELECT FROM tenure.item`
      yield* healthy(database.worker)
      const found = yield* only(database.worker, "problem", "horizon.snapshot", { snapshot: 1 })
      assert.match(found.text, /^session \d+ of tenure_test_worker \(report, idle in transaction\)/)
      for (const statement of found.sql ?? []) yield* sql.unsafe(statement)
      yield* healthy(database.worker, { snapshot: 1 })
      // What it could not have seen, it says.
      const { findings } = yield* diagnose(database.worker)
      assert.match(
        findings.find(({ code }) => code === "horizon")?.text ?? "",
        /\d+ sessions of others cannot be looked at without GRANT pg_read_all_stats TO tenure_test_worker/
      )
    })
  )

  it.live("a machine whose clock is wrong", () =>
    Effect.gen(function* () {
      const { database } = yield* make
      const real = yield* Clock.Clock
      for (const [shift, word] of [
        [90_000, "ahead of"],
        [-90_000, "behind"]
      ] as const) {
        const shifted: Clock.Clock = Object.assign(Object.create(real), {
          currentTimeMillis: Effect.map(real.currentTimeMillis, (millis) => millis + shift)
        })
        const found = yield* Effect.provideService(
          only(database.worker, "warning", "clock.difference"),
          Clock.Clock,
          shifted
        )
        assert.match(
          found.text,
          new RegExp(`this machine's clock is [89]\\d s ${word} the database's`)
        )
      }
      yield* healthy(database.worker)
    })
  )

  it.live("a clock that was replaced", () =>
    proves({
      is: "problem",
      code: "clock.replaced",
      words: /not the server's clock/,
      as: "owner",
      made: ({ owner }) =>
        owner.unsafe(`CREATE OR REPLACE FUNCTION tenure.clock() RETURNS timestamptz LANGUAGE sql VOLATILE AS $$
          SELECT pg_catalog.clock_timestamp() + interval '1 hour' $$`)
    })
  )

  it.live("room that nobody has made", () =>
    proves({
      is: "warning",
      code: "buckets.short",
      words: /^room is made for \d/,
      as: "owner",
      made: ({ run, sql }) =>
        Effect.gen(function* () {
          const ahead = yield* sql<{ readonly name: string }>`
            SELECT name FROM tenure.bucket WHERE lower_at > tenure.clock()`
          for (const { name } of ahead) {
            yield* run([`DROP TABLE tenure.item_${name}, tenure.done_${name}, tenure.step_${name}`])
          }
          yield* run(["DELETE FROM tenure.bucket WHERE lower_at > tenure.clock()"])
        })
    })
  )

  it.live("items and deadlines whose time has passed", () =>
    Effect.gen(function* () {
      const scene = yield* make
      const { database, executor, run } = scene
      yield* run([
        `SELECT tenure.enqueue('mail', '1', '{"delayMs": 3600000, "deadlineMs": 7200000}')`
      ])
      // Delayed is not stuck.
      yield* healthy(database.worker)
      yield* run(["UPDATE tenure.delayed SET due_at = due_at - interval '2 hours'"])
      const found = yield* only(database.worker, "problem", "overdue.timers")
      assert.match(found.text, /\d+ min ago .*No executor holds a lease/)
      yield* executor()
      assert.match(
        (yield* only(database.worker, "problem", "overdue.timers")).text,
        /Live executors should have/
      )
      yield* run(["SELECT promoted FROM tenure.promote(10)"])
      yield* healthy(database.worker)
      yield* run(["UPDATE tenure.deadline SET due_at = due_at - interval '3 hours'"])
      yield* only(database.worker, "problem", "overdue.deadlines")
      yield* run(["SELECT expired FROM tenure.expire_deadlines(10)"])
      yield* healthy(database.worker)
    })
  )
})

const mail = "(SELECT id FROM tenure.queue WHERE name = 'mail')"

describe.concurrent("what is late", () => {
  it.live("a durable wait that is over, and a wake that nobody has finished", () =>
    Effect.gen(function* () {
      const { database, enqueue, executor, lane, run } = yield* make
      const item = yield* enqueue({ agoMinutes: 0 })
      yield* lane(item, "v1")
      yield* run([
        `WITH gone AS (DELETE FROM tenure.ready WHERE id = '${item}' RETURNING *)
         INSERT INTO tenure.parked (id, state, names, due_at, parked_at, lane_id, rank, seq, attempt, failures)
         SELECT g.id, 'sleeping', '{nap}', t + interval '1 min', t, g.lane_id, g.rank, g.seq, 1, 0
           FROM gone g, tenure.clock() t`
      ])
      yield* healthy(database.worker)
      yield* run(["UPDATE tenure.parked SET due_at = due_at - interval '10 min'"])
      const late = yield* only(database.worker, "problem", "overdue.waits")
      assert.match(late.text, /a durable wait was over \d+ min ago .*No executor holds a lease/)
      yield* executor()
      yield* only(database.worker, "problem", "overdue.waits")
      const taker = randomUUID()
      yield* run([`SELECT ids FROM tenure.claim_waits('${taker}', 10)`])
      yield* healthy(database.worker)
      yield* run(["UPDATE tenure.parked SET claimed_at = claimed_at - interval '3 min'"])
      yield* healthy(database.worker)
      yield* run(["UPDATE tenure.parked SET claimed_at = claimed_at - interval '3 min'"])
      const wake = yield* only(database.worker, "problem", "overdue.wakes")
      assert.match(wake.action ?? "", /stale_claim_sweep/)
      yield* run([
        "SELECT tenure.sweep_stale_claims(interval '2 min', 10)",
        `SELECT d.dispatched FROM tenure.claim_waits('${taker}', 10) c, tenure.dispatch_waits('${taker}', c.ids) d`
      ])
      yield* healthy(database.worker)
    })
  )

  const late = (name: string) =>
    `INSERT INTO tenure.schedule (name, queue, application_name, definition, next_at, updated_at)
     SELECT '${name}', 'mail', 'shop', 'd', t - interval '7 min', t FROM tenure.clock() t`

  it.live("a schedule whose code nobody has: paused, or started", () =>
    proves({
      is: "problem",
      code: "overdue.schedule",
      words: /^schedule nightly was due 7 min ago .*No live executor has the code/,
      as: "owner",
      made: ({ executor, run }) => Effect.andThen(executor(), run([late("nightly")]))
    })
  )

  it.live("a schedule whose runner lives", () =>
    proves({
      is: "problem",
      code: "overdue.schedule",
      words: /A live executor of shop has its code/,
      made: ({ executor, run }) =>
        Effect.flatMap(executor(), (id) =>
          run([
            late("nightly"),
            `INSERT INTO tenure.schedule_runner VALUES ('nightly', '${id}', 'mail', 'd')`
          ])
        ),
      mended: ({ run }) => run(["UPDATE tenure.schedule SET next_at = next_at + interval '1 h'"])
    })
  )

  it.live("items of pull workers that are gone, which only their application hands back", () =>
    Effect.gen(function* () {
      const { database, enqueue, executor, run } = yield* make
      yield* executor({ application: "other" })
      const item = yield* enqueue({ agoMinutes: 0 })
      yield* run([
        `WITH gone AS (DELETE FROM tenure.ready WHERE id = '${item}' RETURNING *)
         INSERT INTO tenure.capacity_lease (item_id, queue_id, session, version, execution_seq, state, expires_at,
                                            lane_id, rank, seq, failures, losses, stuck, reserved_at)
         SELECT g.id, ${mail}, gen_random_uuid(), 'v1', 1, 'reserved', t + interval '30 s', g.lane_id, g.rank, g.seq,
                0, 0, 0, t
           FROM gone g, tenure.clock() t`
      ])
      yield* healthy(database.worker)
      yield* run(["UPDATE tenure.capacity_lease SET expires_at = expires_at - interval '5 min'"])
      const orphaned = yield* only(database.worker, "problem", "overdue.leases")
      assert.match(
        orphaned.text,
        /^1 items of shop are .* [45] min ago.*No executor of shop holds a lease/
      )
      yield* executor()
      const stuck = yield* only(database.worker, "problem", "overdue.leases")
      assert.match(stuck.text, /Live executors should have/)
      yield* run([
        "SELECT recovered FROM tenure.capacity_sweep('shop', interval '0', interval '0', interval '5 s', 10)"
      ])
      yield* healthy(database.worker)
    })
  )
})

describe.concurrent("executors", () => {
  it.live(
    "expired and not revoked, though a peer lives: revoked by hand, its work comes back",
    () =>
      Effect.gen(function* () {
        const scene = yield* proves({
          is: "problem",
          code: "executor.unrevoked",
          words:
            /expired \d+ s ago and is not revoked; it holds 1 items. 2 live executors of its version/,
          as: "owner",
          made: ({ claim, enqueue, executor }) =>
            Effect.gen(function* () {
              yield* Effect.replicateEffect(executor(), 2)
              yield* executor({ application: "other" })
              const lost = yield* executor({ heartbeat: -135, expires: -60 })
              yield* claim(yield* enqueue({ agoMinutes: 0 }), lost)
            })
        })
        assert.strictEqual(yield* count(scene, "tenure.ready WHERE losses = 1"), 1)
      })
  )

  it.live("expired for less than the limit is the scan's, and no trouble", () =>
    Effect.gen(function* () {
      const { database, executor } = yield* make
      yield* executor({ heartbeat: -80, expires: -5 })
      yield* healthy(database.worker)
      yield* only(database.worker, "warning", "executor.orphaned", { unrevoked: 4000 })
    })
  )

  it.live("expired, and of a version that nobody runs", () =>
    proves({
      is: "problem",
      code: "executor.orphaned",
      words: /\(shop v0\) expired .*Nobody of its version holds a lease/,
      as: "owner",
      made: ({ claim, enqueue, executor }) =>
        Effect.gen(function* () {
          const lost = yield* executor({ version: "v0", heartbeat: -135, expires: -60 })
          yield* executor()
          yield* claim(yield* enqueue({ agoMinutes: 0 }), lost)
        })
    })
  )

  it.live("held up by a transaction that its fence has admitted", () =>
    Effect.gen(function* () {
      const { database, executor, run, sql } = yield* make
      const id = yield* executor({ heartbeat: -135, expires: 60 })
      const stuck = yield* connect(database.worker, {
        connectionsMax: 1,
        executorId: id,
        applicationName: `tenure handlers ${id}`
      })
      yield* stuck`BEGIN`
      yield* stuck`SELECT tenure.admit()`
      yield* sql`UPDATE tenure.executor SET heartbeat_at = tenure.clock() - interval '135 s', expires_at = tenure.clock() - interval '60 s'`
      yield* sql`SELECT tenure.mark_revoking(${id}::uuid)`
      const found = yield* only(database.worker, "problem", "executor.blocked")
      assert.match(found.text, /hold up the revocation: sessions \d+/)
      yield* run(found.sql ?? [])
      const next = yield* only(database.worker, "warning", "executor.orphaned")
      yield* run(next.sql ?? [])
      yield* healthy(database.worker)
    })
  )

  it.live("late with a renewal, and renewed in the future", () =>
    Effect.gen(function* () {
      const { database, executor, run, sql } = yield* make
      const late = yield* executor({ heartbeat: -45, expires: 30 })
      const found = yield* only(database.worker, "warning", "executor.late")
      assert.match(found.text, /has not renewed for \d+ s of 75 s/)
      yield* sql`SELECT tenure.renew_lease(${late}::uuid, interval '75 s')`
      yield* healthy(database.worker)

      yield* executor({ heartbeat: 3600, expires: 3675 })
      const future = yield* only(database.worker, "warning", "executor.renewedInFuture")
      assert.match(
        future.text,
        /renewed [56]\d min in the future: the database's clock was set back/
      )
      yield* run(future.sql ?? [])
      const { findings } = yield* diagnose(database.worker)
      assert.deepStrictEqual(troubles(findings), [])
    })
  )

  it.live("several versions of one application", () =>
    proves({
      is: "warning",
      code: "versions.mixed",
      words: /^shop runs several versions: v1 \(2\), v2 \(1\)/,
      made: ({ executor }) =>
        Effect.all([
          executor(),
          executor(),
          executor({ version: "v2" }),
          executor({ application: "other" })
        ]),
      mended: ({ run }) =>
        run(["UPDATE tenure.executor SET state = 'released' WHERE application_version = 'v1'"])
    })
  )
})

describe.concurrent("work that stands still", () => {
  it.live("claimed by an owner that is in no registry: only a person says whose it is", () =>
    Effect.gen(function* () {
      const scene = yield* proves({
        is: "problem",
        code: "claims.unknownOwner",
        words: /no executor of this registry, so nobody takes them over.* shop v7 can/,
        as: "owner",
        made: ({ claim, enqueue, lane }) =>
          Effect.gen(function* () {
            const item = yield* enqueue({ agoMinutes: 0 })
            yield* lane(item, "v7")
            yield* claim(item, randomUUID())
          })
      })
      const taken =
        "tenure.ready r JOIN tenure.lane l ON l.id = r.lane_id AND l.version = 'v7' AND l.suspect"
      assert.strictEqual(yield* count(scene, taken), 1)
    })
  )

  it.live("claimed by an executor that is over, of a version that nobody runs", () =>
    proves({
      is: "problem",
      code: "claims.incompatible",
      words:
        /which is revoked; only shop v0, or one that accepts it, may take them over, and none is live/,
      as: "owner",
      made: ({ claim, enqueue, executor }) =>
        Effect.gen(function* () {
          yield* executor()
          const over = yield* executor({
            version: "v0",
            state: "revoked",
            heartbeat: -600,
            expires: -500
          })
          yield* claim(yield* enqueue({ agoMinutes: 0 }), over)
        })
    })
  )

  it.live("claimed by an executor that is over, which a live one is about to notice", () =>
    proves({
      is: "warning",
      code: "claims.late",
      words: /which is released: the next scan hands them back/,
      made: ({ claim, enqueue, executor }) =>
        Effect.gen(function* () {
          yield* executor()
          const over = yield* executor({ state: "released", heartbeat: -600, expires: -500 })
          yield* claim(yield* enqueue({ agoMinutes: 0 }), over)
        }),
      mended: ({ run }) =>
        run([
          "SELECT r.requeued FROM tenure.claimed c, tenure.revoke(c.owner, interval '1 s', interval '0') r"
        ])
    })
  )

  it.live("claimed by many owners of many queues: each of them is looked at", () =>
    Effect.gen(function* () {
      const { claim, database, enqueue, executor } = yield* make
      const live = yield* executor()
      const owners = [live, ...Array.from({ length: 4 }, () => randomUUID())]
      for (const owner of owners) {
        for (const queue of ["mail", "bills"]) {
          yield* claim(yield* enqueue({ queue, agoMinutes: 0 }), owner)
        }
      }
      const { facts, findings } = yield* diagnose(database.worker)
      assert.lengthOf(facts.tenure?.claims ?? [], 10)
      assert.lengthOf(
        findings.filter(({ code }) => code === "claims.unknownOwner"),
        8
      )
      assert.deepStrictEqual(
        facts.tenure?.claims
          .filter(({ state }) => state === "live")
          .map((one) => [one.queue, one.owner]),
        [
          ["bills", live],
          ["mail", live]
        ]
      )
    })
  )

  it.live("handed in to a queue that no worker has ever run", () =>
    proves({
      is: "problem",
      code: "waiting.unknownQueue",
      words: /queue mial: work has been waiting .* \d+ min ago. No worker has ever run this queue/,
      made: ({ enqueue, executor }) =>
        Effect.all([executor(), enqueue({ queue: "mial", application: undefined })]),
      mended: ({ run }) => run(["SELECT tenure.cancel(id) FROM tenure.item"])
    })
  )

  it.live("available, and no executor of its application lives", () =>
    proves({
      is: "problem",
      code: "waiting.nobody",
      words: /No executor of shop holds a lease/,
      made: ({ enqueue, executor }) => Effect.all([executor({ application: "other" }), enqueue()]),
      mended: ({ run }) => run(["SELECT tenure.cancel(id) FROM tenure.item"])
    })
  )

  it.live("started by a version that nobody runs any more", () =>
    proves({
      is: "problem",
      code: "waiting.version",
      words: /started by shop v0, which nobody runs; live are v1$/,
      made: ({ enqueue, executor, lane }) =>
        Effect.gen(function* () {
          yield* executor()
          yield* lane(yield* enqueue(), "v0")
        }),
      mended: ({ claim, executor, run, sql }) =>
        Effect.gen(function* () {
          yield* run(["UPDATE tenure.executor SET state = 'released'"])
          const heir = yield* executor({ version: "v0" })
          const [left] = yield* sql<{ readonly id: string }>`SELECT id FROM tenure.ready`
          yield* claim(left?.id ?? "", heir)
        })
    })
  )

  it.live("at the limit of the queue, and at the limit of a key", () =>
    Effect.gen(function* () {
      const { claim, database, enqueue, executor, run } = yield* make
      const id = yield* executor()
      yield* claim(yield* enqueue({ key: "a" }), id)
      yield* enqueue({ key: "a", globalLimit: 1 })
      assert.match(
        (yield* only(database.worker, "warning", "waiting.globalLimit")).text,
        /The queue's limit is reached: 1 run/
      )
      yield* enqueue({ key: "a", globalLimit: 9, perKeyLimit: 1 })
      assert.match(
        (yield* only(database.worker, "warning", "waiting.keyLimit")).text,
        /The limit of its key is reached: 1 of that key run/
      )
      yield* run(["DELETE FROM tenure.claimed", "DELETE FROM tenure.ready"])
      yield* healthy(database.worker)
    })
  )

  it.live("while its queue is paused: resumed as printed, it is anybody's again", () =>
    Effect.gen(function* () {
      const { claim, database, enqueue, executor, owner, run } = yield* make
      const id = yield* executor()
      const item = yield* enqueue()
      yield* run([
        "SELECT tenure.pause_queue('mail')",
        "UPDATE tenure.queue SET paused_at = paused_at - interval '20 min'"
      ])
      const paused = yield* only(database.worker, "warning", "waiting.paused")
      assert.match(paused.text, /The queue has been paused for 20 min/)
      for (const statement of paused.sql ?? assert.fail("nothing to run")) {
        yield* owner.unsafe(statement)
      }
      yield* only(database.worker, "problem", "waiting.unclaimed")
      yield* claim(item, id)
      yield* healthy(database.worker)
    })
  )

  it.live("while the rate of the queue, or of its key, is used up", () =>
    Effect.gen(function* () {
      const { database, enqueue, executor, run } = yield* make
      yield* executor()
      yield* enqueue({ key: "a" })
      const used = (key: string) =>
        run([
          `INSERT INTO tenure.rate_log (queue_id, key, first_at, last_at, started)
           SELECT ${mail}, '${key}', t, t, 2 FROM tenure.clock() t`
        ])
      yield* run(["UPDATE tenure.queue SET rate_limit = 2, rate_window = interval '1 hour'"])
      yield* only(database.worker, "problem", "waiting.unclaimed")
      yield* used("")
      const queue = yield* only(database.worker, "warning", "waiting.rate")
      assert.match(queue.text, /The queue's rate is used up: 2 in 60 min/)
      yield* run([
        `UPDATE tenure.queue SET rate_limit = NULL, rate_window = NULL, key_rate_limit = 2,
                key_rate_window = interval '1 hour'`
      ])
      yield* only(database.worker, "problem", "waiting.unclaimed")
      yield* used("a")
      const key = yield* only(database.worker, "warning", "waiting.keyRate")
      assert.match(key.text, /The rate of its key is used up: 2 in 60 min/)
      yield* run(["SELECT tenure.cancel(id) FROM tenure.ready"])
      yield* healthy(database.worker)
    })
  )

  it.live("while every slot may be taken", () =>
    proves({
      is: "warning",
      code: "waiting.busy",
      words: /1 live executors may run it and have 1 of the queue claimed: every slot may be taken/,
      made: ({ claim, enqueue, executor }) =>
        Effect.gen(function* () {
          yield* claim(yield* enqueue(), yield* executor())
          yield* enqueue()
        }),
      mended: ({ run }) => run(["SELECT tenure.cancel(id) FROM tenure.ready"])
    })
  )

  it.live("while suspects take turns", () =>
    proves({
      is: "warning",
      code: "waiting.suspect",
      words: /a suspect has been waiting .* a process runs one such item at a time/,
      made: ({ enqueue, executor, lane }) =>
        Effect.gen(function* () {
          yield* executor()
          yield* lane(yield* enqueue(), "v1", true)
        }),
      mended: ({ run }) => run(["SELECT tenure.cancel(id) FROM tenure.ready"])
    })
  )

  it.live("though somebody lives who could claim it", () =>
    proves({
      is: "problem",
      code: "waiting.unclaimed",
      words: /2 live executors of its application and version claim nothing from the queue/,
      made: ({ enqueue, executor }) => Effect.all([executor(), executor(), enqueue()]),
      mended: ({ run }) => run(["SELECT tenure.cancel(id) FROM tenure.ready"])
    })
  )

  it.live("is not what was delayed, became available, and is claimed at the next look", () =>
    Effect.gen(function* () {
      const { claim, database, enqueue, executor } = yield* make
      const id = yield* executor()
      const item = yield* enqueue()
      // Between the two looks, and not a while after the first.
      const again = 1500
      const real = yield* Clock.Clock
      const claiming: Clock.Clock = Object.assign(Object.create(real), {
        sleep: (duration: Duration.Duration) =>
          Duration.toMillis(duration) === again
            ? Effect.orDie(claim(item, id))
            : real.sleep(duration)
      })
      const limits = yield* limitsOf("default", { waiting: 60_000, again })
      const facts = yield* Effect.provideService(
        examine(database.worker, limits),
        Clock.Clock,
        claiming
      )
      assert.lengthOf(facts.tenure?.heads ?? [], 1)
      assert.deepStrictEqual(troubles(judge(facts)), [])
    })
  )

  it.live("is not what was handed in a moment ago", () =>
    Effect.gen(function* () {
      const { database, enqueue } = yield* make
      yield* enqueue({ agoMinutes: 0 })
      yield* healthy(database.worker)
    })
  )

  it.live("in quarantine", () =>
    Effect.gen(function* () {
      const { database, enqueue, owner, run } = yield* make
      const id = yield* enqueue({ agoMinutes: 0 })
      const [there] = yield* owner<{ readonly there: boolean }>`
        SELECT to_regclass('tenure.quarantine') IS NOT NULL AS there`
      if (there?.there !== true) {
        yield* owner`CREATE TABLE tenure.quarantine (
          item_id uuid, queue_id int, quarantined_at timestamptz, executions int, reason text, due_at timestamptz,
          state text NOT NULL DEFAULT 'open')`
        yield* owner`SELECT tenure.fence_table('tenure.quarantine')`
        yield* owner`SELECT tenure.grant_roles()`
      }
      yield* healthy(database.worker)
      yield* run([
        `INSERT INTO tenure.quarantine (item_id, queue_id, quarantined_at, executions, reason, due_at)
         SELECT i.id, i.queue_id, tenure.clock() - interval '3 hours', 4, 'MAX_RECOVERY_ATTEMPTS_EXCEEDED', tenure.clock()
           FROM tenure.item i WHERE i.id = '${id}'`
      ])
      const found = yield* only(database.worker, "problem", "quarantine.open")
      assert.match(found.text, /queue mail: 1 items are quarantined, .* the oldest for 3 h/)
      yield* run(["DELETE FROM tenure.quarantine"])
      yield* healthy(database.worker)
    })
  )
})

describe("a large database", () => {
  it.live(
    "is asked no more than a small one: nothing that waits or is over is read as a whole",
    () =>
      Effect.gen(function* () {
        const { database, enqueue, executor, run, sql } = yield* make
        yield* executor()
        yield* enqueue()
        yield* run([
          `WITH handed AS (
           SELECT e.ids FROM tenure.enqueue_all('mail', array_fill('{}'::text, ARRAY[20000])) e),
         done AS (
           INSERT INTO tenure.done (id, queue_id, attempt, outcome, failures, losses, finished_at)
           SELECT gen.id, 1, 1, 'completed', 0, 0, tenure.clock()
             FROM (SELECT tenure.new_id() AS id FROM generate_series(1, 20000)) gen)
         SELECT cardinality(h.ids) FROM handed h`,
          "SELECT cardinality(e.ids) FROM tenure.enqueue_all('mail', array_fill('{}'::text, ARRAY[5000]), delays_ms => array_fill(1e7::float8, ARRAY[5000])) e"
        ])
        const read = Effect.map(
          sql<{ readonly rows: number; readonly lanes: number }>`
          SELECT coalesce(sum(t.seq_tup_read + coalesce(t.idx_tup_fetch, 0) + coalesce(i.rows, 0))
                   FILTER (WHERE t.relname ~ '^(ready|delayed|item_|done_|step_)'), 0)::float8 AS rows,
                 (sum(t.seq_scan + coalesce(t.idx_scan, 0)) FILTER (WHERE t.relname = 'lane'))::float8 AS lanes
            FROM pg_stat_user_tables t
            LEFT JOIN (SELECT x.relid, sum(x.idx_tup_read) AS rows FROM pg_stat_user_indexes x GROUP BY 1) i
              ON i.relid = t.relid
           WHERE t.schemaname = 'tenure'`,
          ([row]) => row ?? { rows: 0, lanes: 0 }
        )
        yield* sql`SELECT pg_stat_force_next_flush()`
        const before = yield* read
        yield* only(database.worker, "problem", "waiting.unclaimed")
        // A session's counts are there once it has ended.
        const after = yield* Effect.repeat(read, { until: ({ lanes }) => lanes > before.lanes })
        assert.isBelow(after.rows - before.rows, 200)
      })
  )
})
