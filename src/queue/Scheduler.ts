/**
 * Fires the schedules of a process: one actor for all of them, that sleeps until the next slot.
 *
 *   looked --due--> fired: items and the next slot committed, in one transaction --> asleep until it
 *
 * Every executor that has a schedule's code does this; the row's lock and its next slot let one of them
 * fire it (S1). Slots are computed from the time that the database has told, and the process' own clock
 * measures nothing but the pause until the next look.
 *
 * A process with schedules looks at a slot's time, when told of a request or of a resumption, and every
 * half minute: so late at most it sees a clock that has jumped, and what nobody told of. One without
 * sends nothing.
 *
 * On a crash a slot is not fired, or fired with its items; the next look of any executor goes on.
 */
import { Cause, Clock, Context, Effect, Exit, type Scope } from "effect"
import { isSqlError, type SqlError } from "effect/sql/SqlError"
import * as Actor from "../actor/Actor.ts"
import { type Abandoned, abandonAfter } from "../database/Deadline.ts"
import { sqlState } from "../database/SqlState.ts"
import type { Executor } from "../executor/Executor.ts"
import { type Calendar, type CatchUp, due, registered, slotsFrom } from "./Calendar.ts"
import type { NewItem } from "./QueueStore.ts"
import * as ScheduleStore from "./ScheduleStore.ts"

/** A schedule as its code has it. */
export interface Scheduled {
  readonly name: string
  readonly queue: string
  readonly calendar: Calendar
  readonly catchUp: CatchUp
  readonly toItem: (slotMillis: number) => Effect.Effect<NewItem, unknown>
}

export class Scheduler extends Context.Service<
  Scheduler,
  {
    readonly actor: Actor.Actor<SqlError | Abandoned>
    /** Keeps the name for one schedule until the scope closes. False: this process has one. */
    readonly reserve: (name: string) => Effect.Effect<boolean, never, Scope.Scope>
    /** Runs a schedule until the scope closes. Fails with TN011 for one of another application. */
    readonly serve: (scheduled: Scheduled) => Effect.Effect<void, SqlError, Scope.Scope>
    /** There may be something to do: look now. */
    readonly wakeUnsafe: () => void
  }
>()("tenure/queue/Scheduler") {}

const lookMillis = 30_000

/** How often a process that may not write looks whether it may again. */
const distrustedMillis = 1000

/** Somebody else has the row, or has just let go of it. */
const againMillis = 100

/** Of one transaction. */
const slotsMax = 100
const bytesMax = 4_194_304

/** Of one step; the rest is due at once. */
const transactionsMax = 20

