/**
 * Goal: the main thread shows the watchdog's thread everything that owes progress, passes on what either
 * of them finds, and notices when the thread is gone.
 * Method: real actors under a real supervisor, an executor and a thread that only take notes.
 * Covers K-039..K-042, K-047, K-048, K-050, P-14, rows 26 and 27.
 */
import { assert, describe, it } from "@effect/vitest"
import { Clock, Context, Deferred, Effect, Layer, Logger, References, Schema } from "effect"
import { TestClock } from "effect/testing"
import { WorkQueue } from "tenure"
import { FaultPoint } from "tenure/testing"
import * as Actor from "../../src/actor/Actor.ts"
import * as Supervisor from "../../src/actor/Supervisor.ts"
import { LeaseLost } from "../../src/executor/HeldLease.ts"
import { ExecutorId } from "../../src/executor/Executor.ts"
import { WatchdogFired } from "../../src/executor/WatchdogFired.ts"
import type { Firing } from "../../src/watchdog/memory.js"
import { none, type Owed, type Thread, WatchdogThread } from "../../src/watchdog/WatchdogThread.ts"
import * as Watchdog from "../../src/watchdog/Watchdog.ts"
import { layerRuntime } from "../queue/runtime.ts"
import { quiesce } from "../actor/quiesce.ts"

const settings = { watchdog: 45_000, forcedExit: 5000, abandonAfter: 10_000, drain: 25_000 }
const id = ExecutorId.make("7f9c4c3e-0000-4000-8000-000000000001")

const scene = Effect.gen(function* () {
  const clock = yield* Clock.Clock
  const fired = yield* Deferred.make<never, WatchdogFired>()
  const lost = yield* Deferred.make<never, LeaseLost>()
  const byThread = yield* Deferred.make<Firing>()
  const gone = yield* Deferred.make<string>()
  const notes = {
    owed: undefined as Owed | undefined,
    told: [] as Array<Firing>,
    fired: [] as Array<string>,
    logged: [] as Array<unknown>,
    checked: 0,
    drained: 0,
    killed: 0,
    silent: false,
    trusted: true,
    trustedNanos: clock.monotonicTimeNanosUnsafe() + 45n
  }
  let beat = 1
  const thread: Thread = {
    ...(yield* none),
    writeUnsafe: (owed) => {
      notes.owed = owed
    },
    killUnsafe: () => void notes.killed++,
    firingUnsafe: (firing) => void notes.told.push(firing),
    beatUnsafe: () => (notes.silent ? beat : beat++),
    fired: Deferred.await(byThread),
    gone: Deferred.await(gone)
  }
  const executor: Watchdog.Watched = {
    id,
    settings,
    drain: Effect.sync(() => void notes.drained++),
    fireUnsafe: (reason, subject) => {
      notes.fired.push(subject === undefined ? reason : `${reason} ${subject}`)
      const given = subject === undefined ? {} : { subject }
      const error = new WatchdogFired({ executorId: id, reason, ...given })
      Deferred.doneUnsafe(fired, Effect.fail(error))
    },
    fired: Deferred.await(fired),
    lease: {
      checkUnsafe: () => void notes.checked++,
      isTrustedUnsafe: () => notes.trusted,
      lost: Deferred.await(lost),
      trustedUntilUnsafe: () => ({ monotonicNanos: notes.trustedNanos, uptimeNanos: 7n })
    }
  }
  const supervisor = yield* Supervisor.make()
  const logger = Logger.make(({ fiber, message }) => {
    const annotations = fiber.getRef(References.CurrentLogAnnotations)
    if (String(message) === "executor_watchdog") notes.logged.push(annotations)
  })
  const watchdog = yield* Watchdog.make.pipe(
    Effect.provideService(WatchdogThread, Effect.succeed(thread))
  )
  yield* watchdog
    .arm(executor, supervisor)
    .pipe(Effect.provideService(Logger.CurrentLoggers, new Set([logger])))
  yield* quiesce
  return {
    notes,
    supervisor,
    lose: (cause: LeaseLost["cause"]) =>
      Effect.andThen(Deferred.fail(lost, new LeaseLost({ executorId: id, cause })), quiesce),
    threadFires: (firing: Firing) => Effect.andThen(Deferred.succeed(byThread, firing), quiesce),
    threadEnds: Effect.andThen(Deferred.succeed(gone, "it ended with 1"), quiesce),
    fire: executor.fireUnsafe
  }
})

