/**
 * Goal: the examples of the README are code that compiles and does what is said of it.
 * Method: each is a module of this folder, compiled with the sources; here it is compared with its block in
 * the README, and run. The example of dead letters is run by queue/DeadLetter.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect, Layer, Logger, Option, References, Stream } from "effect"
import { SqlClient } from "effect/sql"
import { readdirSync, readFileSync } from "node:fs"
import { Group, Schedules, Tenure } from "tenure"
import { QueueRuntime } from "../../src/queue/QueueRuntime.ts"
import { layerRuntime } from "../queue/runtime.ts"
import { connect, freshDatabase, layerOf } from "../support/Postgres.ts"
import { present } from "../support/present.ts"
import * as Groups from "./groups.ts"
import * as Limits from "./limits.ts"
import * as Progress from "./progress.ts"
import * as Scheduled from "./schedules.ts"
import * as Transaction from "./transaction.ts"
import * as Waits from "./waits.ts"

const readme = readFileSync(new URL("../../README.md", import.meta.url), "utf8")

describe("the README", () => {
  for (const file of readdirSync(new URL(".", import.meta.url))) {
    if (file.endsWith(".test.ts")) continue
    it(`shows ${file} as it is`, () => {
      const block = readme.split(`<!-- example: ${file} -->\n\`\`\`ts\n`)[1]?.split("```")[0]
      assert.strictEqual(block, readFileSync(new URL(file, import.meta.url), "utf8"))
    })
  }
})

/** Beside a table of the application, fenced, which its handlers write. */
const withTable = Effect.fnUntraced(function* (table: string, columns: string) {
  const database = yield* freshDatabase
  const owner = yield* connect(database.owner)
  yield* owner.unsafe(`CREATE TABLE ${table} (${columns})`)
  yield* owner`SELECT tenure.fence_table(${table}::regclass)`
  yield* owner.unsafe(`GRANT SELECT, INSERT, UPDATE ON ${table} TO tenure_worker`)
  const runtime = Tenure.layer({ application: "app", version: "v1" }).pipe(
    Layer.provide(layerOf(database.worker))
  )
  return { owner, runtime }
})

