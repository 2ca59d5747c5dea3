/**
 * Goal: the checker of the stress bites. Method: a healthy database in which nothing is found, and for
 * each invariant the smallest damage that breaks it, done by the owner behind the functions' back.
 */
import { assert, layer } from "@effect/vitest"
import { Context, Effect, Layer } from "effect"
import * as K from "../kernel/kernel.ts"
import { freshDatabase } from "../support/Postgres.ts"
import { check, invariantNames, prepare, violations } from "./invariants.ts"

/** Two items in each place, all logged, with keys, deadlines and a user's rows. */
const healthy = Effect.gen(function* () {
  const database = yield* freshDatabase
  const owner = yield* K.sessionOf(database, "owner")
  const api = yield* K.sessionOf(database, "api")
  const runner = yield* K.executorOf(database, { queue: "q" })
  yield* prepare(owner)
  yield* K.enqueueMany(api, "q", 6, {
    idempotencyKeys: ["a", "b", "c", "d", "e", "f"],
    deadlinesMs: Array.from({ length: 6 }, () => 600_000),
    keys: Array.from({ length: 6 }, () => "k")
  })
  const { group } = K.first(
    yield* api<{ group: string }>`SELECT tenure.make_group('q')::text AS group`
  )
  const empty = K.first(yield* api<{ group: string }>`SELECT tenure.make_group('q')::text AS group`)
  yield* api`SELECT tenure.seal_group(${empty.group}::uuid)`
  yield* K.enqueueMany(api, "q", 2, { delaysMs: [600_000, 600_000], groups: [group, null] })
  yield* K.enqueueMany(api, "q", 1, {
    paceKinds: ["debounce"],
    paceKeys: ["k"],
    paceMs: [600_000]
  })
  const claimed = yield* K.claim(runner, 4)
  for (const { attempt, id } of claimed) {
    yield* owner`INSERT INTO model.claim_log VALUES (${id}::uuid, ${attempt}::int, ${runner.id}::uuid)`
  }
  yield* K.settle(
    runner,
    claimed.slice(0, 2).map(({ id, attempt }) => ({ id, attempt, outcome: "failed" }))
  )
  const transaction = "00000000-0000-0000-0000-000000000001"
  yield* owner`INSERT INTO model.account VALUES (${transaction}::uuid, 1), (${transaction}::uuid, 2)`
  return owner
})

const anId = "'01900000-0000-7000-8000-000000000000'"

