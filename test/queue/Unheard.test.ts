/**
 * Goal: with every notification lost, whoever waits still gets everything: work starts, results, failures,
 * cancellations and progress arrive, each within the poll interval, and nothing is lost. The notifications
 * themselves are a few bytes each, whatever they are about, and a server that can take no more of them
 * fails nobody's enqueue, settle, cancel or takeover (bug reports 24, 26 and 30 and their kind).
 * Method: two executors behind a proxy that keeps notifications to itself; a session that listens to all of
 * them; a server whose queue of notifications is small, and full.
 */
import { PgConnection } from "@effect/sql-pg"
import { assert, describe, it } from "@effect/vitest"
import { Effect, Exit, Fiber, Layer, Queue, Redacted, References, Schema, Stream } from "effect"
import { SqlClient } from "effect/sql"
import { appendFileSync, mkdtempSync, rmSync } from "node:fs"
import { tmpdir } from "node:os"
import { join } from "node:path"
import { Tenure, WorkQueue } from "tenure"
import { Database, parseEndpoint } from "../../src/database/Database.ts"
import { databaseName, role } from "../../src/database/EmbeddedCluster.ts"
import { endpoint, start } from "../../src/database/EmbeddedPostgres.ts"
import * as Migrations from "../../src/database/Migrations.ts"
import { processChannel, workChannel } from "../../src/queue/QueueStore.ts"
import * as Proxy from "../faults/support/Proxy.ts"
import * as K from "../kernel/kernel.ts"
import { connect, freshDatabase, layerOf } from "../support/Postgres.ts"

class Job extends WorkQueue.make("job", {
  payload: { name: Schema.String },
  success: Schema.String,
  error: Schema.Struct({ code: Schema.Int }),
  progress: Schema.Int
}) {}

const JobLive = Job.toLayer(
  Effect.fnUntraced(function* ({ name }, item) {
    yield* item.progress(1)
    if (name === "fails") return yield* Effect.fail({ code: 7 })
    if (name === "waits") return yield* Effect.never
    return name
  }),
  { concurrency: { perExecutor: 100 } }
)

const executorOn = (
  database: Parameters<typeof layerOf>[0],
  settings: NonNullable<Tenure.Options["settings"]>
) =>
  Layer.fresh(
    Tenure.layer({ application: "app", version: "app-v1", settings: { drain: 100, ...settings } })
  ).pipe(
    Layer.provide(layerOf(database)),
    Layer.provideMerge(Layer.succeed(References.MinimumLogLevel, "None" as const))
  )

describe("with all notifications lost", () => {
  it.live(
    "everything arrives by looking: starts, results, failures, cancellations, progress",
    () =>
      Effect.gen(function* () {
        const database = yield* freshDatabase
        const proxy = yield* Proxy.make(database.urlOf("worker"))
        yield* proxy.set("quiet", "tenure listener")
        const deaf = parseEndpoint({ url: Redacted.make(proxy.url) })
        assert(deaf._tag === "Success")
        const settings = { pollInterval: "1 second" } as const
        const watcher = yield* Layer.build(executorOn(deaf.success, settings))
        yield* Layer.build(JobLive.pipe(Layer.provide(executorOn(deaf.success, settings))))
        yield* Effect.gen(function* () {
          const rounds = 3
          for (let round = 0; round < rounds; round++) {
            const ids = yield* Job.enqueueAll(
              ["completes", "fails", "waits"].map((name) => ({ name }))
            )
            const [completes, fails, waits] = ids
            assert(completes !== undefined && fails !== undefined && waits !== undefined)
            // From another process: it has started.
            const reported = yield* Job.progress(waits).pipe(Stream.take(1), Stream.runCollect)
            assert.deepStrictEqual(reported, [1])
            yield* Job.cancel(waits)
            const exits = yield* Effect.forEach(ids, (id) => Effect.exit(Job.await(id)), {
              concurrency: 3
            })
            assert.deepStrictEqual(exits[0], Exit.succeed("completes"))
            assert.deepStrictEqual(exits[1], Exit.fail({ code: 7 }))
            assert.include(String(exits[2]), "it was cancelled")
            assert.deepStrictEqual(yield* Stream.runCollect(Job.progress(fails)), [1])
          }
          const sql = yield* SqlClient.SqlClient
          assert.deepStrictEqual(yield* sql`SELECT id FROM tenure.claimed WHERE queue_id > 0`, [])
        }).pipe(Effect.timeout("60 seconds"), Effect.provideContext(watcher))
      }).pipe(Effect.scoped),
    300_000
  )
})