const owedBy = (owed: Owed | undefined) => new Map(owed?.actors ?? [])

const supervise = (
  supervisor: Supervisor.Service,
  name: string,
  step: Effect.Effect<Actor.Report>,
  options: Partial<Actor.Options> = {}
) =>
  Effect.gen(function* () {
    const actor = yield* Actor.make({ name, step, cadence: "1 second", ...options })
    yield* supervisor.supervise({ actor, shutdown: 0 })
    return actor
  })

const quietly = Effect.provideService(References.MinimumLogLevel, "None" as const)

describe("the watchdog's main half", () => {
  it.effect("shows the thread who owes progress, by the thread's own clock", () =>
    Effect.gen(function* () {
      const { notes, supervisor } = yield* scene
      const within = { progressWithin: "45 seconds" } as const
      yield* supervise(supervisor, "stuck", Effect.never, within)
      yield* supervise(supervisor, "idle", Effect.succeed({}), { ...within, cadence: Infinity })
      yield* supervise(supervisor, "unwatched", Effect.never)
      yield* supervise(supervisor, "busy", Effect.succeed({}), within)
      // The clock of this test is not the process's: it stands at zero, and moves when it is told to.
      yield* TestClock.adjust("30 seconds")
      const nowNanos = process.hrtime.bigint()
      const owed = owedBy(notes.owed)
      assert.sameMembers([...owed.keys()], ["stuck", "busy"])
      const leftSeconds = (nanos: bigint | undefined) =>
        Math.round(Number((nanos ?? 0n) - nowNanos) / 1e9)
      assert.strictEqual(leftSeconds(owed.get("stuck")), 15)
      assert.isAtLeast(leftSeconds(owed.get("busy")), 45)
      assert.strictEqual(leftSeconds(notes.owed?.mainNanos), 45)
      assert.strictEqual(leftSeconds(notes.owed?.leaseNanos), -30)
      assert.strictEqual(notes.owed?.uptimeNanos, 7n)
      assert.deepStrictEqual(notes.fired, [])
    })
  )

  it.effect("leaves the end to a lease that is in doubt, and to the late loop once it is not", () =>
    Effect.gen(function* () {
      const { notes, supervisor } = yield* scene
      yield* supervise(supervisor, "stuck", Effect.never, { progressWithin: "45 seconds" })
      notes.trustedNanos += 60_000_000_000n
      notes.trusted = false
      const isLaterThanLease = () =>
        (owedBy(notes.owed).get("stuck") ?? 0n) > (notes.owed?.leaseNanos ?? 0n)
      yield* TestClock.adjust("30 seconds")
      assert.isTrue(isLaterThanLease())
      notes.trusted = true
      yield* TestClock.adjust("10 seconds")
      assert.isFalse(isLaterThanLease())
    })
  )

  it.effect("passes on what the thread has found, without saying it a second time", () =>
    Effect.gen(function* () {
      const { notes, threadFires } = yield* scene
      yield* threadFires({ reason: "actor", subject: "executor_recovery" })
      assert.deepStrictEqual(notes.fired, ["actor executor_recovery"])
      assert.deepStrictEqual(notes.told, [{ reason: "actor", subject: "executor_recovery" }])
      assert.deepStrictEqual(notes.logged, [])
      assert.strictEqual(notes.checked, 0)
    })
  )

  it.effect("lets the lease itself find out that its time is over", () =>
    Effect.gen(function* () {
      for (const reason of ["lease", "suspended"] as const) {
        const { notes, threadFires } = yield* scene
        yield* threadFires({ reason, subject: undefined })
        assert.strictEqual(notes.checked, 1)
        assert.deepStrictEqual(notes.fired, [reason])
      }
    })
  )

  it.effect("tells the thread of a reason found elsewhere, and logs it once, with no payload", () =>
    Effect.gen(function* () {
      const { fire, notes } = yield* scene
      fire("starved", "orders")
      fire("stubborn", "orders")
      yield* quiesce
      assert.deepStrictEqual(notes.told, [{ reason: "starved", subject: "orders" }])
      assert.deepStrictEqual(notes.logged, [
        { executorId: id, reason: "starved", subject: "orders" }
      ])
    })
  )

  it.effect("lets no process outlive a lost lease, unless it gave the lease back", () =>
    Effect.gen(function* () {
      const left = yield* scene
      yield* left.lose("released")
      assert.deepStrictEqual(left.notes.told, [])
      const taken = yield* scene
      yield* taken.lose("revoked")
      assert.deepStrictEqual(taken.notes.told, [{ reason: "lease", subject: undefined }])
    })
  )

  it.effect("ends a process whose thread has gone, or says nothing any more", () =>
    Effect.gen(function* () {
      const ended = yield* scene
      yield* ended.threadEnds
      assert.deepStrictEqual(ended.notes.fired, ["watcher"])
      yield* TestClock.adjust("5 seconds")
      assert.strictEqual(ended.notes.killed, 0)
      yield* TestClock.adjust("1 second")
      assert.strictEqual(ended.notes.killed, 1)
      const stuck = yield* scene
      yield* TestClock.adjust("1 minute")
      assert.deepStrictEqual(stuck.notes.fired, [])
      stuck.notes.silent = true
      yield* TestClock.adjust("4 seconds")
      assert.deepStrictEqual(stuck.notes.fired, [])
      yield* TestClock.adjust("2 seconds")
      assert.deepStrictEqual(stuck.notes.fired, ["watcher"])
    }).pipe(quietly)
  )

  it.effect("ends a process that has lost a loop for good, when its own main does not", () =>
    Effect.gen(function* () {
      const { notes, supervisor } = yield* scene
      const die = Effect.die(new Error("a bug"))
      yield* supervise(supervisor, "broken", die, { progressWithin: "45 seconds" })
      yield* TestClock.adjust("20 seconds")
      assert.strictEqual(notes.drained, 1)
      assert.deepStrictEqual(notes.fired, [])
      yield* TestClock.adjust("30 seconds")
      assert.deepStrictEqual(notes.fired, ["actor broken"])
    }).pipe(quietly)
  )
})

