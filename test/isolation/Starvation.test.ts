/**
 * Goal: under a stream of overlapping fenced transactions neither the executor's renewals nor its
 * revocation starve (I2, I11).
 * Method: first the stream as a script, where one order shows why a revocation in one step never ends;
 * then 32 real clients, with counts of one run compared with each other and no clock.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect, Fiber } from "effect"
import { sqlState } from "../../src/database/SqlState.ts"
import * as Fixture from "./Fixture.ts"
import * as Isolation from "./Isolation.ts"

const { mark, renew, revoke, write } = Fixture.statements

describe("a stream of overlapping transactions", () => {
  const stream = Effect.fnUntraced(function* (first: (victim: string) => Isolation.Step) {
    const fixture = yield* Fixture.make
    const victim = yield* fixture.executor
    const writer = Effect.map(fixture.session({ executor: victim }), (session) => session)
    const transaction = { begin: ["BEGIN", write], commit: "COMMIT" }
    return yield* Isolation.run(
      {
        observer: fixture.observer,
        reset: fixture.reset,
        sessions: {
          a: yield* writer,
          b: yield* writer,
          c: yield* writer,
          heartbeat: yield* writer,
          revoker: yield* fixture.session({ role: "owner" })
        },
        steps: {
          a: transaction,
          b: transaction,
          c: transaction,
          heartbeat: { renew: renew(victim) },
          revoker: { first: first(victim), barrier: revoke(victim) }
        }
      },
      // Each of the three begins before the one before it has ended.
      [
        "a.begin",
        "revoker.first",
        "revoker.barrier",
        "b.begin",
        "heartbeat.renew",
        "a.commit",
        "c.begin",
        "b.commit",
        "c.commit"
      ]
    )
  })

  it.live("is cut off by the mark: the barrier waits for those before it only", () =>
    Effect.gen(function* () {
      const { lines } = yield* stream(mark)
      assert.deepStrictEqual(lines, [
        "a.begin: ok",
        "revoker.first: revoking",
        "revoker.barrier: waits",
        "b.begin: TN002",
        "heartbeat.renew: revoking",
        "a.commit: ok",
        "revoker.barrier: revoked 0",
        "c.begin: TN002",
        "b.commit: rolled back",
        "c.commit: rolled back"
      ])
    })
  )

  it.live(
    "passes by a revocation in one step for as long as it lasts, and so do the renewals",
    () =>
      Effect.gen(function* () {
        const { isBefore, lines } = yield* stream(
          (victim) => `SELECT e.state FROM tenure.executor e WHERE e.id = '${victim}' FOR UPDATE`
        )
        assert.includeMembers(
          [...lines],
          ["b.begin: ok", "c.begin: ok", "heartbeat.renew: renewed"]
        )
        assert.isTrue(isBefore("c.begin", "revoker.first"))
        assert.isTrue(isBefore("c.commit", "revoker.first"))
      })
  )
})

describe("32 clients of one executor", () => {
  const clientCount = 32

  it.live("renew meanwhile, and a revocation waits for one transaction of each at most", () =>
    Effect.gen(function* () {
      const fixture = yield* Fixture.make
      const victim = yield* fixture.executor
      let admitted = 0
      let refused = 0
      const others: Array<string | undefined> = []
      const client = Effect.gen(function* () {
        const { sql } = yield* fixture.session({ executor: victim })
        const transaction = Effect.gen(function* () {
          yield* sql.unsafe("BEGIN")
          yield* sql.unsafe(write)
          admitted++
          // Held open by the server, so that the transactions of all clients overlap.
          yield* sql.unsafe("SELECT pg_sleep(0.01)")
          yield* sql.unsafe("COMMIT")
        }).pipe(
          Effect.catch((error) => {
            if (sqlState(error) === "TN002") refused++
            else others.push(sqlState(error))
            return Effect.asVoid(sql.unsafe("ROLLBACK"))
          })
        )
        return yield* Effect.forever(transaction)
      })
      const clients = yield* Effect.replicateEffect(
        Effect.forkChild(Effect.scoped(client)),
        clientCount
      )
      const heartbeat = yield* fixture.session({ executor: victim })
      const revoker = yield* fixture.session({ executor: yield* fixture.executor })

      const renewals: Array<unknown> = []
      yield* Effect.repeat(
        Effect.map(heartbeat.sql.unsafe(renew(victim)), ([row]) => renewals.push(row)),
        { until: () => admitted >= 20 * clientCount }
      )
      for (const row of renewals) assert.deepStrictEqual(row, { renew_lease: "renewed" })
      // One that waits for sharers gets no turn at all; of these hundreds do.
      assert.isAbove(renewals.length, 20, "no renewal waits for a round of all clients")

      yield* revoker.sql.unsafe(mark(victim))
      const admittedAtMark = admitted
      const revocation = yield* revoker.sql.unsafe(revoke(victim))
      const admittedAtEnd = admitted
      assert.deepStrictEqual(revocation, [{ state: "revoked", requeued: 0 }])
      // The answer to a write that was admitted before the mark may still have been on its way.
      assert.isAtMost(admittedAtEnd - admittedAtMark, clientCount)

      const enough = refused + 2 * clientCount
      yield* Effect.repeat(heartbeat.sql.unsafe(renew(victim)), { until: () => refused >= enough })
      assert.strictEqual(admitted, admittedAtEnd, "the stream goes on, and nobody gets in")
      assert.deepStrictEqual(others, [])
      yield* Fiber.interruptAll(clients)
      const notes = yield* fixture.value("SELECT count(*) FROM app.note")
      assert.strictEqual(notes, String(admittedAtEnd), "all that was admitted is there")
    })
  )
})
