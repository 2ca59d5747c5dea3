/**
 * Goal: a value that its schema can encode comes back as it was, wherever it goes: payload, step, progress,
 * result, declared failure. What cannot be written is refused by name before it is, and how an item ends
 * can always be written, whatever its handler has died of (bug report 35 and its kind).
 * Method: the whole runtime, as the worker role; values made from the schema, and by hand those that other
 * systems are known to lose.
 */
import { assert, describe, it } from "@effect/vitest"
import { Cause, Effect, Exit, Layer, Option, Schedule, Schema, Stream } from "effect"
import * as Arbitrary from "effect/Arbitrary"
import { SqlClient } from "effect/sql"
import { Step, type Tenure, WorkQueue } from "tenure"
import { layerRuntime } from "./runtime.ts"

const Value = Schema.Struct({
  json: Schema.Json,
  number: Schema.Number,
  text: Schema.String,
  at: Schema.Date,
  big: Schema.BigInt,
  by: Schema.Record(Schema.String, Schema.Json),
  maybe: Schema.optional(Schema.String),
  bytes: Schema.Uint8Array
})
type Value = typeof Value.Type

class Broken extends Schema.TaggedError<Broken>()("Broken", { value: Value }) {}

class Echo extends WorkQueue.make("echo", {
  payload: { value: Value, breaks: Schema.Boolean },
  success: Value,
  error: Broken,
  progress: Value
}) {}

const EchoLive = Echo.toLayer(
  Effect.fnUntraced(function* ({ breaks, value }, item) {
    yield* item.progress(value)
    const stepped = yield* Step.run("keep", Effect.succeed(value), { success: Value })
    return breaks ? yield* new Broken({ value: stepped }) : stepped
  })
)

/** Any value at all, as `Schema.Any` lets it pass, and as nobody else would. */
class Loose extends WorkQueue.make("loose", {
  payload: { what: Schema.Any },
  success: Schema.Any,
  progress: Schema.Any
}) {}

const serving = <A, E, R, E2, R2>(
  queue: Layer.Layer<never, E2, R2>,
  body: Effect.Effect<A, E, R>,
  settings: NonNullable<Tenure.Options["settings"]> = {}
) => body.pipe(Effect.provide(Layer.provideMerge(queue, layerRuntime({ settings }))))

/** How the item ended, as whoever waits for it learns. */
const endOf = (id: WorkQueue.ItemId) =>
  Echo.await(id).pipe(Effect.exit, Effect.timeout("30 seconds"))

const errorOf = <A, E>(exit: Exit.Exit<A, E>): E => {
  assert(Exit.isFailure(exit))
  return Option.getOrThrow(Cause.findErrorOption(exit.cause))
}

const roundTrip = Effect.fnUntraced(function* (value: Value) {
  const [kept, broken] = yield* Echo.enqueueAll([
    { value, breaks: false },
    { value, breaks: true }
  ])
  assert(kept !== undefined && broken !== undefined)
  assert.deepStrictEqual(yield* endOf(kept), Exit.succeed(value))
  const failure = errorOf(yield* endOf(broken))
  assert(failure._tag === "Broken")
  assert.deepStrictEqual(failure.value, value)
  const [last] = yield* Stream.runCollect(Echo.progress(kept))
  assert.deepStrictEqual(last, value)
  const sql = yield* SqlClient.SqlClient
  const [step] = yield* sql<{ readonly value: unknown }>`
    SELECT value FROM tenure.step WHERE item_id = ${kept}::uuid`
  const decoded = yield* Schema.decodeUnknownEffect(Schema.toCodecJson(Value))(step?.value)
  assert.deepStrictEqual(decoded, value)
})

const nested = (levels: number): unknown => {
  let value: unknown = 0
  for (let level = 0; level < levels; level++) value = level % 2 === 0 ? [value] : { a: value }
  return value
}

const plain: Value = {
  json: null,
  number: 1,
  text: "",
  at: new Date(0),
  big: 1n,
  by: {},
  bytes: new Uint8Array()
}

