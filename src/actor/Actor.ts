/**
 * The one loop behind every background activity: it runs a bounded step after a pause, when woken,
 * or when asked, and shows how far it is.
 *
 *   new --start--> running --stop--> stopping --step over--> stopped
 *                   |   ^                                      ^
 *                 crash start                                  |
 *                   v   |                                      |
 *                  crashed ----------------stop----------------+     (new --stop--> stopped)
 *
 * I12. At most one step is in flight, and a wake is never lost: it may coalesce with others, but a
 *      step starts after it, unless the actor is stopped first.
 *
 * The mailbox (wakes, asks, progress) outlives a crash of the loop, so the handle stays valid while
 * a supervisor restarts it. Nothing here survives the process: what must is a row.
 */
import {
  Cause,
  Clock,
  Context,
  Duration,
  Effect,
  Exit,
  Fiber,
  Latch,
  Random,
  Schema,
  Tracer
} from "effect"
import type { Scope } from "effect"

/** Counts of one step, so that "found work and moved nothing" can be seen. */
export type Report = Readonly<Record<string, number>>

export type Lifecycle = "new" | "running" | "crashed" | "stopping" | "stopped"

/** The actor accepts nothing any more. Not retryable in this process. */
export class Stopped extends Schema.TaggedError<Stopped>()("Stopped", {
  actor: Schema.String
}) {
  override get message(): string {
    return `${this.actor} has stopped: it takes no more requests until the process starts again`
  }
}

/** No step answered in time. The step may still run: only this observer has left. */
export class AskTimeout extends Schema.TaggedError<AskTimeout>()("AskTimeout", {
  actor: Schema.String,
  deadlineMillis: Schema.Number
}) {
  override get message(): string {
    return `${this.actor} gave no answer within ${this.deadlineMillis} ms: ask again, or look at its progress`
  }
}

export interface Backoff<in E = unknown> {
  /** Shortest pause after a failure. A wake cannot undercut it: no storm on a dead database. */
  readonly first: Duration.Input
  readonly max: Duration.Input
  /** This many failures in a row crash the loop. Without it only `progressWithin` limits them. */
  readonly failuresMax?: number
  /** False: waiting will not cure this error, so the loop crashes at once. */
  readonly while?: (error: E) => boolean
}

export interface Options<E = never, R = never> {
  readonly name: string
  readonly step: Effect.Effect<Report, E, R>
  /** Pause after a step. Zero: again at once; infinity: only when woken or asked. */
  readonly cadence: Duration.Input | ((report: Report) => Duration.Input)
  /** A step that is due must have succeeded within this time; an idle actor is never late. */
  readonly progressWithin?: Duration.Input
  /** For typed failures. Defects always crash the loop. */
  readonly onFailure?: "escalate" | Backoff<E>
}

export interface Progress {
  readonly steps: number
  readonly failures: number
  readonly lastReport: Report | undefined
  readonly lastStartedNanos: bigint | undefined
  readonly lastCompletedNanos: bigint | undefined
  readonly inFlight: boolean
  /** Monotonic; undefined while nothing is owed. */
  readonly deadlineNanos: bigint | undefined
}

export interface Actor<out E = never> {
  readonly name: string
  readonly lifecycle: Lifecycle
  readonly progress: () => Progress
  readonly wakeUnsafe: () => void
  readonly wake: Effect.Effect<void>
  /**
   * The outcome of the first step that starts after the ask. Interrupting it removes the observer
   * and nothing else. An ask from inside the actor's own step can only time out.
   */
  readonly ask: (options?: {
    readonly deadline?: Duration.Input
  }) => Effect.Effect<Report, Stopped | AskTimeout | E>
  readonly start: Effect.Effect<void, Stopped>
  /** After `start`: succeeds when the actor has stopped, fails when its loop has crashed. */
  readonly join: Effect.Effect<void, E>
  /**
   * Closes admission and settles every ask synchronously, ends any pause, then waits for the step
   * in flight. After `within` it interrupts that step and does not wait for it.
   */
  readonly stop: (options?: { readonly within?: Duration.Input }) => Effect.Effect<void>
}

/** Uniform between the first pause and its doubled, capped successor: peers that fail together spread. */
export const backoffMillis = (
  first: Duration.Input,
  max: Duration.Input,
  failures: number,
  random: number
): number => {
  const firstMillis = Duration.toMillis(first)
  const ceiling = Math.min(Duration.toMillis(max), firstMillis * 2 ** Math.min(failures, 30))
  return firstMillis + random * Math.max(0, ceiling - firstMillis)
}

export const isClosed = (actor: { readonly lifecycle: Lifecycle }): boolean =>
  actor.lifecycle === "stopping" || actor.lifecycle === "stopped"

