/**
 * The lease this process holds, as the process itself sees it. The database alone grants it; what is
 * known here only lets the process stop sooner.
 *
 * A lost lease stays lost: whoever waits on `lost` stops and stores nothing, and the process ends. On
 * a crash nothing is here to clean up: the lease runs out, and a peer takes the work.
 */
import { Clock, Context, Deferred, Effect, Schema } from "effect"
import type { SqlClient } from "effect/sql"
import { uptime } from "node:os"
import type { Report } from "../actor/Actor.ts"
import { abandonAfter } from "../database/Deadline.ts"
import { reach } from "../testing/FaultPoint.ts"
import { leaseState, renewLease } from "./ExecutorStore.ts"
import type { Resolved } from "./Settings.ts"
import * as TrustWindow from "./TrustWindow.ts"

/** This process may no longer write. Stop; another executor has or will have the work. Never retry it here. */
export class LeaseLost extends Schema.TaggedError<LeaseLost>()("LeaseLost", {
  executorId: Schema.String,
  cause: Schema.Literals(["expired", "revoked", "released", "clockGap"])
}) {
  override get message(): string {
    const causes = {
      expired: "it was not renewed in time",
      revoked: "a peer has taken over its work",
      released: "it was given back at shutdown",
      clockGap: "the machine was suspended for longer than the lease allows"
    }
    return `Executor ${this.executorId} has lost its lease: ${causes[this.cause]}. Stop; a restart is a new executor.`
  }
}

/** Whether the lease still holds is not known. Fail closed: do not make the call; the attempt is retried. */
export class LeaseUnverified extends Schema.TaggedError<LeaseUnverified>()("LeaseUnverified", {
  executorId: Schema.String
}) {
  override get message(): string {
    return (
      `The database does not confirm the lease of executor ${this.executorId}: ` +
      `nothing was sent, and the attempt is retried when it answers again.`
    )
  }
}

/** Time since boot in nanoseconds, suspended time included. Tests put their own clock here. */
export const Uptime = Context.Reference<() => bigint>("tenure/executor/Uptime", {
  defaultValue: () => () => BigInt(Math.round(uptime() * 1000)) * 1_000_000n
})

export interface HeldLease {
  readonly executorId: string
  /** No I/O. `undefined` while the lease is trusted. */
  readonly checkUnsafe: () => LeaseLost | LeaseUnverified | undefined
  readonly check: Effect.Effect<void, LeaseLost | LeaseUnverified>
  /** The same for the hot path, on one clock: true while nothing is known against the lease. */
  readonly isTrustedUnsafe: () => boolean
  /** When the window closes if no renewal is granted any more. `undefined` once the lease is lost. */
  readonly trustedUntilUnsafe: () => TrustWindow.Instant | undefined
  readonly verify: Effect.Effect<void, LeaseLost | LeaseUnverified>
  /** Fails when the lease is lost, and never succeeds. */
  readonly lost: Effect.Effect<never, LeaseLost>
  /** One renewal: the step of the renewal actor. */
  readonly renewOnce: Effect.Effect<Report, LeaseLost | LeaseUnverified>
  /** What others learn about the lease: a refusal by the fence, or the loss of its connection. */
  readonly close: (lost: TrustWindow.Lost) => Effect.Effect<void>
  readonly doubtUnsafe: () => void
  /** Something that runs under the lease could not be stopped: it is not released, it runs out. */
  readonly keepUnsafe: () => void
  readonly isKeptUnsafe: () => boolean
}

export const make = Effect.fnUntraced(function* (options: {
  readonly sql: SqlClient.SqlClient
  readonly executorId: string
  readonly settings: Resolved
  /** When the registration was sent. */
  readonly registered: TrustWindow.Instant
}): Effect.fn.Return<HeldLease> {
  const { executorId, settings, sql } = options
  const clock = yield* Clock.Clock
  const uptimeNanos = yield* Uptime
  const windowNanos = BigInt(Math.round(settings.watchdog * 1_000_000))
  const lost = yield* Deferred.make<never, LeaseLost>()
  let window = TrustWindow.opened(options.registered)
  let kept = false

  const now = (): TrustWindow.Instant => ({
    monotonicNanos: clock.monotonicTimeNanosUnsafe(),
    uptimeNanos: uptimeNanos()
  })

  const closeUnsafe = (cause: TrustWindow.Lost): LeaseLost => {
    window = TrustWindow.closed(window, cause)
    const error = new LeaseLost({ executorId, cause: window.lost ?? cause })
    Deferred.doneUnsafe(lost, Effect.fail(error))
    return error
  }

  const checkUnsafe = (): LeaseLost | LeaseUnverified | undefined => {
    const verdict = TrustWindow.judge(window, now(), windowNanos)
    if (verdict === "held") return undefined
    return verdict === "unverified" ? new LeaseUnverified({ executorId }) : closeUnsafe(verdict)
  }

  const unverified = Effect.suspend((): Effect.Effect<never, LeaseLost | LeaseUnverified> => {
    window = TrustWindow.doubted(window)
    return Effect.fail(checkUnsafe() ?? new LeaseUnverified({ executorId }))
  })

  const renewOnce = Effect.gen(function* () {
    yield* reach("executor.renewing")
    const sent = now()
    // Before anything is sent: a process that wakes from a long pause must not ask for more time.
    const before = checkUnsafe()
    if (before?._tag === "LeaseLost") return yield* before
    const answer = yield* renewLease(sql, executorId, settings.leaseValidity).pipe(
      abandonAfter(settings.abandonAfter),
      // Whatever went wrong, the outcome is unknown: what was granted before still runs.
      Effect.catch(() => unverified)
    )
    if (answer !== "renewed") return yield* closeUnsafe(TrustWindow.lostBy(answer))
    const regained = window.verified ? 0 : 1
    window = TrustWindow.renewed(window, sent)
    const after = checkUnsafe()
    if (after?._tag === "LeaseLost") return yield* after
    return { renewed: 1, regained }
  })

  const verify = Effect.gen(function* () {
    const answer = yield* leaseState(sql, executorId).pipe(
      abandonAfter(settings.abandonAfter),
      Effect.catch(() => unverified)
    )
    if (answer !== "active") return yield* closeUnsafe(TrustWindow.lostBy(answer))
    const known = checkUnsafe()
    if (known !== undefined) return yield* known
  })

  return {
    executorId,
    checkUnsafe,
    check: Effect.suspend((): Effect.Effect<void, LeaseLost | LeaseUnverified> => {
      const refused = checkUnsafe()
      return refused === undefined ? Effect.void : Effect.fail(refused)
    }),
    isTrustedUnsafe: () =>
      window.verified &&
      window.lost === undefined &&
      clock.monotonicTimeNanosUnsafe() - window.sent.monotonicNanos < windowNanos,
    trustedUntilUnsafe: () => TrustWindow.until(window, windowNanos),
    verify,
    lost: Deferred.await(lost),
    renewOnce,
    close: (cause) => Effect.sync(() => void closeUnsafe(cause)),
    doubtUnsafe: () => {
      window = TrustWindow.doubted(window)
    },
    keepUnsafe: () => {
      kept = true
    },
    isKeptUnsafe: () => kept
  }
})
