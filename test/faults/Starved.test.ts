/**
 * Goal: a process that does not take, start or end its work is found and replaced although its lease is in
 * order, each for its reason, and only the guilty item is charged (K-048, K-059, K-068, K-239, K-242; rows
 * 19, 29 and 45).
 * Method: workers whose claimer is held, whose business connections a proxy freezes, or whose handler is
 * deaf, with three seconds until a queue counts as starved; peers take over.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect } from "effect"
import { run, steady, type World } from "./support/World.ts"
import type { Worker } from "./support/Worker.ts"

/** The lease is good for much longer than any of it takes. */
const watched = { ...steady, pollInterval: "500 millis", starvation: "3 seconds" } as const

const held = { at: "queue.claim.committed", do: "stay", turn: 1 } as const

const fired = (worker: Worker) =>
  worker.said().flatMap((one) => (one.say === "fired" ? [[one.reason, one.subject]] : []))

/** Its first claim, which finds nothing, is the last. */
const heldBeforeWork = (world: World) =>
  Effect.tap(world.ready({ settings: watched, faults: [held] }), (victim) =>
    world.until("its claimer is held", () => victim.said().some((one) => one.say === "fault"))
  )

/** It ends for this reason, with its lease in order until then. */
const endsFor = Effect.fnUntraced(function* (world: World, victim: Worker, reason: string) {
  const { code } = yield* victim.ended
  assert.deepStrictEqual(fired(victim), [[reason, "work"]])
  assert.strictEqual(code, 72)
  assert.isFalse((yield* world.executor(victim.executor())).is_past)
})

describe.concurrent("a process whose lease is in order", () => {
  it.live(
    "and whose claimer stands still is `starved` where it is alone",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const victim = yield* heldBeforeWork(world)
          yield* world.enqueue([[{ do: "post", name: "work" }], [{ do: "post", name: "work" }]])
          yield* endsFor(world, victim, "starved")
          yield* world.ready({ settings: steady })
          yield* world.allSettled()
        })
      ),
    300_000
  )

  it.live(
    "and whose claimer stands still is `stalled` beside a peer that keeps the queue moving",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const victim = yield* heldBeforeWork(world)
          const peer = yield* world.ready({ settings: watched, slots: 1 })
          const count = 200
          yield* world.enqueue(
            Array.from({ length: count }, (_, n) => [{ do: "wait" as const, gate: `g${n}` }])
          )
          // One after the other, so that there is work left and the peer always claims.
          yield* Effect.forkScoped(
            Effect.forEach(Array.from({ length: count }), (_, n) =>
              Effect.andThen(
                world.until("its turn", () => victim.hasEnded() || world.sink.waiting(`g${n}`) > 0),
                Effect.andThen(
                  Effect.sleep(victim.hasEnded() ? 0 : "50 millis"),
                  world.sink.open(`g${n}`)
                )
              )
            )
          )
          yield* endsFor(world, victim, "stalled")
          yield* world.allSettled()
          assert.deepStrictEqual(fired(peer), [])
          assert.isTrue((yield* world.outcomes).every((one) => one.owner === peer.executor()))
        })
      ),
    300_000
  )

  it.live(
    "and whose business connections are frozen is `starved`, and its peer has the work",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const proxy = yield* world.proxy
          const victim = yield* world.ready({ url: proxy.url, settings: watched })
          yield* proxy.set("freeze", "tenure work")
          yield* world.enqueue([[{ do: "post", name: "work" }]])
          yield* endsFor(world, victim, "starved")
          yield* world.ready({ settings: steady })
          yield* world.allSettled()
          yield* proxy.heal
        })
      ),
    300_000
  )

  it.live(
    "ends as soon as it is not, though its business connections work",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const proxy = yield* world.proxy
          const victim = yield* world.ready({
            url: proxy.url,
            settings: { leaseValidity: "10 seconds" }
          })
          yield* world.enqueue([[{ do: "writes", onAttempt: [1] }]])
          yield* proxy.set("freeze", "tenure lease")
          assert.strictEqual((yield* victim.ended).code, 75)
          assert.isFalse((yield* world.executor(victim.executor())).is_past)
          yield* world.ready({ settings: steady })
          yield* world.allSettled()
          yield* proxy.heal
        })
      ),
    300_000
  )

  it.live(
    "and whose handler is deaf ends, hands its other work back untouched, and that item alone is charged",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const victim = yield* world.ready({ settings: steady, slots: 4 })
          const [deaf = "", ...neighbours] = yield* world.enqueue([
            [{ do: "wait stubbornly", gate: "never", onAttempt: [1] }],
            ...Array.from({ length: 6 }, () => [
              { do: "wait" as const, gate: "later", onAttempt: [1] }
            ])
          ])
          yield* world.until(
            "four run",
            () => world.sink.waiting("never") + world.sink.waiting("later") === 4
          )
          yield* world.sql`SELECT tenure.cancel(${deaf}::uuid)`
          yield* endsForDeafness(victim)
          const lost = yield* world.executor(victim.executor())
          assert.deepStrictEqual([lost.state, lost.is_past], ["active", false])
          yield* world.sink.open("later")
          // Nobody has to wait for the lease but the guilty one.
          const peer = yield* world.ready({ settings: steady })
          yield* world.until("the neighbours are through", () =>
            Effect.map(world.count("tenure.done"), (done) => done === neighbours.length)
          )
          yield* world.sql`UPDATE tenure.executor SET expires_at = tenure.clock() WHERE id = ${victim.executor()}::uuid`
          yield* world.allSettled()
          const outcomes = yield* world.outcomes
          for (const one of outcomes.filter(({ id }) => id !== deaf)) {
            assert.deepInclude(one, {
              outcome: "completed",
              losses: 0,
              failures: 0,
              owner: peer.executor() ?? null
            })
          }
          assert.deepInclude(
            outcomes.find(({ id }) => id === deaf),
            { outcome: "cancelled", losses: 1 }
          )
        })
      ),
    300_000
  )
})

const endsForDeafness = Effect.fnUntraced(function* (victim: Worker) {
  const { code } = yield* victim.ended
  assert.deepStrictEqual(fired(victim), [["stubborn", "work"]])
  assert.strictEqual(code, 72)
})
