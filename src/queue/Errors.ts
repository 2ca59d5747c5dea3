/** The errors of queues, by what the caller does next. None carries a payload. */
import { Schema } from "effect"

const mebibytes = (bytes: number): string => `${(bytes / 1_048_576).toFixed(2)} MiB`

export class PayloadTooLarge extends Schema.TaggedError<PayloadTooLarge>()("PayloadTooLarge", {
  bytes: Schema.Int,
  bytesMax: Schema.Int
}) {
  override get message(): string {
    return `the payload is ${mebibytes(this.bytes)}, the limit is ${mebibytes(this.bytesMax)}: store it elsewhere and hand in a reference`
  }
}

export class IdempotencyConflict extends Schema.TaggedError<IdempotencyConflict>()(
  "IdempotencyConflict",
  { key: Schema.String, existing: Schema.String }
) {
  override get message(): string {
    return `the idempotency key ${this.key} names item ${this.existing}, which has another payload: use another key`
  }
}

export class GroupClosed extends Schema.TaggedError<GroupClosed>()("GroupClosed", {
  group: Schema.String
}) {
  override get message(): string {
    return `group ${this.group} is sealed, or unknown: hand in all members before it is sealed`
  }
}

/** The schema lets it pass, and JSON cannot hold it: a cycle, a class, NaN, thousands of levels. */
export class PayloadNotJson extends Schema.TaggedError<PayloadNotJson>()("PayloadNotJson", {
  detail: Schema.String
}) {
  override get message(): string {
    return `the payload cannot be written as JSON: ${this.detail}`
  }
}

/** A key is a text that an index can hold: not empty, no NUL, no half of a surrogate pair, 2,000 bytes. */
export class KeyRejected extends Schema.TaggedError<KeyRejected>()("KeyRejected", {
  option: Schema.Literals(["key", "idempotencyKey"]),
  problem: Schema.String
}) {
  override get message(): string {
    return `its ${this.option} ${this.problem}: use another one, or a digest of it`
  }
}

/** The item was not accepted. Nothing was written. */
export class EnqueueRefused extends Schema.TaggedError<EnqueueRefused>()("EnqueueRefused", {
  queue: Schema.String,
  reason: Schema.Union([
    PayloadTooLarge,
    PayloadNotJson,
    KeyRejected,
    IdempotencyConflict,
    GroupClosed
  ])
}) {
  override get message(): string {
    return `Queue ${this.queue} refused the item: ${this.reason.message}.`
  }
}

export class Cancelled extends Schema.TaggedError<Cancelled>()("Cancelled", {}) {
  override get message(): string {
    return "it was cancelled"
  }
}

export class DeadlineExceeded extends Schema.TaggedError<DeadlineExceeded>()(
  "DeadlineExceeded",
  {}
) {
  override get message(): string {
    return "its deadline passed"
  }
}

/** `executions` executors were lost with it. Fix the cause before `retry`: that resets the protection. */
export class Quarantined extends Schema.TaggedError<Quarantined>()("Quarantined", {
  executions: Schema.Int,
  limit: Schema.Literals(["MAX_RECOVERY_ATTEMPTS_EXCEEDED", "EXECUTION_RECOVERY_EXHAUSTED"])
}) {
  override get message(): string {
    return `${this.executions} executors were lost while running it (${this.limit}): fix the cause, then retry it`
  }
}

export class HandlerDied extends Schema.TaggedError<HandlerDied>()("HandlerDied", {
  message: Schema.String
}) {}

/** Settled without the handler's own answer. None will come: `retry` after the cause is fixed. */
export class ItemFailed extends Schema.TaggedError<ItemFailed>()("ItemFailed", {
  id: Schema.String,
  reason: Schema.Union([Cancelled, DeadlineExceeded, Quarantined, HandlerDied])
}) {
  override get message(): string {
    return `Item ${this.id} gave no answer: ${this.reason.message}.`
  }
}