describe("a notification", () => {
  it.live("is a few bytes, whatever it is about and however many it tells", () =>
    Effect.gen(function* () {
      const database = yield* freshDatabase
      const context = yield* Layer.build(
        JobLive.pipe(Layer.provideMerge(executorOn(database.worker, { payloadMax: 16_000_000 })))
      )
      yield* Effect.gen(function* () {
        const { id } = yield* Tenure.Executor
        const ear = yield* Effect.flatMap(
          PgConnection.make(database.api.config),
          (made) => made.pin
        )
        const queues = yield* Effect.forEach([workChannel, processChannel(id)], (channel) =>
          ear.listen(channel)
        )
        yield* Job.enqueue({ name: "x".repeat(1_000_000) }, { key: "k".repeat(1900) })
        const ids = yield* Job.enqueueAll(
          Array.from({ length: 2000 }, (_, n) => ({ name: String(n) }))
        )
        const sql = yield* SqlClient.SqlClient
        yield* Effect.forEach(
          ids,
          (one) => Effect.all([Job.await(one), Stream.runDrain(Job.progress(one))]),
          { concurrency: "unbounded" }
        )
        const lengths: Array<number> = []
        yield* sql`SELECT pg_notify(c, 'end') FROM unnest(ARRAY[${workChannel}, ${processChannel(id)}]) c`
        for (const queue of queues) {
          for (;;) {
            const { payload } = yield* Queue.take(queue)
            if (payload === "end") break
            lengths.push(payload.length)
          }
        }
        assert.isAbove(lengths.length, 1)
        assert.isBelow(Math.max(...lengths), 60)
      }).pipe(Effect.timeout("30 seconds"), Effect.provideContext(context))
    }).pipe(Effect.scoped)
  )
})

const folder = Effect.acquireRelease(
  Effect.sync(() => mkdtempSync(join(tmpdir(), "tenure-notify-"))),
  (made) => Effect.sync(() => rmSync(made, { recursive: true, force: true }))
)

describe("a server that can take no more notifications", () => {
  it.live(
    "refuses no enqueue, settle, cancel or takeover: whoever waits finds out by looking",
    () =>
      Effect.gen(function* () {
        const directory = yield* folder
        yield* Effect.scoped(Effect.orDie(start({ directory })))
        // The smallest there is: half a megabyte. A plain server has room for eight gigabytes.
        appendFileSync(
          join(directory, "data/postgresql.auto.conf"),
          "max_notify_queue_pages = 64\n"
        )
        const server = yield* Effect.orDie(start({ directory }))
        const owner = endpoint(server, role, databaseName)
        yield* Migrations.run().pipe(Effect.provideService(Database, owner))
        const sql = yield* connect(owner)
        // Who listens and stays in a transaction keeps everything that was sent since.
        const superuser = endpoint(server, "postgres", databaseName)
        const observer = yield* connect(superuser)
        const stuck = yield* connect(superuser, {
          connectionsMax: 1,
          idleInTransactionTimeout: "1 minute"
        })
        yield* Effect.forkScoped(
          Effect.andThen(
            stuck`LISTEN anything`,
            stuck.withTransaction(Effect.andThen(stuck`SELECT 1`, Effect.never))
          )
        )
        yield* K.eventually(
          "somebody is stuck",
          Effect.map(
            observer`SELECT FROM pg_stat_activity WHERE state = 'idle in transaction'`,
            (rows) => rows.length > 0
          )
        )
        let state = ""
        while (state === "") {
          state = yield* sql`SELECT pg_notify('anything', repeat('x', 7900))`.pipe(
            Effect.as(""),
            K.stateOf,
            Effect.catch(() => Effect.succeed(""))
          )
        }
        assert.strictEqual(state, "54000", "the queue is full")

        const settings = { pollInterval: "500 millis", presenceGrace: "Infinity" } as const
        const first = yield* Layer.build(
          JobLive.pipe(Layer.provideMerge(executorOn(owner, settings)))
        )
        yield* Effect.gen(function* () {
          const id = yield* Job.enqueue({ name: "completes" })
          assert.strictEqual(yield* Job.await(id), "completes")
          const inside = yield* sql.withTransaction(Job.enqueue({ name: "completes" }))
          assert.strictEqual(yield* Job.await(inside), "completes")
          const running = yield* Job.enqueue({ name: "waits" })
          yield* Job.progress(running).pipe(Stream.take(1), Stream.runDrain)
          yield* Job.cancel(running)
          assert.include(String(yield* Effect.exit(Job.await(running))), "it was cancelled")
          const delayed = yield* Job.enqueue({ name: "waits" }, { delay: "1 hour" })
          const awaited = yield* Effect.forkChild(Effect.exit(Job.await(delayed)), {
            startImmediately: true
          })
          yield* K.eventually(
            "it is waited for",
            Effect.map(
              sql`SELECT FROM tenure.waiter WHERE item_id = ${delayed}::uuid`,
              (rows) => rows.length > 0
            )
          )
          yield* Job.cancel(delayed)
          assert.include(String(yield* Fiber.join(awaited)), "it was cancelled")
          // Left behind by an executor that is lost.
          const lost = yield* K.executorOf({ worker: owner }, { queue: "left" })
          const left = yield* K.enqueueOne(sql, "left", "1")
          yield* K.claim(lost, 1)
          const revoked = yield* K.loseExecutor(sql, lost.id)
          assert.strictEqual(revoked.requeued, 1)
          assert.strictEqual(yield* K.placeOf(sql, left), "ready")
        }).pipe(Effect.timeout("60 seconds"), Effect.provideContext(first))
      }).pipe(Effect.scoped),
    120_000
  )
})