describe("the README's example of", () => {
  it.live("waits delivers what is signed for", () =>
    Effect.gen(function* () {
      const id = yield* Waits.Delivery.enqueue({ orderId: "7" })
      yield* Waits.signed(id, "Ada")
      assert.strictEqual(yield* Waits.Delivery.await(id), "delivered")
    }).pipe(
      Effect.provide(
        Layer.merge(Waits.DeliveryLive, Waits.LabelLive).pipe(Layer.provideMerge(layerRuntime()))
      )
    )
  )

  it.live("limits sends what is handed in, and nothing while it is paused", () =>
    Effect.gen(function* () {
      const client = yield* Tenure.Client
      yield* client.ready
      yield* Layer.build(Limits.MailsLive)
      const { supervisor } = Option.getOrThrow(yield* Effect.serviceOption(QueueRuntime))
      const claimer = () =>
        present(supervisor.actors().find(({ name }) => name === "queue_claimer mails")).progress()
      const mails = Array.from({ length: 12 }, (_, n) => ({ tenant: `t${n % 3}`, to: `${n}` }))
      const during = yield* Limits.whilePaused(
        Effect.gen(function* () {
          // A claim that began before the pause may take what comes until it ends.
          while (claimer().inFlight) yield* Effect.sleep("5 millis")
          const ids = yield* Limits.Mails.enqueueAll(mails)
          yield* Effect.sleep("100 millis")
          assert.isTrue(Option.isNone(yield* Limits.Mails.poll(present(ids[0]))))
          return ids
        })
      )
      yield* Effect.forEach(during, (id) => Limits.Mails.await(id), { concurrency: "unbounded" })
    }).pipe(Effect.scoped, Effect.provide(layerRuntime()))
  )

  it.live("a transaction moves money once, or not at all", () =>
    Effect.gen(function* () {
      const { owner, runtime } = yield* withTable("account", "name text, cents int")
      yield* owner`INSERT INTO account VALUES ('a', 100), ('b', 0)`
      yield* Effect.gen(function* () {
        const transfer = (cents: number) =>
          Effect.flatMap(
            Transaction.Transfer.enqueue({ from: "a", to: "b", cents }),
            Transaction.Transfer.await
          )
        yield* transfer(70)
        const refused = yield* Effect.flip(transfer(70))
        assert.strictEqual(refused._tag, "NotEnough")
      }).pipe(Effect.provide(Transaction.TransferLive.pipe(Layer.provideMerge(runtime))))
      assert.deepStrictEqual(yield* owner`SELECT name, cents FROM account ORDER BY name`, [
        { name: "a", cents: 30 },
        { name: "b", cents: 70 }
      ])
      assert.deepStrictEqual(
        yield* owner`
          SELECT i.payload::text AS payload FROM tenure.item i JOIN tenure.queue q ON q.id = i.queue_id
           WHERE q.name = 'receipt'`,
        [{ payload: '{"of":"a"}' }]
      )
    }).pipe(Effect.scoped)
  )

  it.live("groups prints all pages, and then binds the book", () =>
    Effect.gen(function* () {
      const { owner, runtime } = yield* withTable("printed", "book text, page int")
      yield* Effect.gen(function* () {
        const group = yield* Groups.publish("Emma", 250)
        const ended = yield* Group.await(group)
        assert.deepInclude(ended, { completed: 250, failed: 0, cancelled: 0 })
        const { callback } = yield* Group.status(group)
        yield* Groups.Bind.await(Option.getOrThrow(callback))
        const rows = yield* owner<{ n: number }>`SELECT count(*)::int AS n FROM printed`
        assert.deepStrictEqual(rows, [{ n: 250 }])
        assert.strictEqual(yield* Groups.changed("Emma"), yield* Groups.changed("Emma"))
        assert.strictEqual(yield* Groups.opened("Emma"), yield* Groups.opened("Emma"))
      }).pipe(Effect.provide(Groups.PressLive.pipe(Layer.provideMerge(runtime))))
    }).pipe(Effect.scoped)
  )

  it.live(
    "schedules hands in an item at three in Istanbul, and those of a week that has passed",
    () =>
      Effect.gen(function* () {
        const sql = yield* SqlClient.SqlClient
        const [nightly] = yield* Schedules.list()
        assert.strictEqual(present(nightly).definition, "cron 0 3 * * * Europe/Istanbul")
        const { slots } = yield* Scheduled.again
        const done = sql<{ until: string }>`
        SELECT i.payload ->> 'until' AS until FROM tenure.done d JOIN tenure.item i ON i.id = d.id
         WHERE d.queue_id > 0 AND d.outcome = 'completed' ORDER BY i.seq`
        while ((yield* done).length < slots) yield* Effect.sleep("10 millis")
        assert.strictEqual(slots, 7)
        assert.strictEqual((yield* done)[0]?.until, "2025-11-01T00:00:00.000Z")
      }).pipe(Effect.provide(Scheduled.ReportsLive.pipe(Layer.provideMerge(layerRuntime()))))
  )

  it.live("progress tells how far an item is, and then how it went", () =>
    Effect.gen(function* () {
      const told: Array<string> = []
      const logger = Logger.make(({ message }) => void told.push(String(message)))
      const id = yield* Progress.Import.enqueue({ lines: ["a", "b", "c"] })
      yield* Progress.follow(id).pipe(
        Effect.provideService(Logger.CurrentLoggers, new Set([logger])),
        Effect.provideService(References.MinimumLogLevel, "Info" as const)
      )
      assert.strictEqual(told.at(-1), "3 of 3")
      assert.deepStrictEqual(yield* Stream.runCollect(Progress.Import.progress(id)), [
        { done: 3, of: 3 }
      ])
    }).pipe(Effect.provide(Progress.ImportLive.pipe(Layer.provideMerge(layerRuntime()))))
  )
})
