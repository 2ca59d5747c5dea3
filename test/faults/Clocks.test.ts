/**
 * Goal: clocks that jump cost time and never a promise. Leases are judged by the database's clock
 * alone, so its jump ends all of them, or none; timers fire once; order is that of `seq`; the clock
 * of a worker's machine decides nothing (rows 30, 31, 32; P-14, P-21; I13 for delayed items).
 * Method: `tenure.clock()` shifted by a sequence under real workers, which are started again when they
 * end, as a deployment does; a worker whose `Date` is shifted by a signal. A scan is known to have
 * passed once it has revoked a registered executor that nobody runs.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect } from "effect"
import { SqlClient } from "effect/sql"
import { randomUUID } from "node:crypto"
import { Work } from "./support/Work.ts"
import { run, steady, type World } from "./support/World.ts"

const hourMillis = 3_600_000

// A sequence, because time passes for every snapshot at once.
const shiftable = [
  "CREATE SEQUENCE history.shift MINVALUE -100000000 START 0",
  "SELECT setval('history.shift', 0)",
  "GRANT USAGE ON SCHEMA history TO PUBLIC",
  "GRANT SELECT ON history.shift TO PUBLIC",
  `CREATE OR REPLACE FUNCTION tenure.clock() RETURNS timestamptz LANGUAGE sql VOLATILE PARALLEL SAFE AS $$
     SELECT pg_catalog.clock_timestamp() + (SELECT last_value FROM history.shift) * interval '1 ms' $$`
]

const makeShiftable = (world: World) =>
  Effect.forEach(shiftable, (statement) => world.sql.unsafe(statement), { discard: true })

/** The database's clock, so far from the true one. */
const shift = (world: World, millis: number) =>
  world.sql`SELECT setval('history.shift', ${millis}::int)`

const settled = (world: World, item: string) =>
  world.until(`${item} is settled`, () =>
    Effect.map(world.count(`tenure.done WHERE id = '${item}'`), (count) => count === 1)
  )

const enqueue = (world: World, name: string, options: Parameters<typeof Work.enqueue>[1] = {}) =>
  Work.enqueue({ program: [{ do: "post", name }], secret: world.secret }, options).pipe(
    Effect.provideService(SqlClient.SqlClient, world.sql),
    Effect.orDie
  )

/** Somebody's scan has begun and ended after this was asked for. */
const scanPasses = Effect.fnUntraced(function* (world: World) {
  const nobody = randomUUID()
  yield* world.sql`
    SELECT tenure.register_executor(${nobody}::uuid, 'faults', 'v1', interval '1 ms', 'nowhere', 0)`
  yield* world.until("a scan has passed", () =>
    Effect.map(world.executor(nobody), ({ state }) => state === "revoked")
  )
})

/** The takeover that is waited for is the lease's and no presence's. */
const settings = { ...steady, presenceGrace: "Infinity" }

