/**
 * Keeps the background loops of a process alive, or ends the process.
 *
 *   running --failed, died or ended--> restarting --pause--> running
 *      |                                   |
 *      |                                   +--too many within the window--> escalated (`join` fails)
 *      +--stop--> stopping --> stopped, or abandoned when the budget ends first
 *
 * Children start in the order they are supervised and stop in reverse, each within its budget, so
 * a child may rely on every child before it for as long as it lives. A fiber that fails by itself
 * is silent in Effect; here each one has an observer, and nothing ends unseen. After a crash of the
 * process there is nothing to recover: actors are memory, and work is rows.
 */
import {
  Clock,
  Context,
  Deferred,
  Duration,
  Effect,
  Exit,
  Fiber,
  Layer,
  Random,
  Schema
} from "effect"
import type { Scope } from "effect"
import { backoffMillis, isClosed, Stopped, summarize } from "./Actor.ts"
import type { Actor } from "./Actor.ts"

/** A child crashed more often than its restarts allow. End the process: its peers take the work. */
export class Escalated extends Schema.TaggedError<Escalated>()("Escalated", {
  child: Schema.String,
  restarts: Schema.Number,
  reason: Schema.String
}) {
  override get message(): string {
    return `${this.child} crashed again after ${this.restarts} restarts, the process must end: ${this.reason}`
  }
}

export interface Options {
  /** Per child. One more crash within the window escalates. */
  readonly restarts?: { readonly max: number; readonly within: Duration.Input }
}

/** `run` is for what has no steps, such as a server or a stream; it must not end by itself. */
export type Child<R = never> = {
  /** How long a stop waits for the step in flight, or for `run` to clean up. */
  readonly shutdown?: Duration.Input
  /** Instead of the supervisor's limit. 0: its first crash ends the process. */
  readonly restarts?: number
} & (
  | { readonly actor: Actor<unknown> }
  | { readonly name: string; readonly run: Effect.Effect<unknown, unknown, R> }
)

export interface ChildStatus {
  readonly name: string
  readonly status: "running" | "restarting" | "escalated" | "stopping" | "stopped" | "abandoned"
  readonly restarts: number
  readonly lastCrash: string | undefined
}

export interface Service {
  /** Starts the child, last in the order. It is stopped and removed when the caller's scope closes. */
  readonly supervise: <R = never>(child: Child<R>) => Effect.Effect<void, Stopped, R | Scope.Scope>
  readonly stop: Effect.Effect<void>
  /** Race the application with it. */
  readonly join: Effect.Effect<never, Escalated>
  readonly children: () => ReadonlyArray<ChildStatus>
  readonly actors: () => ReadonlyArray<Actor<unknown>>
}

export class Supervisor extends Context.Service<Supervisor, Service>()("tenure/actor/Supervisor") {
  static readonly layer = (options?: Options): Layer.Layer<Supervisor> =>
    Layer.effect(Supervisor, make(options))
}

interface Entry {
  readonly name: string
  readonly actor: Actor<unknown> | undefined
  readonly run: Effect.Effect<unknown, unknown>
  readonly shutdown: Duration.Input
  readonly restartsMax: number
  status: ChildStatus["status"]
  restarts: number
  lastCrash: string | undefined
  fiber: Fiber.Fiber<void> | undefined
}

/** The crashes still in the window, this one included, and whether they allow a restart. */
export const admitRestart = (
  crashedAtNanos: ReadonlyArray<bigint>,
  nowNanos: bigint,
  limit: { readonly max: number; readonly withinNanos: bigint }
): { readonly crashedAtNanos: ReadonlyArray<bigint>; readonly restart: boolean } => {
  const recent = crashedAtNanos.filter((at) => nowNanos - at < limit.withinNanos)
  recent.push(nowNanos)
  return { crashedAtNanos: recent, restart: recent.length <= limit.max }
}

