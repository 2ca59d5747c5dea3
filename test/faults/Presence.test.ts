/**
 * Goal: a process that dies is replaced at once, with the settings of production; what only looks like
 * a death, and a server that starts again, cost nobody anything (presence; K-128, K-129; rows 1, 10 and
 * 17; fault-matrix rows of a server that restarts).
 * Method: SIGKILL, SIGSTOP, a proxy and a server of its own, beside peers that are there before.
 * Whether the presence or the lease decided is told by the database's instants alone.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect } from "effect"
import * as Server from "./support/Server.ts"
import { run, runOn, steady, type World } from "./support/World.ts"

const arePresent = (world: World, count: number) =>
  world.until(`${count} are present`, () =>
    Effect.map(world.count("tenure.presence WHERE held_at IS NOT NULL"), (held) => held === count)
  )

const taken = "executor_presence: a peer is gone"

describe.concurrent("a process that is gone", () => {
  it.live(
    "with the settings of production is replaced long before its lease runs out",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const workers = yield* Effect.replicateEffect(world.ready({ profile: "default" }), 2)
          yield* arePresent(world, 2)
          const [item = ""] = yield* world.enqueue([
            [
              { do: "step", name: "before" },
              { do: "wait", gate: "never", onAttempt: [1] },
              { do: "write" }
            ]
          ])
          yield* world.until("it runs", () => world.sink.waiting("never") === 1)
          const [first] = yield* world.attempts(item)
          const victim = workers.find((worker) => worker.executor() === first?.owner)
          const peer = workers.find((worker) => worker !== victim)
          yield* victim?.signal("SIGKILL") ?? Effect.void
          yield* world.allSettled()
          const dead = yield* world.executor(victim?.executor())
          assert.strictEqual(dead.state, "revoked")
          // On a server that was started a moment ago the ring waits 15 s; the lease of 75 s cannot be over.
          const beforeExpiry = dead.expires_at.getTime() - (dead.revoked_at?.getTime() ?? Infinity)
          assert.isAbove(beforeExpiry, 30_000)
          assert.strictEqual(peer?.logs(taken).length, 1)
          const [, second] = yield* world.attempts(item)
          assert.strictEqual(second?.owner, peer?.executor())
          assert.deepInclude((yield* world.outcomes)[0], { attempt: 2, losses: 1, failures: 0 })
          assert.strictEqual(world.sink.arrivalsOf("before").length, 1)
          yield* arePresent(world, 1)
        })
      ),
    300_000
  )

  it.live(
    "as far as a pause, a black hole or a half-open socket lets one see, is left to its lease",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const peer = yield* world.ready({ settings: steady, slots: 3 })
          const [dark, halfOpen] = yield* Effect.all([world.proxy, world.proxy])
          const victims = yield* Effect.forEach(
            [undefined, dark, halfOpen],
            (proxy) =>
              world.ready({ slots: 1, ...(proxy === undefined ? {} : { url: proxy.url }) }),
            { concurrency: "unbounded" }
          )
          yield* arePresent(world, 4)
          const items = yield* world.enqueue(
            Array.from(
              { length: 6 },
              () =>
                [
                  { do: "wait", gate: "never", onAttempt: [1] },
                  { do: "step", name: "work" }
                ] as const
            )
          )
          yield* world.until("all run", () => world.sink.waiting("never") === items.length)
          const [paused, cutOff, ghost] = victims
          yield* halfOpen.setOpen("freeze", "tenure listener")
          yield* world.until("it has noticed, and says that it holds no lock any more", () =>
            Effect.map(
              world.count(
                `tenure.presence WHERE executor_id = '${ghost?.executor()}' AND held_at IS NULL`
              ),
              (count) => count === 1
            )
          )
          // The server still has its first session, and with it the lock.
          yield* ghost?.signal("SIGKILL") ?? Effect.void
          yield* paused?.signal("SIGSTOP") ?? Effect.void
          yield* dark.set("freeze")
          for (const victim of [paused, cutOff, ghost]) {
            const lost = yield* world.until("it is revoked", () =>
              Effect.map(
                world.executor(victim?.executor()),
                (row) => row.state === "revoked" && row
              )
            )
            assert.isTrue((lost.revoked_at ?? 0) >= lost.expires_at, victim?.name)
          }
          assert.deepStrictEqual(peer.logs(taken), [])
          yield* world.sink.open("never")
          yield* world.allSettled()
          yield* dark.heal
          yield* halfOpen.heal
        })
      ),
    300_000
  )
})

describe("a server that starts again", () => {
  it.live(
    "under ten busy executors has none of them revoked, and none of their work lost",
    () =>
      Effect.scoped(
        Effect.flatMap(Server.make, (server) =>
          runOn(
            Effect.succeed(server),
            Effect.fnUntraced(function* (world) {
              const workers = yield* Effect.replicateEffect(
                world.worker({ settings: steady, slots: 3 }),
                10
              )
              yield* arePresent(world, 10)
              yield* world.enqueue(
                Array.from(
                  { length: 30 },
                  () =>
                    [
                      { do: "wait", gate: "go" },
                      { do: "step", name: "work" },
                      { do: "write" }
                    ] as const
                )
              )
              yield* world.until("all are busy", () => world.sink.waiting("go") === 30)
              yield* server.crash
              yield* world.until("all have noticed", () =>
                workers.every((worker) => worker.logs("the listening session was lost").length > 0)
              )
              yield* server.restart
              const { started } = yield* world.until("the server is back", () =>
                Effect.map(
                  world.sql<{
                    started: string
                  }>`SELECT pg_postmaster_start_time()::text AS started`,
                  ([row]) => row
                ).pipe(Effect.catch(() => Effect.succeed(undefined)))
              )
              yield* world.until("all hold their locks again", () =>
                Effect.map(
                  world.count(`tenure.presence WHERE held_at > '${started}'`),
                  (held) => held === 10
                )
              )
              yield* world.sink.open("go")
              yield* world.allSettled()
              assert.isTrue(
                (yield* world.outcomes).every(
                  (one) => one.outcome === "completed" && one.losses === 0 && one.attempt === 1
                )
              )
              assert.strictEqual(yield* world.count("tenure.executor WHERE state = 'active'"), 10)
              assert.isFalse(workers.some((worker) => worker.hasEnded()))
            })
          )
        )
      ),
    300_000
  )
})
