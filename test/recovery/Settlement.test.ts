/**
 * Goal: the application's own rows of a quarantined item are settled once, in the transaction in which it
 * leaves the quarantine, without its handler, and whatever goes wrong is tried again (Q1, Q2, K-112 to
 * K-117, K-119).
 * Method: the whole runtime, several executors in this process, on items that a lost executor has left.
 */
import { assert, describe, it } from "@effect/vitest"
import {
  DateTime,
  Deferred,
  Effect,
  Exit,
  Fiber,
  Layer,
  Logger,
  Option,
  Ref,
  References,
  Schema,
  Scope
} from "effect"
import { SqlClient } from "effect/sql"
import { Tenure, WorkQueue } from "tenure"
import { Database } from "../../src/database/Database.ts"
import { Settlement } from "../../src/recovery/Settlement.ts"
import * as K from "../kernel/kernel.ts"
import { pace } from "../support/pace.ts"
import { present } from "../support/present.ts"
import { connect, freshDatabase, type FreshDatabase } from "../support/Postgres.ts"

const secret = "a-secret"

class Refused extends Schema.TaggedError<Refused>()("Refused", { quoted: Schema.String }) {}

const queueOf = <const Name extends string>(name: Name) =>
  WorkQueue.make(name, { payload: { order: Schema.String } })

class Orders extends queueOf("orders") {}

/** With a table of the application that says which orders have failed, and how often. */
const scene = Effect.gen(function* () {
  const database = yield* freshDatabase
  const owner = yield* connect(database.owner)
  yield* owner`CREATE TABLE failed_order (id uuid NOT NULL, by text NOT NULL)`
  yield* owner`SELECT tenure.fence_table('failed_order')`
  yield* owner`GRANT SELECT, INSERT ON failed_order TO tenure_worker`
  return { database, owner }
})

/** So many items of the queue whose only executor is lost. */
const quarantine = (
  database: FreshDatabase,
  queue: string,
  count = 1,
  payload = `{"order":"${secret}"}`
) =>
  Effect.gen(function* () {
    const api = yield* K.sessionOf(database, "api")
    const owner = yield* K.sessionOf(database, "owner")
    const runner = yield* K.executorOf(database, { queue, recoveryMax: 1 })
    const { ids } = yield* K.enqueueAll(
      api,
      queue,
      Array.from({ length: count }, () => payload),
      { keys: Array.from({ length: count }, (_, n) => `key ${n}`) }
    )
    yield* K.claim(runner, count)
    const { exhausted } = yield* K.loseExecutor(owner, runner.id)
    assert.strictEqual(exhausted.length, count)
    return ids ?? []
  }).pipe(Effect.scoped)

const logging = () => {
  const lines: Array<string> = []
  const logger = Logger.make((entry) => void lines.push(Logger.formatJson.log(entry)))
  return { lines, layer: Logger.layer([logger]) }
}

const executor = (database: FreshDatabase, settings: Partial<Tenure.Options["settings"]> = {}) =>
  Layer.fresh(
    Tenure.layer({
      application: "app",
      version: "v1",
      settings: { drain: 100, abandonAfter: "1 second", ...settings }
    })
  ).pipe(Layer.provide(Layer.succeed(Database, database.worker)))

const start = <A, E>(layer: Layer.Layer<A, E>, log = logging()) =>
  Effect.gen(function* () {
    const scope = yield* Scope.fork(yield* Effect.scope)
    const context = yield* Layer.buildWithScope(
      Layer.provideMerge(
        layer,
        Layer.merge(log.layer, Layer.succeed(References.MinimumLogLevel, "Info" as const))
      ),
      scope
    )
    return { context, stop: Scope.close(scope, Exit.void), lines: log.lines }
  })

const write = (id: string, by: string) =>
  Effect.flatMap(
    SqlClient.SqlClient,
    (sql) => sql`INSERT INTO failed_order VALUES (${id}::uuid, ${by})`
  )

/** What `take` and `end` say of it. */
const stateOf = (owner: K.Sql, id: string) =>
  owner<{ state: string; failures: number; last_error_code: string | null; rows: number }>`
    SELECT state, failures, last_error_code,
           (SELECT count(*)::int FROM failed_order WHERE id = ${id}::uuid) AS rows
      FROM tenure.quarantine WHERE item_id = ${id}::uuid`

const until = <E>(what: string, condition: Effect.Effect<boolean, E>) =>
  Effect.gen(function* () {
    while (!(yield* condition)) yield* Effect.sleep("10 millis")
  }).pipe(
    Effect.timeoutOrElse({
      duration: "15 seconds",
      orElse: () => Effect.die(new Error(`never: ${what}`))
    })
  )

