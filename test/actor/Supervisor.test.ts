/**
 * Goal: no background fiber ends unseen, restarts are bounded, and an end of the process has an order and
 * a limit. Method: children that fail on command, in virtual time. Covers P-19, P-20, rows 6 and 26.
 */
import { assert, describe, it } from "@effect/vitest"
import { Deferred, Effect, Exit, Fiber, References, Schema, Scope } from "effect"
import { TestClock } from "effect/testing"
import * as Actor from "../../src/actor/Actor.ts"
import * as Supervisor from "../../src/actor/Supervisor.ts"
import { quiesce } from "./quiesce.ts"

class Broken extends Schema.TaggedError<Broken>()("Broken", {}) {
  override get message(): string {
    return "no table"
  }
}

const quietly = Effect.provideService(References.MinimumLogLevel, "None")

const makeActor = (name: string, step: Effect.Effect<Actor.Report, Broken>) =>
  Actor.make({ name, step, cadence: "1 second", onFailure: "escalate" })

const statusOf = (supervisor: Supervisor.Service, name: string) =>
  supervisor.children().find((child) => child.name === name)

describe("Supervisor order", () => {
  it.effect("starts children in the order given and stops them in reverse", () =>
    Effect.gen(function* () {
      const events: Array<string> = []
      const supervisor = yield* Supervisor.make()
      for (const name of ["lease", "scanner", "http"]) {
        yield* supervisor.supervise({
          name,
          run: Effect.onInterrupt(
            Effect.andThen(
              Effect.sync(() => events.push(`${name} starts`)),
              Effect.never
            ),
            () =>
              Effect.andThen(
                Effect.sleep("1 second"),
                Effect.sync(() => events.push(`${name} stops`))
              )
          )
        })
      }
      const join = yield* Effect.forkChild(supervisor.join)
      const stop = yield* Effect.forkChild(supervisor.stop)
      yield* TestClock.adjust("3 seconds")
      yield* Fiber.join(stop)
      assert.deepStrictEqual(events, [
        "lease starts",
        "scanner starts",
        "http starts",
        "http stops",
        "scanner stops",
        "lease stops"
      ])
      assert.isUndefined(join.pollUnsafe(), "a stop is no failure")
    })
  )

  it.effect("abandons a step that ignores interruption when its budget ends, and goes on", () =>
    Effect.gen(function* () {
      const supervisor = yield* Supervisor.make()
      const release = yield* Deferred.make<Actor.Report>()
      const lease = yield* makeActor("lease", Effect.succeed({}))
      const stubborn = yield* makeActor("stubborn", Effect.uninterruptible(Deferred.await(release)))
      yield* supervisor.supervise({ actor: lease })
      yield* supervisor.supervise({ actor: stubborn, shutdown: "2 seconds" })
      yield* supervisor.supervise({
        name: "server",
        run: Effect.uninterruptible(Deferred.await(release)),
        shutdown: "3 seconds"
      })
      yield* quiesce
      const stop = yield* Effect.forkChild(supervisor.stop)
      yield* TestClock.adjust("4999 millis")
      assert.isUndefined(stop.pollUnsafe())
      assert.strictEqual(lease.lifecycle, "running")
      yield* TestClock.adjust("1 milli")
      yield* Fiber.join(stop)
      assert.deepStrictEqual(
        supervisor.children().map(({ status }) => status),
        ["stopped", "abandoned", "abandoned"]
      )
      yield* Deferred.succeed(release, {})
    }).pipe(quietly)
  )

  it.effect("stops a child and forgets it when the scope that gave it closes", () =>
    Effect.gen(function* () {
      const supervisor = yield* Supervisor.make()
      const scope = yield* Scope.make()
      const claimer = yield* makeActor("claimer", Effect.succeed({}))
      yield* Scope.provide(supervisor.supervise({ actor: claimer }), scope)
      assert.deepStrictEqual(supervisor.actors(), [claimer])
      yield* quiesce
      yield* Scope.close(scope, Exit.void)
      assert.strictEqual(claimer.lifecycle, "stopped")
      assert.deepStrictEqual(supervisor.children(), [])
    })
  )

  it.effect("stops every child when its own scope closes", () =>
    Effect.gen(function* () {
      const scope = yield* Scope.make()
      const supervisor = yield* Scope.provide(Supervisor.make(), scope)
      const actor = yield* makeActor("scanner", Effect.succeed({}))
      yield* supervisor.supervise({ actor })
      yield* Scope.close(scope, Exit.void)
      assert.strictEqual(actor.lifecycle, "stopped")
    })
  )

  it.effect("refuses a child after the stop, a stopped actor, and a second child of one name", () =>
    Effect.gen(function* () {
      const supervisor = yield* Supervisor.make()
      const actor = yield* makeActor("scanner", Effect.succeed({}))
      const twin = yield* makeActor("scanner", Effect.succeed({}))
      const late = yield* makeActor("late", Effect.succeed({}))
      const over = yield* makeActor("over", Effect.succeed({}))
      yield* over.stop()
      assert.strictEqual((yield* Effect.flip(supervisor.supervise({ actor: over }))).actor, "over")
      yield* supervisor.supervise({ actor })
      assert.isTrue(Exit.hasDies(yield* Effect.exit(supervisor.supervise({ actor: twin }))))
      yield* supervisor.stop
      assert.strictEqual((yield* Effect.flip(supervisor.supervise({ actor: late }))).actor, "late")
      assert.strictEqual(late.lifecycle, "new")
    })
  )
})

