/**
 * What executors do to each other and to themselves: look for lost ones, revoke in two steps and now and
 * then leave it half done, revoke somebody who is well, pause past the lease, crash, release.
 */
import { Effect } from "effect"
import type * as K from "../kernel/kernel.ts"
import { beginAnew, see, validityMillis, type Worker } from "./Worker.ts"

const revoke = Effect.fnUntraced(function* (worker: Worker, executorId: string, forced: boolean) {
  const { sql } = worker.session
  const [mark] = yield* sql<{ state: string }>`
    SELECT tenure.mark_revoking(${executorId}::uuid, ${forced}) AS state`
  if (mark?.state === "active") return see(worker.ledger, "an executor that renewed in time")
  if (worker.random.chance(0.1)) return see(worker.ledger, "a revocation left half done")
  const [report] = yield* sql<K.Revoked>`
    SELECT r.state, r.requeued, r.cancelled, r.exhausted::text[] AS exhausted, r.settled::text[] AS settled
      FROM tenure.revoke(${executorId}::uuid, make_interval(secs => 0.05), interval '0') r`
  if (report === undefined) return
  see(worker.ledger, "a revocation")
  if (mark?.state === "revoking") see(worker.ledger, "an item handed back", report.requeued)
  if (report.requeued > 0) see(worker.ledger, "a takeover")
  if (report.exhausted.length > 0) see(worker.ledger, "a poison", report.exhausted.length)
})

export const scan = (worker: Worker) =>
  Effect.gen(function* () {
    const lost = yield* worker.session.sql<{ id: string; state: string }>`
      SELECT id::text AS id, state FROM tenure.recoverable_executors('app', ARRAY['v1', 'v2'], 5)`
    for (const { id, state } of lost) {
      if (state === "revoking") see(worker.ledger, "a half done revocation found")
      yield* revoke(worker, id, false)
    }
  })

export const revokeSomebody = (worker: Worker) =>
  Effect.gen(function* () {
    const [victim] = yield* worker.session.sql<{ id: string }>`
      SELECT id::text AS id FROM tenure.executor WHERE state = 'active' ORDER BY random() LIMIT 1`
    if (victim !== undefined && victim.id !== worker.executorId)
      yield* revoke(worker, victim.id, true)
  })

/** Long enough to be expired, and then it goes on as if nothing had been. */
export const pause = (worker: Worker) =>
  Effect.gen(function* () {
    yield* Effect.sleep(validityMillis * (0.8 + worker.random.next()))
    worker.isPaused = true
  })

export const crash = (worker: Worker) => beginAnew(worker)

export const release = (worker: Worker) =>
  Effect.gen(function* () {
    const [report] = yield* worker.session.sql<{ state: string }>`
      SELECT state FROM tenure.release_executor(${worker.executorId}::uuid)`
    see(worker.ledger, `a release answered with ${report?.state}`)
    yield* beginAnew(worker)
  })
