/**
 * One attempt at an item, as its handler's durable steps and waits see it: what earlier attempts have
 * stored, which names are taken, and what is going on.
 *
 *   running --a wait is pending, and no step runs--> parking: the handler is interrupted
 *
 * An attempt parks once, for all waits that are pending then. A step that runs beside a wait ends first,
 * and for a moment after it the branch it belongs to may begin the next one. Whatever else runs beside a
 * wait is not known here: it is interrupted, and runs again when the item wakes.
 */
import { Context, Effect } from "effect"
import type { SqlClient } from "effect/sql"
import type { SqlError } from "effect/sql/SqlError"
import type { HeldLease } from "../executor/HeldLease.ts"
import {
  type ProgressRefused,
  StepInTransaction,
  StepNameRejected,
  StepNameReserved,
  StepNameReused
} from "./Errors.ts"
import type { GroupCommit } from "./GroupCommit.ts"
import { type Checkpoint, readCheckpoints } from "./QueueStore.ts"
import { troubleOfKey } from "./Storable.ts"
import type { Asked, WaitAnswer } from "./WaitStore.ts"

/** The attempt a handler runs in. Only the runtime gives one. */
export class Attempt extends Context.Service<
  Attempt,
  {
    readonly id: string
    readonly attempt: number
    readonly lease: HeldLease
    readonly checkpoints: GroupCommit<Checkpoint, "written" | "exists" | "stale", SqlError>
    readonly waits: GroupCommit<Asked, WaitAnswer, SqlError>
    readonly sql: SqlClient.SqlClient
    /** Of a step's result, in bytes of JSON. */
    readonly resultMax: number
    /** Of a queue that declares progress. */
    progress:
      | {
          readonly queue: string
          readonly report: (value: unknown) => Effect.Effect<void, ProgressRefused>
        }
      | undefined
    /** Ends the attempt by parking its item until one of the waits is over, or something falls due. */
    readonly parkUnsafe: (waits: ReadonlyArray<string>, dueInMillis: number | undefined) => void
    readonly later: (millis: number, run: () => void) => void
    /** Names of steps and waits that run or have succeeded in this attempt; made at the first one. */
    used: Set<string> | undefined
    /** What earlier attempts have written, and this one's intents; loaded at the first step. */
    stored: Map<string, unknown> | undefined
    /** The handler's writes are committed with its outcome, and rolled back without it. */
    readonly inTransaction: boolean
    /** Steps, and questions about waits, that are on their way. */
    busyCount: number
    /** Waits that are not over; made at the first one. */
    pending: Map<string, Pending> | undefined
  }
>()("tenure/queue/Step/Attempt") {}

export interface Pending {
  /** In so many milliseconds it is over by itself. */
  readonly dueInMillis: number | undefined
  /** It is not waited for in this process. */
  readonly parks: boolean
}

/** The step that the fiber is inside of, where nothing can wait: it would have to end first. */
export const InsideStep = Context.Reference<string | undefined>("tenure/queue/Attempt/InsideStep", {
  defaultValue: () => undefined
})

/** Names that begin with it are for what steps store beside their results. */
export const reserved = "~"

/** The one step or wait of that name in the attempt. After a failure the name is free, so that it can be retried. */
export const named = <A, E, R>(
  name: string,
  body: (attempt: Attempt["Service"]) => Effect.Effect<A, E, R>
): Effect.Effect<A, E, R | Attempt> =>
  Effect.flatMap(Attempt, (attempt) => {
    if (name.startsWith(reserved)) {
      return Effect.die(new StepNameReserved({ item: attempt.id, step: name }))
    }
    const problem = troubleOfKey(name)
    if (problem !== undefined) {
      return Effect.die(new StepNameRejected({ item: attempt.id, problem }))
    }
    if (attempt.inTransaction) {
      return Effect.die(new StepInTransaction({ item: attempt.id, step: name }))
    }
    const used = (attempt.used ??= new Set())
    if (used.has(name)) return Effect.die(new StepNameReused({ item: attempt.id, step: name }))
    used.add(name)
    return Effect.onError(body(attempt), () => Effect.sync(() => used.delete(name)))
  })

export const load = Effect.fnUntraced(function* (attempt: Attempt["Service"]) {
  if (attempt.stored !== undefined) return attempt.stored
  const rows = attempt.attempt === 1 ? [] : yield* readCheckpoints(attempt.sql, attempt.id)
  // Steps that begin together each load: the first one's map is the one that intents are put into.
  return (attempt.stored ??= new Map(rows.map((row) => [row.name, row.value])))
})

/** What the attempt must not be parked under. */
export const busy = <A, E, R>(
  attempt: Attempt["Service"],
  effect: Effect.Effect<A, E, R>,
  release: (attempt: Attempt["Service"]) => void
): Effect.Effect<A, E, R> =>
  Effect.suspend(() => {
    attempt.busyCount++
    return Effect.onExit(effect, () => Effect.sync(() => release(attempt)))
  })

/** For the branch of a step that has ended, to begin its next one. */
const betweenStepsMillis = 100

export const stepEnded = (attempt: Attempt["Service"]): void => {
  if ((attempt.pending?.size ?? 0) > 0) attempt.later(betweenStepsMillis, () => released(attempt))
  else attempt.busyCount--
}

export const released = (attempt: Attempt["Service"]): void => {
  attempt.busyCount--
  parkIfQuiet(attempt)
}

const parkIfQuiet = (attempt: Attempt["Service"]): void => {
  if (attempt.busyCount > 0 || attempt.pending === undefined) return
  let parks = false
  let dueInMillis = Infinity
  for (const wait of attempt.pending.values()) {
    parks ||= wait.parks
    dueInMillis = Math.min(dueInMillis, wait.dueInMillis ?? Infinity)
  }
  if (!parks) return
  attempt.parkUnsafe(
    [...attempt.pending.keys()],
    Number.isFinite(dueInMillis) ? dueInMillis : undefined
  )
}
