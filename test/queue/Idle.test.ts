/**
 * Goal: queues with nothing to do send nothing, and what nobody told of is found by one statement for
 * all of them, within the poll interval.
 * Method: the whole runtime; its own actors say how often they have run. Work is handed in by SQL from
 * a session of no process of ours, so that no notification says where.
 */
import { assert, describe, it } from "@effect/vitest"
import { Context, Effect, Layer, Option, Schema } from "effect"
import { Tenure, WorkQueue } from "tenure"
import { Database } from "../../src/database/Database.ts"
import { QueueRuntime } from "../../src/queue/QueueRuntime.ts"
import { notifyWork } from "../../src/queue/QueueStore.ts"
import { connect, freshDatabase } from "../support/Postgres.ts"
import { present } from "../support/present.ts"

const names = ["one", "two", "three"] as const

const start = Effect.fnUntraced(function* (pollInterval: Tenure.Settings["pollInterval"]) {
  const database = yield* freshDatabase
  const ran: Array<string> = []
  const [first, ...rest] = names.map((name) =>
    WorkQueue.make(name, { payload: Schema.Struct({}) }).toLayer(() =>
      Effect.sync(() => void ran.push(name))
    )
  )
  const context = yield* Layer.build(
    Layer.mergeAll(present(first), ...rest).pipe(
      Layer.provideMerge(
        Tenure.layer({
          application: "app",
          version: "v1",
          settings: { drain: 100, pollInterval }
        })
      ),
      Layer.provide(Layer.succeed(Database, database.worker))
    )
  )
  const { supervisor } = Option.getOrThrow(
    Context.getOption(context as unknown as Context.Context<QueueRuntime>, QueueRuntime)
  )
  const actor = (name: string) =>
    present(supervisor.actors().find((one) => one.name === name)).progress()
  const claims = () => names.map((name) => actor(`queue_claimer ${name}`).steps)
  const looks = (count: number) =>
    Effect.suspend(() => {
      const until = actor("queue_wake").steps + count
      return eventually(() => actor("queue_wake").steps >= until)
    })
  // Up and heard, and every queue looked at since: what is found from now on is found by looking.
  yield* Effect.provideContext(
    Effect.flatMap(Tenure.Client, (client) => client.ready),
    context
  )
  yield* looks(2)
  yield* eventually(() =>
    names.every((name) => actor(`queue_claimer ${name}`).deadlineNanos === undefined)
  )
  const sql = yield* connect(database.api)
  return { actor, claims, looks, ran, sql }
})

const eventually = (condition: () => boolean) =>
  Effect.gen(function* () {
    while (!condition()) yield* Effect.sleep("5 millis")
  }).pipe(Effect.timeout("10 seconds"))

describe("an idle queue", () => {
  it.live("asks for nothing by itself, and owes nothing", () =>
    Effect.gen(function* () {
      const { actor, claims, looks } = yield* start("50 millis")
      const before = claims()
      yield* looks(10)
      assert.deepStrictEqual(claims(), before)
      for (const name of names) {
        assert.isUndefined(actor(`queue_claimer ${name}`).deadlineNanos)
      }
      assert.isDefined(actor("queue_wake").deadlineNanos)
    }).pipe(Effect.scoped)
  )

  it.live("finds what nobody told of, and only its own", () =>
    Effect.gen(function* () {
      const { claims, ran, sql } = yield* start("200 millis")
      const [one = 0, two, three = 0] = claims()
      yield* sql`SELECT tenure.enqueue('one', '{}'), tenure.enqueue('three', '{}')`
      yield* eventually(() => ran.length === 2)
      assert.deepStrictEqual(ran.toSorted(), ["one", "three"])
      const after = claims()
      assert.isAbove(after[0] ?? 0, one)
      assert.strictEqual(after[1], two)
      assert.isAbove(after[2] ?? 0, three)
    }).pipe(Effect.scoped)
  )

  it.live("is not looked at before its interval while notifications get through, but for one", () =>
    Effect.gen(function* () {
      const { looks, ran, sql } = yield* start("10 minutes")
      yield* sql`SELECT tenure.enqueue('two', '{}')`
      yield* looks(2)
      assert.deepStrictEqual(ran, [])
      const [queue] = yield* sql<{ id: number }>`SELECT id FROM tenure.queue WHERE name = 'two'`
      yield* notifyWork(sql, [present(queue).id])
      yield* eventually(() => ran.length === 1)
    }).pipe(Effect.scoped)
  )
})
