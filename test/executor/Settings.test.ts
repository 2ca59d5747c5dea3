/**
 * Goal: no combination of settings starts in which a process could outlive its lease.
 * Method: generated settings against the inequalities, and the message names what to change.
 * Covers I11, K-028..K-032, K-036, K-039, K-043..K-045, K-047, I-011, I-014..I-018, I-029, I-031, I-032, I-058, I-059, I-062.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect, Schema } from "effect"
import { type Profile, resolve, type Settings } from "../../src/executor/Settings.ts"
import { StartupRefused } from "../../src/database/StartupRefused.ts"

const millis = Schema.Int.check(Schema.isBetween({ minimum: 1, maximum: 100_000 }))

const resolved = (profile: Profile, changes: Partial<Settings> = {}) => {
  const settings = resolve(profile, changes)
  assert.isFalse(settings instanceof StartupRefused)
  return settings as Exclude<typeof settings, StartupRefused>
}

describe("settings", () => {
  it("are those of the documents by default", () => {
    const settings = resolved("default")
    assert.deepStrictEqual(
      [
        settings.leaseRenewal,
        settings.leaseValidity,
        settings.recoveryScan,
        settings.recoveryScanMax
      ],
      [10_000, 75_000, 5_000, 100]
    )
    assert.deepStrictEqual(
      [settings.watchdog, settings.forcedExit, settings.executionsMax],
      [45_000, 5_000, 4]
    )
    assert.deepStrictEqual(
      [settings.attemptTimeout, settings.settleTimeout, settings.cancelGrace],
      [30 * 60_000, 60_000, 5_000]
    )
    assert.deepStrictEqual(
      [settings.queueMonitor, settings.starvation, settings.reservationValidity],
      [5_000, 120_000, 30_000]
    )
  })

  it("of the capacity profile are those of the document", () => {
    const settings = resolved("capacity")
    assert.deepStrictEqual(
      [
        settings.pullHeartbeat,
        settings.pullLease,
        settings.pullReservation,
        settings.capacityScan,
        settings.capacityGrace,
        settings.recoveriesMax,
        // Work of our own processes returns when they are revoked, and waits for none of these.
        settings.recoveryGrace
      ],
      [30_000, 90_000, 30_000, 30_000, 30_000, 10, 0]
    )
  })

  it("of the short profile pass the same chain", () => {
    assert.strictEqual(resolved("short").leaseValidity, 3000)
  })

  it("keep the default where a change is undefined", () => {
    assert.strictEqual(resolved("default", { drain: undefined as never }).drain, 25_000)
  })

  it.effect.prop(
    "start exactly when all margins hold",
    {
      renewal: millis,
      probe: millis,
      watchdog: millis,
      forcedExit: millis,
      abandonAfter: millis,
      validity: millis,
      heartbeat: millis,
      session: millis
    },
    ({ abandonAfter, forcedExit, heartbeat, probe, renewal, session, validity, watchdog }) =>
      Effect.sync(() => {
        const answer = resolve("default", {
          leaseRenewal: renewal,
          probe,
          watchdog,
          forcedExit,
          abandonAfter,
          leaseValidity: validity,
          pullHeartbeat: heartbeat,
          pullLease: session
        })
        const holds =
          renewal * 3 <= watchdog &&
          probe * 3 <= watchdog &&
          heartbeat * 3 <= session &&
          watchdog + forcedExit + abandonAfter < validity
        assert.strictEqual(answer instanceof StartupRefused, !holds)
      })
  )

  it("name the number to change", () => {
    const slow = resolve("default", { leaseRenewal: "20 seconds" })
    assert.include(
      slow instanceof StartupRefused ? slow.message : "",
      "lower leaseRenewal to 15000 ms"
    )
    const silent = resolve("capacity", { pullHeartbeat: "40 seconds" })
    assert.include(
      silent instanceof StartupRefused ? silent.message : "",
      "lower pullHeartbeat to 30000 ms"
    )
    const tight = resolve("default", { leaseValidity: "60 seconds" })
    assert.include(tight instanceof StartupRefused ? tight.message : "", "raise leaseValidity")
  })

  it("give a wake longer than a heartbeat before it counts as stale", () => {
    const { staleClaimSweep, staleClaimThreshold } = resolved("default")
    assert.deepStrictEqual([staleClaimSweep, staleClaimThreshold], [60_000, 120_000])
    const short = resolved("short")
    assert.deepStrictEqual([short.staleClaimSweep, short.staleClaimThreshold], [5000, 45_000])
    const hasty = resolve("default", { staleClaimThreshold: "30 seconds" })
    assert.include(
      hasty instanceof StartupRefused ? hasty.message : "",
      "staleClaimThreshold (30000 ms) is not more than a heartbeat"
    )
    assert.strictEqual(
      resolved("default", { staleClaimThreshold: 30_001 }).staleClaimThreshold,
      30_001
    )
  })

  it("refuse a duration that is none", () => {
    for (const changes of [
      { drain: -5 },
      { recoveryScan: "soon" as never },
      { payloadMax: Number.NaN }
    ]) {
      assert.isTrue(resolve("default", changes) instanceof StartupRefused)
    }
  })
})