const lostElsewhere: Readonly<Record<string, Partial<Value>>> = {
  "NUL characters": { text: "a\0b", json: ["\0"], by: { "\0": "\0" } },
  "half surrogate pairs": { text: "\ud800", json: "\udfff\ud800", by: { "\ud800": 1 } },
  "numbers that JSON has no word for": { number: Number.NaN },
  "an infinity": { number: -Infinity },
  "minus zero": { number: -0, json: [-0, { a: -0 }] },
  "the smallest and largest numbers": { number: 5e-324, json: [Number.MAX_VALUE, 2 ** 53 + 2] },
  "an integer past all numbers": { big: 2n ** 200n },
  "the year 10000 and the year -1": { at: new Date(Date.UTC(10_000, 0, 1)) },
  "the last instant there is": { at: new Date(8.64e15) },
  "the first instant there is": { at: new Date(-8.64e15) },
  "names that objects have of themselves": {
    json: JSON.parse(`{"__proto__": {"polluted": true}, "constructor": {"prototype": 1}}`),
    by: JSON.parse(`{"__proto__": {"polluted": true}, "toString": 1, "": 2, "length": 3}`)
  },
  "a field that is there and undefined": { maybe: undefined },
  "a thousand levels less a few": { json: nested(990) as Schema.Json },
  "a name of 30 KB": { by: { ["k".repeat(30_000)]: 1 } },
  bytes: { bytes: Uint8Array.from({ length: 256 }, (_, at) => at) }
}

describe("a value", () => {
  it.live("comes back as it was from everywhere, for any value of its schema", () =>
    serving(
      EchoLive,
      Effect.gen(function* () {
        const checked = yield* Arbitrary.checkEffect(
          Arbitrary.schema(Value),
          (value) => Effect.as(roundTrip(value), true),
          { runs: 25, concurrency: 8, seed: process.env["TENURE_SEED"] }
        )
        assert.strictEqual(checked._tag, "Passed", Arbitrary.formatCheckFailure(checked))
      })
    )
  )

  it.live("comes back as it was where others lose it, and changes no object of the process", () =>
    serving(
      EchoLive,
      Effect.gen(function* () {
        for (const [what, part] of Object.entries(lostElsewhere)) {
          yield* roundTrip({ ...plain, ...part }).pipe(
            Effect.catchDefect((defect) => Effect.die(new Error(what, { cause: defect })))
          )
        }
        assert.isUndefined(({} as { readonly polluted?: unknown }).polluted)
      })
    )
  )

  it.live("of 10 MB comes back where the limit allows it, and is refused where it does not", () =>
    serving(
      Loose.toLayer(({ what }) => Step.run("keep", Effect.succeed(what), { success: Schema.Any })),
      Effect.gen(function* () {
        const what = { text: `\0\ud800${"x".repeat(10_000_000)}` }
        const id = yield* Loose.enqueue({ what })
        assert.isTrue((yield* Loose.await(id)).text === what.text)
        const refused = yield* Effect.flip(Loose.enqueue({ what: [what, what] }))
        assert(refused._tag === "EnqueueRefused" && refused.reason._tag === "PayloadTooLarge")
        assert.strictEqual(refused.reason.bytesMax, 16_000_000)
      }),
      { payloadMax: 16_000_000 }
    )
  )
})

const cycle: Record<string, unknown> = {}
cycle["self"] = cycle

const throwing = {
  get a() {
    throw new Error("no")
  }
}

const doubled = (times: number): unknown => {
  let value: unknown = ["x"]
  for (let turn = 0; turn < times; turn++) value = [value, value]
  return value
}

/** Its schema lets it pass, and JSON would make something else of it, or never end. */
const unwritable: ReadonlyArray<readonly [what: string, value: unknown]> = [
  ["NaN", [Number.NaN]],
  ["an infinity", Infinity],
  ["a bigint", { a: 1n }],
  ["a Date", new Date()],
  ["an undefined field", { a: undefined }],
  ["a cycle", cycle],
  ["a getter that throws", throwing],
  ["10,000 levels", nested(10_000)],
  ["two of each, sixty times over", doubled(60)]
]

