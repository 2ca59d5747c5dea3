/**
 * Goal: the probe tells whether this process can run work at all, whatever its business queues do, and
 * is seen to stall when it alone stalls (K-033..K-035, K-056..K-058, K-071, K-172, K-241; row 45).
 * Method: the whole runtime in this process on a real database; a fault point holds the private queue
 * alone. When something is late is a pure question, so nobody waits until it is.
 */
import { assert, describe, it } from "@effect/vitest"
import {
  Clock,
  Context,
  Deferred,
  Effect,
  Exit,
  Layer,
  Logger,
  Option,
  Schema,
  Scope
} from "effect"
import { Tenure, WorkQueue } from "tenure"
import type { Progress } from "../../src/actor/Actor.ts"
import { Database } from "../../src/database/Database.ts"
import * as Pool from "../../src/database/Pool.ts"
import * as Readiness from "../../src/http/Readiness.ts"
import { QueueRuntime } from "../../src/queue/QueueRuntime.ts"
import { FaultPoint } from "../../src/testing/FaultPoint.ts"
import { connect, freshDatabase } from "../support/Postgres.ts"
import { present } from "../support/present.ts"

class Work extends WorkQueue.make("work", { payload: { name: Schema.String } }) {}
class Stuck extends WorkQueue.make("stuck", { payload: { name: Schema.String } }) {}

/** A process: its parts, what it logs, and a gate in front of its private queue. */
const start = Effect.fnUntraced(function* <E>(
  queues: Layer.Layer<never, E, Tenure.Executor>,
  settings: Partial<Tenure.Settings> = {}
) {
  const database = yield* freshDatabase
  const lines: Array<string> = []
  const gate = yield* Deferred.make<void>()
  let isShut = false
  const scope = yield* Scope.fork(yield* Effect.scope)
  const context = yield* Layer.buildWithScope(
    Layer.provideMerge(
      queues,
      Tenure.layer({
        application: "app",
        version: "v1",
        settings: { drain: 100, probe: "100 millis", ...settings }
      })
    ).pipe(
      Layer.provide(Layer.succeed(Database, database.worker)),
      Layer.provide(
        Layer.succeed(FaultPoint, (at) =>
          isShut && at === "probe.running" ? Deferred.await(gate) : Effect.void
        )
      ),
      Layer.provide(
        Logger.layer([
          Logger.make(({ message }) => {
            lines.push(String(Array.isArray(message) ? message[0] : message))
          })
        ])
      )
    ),
    scope
  )
  const runtime = Option.getOrThrow(
    Context.getOption(context as unknown as Context.Context<QueueRuntime>, QueueRuntime)
  )
  const progressOf = (name: string): Progress =>
    present(runtime.supervisor.actors().find((actor) => actor.name === name)).progress()
  return {
    database,
    context,
    lines,
    progressOf,
    supervisor: runtime.supervisor,
    executor: runtime.executor,
    owner: yield* connect(database.owner),
    stop: Scope.close(scope, Exit.void),
    shut: Effect.sync(() => {
      isShut = true
    }),
    open: Deferred.succeed(gate, undefined),
    passes: (probes: number) =>
      Effect.suspend(() => {
        const before = progressOf("executor_probe").steps
        return eventually(`${probes} probes pass`, () =>
          Effect.succeed(progressOf("executor_probe").steps >= before + probes)
        )
      })
  }
})

const eventually = <E, R>(what: string, condition: () => Effect.Effect<boolean, E, R>) =>
  Effect.gen(function* () {
    while (!(yield* condition())) yield* Effect.sleep("5 millis")
  }).pipe(
    Effect.timeoutOrElse({
      duration: "30 seconds",
      orElse: () => Effect.die(new Error(`never: ${what}`))
    })
  )

