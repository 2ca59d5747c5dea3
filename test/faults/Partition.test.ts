/**
 * Goal: a process that is cut off from the database stops by itself before anybody else may have its
 * work, and a peer goes on with it (rows 9, 17 and 18; I11, I14; K-128, K-181 to K-185, K-238; bug
 * report 9).
 * Method: a proxy between one worker and the database loses, delays or holds its bytes; the peer has
 * a line of its own.
 */
import { assert, describe, it } from "@effect/vitest"
import { Clock, Effect } from "effect"
import { run, steady, type World } from "./support/World.ts"
import type { Worker } from "./support/Worker.ts"

/** Room between the moment it stops and the end of its lease, for a machine that has other work. */
const cutOff = { leaseValidity: "12 seconds" } as const

const refusals = (worker: Worker, what: string) =>
  worker.said().flatMap((one) => (one.say === "refused" && one.what === what ? [one.by] : []))

/** A process stops because it no longer trusts its lease, while by the database's clock it still has it. */
const assertStoppedInTime = Effect.fnUntraced(function* (world: World, victim: Worker) {
  assert.strictEqual((yield* victim.ended).code, 75)
  const executor = yield* world.executor(victim.executor())
  assert.deepStrictEqual([executor.state, executor.is_past], ["active", false])
})

describe.concurrent("a process that is cut off", () => {
  it.live(
    "by renewals whose answers come after the window stops before its lease ends, and writes nothing late",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const proxy = yield* world.proxy
          const victim = yield* world.ready({ url: proxy.url, settings: cutOff })
          yield* world.enqueue([
            [
              { do: "writes", onAttempt: [1] },
              { do: "step", name: "work" }
            ]
          ])
          yield* world.until("it writes", () =>
            Effect.map(world.count("app.written"), (count) => count > 0)
          )
          yield* proxy.set({ delayMillis: 14_000 }, "tenure lease")
          yield* assertStoppedInTime(world, victim)
          yield* world.ready({ settings: steady })
          yield* world.allSettled()
          const executor = yield* world.executor(victim.executor())
          assert.strictEqual(executor.state, "revoked")
          assert.strictEqual(
            yield* world.count(
              `app.written w JOIN tenure.executor e ON e.id = w.executor WHERE w.at >= e.expires_at`
            ),
            0
          )
        })
      ),
    300_000
  )

  it.live(
    "by a black hole refuses its own lease, sends nothing outward, ends, and a peer goes on",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const proxy = yield* world.proxy
          const victim = yield* world.ready({ url: proxy.url, settings: cutOff })
          yield* world.enqueue([
            [
              { do: "check", onAttempt: [1] },
              { do: "post", name: "after" }
            ],
            [
              { do: "posts", name: "beat", onAttempt: [1] },
              { do: "post", name: "after" }
            ],
            [
              { do: "writes", onAttempt: [1] },
              { do: "post", name: "after" }
            ]
          ])
          yield* world.until(
            "all three run",
            () =>
              world.sink.arrivalsOf("beat").length > 0 &&
              Effect.map(world.count("app.written"), (count) => count > 0)
          )
          yield* proxy.set("freeze")
          const [by] = yield* world.until("its check refuses", () => {
            const found = refusals(victim, "check")
            return found.length > 0 && found
          })
          // Not because the window was over: a renewal had failed.
          assert.strictEqual(by, "LeaseUnverified")
          const beats = world.sink.arrivalsOf("beat").length
          yield* assertStoppedInTime(world, victim)
          assert.deepStrictEqual(world.sink.arrivalsOf("after"), [])
          // One may have been on its way when the check refused.
          assert.isAtMost(world.sink.arrivalsOf("beat").length, beats + 1)
          const peer = yield* world.ready({ settings: steady })
          yield* world.allSettled()
          assert.isTrue((yield* world.outcomes).every((one) => one.owner === peer.executor()))
          yield* proxy.heal
        })
      ),
    300_000
  )

  it.live(
    "from all answers settles nothing twice, though its requests arrive",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const proxy = yield* world.proxy
          const settings = { ...cutOff, probe: "1300 millis" }
          const victim = yield* world.ready({ url: proxy.url, settings })
          const [finished = "", unfinished = ""] = yield* world.enqueue([
            [{ do: "wait", gate: "finish" }],
            [{ do: "wait", gate: "never", onAttempt: [1] }]
          ])
          yield* world.until(
            "both run",
            () => world.sink.waiting("finish") + world.sink.waiting("never") === 2
          )
          const before = yield* world.executor(victim.executor())
          // Behind the settle of a probe, whose answer never comes, the outcome would wait for its turn.
          yield* world.betweenProbes
          yield* proxy.set("mute")
          yield* world.sink.open("finish")
          yield* world.until("its outcome has arrived", () =>
            Effect.map(world.count(`tenure.done WHERE id = '${finished}'`), (count) => count === 1)
          )
          yield* assertStoppedInTime(world, victim)
          const after = yield* world.executor(victim.executor())
          assert.isTrue(after.heartbeat_at > before.heartbeat_at, "a renewal arrived, too")
          const peer = yield* world.ready({ settings: steady })
          yield* world.allSettled()
          const outcomes = yield* world.outcomes
          assert.deepInclude(
            outcomes.find((one) => one.id === finished),
            { attempt: 1, losses: 0, owner: victim.executor() ?? null }
          )
          assert.deepInclude(
            outcomes.find((one) => one.id === unfinished),
            { attempt: 2, losses: 1, owner: peer.executor() ?? null }
          )
        })
      ),
    300_000
  )
})