describe("a payload that cannot be written", () => {
  it.live("is refused by name, and nothing of its batch is written", () =>
    serving(
      Layer.empty,
      Effect.gen(function* () {
        class Strict extends WorkQueue.make("strict", {
          payload: { what: Schema.Unknown, at: Schema.optionalKey(Schema.Date) }
        }) {}
        for (const queue of [Loose, Strict]) {
          for (const [name, what] of unwritable) {
            const refused = yield* Effect.flip(queue.enqueueAll([{ what: 1 }, { what }]))
            assert(refused._tag === "EnqueueRefused", name)
            assert.include(["PayloadNotJson", "PayloadTooLarge"], refused.reason._tag, name)
            assert.isBelow(refused.message.length, 500, name)
          }
        }
        const never = yield* Effect.flip(
          Strict.enqueue({ what: 1, at: new Date(Number.NaN) })
        ).pipe(Effect.sandbox, Effect.flip)
        assert.isTrue(Cause.pretty(never).includes("Date"))
        const sql = yield* SqlClient.SqlClient
        assert.deepStrictEqual(yield* sql`SELECT id FROM tenure.item WHERE queue_id > 0`, [])
      })
    )
  )

  it.live("has a key that no index holds: it is refused by name, too", () =>
    serving(
      Layer.empty,
      Effect.gen(function* () {
        for (const key of ["", "\0", "\ud800", "x".repeat(10_000_000)]) {
          for (const option of ["key", "idempotencyKey"] as const) {
            const refused = yield* Effect.flip(Loose.enqueue({ what: 1 }, { [option]: key }))
            assert(refused._tag === "EnqueueRefused" && refused.reason._tag === "KeyRejected")
            assert.strictEqual(refused.reason.option, option)
            assert.isBelow(refused.message.length, 300)
          }
        }
        for (const name of ["", "\0", "\ud800", "x".repeat(201)]) {
          assert.throws(() => WorkQueue.make(name, { payload: {} }), RangeError)
        }
        const sql = yield* SqlClient.SqlClient
        assert.deepStrictEqual(yield* sql`SELECT id FROM tenure.item WHERE queue_id > 0`, [])
      })
    )
  )
})

/** The items' ends, by what the handler was told to do. All of them ran once, and none is left. */
const ends = Effect.fnUntraced(function* (
  cases: ReadonlyArray<string>,
  handle: (name: string, item: WorkQueue.Item<unknown>) => Effect.Effect<unknown, never, never>
) {
  const ran: Array<string> = []
  class Named extends WorkQueue.make("named", {
    payload: { name: Schema.String },
    success: Schema.Any,
    progress: Schema.Any
  }) {}
  return yield* serving(
    Named.toLayer(
      ({ name }, item) =>
        Effect.suspend(() => {
          ran.push(name)
          return name === "good" ? Effect.succeed("good") : handle(name, item)
        }),
      { retry: { times: 3, schedule: Schedule.spaced("1 millis") } }
    ),
    Effect.gen(function* () {
      // Each beside one that is in order, so that they leave for the database together.
      const names = cases.flatMap((name) => [name, "good"])
      const ids = yield* Named.enqueueAll(names.map((name) => ({ name })))
      const exits = yield* Effect.forEach(
        ids,
        (id) => Named.await(id).pipe(Effect.exit, Effect.timeout("30 seconds")),
        { concurrency: "unbounded" }
      )
      const messages = new Map<string, string>()
      exits.forEach((exit, at) => {
        const name = names[at] ?? ""
        if (name === "good") return assert.deepStrictEqual(exit, Exit.succeed("good"))
        const failure = errorOf(exit)
        assert(failure._tag === "ItemFailed" && failure.reason._tag === "HandlerDied", name)
        messages.set(name, failure.reason.message)
        assert.isAtMost(failure.reason.message.length, 1000, name)
      })
      assert.deepStrictEqual(ran.filter((name) => name !== "good").sort(), [...cases].sort())
      const sql = yield* SqlClient.SqlClient
      assert.deepStrictEqual(yield* sql`SELECT id FROM tenure.claimed WHERE queue_id > 0`, [])
      return messages
    })
  )
})

