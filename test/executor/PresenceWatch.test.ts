/**
 * Goal: a watcher condemns exactly those who were there in its own time, were missed in every look since
 * for longer than the grace on both clocks, and only after it has renewed; whatever the clocks do.
 * Method: generated histories of looks, judged once more from the whole history at each look.
 * Covers I3 (nobody is given up who may come back), P-21, rows 30 to 32, and the traps of presence.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect, Schema } from "effect"
import * as PresenceWatch from "../../src/executor/PresenceWatch.ts"

const members = ["a", "b", "c"] as const
const graceMillis = 1000

const Place = Schema.Literals(["present", "missing", "newcomer", "hidden", "gone"])
/** One member at most moves between two looks, so that absences last. */
const Event = Schema.Struct({
  moves: Schema.Literals(["a", "a", "b", "c", "nobody", "nobody"]),
  to: Place,
  session: Schema.Literals([...Array<"same">(12).fill("same"), "next", "none"]),
  isRound: Schema.Boolean,
  renews: Schema.Boolean,
  // The database's clock may be set back; both may jump.
  dbMillis: Schema.Literals([0, 250, 250, 400, 400, 5000, -3000]),
  localMillis: Schema.Literals([0, 250, 250, 400, 400, 5000]),
  answer: Schema.Literals(["renewed", "busy", "unfit", "early", "marked", "returned", "present"])
})

interface Moment {
  readonly look: PresenceWatch.Look
  readonly answer: PresenceWatch.Answer
}

const finished = new Set(["marked", "present", "returned"])

/** Who is condemned by the last look, from the whole history and nothing else. */
const judge = (history: ReadonlyArray<Moment>): ReadonlyArray<string> => {
  const last = history.at(-1)?.look
  if (last?.heldAtMicros === undefined) return []
  const begin = history.findLastIndex(({ look }) => look.heldAtMicros !== last.heldAtMicros) + 1
  const session = history.slice(begin)
  const heldAt = last.heldAtMicros
  return members.filter((id) => {
    let seen = false
    let since: { at: number; nanos: bigint; spared: boolean } | undefined
    for (const { answer, look } of session) {
      const missing = look.missing.includes(id)
      const newcomer = look.newcomers.includes(id)
      const isCounted: boolean = missing && (seen || newcomer)
      if (!isCounted) since = undefined
      else if (since !== undefined && look.atMicros < since.at) since = undefined
      if (isCounted && since === undefined && look.atMicros - heldAt >= graceMillis * 1000) {
        since = { at: look.atMicros, nanos: look.nanos, spared: false }
      }
      seen = look.present.includes(id) || isCounted || (seen && !look.isRound)
      const isDue =
        since !== undefined &&
        !since.spared &&
        look.atMicros - since.at >= graceMillis * 1000 &&
        Number(look.nanos - since.nanos) >= graceMillis * 1e6 &&
        look.renewedAtMicros > since.at
      if (look === last) return isDue
      if (!isDue || since === undefined) continue
      if (answer === "renewed") since.spared = true
      else if (finished.has(answer)) since = undefined
    }
    return false
  })
}

const lookOf = (change: Partial<PresenceWatch.Look> & { readonly millis: number }) => ({
  atMicros: 1_000_000_000 + change.millis * 1000,
  heldAtMicros: 900_000_000,
  renewedAtMicros: 1_000_000_000 + change.millis * 1000 - 1,
  nanos: BigInt(change.millis) * 1_000_000n,
  isRound: false,
  present: [],
  missing: [],
  newcomers: [],
  ...change
})

/** Whom the last of the looks condemns. */
const after = (...looks: ReadonlyArray<PresenceWatch.Look>): ReadonlyArray<string> => {
  let watch = PresenceWatch.blind
  let condemned: ReadonlyArray<string> = []
  for (const look of looks) {
    watch = PresenceWatch.looked(watch, look, graceMillis)
    condemned = PresenceWatch.condemned(watch, look, graceMillis).map(({ id }) => id)
  }
  return condemned
}