const hiddenSupervisor = Effect.map(Effect.context<never>(), (context) =>
  Context.getUnsafe(context, Supervisor.Supervisor)
)

class Job extends WorkQueue.make("job", { payload: {}, success: Schema.String }) {}
const JobLive = Job.toLayer(() => Effect.succeed("done"))

describe("the loops of an executor", () => {
  it.live("owe progress within the watchdog's time, and not within that of another profile", () =>
    Effect.gen(function* () {
      yield* Layer.build(JobLive)
      const supervisor = yield* hiddenSupervisor
      const started = (yield* Clock.Clock).monotonicTimeNanosUnsafe()
      const critical = [
        "executor_coordination",
        "executor_recovery",
        "stale_claim_sweep",
        "queue_wake",
        "queue_audit",
        "queue_claimer job"
      ]
      for (const name of critical) {
        const actor = supervisor.actors().find((one) => one.name === name)
        assert.isDefined(
          actor,
          `${name} of ${supervisor
            .actors()
            .map((one) => one.name)
            .join()}`
        )
        actor?.wakeUnsafe()
        const deadline = actor?.progress().deadlineNanos
        assert.isDefined(deadline, name)
        // The default of 45 s would be too late.
        assert.isBelow(Number((deadline ?? 0n) - started) / 1e9, 44, name)
      }
    }).pipe(
      Effect.provide(layerRuntime({ settings: { watchdog: "40 seconds", probe: "5 seconds" } })),
      Effect.scoped
    )
  )

  it.live("are restarted after a defect, and nothing is lost", () =>
    Effect.gen(function* () {
      yield* Layer.build(JobLive)
      const supervisor = yield* hiddenSupervisor
      yield* Job.await(yield* Job.enqueue({}))
      for (const name of ["executor_coordination", "queue_claimer job"]) {
        const childOf = () => supervisor.children().find((one) => one.name === name)
        while (childOf()?.status === "restarting") yield* Effect.sleep("5 millis")
        assert.deepInclude(childOf(), { restarts: 1, status: "running" }, name)
        assert.include(childOf()?.lastCrash, "a bug", name)
      }
    }).pipe(
      Effect.provide(
        layerRuntime().pipe(
          Layer.provideMerge(
            Layer.sync(FaultPoint.FaultPoint, () => {
              const reached = new Set<string>()
              return (at) => {
                // Before there is any loop.
                if (at === "executor.registered" || reached.has(at)) return Effect.void
                reached.add(at)
                return Effect.die(new Error("a bug"))
              }
            })
          )
        )
      ),
      Effect.scoped
    )
  )
})
