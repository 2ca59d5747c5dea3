/**
 * Goal: an item that two transactions want at once ends in one place, with one outcome, and every
 * answer that was given stays true (I4, I5, I6, I7; row 41).
 * Method: all interleavings of two or three transactions on one item, judged by rules on the answers
 * and on where the item is afterwards.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect } from "effect"
import * as Fixture from "./Fixture.ts"
import * as Isolation from "./Isolation.ts"

const { cancel, checkpoint, claim, mark, places, revoke, settle } = Fixture.statements

/** One item on the queue, claimed or not, and whoever wants it. */
const scene = Effect.fnUntraced(function* (item: "ready" | "claimed") {
  const fixture = yield* Fixture.make
  const [owner, peer] = [yield* fixture.executor, yield* fixture.executor]
  const sessions = {
    owner: yield* fixture.session({ executor: owner }),
    other: yield* fixture.session({ executor: owner }),
    revoker: yield* fixture.session({ executor: peer }),
    caller: yield* fixture.session({ role: "api" })
  }
  const reset = Effect.gen(function* () {
    yield* fixture.reset
    yield* fixture.enqueue(1)
    if (item === "claimed") yield* sessions.owner.sql.unsafe(claim(1))
  })
  const specOf = (steps: Isolation.Spec["steps"]): Isolation.Spec => ({
    observer: fixture.observer,
    reset,
    sessions,
    steps
  })
  const place = fixture.value(places)
  return { fixture, owner, sessions, specOf, place }
})

const revocation = (executor: string) => ({
  mark: mark(executor),
  barrier: ["BEGIN", revoke(executor)],
  seal: "COMMIT"
})

const cancellation = { cancel: ["BEGIN", cancel], end: "COMMIT" }

const handBack = { settle: ["BEGIN", settle("hand-back")], commit: "COMMIT" }

const onePlace = "the item is in exactly one place"
const noDeadlock = "nobody deadlocks"
const noSurvivor = "the item waits for another executor"
const neverUnknown = "a live item is never unknown"
const oldRequest = "an old request does not cancel what an operator retries"
const lateCheckpoint = "no checkpoint is written beside a settle"
const stuckLoss = "only a loss without a checkpoint counts as stuck"

const neverDeadlocks = ({ lines }: Isolation.Transcript) =>
  !lines.some((line) => line.endsWith("40P01"))

const nextClaim = (session: Isolation.Session) =>
  Effect.map(session.sql.unsafe<Record<string, unknown>>(claim(1)), ([row]) =>
    row?.["cancelled"] === true
      ? "claimed, to be cancelled"
      : row?.["cancelled"] === false
        ? "claimed"
        : "nothing"
  )

const isOnePlace = (place: string) => ["ready", "claimed", "delayed", "done"].includes(place)

