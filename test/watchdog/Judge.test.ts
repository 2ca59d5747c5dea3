/**
 * Goal: the thread never lets a process live beyond its lease's window, never judges by time in which
 * nobody could run, and names what has stopped.
 * Method: a process in fake time on both clocks, looked at by the judge in each of its rounds.
 * Covers K-039..K-041, K-051, K-052, I11, P-13, P-15, P-17, rows 11 and 24.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect, Schema } from "effect"
import { resolve } from "../../src/executor/Settings.ts"
import { StartupRefused } from "../../src/database/StartupRefused.ts"
import * as TrustWindow from "../../src/executor/TrustWindow.ts"
import { makeJudge, pollMillisOf, type Verdict } from "../../src/watchdog/judge.js"
import { Slot } from "../../src/watchdog/memory.js"

/** In milliseconds: the judge does not care. */
const watchdog = 45_000n
const poll = 250n

const process = () => {
  const judge = makeJudge({ watchdogNanos: watchdog, pollNanos: poll })
  const deadlines = new BigInt64Array(Slot.actors + 2)
  let now = 1_000_000n
  let uptime = 9_000_000n
  let window = TrustWindow.opened({ monotonicNanos: now, uptimeNanos: uptime })
  const look = () => judge(deadlines, deadlines.length, now, uptime)
  const pass = (running: bigint, suspended = 0n) => {
    now += running
    uptime += running + suspended
  }
  const beat = () => {
    const until = TrustWindow.until(window, watchdog)
    deadlines[Slot.main] = now + watchdog
    deadlines[Slot.lease] = until?.monotonicNanos ?? 0n
    deadlines[Slot.uptime] = until?.uptimeNanos ?? 0n
  }
  const renew = (sentAgo: bigint) => {
    window = TrustWindow.renewed(window, {
      monotonicNanos: now - sentAgo,
      uptimeNanos: uptime - sentAgo
    })
    beat()
  }
  /** The actor has succeeded, and owes its next step from now on. */
  const progress = (actor: number) => {
    deadlines[Slot.actors + actor] = now + watchdog
  }
  beat()
  return {
    beat,
    renew,
    progress,
    look,
    pass,
    /** So long, with a look in each interval, until there is a verdict. */
    run: (millis: bigint, alive: () => void = () => {}): Verdict | undefined => {
      for (let passed = 0n; passed < millis; passed += poll) {
        pass(poll)
        alive()
        const verdict = look()
        if (verdict !== undefined) return verdict
      }
      return undefined
    },
    sinceSent: () => now - window.sent.monotonicNanos
  }
}

const at = (verdict: Verdict | undefined) =>
  verdict === undefined ? "nothing" : `${verdict.reason} ${verdict.slot - Slot.actors}`

