/**
 * After the storm: every executor is revoked, one that is healthy runs what is left, and then nothing
 * that was promised may be missing (L1, I7).
 */
import { Effect, type Scope } from "effect"
import type { SqlError } from "effect/sql/SqlError"
import * as K from "../kernel/kernel.ts"
import type { FreshDatabase } from "../support/Postgres.ts"
import { check, type Violation } from "./invariants.ts"
import { type Ledger, queues } from "./Worker.ts"

const turnsMax = 2_000

/** Runs everything to its end. Answers what is left when it makes no end. */
export const drain = Effect.fnUntraced(function* (
  database: FreshDatabase,
  owner: K.Sql
): Effect.fn.Return<number, SqlError, Scope.Scope> {
  const left = yield* owner<{ id: string }>`
    SELECT id::text AS id FROM tenure.executor WHERE state IN ('active', 'revoking')`
  for (const { id } of left) yield* K.loseExecutor(owner, id)
  yield* owner`UPDATE tenure.queue SET paused_at = NULL`
  const runners = yield* Effect.forEach(queues, (options) =>
    K.executorOf(database, { ...options, version: "v2", accepted: ["v1"] })
  )
  const cursors = new Map<string, string>()
  for (let turn = 0; turn < turnsMax; turn++) {
    yield* owner`UPDATE tenure.delayed SET due_at = tenure.clock() WHERE due_at > tenure.clock()`
    yield* owner`SELECT promoted FROM tenure.promote(5000)`
    yield* owner`UPDATE tenure.parked SET due_at = tenure.clock(), state = coalesce(pre_claim_status, state),
                        pre_claim_status = NULL, claimed_by = NULL, claimed_at = NULL`
    yield* owner`SELECT d.dispatched FROM (SELECT gen_random_uuid() AS id OFFSET 0) e
                  CROSS JOIN LATERAL tenure.claim_waits(e.id, 5000) w
                  CROSS JOIN LATERAL tenure.dispatch_waits(e.id, w.ids) d`
    yield* owner`SELECT expired FROM tenure.expire_deadlines(5000)`
    for (const runner of runners) {
      const rows = yield* K.claimRows(runner, 500, {
        suspects: 500,
        cursor: cursors.get(runner.id) ?? ""
      })
      const claimed = rows.filter((row) => row.id !== null)
      cursors.set(runner.id, rows.find((row) => row.id === null)?.key ?? "")
      if (claimed.length === 0) continue
      yield* owner`INSERT INTO model.claim_log
                   SELECT u.id, u.attempt, ${runner.id}::uuid
                     FROM unnest(${K.array(claimed.map((row) => row.id))}::text::uuid[],
                                 ${K.array(claimed.map((row) => row.attempt))}::text::int[]) u(id, attempt)`
      yield* K.settle(
        runner,
        claimed.map(({ id, attempt }) => ({ id, attempt }))
      )
    }
    const [rest] = yield* owner<{ n: number }>`
      SELECT count(*)::int AS n FROM model.place WHERE place <> 'done'`
    if (rest === undefined || rest.n === 0) return 0
    if (turn === turnsMax - 1) return rest.n
  }
  return 0
})

/** Everything that must be so at the end, and what of it is not. */
export const checkTheEnd = Effect.fnUntraced(function* (
  owner: K.Sql,
  ledger: Ledger
): Effect.fn.Return<ReadonlyArray<Violation>, SqlError> {
  const found: Array<Violation> = [...(yield* check(owner))]
  const add = (invariant: string, rows: ReadonlyArray<{ readonly example: string }>) =>
    found.push(...rows.map(({ example }) => ({ invariant, example })))

  for (const ids of chunksOf([...ledger.accepted])) {
    add(
      "I7: an item whose enqueue was acknowledged is there and has ended",
      yield* owner<{ example: string }>`
        SELECT u.id::text AS example FROM unnest(${K.array(ids)}::text::uuid[]) u(id)
         WHERE NOT EXISTS (SELECT FROM tenure.item i WHERE i.id = u.id)
            OR NOT EXISTS (SELECT FROM tenure.done d WHERE d.id = u.id) LIMIT 3`
    )
  }
  for (const settled of chunksOf([...ledger.settled])) {
    add(
      "I5: an outcome that was acknowledged is the one that is stored",
      yield* owner<{ example: string }>`
        SELECT u.id::text AS example
          FROM unnest(${K.array(settled.map(([id]) => id))}::text::uuid[],
                      ${K.array(settled.map(([, end]) => end.attempt))}::text::int[],
                      ${K.array(settled.map(([, end]) => end.outcome))}::text::text[]) u(id, attempt, outcome)
         WHERE NOT EXISTS (SELECT FROM tenure.done d WHERE d.id = u.id AND d.attempt = u.attempt
                                                     AND d.outcome = u.outcome) LIMIT 3`
    )
  }
  add(
    "no transaction of ours deadlocks",
    yield* owner<{ example: string }>`
      SELECT deadlocks || ' deadlocks' AS example FROM pg_stat_database
       WHERE datname = current_database() AND deadlocks > 0`
  )
  add(
    "no lock outlives its transaction",
    yield* owner<{ example: string }>`
      SELECT l.locktype || ' ' || l.objid AS example FROM pg_locks l
       WHERE l.locktype = 'advisory'
         AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())`
  )
  return found
})

const chunksOf = <A>(all: ReadonlyArray<A>): ReadonlyArray<ReadonlyArray<A>> =>
  Array.from({ length: Math.ceil(all.length / 10_000) }, (_, n) =>
    all.slice(n * 10_000, (n + 1) * 10_000)
  )