/** Who meets whom, and what must hold in every order. */
const scenarios = {
  "settle and revocation": Effect.gen(function* () {
    const { fixture, owner, place, specOf } = yield* scene("claimed")
    const spec = specOf({
      owner: { settle: ["BEGIN", settle("completed")], commit: "COMMIT" },
      revoker: revocation(owner)
    })
    const judge: Isolation.Judge = Effect.fnUntraced(function* (transcript) {
      const settled = transcript.answer("owner.settle") === "ok"
      const at = yield* place
      const counts = yield* fixture.value("SELECT r.attempt, r.losses FROM tenure.ready r")
      return Isolation.brokenRules({
        [noDeadlock]: neverDeadlocks(transcript),
        [onePlace]: at === (settled ? "done" : "ready"),
        "what was settled is not handed back":
          transcript.answer("revoker.barrier") === (settled ? "revoked 0" : "revoked 1"),
        "what was handed back is refused": settled || transcript.answer("owner.settle") === "TN002",
        "a hand-back costs one loss and no attempt": settled || counts === "1 1"
      })
    })
    return { fixture, spec, judge }
  }),

  "settle and revocation, with the executor's row held by a third": Effect.gen(function* () {
    const { fixture, owner, place, specOf } = yield* scene("claimed")
    const spec = specOf({
      holder: {
        lock: ["BEGIN", `SELECT FROM tenure.executor e WHERE e.id = '${owner}' FOR UPDATE`],
        leave: "ROLLBACK"
      },
      owner: { settle: settle("completed") },
      revoker: { mark: mark(owner), revoke: revoke(owner) }
    })
    const holder = yield* fixture.session({ role: "owner" })
    const judge: Isolation.Judge = Effect.fnUntraced(function* (transcript) {
      const settled = transcript.answer("owner.settle") === "ok"
      return Isolation.brokenRules({
        [noDeadlock]: neverDeadlocks(transcript),
        [onePlace]: (yield* place) === (settled ? "done" : "ready"),
        "the revocation succeeds":
          transcript.answer("revoker.revoke") === (settled ? "revoked 0" : "revoked 1")
      })
    })
    return { fixture, judge, spec: { ...spec, sessions: { ...spec.sessions, holder } } }
  }),

  "claim and revocation": Effect.gen(function* () {
    const { fixture, owner, place, specOf } = yield* scene("ready")
    const spec = specOf({
      owner: { claim: ["BEGIN", claim(1)], commit: "COMMIT" },
      revoker: revocation(owner)
    })
    const judge: Isolation.Judge = Effect.fnUntraced(function* (transcript) {
      const claimed = transcript.answer("owner.claim") === "1 false"
      const counts = yield* fixture.value("SELECT r.attempt, r.losses FROM tenure.ready r")
      return Isolation.brokenRules({
        [noDeadlock]: neverDeadlocks(transcript),
        [noSurvivor]: (yield* place) === "ready",
        "a claim is admitted or refused": claimed || transcript.answer("owner.claim") === "TN002",
        "every admitted claim is handed back":
          transcript.answer("revoker.barrier") === (claimed ? "revoked 1" : "revoked 0"),
        "a refused claim leaves no trace": counts === (claimed ? "1 1" : "0 0")
      })
    })
    return { fixture, spec, judge }
  }),

  "cancel and settle": Effect.gen(function* () {
    const { fixture, place, sessions, specOf } = yield* scene("claimed")
    const spec = specOf({
      caller: cancellation,
      owner: { settle: ["BEGIN", settle("failed")], commit: "COMMIT" }
    })
    const judge: Isolation.Judge = Effect.fnUntraced(function* (transcript) {
      const stored = yield* fixture.value("SELECT d.outcome FROM tenure.done d")
      const at = yield* place
      const retried = yield* fixture.value("SELECT tenure.retry((SELECT id FROM tenure.item))")
      const next = yield* nextClaim(sessions.owner)
      return Isolation.brokenRules({
        [onePlace]: at === "done",
        "the settle is never held up":
          !transcript.waited("owner.settle") && transcript.answer("owner.settle") === "ok",
        "the outcome is the handler's": stored === "failed",
        "the caller hears the outcome, or that its request stands": [
          "failed",
          "requested"
        ].includes(transcript.answer("caller.cancel")),
        [oldRequest]: retried === "available" && next === "claimed"
      })
    })
    return { fixture, spec, judge }
  }),

  "cancel and claim": Effect.gen(function* () {
    const { fixture, owner, place, specOf } = yield* scene("ready")
    const spec = specOf({
      caller: cancellation,
      owner: { claim: ["BEGIN", claim(1)], commit: "COMMIT" }
    })
    const judge: Isolation.Judge = Effect.fnUntraced(function* (transcript) {
      const claimed = transcript.answer("owner.claim") === "1 false"
      const answer = transcript.answer("caller.cancel")
      const requests = yield* fixture.value(
        `SELECT count(*) FROM tenure.cancel_requests('${owner}')`
      )
      return Isolation.brokenRules({
        [onePlace]: (yield* place) === (claimed ? "claimed" : "done"),
        "the claim never waits": !transcript.waited("owner.claim"),
        "the caller's answer is true": answer === (claimed ? "requested" : "cancelled"),
        "a request finds the owner": requests === (claimed ? "1" : "0")
      })
    })
    return { fixture, spec, judge }
  }),

  "cancel and hand-back": Effect.gen(function* () {
    const { fixture, place, sessions, specOf } = yield* scene("claimed")
    const spec = specOf({ caller: cancellation, owner: handBack })
    const judge: Isolation.Judge = Effect.fnUntraced(function* (transcript) {
      const at = yield* place
      const answer = transcript.answer("caller.cancel")
      const next = yield* nextClaim(sessions.owner)
      return Isolation.brokenRules({
        [onePlace]: isOnePlace(at),
        [neverUnknown]: answer === "cancelled" || answer === "requested",
        "cancelled means done": (answer === "cancelled") === (at === "done"),
        "the next claim brings the request with it":
          next === (answer === "cancelled" ? "nothing" : "claimed, to be cancelled")
      })
    })
    return { fixture, spec, judge }
  }),

  "cancel and revocation": Effect.gen(function* () {
    const { fixture, owner, place, sessions, specOf } = yield* scene("claimed")
    const spec = specOf({ caller: cancellation, revoker: revocation(owner) })
    const judge: Isolation.Judge = Effect.fnUntraced(function* (transcript) {
      const at = yield* place
      const outcome = yield* fixture.value("SELECT d.outcome FROM tenure.done d")
      const next = yield* nextClaim(sessions.revoker)
      const answer = transcript.answer("caller.cancel")
      return Isolation.brokenRules({
        [noDeadlock]: neverDeadlocks(transcript),
        [onePlace]: isOnePlace(at),
        [neverUnknown]: answer === "cancelled" || answer === "requested",
        "the item ends cancelled, or is claimed with the request":
          outcome === "cancelled" || next === "claimed, to be cancelled"
      })
    })
    return { fixture, spec, judge }
  }),

  "checkpoint and settle": Effect.gen(function* () {
    const { fixture, place, specOf } = yield* scene("claimed")
    const spec = specOf({
      other: { checkpoint: ["BEGIN", checkpoint], commit: "COMMIT" },
      owner: { settle: ["BEGIN", settle("completed")], commit: "COMMIT" }
    })
    const judge: Isolation.Judge = Effect.fnUntraced(function* (transcript) {
      const steps = yield* fixture.value("SELECT count(*) FROM tenure.step")
      const written = transcript.answer("other.checkpoint") === "ok"
      const settled = transcript.answer("owner.settle") === "ok"
      return Isolation.brokenRules({
        [noDeadlock]: neverDeadlocks(transcript),
        [onePlace]: (yield* place) === (settled ? "done" : "claimed"),
        "a checkpoint is written or stale": written
          ? steps === "1"
          : steps === "0" && transcript.answer("other.checkpoint") === "stale",
        "one row that is held does not hold up a group of outcomes":
          !transcript.waited("owner.settle"),
        "the settle is stored or busy": settled || transcript.answer("owner.settle") === "busy",
        [lateCheckpoint]:
          !written || !settled || transcript.isBefore("other.commit", "owner.settle"),
        "one of the two succeeds": written || settled
      })
    })
    return { fixture, spec, judge }
  }),

  "checkpoint and revocation": Effect.gen(function* () {
    const { fixture, owner, place, specOf } = yield* scene("claimed")
    const spec = specOf({
      other: { checkpoint: ["BEGIN", checkpoint], commit: "COMMIT" },
      revoker: revocation(owner)
    })
    const judge: Isolation.Judge = Effect.fnUntraced(function* (transcript) {
      const written = transcript.answer("other.checkpoint") === "ok"
      const stuck = yield* fixture.value("SELECT r.stuck FROM tenure.ready r")
      return Isolation.brokenRules({
        [noDeadlock]: neverDeadlocks(transcript),
        [noSurvivor]: (yield* place) === "ready",
        "a late checkpoint is refused":
          written || transcript.answer("other.checkpoint") === "TN002",
        [stuckLoss]: stuck === (written ? "0" : "1")
      })
    })
    return { fixture, spec, judge }
  })
} as const

