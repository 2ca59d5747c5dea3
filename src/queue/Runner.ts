/**
 * Runs the items of one queue in this process.
 *
 *   claimed --> buffer --slot free--> live --handler ended, or waits--> settling --durable--> gone
 *                 |                     |
 *                 +-- drain, or waited  +-- drain --> handed back
 *                     for too long --> handed back
 *
 * Plain synchronous state around one fiber for each item. A slot is free at the outcome, and the
 * outcome is kept here until it is durable: a fiber that waited for that would hold ten slots down to
 * 13,000 items a second, where 45,000 are possible. The backlog of outcomes has its own bound.
 *
 * `held` is the truth about what this process has: the audit gives back what the database believes
 * to be here and is not in it. After a crash nothing of this is left, and the claims are recovered
 * through the executor's lease.
 */
import {
  Clock,
  Context,
  type Cause,
  DateTime,
  Effect,
  Exit,
  type Fiber,
  Option,
  Scope
} from "effect"
import { Headers, HttpTraceContext } from "effect/http"
import * as Actor from "../actor/Actor.ts"
import { abandonAfter } from "../database/Deadline.ts"
import { reach } from "../testing/FaultPoint.ts"
import * as Hold from "./Hold.ts"
import { Attempt } from "./Attempt.ts"
import {
  type ClaimedRow,
  claimItems,
  type Floor,
  type Lanes,
  lowestFloor,
  type Settled
} from "./QueueStore.ts"
import type { QueueRuntime } from "./QueueRuntime.ts"
import * as Reservations from "./Reservations.ts"
import { defaultTimes, type RetryPolicy } from "./RetryPolicy.ts"
import * as Verdict from "./Verdict.ts"

export interface ItemContext {
  readonly id: string
  readonly attempt: number
  readonly isLastAttempt: boolean
  readonly key: Option.Option<string>
  readonly enqueuedAt: DateTime.Utc
  readonly deadline: Option.Option<DateTime.Utc>
}

export interface Options<E, R> {
  readonly queue: string
  readonly lanes: Lanes
  readonly slots: number
  readonly attemptTimeoutMillis: number
  /** Claims depend on what other processes run, so a settled item is worth a hint to them. */
  readonly limited: boolean
  /** A claim is counted as a start, so nothing is claimed ahead of the free slots. */
  readonly rated: boolean
  readonly retry: RetryPolicy<E> | undefined
  readonly handle: (
    payload: unknown,
    item: ItemContext
  ) => Effect.Effect<
    string | null | Verdict.Committed,
    E | Verdict.AttemptFailure,
    R | Scope.Scope | Attempt
  >
  readonly encodeError: (error: E) => Effect.Effect<string, unknown, R>
  /** `handle` commits the outcome with what it writes. */
  readonly transaction?: boolean | undefined
  /** A private queue: what runs on it is no work, and nobody else is told of its outcomes. */
  readonly private?: { readonly onSettled: (id: string) => void } | undefined
}

/** What the queue monitor has to know of this process. Instants are monotonic milliseconds. */
export interface Facts {
  /** What a claim takes could start at once: a slot is free for it, and the lease is trusted. */
  readonly hasRoom: boolean
  /** No item here has lost an executor before, so one that has may come. */
  readonly hasRoomForSuspect: boolean
  /** Claimed items wait here although slots are free and the lease is trusted. */
  readonly hasUnstarted: boolean
  /** So many were started, and so many given back because they had waited for too long. */
  readonly startedCount: number
  readonly expiredCount: number
  /** The last claim that was answered, with nothing perhaps, and the last that took something. */
  readonly answeredMillis: number
  readonly takenMillis: number
}

