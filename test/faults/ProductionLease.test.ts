/**
 * Goal: with the settings of production, a process that stands still loses its work after its lease
 * has run out, not before, and is refused when it comes back (K-082, K-128, K-226, K-227; row 10).
 * Method: SIGSTOP from outside through the full 75 s, and one peer. All times are the database's.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect } from "effect"
import { run } from "./support/World.ts"

describe("with the settings of production", () => {
  it.live(
    "a stopped process is taken over 75 to 80 s after its last renewal, and refused when it goes on",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const victim = yield* world.ready({ profile: "default" })
          const [item = ""] = yield* world.enqueue([
            [
              { do: "step", name: "before" },
              { do: "wait", gate: "never", onAttempt: [1] },
              { do: "write" }
            ]
          ])
          yield* world.until("it runs", () => world.sink.waiting("never") === 1)
          const peer = yield* world.ready({ profile: "default" })
          yield* victim.signal("SIGSTOP")
          yield* world.allSettled("110 seconds")
          const [, second] = yield* world.attempts(item)
          assert.strictEqual(second?.owner, peer.executor())
          const stopped = yield* world.executor(victim.executor())
          const takenOverMillis =
            (stopped.revoked_at?.getTime() ?? 0) - stopped.heartbeat_at.getTime()
          assert.isAtLeast(takenOverMillis, 75_000)
          // 75 s and a scan of 5 s; the rest is for a busy machine.
          assert.isBelow(takenOverMillis, 90_000)
          assert.strictEqual(world.sink.arrivalsOf("before").length, 1)
          yield* victim.signal("SIGCONT")
          assert.strictEqual((yield* victim.ended).code, 75)
          assert.strictEqual(yield* world.count("app.written"), 1)
        })
      ),
    150_000
  )
})