const damages: ReadonlyArray<readonly [invariant: string, damage: string]> = [
  [
    "I7: an accepted item is in",
    `DELETE FROM tenure.ready WHERE ctid = (SELECT ctid FROM tenure.ready LIMIT 1)`
  ],
  [
    "I7: an accepted item is in",
    `INSERT INTO tenure.delayed SELECT id, now(), lane_id, rank, seq, attempt, failures, losses, stuck, key
       FROM tenure.ready LIMIT 1`
  ],
  [
    "a place holds only accepted items",
    `INSERT INTO tenure.ready SELECT lane_id, rank, -1, ${anId}::uuid, 0, 0, 0, 0 FROM tenure.ready LIMIT 1`
  ],
  ["I5: what is claimed", `UPDATE tenure.claimed SET attempt = 2`],
  ["I5: what is claimed", `UPDATE tenure.claimed SET owner = ${anId}::uuid`],
  ["I5: what waits", `UPDATE tenure.ready SET attempt = 1`],
  ["I5: what waits", `UPDATE tenure.delayed SET attempt = 1`],
  ["I5: an outcome belongs", `UPDATE tenure.done SET attempt = 2`],
  [
    "I4: nothing is claimed by a tombstone",
    `UPDATE tenure.executor SET state = 'revoked', revoked_at = now()`
  ],
  ["I4: nothing is claimed by a tombstone", `DELETE FROM tenure.executor`],
  [
    "who has claimed last",
    `INSERT INTO tenure.queue_activity VALUES (1, ${anId}::uuid, tenure.clock())`
  ],
  ["I10: no queue runs", `UPDATE tenure.queue SET global_limit = 1`],
  ["I10: no key runs", `UPDATE tenure.queue SET per_key_limit = 1`],
  [
    "R1: no window",
    `WITH started AS (INSERT INTO tenure.rate_log SELECT id, '', now(), now(), 2 FROM tenure.queue)
     UPDATE tenure.queue SET rate_limit = 1, rate_window = '1 h'`
  ],
  ["I9: nothing waits", `UPDATE tenure.ready SET losses = 4`],
  ["I9: nothing waits", `UPDATE tenure.delayed SET losses = 4`],
  [
    "I9: an item is quarantined",
    `UPDATE tenure.done SET reason = 'MAX_RECOVERY_ATTEMPTS_EXCEEDED', losses = 3`
  ],
  [
    "I9: an exhausted item",
    `INSERT INTO tenure.quarantine SELECT id, 1, now(), 4, 'MAX_RECOVERY_ATTEMPTS_EXCEEDED', 'open', NULL, NULL, 0, now()
       FROM tenure.done LIMIT 1`
  ],
  [
    "I9: an exhausted item",
    `UPDATE tenure.done SET reason = 'EXECUTION_RECOVERY_EXHAUSTED', losses = 4`
  ],
  [
    "Q1: an item leaves",
    `INSERT INTO tenure.quarantine SELECT id, 1, now(), 4, 'MAX_RECOVERY_ATTEMPTS_EXCEEDED', 'settled', now(), 'x', 0, now()
       FROM tenure.done LIMIT 1`
  ],
  ["what waits with losses", `UPDATE tenure.ready SET losses = 1`],
  ["a live item with a deadline", `DELETE FROM tenure.deadline`],
  ["an idempotency key names", `DELETE FROM tenure.item_key WHERE key = 'a'`],
  [
    "an idempotency key names",
    `INSERT INTO tenure.item_key SELECT queue_id, 'z', ${anId}::uuid FROM tenure.item LIMIT 1`
  ],
  ["G2: an open group", `UPDATE tenure.item_group SET completed = 1 WHERE ended_at IS NULL`],
  ["G2: an open group", `DELETE FROM tenure.item WHERE group_id IS NOT NULL`],
  [
    "G1: a group has ended when",
    `UPDATE tenure.item_group SET members = 1 WHERE ended_at IS NOT NULL`
  ],
  ["G1: a group that has ended", `DELETE FROM tenure.item WHERE json_typeof(payload) = 'object'`],
  [
    "G1: a group that has ended",
    `UPDATE tenure.item_group SET callback_id = ${anId} WHERE ended_at IS NOT NULL`
  ],
  [
    "G3: what a transaction",
    `INSERT INTO tenure.group_tally (xid, group_id) VALUES (pg_current_xact_id(), ${anId})`
  ],
  ["a debounced item waits", `UPDATE tenure.pace_key SET ends_at = ends_at + interval '1 second'`],
  ["a debounced item waits", `UPDATE tenure.pace_key SET ends_at = '-infinity'`],
  ["a user's fenced rows", `DELETE FROM model.account WHERE entry = 1`]
]

class Healthy extends Context.Service<Healthy, K.Sql>()("tenure/test/Healthy") {
  static readonly layer = Layer.effect(Healthy, healthy)
}

layer(Healthy.layer, { excludeTestServices: true })("the checker", (it) => {
  it.effect("finds nothing in a database that is well", () =>
    Effect.gen(function* () {
      assert.deepStrictEqual(yield* check(yield* Healthy), [])
    })
  )

  for (const [invariant, damage] of damages) {
    it.effect(`finds it: ${damage.split("\n")[0]}`, () =>
      Effect.gen(function* () {
        const owner = yield* Healthy
        yield* owner`BEGIN`
        yield* owner.unsafe(damage)
        const found = (yield* violations(owner)).map((violation) => violation.invariant)
        yield* owner`ROLLBACK`
        assert.isTrue(
          found.some((name) => name.startsWith(invariant)),
          found.join("; ")
        )
      })
    )
  }

  it("has every invariant broken by some damage", () => {
    assert.deepStrictEqual(
      invariantNames.filter((name) => !damages.some(([invariant]) => name.startsWith(invariant))),
      []
    )
  })
})
