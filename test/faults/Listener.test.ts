/**
 * Goal: notifications only save time: with all of them lost the poll interval bounds how late work
 * starts, and a listening session that has died, or only seems alive, is replaced, with a look at
 * what was missed (row 33; P-32; bug reports 24 and 25).
 * Method: a proxy that keeps notifications to itself, or holds one connection; sessions that the
 * server ends. Where a poll must not help, its interval is ten minutes.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect } from "effect"
import { run, steady, type World } from "./support/World.ts"

const one = [{ do: "post", name: "work" }] as const

/** How long after it was handed in an item started. */
const latencyMillis = Effect.fnUntraced(function* (world: World) {
  const [item = ""] = yield* world.enqueue([one])
  yield* world.until("it is settled", () =>
    Effect.map(world.count(`tenure.done WHERE id = '${item}'`), (count) => count === 1)
  )
  const [row] = yield* world.sql<{ readonly millis: number }>`
    SELECT (extract(epoch FROM c.at - i.enqueued_at) * 1000)::float8 AS millis
      FROM tenure.item i JOIN history.claim c ON c.item = i.id WHERE i.id = ${item}::uuid`
  return row?.millis ?? Infinity
})

/** What such a session does last, once it listens; before that it has done nothing. */
const listening = `pg_stat_activity
  WHERE datname = current_database() AND application_name LIKE 'tenure listener%'
    AND query ~ '^LISTEN|hold_presence|tenure_echo'`

const listens = (world: World, sessions: number) =>
  world.until(`${sessions} sessions listen`, () =>
    Effect.map(world.count(listening), (count) => count === sessions)
  )

describe.concurrent("notifications", () => {
  it.live(
    "that are all lost cost a second and no item, whatever the poll interval",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const proxy = yield* world.proxy
          yield* proxy.set("quiet", "tenure listener")
          // Nothing is heard, so that this counts, and not the ten minutes of the settings.
          const pollMillis = 1000
          yield* world.ready({ url: proxy.url, settings: steady })
          yield* latencyMillis(world)
          const latencies = yield* Effect.replicateEffect(latencyMillis(world), 4)
          // Handed in right after the last look, one waits for the next, unless this process was held up
          // in between: not four times in a row.
          assert.isAbove(Math.max(...latencies), pollMillis / 3, "no hint got through")
        })
      ),
    300_000
  )

  it.live(
    "are listened to again at once when the server ends the session, and what was missed is found",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const worker = yield* world.ready({ settings: steady })
          for (let turn = 1; turn <= 3; turn++) {
            yield* listens(world, 1)
            yield* world.sql.unsafe(`SELECT pg_terminate_backend(pid) FROM ${listening}`)
            // Announced while nobody listens, or just again.
            assert.isBelow(yield* latencyMillis(world), 10_000)
            yield* listens(world, 1)
            assert.isBelow(yield* latencyMillis(world), 10_000)
          }
          assert.isTrue(worker.logs("the listening session was lost").length >= 3)
        })
      ),
    300_000
  )

  it.live(
    "are listened to again when a connection goes half-open before it listens",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const proxy = yield* world.proxy
          yield* world.ready({ url: proxy.url, settings: steady })
          yield* listens(world, 1)
          const isStuck = proxy.freezeAt(/LISTEN/)
          yield* world.sql.unsafe(`SELECT pg_terminate_backend(pid) FROM ${listening}`)
          yield* world.until("the next connection is stuck", isStuck)
          yield* latencyMillis(world)
          yield* proxy.heal
        })
      ),
    300_000
  )

  it.live(
    "over a half-open connection are missed for a few probes and not for ever",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const proxy = yield* world.proxy
          const worker = yield* world.ready({ url: proxy.url, settings: steady })
          yield* listens(world, 1)
          yield* proxy.setOpen("freeze", "tenure listener")
          // Within a renewal interval of silence and the deadline of the probe, then the reconnect.
          assert.isBelow(yield* latencyMillis(world), 20_000)
          // The server still has the first one as well.
          yield* listens(world, 2)
          assert.isBelow(yield* latencyMillis(world), 5000)
          assert.strictEqual(worker.logs("the listening session was lost").length, 1)
          yield* proxy.heal
        })
      ),
    300_000
  )
})
