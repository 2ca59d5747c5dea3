/**
 * A worker process of the fault tests: `Tenure.layer` under the worker's login, one queue, and what
 * it was ordered to suffer. Says what happens in lines on its standard output, beside the log, written
 * at once, so that the last one is out before the process kills itself.
 */
import { Effect, Layer, Option, Redacted, Schedule, Schema } from "effect"
import { FetchHttpClient, HttpClient, HttpClientRequest } from "effect/http"
import { SqlClient } from "effect/sql"
import { isSqlError } from "effect/sql/SqlError"
import { execFileSync } from "node:child_process"
import { pbkdf2Sync } from "node:crypto"
import { writeSync } from "node:fs"
import { Worker } from "node:worker_threads"
import { sqlState } from "../../../src/database/SqlState.ts"
import { Lease, Step, Tenure, Wait, type WorkQueue } from "../../../src/index.ts"
import type { Attempt } from "../../../src/queue/Step.ts"
import { FaultPoint } from "../../../src/testing/FaultPoint.ts"
import { type Instruction, mark, Orders, type Said, Work } from "./Work.ts"

const orders = Schema.decodeUnknownSync(Schema.fromJsonString(Orders))(process.argv[2])

const say = (said: Said) => void writeSync(1, `${mark}${JSON.stringify(said)}\n`)

const reached = new Map<string, number>()
const layerFaults = Layer.succeed(FaultPoint, (at) =>
  Effect.suspend(() => {
    const turn = (reached.get(at) ?? 0) + 1
    reached.set(at, turn)
    const fault = orders.faults.find((one) => one.at === at && one.turn === turn)
    if (fault === undefined) return Effect.void
    say({ say: "fault", at })
    if (fault.do === "stay") return Effect.never
    process.kill(process.pid, fault.do === "die" ? "SIGKILL" : "SIGSTOP")
    return Effect.void
  })
)

const tagOf = (error: unknown): string =>
  isSqlError(error)
    ? (sqlState(error) ?? error.reason._tag)
    : typeof error === "object" && error !== null && "_tag" in error
      ? String(error._tag)
      : String(error)

// On the defect too: a guarded client has no room for the lease's error in its own.
const saysRefusal =
  (what: string) =>
  <A, E, R>(effect: Effect.Effect<A, E, R>): Effect.Effect<A, E, R> =>
    Effect.tapCause(effect, (cause) =>
      Effect.sync(() => {
        for (const reason of cause.reasons) {
          if (reason._tag === "Interrupt") continue
          say({
            say: "refused",
            what,
            by: tagOf(reason._tag === "Fail" ? reason.error : reason.defect)
          })
        }
      })
    )

/** Of this process, which shows them to nobody. */
const threads: Array<Worker> = []
const unref = Worker.prototype.unref
Worker.prototype.unref = function () {
  threads.push(this)
  return unref.call(this)
}

const upsetClock = () => {
  const wallMillis = Date.now.bind(Date)
  let looks = 0
  Date.now = () => wallMillis() + (looks++ % 2 === 0 ? 7_200_000 : -7_200_000)
}

interface Running {
  readonly id: string
  readonly attempt: number
}

const post = (running: Running, name: string, key?: string) =>
  Effect.gen(function* () {
    const executor = yield* Tenure.Executor
    const client = yield* HttpClient.HttpClient
    const response = yield* client.execute(
      HttpClientRequest.post(`${orders.sink}/effect`).pipe(
        HttpClientRequest.bodyJsonUnsafe({
          item: running.id,
          attempt: running.attempt,
          executor: executor.id,
          name,
          ...(key === undefined ? {} : { key })
        })
      )
    )
    return yield* response.text
  }).pipe(saysRefusal("post"), Effect.orDie)

const ask = (key: string) =>
  Effect.gen(function* () {
    const response = yield* HttpClient.get(`${orders.sink}/key/${key}`)
    return response.status === 404 ? Option.none() : Option.some(yield* response.text)
  }).pipe(Effect.orDie)

const send = (
  { name, resolve }: Extract<Instruction, { readonly do: "send" }>,
  running: Running,
  steps: Record<string, string>
) => {
  const options = {
    send: (key: string) => post(running, name, key),
    success: Schema.String
  }
  const sent =
    resolve === "none"
      ? Step.send(name, options)
      : Step.send(name, {
          ...options,
          resolve: (key) => (resolve === "ask" ? ask(key) : Effect.succeedNone)
        })
  return sent.pipe(
    Effect.map((value) => void (steps[name] = value)),
    Effect.catchTag("OutcomeUnknown", ({ idempotencyKey: key, item, step }) =>
      Effect.sync(() => say({ say: "unknown", item, step, key }))
    )
  )
}

const write = (running: Running) =>
  Effect.gen(function* () {
    const executor = yield* Tenure.Executor
    const sql = yield* SqlClient.SqlClient
    yield* sql`
      INSERT INTO app.written (item, attempt, executor)
      VALUES (${running.id}::uuid, ${running.attempt}::int, ${executor.id}::uuid)`
  }).pipe(saysRefusal("write"))

const writeOnce = (running: Running) =>
  Effect.flatMap(SqlClient.SqlClient, (sql) =>
    sql.withTransaction(sql`
      INSERT INTO app.once (item, attempt) VALUES (${running.id}::uuid, ${running.attempt}::int)
      ON CONFLICT DO NOTHING`)
  ).pipe(saysRefusal("write"))

// Not through the guarded client: a gate is the test's hand, and no effect.
const wait = (gate: string) =>
  Effect.promise((signal) => fetch(`${orders.sink}/gate/${gate}`, { signal })).pipe(Effect.asVoid)