export const make = Effect.fnUntraced(function* (options: {
  readonly executor: Executor["Service"]
  /** There is new work on a queue. */
  readonly onEnqueued: (queueId: number) => void
}): Effect.fn.Return<Scheduler["Service"], never, Scope.Scope> {
  const { executor, onEnqueued } = options
  const { lease, pools, settings } = executor
  const clock = yield* Clock.Clock
  const elapsedMillis = () => Number(clock.monotonicTimeNanosUnsafe()) / 1e6
  const unlessSilent = abandonAfter(settings.watchdog / 2)
  const names = new Set<string>()
  const serving = new Map<string, Scheduled>()
  let draining = false
  yield* Effect.forkScoped(
    Effect.andThen(
      executor.drained,
      Effect.sync(() => {
        draining = true
      })
    )
  )

  const readStates = (scheduled: Iterable<Scheduled>) =>
    unlessSilent(ScheduleStore.readStates(pools.work, Array.from(scheduled, identityOf)))

  /** Puts our definition in force, with the slot that is next by it. */
  const register = Effect.fnUntraced(function* (scheduled: Scheduled, state: ScheduleStore.State) {
    const row = state.isKnown ? { ...state, isSame: state.isMine } : undefined
    const next = registered(scheduled.calendar, row, state.now)
    const answer = yield* unlessSilent(
      ScheduleStore.register(
        pools.work,
        identityOf(scheduled),
        executor.application,
        next,
        state.isKnown ? state : { definition: null, next: undefined }
      )
    )
    if (answer === "registered" && next === undefined && !state.isKnown) {
      yield* Effect.logWarning("queue_schedules: no slot is left, so it will never fire").pipe(
        Effect.annotateLogs({ schedule: scheduled.name, definition: scheduled.calendar.definition })
      )
    }
    return answer === "registered"
  })

  const registerSurely = Effect.fnUntraced(function* (scheduled: Scheduled) {
    for (;;) {
      const [state] = yield* readStates([scheduled])
      if (state !== undefined && (yield* register(scheduled, state))) return
      yield* Effect.sleep(againMillis)
    }
  })

  /** One that cannot be fired must not keep the others from it. */
  const unlessItsFault =
    (scheduled: Scheduled) =>
    <A, E>(effect: Effect.Effect<A, E>) =>
      Effect.catchIf(
        effect,
        (error): error is E & SqlError => isSqlError(error) && isItsFault(error),
        (error) =>
          Effect.logError("queue_schedules: refused by the database").pipe(
            Effect.annotateLogs({ schedule: scheduled.name, sqlState: sqlState(error) }),
            Effect.as(undefined)
          )
      )

  /** As many items as fit into one transaction. Nothing, when the first one cannot be made. */
  const itemsFor = Effect.fnUntraced(function* (
    { name, toItem }: Scheduled,
    slots: ReadonlyArray<number>
  ) {
    const items: Array<ScheduleStore.Slot> = []
    let bytes = 0
    for (const at of slots) {
      const exit = yield* Effect.exit(Effect.suspend(() => toItem(at)))
      if (Exit.isFailure(exit)) {
        yield* Effect.logError("queue_schedules: the payload of a slot cannot be made").pipe(
          Effect.annotateLogs({ schedule: name, slot: at, error: nameOf(exit.cause) })
        )
        return items.length === 0 ? undefined : items
      }
      bytes += exit.value.payload.length
      if (items.length > 0 && bytes > bytesMax) return items
      items.push({ at, item: exit.value })
    }
    return items
  })

  const told = ({ answer, enqueued, queue_id }: ScheduleStore.Fired) => {
    if (queue_id !== null && enqueued > 0) onEnqueued(queue_id)
    return { answer, enqueued }
  }

  const fire = Effect.fnUntraced(function* (
    scheduled: Scheduled,
    state: ScheduleStore.State,
    seen: number
  ) {
    const todo = due(scheduled.calendar, state, scheduled.catchUp, slotsMax)
    if (todo === undefined) return undefined
    const items = yield* itemsFor(scheduled, todo.slots)
    if (items === undefined) return undefined
    const next = todo.slots[items.length] ?? todo.next
    const fired = told(
      yield* unlessSilent(ScheduleStore.fire(pools.work, identityOf(scheduled), seen, items, next))
    )
    if (fired.answer === "fired" && items[0]?.at !== seen) {
      yield* Effect.logWarning("queue_schedules: slots were missed and are not made up").pipe(
        Effect.annotateLogs({ schedule: scheduled.name, from: seen, until: items[0]?.at ?? next })
      )
    }
    return { ...fired, next }
  })

  const serveRequest = Effect.fnUntraced(function* (
    scheduled: Scheduled,
    request: ScheduleStore.Request
  ) {
    const slots =
      request.kind === "trigger"
        ? [request.from]
        : slotsFrom(scheduled.calendar, request.from, request.to, slotsMax + 1)
    const items = yield* itemsFor(scheduled, slots.slice(0, slotsMax))
    if (items === undefined) return undefined
    return told(
      yield* unlessSilent(
        ScheduleStore.serveRequest(
          pools.work,
          request,
          identityOf(scheduled),
          items,
          slots[items.length]
        )
      )
    )
  })

  const step = Effect.gen(function* () {
    const report = { looked: 0, fired: 0, registered: 0, nextMillis: lookMillis }
    if (serving.size === 0) return { ...report, nextMillis: Infinity }
    if (draining || !lease.isTrustedUnsafe()) return { ...report, nextMillis: distrustedMillis }
    const states = yield* readStates(serving.values())
    report.looked = states.length
    const lookedMillis = elapsedMillis()
    // From the time that the look has told.
    const lookIn = (millis: number) => {
      report.nextMillis = Math.min(report.nextMillis, Math.max(0, millis))
    }
    let transactions = 0
    for (const state of states) {
      const scheduled = serving.get(state.name)
      if (scheduled === undefined) continue
      if (!state.isMine) {
        // Another definition is in force: not ours to fire, unless nobody is left who has it.
        if (state.isKnown && state.hasRunner) continue
        const isOurs = yield* unlessItsFault(scheduled)(register(scheduled, state))
        if (isOurs === true) report.registered++
        if (isOurs !== undefined) lookIn(againMillis)
        continue
      }
      if (transactions >= transactionsMax) {
        lookIn(0)
        continue
      }
      if (state.request !== undefined) {
        const served = yield* unlessItsFault(scheduled)(serveRequest(scheduled, state.request))
        transactions++
        report.fired += served?.enqueued ?? 0
        // Behind it there may be another one; one that cannot be served is tried again later.
        if (served !== undefined) lookIn(served.answer === "fired" ? 0 : againMillis)
      }
      if (state.paused || state.next === undefined) continue
      if (state.next > state.now) {
        lookIn(state.next - state.now)
        continue
      }
      const fired = yield* unlessItsFault(scheduled)(fire(scheduled, state, state.next))
      transactions++
      report.fired += fired?.enqueued ?? 0
      if (fired?.answer === "fired") lookIn((fired.next ?? Infinity) - state.now)
      else if (fired !== undefined) lookIn(fired.answer === "moved" ? 0 : againMillis)
    }
    const spentMillis = elapsedMillis() - lookedMillis
    report.nextMillis = Math.max(0, Math.ceil(report.nextMillis - spentMillis))
    return report
  })

  const actor = yield* Actor.make<SqlError | Abandoned, never>({
    name: "queue_schedules",
    step,
    cadence: (report) => report["nextMillis"] ?? lookMillis,
    progressWithin: settings.watchdog,
    onFailure: { first: "100 millis", max: "5 seconds" }
  })

  return {
    actor,
    reserve: (name) =>
      Effect.acquireRelease(
        // One turn: two layers that are built side by side must not both find it free.
        Effect.sync(() => !names.has(name) && names.add(name).has(name)),
        (reserved) => Effect.sync(() => reserved && names.delete(name))
      ),
    serve: (scheduled) =>
      Effect.gen(function* () {
        yield* Effect.retry(registerSurely(scheduled), {
          while: (error) => error._tag === "Abandoned"
        })
        yield* Effect.acquireRelease(
          Effect.sync(() => {
            serving.set(scheduled.name, scheduled)
            actor.wakeUnsafe()
          }),
          () =>
            Effect.suspend(() => {
              serving.delete(scheduled.name)
              // Without it peers wait for the end of the lease before they put another definition in force.
              return Effect.ignore(
                abandonAfter(
                  ScheduleStore.unregister(pools.work, scheduled.name),
                  settings.abandonAfter
                )
              )
            })
        )
      }),
    wakeUnsafe: actor.wakeUnsafe
  }
})

const identityOf = ({ calendar, name, queue }: Scheduled): ScheduleStore.Identity => ({
  name,
  queue,
  definition: calendar.definition
})

/** Its name belongs to another application, or its payload or key is nothing that the server stores. */
const isItsFault = (error: SqlError): boolean => {
  const state = sqlState(error) ?? ""
  return state === "TN011" || ["22", "23", "54"].includes(state.slice(0, 2))
}

/** Never its message: that may quote the payload. */
const nameOf = (cause: Cause.Cause<unknown>): string => {
  const error = Cause.squash(cause)
  if (typeof error === "object" && error !== null && "_tag" in error) return String(error._tag)
  return error instanceof Error ? error.name : typeof error
}
