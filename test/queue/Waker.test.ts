/**
 * Goal: a hint is not late, and many cost little: nobody waits for one that would be the first, and none of
 * those that follow has a statement of its own.
 * Method: the waker alone, on a real connection that hears what is told, by a clock that stands still and
 * notes how long anybody would sleep.
 */
import { assert, it } from "@effect/vitest"
import { Clock, Duration, Effect } from "effect"
import { randomUUID } from "node:crypto"
import * as Waker from "../../src/queue/Waker.ts"
import { connect, freshDatabase } from "../support/Postgres.ts"

it.live("hints leave at once, and those soon after it together", () =>
  Effect.gen(function* () {
    const { api } = yield* freshDatabase
    const sql = yield* connect(api)
    const real = yield* Clock.Clock
    const sleeps: Array<number> = []
    const still: Clock.Clock = Object.assign(Object.create(real), {
      monotonicTimeNanosUnsafe: () => 0n,
      sleep: (duration: Duration.Duration) => {
        sleeps.push(Duration.toMillis(duration))
        return real.sleep(duration)
      }
    })
    yield* Effect.gen(function* () {
      const { actor, settledUnsafe } = yield* Waker.make(sql)
      yield* actor.start
      yield* actor.ask()
      const tell = (count: number) => {
        for (let n = 0; n < count; n++) settledUnsafe(randomUUID())
        return Effect.map(actor.ask(), () => actor.progress().lastReport?.["settled"])
      }
      assert.strictEqual(yield* tell(1), 1)
      assert.notInclude(sleeps, 4)
      assert.strictEqual(yield* tell(100), 100)
      assert.include(sleeps, 4)
    }).pipe(Effect.provideService(Clock.Clock, still))
  }).pipe(Effect.scoped)
)
