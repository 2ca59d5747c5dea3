/**
 * What executors do with items: claim, settle in every way and out of turn, checkpoint, audit, sweep,
 * settle quarantined ones, and write to an application's fenced table.
 */
import { Effect } from "effect"
import { randomUUID } from "node:crypto"
import * as K from "../kernel/kernel.ts"
import { beginAnew, queues, see, unexpected, type Worker } from "./Worker.ts"

const lowest = [-2147483648, 0] as const

export const claim = (worker: Worker) =>
  Effect.gen(function* () {
    const { random } = worker
    const { queue } = random.pick(queues)
    const runner = worker.runners.get(queue)
    if (runner === undefined || worker.held.size > 60) return
    const floors = random.chance(0.7) ? worker.floors.get(queue) : undefined
    const isSuspected = [...worker.held.values()].some((item) => item.losses > 0)
    // The log is written by the statement that claims: a claim is in it exactly when it is committed.
    const rows = yield* runner.sql<K.Claimed>`
      WITH claimed AS MATERIALIZED (
        SELECT c.id, c.attempt, c.lane_id, c.rank, c.seq::float8 AS seq, c.failures, c.losses, c.key,
               c.payload::text AS payload, c.cancel_requested
          FROM tenure.claim(${runner.queueId}::int, ${K.array(runner.lanes)}::text::int[],
                 ${K.array((floors ?? runner.lanes.map(() => lowest)).map(([rank]) => rank))}::text::int[],
                 ${K.array((floors ?? runner.lanes.map(() => lowest)).map(([, seq]) => seq))}::text::bigint[],
                 ${1 + random.int(12)}::int, ${K.array(runner.suspectLanes)}::text::int[],
                 ${isSuspected ? 0 : 1}::int, ${worker.cursors.get(queue) ?? ""}) c
      ), logged AS (
        INSERT INTO model.claim_log (id, attempt, owner)
        SELECT c.id, c.attempt, ${runner.id}::uuid FROM claimed c WHERE c.id IS NOT NULL
      )
      SELECT id::text AS id, attempt, lane_id, rank, seq, losses, key, payload, cancel_requested FROM claimed`
    if (random.chance(0.02)) return see(worker.ledger, "a claim whose answer was lost")
    const moved = new Map(runner.lanes.map((lane, n) => [lane, floors?.[n] ?? lowest]))
    let poisoned = false
    for (const row of rows) {
      if (row.id === null) {
        worker.cursors.set(queue, row.key ?? "")
        continue
      }
      if (row.losses === 0) moved.set(row.lane_id, [row.rank, row.seq])
      worker.held.set(row.id, { id: row.id, attempt: row.attempt, losses: row.losses, queue })
      poisoned ||= row.payload === `"poison"` && random.chance(0.8)
    }
    worker.floors.set(
      queue,
      rows.length === 0 ? runner.lanes.map(() => lowest) : [...moved.values()]
    )
    if (poisoned) {
      see(worker.ledger, "a death by poison")
      yield* beginAnew(worker)
    }
  })

/** The look of a queue monitor, with or without a claim to tell of, and asking for certainty or not. */
export const observe = (worker: Worker) =>
  Effect.gen(function* () {
    const { random } = worker
    const looked = K.array([...worker.runners.values()].map(({ queueId }) => queueId))
    const told = random.chance(0.5) ? looked : K.array([])
    const seen = yield* worker.session.sql<{ has_fresh: boolean }>`
      SELECT has_fresh FROM tenure.observe_queues(ARRAY['v1', 'v2'], ${looked}::text::int[],
        ${random.chance(0.5) ? looked : K.array([])}::text::int[], ${told}::text::int[],
        array_fill(0::float8, ARRAY[cardinality(${told}::text::int[])]))`
    if (seen.some((one) => one.has_fresh)) see(worker.ledger, "a look that found work")
  })

const outcomes = [
  [12, "completed"],
  [2, "failed"],
  [1, "cancelled"],
  [2, "retry"],
  [2, "hand-back"]
] as const