export interface Runner {
  readonly queue: string
  readonly queueId: number
  readonly isPrivate: boolean
  readonly claimer: Actor.Actor<unknown>
  /** There may be work: look from the start. */
  readonly hintUnsafe: () => void
  /**
   * It is time to look for what nobody told of: the lanes to look into. None while there is no room for
   * more, or while it claims of its own accord.
   */
  readonly pollUnsafe: () => ReadonlyArray<number>
  readonly holdsUnsafe: (id: string, attempt: number) => boolean
  /** A claim is on its way, and what it has taken is not in `held` yet. */
  readonly isClaimingUnsafe: () => boolean
  readonly cancelUnsafe: (id: string, attempt: number) => void
  readonly factsUnsafe: () => Facts
  /**
   * Ends attempts whose time or deadline is over, gives back what has waited for too long, and ends the
   * process for a handler that does not stop. Tells how many items have to be watched.
   */
  readonly enforceUnsafe: (nowMillis: number) => number
  /** How long an outcome has been kept out of the database by a lock on its row. */
  readonly busyMillisUnsafe: (nowMillis: number) => number
  /**
   * Gives back what has not started, lets what runs end until then, or until the watchdog fires, and hands
   * that back as well.
   */
  readonly drain: (untilMillis: number) => Effect.Effect<void>
  /** Stops everything and stores nothing. */
  readonly abandonUnsafe: () => void
  readonly countsUnsafe: () => Readonly<Record<"buffered" | "live" | "held", number>>
}

type Stop = "timeout" | "deadline" | "cancel" | "drain" | "lost" | "park"

interface Work extends Omit<ClaimedRow, "id"> {
  readonly id: string
  /** Monotonic. */
  readonly deadlineMillis: number
}

interface Live {
  readonly work: Work
  readonly fiber: Fiber.Fiber<Verdict.Verdict>
  readonly timeoutMillis: number
  stop: Stop | undefined
  /** When it was told to. */
  stoppedMillis: number
  /** What becomes of it if it was stopped to be parked. */
  parked: Verdict.Settle | undefined
}

/** Of one claim. */
const batchMax = 1000

/** Of what waits here to be started: a batch that is worked off while the next one is claimed. */
const prefetchMax = 2 * batchMax

/** Outcomes that are not durable yet; beyond it nothing new starts. */
const unsettledMax = 4000

/** Handlers that end at once would otherwise keep timers and sockets waiting for a whole batch. */
const startsPerTurn = 256

/** Work for so long is claimed ahead of the free slots. */
const prefetchMillis = 100

/**
 * Beyond its grace: the driver takes five seconds, which is the default, to give up an interrupted
 * statement on a connection that has gone silent, and that is not the handler's fault.
 */
const graceSlackMillis = 250

