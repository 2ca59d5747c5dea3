/**
 * Goal: the locks of fence, renewal and revocation mean what they should, in whatever order they meet
 * (I1, I2, I3; row 14).
 * Method: all interleavings of an admitted transaction, a renewal and a two-step revocation, judged
 * by rules; single orders with their exact transcript where time passes in between. Each rule is
 * shown to bite with the wrong form it guards against.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect } from "effect"
import * as Fixture from "./Fixture.ts"
import * as Isolation from "./Isolation.ts"

const { mark, renew, revoke, write } = Fixture.statements

const I2 = "I2: no write of the victim commits after its revocation"
const renewalsPass = "a renewal waits for a revoker at most"

/** A victim that writes, its heartbeat, and a peer that revokes it. */
const scene = Effect.gen(function* () {
  const fixture = yield* Fixture.make
  const [victim, peer] = [yield* fixture.executor, yield* fixture.executor]
  const spec = {
    observer: fixture.observer,
    reset: fixture.reset,
    sessions: {
      victim: yield* fixture.session({ executor: victim }),
      heartbeat: yield* fixture.session({ executor: victim }),
      revoker: yield* fixture.session({ executor: peer })
    },
    steps: {
      victim: { write: ["BEGIN", write], commit: "COMMIT" },
      heartbeat: { renew: renew(victim) },
      revoker: { mark: mark(victim), barrier: ["BEGIN", revoke(victim)], seal: "COMMIT" }
    }
  }
  const judge: Isolation.Judge = Effect.fnUntraced(function* (transcript) {
    const isAdmitted = transcript.answer("victim.write") === "ok"
    const renewal = transcript.answer("heartbeat.renew")
    const notes = yield* fixture.value("SELECT count(*) FROM app.note")
    const isRevoked = yield* fixture.value(
      `SELECT state = 'revoked' AND revoked_at IS NOT NULL FROM tenure.executor WHERE id = '${victim}'`
    )
    return Isolation.brokenRules({
      [I2]: !isAdmitted || transcript.isBefore("victim.commit", "revoker.seal"),
      [renewalsPass]:
        !transcript.waited("heartbeat.renew") ||
        (transcript.isBefore("revoker.barrier", "heartbeat.renew") &&
          transcript.isBefore("revoker.seal", "heartbeat.renew")),
      "the mark never waits": !transcript.waited("revoker.mark"),
      "newcomers are refused from the mark on":
        isAdmitted === transcript.isBefore("victim.write", "revoker.mark"),
      "a refusal says that the lease is gone":
        isAdmitted || transcript.answer("victim.write") === "TN002",
      "exactly the admitted writes are there": notes === (isAdmitted ? "1" : "0"),
      "the barrier ends with the revocation":
        transcript.answer("revoker.barrier") === "revoked 0" && isRevoked === "true",
      "a renewal after the mark says why it fails":
        renewal ===
        (transcript.isBefore("heartbeat.renew", "revoker.mark")
          ? "renewed"
          : transcript.isBefore("heartbeat.renew", "revoker.seal")
            ? "revoking"
            : "revoked")
    })
  })
  return { fixture, victim, spec, judge }
})

describe("admission, renewal and revocation in every order", () => {
  it.live(
    "a revocation commits after every admitted transaction, and no renewal waits for one",
    () =>
      Effect.gen(function* () {
        const { judge, spec } = yield* scene
        const findings = yield* Isolation.prove(spec, judge)
        assert.strictEqual(findings.length, 60)
        const waits = findings.filter(({ transcript }) => transcript.waited("revoker.barrier"))
        assert.isAbove(waits.length, 0, "in some orders the barrier has somebody to wait for")
        const refused = findings.filter(
          ({ transcript }) => transcript.answer("victim.write") === "TN002"
        )
        assert.isAbove(refused.length, 0, "in some orders the victim comes too late")
      })
  )

  const wrong: ReadonlyArray<{
    readonly form: string
    readonly replace: readonly [name: string, right: string, wrong: string]
    readonly breaks: string
  }> = [
    {
      form: "a revocation by a plain update",
      replace: ["tenure.revoke", "WHERE e.id = executor FOR UPDATE;", "WHERE e.id = executor;"],
      breaks: I2
    },
    {
      form: "a revocation behind FOR NO KEY UPDATE",
      replace: [
        "tenure.revoke",
        "WHERE e.id = executor FOR UPDATE;",
        "WHERE e.id = executor FOR NO KEY UPDATE;"
      ],
      breaks: I2
    },
    {
      form: "a fence that only reads",
      replace: ["tenure.admit", "WHERE e.id = me::uuid FOR KEY SHARE;", "WHERE e.id = me::uuid;"],
      breaks: I2
    },
    {
      form: "a fence with FOR SHARE",
      replace: ["tenure.admit", "FOR KEY SHARE;", "FOR SHARE;"],
      breaks: renewalsPass
    }
  ]
  for (const { breaks, form, replace } of wrong) {
    it.live(`${form} breaks a rule: ${breaks}`, () =>
      Effect.gen(function* () {
        const { fixture, judge, spec } = yield* scene
        yield* fixture.mutate(...replace)
        const findings = yield* Isolation.explore(spec, judge, [
          [
            "victim.write",
            "heartbeat.renew",
            "revoker.mark",
            "revoker.barrier",
            "revoker.seal",
            "victim.commit"
          ]
        ])
        assert.include(findings[0]?.broken ?? [], breaks)
      })
    )
  }
})

