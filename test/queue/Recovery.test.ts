/**
 * Goal: work moves between executors exactly as far as versions, attempts and losses allow, and the
 * audit finds what no lease would.
 * Method: several executors in this process on one database; one is revoked from outside, as a peer
 * would, or loses the answer to its claim.
 * Covers K-079..K-081, K-086..K-099, K-104..K-111, K-125, K-126, K-178, K-217, K-218, I6, rows 2, 3 and finding 3.
 */
import { assert, describe, it } from "@effect/vitest"
import {
  Cause,
  Deferred,
  Duration,
  Effect,
  Exit,
  Layer,
  Option,
  Ref,
  References,
  Schema,
  Scope
} from "effect"
import { SqlClient } from "effect/sql"
import { Step, Tenure, WorkQueue } from "tenure"
import { connect, freshDatabase, type FreshDatabase, layerOf } from "../support/Postgres.ts"
import { QueueRuntime } from "../../src/queue/QueueRuntime.ts"
import { present } from "../support/present.ts"

class Job extends WorkQueue.make("job", {
  payload: { name: Schema.String },
  success: Schema.String
}) {}

const executor = (database: FreshDatabase, options: Partial<Tenure.Options> = {}) =>
  Layer.fresh(
    Tenure.layer({
      application: "app",
      version: "app-v1",
      settings: { drain: 100, pollInterval: "500 millis" },
      ...options
    })
  ).pipe(
    Layer.provide(layerOf(database.worker)),
    Layer.provideMerge(Layer.succeed(References.MinimumLogLevel, "None" as const))
  )

/** Builds in a scope of its own, that the test may close before the others. */
const start = <A, E>(layer: Layer.Layer<A, E>) =>
  Effect.gen(function* () {
    const scope = yield* Scope.fork(yield* Effect.scope)
    const context = yield* Layer.buildWithScope(layer, scope)
    return { context, stop: Scope.close(scope, Exit.void) }
  })

const revoke = (database: FreshDatabase, id: string) =>
  Effect.gen(function* () {
    const sql = yield* connect(database.owner)
    yield* sql`SELECT tenure.mark_revoking(${id}::uuid, true)`
    return yield* sql<{ requeued: number; exhausted: ReadonlyArray<string> }>`
      SELECT requeued, exhausted::text[] AS exhausted FROM tenure.revoke(${id}::uuid, '10 ms', '0')`
  })

const placeOf = (database: FreshDatabase, id: string) =>
  Effect.flatMap(connect(database.owner), (sql) =>
    Effect.map(
      sql<{
        place: string
        outcome: string | null
      }>`SELECT place, outcome FROM tenure.item_place(${id}::uuid)`,
      ([row]) => row?.outcome ?? row?.place
    )
  )

const hanging = (started: Deferred.Deferred<void>) =>
  Job.toLayer(() => Effect.andThen(Deferred.succeed(started, undefined), Effect.never))