export const settle = (worker: Worker) =>
  Effect.gen(function* () {
    const { random, ledger } = worker
    const first = [...worker.held.values()]
    const runner = worker.runners.get("plain")
    if (first.length === 0 || runner === undefined) return
    const chosen = first.filter(() => random.chance(0.7))
    const old = worker.past.filter(() => random.chance(0.03))
    const ghosts = random.chance(0.1)
      ? [{ id: randomUUID(), attempt: 1, losses: 0, queue: "plain" }]
      : []
    const twins = random.chance(0.1) ? chosen.slice(0, 2) : []
    const settlements = [...chosen, ...old, ...ghosts, ...twins].map((item) => {
      const owner = worker.runners.get(item.queue) ?? runner
      return {
        id: item.id,
        attempt: item.attempt,
        outcome: random.weighted(outcomes),
        result: `"\\u0000"`,
        lane: item.losses > 0 ? owner.suspectLane : owner.startedLane,
        ...(random.chance(0.5) ? { delayMs: random.int(800) } : {})
      }
    })
    const answers = new Map(
      (yield* K.settle(runner, settlements)).map((answer) => [
        `${answer.id}/${answer.attempt}`,
        answer.status
      ])
    )
    for (const { id, attempt, outcome } of settlements) {
      const status = answers.get(`${id}/${attempt}`)
      if (status !== undefined) see(ledger, `a settle answered with ${status}`)
      const held = worker.held.get(id)
      if (held?.attempt !== attempt || status === "busy") continue
      // A twin makes the answer ambiguous here, not in the database: the invariants look at that.
      if (status === undefined) acknowledge(worker, id, attempt, outcome)
      worker.past = [held, ...worker.past].slice(0, 100)
      worker.held.delete(id)
    }
    if (!random.chance(0.1)) return
    const again = yield* K.settle(runner, settlements)
    for (const { status } of again) see(ledger, `a repeated settle answered with ${status}`)
    const busyCount = settlements.filter(
      ({ id, attempt }) => answers.get(`${id}/${attempt}`) === "busy"
    ).length
    if (settlements.length - again.length > busyCount) {
      unexpected(worker, "settle again", `${settlements.length} asked, ${again.length} refused`)
    }
  })

const acknowledge = (worker: Worker, id: string, attempt: number, outcome: string): void => {
  // An operator may bring a failed item back, so that only these two are final.
  if (outcome !== "completed" && outcome !== "cancelled") return
  const known = worker.ledger.settled.get(id)
  if (known !== undefined) {
    unexpected(worker, "settle", `${id} was settled as ${known.outcome} and again as ${outcome}`)
  }
  worker.ledger.settled.set(id, { attempt, outcome })
}

export const checkpoint = (worker: Worker) =>
  Effect.gen(function* () {
    const { random } = worker
    const runner = worker.runners.get("plain")
    if (runner === undefined) return
    const some = [...worker.held.values(), ...worker.past.slice(0, 2)].filter(() =>
      random.chance(0.3)
    )
    const answers = yield* K.checkpoint(
      runner,
      some.map((item) => ({ ...item, name: `step ${random.int(5)}`, value: "1" }))
    )
    for (const { status } of answers) see(worker.ledger, `a checkpoint answered with ${status}`)
  })

/** What the database has and the process does not know goes back: answers to claims were lost. */
export const audit = (worker: Worker) =>
  Effect.gen(function* () {
    const claims = yield* worker.session.sql<{ id: string; attempt: number; lane: number }>`
      SELECT c.id::text AS id, c.attempt,
             (SELECT l.id FROM tenure.claimed x JOIN tenure.lane own ON own.id = x.lane_id
                JOIN tenure.executor e ON e.id = x.owner
                JOIN tenure.lane l ON l.queue_id = x.queue_id AND l.suspect = (x.losses > 0)
                 AND l.version = e.application_version WHERE x.id = c.id) AS lane
        FROM tenure.claims_of(${worker.executorId}::uuid, interval '50 ms', 100) c`
    const stray = claims.filter((row) => worker.held.get(row.id)?.attempt !== row.attempt)
    const runner = worker.runners.get("plain")
    if (stray.length === 0 || runner === undefined) return
    see(worker.ledger, "a stray claim handed back", stray.length)
    yield* K.settle(
      runner,
      stray.map((row) => ({
        id: row.id,
        attempt: row.attempt,
        outcome: "hand-back",
        lane: row.lane
      }))
    )
  })

/** Begins a wait and parks for it: what was running goes on waiting, or was not ours any more. */
export const park = (worker: Worker) =>
  Effect.gen(function* () {
    const { random, ledger } = worker
    const some = [...worker.held.values()].filter(() => random.chance(0.3))
    const runner = worker.runners.get("plain")
    if (some.length === 0 || runner === undefined) return
    const ids = K.array(some.map((item) => item.id))
    const attempts = K.array(some.map((item) => item.attempt))
    const names = some.map(() => `wait ${random.int(3)}`)
    yield* runner.sql`
      SELECT status FROM tenure.ask_waits(${ids}::text::uuid[], ${attempts}::text::int[], ${K.array(names)}::text::text[],
        ${K.array(some.map(() => random.pick(["sleep", "event"])))}::text::text[],
        ${K.array(some.map(() => (random.chance(0.8) ? random.int(500) : null)))}::text::float8[])`
    const answers = new Map(
      (yield* runner.sql<{ id: string; status: string }>`
        SELECT id::text AS id, status FROM tenure.park(${ids}::text::uuid[], ${attempts}::text::int[],
          ${K.array(some.map((item) => (worker.runners.get(item.queue) ?? runner).startedLane))}::text::int[],
          ${K.array(names.map((name) => JSON.stringify([name])))}::text::text[])`).map((answer) => [
        answer.id,
        answer.status
      ])
    )
    for (const item of some) {
      const status = answers.get(item.id)
      see(ledger, `a park answered with ${status ?? "nothing"}`)
      if (status === "busy") continue
      worker.past = [item, ...worker.past].slice(0, 100)
      worker.held.delete(item.id)
    }
  })