describe("time that passes while a lock is waited for", () => {
  /** Somebody holds the executor's row and gives it back unchanged, after the lease has expired. */
  const held = Effect.fnUntraced(function* (
    holder: (executor: string) => string,
    waiter: (executor: string) => Isolation.Step
  ) {
    const fixture = yield* Fixture.make
    const executor = yield* fixture.executor
    const spec = {
      observer: fixture.observer,
      reset: fixture.reset,
      sessions: {
        holder: yield* fixture.session({ executor: yield* fixture.executor }),
        waiter: yield* fixture.session({ executor }),
        clock: yield* fixture.session()
      },
      steps: {
        holder: { lock: ["BEGIN", holder(executor)], rollback: "ROLLBACK" },
        waiter: { act: waiter(executor) },
        clock: { passes: fixture.pass(31) }
      }
    }
    const play = Isolation.run(spec, [
      "holder.lock",
      "waiter.act",
      "clock.passes",
      "holder.rollback"
    ])
    return { fixture, executor, spec, play }
  })
  const release = (executor: string) => `SELECT state FROM tenure.release_executor('${executor}')`

  it.live("a renewal that waited past its expiry does not revive the lease", () =>
    Effect.gen(function* () {
      const { play } = yield* held(mark, renew)
      assert.deepStrictEqual((yield* play).lines, [
        "holder.lock: revoking",
        "waiter.act: waits",
        "clock.passes: ok",
        "holder.rollback: ok",
        "waiter.act: expired"
      ])
    })
  )

  it.live("a renewal by one plain update does revive it", () =>
    Effect.gen(function* () {
      const { fixture, spec } = yield* held(mark, renew)
      const executor = yield* fixture.value("SELECT min(id::text) FROM tenure.executor")
      const owner = yield* fixture.session({ role: "owner" })
      const { lines } = yield* Isolation.run(
        {
          ...spec,
          sessions: { ...spec.sessions, waiter: owner },
          steps: {
            ...spec.steps,
            holder: { ...spec.steps.holder, lock: ["BEGIN", mark(executor)] },
            waiter: {
              act: `UPDATE tenure.executor SET expires_at = tenure.clock() + interval '30 s'
                     WHERE id = '${executor}' AND expires_at > tenure.clock() RETURNING 'revived'`
            }
          }
        },
        ["holder.lock", "waiter.act", "clock.passes", "holder.rollback"]
      )
      assert.strictEqual(lines.at(-1), "waiter.act: revived")
    })
  )

  it.live("a write that waited past the expiry is refused", () =>
    Effect.gen(function* () {
      const { fixture, play } = yield* held(release, () => write)
      assert.deepStrictEqual((yield* play).lines, [
        "holder.lock: released",
        "waiter.act: waits",
        "clock.passes: ok",
        "holder.rollback: ok",
        "waiter.act: TN001"
      ])
      assert.strictEqual(yield* fixture.value("SELECT count(*) FROM app.note"), "0")
    })
  )

  it.live("a fence that reads the clock before the lock admits that write", () =>
    Effect.gen(function* () {
      const { fixture, play } = yield* held(release, () => write)
      yield* fixture.mutate(
        "tenure.admit",
        "SELECT e.state, e.expires_at INTO lease",
        "SELECT e.state, CASE WHEN e.expires_at > tenure.clock() THEN 'infinity' ELSE e.expires_at END AS expires_at INTO lease"
      )
      assert.strictEqual((yield* play).lines.at(-1), "waiter.act: ok")
    })
  )

  it.live("a mark that waited for a renewal spares the renewed lease", () =>
    Effect.gen(function* () {
      const { executor, fixture, spec } = yield* held(renew, renew)
      const { lines } = yield* Isolation.run(
        {
          ...spec,
          steps: {
            holder: { lock: ["BEGIN", renew(executor)], commit: "COMMIT" },
            waiter: { act: `SELECT tenure.mark_revoking('${executor}')` },
            // Past the first expiry, before the renewed one.
            clock: { passes: fixture.pass(20), passesAgain: fixture.pass(15) }
          }
        },
        ["clock.passes", "holder.lock", "clock.passesAgain", "waiter.act", "holder.commit"]
      )
      assert.deepStrictEqual(lines.slice(-3), [
        "waiter.act: waits",
        "holder.commit: ok",
        "waiter.act: active"
      ])
    })
  )

  it.live("an admitted transaction may commit after its expiry, and the next one is refused", () =>
    Effect.gen(function* () {
      const { executor, fixture, spec } = yield* held(mark, renew)
      const { lines } = yield* Isolation.run(
        {
          ...spec,
          steps: {
            waiter: { write: ["BEGIN", write], more: write, commit: "COMMIT", next: write },
            clock: { passes: fixture.pass(31) },
            holder: {
              mark: `SELECT tenure.mark_revoking('${executor}')`,
              barrier: revoke(executor)
            }
          }
        },
        [
          "waiter.write",
          "clock.passes",
          "holder.mark",
          "waiter.more",
          "holder.barrier",
          "waiter.commit",
          "waiter.next"
        ]
      )
      assert.deepStrictEqual(lines, [
        "waiter.write: ok",
        "clock.passes: ok",
        "holder.mark: revoking",
        "waiter.more: ok",
        "holder.barrier: waits",
        "waiter.commit: ok",
        "holder.barrier: revoked 0",
        "waiter.next: TN002"
      ])
    })
  )
})
