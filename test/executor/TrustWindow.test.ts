/**
 * Goal: whatever is renewed, doubted, refused or slept through, a process is never told that it holds
 * its lease later than the window after the send time of its last good renewal, on either clock.
 * Method: generated histories against a model that only remembers send times.
 * Covers I3, I11, P-13, P-14, P-17, K-051, K-052, K-055.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect, Schema } from "effect"
import * as TrustWindow from "../../src/executor/TrustWindow.ts"

const step = Schema.Int.check(Schema.isBetween({ minimum: 0, maximum: 60 }))
const Event = Schema.Union([
  // The machine runs, or is suspended: then only the uptime moves.
  Schema.Struct({ _tag: Schema.Literal("Pass"), running: step, suspended: step }),
  // A renewal that was sent so long ago is granted now.
  Schema.Struct({ _tag: Schema.Literal("Granted"), sentAgo: step }),
  Schema.Struct({ _tag: Schema.Literal("Failed") }),
  Schema.Struct({
    _tag: Schema.Literal("Refused"),
    state: Schema.Literals(["expired", "revoked", "revoking", "released"])
  })
])

const windowNanos = 45n

describe("the trust window", () => {
  it.effect.prop(
    "never outlasts the last good renewal's send time, and a lost lease stays lost",
    { events: Schema.Array(Event) },
    ({ events }) =>
      Effect.sync(() => {
        let now = { monotonicNanos: 1000n, uptimeNanos: 5000n }
        let window = TrustWindow.opened(now)
        let sent = now
        let lost = false
        for (const event of events) {
          switch (event._tag) {
            case "Pass":
              now = {
                monotonicNanos: now.monotonicNanos + BigInt(event.running),
                uptimeNanos: now.uptimeNanos + BigInt(event.running + event.suspended)
              }
              break
            case "Granted": {
              const at = {
                monotonicNanos: now.monotonicNanos - BigInt(event.sentAgo),
                uptimeNanos: now.uptimeNanos - BigInt(event.sentAgo)
              }
              window = TrustWindow.renewed(window, at)
              if (!lost) sent = at
              break
            }
            case "Failed":
              window = TrustWindow.doubted(window)
              break
            case "Refused":
              window = TrustWindow.closed(window, TrustWindow.lostBy(event.state))
              lost = true
          }
          const verdict = TrustWindow.judge(window, now, windowNanos)
          const over =
            now.monotonicNanos - sent.monotonicNanos >= windowNanos ||
            now.uptimeNanos - sent.uptimeNanos >= windowNanos
          if (lost || over) assert.notInclude(["held", "unverified"], verdict)
          else assert.include(["held", "unverified"], verdict)
          if (verdict === "held") assert.isTrue(window.verified)
          if (lost) assert.strictEqual(verdict, window.lost)
        }
      })
  )

  it("counts a slow answer from when the renewal was sent", () => {
    const at = (nanos: bigint) => ({ monotonicNanos: nanos, uptimeNanos: nanos })
    const window = TrustWindow.renewed(TrustWindow.opened(at(0n)), at(10n))
    assert.strictEqual(TrustWindow.judge(window, at(54n), windowNanos), "held")
    assert.strictEqual(TrustWindow.judge(window, at(55n), windowNanos), "expired")
  })

  it("is closed by a suspend that the monotonic clock does not show", () => {
    const window = TrustWindow.opened({ monotonicNanos: 0n, uptimeNanos: 0n })
    assert.strictEqual(
      TrustWindow.judge(window, { monotonicNanos: 1n, uptimeNanos: 46n }, windowNanos),
      "clockGap"
    )
  })
})