/**
 * Both steps of a wake, and now and then only the first; and what was left between them. Before that
 * an event, for whatever item.
 */
export const wake = (worker: Worker) =>
  Effect.gen(function* () {
    const { random } = worker
    const known = [...worker.past.slice(0, 20), ...worker.held.values()]
    if (known.length > 0) {
      const [told] = yield* worker.client.sql<{ answer: string }>`
        SELECT tenure.signal(${random.pick(known).id}::uuid, ${`wait ${random.int(3)}`}) AS answer`
      see(worker.ledger, `an event answered with ${told?.answer}`)
    }
    const { sql } = worker.session
    const [woken] = yield* sql<{ ids: ReadonlyArray<string> }>`
      SELECT ids::text[] AS ids FROM tenure.claim_waits(${worker.executorId}::uuid, 20)`
    if (woken !== undefined && woken.ids.length > 0) {
      see(worker.ledger, "a wake", woken.ids.length)
      if (random.chance(0.9)) {
        yield* sql`SELECT dispatched FROM tenure.dispatch_waits(${worker.executorId}::uuid, ${K.array(woken.ids)}::text::uuid[])`
      }
    }
    if (!random.chance(0.3)) return
    const [row] = yield* sql<{
      swept: number
    }>`SELECT tenure.sweep_stale_claims('300 ms', 20) AS swept`
    see(worker.ledger, "a stale claim swept", row?.swept ?? 0)
  })

export const promote = (worker: Worker) =>
  worker.session.sql`SELECT promoted FROM tenure.promote(200)`

export const expire = (worker: Worker) =>
  Effect.map(
    worker.session.sql<{ expired: number }>`SELECT expired FROM tenure.expire_deadlines(50)`,
    ([row]) => see(worker.ledger, "an item past its deadline", row?.expired ?? 0)
  )

/** The application's row with the end of the quarantine, or neither. A second row would be a conflict. */
export const settleQuarantined = (worker: Worker) =>
  Effect.gen(function* () {
    const { random } = worker
    const { sql } = worker.session
    const queueIds = [...worker.runners.values()].map(({ queueId }) => queueId)
    const taken = yield* sql<{ id: string | null }>`
      SELECT t.item_id::text AS id
        FROM tenure.take_settlements(${K.array(queueIds)}::text::int[], '10 ms', '200 ms', 3) t`
    for (const { id } of taken) {
      if (id === null) continue
      yield* sql`BEGIN`
      const [item] = yield* sql<{ at: string }>`
        SELECT quarantined_at::text AS at FROM tenure.begin_settlement(${id}::uuid)`
      if (item === undefined) {
        see(worker.ledger, "a quarantined item that somebody else has")
        yield* sql`ROLLBACK`
        continue
      }
      yield* sql`INSERT INTO model.settlement VALUES (${id}::uuid, ${item.at}::text::timestamptz)`
      if (random.chance(0.3)) yield* Effect.sleep(random.next() * 20)
      yield* sql`SELECT tenure.end_settlement(${id}::uuid)`
      if (random.chance(0.7)) {
        yield* sql`COMMIT`
        see(worker.ledger, "a quarantined item settled")
      } else {
        yield* sql`ROLLBACK`
        yield* sql`SELECT tenure.settlement_failed(${id}::uuid, 'Refused')`
      }
    }
  })

/** Two rows or none, beside a settle or alone. */
export const write = (worker: Worker) =>
  Effect.gen(function* () {
    const { sql } = worker.session
    const transaction = randomUUID()
    yield* sql.unsafe(
      `BEGIN ISOLATION LEVEL ${worker.random.pick(["READ COMMITTED", "REPEATABLE READ"])}`
    )
    yield* sql`INSERT INTO model.account VALUES (${transaction}::uuid, 1)`
    if (worker.random.chance(0.5)) yield* Effect.sleep(worker.random.next() * 20)
    yield* sql`INSERT INTO model.account VALUES (${transaction}::uuid, 2)`
    yield* worker.random.chance(0.8) ? sql`COMMIT` : sql`ROLLBACK`
  })
