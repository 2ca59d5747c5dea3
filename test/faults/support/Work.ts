/**
 * The work that fault tests hand in: a program of small instructions, so that one worker plays every
 * part. Test and worker share this definition; what an instruction does is in worker-main.ts.
 */
import { Schema } from "effect"
import { WorkQueue } from "../../../src/index.ts"

const on = { onAttempt: Schema.optionalKey(Schema.Array(Schema.Int)) }

export const Instruction = Schema.Union([
  /** Durable waits, which park the item however short they are. */
  Schema.Struct({ do: Schema.Literal("sleep"), name: Schema.String, millis: Schema.Int, ...on }),
  Schema.Struct({ do: Schema.Literal("event"), name: Schema.String, ...on }),
  /** A durable step that posts to the sink; the sink's answer is its checkpoint. */
  Schema.Struct({ do: Schema.Literal("step"), name: Schema.String, ...on }),
  /** `Step.send`, to the sink. Who finds it unanswered asks the sink, sends it again, or is told `unknown`. */
  Schema.Struct({
    do: Schema.Literal("send"),
    name: Schema.String,
    resolve: Schema.Literals(["ask", "again", "none"]),
    ...on
  }),
  /** A post through the guarded client, without a step. */
  Schema.Struct({ do: Schema.Literal("post"), name: Schema.String, ...on }),
  /** Posts one after the other, without end. */
  Schema.Struct({ do: Schema.Literal("posts"), name: Schema.String, ...on }),
  /** A row in the fenced application table; or the item's only one, in a transaction of its own. */
  Schema.Struct({ do: Schema.Literals(["write", "write once"]), ...on }),
  /** The same, which nothing interrupts, and going on when it is refused. */
  Schema.Struct({ do: Schema.Literal("write regardless"), ...on }),
  /** Rows in the fenced table, one after the other, without end. */
  Schema.Struct({ do: Schema.Literal("writes"), ...on }),
  /** Waits until the test opens the gate. `stubborn` cannot be interrupted. */
  Schema.Struct({ do: Schema.Literals(["wait", "wait stubbornly"]), gate: Schema.String, ...on }),
  /** Asks `Lease.check` without a pause until it refuses. */
  Schema.Struct({ do: Schema.Literal("check"), ...on }),
  /** The event loop stands still: in JavaScript or in a native call for ever, in one for so long. */
  Schema.Struct({ do: Schema.Literals(["spin", "compute"]), ...on }),
  Schema.Struct({ do: Schema.Literal("block"), millis: Schema.Int, ...on }),
  /** The process finds itself unfit, as a monitor of ours would. */
  Schema.Struct({ do: Schema.Literal("fire"), ...on }),
  /** The wall clock goes two hours back and forth with each look at it, from now on. */
  Schema.Struct({ do: Schema.Literal("upset the clock"), ...on }),
  /** Ends the watchdog's thread. */
  Schema.Struct({ do: Schema.Literal("end the thread"), ...on }),
  /** SIGKILL or SIGSTOP to itself, out of memory, its own interruption. */
  Schema.Struct({ do: Schema.Literals(["die", "stop", "exhaust", "interrupt"]), ...on })
])
export type Instruction = typeof Instruction.Type

/** Must never be seen outside the database and the handler. */
export const secretOf = (seed: string): string => `secret-${seed}`

export class Work extends WorkQueue.make("work", {
  payload: { program: Schema.Array(Instruction), secret: Schema.String },
  success: Schema.Struct({
    attempt: Schema.Int,
    executor: Schema.String,
    steps: Schema.Record(Schema.String, Schema.String)
  })
}) {}

/** What a worker is told, as one JSON argument. */
export const Orders = Schema.Struct({
  url: Schema.String,
  sink: Schema.String,
  version: Schema.String,
  accepts: Schema.Array(Schema.String),
  profile: Schema.Literals(["default", "short"]),
  settings: Schema.Record(Schema.String, Schema.Unknown),
  slots: Schema.Int,
  globalLimit: Schema.optionalKey(Schema.Int),
  timeoutMillis: Schema.optionalKey(Schema.Int),
  retries: Schema.optionalKey(Schema.Int),
  transaction: Schema.optionalKey(Schema.Boolean),
  retryMillis: Schema.optionalKey(Schema.Int),
  /** Settles quarantined items with a row in `app.failed`. */
  settles: Schema.optionalKey(Schema.Boolean),
  /** Of the application: the layer is run by its own main, and not by ours. */
  ownMain: Schema.optionalKey(Schema.Boolean),
  /** A finalizer of the application's that never ends. */
  hungFinalizer: Schema.optionalKey(Schema.Boolean),
  /** At the n-th time the process comes to this place it kills itself, stops, or stays there. */
  faults: Schema.Array(
    Schema.Struct({
      at: Schema.String,
      do: Schema.Literals(["die", "stop", "stay"]),
      turn: Schema.Int
    })
  )
})
export type Orders = typeof Orders.Type

/** What a worker says, as one line of JSON behind the mark. */
export const Said = Schema.Union([
  Schema.Struct({ say: Schema.Literal("ready"), executor: Schema.String }),
  Schema.Struct({ say: Schema.Literal("started"), item: Schema.String, attempt: Schema.Int }),
  Schema.Struct({
    say: Schema.Literal("ended"),
    item: Schema.String,
    attempt: Schema.Int,
    exit: Schema.String
  }),
  Schema.Struct({ say: Schema.Literal("fault"), at: Schema.String }),
  /** The watchdog ends this process. */
  Schema.Struct({
    say: Schema.Literal("fired"),
    reason: Schema.String,
    subject: Schema.optionalKey(Schema.String)
  }),
  Schema.Struct({
    say: Schema.Literal("unknown"),
    item: Schema.String,
    step: Schema.String,
    key: Schema.String
  }),
  /** A write or an outbound call was refused: a SQLSTATE, or the tag of the lease's error. */
  Schema.Struct({ say: Schema.Literal("refused"), what: Schema.String, by: Schema.String }),
  Schema.Struct({ say: Schema.Literal("stopping"), instruction: Schema.String }),
  Schema.Struct({ say: Schema.Literal("checked"), checks: Schema.Int })
])
export type Said = typeof Said.Type
export const mark = "@said "