describe("the probe", () => {
  it.live("passes while every business queue is full of handlers that obey nobody", () =>
    Effect.gen(function* () {
      const end = yield* Deferred.make<void>()
      let running = 0
      const stubborn = () =>
        Effect.sync(() => running++).pipe(
          Effect.andThen(Deferred.await(end)),
          Effect.uninterruptible
        )
      const process = yield* start(
        Layer.mergeAll(
          Work.toLayer(stubborn, { concurrency: { perExecutor: 2 } }),
          Stuck.toLayer(stubborn, { concurrency: { perExecutor: 1, global: 1 } })
        )
      )
      yield* Effect.gen(function* () {
        const names = Array.from({ length: 20 }, (_, n) => ({ name: String(n) }))
        yield* Work.enqueueAll(names)
        yield* Stuck.enqueueAll(names)
      }).pipe(Effect.provideContext(process.context))
      yield* eventually("all slots are taken", () => Effect.succeed(running === 3))
      yield* process.passes(5)
      assert.strictEqual(running, 3)
      yield* Deferred.succeed(end, undefined)
    }).pipe(Effect.scoped)
  )

  it.live("costs one claim each, tells nobody of its outcomes, and is in no log", () =>
    Effect.gen(function* () {
      const process = yield* start(
        Work.toLayer(() => Effect.void),
        // Nobody looks unless he was hinted.
        { pollInterval: "1 hour" }
      )
      // The listener is up by then, and has hinted every queue once.
      yield* Tenure.Client.pipe(
        Effect.flatMap((client) => client.ready),
        Effect.provideContext(process.context)
      )
      yield* process.passes(2)
      yield* eventually("it is told, and need not look for the outcome", () =>
        Effect.succeed(process.progressOf("executor_probe").lastReport?.["told"] === 1)
      )
      // On a busy machine one may take longer than its interval, and that is said.
      const lines = () => process.lines.filter((line) => !line.startsWith("executor_probe: "))
      const counted = () => ({
        claims: process.progressOf("probe_claimer").steps,
        passed: process.progressOf("executor_probe").steps,
        late: process.progressOf("executor_probe").failures,
        told: process.progressOf("queue_waker").steps,
        lines: lines().length
      })
      const before = counted()
      yield* process.passes(10)
      const after = counted()
      // One may be on its way, and one is the listener's hint. One that is late hints once more.
      const hints = after.passed - before.passed + after.late - before.late
      assert.isAtMost(after.claims - before.claims, hints + 2)
      assert.deepStrictEqual([after.told, after.lines], [before.told, before.lines])
      assert.deepStrictEqual(lines(), ["executor_startup"])
    }).pipe(Effect.scoped)
  )

  it.live("that stalls alone makes the process unready, while its heart and its work go on", () =>
    Effect.gen(function* () {
      const process = yield* start(
        Work.toLayer(() => Effect.void),
        { leaseRenewal: "50 millis", recoveryScan: "50 millis", probe: "200 millis" }
      )
      yield* process.passes(2)
      yield* process.shut
      const readinessAt = (nanos: bigint) =>
        Effect.gen(function* () {
          const clock = yield* Clock.Clock
          const shifted: Clock.Clock = { ...clock, monotonicTimeNanosUnsafe: () => nanos }
          const readiness = yield* Readiness.make(process).pipe(
            Effect.provideService(Clock.Clock, shifted)
          )
          return (yield* readiness.report).checks
        })
      yield* eventually("a probe has failed", () =>
        Effect.succeed(process.progressOf("executor_probe").failures > 0)
      )
      const deadline = () => present(process.progressOf("executor_probe").deadlineNanos)
      const stalled = deadline()
      // Whoever goes on is late later than the probe is.
      const others = ["executor_coordination", "executor_recovery", "queue_wake"]
      yield* eventually("heart and scans go on", () =>
        Effect.succeed(
          others.every((name) => present(process.progressOf(name).deadlineNanos) > stalled)
        )
      )
      const id = yield* Work.enqueue({ name: "healthy" }).pipe(
        Effect.provideContext(process.context)
      )
      yield* Work.await(id).pipe(Effect.provideContext(process.context))
      assert.strictEqual(deadline(), stalled, "failed probes are no progress")
      const good = {
        launched: true,
        renewal: true,
        scan: true,
        probe: true,
        lease: true,
        admission: true
      }
      assert.deepStrictEqual(yield* readinessAt(stalled), good)
      assert.deepStrictEqual(yield* readinessAt(stalled + 1n), { ...good, probe: false })
      assert.isTrue(process.lines.some((line) => line.startsWith("executor_probe: step failed")))

      // One item was waited for all the time; once somebody has settled it, nobody has to tell.
      const claimed = process.owner<{ id: string }>`
        SELECT c.id::text AS id FROM tenure.probe p JOIN tenure.claimed c ON c.id = p.item_id`
      yield* eventually("it is claimed", () => Effect.map(claimed, ({ length }) => length === 1))
      const outstanding = yield* claimed
      const sql = yield* Pool.make({
        database: process.database.worker,
        executorId: process.executor.id,
        applicationName: "tenure test",
        connectionsMax: 1,
        statementTimeout: "10 seconds",
        lockTimeout: "10 seconds",
        idleInTransactionTimeout: "10 seconds"
      })
      const { steps } = process.progressOf("executor_probe")
      const refused = yield* sql`
        SELECT status FROM tenure.settle(ARRAY[${present(outstanding[0]).id}::uuid], ARRAY[1],
                                         NULL, NULL, NULL, NULL, NULL)`
      assert.deepStrictEqual(refused, [])
      yield* eventually("it has passed", () =>
        Effect.succeed(process.progressOf("executor_probe").steps > steps)
      )
      yield* process.open
      yield* process.passes(1)
    }).pipe(Effect.scoped)
  )

  it.live("goes on through a long drain, and leaves nothing when the process has ended", () =>
    Effect.gen(function* () {
      const started = yield* Deferred.make<void>()
      const end = yield* Deferred.make<void>()
      const process = yield* start(
        Work.toLayer(() =>
          Effect.andThen(Deferred.succeed(started, undefined), Deferred.await(end))
        ),
        { drain: "20 seconds" }
      )
      yield* Work.enqueue({ name: "long" }).pipe(Effect.provideContext(process.context))
      yield* Deferred.await(started)
      yield* process.executor.drain
      yield* process.passes(3)
      yield* Deferred.succeed(end, undefined)
      yield* process.stop
      assert.deepStrictEqual(
        yield* process.owner`
          SELECT (SELECT state FROM tenure.executor) AS state, (SELECT count(*)::int FROM tenure.probe) AS probes,
                 (SELECT count(*)::int FROM tenure.item) AS items, (SELECT count(*)::int FROM tenure.done) AS done,
                 (SELECT count(*)::int FROM tenure.ready) + (SELECT count(*)::int FROM tenure.claimed) AS live`,
        [{ state: "released", probes: 0, items: 1, done: 1, live: 0 }]
      )
    }).pipe(Effect.scoped)
  )
})