/** Raised by a handler: this attempt failed, try again. Never a result. `after` overrides the schedule once. */
export class RetryLater extends Schema.TaggedError<RetryLater>()("RetryLater", {
  cause: Schema.Defect(),
  after: Schema.optional(Schema.Duration)
}) {}

/**
 * A report that cannot be written: too large, or nothing that JSON can hold. The one before it stays.
 * A handler that lets it through fails for good: it is a bug.
 */
export class ProgressRefused extends Schema.TaggedError<ProgressRefused>()("ProgressRefused", {
  id: Schema.String,
  problem: Schema.String
}) {
  override get message(): string {
    return `The progress of item ${this.id} was not reported: ${this.problem}.`
  }
}

/** The id is unknown: it never existed, or retention has dropped it. */
export class UnknownId extends Schema.TaggedError<UnknownId>()("UnknownId", {
  kind: Schema.Literals(["item", "group", "execution", "run", "instance", "userTask", "schedule"]),
  id: Schema.String
}) {
  override get message(): string {
    return `No ${this.kind} ${this.id}: it never existed, or it is past its retention.`
  }
}

/** Someone else settled it first. Read its state; do not repeat the effect. */
export class AlreadySettled extends Schema.TaggedError<AlreadySettled>()("AlreadySettled", {
  id: Schema.String,
  state: Schema.Literals([
    "completed",
    "failed",
    "cancelled",
    "available",
    "leased",
    "delayed",
    "parked"
  ])
}) {
  override get message(): string {
    return `Item ${this.id} is ${this.state}: this call has changed nothing.`
  }
}

/** The attempt is over. Drop the result: a later attempt owns the item. */
export class StaleAttempt extends Schema.TaggedError<StaleAttempt>()("StaleAttempt", {
  id: Schema.String,
  attempt: Schema.Int
}) {
  override get message(): string {
    return `Attempt ${this.attempt} of item ${this.id} is over: its result is dropped, a later attempt owns the item.`
  }
}

/** Two steps of one item have the same name: the second would get the first one's result. */
export class StepNameReused extends Schema.TaggedError<StepNameReused>()("StepNameReused", {
  item: Schema.String,
  step: Schema.String
}) {
  override get message(): string {
    return `Item ${this.item} runs two steps named ${this.step}: give each a name of its own.`
  }
}

/** A name is a text that an index can hold: not empty, no NUL, no half of a surrogate pair, 2,000 bytes. */
export class StepNameRejected extends Schema.TaggedError<StepNameRejected>()("StepNameRejected", {
  item: Schema.String,
  problem: Schema.String
}) {
  override get message(): string {
    return `Item ${this.item} runs a step whose name ${this.problem}: choose another one.`
  }
}

/** The step has run, and its result cannot be stored: too large, or nothing that JSON can hold. */
export class StepResultRefused extends Schema.TaggedError<StepResultRefused>()(
  "StepResultRefused",
  { item: Schema.String, step: Schema.String, problem: Schema.String }
) {
  override get message(): string {
    return `Item ${this.item}: the result of the step ${this.step} cannot be stored: ${this.problem}. Store it elsewhere, and return a reference.`
  }
}

/** Names that begin with `~` are for what steps store beside their results. */
export class StepNameReserved extends Schema.TaggedError<StepNameReserved>()("StepNameReserved", {
  item: Schema.String,
  step: Schema.String
}) {
  override get message(): string {
    return `Item ${this.item} runs a step named ${this.step}: choose a name that does not begin with ~.`
  }
}

/**
 * A step's result is committed by itself, and would stay when the transaction of its handler is rolled
 * back with what the step has written.
 */
export class StepInTransaction extends Schema.TaggedError<StepInTransaction>()(
  "StepInTransaction",
  { item: Schema.String, step: Schema.String }
) {
  override get message(): string {
    return `Item ${this.item} runs the step ${this.step}, and its queue runs handlers in a transaction: take one or the other.`
  }
}
