/**
 * What clients do: hand in, in every form and inside transactions of their own, cancel, and bring failed
 * items back. A client has no lease; what it does is refused by nobody.
 */
import { Effect } from "effect"
import * as K from "../kernel/kernel.ts"
import { enqueuePaced, someGroups } from "./groupOperations.ts"
import type { Seeded } from "./Seeded.ts"
import { type Ledger, queues, see, unexpected, type Worker } from "./Worker.ts"

const priorities = (random: Seeded, count: number) =>
  Array.from({ length: count }, () => (random.chance(0.8) ? 0 : random.int(5)))

const accept = (worker: Worker, ids: ReadonlyArray<string> | null): void => {
  for (const id of ids ?? []) worker.ledger.accepted.add(id)
  worker.ledger.backlog += ids?.length ?? 0
}

const backlogMax = 3_000

/** Twice as often on as off, so that work moves. What is told here is committed, or the transaction is not. */
export const pauseOrResume = (worker: Worker) =>
  Effect.gen(function* () {
    const { random } = worker
    const { sql } = worker.client
    const { queue } = random.pick(queues)
    yield* sql`BEGIN`
    yield* random.chance(0.33)
      ? sql`SELECT tenure.pause_queue(${queue})`
      : sql`SELECT tenure.resume_queue(${queue})`
    if (random.chance(0.3)) yield* Effect.sleep(random.next() * 20)
    yield* random.chance(0.8) ? sql`COMMIT` : sql`ROLLBACK`
  })

const hasRoom = (ledger: Ledger): boolean => ledger.backlog < backlogMax

const enqueueSome = Effect.fnUntraced(function* (worker: Worker, sql: K.Sql) {
  const { random } = worker
  const queue = random.pick(queues).queue
  const count = random.chance(0.5) ? 1 : 1 + random.int(30)
  const each = <A>(make: () => A) => Array.from({ length: count }, make)
  const groups = someGroups(worker, count)
  const { ids, refused_group } = yield* K.enqueueAll(
    sql,
    queue,
    // Two in a hundred are poison: whoever claims one dies of it.
    each(() => (random.chance(0.02) ? `"poison"` : `"item"`)),
    {
      priorities: priorities(random, count),
      ...(groups === undefined ? {} : { groups }),
      ...(random.chance(0.6)
        ? { keys: each(() => (random.chance(0.2) ? null : `k${random.int(40)}`)) }
        : {}),
      ...(random.chance(0.3)
        ? { delaysMs: each(() => (random.chance(0.5) ? null : random.int(1500))) }
        : {}),
      ...(random.chance(0.2)
        ? { deadlinesMs: each(() => (random.chance(0.5) ? null : random.int(4000))) }
        : {})
    }
  )
  if (refused_group !== null) see(worker.ledger, "members of a group that was sealed")
  return ids
})

/** Keys that come again: of the same few hundred, and now and then with another payload. */
const enqueueKeyed = Effect.fnUntraced(function* (worker: Worker, sql: K.Sql) {
  const { random, ledger } = worker
  const count = random.chance(0.5) ? 1 : 1 + random.int(8)
  const generation = Math.floor(ledger.accepted.size / 500)
  const { ids, conflict_key } = yield* K.enqueueAll(
    sql,
    random.pick(queues).queue,
    Array.from({ length: count }, () => (random.chance(0.99) ? `"item"` : `"other"`)),
    {
      idempotencyKeys: Array.from({ length: count }, () =>
        random.chance(0.1) ? null : `i${generation}-${random.int(120)}`
      )
    }
  )
  if (conflict_key !== null) see(ledger, "an idempotency conflict")
  return ids
})

export const enqueue = (worker: Worker) =>
  Effect.gen(function* () {
    if (!hasRoom(worker.ledger)) return
    accept(worker, yield* enqueueSome(worker, worker.client.sql))
  })

export const enqueueWithKeys = (worker: Worker) =>
  Effect.gen(function* () {
    if (!hasRoom(worker.ledger)) return
    accept(worker, yield* enqueueKeyed(worker, worker.client.sql))
  })

export const enqueueWithPace = (worker: Worker) =>
  Effect.gen(function* () {
    if (!hasRoom(worker.ledger)) return
    accept(worker, yield* enqueuePaced(worker, worker.client.sql))
  })

/**
 * A transaction of the application. Keys or cancels, not both, and each in one order: two transactions
 * that take them crosswise deadlock, and that is theirs to know.
 */
export const userTransaction = (worker: Worker) =>
  Effect.gen(function* () {
    const { random } = worker
    const { sql } = worker.client
    const ids: Array<string> = []
    yield* sql.unsafe(
      `BEGIN ISOLATION LEVEL ${random.pick(["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])}`
    )
    if (random.chance(0.5)) {
      for (let turn = random.int(3); turn >= 0; turn--)
        ids.push(...((yield* enqueueSome(worker, sql)) ?? []))
      if (random.chance(0.5)) ids.push(...((yield* enqueueKeyed(worker, sql)) ?? []))
    } else {
      const some = [...someAccepted(worker, 4)].toSorted()
      for (const id of some) yield* sql`SELECT tenure.cancel(${id}::uuid)`
    }
    if (random.chance(0.5)) yield* Effect.sleep(random.next() * 15)
    if (random.chance(0.3)) {
      yield* sql`ROLLBACK`
    } else {
      yield* sql`COMMIT`
      accept(worker, ids)
    }
  })

const someAccepted = (worker: Worker, count: number): ReadonlyArray<string> => {
  const { accepted } = worker.ledger
  if (accepted.size === 0) return []
  const skip = Math.max(0, accepted.size - 1 - worker.random.int(Math.min(2_000, accepted.size)))
  const found: Array<string> = []
  let place = 0
  for (const id of accepted) {
    if (place++ < skip) continue
    found.push(id)
    if (found.length === count) break
  }
  return found
}

export const cancel = (worker: Worker) =>
  Effect.gen(function* () {
    for (const id of someAccepted(worker, 1)) {
      const [row] = yield* worker.client.sql<{
        answer: string
      }>`SELECT tenure.cancel(${id}::uuid) AS answer`
      see(worker.ledger, `a cancel answered with ${row?.answer}`)
      if (row?.answer === "unknown")
        unexpected(worker, "cancel", `${id} was accepted and is unknown`)
    }
  })

export const closeQuarantined = (worker: Worker) =>
  Effect.gen(function* () {
    const [open] = yield* worker.client.sql<{ id: string }>`
      SELECT item_id::text AS id FROM tenure.quarantine WHERE state = 'open' LIMIT 1`
    if (open !== undefined)
      yield* worker.client.sql`SELECT tenure.close_quarantine(${open.id}::uuid)`
  })

export const retry = (worker: Worker) =>
  Effect.gen(function* () {
    const { sql } = worker.client
    const failed = yield* sql<{ id: string }>`
      SELECT id::text AS id FROM tenure.done WHERE outcome = 'failed' AND reason IS DISTINCT FROM 'DeadlineExceeded'
       ORDER BY finished_at DESC LIMIT 1`
    for (const { id } of failed) {
      yield* sql`BEGIN`
      yield* sql`INSERT INTO model.retried VALUES (${id}::uuid) ON CONFLICT DO NOTHING`
      yield* sql`SELECT tenure.retry(${id}::uuid)`
      yield* sql`COMMIT`
    }
  })