const settled = (owner: K.Sql, count = 1) =>
  until(
    `${count} settled`,
    Effect.map(
      owner`SELECT FROM tenure.quarantine WHERE state = 'settled'`,
      (rows) => rows.length === count
    )
  )

describe("a settlement", () => {
  it.live("writes the application's rows with the end of the quarantine, without the handler", () =>
    Effect.gen(function* () {
      const { database, owner } = yield* scene
      const [id = ""] = yield* quarantine(database, "orders")
      const told = yield* Ref.make<ReadonlyArray<unknown>>([])
      const process = yield* start(
        Orders.layerSettlement(
          Effect.fnUntraced(function* (payload, quarantined) {
            const sql = yield* SqlClient.SqlClient
            yield* write(quarantined.id, "settlement")
            const visible = yield* sql`
              SELECT state, failures, due_at > tenure.clock() AS postponed FROM tenure.quarantine`
            const elsewhere = yield* Effect.orDie(owner`SELECT FROM failed_order`)
            yield* Ref.update(told, (all) => [...all, payload, quarantined, visible, elsewhere])
          })
        ).pipe(Layer.provideMerge(executor(database)))
      )
      yield* settled(owner)
      const [row] = yield* owner<{ quarantined_at: Date; settled_by: string }>`
        SELECT quarantined_at, settled_by FROM tenure.quarantine`
      const { id: executorId } = yield* Tenure.Executor.pipe(Effect.provideContext(process.context))
      assert.strictEqual(row?.settled_by, executorId)
      assert.deepStrictEqual(yield* Ref.get(told), [
        { order: secret },
        {
          id,
          executions: 1,
          limit: "MAX_RECOVERY_ATTEMPTS_EXCEEDED",
          key: Option.some("key 0"),
          quarantinedAt: DateTime.fromDateUnsafe(present(row).quarantined_at)
        },
        // Charged before it began, so that a crash here costs the pause of a failure.
        [{ state: "open", failures: 1, postponed: true }],
        []
      ])
      assert.deepStrictEqual(yield* stateOf(owner, id), [
        { state: "settled", failures: 0, last_error_code: null, rows: 1 }
      ])
      const [outcome] = yield* owner<{ outcome: string; attempt: number }>`
        SELECT outcome, attempt FROM tenure.done WHERE id = ${id}::uuid`
      assert.deepStrictEqual(outcome, { outcome: "failed", attempt: 1 })
      assert.notInclude(process.lines.join("\n"), secret)
    }).pipe(Effect.scoped)
  )

  it.live("that fails in whatever way is rolled back, told without the payload, and repeated", () =>
    Effect.gen(function* () {
      const { database, owner } = yield* scene
      const names = ["fails", "dies", "hangs", "breaks"] as const
      const first: Record<
        (typeof names)[number],
        Effect.Effect<unknown, unknown, SqlClient.SqlClient>
      > = {
        fails: Effect.fail(new Refused({ quoted: secret })),
        dies: Effect.die(new RangeError(secret)),
        hangs: Effect.never,
        breaks: Effect.flatMap(SqlClient.SqlClient, (sql) => sql`SELECT 1 / 0, ${secret}`)
      }
      const ids = yield* Effect.forEach(names, (name) =>
        Effect.map(quarantine(database, name), ([id = ""]) => id)
      )
      const [unreadable = ""] = yield* quarantine(
        database,
        "unreadable",
        1,
        `{"order":["${secret}"]}`
      )
      const tried = new Set<string>()
      const settling = [...names, "unreadable" as const].map((name) =>
        queueOf(name).layerSettlement((_, { id }) =>
          Effect.suspend(() => {
            if (name === "unreadable" || tried.has(name)) return Effect.asVoid(write(id, name))
            tried.add(name)
            return Effect.andThen(write(id, name), first[name]).pipe(Effect.asVoid)
          })
        )
      )
      const process = yield* start(
        settling
          .reduce((all, one) => Layer.merge(all, one))
          .pipe(Layer.provideMerge(executor(database, { settleTimeout: "300 millis" })))
      )
      yield* settled(owner, names.length)
      for (const [n, error] of ["Refused", "RangeError", "Timeout", "SqlError 22012"].entries()) {
        const id = ids[n] ?? ""
        assert.deepStrictEqual(yield* stateOf(owner, id), [
          { state: "settled", failures: 1, last_error_code: error, rows: 1 }
        ])
        const told = process.lines
          .map(
            (line) => JSON.parse(line) as { message: unknown; level: string; annotations: unknown }
          )
          .filter((line) => JSON.stringify(line).includes(id) && line.level === "ERROR")
        assert.strictEqual(told.length, 1)
        assert.deepInclude(told[0], {
          message: "workflow_recovery_settlement",
          annotations: {
            actor: "workflow_recovery_settlement",
            item: id,
            queue: names[n],
            failures: 1,
            error
          }
        })
      }
      yield* until(
        "it is tried more than once",
        Effect.map(stateOf(owner, unreadable), ([row]) => (row?.failures ?? 0) >= 2)
      )
      const [left] = yield* stateOf(owner, unreadable)
      assert.deepInclude(left, { state: "open", last_error_code: "SchemaError", rows: 0 })
      assert.notInclude(process.lines.join("\n"), secret)
    }).pipe(Effect.scoped)
  )

  it.live("is done once by two processes that both try", () =>
    Effect.gen(function* () {
      const { database, owner } = yield* scene
      yield* quarantine(database, "orders", 40)
      const process = (by: string) =>
        start(
          Orders.layerSettlement((_, { id }) => Effect.asVoid(write(id, by))).pipe(
            Layer.provideMerge(executor(database))
          )
        )
      yield* Effect.all([process("one"), process("two")], { concurrency: 2 })
      yield* settled(owner, 40)
      assert.deepStrictEqual(
        yield* owner`SELECT count(*)::int AS rows, count(DISTINCT id)::int AS items FROM failed_order`,
        [{ rows: 40, items: 40 }]
      )
      assert.deepStrictEqual(yield* owner`SELECT FROM tenure.quarantine WHERE failures > 0`, [])
    }).pipe(Effect.scoped)
  )

  it.live("begins at once in the process that has found the item exhausted", () =>
    Effect.gen(function* () {
      const { database, owner } = yield* scene
      const started = yield* Deferred.make<void>()
      const settings = { executionsMax: 1, recoveryScan: "200 millis" } as const
      // Its own scanner would find it as well.
      const blind = { ...settings, recoveryScan: "10 minutes" } as const
      const lost = yield* start(
        Orders.toLayer(() =>
          Effect.andThen(Deferred.succeed(started, undefined), Effect.never)
        ).pipe(Layer.provideMerge(executor(database, blind)))
      )
      const id = yield* Orders.enqueue({ order: secret }).pipe(Effect.provideContext(lost.context))
      yield* Deferred.await(started)
      // It looks every 30 s, and has looked already.
      const process = yield* start(
        Orders.layerSettlement((_, { id }) => Effect.asVoid(write(id, "peer"))).pipe(
          Layer.provideMerge(executor(database, settings))
        )
      )
      const { actor } = Option.getOrThrow(
        yield* Effect.serviceOption(Settlement).pipe(
          Effect.provideContext(process.context as never)
        )
      ) as Settlement["Service"]
      yield* until(
        "it has looked",
        Effect.sync(() => actor.progress().steps > 0 && !actor.progress().inFlight)
      )
      const { id: victim } = yield* Tenure.Executor.pipe(Effect.provideContext(lost.context))
      yield* owner`UPDATE tenure.executor SET expires_at = tenure.clock() WHERE id = ${victim}::uuid`
      yield* settled(owner)
      assert.deepInclude((yield* stateOf(owner, id))[0], { rows: 1 })
    }).pipe(Effect.scoped)
  )

  it.live("that is cut off by the end of its layer is rolled back, and a peer goes on", () =>
    Effect.gen(function* () {
      const { database, owner } = yield* scene
      const [id = ""] = yield* quarantine(database, "orders")
      const written = yield* Deferred.make<void>()
      const first = yield* start(executor(database))
      yield* Layer.build(
        Orders.layerSettlement((_, { id }) =>
          write(id, "first").pipe(
            Effect.andThen(Deferred.succeed(written, undefined)),
            Effect.andThen(Effect.never)
          )
        )
      ).pipe(
        Effect.provideContext(first.context),
        Effect.andThen(Deferred.await(written)),
        Effect.scoped
      )
      // At once, and not when the server finds its session idle.
      assert.deepStrictEqual(
        yield* owner`SELECT item_id FROM tenure.quarantine FOR UPDATE NOWAIT`,
        [{ item_id: id }]
      )
      assert.deepStrictEqual(yield* stateOf(owner, id), [
        { state: "open", failures: 1, last_error_code: null, rows: 0 }
      ])
      assert.notInclude(first.lines.join("\n"), "workflow_recovery_settlement")
      yield* until(
        "its pause is over",
        Effect.map(
          owner`SELECT FROM tenure.quarantine WHERE due_at <= tenure.clock()`,
          (rows) => rows.length === 1
        )
      )
      yield* start(
        Orders.layerSettlement((_, { id }) => Effect.asVoid(write(id, "second"))).pipe(
          Layer.provideMerge(executor(database))
        )
      )
      yield* settled(owner)
      assert.deepStrictEqual(yield* owner`SELECT by FROM failed_order`, [{ by: "second" }])
    }).pipe(Effect.scoped)
  )

  it.live("that ignores its interruption ends the process, because it keeps a connection", () =>
    Effect.gen(function* () {
      const { database } = yield* scene
      yield* quarantine(database, "orders")
      const gate = yield* Deferred.make<void>()
      const process = yield* start(
        Orders.layerSettlement(() => Effect.uninterruptible(Deferred.await(gate))).pipe(
          Layer.provideMerge(
            executor(database, {
              // An outcome of the probe has to get into the database in that time, too.
              settleTimeout: 1000 * pace,
              cancelGrace: "50 millis",
              abandonAfter: "100 millis"
            })
          )
        )
      )
      const { fired } = yield* Tenure.Executor.pipe(Effect.provideContext(process.context))
      const reason = yield* Effect.flip(fired)
      assert.deepInclude(reason, { reason: "stubborn", subject: "the settlement of orders" })
      yield* Deferred.succeed(gate, undefined)
    }).pipe(Effect.scoped)
  )

  it.live("costs nothing where no queue settles, and one look each 30 s where one does", () =>
    Effect.gen(function* () {
      const { database } = yield* scene
      const process = yield* start(executor(database))
      const { actor } = Option.getOrThrow(
        yield* Effect.serviceOption(Settlement).pipe(
          Effect.provideContext(process.context as never)
        )
      ) as Settlement["Service"]
      const rests = until(
        "it rests",
        Effect.sync(() => actor.progress().lastReport !== undefined && !actor.progress().inFlight)
      )
      yield* rests
      assert.isUndefined(actor.progress().deadlineNanos, "nothing is owed")
      yield* Layer.build(Orders.layerSettlement(() => Effect.void)).pipe(
        Effect.provideContext(process.context),
        Effect.andThen(actor.ask({ deadline: "5 seconds" })),
        Effect.andThen(
          until(
            "the next look is owed in 30 s",
            Effect.sync(() => {
              const { deadlineNanos = 0n, lastCompletedNanos = 0n } = actor.progress()
              // By then it has as long as a step may take: 98 s here.
              return deadlineNanos - lastCompletedNanos === 128_000_000_000n
            })
          )
        ),
        Effect.scoped
      )
      yield* actor.ask({ deadline: "5 seconds" })
      yield* until(
        "no look is owed any more",
        Effect.sync(() => actor.progress().deadlineNanos === undefined)
      )
    }).pipe(Effect.scoped)
  )

  it.live("is refused a second time, for another application's queue, and without the fence", () =>
    Effect.gen(function* () {
      const { database } = yield* scene
      const process = yield* start(
        Orders.layerSettlement(() => Effect.void).pipe(Layer.provideMerge(executor(database)))
      )
      const refusal = <E extends { readonly message: string }, R>(
        layer: Layer.Layer<never, E, R>
      ) => Effect.map(Effect.flip(Layer.build(layer)), ({ message }) => message)
      const settling = Orders.layerSettlement(() => Effect.void)
      yield* Effect.gen(function* () {
        assert.include(yield* refusal(settling), "duplicateHandler")
        const other = Layer.fresh(Tenure.layer({ application: "other", version: "v1" }))
        assert.include(
          yield* refusal(Layer.provide(settling, other)),
          "belongs to the application app"
        )
        const unguarded = { ...(yield* SqlClient.SqlClient), config: {} }
        assert.include(
          yield* refusal(
            Layer.provide(
              settling,
              Layer.succeed(SqlClient.SqlClient, unguarded as unknown as SqlClient.SqlClient)
            )
          ),
          "unguardedSqlClient"
        )
      }).pipe(
        Effect.provideContext(process.context),
        Effect.provide(Layer.succeed(Database, database.worker))
      )
    }).pipe(Effect.scoped)
  )
})

describe("a retry", () => {
  it.live("is the only way back: it runs the item again, and clears its quarantine", () =>
    Effect.gen(function* () {
      const { database, owner } = yield* scene
      const [id = ""] = yield* quarantine(database, "orders")
      const process = yield* start(
        Orders.toLayer(() => Effect.void).pipe(
          Layer.provideMerge(executor(database, { pollInterval: "200 millis" }))
        )
      )
      yield* Effect.gen(function* () {
        const awaited = yield* Effect.forkChild(Effect.flip(Orders.await(id as WorkQueue.ItemId)))
        const failure = yield* Fiber.join(awaited)
        assert.deepInclude(failure, { _tag: "ItemFailed" })
        assert.deepInclude((yield* stateOf(owner, id))[0], { state: "open" })
        yield* Orders.retry(id as WorkQueue.ItemId)
        yield* Orders.await(id as WorkQueue.ItemId)
        assert.deepStrictEqual(yield* stateOf(owner, id), [])
      }).pipe(Effect.provideContext(process.context))
    }).pipe(Effect.scoped)
  )
})
