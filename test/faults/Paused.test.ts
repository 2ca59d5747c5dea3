/**
 * Goal: a process that stands still for longer than its lease finds its work with somebody else: the
 * fence refuses what it still writes, nothing leaves it any more, and it ends (row 10; I1, I11; K-082,
 * K-127, K-134, K-227).
 * Method: a worker stops itself with SIGSTOP inside a handler, and goes on where it stood, right
 * before a write and an outbound call, after a peer has finished everything.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect } from "effect"
import { run, steady } from "./support/World.ts"

describe.concurrent("a process that was stopped for longer than its lease", () => {
  it.live(
    "is refused by the fence, sends nothing outward, and exits",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const victim = yield* world.ready({})
          const items = yield* world.enqueue([
            [{ do: "wait", gate: "go" }, { do: "write" }, { do: "post", name: "late" }],
            [{ do: "wait", gate: "go" }],
            [
              { do: "step", name: "before" },
              { do: "write" },
              { do: "stop", onAttempt: [1] },
              { do: "write regardless" },
              { do: "post", name: "late" }
            ]
          ])
          yield* world.until(
            "it stopped inside a handler, two more wait",
            () =>
              victim.said().some((one) => one.say === "stopping") && world.sink.waiting("go") === 2
          )
          const peer = yield* world.ready({ settings: steady })
          // Answers for both are on their way then, and those to the stopped process wait in its socket.
          yield* world.sink.open("go")
          yield* world.allSettled()
          const before = yield* world.outcomes
          assert.isTrue(
            before.every(
              (one) => one.owner === peer.executor() && one.attempt === 2 && one.losses === 1
            )
          )
          const revoked = yield* world.executor(victim.executor())
          assert.strictEqual(revoked.state, "revoked")
          assert.isTrue((revoked.revoked_at ?? 0) >= revoked.expires_at)

          const written = yield* world.count("app.written")
          const arrivals = world.sink.arrivals().length
          yield* victim.signal("SIGCONT")
          assert.strictEqual((yield* victim.ended).code, 75)
          assert.deepInclude(victim.said(), { say: "refused", what: "write", by: "TN002" })
          assert.strictEqual(yield* world.count("app.written"), written)
          assert.strictEqual(world.sink.arrivals().length, arrivals, "nothing was sent")
          assert.deepStrictEqual(yield* world.outcomes, before)
          assert.strictEqual(yield* world.count(`tenure.claimed`), 0)
          assert.strictEqual((yield* world.attempts(items[2] ?? "")).length, 2)
        })
      ),
    300_000
  )

  it.live(
    "between a step and its checkpoint stores neither the checkpoint nor an outcome",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const victim = yield* world.ready({
            faults: [{ at: "queue.step.returned", do: "stop", turn: 1 }]
          })
          yield* world.enqueue([[{ do: "step", name: "charge" }]])
          yield* world.until("it stopped", () => victim.said().some((one) => one.say === "fault"))
          const peer = yield* world.ready({ settings: steady })
          yield* world.allSettled()
          yield* victim.signal("SIGCONT")
          assert.strictEqual((yield* victim.ended).code, 75)
          assert.deepInclude((yield* world.outcomes)[0], {
            attempt: 2,
            owner: peer.executor() ?? null
          })
          assert.strictEqual(yield* world.count("tenure.step"), 1)
          assert.strictEqual(yield* world.count("tenure.step WHERE attempt = 2"), 1)
        })
      ),
    300_000
  )
})