describe("an item whose executor is lost", () => {
  it.live(
    "goes on elsewhere, replays its checkpoints, and runs only its unfinished steps again",
    () =>
      Effect.gen(function* () {
        const database = yield* freshDatabase
        const charged = yield* Ref.make<ReadonlyArray<string>>([])
        const reached = yield* Deferred.make<void>()
        const handler = (hangs: boolean) =>
          Job.toLayer(
            Effect.fnUntraced(function* ({ name }, item) {
              const charge = yield* Step.run(
                "charge",
                Ref.updateAndGet(charged, (all) => [...all, `${name}#${item.attempt}`]).pipe(
                  Effect.map((all) => all.length)
                ),
                { success: Schema.Int }
              )
              if (hangs) {
                yield* Deferred.succeed(reached, undefined)
                return yield* Effect.never
              }
              const receipt = yield* Step.run("receipt", Effect.succeed(new Date(5)), {
                success: Schema.Date
              })
              return `${charge} at ${receipt.getTime()} in attempt ${item.attempt}`
            })
          )
        const first = yield* start(Layer.provideMerge(handler(true), executor(database)))
        const id = yield* Job.enqueue({ name: "order" }).pipe(Effect.provideContext(first.context))
        yield* Deferred.await(reached)
        yield* revoke(
          database,
          (yield* Tenure.Executor.pipe(Effect.provideContext(first.context))).id
        )
        const second = yield* start(Layer.provideMerge(handler(false), executor(database)))
        const result = yield* Job.await(id).pipe(
          Effect.provideContext(second.context),
          Effect.timeout("10 seconds")
        )
        assert.strictEqual(result, "1 at 5 in attempt 2")
        assert.deepStrictEqual(yield* Ref.get(charged), ["order#1"])
      }).pipe(Effect.scoped)
  )

  it.live(
    "is quarantined after four losses in the transaction of the last, and not before",
    () =>
      Effect.gen(function* () {
        const database = yield* freshDatabase
        let id: WorkQueue.ItemId | undefined
        for (let loss = 1; loss <= 4; loss++) {
          const started = yield* Deferred.make<void>()
          const lost = yield* start(Layer.provideMerge(hanging(started), executor(database)))
          id ??= yield* Job.enqueue({ name: "poison" }).pipe(Effect.provideContext(lost.context))
          yield* Deferred.await(started)
          const [revoked] = yield* revoke(
            database,
            (yield* Tenure.Executor.pipe(Effect.provideContext(lost.context))).id
          )
          assert.deepStrictEqual(revoked?.exhausted, loss === 4 ? [id] : [])
          assert.strictEqual(
            yield* placeOf(database, id),
            loss === 4 ? "failed" : loss === 1 ? "ready" : "delayed"
          )
        }
        const watcher = yield* start(executor(database))
        const exit = yield* Effect.exit(Job.await(present(id))).pipe(
          Effect.provideContext(watcher.context)
        )
        const failure = Option.getOrThrow(
          Cause.findErrorOption((exit as Exit.Failure<string, WorkQueue.ItemFailed>).cause)
        )
        assert.deepStrictEqual(
          failure.reason,
          new WorkQueue.Quarantined({ executions: 4, limit: "MAX_RECOVERY_ATTEMPTS_EXCEEDED" })
        )
      }).pipe(Effect.scoped),
    300_000
  )

  it.live("is never run by another version, unless that version accepts it", () =>
    Effect.gen(function* () {
      const database = yield* freshDatabase
      const started = yield* Deferred.make<void>()
      const lost = yield* start(Layer.provideMerge(hanging(started), executor(database)))
      const id = yield* Job.enqueue({ name: "old" }).pipe(Effect.provideContext(lost.context))
      yield* Deferred.await(started)
      yield* revoke(database, (yield* Tenure.Executor.pipe(Effect.provideContext(lost.context))).id)
      const answering = (version: string) => Job.toLayer(() => Effect.succeed(version))
      const other = yield* start(
        Layer.provideMerge(answering("v2"), executor(database, { version: "app-v2" }))
      )
      // What it has not been started with is anybody's.
      const fresh = yield* Job.enqueue({ name: "fresh" }).pipe(Effect.provideContext(other.context))
      assert.strictEqual(yield* Job.await(fresh).pipe(Effect.provideContext(other.context)), "v2")
      assert.strictEqual(yield* placeOf(database, id), "ready")
      const accepting = yield* start(
        Layer.provideMerge(
          answering("v3"),
          executor(database, { version: "app-v3", accepts: ["app-v1"] })
        )
      )
      const result = yield* Job.await(id).pipe(
        Effect.provideContext(accepting.context),
        Effect.timeout("10 seconds")
      )
      assert.strictEqual(result, "v3")
    }).pipe(Effect.scoped)
  )

  it.live("or was retried belongs to the version that started it", () =>
    Effect.gen(function* () {
      const database = yield* freshDatabase
      const failed = yield* Deferred.make<void>()
      const first = yield* start(
        Layer.provideMerge(
          Job.toLayer(
            () =>
              Effect.andThen(
                Deferred.succeed(failed, undefined),
                new WorkQueue.RetryLater({ cause: "later", after: Duration.millis(300) })
              ),
            { retry: { times: 3 } }
          ),
          executor(database)
        )
      )
      const id = yield* Job.enqueue({ name: "retried" }).pipe(Effect.provideContext(first.context))
      yield* Deferred.await(failed)
      while ((yield* placeOf(database, id)) !== "delayed") yield* Effect.yieldNow
      yield* first.stop
      const sql = yield* connect(database.owner)
      const versions = yield* sql`
        SELECT l.version, l.suspect FROM tenure.delayed d JOIN tenure.lane l ON l.id = d.lane_id`
      assert.deepStrictEqual(versions, [{ version: "app-v1", suspect: false }])
    }).pipe(Effect.scoped)
  )

  it.live(
    "that was only waiting in the buffer at an orderly stop loses nothing and counts no loss",
    () =>
      Effect.gen(function* () {
        const database = yield* freshDatabase
        const started = yield* Deferred.make<void>()
        const first = yield* start(
          Layer.provideMerge(
            Job.toLayer(
              ({ name }) =>
                name === "0"
                  ? Effect.andThen(Deferred.succeed(started, undefined), Effect.never)
                  : Effect.succeed(name),
              { concurrency: { perExecutor: 1 } }
            ),
            executor(database)
          )
        )
        const ids = yield* Job.enqueueAll(
          Array.from({ length: 5 }, (_, n) => ({ name: String(n) }))
        ).pipe(Effect.provideContext(first.context))
        yield* Deferred.await(started)
        yield* first.stop
        const sql = yield* connect(database.owner)
        assert.deepStrictEqual(
          yield* sql`SELECT DISTINCT losses, failures FROM tenure.ready WHERE lane_id > 0`,
          [{ losses: 0, failures: 0 }]
        )
        assert.deepStrictEqual(yield* sql`SELECT id FROM tenure.claimed WHERE queue_id > 0`, [])
        const second = yield* start(
          Layer.provideMerge(
            Job.toLayer(({ name }) => Effect.succeed(name)),
            executor(database)
          )
        )
        const results = yield* Effect.forEach(ids, Job.await, { concurrency: 5 }).pipe(
          Effect.provideContext(second.context)
        )
        assert.deepStrictEqual(results, ["0", "1", "2", "3", "4"])
      }).pipe(Effect.scoped)
  )

  it.live("and got past the fence with a late claim is found by a later scan", () =>
    Effect.gen(function* () {
      const database = yield* freshDatabase
      const paused = yield* start(executor(database))
      const { id: owner } = yield* Tenure.Executor.pipe(Effect.provideContext(paused.context))
      yield* revoke(database, owner)
      const handler = Job.toLayer(({ name }, { attempt }) => Effect.succeed(`${name} ${attempt}`))
      const peer = yield* start(
        Layer.provideMerge(
          handler,
          executor(database, { settings: { recoveryScan: "20 millis", pollInterval: "1 minute" } })
        )
      )
      // Its first scans have passed before there is anything to find.
      const early = yield* Job.enqueue({ name: "early" }).pipe(Effect.provideContext(peer.context))
      assert.strictEqual(
        yield* Job.await(early).pipe(Effect.provideContext(peer.context)),
        "early 1"
      )
      const admin = yield* connect(database.owner)
      const id = yield* admin.withTransaction(
        Effect.gen(function* () {
          const id = yield* Job.enqueue({ name: "late" }).pipe(
            Effect.provideService(SqlClient.SqlClient, admin)
          )
          yield* admin`
            WITH taken AS (DELETE FROM tenure.ready RETURNING *)
            INSERT INTO tenure.claimed (id, queue_id, lane_id, owner, attempt, rank, seq, failures, losses, stuck,
                                        claimed_at)
            SELECT id, (SELECT id FROM tenure.queue), lane_id, ${owner}::uuid, attempt + 1, rank, seq, failures, losses,
                   stuck, tenure.clock() FROM taken`
          return id
        })
      )
      const result = yield* Job.await(id).pipe(
        Effect.provideContext(peer.context),
        Effect.timeout("10 seconds")
      )
      assert.strictEqual(result, "late 2")
    }).pipe(Effect.scoped)
  )

  it.live("holds no more than one suspect in a process, beside fresh work", () =>
    Effect.gen(function* () {
      const database = yield* freshDatabase
      const allStarted = yield* Deferred.make<void>()
      let count = 0
      const lost = yield* start(
        Layer.provideMerge(
          Job.toLayer(
            () =>
              Effect.suspend(() => {
                count++
                return Effect.andThen(
                  count === 6 ? Deferred.succeed(allStarted, undefined) : Effect.void,
                  Effect.never
                )
              }),
            { concurrency: { perExecutor: 6 } }
          ),
          executor(database)
        )
      )
      const suspects = yield* Job.enqueueAll(
        Array.from({ length: 6 }, () => ({ name: "suspect" }))
      ).pipe(Effect.provideContext(lost.context))
      yield* Deferred.await(allStarted)
      yield* revoke(database, (yield* Tenure.Executor.pipe(Effect.provideContext(lost.context))).id)
      let running = 0
      let highest = 0
      const next = yield* start(
        Layer.provideMerge(
          Job.toLayer(
            ({ name }) =>
              name === "fresh"
                ? Effect.succeed(name)
                : Effect.acquireUseRelease(
                    Effect.sync(() => (highest = Math.max(highest, ++running))),
                    () => Effect.sleep("10 millis"),
                    () => Effect.sync(() => running--)
                  ).pipe(Effect.as(name)),
            { concurrency: { perExecutor: 6 } }
          ),
          executor(database)
        )
      )
      const fresh = yield* Job.enqueueAll(
        Array.from({ length: 20 }, () => ({ name: "fresh" }))
      ).pipe(Effect.provideContext(next.context))
      yield* Effect.forEach([...suspects, ...fresh], Job.await, { concurrency: "unbounded" }).pipe(
        Effect.provideContext(next.context),
        Effect.timeout("10 seconds")
      )
      assert.strictEqual(highest, 1)
    }).pipe(Effect.scoped)
  )
})

