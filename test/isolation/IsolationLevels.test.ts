/**
 * Goal: a user's stricter transaction never loses its process a healthy lease and never slips through
 * a revocation (I1, I2): it is refused, or told to repeat itself with a fresh snapshot.
 * Method: each isolation level x what happened to the lease between the snapshot and the first write.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect } from "effect"
import * as Fixture from "./Fixture.ts"
import * as Isolation from "./Isolation.ts"

const { mark, renew, revoke, write } = Fixture.statements

const scene = Effect.gen(function* () {
  const fixture = yield* Fixture.make
  const [victim, peer] = [yield* fixture.executor, yield* fixture.executor]
  return {
    fixture,
    victim,
    sessions: {
      user: yield* fixture.session({ executor: victim }),
      peer: yield* fixture.session({ executor: peer }),
      owner: yield* fixture.session({ role: "owner" })
    }
  }
})

const levels = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"] as const
type Event = "renewed" | "expired" | "marked" | "revoked"

// Outside READ COMMITTED an older snapshot cannot tell a renewal from an expiry, and does not see the
// mark: it is admitted then, and the barrier waits for it.
const answers: Readonly<Record<(typeof levels)[number], Readonly<Record<Event, string>>>> = {
  "READ COMMITTED": { renewed: "ok", expired: "TN001", marked: "TN002", revoked: "TN002" },
  "REPEATABLE READ": { renewed: "40001", expired: "40001", marked: "ok", revoked: "40001" },
  SERIALIZABLE: { renewed: "40001", expired: "40001", marked: "ok", revoked: "40001" }
}

describe("the fence in a transaction whose snapshot is older than the lease", () => {
  for (const level of levels) {
    it.live(`answers each event as documented under ${level}`, () =>
      Effect.gen(function* () {
        const { fixture, sessions, victim } = yield* scene
        const events: Readonly<Record<Event, ReadonlyArray<Isolation.Step>>> = {
          renewed: [fixture.pass(20), renew(victim), fixture.pass(15)],
          expired: [fixture.pass(31)],
          marked: [mark(victim)],
          revoked: [mark(victim), revoke(victim)]
        }
        for (const event of ["renewed", "expired", "marked", "revoked"] as const) {
          const peer = Object.fromEntries(
            events[event].map((step, index) => [`event${index}`, step])
          )
          const transcript = yield* Isolation.run(
            {
              observer: fixture.observer,
              reset: fixture.reset,
              sessions,
              steps: {
                user: {
                  look: [`BEGIN ISOLATION LEVEL ${level}`, "SELECT count(*) FROM app.note"],
                  write,
                  end: "COMMIT",
                  repeat: write
                },
                peer: { ...peer, barrier: revoke(victim) }
              }
            },
            [
              "user.look",
              ...Object.keys(peer).map((step) => `peer.${step}`),
              "user.write",
              "peer.barrier",
              "user.end",
              "user.repeat"
            ]
          )
          const label = `${event}\n${transcript.lines.join("\n")}`
          assert.strictEqual(transcript.answer("user.write"), answers[level][event], label)
          assert.strictEqual(
            transcript.waited("peer.barrier"),
            answers[level][event] === "ok",
            label
          )
          if (event === "renewed") {
            assert.strictEqual(
              transcript.answer("user.repeat"),
              "ok",
              "a fresh snapshot is admitted"
            )
          } else {
            assert.match(transcript.answer("user.repeat"), /^TN00[12]$/, label)
          }
        }
      })
    )
  }

  it.live("an older snapshot is admitted after a revocation in two transactions", () =>
    Effect.gen(function* () {
      const { fixture, sessions, victim } = yield* scene
      const { lines } = yield* Isolation.run(
        {
          observer: fixture.observer,
          reset: fixture.reset,
          sessions,
          steps: {
            user: {
              look: ["BEGIN ISOLATION LEVEL REPEATABLE READ", "SELECT count(*) FROM app.note"],
              write,
              end: "COMMIT"
            },
            owner: {
              barrier: [
                "BEGIN",
                `SELECT FROM tenure.executor WHERE id = '${victim}' FOR UPDATE`,
                "COMMIT"
              ],
              state: `UPDATE tenure.executor SET state = 'revoked', revoked_at = tenure.clock()
                       WHERE id = '${victim}'`
            }
          }
        },
        ["user.look", "owner.barrier", "owner.state", "user.write", "user.end"]
      )
      assert.deepStrictEqual(lines.slice(-2), ["user.write: ok", "user.end: ok"])
    })
  )
})
