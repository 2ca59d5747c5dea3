/**
 * Shows that this process lives, and watches a peer: when one dies, its work is taken over within the
 * grace instead of at the end of its lease.
 *
 *   away --session up, lock taken--> held, watching --session lost--> away: renew, and say so
 *     ^                                 |
 *     +---------- orderly end ----------+
 *
 * The lock is held by the listening session, which waits for nothing; a wait for a neighbour's lock in
 * it would make the ring a deadlock. The watch is a poll on the work pool, because whoever waits for a
 * lock keeps a snapshot, and VACUUM every dead row, for as long as it waits.
 *
 * Away, this process says so itself, on another connection, and renews until that has worked: a peer
 * must not take an executor for dead that has only lost a connection. When it dies while it is away,
 * its lease has to run out.
 */
import type { PgConnection } from "@effect/sql-pg"
import { Clock, Effect, Latch, Random, Result, type Scope } from "effect"
import type { SqlError } from "effect/sql/SqlError"
import * as Actor from "../actor/Actor.ts"
import { type Abandoned, abandonAfter } from "../database/Deadline.ts"
import type { Executor } from "./Executor.ts"
import * as PresenceStore from "./PresenceStore.ts"
import * as PresenceWatch from "./PresenceWatch.ts"

export interface Presence {
  /** Beside a session, on it: takes the lock, and again when the database says that it is not held. */
  readonly hold: (session: PgConnection.PgConnection) => Effect.Effect<never>
  readonly lostUnsafe: () => void
  /** The orderly end of taking part, while the session is still there. */
  readonly leave: Effect.Effect<void>
  readonly actor: Actor.Actor<SqlError | Abandoned>
}

export interface Options {
  readonly executor: Pick<Executor["Service"], "id" | "version" | "accepts"> & {
    readonly settings: Pick<
      Executor["Service"]["settings"],
      "presenceGrace" | "abandonAfter" | "watchdog"
    >
    readonly pools: Pick<Executor["Service"]["pools"], "work">
  }
  readonly renewUnsafe: () => void
  /** A peer was marked: whoever scans finishes what was begun. */
  readonly markedUnsafe: () => void
}

/** Soon, because a peer's look is all that is in the way, and then a session the server thinks alive. */
const holdAgainMillis = { first: 20, max: 1000 } as const

/** `undefined` when it is switched off: no lock, no watch, no row. */
export const make = Effect.fnUntraced(function* (
  options: Options
): Effect.fn.Return<Presence | undefined, never, Scope.Scope> {
  const { executor, markedUnsafe, renewUnsafe } = options
  const { pools, settings } = executor
  const grace = settings.presenceGrace
  if (!Number.isFinite(grace)) return undefined
  const clock = yield* Clock.Clock
  const holdAgain = Latch.makeUnsafe()
  let heldAtMicros: number | undefined
  /** A session is lost and the database has not been told. */
  let lost: { readonly heldAtMicros: number | undefined } | undefined
  let leaving = false
  let watch = PresenceWatch.blind
  let roundDueNanos = 0n

  const bounded = abandonAfter(settings.abandonAfter)

  const hold = (session: PgConnection.PgConnection): Effect.Effect<never> =>
    Effect.gen(function* () {
      let refusals = 0
      while (!leaving) {
        holdAgain.closeUnsafe()
        const answer = yield* Effect.result(
          bounded(PresenceStore.holdPresence(session, executor.id))
        )
        if (Result.isSuccess(answer) && answer.success !== undefined) {
          refusals = 0
          heldAtMicros = answer.success
          lost = undefined
          roundDueNanos = 0n
          actor.wakeUnsafe()
          yield* holdAgain.await
          continue
        }
        // A session that has failed ends with its listener, and a lost lease shows at a renewal.
        if (Result.isFailure(answer)) renewUnsafe()
        const ceiling = Math.min(holdAgainMillis.max, holdAgainMillis.first * 2 ** refusals++)
        yield* Effect.sleep(ceiling * (0.5 + (yield* Random.next) / 2))
      }
      return yield* Effect.never
    })

  const tellLost = Effect.fnUntraced(function* (session: NonNullable<typeof lost>) {
    renewUnsafe()
    yield* bounded(PresenceStore.leavePresence(pools.work, executor.id, session.heldAtMicros))
    if (lost === session) lost = undefined
    return { ...idle, lost: 1 }
  })

  const look = Effect.fnUntraced(function* (mine: number) {
    const startedNanos = clock.monotonicTimeNanosUnsafe()
    const everyone = startedNanos >= roundDueNanos
    const row = yield* bounded(
      PresenceStore.watchPresence(pools.work, executor.id, {
        versions: [executor.version, ...executor.accepts],
        everyone,
        followed: [...watch.absences.keys()]
      })
    )
    if (row === undefined) return idle
    const seen: PresenceWatch.Look = {
      atMicros: row.at,
      heldAtMicros: row.held_at ?? undefined,
      renewedAtMicros: row.renewed_at,
      nanos: clock.monotonicTimeNanosUnsafe(),
      isRound: row.is_round,
      present: row.present,
      missing: row.missing,
      newcomers: row.newcomers
    }
    // What was sent for the session before came late and has undone this one's.
    if (seen.heldAtMicros !== mine && heldAtMicros === mine) holdAgain.openUnsafe()
    watch = PresenceWatch.looked(watch, seen, grace)
    if (everyone) {
      roundDueNanos = startedNanos + BigInt(PresenceWatch.roundMillis(watch)) * 1_000_000n
    }
    if (PresenceWatch.mustRenew(watch, seen)) renewUnsafe()
    const report = { ...idle, members: watch.seen.size, missing: watch.absences.size }
    for (const { id, sinceMicros } of PresenceWatch.condemned(watch, seen, grace)) {
      const absent = { id, watcher: executor.id, sinceMicros, graceMillis: grace }
      const answer = yield* bounded(PresenceStore.markAbsent(pools.work, absent))
      watch = PresenceWatch.answered(watch, id, answer)
      if (answer !== "marked") {
        report.refused++
        continue
      }
      report.marked++
      markedUnsafe()
      yield* Effect.logInfo("executor_presence: a peer is gone, its lease is not waited for").pipe(
        Effect.annotateLogs({ executorId: id, absentMillis: (seen.atMicros - sinceMicros) / 1000 })
      )
    }
    return { ...report, nextMillis: PresenceWatch.pauseMillis(watch, seen, grace) }
  })

  const step = Effect.suspend((): Effect.Effect<Actor.Report, SqlError | Abandoned> => {
    if (lost !== undefined) return tellLost(lost)
    if (heldAtMicros === undefined) {
      watch = PresenceWatch.blind
      return Effect.succeed(idle)
    }
    return look(heldAtMicros)
  })

  const actor: Actor.Actor<SqlError | Abandoned> = yield* Actor.make({
    name: "executor_presence",
    step,
    cadence: (report) => report["nextMillis"] ?? Infinity,
    progressWithin: settings.watchdog,
    onFailure: { first: 100, max: 1000 }
  })

  return {
    hold,
    actor,
    lostUnsafe: () => {
      lost = { heldAtMicros }
      heldAtMicros = undefined
      actor.wakeUnsafe()
    },
    leave: Effect.suspend(() => {
      leaving = true
      return Effect.ignore(bounded(PresenceStore.leavePresence(pools.work, executor.id, undefined)))
    })
  }
})

const idle = { members: 0, missing: 0, marked: 0, refused: 0, lost: 0, nextMillis: Infinity }