const check = Effect.gen(function* () {
  let checks = 0
  while (true) {
    const refused = yield* Effect.flip(Lease.check).pipe(Effect.option)
    checks++
    if (refused._tag === "Some") {
      say({ say: "checked", checks })
      say({ say: "refused", what: "check", by: refused.value._tag })
      return
    }
    yield* Effect.sleep("5 millis")
  }
})

const exhaust = Effect.sync(() => {
  const held: Array<Array<string>> = []
  for (;;) held.push(Array.from({ length: 10_000 }, (_, index) => `${held.length} ${index}`))
})

type Needs = Attempt | Tenure.Executor | HttpClient.HttpClient | SqlClient.SqlClient

const perform = (
  instruction: Instruction,
  running: Running,
  steps: Record<string, string>
): Effect.Effect<void, WorkQueue.AttemptFailure, Needs> => {
  switch (instruction.do) {
    case "step":
      return Step.run(instruction.name, post(running, instruction.name), {
        success: Schema.String
      }).pipe(
        saysRefusal("step"),
        Effect.map((value) => void (steps[instruction.name] = value))
      )
    case "sleep":
      return Wait.sleep(instruction.name, instruction.millis, { inMemory: 0 })
    case "event":
      return Wait.event(instruction.name)
    case "send":
      return send(instruction, running, steps)
    case "post":
      return Effect.asVoid(post(running, instruction.name))
    case "posts":
      return Effect.forever(post(running, instruction.name))
    case "write":
      return write(running)
    case "write regardless":
      return Effect.ignore(Effect.uninterruptible(write(running)))
    case "write once":
      return writeOnce(running)
    case "writes":
      return Effect.forever(write(running))
    case "wait":
      return wait(instruction.gate)
    case "wait stubbornly":
      return Effect.uninterruptible(wait(instruction.gate))
    case "check":
      return check
    case "exhaust":
      return exhaust
    case "interrupt":
      return Effect.interrupt
    case "spin":
      return Effect.sync(() => {
        for (;;);
      })
    case "compute":
      return Effect.sync(() => void pbkdf2Sync("p", "s", 1_000_000_000, 64, "sha512"))
    case "block":
      return Effect.sync(() => {
        execFileSync("sleep", [String(instruction.millis / 1000)], { stdio: "ignore" })
      })
    case "fire":
      return Effect.map(Tenure.Executor, ({ fireUnsafe }) => fireUnsafe("stubborn", "work"))
    case "upset the clock":
      return Effect.sync(upsetClock)
    case "end the thread":
      return Effect.promise(() => Promise.all(threads.map((thread) => thread.terminate())))
    case "die":
    case "stop":
      return Effect.sync(() => {
        say({ say: "stopping", instruction: instruction.do })
        process.kill(process.pid, instruction.do === "die" ? "SIGKILL" : "SIGSTOP")
      })
  }
}

const handle = Effect.fnUntraced(function* (
  payload: typeof Work.payloadSchema.Type,
  item: Running
) {
  const executor = yield* Tenure.Executor
  say({ say: "started", item: item.id, attempt: item.attempt })
  const steps: Record<string, string> = {}
  const runs = Effect.forEach(
    payload.program.filter((one) => one.onAttempt?.includes(item.attempt) ?? true),
    (instruction) => perform(instruction, item, steps),
    { discard: true }
  )
  yield* Effect.onExit(runs, (exit) =>
    Effect.sync(() => say({ say: "ended", item: item.id, attempt: item.attempt, exit: exit._tag }))
  )
  return { attempt: item.attempt, executor: executor.id, steps }
})

const WorkLive = Work.toLayer(handle, {
  concurrency: {
    perExecutor: orders.slots,
    ...(orders.globalLimit === undefined ? {} : { global: orders.globalLimit })
  },
  transaction: orders.transaction,
  ...(orders.timeoutMillis === undefined ? {} : { timeout: orders.timeoutMillis }),
  ...(orders.retries === undefined
    ? {}
    : { retry: { times: orders.retries, schedule: Schedule.spaced(orders.retryMillis ?? 1000) } })
})

const SettlementLive = Work.layerSettlement(
  Effect.fnUntraced(function* (_, { executions, id }) {
    const executor = yield* Tenure.Executor
    const sql = yield* SqlClient.SqlClient
    yield* sql`
      INSERT INTO app.failed (item, executions, executor)
      VALUES (${id}::uuid, ${executions}::int, ${executor.id}::uuid)`
  })
)

const Live = Layer.effectDiscard(
  Effect.gen(function* () {
    const { fired, id } = yield* Tenure.Executor
    // Not in a scope, which is closed because of it.
    yield* Effect.forkDetach(
      Effect.catch(fired, ({ reason, subject }) =>
        Effect.sync(() =>
          say({ say: "fired", reason, ...(subject === undefined ? {} : { subject }) })
        )
      )
    )
    if (orders.hungFinalizer === true) yield* Effect.addFinalizer(() => Effect.never)
    say({ say: "ready", executor: id })
  })
).pipe(
  Layer.provideMerge(WorkLive),
  Layer.provideMerge(orders.settles === true ? SettlementLive : Layer.empty),
  Layer.provide(Lease.layerHttpClient),
  Layer.provide(FetchHttpClient.layer),
  Layer.provideMerge(
    Tenure.layer({
      application: "faults",
      version: orders.version,
      accepts: orders.accepts,
      profile: orders.profile,
      settings: orders.settings
    })
  ),
  Layer.provide(Tenure.layerPostgres({ url: Redacted.make(orders.url) })),
  Layer.provide(layerFaults)
)

if (orders.ownMain === true) await Effect.runPromise(Layer.launch(Live))
else Tenure.runMain(Live)