describe("the death watch", () => {
  it.effect.prop(
    "condemns whom the whole history condemns, at the same look and at no other",
    { events: Schema.Array(Event).check(Schema.isMinLength(20), Schema.isMaxLength(60)) },
    ({ events }) =>
      Effect.sync(() => {
        let watch = PresenceWatch.blind
        const history: Array<Moment> = []
        const places = new Map<string, string>(members.map((id) => [id, "present"]))
        let now = { at: 1_000_000_000_000, nanos: 0n, heldAt: 1_000_000_000_000, renewedAt: 0 }
        for (const event of events) {
          now = {
            at: now.at + event.dbMillis * 1000,
            nanos: now.nanos + BigInt(event.localMillis) * 1_000_000n,
            heldAt: event.session === "next" ? now.at : now.heldAt,
            renewedAt: event.renews ? now.at : now.renewedAt
          }
          places.set(event.moves, event.to)
          const at = (...wanted: ReadonlyArray<string>) =>
            members.filter((id) => wanted.includes(places.get(id) ?? ""))
          const isBlind = event.session === "none"
          const look: PresenceWatch.Look = {
            atMicros: now.at,
            heldAtMicros: isBlind ? undefined : now.heldAt,
            renewedAtMicros: now.renewedAt,
            nanos: now.nanos,
            isRound: event.isRound && !isBlind,
            present: isBlind ? [] : at("present"),
            // Whoever is absent is asked for by name, so nobody of them can be hidden.
            missing: isBlind
              ? []
              : [
                  ...at("missing", "newcomer"),
                  ...at("hidden").filter((id) => watch.absences.has(id))
                ],
            newcomers: isBlind ? [] : at("newcomer")
          }
          history.push({ look, answer: event.answer })
          watch = PresenceWatch.looked(watch, look, graceMillis)
          const condemned = PresenceWatch.condemned(watch, look, graceMillis)
          assert.sameMembers(
            condemned.map(({ id }) => id),
            [...judge(history)]
          )
          for (const { id, sinceMicros } of condemned) {
            assert.isBelow(sinceMicros, look.renewedAtMicros)
            watch = PresenceWatch.answered(watch, id, event.answer)
          }
          const pause = PresenceWatch.pauseMillis(watch, look, graceMillis)
          assert.isTrue(pause > 0 && pause <= 250, `${pause}`)
        }
      })
  )

  const seen = lookOf({ millis: 0, present: ["a"] })

  it("condemns a member that stays missing for the grace", () => {
    const missing = lookOf({ millis: 250, missing: ["a"] })
    assert.deepStrictEqual(after(seen, missing), [])
    assert.deepStrictEqual(after(seen, missing, lookOf({ millis: 1200, missing: ["a"] })), [])
    assert.deepStrictEqual(after(seen, missing, lookOf({ millis: 1250, missing: ["a"] })), ["a"])
  })

  it("forgets a blink that is shorter than the grace", () => {
    const blink = [
      lookOf({ millis: 250, missing: ["a"] }),
      lookOf({ millis: 1000, present: ["a"] }),
      lookOf({ millis: 1500, missing: ["a"] })
    ]
    assert.deepStrictEqual(after(seen, ...blink), [])
    assert.deepStrictEqual(after(seen, ...blink, lookOf({ millis: 2400, missing: ["a"] })), [])
  })

  it("never condemns whom it has not seen since its own session began", () => {
    const later = [250, 2000, 9000].map((millis) =>
      lookOf({ millis, heldAtMicros: 950_000_000, missing: ["a"] })
    )
    assert.deepStrictEqual(after(seen, ...later), [])
    const came = later.map((look) => ({ ...look, newcomers: ["a"] }))
    assert.deepStrictEqual(after(seen, ...came), ["a"])
  })

  it("asks for a renewal when somebody is missed, and waits for it", () => {
    const renewedAtMicros = 1_000_000_000
    const missing = lookOf({ millis: 250, missing: ["a"], renewedAtMicros })
    let watch = PresenceWatch.looked(PresenceWatch.blind, seen, graceMillis)
    assert.isFalse(PresenceWatch.mustRenew(watch, seen))
    watch = PresenceWatch.looked(watch, missing, graceMillis)
    assert.isTrue(PresenceWatch.mustRenew(watch, missing))
    const late = lookOf({ millis: 5000, missing: ["a"], renewedAtMicros })
    assert.deepStrictEqual(after(seen, missing, late), [])
  })

  it("looks again when the grace ends, and more slowly in a large ring", () => {
    const missing = lookOf({ millis: 250, missing: ["a"] })
    const pauses = [seen, missing, lookOf({ millis: 1150, missing: ["a"] })].map(
      (_, index, all) => {
        let watch = PresenceWatch.blind
        for (const look of all.slice(0, index + 1))
          watch = PresenceWatch.looked(watch, look, graceMillis)
        return PresenceWatch.pauseMillis(watch, all[index] ?? seen, graceMillis)
      }
    )
    assert.deepStrictEqual(pauses, [250, 250, 100])
    const many = lookOf({
      millis: 0,
      isRound: true,
      present: Array.from({ length: 999 }, (_, n) => `${n}`)
    })
    const watch = PresenceWatch.looked(PresenceWatch.blind, many, graceMillis)
    assert.strictEqual(PresenceWatch.pauseMillis(watch, many, graceMillis), 2500)
    assert.strictEqual(PresenceWatch.roundMillis(PresenceWatch.blind), 10_000)
    assert.strictEqual(PresenceWatch.roundMillis(watch), 50_000)
  })
})