describe("Supervisor restarts", () => {
  it.effect("restarts a loop in place, so that asks and handles outlive the crash", () =>
    Effect.gen(function* () {
      let attempts = 0
      const supervisor = yield* Supervisor.make()
      const actor = yield* makeActor(
        "scanner",
        Effect.suspend(() =>
          ++attempts === 1 ? Effect.die("a bug") : Effect.succeed({ attempts })
        )
      )
      yield* supervisor.supervise({ actor })
      yield* quiesce
      assert.strictEqual(actor.lifecycle, "crashed")
      const ask = yield* Effect.forkChild(actor.ask())
      yield* TestClock.adjust("200 millis")
      assert.deepStrictEqual(yield* Fiber.join(ask), { attempts: 2 })
      assert.deepStrictEqual(supervisor.children(), [
        { name: "scanner", status: "running", restarts: 1, lastCrash: "a bug" }
      ])
    }).pipe(quietly)
  )

  it.effect(
    "escalates the crash after the last restart, settles its askers, spares the others",
    () =>
      Effect.gen(function* () {
        let attempts = 0
        const supervisor = yield* Supervisor.make({ restarts: { max: 3, within: "1 minute" } })
        const healthy = yield* makeActor("healthy", Effect.succeed({}))
        const broken = yield* makeActor(
          "broken",
          Effect.suspend(() => {
            attempts++
            return attempts === 4 ? Effect.andThen(Effect.sleep(10), new Broken()) : new Broken()
          })
        )
        yield* supervisor.supervise({ actor: healthy })
        yield* supervisor.supervise({ actor: broken })
        const join = yield* Effect.forkChild(Effect.flip(supervisor.join))
        // Three pauses of at most 200, 400 and 800 ms stand before the fourth attempt.
        for (let i = 0; i < 1400 && attempts < 4; i++) yield* TestClock.adjust("1 milli")
        const ask = yield* Effect.forkChild(Effect.flip(broken.ask()))
        yield* TestClock.adjust("10 millis")
        const escalated = yield* Fiber.join(join)
        assert.deepStrictEqual(
          { ...escalated },
          { child: "broken", restarts: 3, reason: "Broken: no table", _tag: "Escalated" }
        )
        assert.strictEqual(attempts, 4)
        assert.strictEqual((yield* Fiber.join(ask))._tag, "Stopped")
        assert.strictEqual(statusOf(supervisor, "broken")?.status, "escalated")
        assert.strictEqual(healthy.lifecycle, "running")
        yield* TestClock.adjust("1 hour")
        assert.strictEqual(attempts, 4)
      }).pipe(quietly)
  )

  it.effect("escalates at the first crash of a child that allows no restart", () =>
    Effect.gen(function* () {
      const supervisor = yield* Supervisor.make()
      const lease = yield* makeActor("lease", Effect.fail(new Broken()))
      yield* supervisor.supervise({ actor: lease, restarts: 0 })
      const escalated = yield* Effect.flip(supervisor.join)
      assert.strictEqual(escalated.restarts, 0)
      assert.strictEqual(lease.progress().failures, 1)
    }).pipe(quietly)
  )

  it.effect("goes on for ever when crashes are rarer than the limit", () =>
    Effect.gen(function* () {
      const supervisor = yield* Supervisor.make({ restarts: { max: 2, within: "1 minute" } })
      yield* supervisor.supervise({
        name: "rare",
        run: Effect.andThen(Effect.sleep("31 seconds"), new Broken())
      })
      yield* TestClock.adjust("1 hour")
      assert.strictEqual(statusOf(supervisor, "rare")?.status, "running")
      assert.isAtLeast(statusOf(supervisor, "rare")?.restarts ?? 0, 110)
    }).pipe(quietly)
  )

  it.effect(
    "takes a run that ends without an error, or is interrupted from inside, for a crash",
    () =>
      Effect.gen(function* () {
        const held = new Set<number>()
        let runs = 0
        const supervisor = yield* Supervisor.make()
        yield* supervisor.supervise({
          name: "stream",
          run: Effect.gen(function* () {
            const run = ++runs
            yield* Effect.acquireRelease(
              Effect.sync(() => held.add(run)),
              () => Effect.sync(() => held.delete(run))
            )
            if (run === 1) return
            if (run === 2) return yield* Effect.interrupt
            return yield* Effect.never
          })
        })
        assert.strictEqual(statusOf(supervisor, "stream")?.lastCrash, "ended by itself")
        yield* TestClock.adjust("1 second")
        assert.strictEqual(statusOf(supervisor, "stream")?.lastCrash, "interrupted")
        assert.strictEqual(statusOf(supervisor, "stream")?.status, "running")
        assert.deepStrictEqual([...held], [3], "each run releases what it held")
        yield* supervisor.stop
        assert.deepStrictEqual([...held], [])
      }).pipe(quietly)
  )

  it.effect("escalates when a child kills the fiber that supervises it", () =>
    Effect.gen(function* () {
      const supervisor = yield* Supervisor.make()
      yield* supervisor.supervise({
        name: "hostile",
        run: Effect.withFiber((fiber) => {
          fiber.interruptUnsafe()
          return Effect.never
        })
      })
      assert.strictEqual((yield* Effect.flip(supervisor.join)).reason, "interrupted")
    }).pipe(quietly)
  )

  it.effect("does not restart a child while it stops, not even out of a restart pause", () =>
    Effect.gen(function* () {
      let attempts = 0
      const supervisor = yield* Supervisor.make()
      const step = Effect.suspend(() => {
        attempts++
        return new Broken()
      })
      yield* supervisor.supervise({ actor: yield* makeActor("actor", step) })
      yield* supervisor.supervise({ name: "run", run: step })
      yield* quiesce
      assert.deepStrictEqual(
        supervisor.children().map(({ status }) => status),
        ["restarting", "restarting"]
      )
      yield* supervisor.stop
      yield* TestClock.adjust("1 hour")
      assert.strictEqual(attempts, 2)
      assert.deepStrictEqual(
        supervisor.children().map(({ status }) => status),
        ["stopped", "stopped"]
      )
    }).pipe(quietly)
  )

  it.effect("takes an actor that its owner stops for stopped, not for crashed", () =>
    Effect.gen(function* () {
      const supervisor = yield* Supervisor.make()
      const actor = yield* makeActor("scanner", Effect.succeed({}))
      yield* supervisor.supervise({ actor })
      yield* quiesce
      yield* actor.stop()
      yield* TestClock.adjust("1 hour")
      assert.deepStrictEqual(supervisor.children(), [
        { name: "scanner", status: "stopped", restarts: 0, lastCrash: undefined }
      ])
    })
  )

  it.effect.prop(
    "admits at most the limit of restarts in any window, and refuses only past it",
    {
      gaps: Schema.Array(Schema.Int.check(Schema.isBetween({ minimum: 0, maximum: 40 }))),
      max: Schema.Int.check(Schema.isBetween({ minimum: 0, maximum: 4 }))
    },
    ({ gaps, max }) =>
      Effect.sync(() => {
        const limit = { max, withinNanos: 100n }
        const crashes: Array<bigint> = []
        let kept: ReadonlyArray<bigint> = []
        let now = 0n
        for (const gap of gaps) {
          now += BigInt(gap)
          crashes.push(now)
          const verdict = Supervisor.admitRestart(kept, now, limit)
          kept = verdict.crashedAtNanos
          const inWindow = crashes.filter((at) => now - at < limit.withinNanos).length
          assert.strictEqual(verdict.restart, inWindow <= max)
          assert.isAtMost(kept.length, inWindow)
          if (!verdict.restart) return
        }
      })
  )
})