export const isLate = (progress: Progress, nowNanos: bigint): boolean =>
  progress.deadlineNanos !== undefined && nowNanos > progress.deadlineNanos

/** One bounded line for logs and errors: the tag and message of the first reason, no payload. */
export const summarize = (cause: Cause.Cause<unknown>): string => {
  const error = Cause.hasInterruptsOnly(cause) ? "interrupted" : Cause.squash(cause)
  const line = error instanceof Error ? `${error.name}: ${error.message}` : String(error)
  return line.length > 300 ? `${line.slice(0, 299)}~` : line
}

const nanos = (millis: number): bigint => BigInt(Math.round(millis * 1_000_000))

const isPowerOfTwo = (count: number): boolean => (count & (count - 1)) === 0

export const make = Effect.fnUntraced(function* <E = never, R = never>(
  options: Options<E, R>
): Effect.fn.Return<Actor<E>, never, R | Scope.Scope> {
  const { name, cadence } = options
  const context = yield* Effect.context<R>()
  const clock = yield* Clock.Clock
  const onFailure: "escalate" | Backoff<E> = options.onFailure ?? {
    first: "100 millis",
    max: "5 seconds"
  }
  const withinNanos =
    options.progressWithin === undefined
      ? undefined
      : nanos(Duration.toMillis(options.progressWithin))

  type Observer = (outcome: Effect.Effect<Report, Stopped | E>) => void
  let waiting = new Set<Observer>()
  let serving = new Set<Observer>()
  const woken = Latch.makeUnsafe()
  const closing = Latch.makeUnsafe()

  let lifecycle: Lifecycle = "new"
  let fiber: Fiber.Fiber<void, E> | undefined
  let steps = 0
  let failures = 0
  let inFlight = false
  let lastReport: Report | undefined
  let lastStartedNanos: bigint | undefined
  let lastCompletedNanos: bigint | undefined
  // Since when a step is due. A failure or a crash leaves it alone, so neither looks like progress.
  let owedSinceNanos: bigint | undefined

  const isClosed = () => lifecycle === "stopping" || lifecycle === "stopped"

  const owe = (sinceNanos: bigint) => {
    if (owedSinceNanos === undefined || sinceNanos < owedSinceNanos) owedSinceNanos = sinceNanos
  }

  // The sets change before any observer runs: an observer may ask, wake or stop in its turn.
  const settleServed = (outcome: Effect.Effect<Report, E>) => {
    const served = serving
    serving = new Set()
    for (const observer of served) observer(outcome)
  }

  const wakeUnsafe = () => {
    if (isClosed() || woken.isOpen()) return
    if (lifecycle !== "new") owe(clock.monotonicTimeNanosUnsafe())
    woken.openUnsafe()
  }

  // Ends in a yield: a latch resumes its waiter on the caller's stack, and a waker must not run the step.
  const rest = (until: Latch.Latch, millis: number) =>
    (millis <= 0 || until.isOpen()
      ? Effect.void
      : Effect.raceFirst(until.await, Effect.sleep(millis))
    ).pipe(Effect.andThen(Effect.yieldNow))

  const afterSuccess = Effect.fnUntraced(function* (report: Report) {
    const nowNanos = clock.monotonicTimeNanosUnsafe()
    const failed = failures
    steps++
    failures = 0
    lastReport = report
    lastCompletedNanos = nowNanos
    settleServed(Exit.succeed(report))
    if (failed > 0) yield* Effect.logInfo(`${name}: a step succeeded after ${failed} failures`)
    const pauseMillis = Duration.toMillis(typeof cadence === "function" ? cadence(report) : cadence)
    owedSinceNanos = Number.isFinite(pauseMillis) ? nowNanos + nanos(pauseMillis) : undefined
    if (woken.isOpen()) owe(nowNanos)
    yield* rest(woken, pauseMillis)
  })

  const afterFailure = Effect.fnUntraced(function* (cause: Cause.Cause<E>, streak: number) {
    // An interruption from inside the step would look to askers like their own.
    const outcome = Cause.hasInterruptsOnly(cause)
      ? Exit.die(new Error(`a step of ${name} was interrupted from inside`))
      : Exit.failCause(cause)
    failures++
    settleServed(outcome)
    if (onFailure === "escalate" || !isTransient(cause, streak, onFailure)) return yield* outcome
    if (isPowerOfTwo(streak)) {
      yield* Effect.logWarning(`${name}: step failed ${streak} times in a row, retrying`).pipe(
        Effect.annotateLogs({ error: summarize(cause) })
      )
    }
    const pauseMillis = backoffMillis(onFailure.first, onFailure.max, streak, yield* Random.next)
    const firstMillis = Duration.toMillis(onFailure.first)
    yield* rest(closing, firstMillis)
    yield* rest(woken, pauseMillis - firstMillis)
  })

  const loop = Effect.gen(function* () {
    let streak = 0
    while (!isClosed()) {
      // One synchronous stretch: whatever comes after it belongs to the next step.
      woken.closeUnsafe()
      serving = waiting
      waiting = new Set()
      inFlight = true
      lastStartedNanos = clock.monotonicTimeNanosUnsafe()
      const exit = yield* Effect.exit(options.step)
      inFlight = false
      streak = Exit.isSuccess(exit) ? 0 : streak + 1
      yield* Exit.isSuccess(exit) ? afterSuccess(exit.value) : afterFailure(exit.cause, streak)
    }
  }).pipe(
    Effect.tapCause((cause) => Effect.logError(`${name}: loop crashed`, cause)),
    Effect.annotateLogs({ actor: name }),
    // Each step is a trace of its own; under the span that started the process it would never end.
    Effect.updateContext(
      (starter: Context.Context<never>) =>
        Context.omit(Tracer.ParentSpan)(Context.merge(starter, context)) as Context.Context<R>
    )
  )

  const start = Effect.suspend((): Effect.Effect<void, Stopped> => {
    if (isClosed()) return Effect.fail(new Stopped({ actor: name }))
    if (lifecycle === "running") return Effect.void
    lifecycle = "running"
    owe(clock.monotonicTimeNanosUnsafe())
    // Detached, because closing a scope waits without limit; `stop` in the finalizer below is its bound.
    return Effect.map(Effect.forkDetach(loop), (forked) => {
      fiber = forked
      forked.addObserver(() => {
        inFlight = false
        lifecycle = isClosed() ? "stopped" : "crashed"
      })
    })
  }).pipe(Effect.uninterruptible)

  const close = () => {
    if (isClosed()) return
    lifecycle = lifecycle === "running" ? "stopping" : "stopped"
    const observers = [...serving, ...waiting]
    serving = new Set()
    waiting = new Set()
    for (const observer of observers) observer(Effect.fail(new Stopped({ actor: name })))
    closing.openUnsafe()
    woken.openUnsafe()
  }

  const stop = (stopOptions?: { readonly within?: Duration.Input }) =>
    Effect.suspend((): Effect.Effect<void> => {
      close()
      const running = fiber
      // A step that stops its own actor cannot wait for itself.
      if (running === undefined || Fiber.getCurrent() === running) return Effect.void
      const ended = Fiber.await(running)
      if (stopOptions?.within === undefined) return Effect.asVoid(ended)
      return Effect.raceFirst(ended, Effect.sleep(stopOptions.within)).pipe(
        Effect.andThen(Effect.sync(() => running.interruptUnsafe()))
      )
    })

  yield* Effect.addFinalizer(() => stop({ within: 0 }))

  return {
    name,
    get lifecycle() {
      return lifecycle
    },
    progress: () => ({
      steps,
      failures,
      lastReport,
      lastStartedNanos,
      lastCompletedNanos,
      inFlight,
      deadlineNanos:
        withinNanos === undefined || owedSinceNanos === undefined || isClosed()
          ? undefined
          : owedSinceNanos + withinNanos
    }),
    wakeUnsafe,
    wake: Effect.sync(wakeUnsafe),
    ask: (askOptions) => {
      const answer = Effect.callback<Report, Stopped | E>((resume) => {
        if (isClosed()) return resume(Effect.fail(new Stopped({ actor: name })))
        waiting.add(resume)
        wakeUnsafe()
        return Effect.sync(() => {
          waiting.delete(resume)
          serving.delete(resume)
        })
      })
      if (askOptions?.deadline === undefined) return answer
      const deadlineMillis = Duration.toMillis(askOptions.deadline)
      return Effect.timeoutOrElse(answer, {
        duration: deadlineMillis,
        orElse: () => Effect.fail(new AskTimeout({ actor: name, deadlineMillis }))
      })
    },
    start,
    join: Effect.suspend(() => {
      if (fiber === undefined) return Effect.void
      return Effect.flatMap(Fiber.await(fiber), (exit) => (isClosed() ? Effect.void : exit))
    }),
    stop
  }
})

const isTransient = <E>(cause: Cause.Cause<E>, streak: number, policy: Backoff<E>): boolean =>
  streak < (policy.failuresMax ?? Number.POSITIVE_INFINITY) &&
  cause.reasons.every(
    (reason) => Cause.isFailReason(reason) && (policy.while?.(reason.error) ?? true)
  )
