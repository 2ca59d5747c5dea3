/**
 * Goal: readiness is the sum of marks that are there already and of the application's own checks, and
 * asking for it can neither hang nor pile up.
 * Method: the marks are set by hand, time is virtual.
 * Covers K-169..K-174.
 */
import { assert, describe, it } from "@effect/vitest"
import { Clock, Deferred, Effect, Fiber, type Scope } from "effect"
import { TestClock } from "effect/testing"
import type { Lifecycle, Progress } from "../../src/actor/Actor.ts"
import { LeaseUnverified } from "../../src/executor/HeldLease.ts"
import { Launch } from "../../src/executor/Launch.ts"
import * as Readiness from "../../src/http/Readiness.ts"

const idle: Progress = {
  steps: 1,
  failures: 0,
  lastReport: undefined,
  lastStartedNanos: 0n,
  lastCompletedNanos: 0n,
  inFlight: false,
  deadlineNanos: undefined
}

interface State {
  launched: boolean
  leaseHeld: boolean
  late: string
  stopped: string
}

const make = Effect.gen(function* () {
  const clock = yield* Clock.Clock
  const drained = yield* Deferred.make<void>()
  const state: State = { launched: true, leaseHeld: true, late: "", stopped: "" }
  const actor = (name: string) => ({
    name,
    get lifecycle(): Lifecycle {
      return state.stopped === name ? "stopped" : "running"
    },
    progress: () =>
      state.late === name ? { ...idle, deadlineNanos: clock.monotonicTimeNanosUnsafe() - 1n } : idle
  })
  const readiness = yield* Readiness.make({
    executor: {
      drained: Deferred.await(drained),
      lease: {
        checkUnsafe: () =>
          state.leaseHeld ? undefined : new LeaseUnverified({ executorId: "some" })
      }
    },
    supervisor: {
      actors: () => ["executor_coordination", "executor_recovery", "executor_probe"].map(actor)
    }
  }).pipe(
    Effect.provideService(Launch, {
      announce: () => Effect.void,
      isCompleteUnsafe: () => state.launched
    })
  )
  yield* Effect.yieldNow
  return { readiness, state, drain: Deferred.succeed(drained, undefined) }
})

const marks: ReadonlyArray<readonly [title: string, name: string, change: Partial<State>]> = [
  ["the layer is not up", "launched", { launched: false }],
  ["the lease is doubted", "lease", { leaseHeld: false }],
  ["renewals are late", "renewal", { late: "executor_coordination" }],
  ["renewals have stopped", "renewal", { stopped: "executor_coordination" }],
  ["scans are late", "scan", { late: "executor_recovery" }],
  ["scans have stopped", "scan", { stopped: "executor_recovery" }],
  ["probes are late", "probe", { late: "executor_probe" }],
  ["probes have stopped", "probe", { stopped: "executor_probe" }]
]

const failing = (
  change: (state: State) => void
): Effect.Effect<ReadonlyArray<string>, never, Scope.Scope> =>
  Effect.gen(function* () {
    const { readiness, state } = yield* make
    change(state)
    const report = yield* readiness.report
    assert.strictEqual(report.ready, Object.values(report.checks).every(Boolean))
    return Object.keys(report.checks).filter((name) => report.checks[name] === false)
  })

describe("a process", () => {
  it.effect("is ready when all marks are good", () =>
    Effect.map(
      failing(() => {}),
      (names) => assert.deepStrictEqual(names, [])
    )
  )

  for (const [title, name, change] of marks) {
    it.effect(`is unready by ${name} alone when ${title}`, () =>
      Effect.map(
        failing((state) => Object.assign(state, change)),
        (names) => assert.deepStrictEqual(names, [name])
      )
    )
  }

  it.effect("is unready from the moment a drain begins", () =>
    Effect.gen(function* () {
      const { drain, readiness } = yield* make
      yield* drain
      yield* Effect.yieldNow
      assert.strictEqual((yield* readiness.report).checks["admission"], false)
    })
  )
})

describe("a check of the application", () => {
  it.effect("counts as no when it fails or dies, and is gone with its scope", () =>
    Effect.gen(function* () {
      const { readiness } = yield* make
      yield* Effect.scoped(
        Effect.gen(function* () {
          yield* readiness.add("good", Effect.void)
          yield* readiness.add("failing", Effect.fail("payload"))
          yield* readiness.add("dying", Effect.die("payload"))
          const { checks, ready } = yield* readiness.report
          assert.isFalse(ready)
          assert.deepInclude(checks, { good: true, failing: false, dying: false })
        })
      )
      assert.isTrue((yield* readiness.report).ready)
    })
  )

  it.effect(
    "counts as no after five seconds without an answer, and runs once however many ask",
    () =>
      Effect.gen(function* () {
        const { readiness } = yield* make
        let runs = 0
        let running = 0
        const stubborn = Effect.suspend(() => {
          runs++
          running++
          return Effect.never
        }).pipe(
          Effect.ensuring(
            Effect.sync(() => {
              running--
            })
          )
        )
        yield* readiness.add("stubborn", stubborn)
        const asking = yield* Effect.forkChild(
          Effect.all([readiness.report, readiness.report, readiness.report], { concurrency: 3 })
        )
        yield* TestClock.adjust("4 seconds")
        assert.isUndefined(asking.pollUnsafe())
        yield* TestClock.adjust("1 second")
        const reports = yield* Fiber.join(asking)
        assert.deepStrictEqual(
          reports.map(({ checks }) => checks["stubborn"]),
          [false, false, false]
        )
        assert.deepStrictEqual({ runs, running }, { runs: 1, running: 0 })
      })
  )

  it.effect("that cannot be interrupted neither hangs who asks nor is started again", () =>
    Effect.gen(function* () {
      const { readiness } = yield* make
      const release = yield* Deferred.make<void>()
      let runs = 0
      const deaf = Effect.suspend(() => {
        runs++
        return Effect.uninterruptible(Deferred.await(release))
      })
      yield* readiness.add("deaf", deaf)
      for (let turn = 0; turn < 2; turn++) {
        const asking = yield* Effect.forkChild(readiness.report)
        yield* TestClock.adjust("5 seconds")
        assert.strictEqual((yield* Fiber.join(asking)).checks["deaf"], false)
      }
      assert.strictEqual(runs, 1)
      yield* Deferred.succeed(release, undefined)
    })
  )

  it.effect("of a name that is taken is a bug, and told as one", () =>
    Effect.gen(function* () {
      const { readiness } = yield* make
      const exit = yield* Effect.exit(readiness.add("lease", Effect.void))
      assert.include(String(exit), "two readiness checks are named lease")
    })
  )
})