describe("how an item ends", () => {
  it.live(
    "is written when its result cannot be: it has failed, is not run again, and says why",
    () =>
      Effect.gen(function* () {
        const values = new Map(unwritable)
        values.set("2 MB", "x".repeat(2_000_000))
        const messages = yield* ends([...values.keys()], (name) => Effect.succeed(values.get(name)))
        for (const [name, message] of messages) assert.match(message, /result/, name)
        assert.match(messages.get("2 MB") ?? "", /2000002 bytes, the limit is 1048576/)
        assert.match(messages.get("a cycle") ?? "", /a cycle/)
      })
  )

  it.live("is written whatever the handler has died of, and the process goes on", () =>
    Effect.gen(function* () {
      const hostile = new Error("x")
      Object.defineProperty(hostile, "message", {
        get: () => {
          throw new Error("no")
        }
      })
      const proxy = new Proxy(new Error("x"), {
        get: () => {
          throw new Error("no")
        },
        has: () => {
          throw new Error("no")
        },
        getPrototypeOf: () => {
          throw new Error("no")
        }
      })
      const deaths = new Map<string, unknown>([
        ["NUL", new Error("a\0b")],
        ["half a pair", new Error(`${"x".repeat(993)}😀`)],
        ["10 MB", new Error("x".repeat(10_000_000))],
        ["a getter", hostile],
        ["a proxy", proxy],
        ["a symbol", Symbol("no")],
        ["a symbol as message", Object.assign(new Error("x"), { message: Symbol("no") })],
        ["null", null],
        ["undefined", undefined],
        ["no prototype", Object.create(null)],
        ["a cycle as cause", new Error("x", { cause: cycle })]
      ])
      const messages = yield* ends([...deaths.keys()], (name) => Effect.die(deaths.get(name)))
      assert.strictEqual(messages.get("NUL"), "Error: a\0b")
      assert.strictEqual(messages.get("null"), "null")
      const thrown = yield* ends([...deaths.keys()], (name) =>
        Effect.sync(() => {
          throw deaths.get(name)
        })
      )
      assert.deepStrictEqual(thrown, messages)
    })
  )

  it.live("is written when a step's result or name, or a report, cannot be", () =>
    Effect.gen(function* () {
      const values = new Map(unwritable)
      values.set("2 MB", "x".repeat(2_000_000))
      const steps = yield* ends(
        [...values.keys()],
        (name) =>
          Step.run("s", Effect.succeed(values.get(name)), { success: Schema.Any }).pipe(
            Effect.orDie
          ) as never
      )
      for (const [name, message] of steps) assert.match(message, /StepResultRefused/, name)
      const names = yield* ends(
        ["\0", "\ud800", "x".repeat(5000)],
        (name) => Effect.orDie(Step.run(name, Effect.void)) as never
      )
      for (const [name, message] of names) assert.match(message, /StepNameRejected/, name)
      const reports = yield* ends(
        [...values.keys()],
        (name, item) => item.progress(values.get(name)) as never
      )
      for (const [name, message] of reports) assert.match(message, /ProgressRefused/, name)
    })
  )

  it.live("is written when the policy that judges a failure throws", () =>
    Effect.gen(function* () {
      class Judged extends WorkQueue.make("judged", {
        payload: { late: Schema.Boolean },
        error: Schema.Struct({ code: Schema.Int })
      }) {}
      yield* serving(
        Judged.toLayer(({ late }) => (late ? Effect.never : Effect.fail({ code: 1 })), {
          timeout: "100 millis",
          retry: {
            schedule: Schedule.modifyDelay(Schedule.forever, () => {
              throw new Error("a bug in the schedule")
            }),
            while: () => {
              throw new Error("a bug in while")
            }
          }
        }),
        Effect.gen(function* () {
          const [failing, late] = yield* Judged.enqueueAll([{ late: false }, { late: true }])
          assert(failing !== undefined && late !== undefined)
          const messageOf = Effect.fnUntraced(function* (id: WorkQueue.ItemId) {
            const exit = yield* Judged.await(id).pipe(Effect.exit, Effect.timeout("30 seconds"))
            const failure = errorOf(exit)
            assert("reason" in failure && failure.reason._tag === "HandlerDied")
            return failure.reason.message
          })
          assert.include(yield* messageOf(failing), "a bug in while")
          assert.include(yield* messageOf(late), "a bug in the schedule")
        })
      )
    })
  )
})
