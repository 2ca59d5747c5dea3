/**
 * Goal: a database that crashes while a lost executor is being recovered leaves nothing half done, and
 * everything goes on by itself when it is back (I4, I14; K-085, K-197, K-229; bug reports 3 and 28).
 * Method: a server of its own; the scanner stands still between the two steps of a revocation, and
 * the server is killed under it.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect } from "effect"
import * as Server from "./support/Server.ts"
import { runOn, steady } from "./support/World.ts"

const itemCount = 250

describe("a database that crashes", () => {
  it.live(
    "during the recovery of 250 items loses none of them, and charges each one loss",
    () =>
      Effect.scoped(
        Effect.flatMap(Server.make, (server) =>
          runOn(
            Effect.succeed(server),
            Effect.fnUntraced(function* (world) {
              const lost = yield* world.ready({
                slots: itemCount,
                settings: { leaseValidity: "15 seconds", watchdog: "12 seconds" }
              })
              yield* world.enqueue(
                Array.from(
                  { length: itemCount },
                  () =>
                    [
                      { do: "wait", gate: "go" },
                      { do: "step", name: "work" }
                    ] as const
                )
              )
              yield* world.until(
                "it holds all of them",
                () => world.sink.waiting("go") === itemCount
              )
              const scanner = yield* world.ready({
                settings: steady,
                slots: 50,
                faults: [{ at: "recovery.marked", do: "stop", turn: 1 }]
              })
              yield* lost.signal("SIGKILL")
              yield* world.until("the scanner stands between its two steps", () =>
                scanner.said().some((one) => one.say === "fault")
              )
              assert.strictEqual((yield* world.executor(lost.executor())).state, "revoking")
              const other = yield* world.ready({
                settings: { ...steady, recoveryScan: "1 hour" },
                slots: 50
              })
              yield* server.crash
              yield* scanner.signal("SIGCONT")
              yield* world.until("both have noticed", () =>
                [scanner, other].every(
                  (worker) => worker.logs("the listening session was lost").length > 0
                )
              )
              yield* server.restart
              yield* world.sink.open("go")
              yield* world.allSettled()
              const outcomes = yield* world.outcomes
              assert.strictEqual(outcomes.length, itemCount)
              assert.isTrue(
                outcomes.every(
                  (one) => one.outcome === "completed" && one.losses === 1 && one.attempt === 2
                )
              )
              assert.isFalse(scanner.hasEnded() || other.hasEnded())
              assert.strictEqual((yield* world.executor(lost.executor())).state, "revoked")
            })
          )
        )
      ),
    300_000
  )
})