describe.concurrent("a clock that jumps", () => {
  it.live(
    "forward one hour in the database ends every lease; all start anew, and nothing happens twice",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          yield* makeShiftable(world)
          yield* world.keepRunning(2, { settings, slots: 4 })
          yield* world.until(
            "both are ready",
            () => world.workers.filter((one) => one.executor() !== undefined).length === 2
          )
          const first = world.workers.map((one) => one.executor() ?? "")
          const running = yield* world.enqueue(
            Array.from({ length: 6 }, (_, at) => [
              { do: "step", name: `before ${at}` } as const,
              { do: "wait", gate: "jump", onAttempt: [1] } as const,
              { do: "write" } as const
            ])
          )
          yield* world.until("all of it runs", () => world.sink.waiting("jump") === 6)
          const timers = yield* Effect.forEach([10, 20, 30], (minutes) =>
            enqueue(world, "timer", { delay: `${minutes} minutes` })
          )
          const later = yield* enqueue(world, "later", { delay: "2 hours" })
          const late = yield* enqueue(world, "late", { delay: "2 hours", deadline: "30 minutes" })

          yield* shift(world, hourMillis)
          yield* Effect.forEach([...running, ...timers, late], (item) => settled(world, item))

          for (const id of first) assert.strictEqual((yield* world.executor(id)).state, "revoked")
          const ended = yield* Effect.forEach(world.workers.slice(0, 2), (one) => one.ended)
          assert.deepStrictEqual(
            ended.map(({ code }) => code),
            [75, 75]
          )
          const outcomes = yield* world.outcomes
          const of = (ids: ReadonlyArray<string>) =>
            outcomes
              .filter(({ id }) => ids.includes(id))
              .map(({ attempt, outcome }) => [outcome, attempt])
          assert.deepStrictEqual(
            of(running),
            running.map(() => ["completed", 2])
          )
          assert.deepStrictEqual(
            of(timers),
            timers.map(() => ["completed", 1])
          )
          assert.strictEqual(world.sink.arrivalsOf("timer").length, 3)
          assert.deepInclude(
            outcomes.find(({ id }) => id === late),
            { outcome: "failed", reason: "DeadlineExceeded" }
          )
          // Two hours have not passed.
          assert.strictEqual(yield* world.count(`tenure.delayed WHERE id = '${later}'`), 1)
        })
      ),
    300_000
  )

  it.live(
    "back one hour in the database ends no lease, and a dead executor's work waits for its hour",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          yield* makeShiftable(world)
          const dying = yield* world.ready({ settings })
          const [held = ""] = yield* world.enqueue([
            [
              { do: "step", name: "held" },
              { do: "wait", gate: "never", onAttempt: [1] }
            ]
          ])
          yield* world.until("it runs", () => world.sink.waiting("never") === 1)
          yield* dying.signal("SIGKILL")
          yield* dying.ended
          yield* world.keepRunning(1, { settings, slots: 1 })
          const living = yield* world.until("the other one is ready", () =>
            world.workers.slice(1).find((one) => one.executor() !== undefined)
          )
          const alive = living.executor()

          // One timer fires before the jump and one is due soon, were it not for the jump.
          const [fired, waiting] = yield* Effect.all([
            enqueue(world, "fired", { delay: "1 milli" }),
            enqueue(world, "waiting", { delay: "1 minute" })
          ])
          yield* settled(world, fired)
          // One slot: what stands first in the queue starts first.
          yield* world.enqueue([[{ do: "wait", gate: "order" }]])
          yield* world.until("the slot is taken", () => world.sink.waiting("order") === 1)
          const before = yield* Effect.replicateEffect(enqueue(world, "before"), 2)
          yield* shift(world, -hourMillis)
          const after = yield* Effect.replicateEffect(enqueue(world, "after"), 2)
          const { expires_at: expiresAt } = yield* world.executor(alive)
          yield* world.until("it renews by the clock as it is", () =>
            Effect.map(world.executor(alive), (row) => row.expires_at < expiresAt)
          )
          yield* world.sink.open("order")
          yield* Effect.forEach([...before, ...after], (item) => settled(world, item))
          const order = yield* world.sql<{ readonly item: string }>`
            SELECT item FROM history.claim WHERE item = ANY(${[...before, ...after]}::uuid[]) ORDER BY place`
          assert.deepStrictEqual(
            order.map(({ item }) => item),
            [...before, ...after]
          )

          yield* scanPasses(world)
          const state = yield* world.executor(dying.executor())
          assert.deepStrictEqual([state.state, state.is_past], ["active", false])
          assert.strictEqual((yield* world.attempts(held)).length, 1)
          assert.isFalse(living.hasEnded())
          assert.strictEqual(yield* world.count(`tenure.delayed WHERE id = '${waiting}'`), 1)

          // The clock is put right, and that is a jump forward.
          yield* shift(world, hourMillis / 60)
          yield* Effect.forEach([held, waiting], (item) => settled(world, item))
          assert.strictEqual((yield* living.ended).code, 75)
          const outcomes = yield* world.outcomes
          assert.deepInclude(
            outcomes.find(({ id }) => id === held),
            { outcome: "completed", attempt: 2, losses: 1 }
          )
          assert.deepStrictEqual(
            ["fired", "waiting", "held"].map((name) => world.sink.arrivalsOf(name).length),
            [1, 1, 1]
          )
        })
      ),
    300_000
  )

  it.live(
    "both ways in a worker's own machine has no effect",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const worker = yield* world.ready({
            settings,
            node: ["--import", `data:text/javascript,${encodeURIComponent(shiftedDate)}`]
          })
          const id = worker.executor()
          const jumps = ["forward", "back", "right"] as const
          for (const jump of jumps) {
            yield* worker.signal("SIGUSR2")
            yield* world.until(`its clock has jumped ${jump}`, () =>
              worker.output().some((line) => line.includes(`shifted ${jump}`))
            )
            const { heartbeat_at: heartbeatAt } = yield* world.executor(id)
            const timer = yield* enqueue(world, `timer ${jump}`, {
              delay: "500 millis",
              deadline: "1 minute"
            })
            const now = yield* enqueue(world, `now ${jump}`)
            yield* Effect.forEach([timer, now], (item) => settled(world, item))
            yield* world.until("the lease is renewed", () =>
              Effect.map(world.executor(id), (row) => row.heartbeat_at > heartbeatAt)
            )
          }
          assert.isFalse(worker.hasEnded())
          assert.deepStrictEqual(
            new Set(
              (yield* world.outcomes).map(({ attempt, outcome, owner }) =>
                [outcome, attempt, owner].join()
              )
            ),
            new Set([`completed,1,${id}`])
          )
          const [early] = yield* world.sql<{ readonly count: number }>`
            SELECT count(*)::int AS count FROM history.claim c JOIN tenure.item i ON i.id = c.item
             WHERE i.deadline_at IS NOT NULL AND c.at < i.enqueued_at + interval '500 ms'`
          assert.strictEqual(early?.count, 0)
          assert.strictEqual(worker.logs("executor_coordination").length, 0)
        })
      ),
    300_000
  )
})

/** What Node.js shows of the machine's clock: each signal moves it on by one of three jumps. */
const shiftedDate = `
  const jumps = [["forward", 3600000], ["back", -3600000], ["right", 0]]
  const True = Date, now = Date.now
  let shift = 0
  globalThis.Date = class extends True {
    constructor(...given) { given.length === 0 ? super(now() + shift) : super(...given) }
    static now() { return now() + shift }
  }
  const origin = performance.timeOrigin
  Object.defineProperty(performance, "timeOrigin", { get: () => origin + shift })
  process.on("SIGUSR2", () => {
    const [name, by] = jumps.shift()
    shift = by
    process.stderr.write("shifted " + name + "\\n")
  })`