export const make = Effect.fnUntraced(function* (
  options?: Options
): Effect.fn.Return<Service, never, Scope.Scope> {
  const { max, within } = options?.restarts ?? { max: 5, within: "1 minute" }
  const withinNanos = Duration.toNanosUnsafe(within)
  const escalated = Deferred.makeUnsafe<never, Escalated>()
  const entries: Array<Entry> = []
  let stopping = false

  const escalate = Effect.fnUntraced(function* (entry: Entry, reason: string) {
    entry.status = "escalated"
    // Settles whoever still asks: no step will answer them.
    if (entry.actor !== undefined) yield* entry.actor.stop({ within: 0 })
    const error = new Escalated({ child: entry.name, restarts: entry.restarts, reason })
    yield* Effect.logFatal(error.message)
    yield* Deferred.fail(escalated, error)
  })

  const supervision = Effect.fnUntraced(function* (entry: Entry) {
    let crashedAtNanos: ReadonlyArray<bigint> = []
    while (true) {
      entry.status = "running"
      const exit = yield* Effect.exit(entry.run)
      // Its owner stopped the actor in order: that is no crash.
      if (entry.actor !== undefined && isClosed(entry.actor)) {
        entry.status = "stopped"
        return
      }
      const reason = Exit.isSuccess(exit) ? "ended by itself" : summarize(exit.cause)
      entry.lastCrash = reason
      const verdict = admitRestart(crashedAtNanos, yield* Clock.monotonicTimeNanos, {
        max: entry.restartsMax,
        withinNanos
      })
      if (!verdict.restart) return yield* escalate(entry, reason)
      crashedAtNanos = verdict.crashedAtNanos
      entry.status = "restarting"
      entry.restarts++
      const random = yield* Random.next
      const pauseMillis = backoffMillis(
        "100 millis",
        "5 seconds",
        crashedAtNanos.length - 1,
        random
      )
      yield* Effect.logWarning(`${entry.name}: crashed, restart ${entry.restarts}`).pipe(
        Effect.annotateLogs({ error: reason, pauseMillis: Math.round(pauseMillis) })
      )
      yield* Effect.sleep(pauseMillis)
    }
  })

  const startChild = Effect.fnUntraced(function* <R>(child: Child<R>) {
    const actor = "actor" in child ? child.actor : undefined
    const name = "actor" in child ? child.actor.name : child.name
    if (stopping || (actor !== undefined && isClosed(actor))) {
      return yield* new Stopped({ actor: name })
    }
    if (entries.some((other) => other.name === name)) {
      return yield* Effect.die(new Error(`two children of one supervisor are named ${name}`))
    }
    const context = yield* Effect.context<R>()
    const entry: Entry = {
      name,
      actor,
      // A scope for each run: what a crashed one held is released before the next.
      run:
        "actor" in child
          ? Effect.andThen(child.actor.start, child.actor.join)
          : Effect.scoped(child.run).pipe(
              Effect.tapCause((cause) => Effect.logError(`${name}: crashed`, cause)),
              Effect.provideContext(context)
            ),
      shutdown: child.shutdown ?? "5 seconds",
      restartsMax: child.restarts ?? max,
      status: "running",
      restarts: 0,
      lastCrash: undefined,
      fiber: undefined
    }
    entries.push(entry)
    // Detached: `stopChild` bounds its end, which a closing scope would await without limit.
    entry.fiber = yield* supervision(entry).pipe(
      // Nothing but a stop may end a supervision, not even a bug in it.
      Effect.onError((cause) =>
        entry.status === "stopping" ? Effect.void : escalate(entry, summarize(cause))
      ),
      Effect.forkDetach({ startImmediately: true })
    )
    return entry
  })

  const stopChild = (entry: Entry): Effect.Effect<void> =>
    Effect.suspend(() => {
      const { actor, fiber, shutdown } = entry
      if (fiber === undefined || entry.status === "stopped" || entry.status === "abandoned") {
        return Effect.void
      }
      entry.status = "stopping"
      fiber.interruptUnsafe()
      const ended =
        actor === undefined
          ? Effect.raceFirst(Effect.asVoid(Fiber.await(fiber)), Effect.sleep(shutdown))
          : actor.stop({ within: shutdown })
      return Effect.flatMap(ended, () => {
        const isOver =
          actor === undefined ? fiber.pollUnsafe() !== undefined : actor.lifecycle === "stopped"
        entry.status = isOver ? "stopped" : "abandoned"
        return isOver
          ? Effect.void
          : Effect.logWarning(`${entry.name}: did not stop within its budget, abandoned`)
      })
    })

  const stop = Effect.suspend(() => {
    stopping = true
    return Effect.forEach([...entries].reverse(), stopChild, { discard: true })
  })
  yield* Effect.addFinalizer(() => stop)

  return {
    supervise: (child) =>
      Effect.acquireRelease(startChild(child), (entry) =>
        Effect.ensuring(
          stopChild(entry),
          Effect.sync(() => entries.splice(entries.indexOf(entry), 1))
        )
      ).pipe(Effect.asVoid),
    stop,
    join: Deferred.await(escalated),
    children: () =>
      entries.map(({ name, status, restarts, lastCrash }) => ({
        name,
        status,
        restarts,
        lastCrash
      })),
    actors: () => entries.flatMap(({ actor }) => (actor === undefined ? [] : [actor]))
  }
})