const promises: ReadonlyArray<readonly [keyof typeof scenarios, promise: string, orders: number]> =
  [
    [
      "settle and revocation",
      "the outcome is stored or the item is handed back; never both, never neither",
      10
    ],
    [
      "settle and revocation, with the executor's row held by a third",
      "neither deadlocks, whoever gets the row first",
      30
    ],
    ["claim and revocation", "no claim survives its executor, and none is lost", 10],
    ["cancel and settle", "the first terminal commit wins, and a late request is forgotten", 6],
    [
      "cancel and claim",
      "the item is cancelled and not claimed, or its owner finds the request",
      6
    ],
    ["cancel and hand-back", "a live item is never unknown, and the request outlives the move", 6],
    ["cancel and revocation", "the request is honoured at once or by the next claim", 10],
    ["checkpoint and settle", "a settle passes no checkpoint that is being written", 6],
    ["checkpoint and revocation", "the revocation counts the checkpoint that it waited for", 10]
  ]

describe("in every order", () => {
  for (const [name, promise, orders] of promises) {
    it.live(`${name}: ${promise}`, () =>
      Effect.gen(function* () {
        const { judge, spec } = yield* scenarios[name]
        assert.strictEqual((yield* Isolation.prove(spec, judge)).length, orders)
      })
    )
  }
})

