/**
 * Goal: executors' claims and sessions' leases together never pass a queue's limits, and no item is in
 * two places or lost, whatever bursts, losses and sweeps come (C2, C3, I10; I-016, I-020, and derived:
 * slots in use never exceed the limit across recovery bursts).
 * Method: random operations on a dozen connections, with every snapshot checked; at the end all of it is
 * run to its end. TENURE_SEED repeats the choices.
 */
import { assert, layer } from "@effect/vitest"
import { Effect, type Scope } from "effect"
import type { SqlError } from "effect/sql/SqlError"
import { randomInt } from "node:crypto"
import * as Store from "../../src/capacity/CapacityStore.ts"
import { seeded } from "../model/Seeded.ts"
import * as C from "./capacity.ts"
import * as K from "./kernel.ts"

const limits = { global: 5, perKey: 2 } as const
const keys = ["a", "b", "c"] as const
const queue = "limits"

/** What is wrong in one snapshot. */
const broken = (owner: K.Sql) =>
  Effect.map(
    owner<{ what: string }>`
      WITH held AS (
        SELECT id, key FROM tenure.claimed WHERE queue_id > 0
        UNION ALL SELECT item_id, key FROM tenure.capacity_lease
      ), place AS (
        SELECT id FROM held UNION ALL SELECT id FROM tenure.ready WHERE lane_id > 0
        UNION ALL SELECT id FROM tenure.delayed UNION ALL SELECT id FROM tenure.done
      )
      SELECT 'the queue runs ' || count(*) AS what FROM held HAVING count(*) > ${limits.global}::int
      UNION ALL
      SELECT key || ' runs ' || count(*) FROM held GROUP BY key HAVING count(*) > ${limits.perKey}::int
      UNION ALL
      SELECT i.id || ' is in ' || count(p.id) || ' places' FROM tenure.item i LEFT JOIN place p ON p.id = i.id
       GROUP BY i.id HAVING count(p.id) <> 1
      UNION ALL
      SELECT s.id || ' holds ' || count(*) FROM tenure.session s
        JOIN tenure.capacity_lease c ON c.session = s.id
       GROUP BY s.id HAVING count(*) > s.slots`,
    (rows) => rows.map(({ what }) => what)
  )

const settled = (owner: K.Sql) =>
  Effect.map(
    owner<{ n: number }>`SELECT count(*)::int AS n FROM tenure.done`,
    (rows) => K.first(rows).n
  )

layer(K.Kernel.layer, { excludeTestServices: true })("limits of a queue with sessions", (it) => {
  it.effect(
    "hold in every snapshot of a storm",
    () =>
      Effect.gen(function* () {
        const seed = Number(process.env["TENURE_SEED"] ?? randomInt(2 ** 31))
        const api = yield* K.session("api")
        const owner = yield* K.session("owner")
        const options = {
          queue,
          globalLimit: limits.global,
          perKeyLimit: limits.perKey,
          recoveryMax: 1_000_000
        } as const
        const total = 300
        yield* K.enqueueMany(api, queue, total, {
          keys: Array.from({ length: total }, (_, at) => keys[at % keys.length] ?? null)
        })

        const worker = Effect.fnUntraced(function* (
          seed: number
        ): Effect.fn.Return<void, SqlError, K.Kernel | Scope.Scope> {
          const random = seeded(seed)
          let node = yield* K.executor(options)
          const mine = yield* K.session("owner")
          let session = yield* C.open(node, { queues: [queue], slots: 3 })
          let claims: ReadonlyArray<K.Claimed> = []
          let leases: ReadonlyArray<Store.PulledItem> = []
          for (let turn = 0; turn < 40; turn++) {
            switch (random.int(9)) {
              case 0:
                claims = [...claims, ...(yield* K.claim(node, 1 + random.int(4)))]
                break
              case 1:
                yield* K.settle(
                  node,
                  claims.map(({ attempt, id }) => ({
                    id,
                    attempt,
                    outcome: random.chance(0.3) ? "hand-back" : "completed"
                  }))
                )
                claims = []
                break
              case 2:
              case 3: {
                const { items, refused } = yield* Store.pull(node.sql, session, 1 + random.int(4))
                leases = [...leases, ...items]
                if (refused !== null) {
                  leases = []
                  session = yield* C.open(node, { queues: [queue], slots: 3 })
                }
                break
              }
              case 4:
                for (const { executionSeq, id } of leases) {
                  yield* Store.activate(node.sql, session, id, executionSeq)
                }
                break
              case 5:
                for (const { executionSeq, id } of leases) {
                  if (random.chance(0.3)) {
                    const retry = { message: "again", retriesLeft: 1 }
                    yield* Store.fail(node.sql, session, id, executionSeq, retry)
                  } else yield* Store.complete(node.sql, session, id, executionSeq, null)
                }
                leases = []
                break
              case 6:
                // The worker is gone: its clocks run out, and anybody's sweep takes it back.
                if (random.chance(0.5)) yield* C.expire(mine, session)
                yield* C.sweep(node)
                break
              case 7:
                yield* random.chance(0.5)
                  ? Store.closeSession(node.sql, session)
                  : Store.heartbeat(node.sql, session)
                break
              default:
                if (random.chance(0.2)) {
                  yield* K.loseExecutor(mine, node.id)
                  claims = []
                  node = yield* K.executor(options)
                }
            }
          }
        })

        let watching = true
        let looks = 0
        const found: Array<string> = []
        const watch = Effect.gen(function* () {
          while (watching) {
            found.push(...(yield* broken(owner)))
            looks++
          }
        })
        yield* Effect.all(
          [
            watch,
            Effect.forEach([1, 2, 3, 4, 5], (at) => worker(seed + at), {
              concurrency: "unbounded"
            }).pipe(Effect.ensuring(Effect.sync(() => void (watching = false))))
          ],
          { concurrency: 2 }
        )
        assert.deepStrictEqual(found, [], `TENURE_SEED=${seed}`)
        assert.isAbove(looks, 5)

        // Whatever is held is lost, and then everything runs to its end.
        const node = yield* K.executor(options)
        for (const { id } of yield* owner<{ id: string }>`
          SELECT id::text AS id FROM tenure.executor WHERE state = 'active' AND id <> ${node.id}::uuid`) {
          yield* K.loseExecutor(owner, id)
        }
        yield* owner`UPDATE tenure.session SET expires_at = tenure.clock()`
        yield* owner`UPDATE tenure.capacity_lease SET expires_at = tenure.clock()`
        yield* C.sweep(node)
        let session = yield* C.open(node, { queues: [queue], slots: 5 })
        for (let turn = 0; turn < 3000 && (yield* settled(owner)) < total; turn++) {
          yield* owner`UPDATE tenure.delayed SET due_at = tenure.clock()`
          yield* owner`SELECT promoted FROM tenure.promote(1000)`
          for (const item of yield* C.start(node, session, 5)) {
            yield* Store.complete(node.sql, session, item.id, item.executionSeq, null)
          }
          yield* K.settle(
            node,
            (yield* K.claim(node, 5, { suspects: 5 })).map(({ attempt, id }) => ({ id, attempt }))
          )
        }
        assert.strictEqual(yield* settled(owner), total, `TENURE_SEED=${seed}`)
        assert.deepStrictEqual(yield* broken(owner), [])
      }),
    120_000
  )
})
