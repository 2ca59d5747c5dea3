/**
 * Gathers items for a handler that takes many at once. To the runner each is an item like any other, with
 * a fiber, a slot, a timeout, a deadline, a verdict and a retry of its own; here their fibers meet.
 *
 *   joined --the batch is full, or `within` is over--> handling --one result each--> answered
 *      |                                                  |
 *      +-- stopped: leaves, was never handled             +-- stopped: leaves, its result is dropped
 *
 * Who is stopped while its batch is handled leaves it at once. When all have left, the handler is
 * interrupted, and those that left last wait for its end: so after a timeout, a drain or a lost lease
 * nothing is given back while the handler still runs, and one that does not stop is noticed as stubborn.
 *
 * Plain synchronous state. After a crash the items are recovered through the executor's lease.
 */
import {
  Array as Arr,
  Duration,
  Effect,
  Exit,
  Fiber,
  FiberSet,
  type Result,
  type Scope
} from "effect"
import type { NonEmptyReadonlyArray } from "effect/Array"
import { RetryLater } from "./Errors.ts"
import type { ItemContext } from "./Runner.ts"
import type { AttemptFailure } from "./Verdict.ts"

export interface Member<Payload, Item> {
  readonly payload: Payload
  readonly item: Item
}

export interface Options<Payload, A, E, R> {
  readonly size: number
  /** After the first one has joined. 0: those that come in the same turn. */
  readonly withinMillis: number
  /** The handler's budget. */
  readonly timeoutMillis: number
  readonly handle: (
    batch: NonEmptyReadonlyArray<Member<Payload, ItemContext>>
  ) => Effect.Effect<ReadonlyArray<Result.Result<A, E>>, E, R>
}

/** The result of one item, as its own handler would give it. */
export type Join<Payload, A, E> = (payload: Payload, item: ItemContext) => Effect.Effect<A, E>

interface Joined<Payload, A, E> extends Member<Payload, ItemContext> {
  readonly resume: (result: Effect.Effect<A, E>) => void
  handling: Handling<Payload, A, E> | undefined
}

interface Handling<Payload, A, E> {
  readonly open: Set<Joined<Payload, A, E>>
  fiber: Fiber.Fiber<unknown> | undefined
}

export const make = Effect.fnUntraced(function* <Payload, A, E, R>(
  options: Options<Payload, A, E | AttemptFailure, R>
): Effect.fn.Return<
  Join<Payload, A, E | AttemptFailure>,
  never,
  Exclude<R, Scope.Scope> | Scope.Scope
> {
  type Failure = E | AttemptFailure
  const run = yield* FiberSet.makeRuntime<Exclude<R, Scope.Scope>, unknown, unknown>()
  let gathering: Array<Joined<Payload, A, Failure>> = []
  let timer: Fiber.Fiber<unknown> | undefined

  const answer = (
    members: ReadonlyArray<Joined<Payload, A, Failure>>,
    handling: Handling<Payload, A, Failure>,
    exit: Exit.Exit<ReadonlyArray<Result.Result<A, Failure>>, Failure>
  ) => {
    const results = resultsOf(members.length, exit)
    members.forEach((member, at) => {
      if (handling.open.delete(member)) member.resume(results(at))
    })
  }

  const handle = (members: NonEmptyReadonlyArray<Joined<Payload, A, Failure>>) => {
    const handling: Handling<Payload, A, Failure> = { open: new Set(members), fiber: undefined }
    for (const member of members) member.handling = handling
    const batch = Arr.map(members, ({ item, payload }) => ({ item, payload }))
    handling.fiber = run(
      Effect.suspend(() => options.handle(batch)).pipe(
        Effect.scoped,
        Effect.timeoutOrElse({
          duration: options.timeoutMillis,
          orElse: () => new RetryLater({ cause: "the attempt ran out of its time" })
        }),
        Effect.onExit((exit) => Effect.sync(() => answer(members, handling, exit))),
        Effect.ignoreCause
      )
    )
  }

  const flush = () => {
    timer?.interruptUnsafe()
    timer = undefined
    const members = gathering
    gathering = []
    if (Arr.isReadonlyArrayNonEmpty(members)) handle(members)
  }

  // The turn's end is late enough: the runner starts what it has claimed in one go.
  const pause =
    options.withinMillis === 0
      ? Effect.yieldNow
      : Effect.sleep(Duration.millis(options.withinMillis))

  const join = (member: Joined<Payload, A, Failure>) => {
    gathering.push(member)
    if (gathering.length >= options.size) return flush()
    if (gathering.length > 1) return
    timer = run(
      Effect.andThen(
        pause,
        Effect.sync(() => {
          timer = undefined
          flush()
        })
      )
    )
  }

  const leave = (member: Joined<Payload, A, Failure>) =>
    Effect.suspend(() => {
      const { handling } = member
      if (handling === undefined) {
        gathering = gathering.filter((one) => one !== member)
        if (gathering.length === 0) flush()
        return Effect.void
      }
      handling.open.delete(member)
      // Whoever stops one often stops all, one after the other in the same turn: let them leave first.
      return Effect.andThen(
        Effect.yieldNow,
        Effect.suspend(() =>
          handling.open.size > 0 || handling.fiber === undefined
            ? Effect.void
            : Fiber.interrupt(handling.fiber)
        )
      )
    })

  return (payload, item) =>
    Effect.callback((resume) => {
      const member = { payload, item, resume, handling: undefined }
      join(member)
      return leave(member)
    })
})

/** What each member is told, by its place. */
const resultsOf = <A, E>(
  count: number,
  exit: Exit.Exit<ReadonlyArray<Result.Result<A, E>>, E>
): ((at: number) => Effect.Effect<A, E>) => {
  if (Exit.isFailure(exit)) return () => Effect.failCause(exit.cause)
  const results = exit.value
  if (results.length !== count) {
    const wrong = Effect.die(
      new Error(`the batch handler gave ${results.length} results for ${count} items`)
    )
    return () => wrong
  }
  return (at) => {
    const result = results[at]
    return result === undefined ? Effect.die(new Error("no result")) : Effect.fromResult(result)
  }
}