describe("the watchdog's judgement", () => {
  it("lets an answer of 40 seconds lengthen nothing: the window ends 45 seconds after the sending", () => {
    const one = process()
    assert.isUndefined(one.run(40_000n, one.beat))
    one.renew(40_000n)
    assert.isUndefined(one.look())
    assert.deepStrictEqual(one.run(60_000n, one.beat), { reason: "lease", slot: Slot.lease })
    assert.strictEqual(one.sinceSent(), watchdog)
  })

  it("sees a suspended machine by the uptime, however little the monotonic clock has moved", () => {
    const one = process()
    assert.isUndefined(one.run(1000n, one.beat))
    one.pass(1n, watchdog - 1002n)
    assert.isUndefined(one.look())
    one.pass(1n)
    assert.deepStrictEqual(one.look(), { reason: "suspended", slot: Slot.uptime })
  })

  it("calls it the lease, or the loop, where the uptime is only read first", () => {
    for (const isBlocked of [false, true]) {
      const one = process()
      assert.isUndefined(one.run(watchdog - poll, isBlocked ? undefined : one.beat))
      one.pass(poll - 10n, 10n)
      assert.strictEqual(one.look()?.reason, isBlocked ? "eventLoop" : "lease")
    }
  })

  it("finds a blocked loop before the lease is over, and says that it is the loop", () => {
    const one = process()
    one.progress(0)
    assert.isUndefined(one.run(9000n, one.beat))
    one.renew(0n)
    const verdict = one.run(60_000n)
    assert.strictEqual(verdict?.reason, "eventLoop")
    assert.isAtMost(Number(one.sinceSent()), Number(watchdog))
  })

  it("finds each actor by itself, with everything else in order", () => {
    for (const stuck of [0, 1]) {
      const one = process()
      const verdict = one.run(100_000n, () => {
        one.renew(0n)
        one.progress(1 - stuck)
        if (one.sinceSent() > 0n) one.beat()
      })
      assert.strictEqual(at(verdict), "nothing", "it owes nothing yet")
      one.progress(stuck)
      assert.strictEqual(
        at(
          one.run(100_000n, () => {
            one.renew(0n)
            one.progress(1 - stuck)
          })
        ),
        `actor ${stuck}`
      )
    }
  })

  it("does not count time in which the process was stopped, but for the lease", () => {
    const one = process()
    one.progress(0)
    assert.isUndefined(one.run(30_000n, () => one.renew(0n)))
    one.pass(40_000n)
    assert.isUndefined(one.look())
    // 30 seconds were its own, so 15 are left.
    assert.isUndefined(one.run(14_750n, () => one.renew(0n)))
    assert.strictEqual(at(one.run(500n, () => one.renew(0n))), "actor 0")
    for (const stopped of [watchdog - 1000n, 3n * watchdog]) {
      const other = process()
      assert.isUndefined(other.run(1000n, other.beat))
      other.pass(stopped)
      assert.strictEqual(other.look()?.reason, "lease")
    }
  })

  it("pardons standing still for the watchdog's time at most", () => {
    const one = process()
    one.progress(0)
    const starved = () => {
      for (let round = 0; round < 200; round++) {
        one.pass(3n * poll)
        one.renew(0n)
        if (one.look() !== undefined) return round
      }
      return undefined
    }
    assert.strictEqual(starved(), 119)
  })

  const step = Schema.Int.check(Schema.isBetween({ minimum: 0, maximum: 60_000 }))
  const Event = Schema.Union([
    Schema.Struct({ _tag: Schema.Literal("Run"), millis: step }),
    Schema.Struct({ _tag: Schema.Literal("Blocked"), millis: step }),
    Schema.Struct({ _tag: Schema.Literal("Stopped"), millis: step, suspended: step }),
    Schema.Struct({ _tag: Schema.Literal("Renewed"), sentAgo: step })
  ])

  it.effect.prop(
    "never lets a process live past its window, whatever happened to it, and ends no other",
    { events: Schema.Array(Event) },
    ({ events }) =>
      Effect.sync(() => {
        const one = process()
        let verdict: Verdict | undefined
        let lag = 0n
        for (const event of events) {
          if (event._tag === "Run") verdict = one.run(BigInt(event.millis), one.beat)
          if (event._tag === "Blocked") verdict = one.run(BigInt(event.millis))
          if (event._tag === "Renewed") one.renew(BigInt(event.sentAgo))
          if (event._tag === "Stopped") {
            one.pass(BigInt(event.millis), BigInt(event.suspended))
            lag += BigInt(event.suspended)
            verdict = one.look()
          }
          // Nobody here is supervised: apart from the loop, it is the lease alone that ends it.
          const since = one.sinceSent()
          if (verdict === undefined && event._tag !== "Renewed") {
            assert.isBelow(Number(since), Number(watchdog))
          }
          if (verdict?.slot === Slot.lease) assert.isAtLeast(Number(since), Number(watchdog))
          if (verdict?.slot === Slot.uptime) {
            assert.isAtLeast(Number(since + lag), Number(watchdog))
          }
          if (verdict !== undefined) return
        }
      })
  )

  it("looks often enough for each profile's margins, and a process has ended within them", () => {
    for (const profile of ["default", "short"] as const) {
      const settings = resolve(profile)
      if (settings instanceof StartupRefused) throw settings
      const pollMillis = pollMillisOf(settings.watchdog)
      assert.isAtMost(pollMillis, settings.watchdog / 20)
      const { abandonAfter, forcedExit, leaseValidity, watchdog } = settings
      // A main thread that answers in the last moment has its own time once more, up to the margin.
      const latest = forcedExit + Math.min(abandonAfter, forcedExit + 2 * pollMillis)
      assert.isBelow(watchdog + pollMillis + latest, leaseValidity)
    }
  })
})
