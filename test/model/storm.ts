/**
 * A run: the storm with the invariants checked in snapshots, the end of all items, and what must have
 * been seen. What it proves is told by the tests that call it.
 */
import { assert } from "@effect/vitest"
import { Clock, Effect, Fiber } from "effect"
import * as K from "../kernel/kernel.ts"
import { freshDatabase } from "../support/Postgres.ts"
import { checkTheEnd, drain } from "./drain.ts"
import { check, prepare, type Violation } from "./invariants.ts"
import { seeded } from "./Seeded.ts"
import { run } from "./Stress.ts"
import { makeLedger, see } from "./Worker.ts"

const workerCount = 12

const mustBeSeen = [
  "a fence refusal",
  "a takeover",
  "a poison",
  "a quarantined item settled",
  "a group sealed",
  "a wake",
  "a stale claim swept",
  "an operation of unknown outcome",
  "a terminated backend"
]

/** TENURE_STRESS_SECONDS, or what the test asks for. */
export const secondsOr = (seconds: number): number =>
  Number(process.env["TENURE_STRESS_SECONDS"] ?? seconds)

export const storm = (seconds: number) =>
  Effect.gen(function* () {
    const seed = Number(process.env["TENURE_SEED"] ?? Math.floor(Math.random() * 2 ** 31))
    yield* Effect.log(`TENURE_SEED=${seed} TENURE_STRESS_SECONDS=${seconds}`)
    const database = yield* freshDatabase
    const owner = yield* K.sessionOf(database, "owner")
    const superuser = yield* K.sessionOf(database, "superuser")
    const ledger = makeLedger()
    yield* prepare(owner)

    const storm = yield* Effect.forkChild(
      Effect.forEach(
        Array.from({ length: workerCount }, (_, n) => n),
        (n) => Effect.scoped(run(database, superuser, ledger, seeded(seed + n))),
        { concurrency: "unbounded" }
      )
    )
    const violations: Array<Violation> = []
    const missing = () => (seconds < 60 ? [] : mustBeSeen.filter((what) => !ledger.seen.has(what)))
    // A slow machine comes later to what is rare.
    const started = yield* Clock.monotonicTimeNanos
    const isOver = (now: bigint) =>
      now - started >= BigInt(seconds) * 1_000_000_000n * (missing().length > 0 ? 4n : 1n)
    while (!isOver(yield* Clock.monotonicTimeNanos)) {
      if (violations.length + ledger.failures.length > 0) break
      yield* Effect.sleep("700 millis")
      violations.push(...(yield* check(owner)))
      see(ledger, "snapshots checked")
      ledger.backlog = K.first(
        yield* owner<{
          n: number
        }>`SELECT count(*)::int AS n FROM model.place WHERE place <> 'done'`
      ).n
    }
    const stopped = storm.pollUnsafe()
    yield* Fiber.interrupt(storm)
    assert.isUndefined(stopped, "a worker ended by itself")

    if (violations.length + ledger.failures.length === 0) {
      const left = yield* drain(database, owner)
      if (left > 0)
        violations.push({ invariant: "L1: everything ends", example: `${left} items left` })
      violations.push(...(yield* checkTheEnd(owner, ledger)))
    }

    const [totals] = yield* owner`
        SELECT (SELECT count(*)::int FROM tenure.item) AS items,
               (SELECT count(*)::int FROM model.claim_log) AS claims,
               (SELECT count(*)::int FROM tenure.executor) AS executors,
               (SELECT json_object_agg(outcome, n) FROM (
                  SELECT outcome || coalesce(' ' || reason, '') AS outcome, count(*) AS n
                    FROM tenure.done GROUP BY 1) o) AS outcomes`
    yield* Effect.log("totals", { ...totals, acknowledged: ledger.accepted.size })
    yield* Effect.log("seen", Object.fromEntries([...ledger.seen].toSorted()))

    assert.deepStrictEqual(violations, [])
    assert.deepStrictEqual(ledger.failures, [])
    assert.deepStrictEqual(missing(), [], "never reached")
  })