export const make = Effect.fnUntraced(function* <E, R>(
  runtime: QueueRuntime["Service"],
  options: Options<E, R>
): Effect.fn.Return<Runner, never, R | Scope.Scope> {
  const { lanes, slots } = options
  const { executor, settler } = runtime
  const isPrivate = options.private !== undefined
  // One outcome more or less: a probe must not wait for a backlog of business.
  const pendingMax = isPrivate ? Number.POSITIVE_INFINITY : unsettledMax
  const context = yield* Effect.context<R>()
  const clock = yield* Clock.Clock
  const nowMillis = () => Number(clock.monotonicTimeNanosUnsafe()) / 1e6

  const buffer = Reservations.make<Work>()
  const live = new Set<Live>()
  const held = new Map<string, number>()
  const emptied = new Set<() => void>()
  let pumping = false
  let draining = false
  let abandoned = false
  let claiming = false
  let startedCount = 0
  let expiredCount = 0
  let answeredMillis = -Infinity
  let takenMillis = -Infinity
  // Outcomes whose row somebody else has locked, oldest first, and since when.
  const busy = new Map<Work, number>()
  let ended = 0
  let prefetch = 0
  let lastClaimMillis = nowMillis()
  let fullScanMillis = 0
  let floors = new Map<number, Floor>()
  let keyCursor = ""
  // Claims from the first key to the last have found less than they asked for: without a hint there is
  // nothing to look for. `isShortWalk`: so far, since the first key.
  let exhausted = false
  let isShortWalk = true
  let hold = Hold.open

  const parkWork = (work: Work, verdict: Verdict.Settle) => {
    runtime.parker.pushUnsafe(
      // Without losses, which are forgotten, it is no suspect.
      { id: work.id, attempt: work.attempt, lane: lanes.started, waits: verdict.waits ?? [] },
      (exit) => settledWork(work, verdict, exit, true)
    )
  }

  const settleWork = (work: Work, verdict: Verdict.Settle, started: boolean) => {
    if (verdict.outcome === "park") return parkWork(work, verdict)
    const returns = verdict.outcome === "retry" || verdict.outcome === "hand-back"
    settler.pushUnsafe(
      {
        id: work.id,
        attempt: work.attempt,
        outcome: verdict.outcome,
        reason: verdict.reason,
        result: verdict.result,
        // What has run belongs to this version; what has not, to whoever comes first.
        lane: returns
          ? started
            ? work.losses > 0
              ? lanes.suspect
              : lanes.started
            : work.lane_id
          : null,
        delayMillis: verdict.delayMillis > 0 ? verdict.delayMillis : null
      },
      (exit) => settledWork(work, verdict, exit, started)
    )
  }

  // A later attempt of the same item may have come here while this one was on its way out.
  const forget = (work: Work) => {
    if (held.get(work.id) === work.attempt) held.delete(work.id)
  }

  const settledWork = (
    work: Work,
    verdict: Verdict.Settle,
    exit: Exit.Exit<Settled, unknown>,
    started: boolean
  ) => {
    if (Exit.isFailure(exit)) {
      // Interrupted: the lease is lost or the process ends, and a peer recovers the item.
      if (abandoned || Exit.hasInterrupts(exit)) return
      // The settler repeats what can be repeated, so this row's own data is at fault.
      settleWork(work, Verdict.died("its result could not be stored"), started)
      return
    }
    if (exit.value === "busy") {
      if (!busy.has(work)) busy.set(work, nowMillis())
      return runtime.later(20, () => settleWork(work, verdict, started))
    }
    if (busy.size > 0) busy.delete(work)
    gone(work, verdict, exit.value === "stale")
  }

  /** The database knows what has become of it. */
  const gone = (
    work: Work,
    verdict: Pick<Verdict.Settle, "outcome" | "delayMillis">,
    isStale = false
  ) => {
    forget(work)
    if (work.losses > 0) releaseSuspect()
    // Not before it is committed: a look at the table before that finds nothing.
    if (verdict.delayMillis > 0) runtime.dueInUnsafe(verdict.delayMillis)
    const returns = verdict.outcome === "retry" || verdict.outcome === "hand-back"
    if (!isStale && !returns && verdict.outcome !== "park") {
      if (options.private === undefined) runtime.settledUnsafe(work.id)
      else options.private.onSettled(work.id)
    }
    // It waits again at once, or its end makes room under a limit. What a drain gives back is the peers'.
    if (options.limited || (returns && verdict.delayMillis === 0)) {
      if (!isPrivate) runtime.waker.workUnsafe(lanes.queueId)
      if (!draining) hintUnsafe()
    }
    pump()
  }

  // The last claim was allowed to see one suspect, so that it found no more says nothing: without a
  // look now, the items of a lost executor would go on one in each poll interval.
  const releaseSuspect = () => {
    runtime.releaseSuspectUnsafe()
    exhausted = false
    if (wanted() > 0) claimer.wakeUnsafe()
  }

  const retriesMax = options.retry === undefined ? 0 : (options.retry.times ?? defaultTimes)
  const itemOf = (work: Work): ItemContext => ({
    id: work.id,
    attempt: work.attempt,
    isLastAttempt: work.failures >= retriesMax,
    key: work.key === null ? noKey : Option.some(work.key),
    enqueuedAt: DateTime.fromDateUnsafe(work.enqueued_at),
    deadline:
      work.deadline_in_ms === null
        ? noDeadline
        : Option.some(DateTime.makeUnsafe(clock.currentTimeMillisUnsafe() + work.deadline_in_ms))
  })

  const attemptOf = (work: Work): Attempt["Service"] => ({
    id: work.id,
    attempt: work.attempt,
    lease: executor.lease,
    checkpoints: runtime.checkpoints,
    waits: runtime.waits,
    sql: executor.pools.work,
    parkUnsafe: (waits, dueInMillis) => {
      for (const entry of live) if (entry.work === work) return park(entry, waits, dueInMillis)
    },
    later: runtime.later,
    resultMax: executor.settings.payloadMax,
    progress: undefined,
    used: undefined,
    stored: undefined,
    inTransaction: options.transaction === true,
    busyCount: 0,
    pending: undefined
  })

  const park = (entry: Live, waits: ReadonlyArray<string>, dueInMillis: number | undefined) => {
    if (entry.stop !== undefined) return
    entry.parked = Verdict.settle("park", {
      waits,
      ...(dueInMillis === undefined ? {} : { delayMillis: dueInMillis })
    })
    stopLive(entry, "park")
  }

  const failureOf = (work: Work): Verdict.Failure<E> => ({
    policy: options.retry,
    failures: work.failures + 1,
    encodeError: (error) => Effect.provideContext(options.encodeError(error), context)
  })

  // The handler and what becomes of it, in one fiber. Only items that came with a trace get a span:
  // it costs as much as all the rest of an item.
  const program = (
    work: Work,
    scope: Scope.Closeable
  ): Effect.Effect<Verdict.Verdict, never, R | Scope.Scope | Attempt> => {
    const handled = Effect.suspend(() => options.handle(work.payload, itemOf(work)))
    const traced =
      work.trace === null
        ? handled
        : Option.match(HttpTraceContext.w3c(Headers.fromInput({ traceparent: work.trace })), {
            onNone: () => handled,
            onSome: (parent) =>
              Effect.withSpan(handled, options.queue, { parent, attributes: { item: work.id } })
          })
    return Effect.matchCauseEffect(traced, {
      onSuccess: (result): Effect.Effect<Verdict.Verdict> =>
        Effect.succeed(
          result === null || typeof result === "string"
            ? Verdict.settle("completed", { result })
            : result
        ),
      onFailure: (cause: Cause.Cause<E | Verdict.AttemptFailure>) =>
        Verdict.ofCause(cause, failureOf(work))
    }).pipe((decided) =>
      Effect.onExit(decided, (exit) =>
        hasFinalizers(scope) ? Scope.close(scope, exit) : Effect.void
      )
    )
  }

  const fork = Effect.runForkWith(context)

  // In the context of the item from the start: provided around the handler instead, it costs a copy of
  // all services for each item (2 us).
  const forkItem = (work: Work): Fiber.Fiber<Verdict.Verdict> => {
    const scope = Scope.makeUnsafe()
    const itemContext = Context.add(
      Context.add(context as Context.Context<R>, Scope.Scope, scope),
      Attempt,
      attemptOf(work)
    )
    return Effect.runForkWith(itemContext)(program(work, scope))
  }

  const start = (work: Work) => {
    if (work.cancel_requested) return settleWork(work, Verdict.settle("cancelled"), false)
    if (work.deadlineMillis !== Infinity && work.deadlineMillis <= nowMillis()) {
      return settleWork(work, deadlineExceeded, false)
    }
    const fiber = forkItem(work)
    const exit = fiber.pollUnsafe()
    if (exit !== undefined) return finish(work, exit)
    const entry: Live = {
      work,
      fiber,
      timeoutMillis: nowMillis() + options.attemptTimeoutMillis,
      stop: undefined,
      stoppedMillis: Infinity,
      parked: undefined
    }
    live.add(entry)
    // By the handler itself, before it waited for anything.
    if (abandoned) stopLive(entry, "lost")
    if (live.size === 1) runtime.enforceSoonUnsafe()
    fiber.addObserver((later) => {
      live.delete(entry)
      finish(work, later, entry)
      if (live.size === 0) for (const observer of emptied) observer()
      pump()
    })
  }

  const finish = (work: Work, exit: Exit.Exit<Verdict.Verdict>, entry?: Live) => {
    const stop = entry?.stop
    ended++
    if (abandoned || stop === "lost") return
    // Told apart by why we stopped it, not by how it ended: a handler may end in its own way. One that
    // had its answer before it noticed is settled with that answer.
    if (Exit.isSuccess(exit)) {
      const verdict = exit.value
      if (verdict._tag === "Settle") return settleWork(work, verdict, true)
      if (verdict._tag === "Committed") return gone(work, completed)
      if (verdict.lost !== undefined) return runtime.lostUnsafe(verdict.lost)
      forget(work)
      if (work.losses > 0) releaseSuspect()
      return
    }
    switch (stop) {
      case "cancel":
        return settleWork(work, Verdict.settle("cancelled"), true)
      case "deadline":
        return settleWork(work, deadlineExceeded, true)
      case "drain":
        return settleWork(work, Verdict.settle("hand-back"), true)
      case "park":
        return settleWork(work, entry?.parked ?? Verdict.settle("hand-back"), true)
      case "timeout":
        fork(Verdict.ofTimeout(failureOf(work))).addObserver((decided) => {
          if (Exit.isSuccess(decided) && decided.value._tag === "Settle") {
            settleWork(work, decided.value, true)
          }
        })
        return
      default:
        return settleWork(work, Verdict.died("the handler was interrupted"), true)
    }
  }

  const pump = () => {
    if (pumping || abandoned) return
    pumping = true
    let starts = 0
    // In this order: it is asked after every item, and the lease costs a look at the clock.
    while (buffer.count() > 0 && mayStart()) {
      const work = buffer.next()
      startedCount++
      if (work !== undefined) start(work)
      if (++starts === startsPerTurn) {
        setImmediate(pump)
        break
      }
    }
    pumping = false
    if (!exhausted && buffer.count() <= prefetch / 2 && wanted() > 0) claimer.wakeUnsafe()
  }

  const mayStart = (): boolean =>
    !draining &&
    !abandoned &&
    live.size < slots &&
    settler.pendingUnsafe() < pendingMax &&
    executor.lease.isTrustedUnsafe()

  const wanted = (): number => {
    if (draining || abandoned || !executor.lease.isTrustedUnsafe()) return 0
    if (hold !== Hold.open && Hold.holds(hold, nowMillis())) return 0
    const free = slots - live.size + prefetch - buffer.count()
    return Math.max(0, Math.min(batchMax, free, pendingMax - settler.pendingUnsafe()))
  }

  const measure = (now: number) => {
    const elapsed = now - lastClaimMillis
    // Two claims close together would divide by next to nothing, and take far more than can be run.
    if (elapsed < prefetchMillis / 5) return
    const ahead = Math.round((ended / elapsed) * prefetchMillis)
    // Up at once, down by halves: a backlog that is there is worked off at full speed from the start.
    prefetch = options.rated
      ? 0
      : Math.min(prefetchMax, Math.max(ahead, Math.round((prefetch + ahead) / 2)))
    ended = 0
    lastClaimMillis = now
  }

  const claim = Effect.gen(function* () {
    const now = nowMillis()
    measure(now)
    if (Hold.isDue(hold, now)) {
      hold = Hold.open
      exhausted = false
      rescan(now)
    }
    const count = wanted()
    if (count === 0) return { claimed: 0, again: 0 }
    if (now - fullScanMillis > 1000) rescan(now)
    const scannedFromStart = floors.size === 0
    if (keyCursor === "") isShortWalk = true
    const reserved = lanes.suspects.length > 0 && runtime.reserveSuspectUnsafe(hintUnsafe)
    claiming = true
    const sent = nowMillis()
    const rows = yield* claimItems(executor.pools.work, {
      lanes,
      floors: lanes.all.map((lane) => floors.get(lane) ?? lowestFloor),
      wanted: count,
      suspectsWanted: reserved ? 1 : 0,
      keyCursor
    }).pipe(
      // A connection that has gone silent would keep this queue waiting for ever. What the claim has
      // taken all the same is unknown here, and the audit gives it back.
      abandonAfter(executor.settings.watchdog / 2),
      // Before anything else can happen to them: from here on the audit knows them.
      Effect.onExit((exit) =>
        Effect.sync(() => {
          claiming = false
          if (Exit.isSuccess(exit)) answeredMillis = nowMillis()
          const claimed = Exit.isSuccess(exit) ? exit.value : []
          take(claimed, sent)
          if (!reserved) return
          if (claimed.some((row) => row.losses > 0)) runtime.keepSuspectUnsafe()
          else runtime.releaseSuspectUnsafe()
        })
      )
    )
    if (!isPrivate) yield* reach("queue.claim.committed")
    const claimed = rows.filter((row) => row.id !== null).length
    const short = claimed < count
    // On a private queue there is never more than one.
    // Less than it asked for because keys have had their share is not the end of what there is.
    const hasMore = rows.some((row) => row.id === null && row.deadline_in_ms === 0)
    isShortWalk &&= short && !hasMore
    exhausted =
      isPrivate ||
      rows.some((row) => row.id === null && row.cancel_requested) ||
      (isShortWalk && scannedFromStart && keyCursor === "")
    if (short) rescan(now)
    pump()
    return { claimed, again: exhausted ? 0 : 1 }
  })

  const handBack = (works: ReadonlyArray<Work>) => {
    for (const work of works) settleWork(work, Verdict.settle("hand-back"), false)
  }

  const expireReservations = (now: number) => {
    const late = buffer.takeSince(now - executor.settings.reservationValidity)
    if (late.length === 0) return
    expiredCount += late.length
    // Handlers have become slow: claimed ahead again, they would wait here as long once more.
    prefetch = 0
    handBack(late)
  }

  const rescan = (now: number) => {
    floors = new Map()
    fullScanMillis = now
  }

  const take = (rows: ReadonlyArray<ClaimedRow>, sent: number) => {
    const works: Array<Work> = []
    for (const row of rows) {
      const { id } = row
      if (id === null) {
        keyCursor = row.key ?? keyCursor
        const told = { isHeld: row.cancel_requested, dueInMillis: row.deadline_in_ms }
        hold = Hold.told(hold, told, nowMillis(), executor.settings.pollInterval)
        continue
      }
      held.set(id, row.attempt)
      if (row.losses === 0) floors.set(row.lane_id, { rank: row.rank, seq: BigInt(row.seq) })
      works.push({
        ...row,
        id,
        deadlineMillis: row.deadline_in_ms === null ? Infinity : sent + row.deadline_in_ms
      })
    }
    if (works.length === 0) return
    takenMillis = nowMillis()
    // A claim that was on its way when the drain began.
    if (draining) handBack(works)
    else buffer.add(works, takenMillis)
  }

  const claimer: Actor.Actor<unknown> = yield* Actor.make({
    name: isPrivate ? "probe_claimer" : `queue_claimer ${options.queue}`,
    step: claim,
    // Again at once while there is more to take and room to take it; then it sleeps until it is told, or
    // until a rate lets the next one start. What nobody tells of is looked for by one statement for all
    // queues, `queue_wake`.
    cadence: (report) =>
      report["again"] === 1 && wanted() > 0 ? 0 : Hold.pauseMillis(hold, nowMillis()),
    progressWithin: executor.settings.watchdog,
    onFailure: { first: "20 millis", max: "2 seconds" }
  })

  const hintUnsafe = () => {
    exhausted = false
    rescan(nowMillis())
    // Also what waits here: it was not started while the lease was in doubt, and nothing else looks.
    pump()
    if (wanted() > 0) claimer.wakeUnsafe()
  }

  const stopLive = (entry: Live, stop: Stop) => {
    if (entry.stop !== undefined) return
    entry.stop = stop
    entry.stoppedMillis = nowMillis()
    entry.fiber.interruptUnsafe()
  }

  const whenEmpty = Effect.callback<void>((resume) => {
    if (live.size === 0) return resume(Effect.void)
    const observer = () => resume(Effect.void)
    emptied.add(observer)
    return Effect.sync(() => emptied.delete(observer))
  })

  // One that a drain has told to stop is the drain's: the process ends anyway.
  const isStubborn = (entry: Live, now: number): boolean => {
    if (entry.stop === "drain" || entry.stop === "lost") return false
    // Nobody waits for one to be parked: what it still has to do has the time of its attempt.
    const since = entry.stop === "park" ? entry.timeoutMillis : entry.stoppedMillis
    return since + executor.settings.cancelGrace + graceSlackMillis <= now
  }

  return {
    queue: options.queue,
    queueId: lanes.queueId,
    isPrivate,
    claimer,
    hintUnsafe,
    pollUnsafe: () => {
      if (isPrivate || wanted() === 0) return []
      if (exhausted) return [...lanes.all, ...lanes.suspects]
      claimer.wakeUnsafe()
      return []
    },
    holdsUnsafe: (id, attempt) => held.get(id) === attempt,
    isClaimingUnsafe: () => claiming,
    cancelUnsafe: (id, attempt) => {
      const isIt = (work: Work) => work.id === id && work.attempt === attempt
      for (const entry of live) if (isIt(entry.work)) return stopLive(entry, "cancel")
      const work = buffer.remove(isIt)
      if (work !== undefined) settleWork(work, Verdict.settle("cancelled"), false)
    },
    factsUnsafe: () => ({
      hasRoom: mayStart() && buffer.count() === 0,
      hasRoomForSuspect: !runtime.holdsSuspectUnsafe(),
      hasUnstarted: mayStart() && buffer.count() > 0,
      startedCount,
      expiredCount,
      answeredMillis,
      takenMillis
    }),
    enforceUnsafe: (now) => {
      for (const entry of live) {
        if (isStubborn(entry, now)) executor.fireUnsafe("stubborn", options.queue)
        else if (entry.work.deadlineMillis <= now) stopLive(entry, "deadline")
        else if (entry.timeoutMillis <= now) stopLive(entry, "timeout")
      }
      expireReservations(now)
      return live.size + buffer.count()
    },
    busyMillisUnsafe: (now) => {
      for (const since of busy.values()) return now - since
      return 0
    },
    drain: (untilMillis) =>
      Effect.gen(function* () {
        draining = true
        handBack(buffer.takeAll())
        // A handler may have asked before it waited for anything: it is not live until its start returns.
        yield* Effect.yieldNow
        const remaining = Math.max(0, untilMillis - nowMillis())
        // A process that the watchdog ends has `forcedExit` for all of it, whatever began the drain.
        const fired = Effect.catch(executor.fired, () => Effect.void)
        yield* Effect.raceAllFirst([whenEmpty, Effect.sleep(remaining), fired])
        for (const entry of live) stopLive(entry, "drain")
        yield* Effect.raceFirst(whenEmpty, Effect.sleep(executor.settings.cancelGrace))
      }),
    abandonUnsafe: () => {
      abandoned = true
      buffer.takeAll()
      for (const entry of live) stopLive(entry, "lost")
    },
    countsUnsafe: () => ({ buffered: buffer.count(), live: live.size, held: held.size })
  }
})

const noKey: Option.Option<string> = Option.none()
const noDeadline: Option.Option<DateTime.Utc> = Option.none()

const completed = Verdict.settle("completed")
const deadlineExceeded = Verdict.settle("failed", { reason: "DeadlineExceeded" })

const hasFinalizers = (scope: Scope.Closeable): boolean => scope.state._tag !== "Empty"
