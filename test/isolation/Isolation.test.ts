/**
 * Goal: the runner is to be believed. It makes every order once, sees who waits, waits itself until
 * the server has decided, and never mistakes a session under way for one at rest.
 * Method: the orders as a pure function, and scripted advisory locks whose waits are known.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect } from "effect"
import * as Fixture from "./Fixture.ts"
import * as Isolation from "./Isolation.ts"

const lock = (key: number) => `SELECT pg_advisory_lock(${key}) IS NULL`
const unlock = "SELECT pg_advisory_unlock_all() IS NULL"

const specOf = Effect.fnUntraced(function* (
  steps: (names: Readonly<Record<"a" | "b" | "c", Isolation.Session>>) => Isolation.Spec["steps"]
) {
  const fixture = yield* Fixture.make
  const sessions = {
    a: yield* fixture.session(),
    b: yield* fixture.session(),
    c: yield* fixture.session()
  }
  return {
    observer: fixture.observer,
    reset: Effect.void,
    sessions,
    steps: steps(sessions)
  } satisfies Isolation.Spec
})

describe("the isolation runner", () => {
  it("makes each order of the sessions' steps once and keeps every session's own", () => {
    const orders = Isolation.interleavings({
      a: { one: "", two: "" },
      b: { one: "", two: "", three: "" },
      c: { one: "" }
    })
    assert.strictEqual(orders.length, 60)
    assert.strictEqual(new Set(orders.map((order) => order.join())).size, 60)
    for (const order of orders) {
      assert.deepStrictEqual(
        order.filter((step) => step.startsWith("b.")),
        ["b.one", "b.two", "b.three"]
      )
    }
  })

  it("calls sessions stuck only when each waits, in the end, for somebody at rest", () => {
    assert.isTrue(Isolation.areStuck([]))
    assert.isTrue(Isolation.areStuck([{ pid: 1, blockers: [9] }]))
    assert.isTrue(
      Isolation.areStuck([
        { pid: 1, blockers: [2] },
        { pid: 2, blockers: [9] }
      ]),
      "a queue behind an idle session"
    )
    assert.isFalse(Isolation.areStuck([{ pid: 1, blockers: [] }]), "under way")
    assert.isFalse(
      Isolation.areStuck([
        { pid: 1, blockers: [2] },
        { pid: 2, blockers: [1] }
      ]),
      "a circle: the server will break it"
    )
    assert.isTrue(Isolation.areStuck([{ pid: 1, blockers: [0] }]), "a prepared transaction")
  })

  it.live("starts a step of a waiting session when the session is free, and shows every wait", () =>
    Effect.gen(function* () {
      const spec = yield* specOf(() => ({
        a: { lock: lock(1), unlock },
        b: { lock: lock(1), unlock },
        c: { look: "SELECT 'seen'" }
      }))
      const { lines } = yield* Isolation.run(spec, [
        "a.lock",
        "b.lock",
        "b.unlock",
        "c.look",
        "a.unlock"
      ])
      assert.deepStrictEqual(lines, [
        "a.lock: false",
        "b.lock: waits",
        "c.look: seen",
        "a.unlock: false",
        "b.lock: false",
        "b.unlock: false"
      ])
    })
  )

  it.live("waits out a deadlock and names the loser", () =>
    Effect.gen(function* () {
      const spec = yield* specOf(() => ({
        a: { first: lock(1), second: lock(2), unlock },
        b: { first: lock(2), second: lock(1), unlock }
      }))
      const findings = yield* Isolation.explore(spec, (transcript) =>
        Effect.succeed(transcript.lines.filter((line) => line.endsWith("40P01")))
      )
      const deadlocked = findings.filter(({ broken }) => broken.length > 0)
      assert.isAbove(deadlocked.length, 0)
      for (const { transcript } of deadlocked) {
        const answers = [transcript.answer("a.second"), transcript.answer("b.second")]
        assert.sameMembers(answers, ["false", "40P01"], "one of the two goes on")
      }
      assert.isAbove(findings.length, deadlocked.length)
    })
  )

  it.live("does not take a slow statement for a waiting one", () =>
    Effect.gen(function* () {
      const spec = yield* specOf(() => ({
        a: { slow: "SELECT pg_sleep(0.1) IS NULL" },
        b: { look: "SELECT 1" }
      }))
      const { lines } = yield* Isolation.run(spec, ["a.slow", "b.look"])
      assert.deepStrictEqual(lines, ["a.slow: false", "b.look: 1"])
    })
  )

  it.live("fails with the transcript when a step waits for ever", () =>
    Effect.gen(function* () {
      const spec = yield* specOf(() => ({ a: { lock: lock(1) }, b: { lock: lock(1) } }))
      const exit = yield* Effect.exit(Isolation.run(spec, ["a.lock", "b.lock"]))
      assert.include(String(exit), "left waiting for ever: b")
    })
  )
})