const wrongForms: ReadonlyArray<{
  readonly form: string
  readonly scenario: keyof typeof scenarios
  readonly replace: readonly [name: string, right: string, wrong: string]
  readonly breaks: string
}> = [
  {
    form: "a settle that locks its rows before it is admitted",
    scenario: "settle and revocation, with the executor's row held by a third",
    replace: ["tenure.settle", "PERFORM tenure.admit();", ""],
    breaks: noDeadlock
  },
  {
    form: "a revocation that does not wait",
    scenario: "claim and revocation",
    replace: ["tenure.revoke", "WHERE e.id = executor FOR UPDATE;", "WHERE e.id = executor;"],
    breaks: noSurvivor
  },
  {
    // Without the barrier nothing breaks here: losses are judged in a statement after the one that waits for
    // the claims.
    form: "a revocation that looks for a checkpoint of earlier attempts",
    scenario: "checkpoint and revocation",
    replace: ["tenure.return_lost", "s.attempt = r.attempt", "s.attempt < r.attempt"],
    breaks: stuckLoss
  },
  {
    form: "a retry that keeps the old cancel request",
    scenario: "cancel and settle",
    replace: ["tenure.bring_back", "DELETE FROM tenure.cancel_request x WHERE x.id = item;", ""],
    breaks: oldRequest
  },
  {
    form: "a checkpoint that does not hold the claim",
    scenario: "checkpoint and settle",
    replace: ["tenure.checkpoint", "FOR KEY SHARE", ""],
    breaks: lateCheckpoint
  }
]

describe("the same orders with a wrong form", () => {
  for (const { breaks, form, replace, scenario } of wrongForms) {
    it.live(`${form} breaks a rule: ${breaks}`, () =>
      Effect.gen(function* () {
        const { fixture, judge, spec } = yield* scenarios[scenario]
        yield* fixture.mutate(...replace)
        const findings = yield* Isolation.explore(spec, judge)
        assert.include(
          findings.flatMap(({ broken }) => broken),
          breaks
        )
      })
    )
  }

  it.live("read one table after the other, an item on its way is nowhere", () =>
    Effect.gen(function* () {
      const { specOf } = yield* scene("claimed")
      const { answer } = yield* Isolation.run(
        specOf({
          caller: {
            ready: "SELECT count(*) FROM tenure.ready",
            claimed: "SELECT count(*) FROM tenure.claimed"
          },
          owner: handBack
        }),
        ["caller.ready", "owner.settle", "owner.commit", "caller.claimed"]
      )
      assert.deepStrictEqual([answer("caller.ready"), answer("caller.claimed")], ["0", "0"])
    })
  )
})