describe.concurrent("a process whose connections break", () => {
  it.live(
    "refuses outbound calls at once, long before a renewal is due, and goes on when they are back",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const proxy = yield* world.proxy
          const renewalMillis = 6000
          const worker = yield* world.ready({
            url: proxy.url,
            settings: { ...steady, leaseRenewal: renewalMillis }
          })
          const [item = ""] = yield* world.enqueue([
            [
              { do: "check", onAttempt: [1] },
              { do: "post", name: "after" }
            ]
          ])
          yield* world.until("it runs", () => worker.said().some((one) => one.say === "started"))
          const brokenNanos = yield* Clock.monotonicTimeNanos
          yield* proxy.set("refuse")
          const seenNanos = yield* world.until(
            "its check and its call are refused",
            () => refusals(worker, "post").length > 0 && Clock.monotonicTimeNanos
          )
          assert.deepStrictEqual(refusals(worker, "check"), ["LeaseUnverified"])
          assert.deepStrictEqual(refusals(worker, "post"), ["LeaseUnverified"])
          assert.isBelow(Number(seenNanos - brokenNanos) / 1e6, renewalMillis)
          yield* proxy.heal
          yield* world.allSettled()
          assert.isFalse(worker.hasEnded())
          // An outage is not the item's fault: neither a failure nor a loss is charged.
          assert.deepInclude((yield* world.outcomes)[0], {
            id: item,
            attempt: 2,
            failures: 0,
            losses: 0
          })
          assert.strictEqual(world.sink.arrivalsOf("after").length, 1)
        })
      ),
    300_000
  )

  it.live(
    "starts what it has claimed in the meantime as soon as its lease is confirmed again",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const proxy = yield* world.proxy
          // Full with it, so that no further claim looks at what waits.
          const worker = yield* world.ready({
            url: proxy.url,
            slots: 1,
            settings: { ...steady, abandonAfter: "7 seconds" }
          })
          yield* proxy.set({ delayMillis: 1500 }, "tenure work")
          yield* world.enqueue([[{ do: "post", name: "work" }]])
          yield* world.until("it has claimed, and does not know yet", () =>
            Effect.map(world.count("tenure.claimed"), (count) => count === 1)
          )
          // In doubt until after the claim's answer.
          yield* proxy.set({ delayMillis: 4000 }, "tenure lease")
          yield* proxy.setOpen("refuse", "tenure listener")
          yield* world.allSettled()
          assert.isFalse(worker.hasEnded())
          assert.deepInclude((yield* world.outcomes)[0], { attempt: 1, losses: 0 })
        })
      ),
    300_000
  )

  it.live(
    "replaces a lease connection that went silent before its window is over",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const proxy = yield* world.proxy
          const worker = yield* world.ready({ url: proxy.url, settings: steady })
          yield* proxy.setOpen("freeze", "tenure lease")
          const silent = yield* world.executor(worker.executor())
          yield* world.until("it has renewed again", () =>
            Effect.map(
              world.executor(worker.executor()),
              (now) => now.heartbeat_at > silent.heartbeat_at
            )
          )
          yield* world.enqueue([[{ do: "post", name: "after" }]])
          yield* world.allSettled()
          assert.isFalse(worker.hasEnded())
          yield* proxy.heal
        })
      ),
    300_000
  )
})