describe("the audit", () => {
  it.live("hands back claims whose COMMIT answer was lost, and nothing that is held", () =>
    Effect.gen(function* () {
      const database = yield* freshDatabase
      const started = yield* Deferred.make<void>()
      const running = yield* start(
        Layer.provideMerge(
          Job.toLayer(
            ({ name }) =>
              name === "held"
                ? Effect.andThen(Deferred.succeed(started, undefined), Effect.never)
                : Effect.succeed(name),
            { concurrency: { perExecutor: 1 } }
          ),
          executor(database)
        )
      )
      yield* Job.enqueue({ name: "held" }).pipe(Effect.provideContext(running.context))
      yield* Deferred.await(started)
      const lost = yield* Job.enqueue({ name: "lost" }).pipe(Effect.provideContext(running.context))
      // As the lost answer leaves it: claimed by this executor, for a while, and unknown to it.
      const sql = yield* SqlClient.SqlClient.pipe(Effect.provideContext(running.context))
      const { id: owner } = yield* Tenure.Executor.pipe(Effect.provideContext(running.context))
      const admin = yield* connect(database.owner)
      yield* sql`SELECT 1`
      yield* admin`
        WITH taken AS (DELETE FROM tenure.ready WHERE lane_id > 0 RETURNING *)
        INSERT INTO tenure.claimed (id, queue_id, lane_id, owner, attempt, rank, seq, failures, losses, stuck, claimed_at)
        SELECT id, (SELECT id FROM tenure.queue), lane_id, ${owner}::uuid, attempt + 1, rank, seq, failures, losses, stuck,
               tenure.clock() - interval '11 seconds' FROM taken`
      yield* admin`UPDATE tenure.claimed SET claimed_at = claimed_at - interval '11 seconds' WHERE queue_id > 0`
      const { supervisor } = Option.getOrThrow(
        yield* Effect.serviceOption(QueueRuntime).pipe(
          Effect.provideContext(running.context as never)
        )
      ) as QueueRuntime["Service"]
      const audit = supervisor.actors().find((actor) => actor.name === "queue_audit")
      const report = yield* present(audit).ask({ deadline: "5 seconds" })
      assert.deepStrictEqual(report, { claims: 2, handedBack: 1 })
      while ((yield* placeOf(database, lost)) !== "ready") yield* Effect.yieldNow
    }).pipe(Effect.scoped)
  )
})
