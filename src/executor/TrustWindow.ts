/**
 * When a process stops trusting itself: pure, on two clocks that no wall clock can set back.
 *
 *   open --renewal sent and granted--> open, until sent + window
 *   open --a renewal failed, or its connection is known to be lost--> unverified --granted--> open
 *   open, unverified --window over on either clock, or refused by the database--> closed, for ever
 *
 * I11. The window starts when the renewal is *sent*: a slow answer cannot stretch it.
 *
 * The monotonic clock stands still while the machine is suspended, and the uptime does not; the
 * window is over when it is over on one of them.
 */

export type Lost = "expired" | "revoked" | "released" | "clockGap"

export interface Instant {
  readonly monotonicNanos: bigint
  readonly uptimeNanos: bigint
}

export interface TrustWindow {
  readonly sent: Instant
  readonly verified: boolean
  readonly lost: Lost | undefined
}

export type Verdict = "held" | "unverified" | Lost

export const opened = (sent: Instant): TrustWindow => ({ sent, verified: true, lost: undefined })

/** The database granted the renewal sent at `sent`. A lost lease stays lost. */
export const renewed = (window: TrustWindow, sent: Instant): TrustWindow =>
  window.lost === undefined ? { sent, verified: true, lost: undefined } : window

/** The outcome of a renewal is not known, or its connection is gone: what was granted still runs. */
export const doubted = (window: TrustWindow): TrustWindow =>
  window.lost === undefined ? { ...window, verified: false } : window

export const closed = (window: TrustWindow, lost: Lost): TrustWindow =>
  window.lost === undefined ? { ...window, lost } : window

export const judge = (window: TrustWindow, now: Instant, windowNanos: bigint): Verdict => {
  if (window.lost !== undefined) return window.lost
  if (now.monotonicNanos - window.sent.monotonicNanos >= windowNanos) return "expired"
  if (now.uptimeNanos - window.sent.uptimeNanos >= windowNanos) return "clockGap"
  return window.verified ? "held" : "unverified"
}

/** When it closes by itself, on each of the clocks. */
export const until = (window: TrustWindow, windowNanos: bigint): Instant | undefined =>
  window.lost === undefined
    ? {
        monotonicNanos: window.sent.monotonicNanos + windowNanos,
        uptimeNanos: window.sent.uptimeNanos + windowNanos
      }
    : undefined

/** What the database says of a lease that it did not renew. */
export const lostBy = (state: string): Lost =>
  state === "revoking" || state === "revoked"
    ? "revoked"
    : state === "released"
      ? "released"
      : "expired"
