/**
 * Goal: a process that dies costs a parked item nothing, and a wake that it has begun is finished by its
 * peers, by the stale-claim sweep and by nothing else (rows 43 and 44 for items; I8, I13, I-033..I-041).
 * Method: a worker that kills itself between the two steps of a wake, and one that is killed while its
 * item waits. The threshold's minutes are not waited for: the claim is made older.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect } from "effect"
import { run, steady } from "./support/World.ts"

const program = [
  { do: "step", name: "before" },
  { do: "event", name: "go" },
  { do: "step", name: "after" }
] as const

const sweeping = { ...steady, staleClaimSweep: "200 millis" } as const

describe.concurrent("a process that dies", () => {
  it.live(
    "between taking a waiting item and making it available leaves it to the stale-claim sweep",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          // With the brief lease, whose end is waited for.
          const victim = yield* world.ready({
            faults: [{ at: "wait.claimed", do: "die", turn: 1 }]
          })
          const [item = ""] = yield* world.enqueue([program])
          yield* world.until("it is parked", () =>
            Effect.map(world.count("tenure.parked"), (count) => count === 1)
          )
          yield* world.sql`SELECT tenure.signal(${item}::uuid, 'go')`
          assert.strictEqual((yield* victim.ended).signal, "SIGKILL")
          assert.strictEqual(
            yield* world.count(
              `tenure.parked WHERE state = 'waking' AND claimed_by = '${victim.executor()}'`
            ),
            1
          )
          yield* world.ready({ settings: sweeping })
          // Its end as an executor gives back what it had claimed, and this is not of it.
          yield* world.until("the dead executor is revoked", () =>
            Effect.map(world.executor(victim.executor()), ({ state }) => state === "revoked")
          )
          assert.strictEqual(yield* world.count("tenure.parked WHERE state = 'waking'"), 1)
          yield* world.sql`UPDATE tenure.parked SET claimed_at = claimed_at - interval '3 minutes'`
          yield* world.allSettled()
          const [outcome] = yield* world.outcomes
          assert.deepInclude(outcome, { outcome: "completed", attempt: 2, losses: 0 })
          assert.deepStrictEqual(
            world.sink.arrivals().map((one) => [one.name, one.attempt]),
            [
              ["before", 1],
              ["after", 2]
            ]
          )
        })
      ),
    120_000
  )

  it.live(
    "while its item waits is not missed, and no loss is counted",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const victim = yield* world.ready({ settings: steady })
          const [item = ""] = yield* world.enqueue([
            [{ do: "sleep", name: "nap", millis: 3_600_000 }, ...program]
          ])
          yield* world.until("it sleeps", () =>
            Effect.map(
              world.count("tenure.parked WHERE state = 'sleeping'"),
              (count) => count === 1
            )
          )
          yield* victim.signal("SIGKILL")
          yield* victim.ended
          yield* world.ready({ settings: steady })
          // The hour is nearly over.
          yield* world.sql`UPDATE tenure.wait SET due_at = tenure.clock() + interval '1 second'`
          const [due] = yield* world.sql<{ at: Date }>`
            UPDATE tenure.parked p SET due_at = w.due_at FROM tenure.wait w
             WHERE w.item_id = p.id RETURNING p.due_at AS at`
          yield* world.until("it waits for its event", () =>
            Effect.map(world.count("tenure.parked WHERE state = 'waiting'"), (count) => count === 1)
          )
          const [, second] = yield* world.attempts(item)
          assert.isTrue((second?.at ?? 0) >= (due?.at ?? Infinity), "not before its time")
          yield* world.sql`SELECT tenure.signal(${item}::uuid, 'go')`
          yield* world.allSettled()
          const [outcome] = yield* world.outcomes
          assert.deepInclude(outcome, { outcome: "completed", attempt: 3, losses: 0 })
          assert.strictEqual(world.sink.arrivalsOf("before").length, 1)
        })
      ),
    120_000
  )
})
