/**
 * What must be true in every snapshot of the database, whatever runs. Each invariant is a query for
 * what breaks it; all of them run in one snapshot, because an item that moves would otherwise be seen
 * twice or not at all.
 *
 * `model.claim_log` holds each claim that was committed: it is written by the statement that claims.
 */
import { Effect } from "effect"
import type { SqlError } from "effect/sql/SqlError"
import type { Sql } from "../kernel/kernel.ts"

export interface Violation {
  readonly invariant: string
  readonly example: string
}

/** Each query answers one text for each thing that is wrong. */
const invariants: ReadonlyArray<readonly [name: string, query: string]> = [
  [
    "I7: an accepted item is in exactly one of ready, claimed, delayed, parked and done",
    `SELECT i.id || ' is in ' || coalesce(p.places, 'none') FROM tenure.item i
       LEFT JOIN (SELECT id, count(*) AS n, string_agg(place, '+') AS places FROM model.place GROUP BY id) p
         USING (id)
      WHERE p.n IS DISTINCT FROM 1`
  ],
  [
    "a place holds only accepted items",
    `SELECT p.id || ' in ' || p.place FROM model.place p LEFT JOIN tenure.item i USING (id) WHERE i.id IS NULL`
  ],
  [
    "I5: what is claimed was claimed by its owner with its attempt",
    `SELECT c.id || ' attempt ' || c.attempt FROM tenure.claimed c
       LEFT JOIN model.claim_log l ON (l.id, l.attempt, l.owner) = (c.id, c.attempt, c.owner) WHERE l.id IS NULL`
  ],
  [
    "I5: what waits has the attempt of its last claim",
    `SELECT w.id || ' attempt ' || w.attempt
       FROM (SELECT id, attempt FROM tenure.ready UNION ALL SELECT id, attempt FROM tenure.delayed
             UNION ALL SELECT id, attempt FROM tenure.parked) w
      WHERE w.attempt <> (SELECT coalesce(max(l.attempt), 0) FROM model.claim_log l WHERE l.id = w.id)`
  ],
  [
    "I5: an outcome belongs to the last claim of its item",
    `SELECT d.id || ' attempt ' || d.attempt FROM tenure.done d
       LEFT JOIN (SELECT id, max(attempt) AS attempt FROM model.claim_log GROUP BY id) l USING (id)
      WHERE d.attempt <> coalesce(l.attempt, 0)`
  ],
  [
    "I4: nothing is claimed by a tombstone",
    `SELECT c.id || ' by ' || c.owner || ', ' || coalesce(e.state, 'unknown') FROM tenure.claimed c
       LEFT JOIN tenure.executor e ON e.id = c.owner
      WHERE e.state IS NULL OR e.state NOT IN ('active', 'revoking')`
  ],
  [
    "who has claimed last is known only of those that may claim",
    `SELECT a.executor_id || ', ' || coalesce(e.state, 'unknown') FROM tenure.queue_activity a
       LEFT JOIN tenure.executor e ON e.id = a.executor_id
      WHERE e.state IS NULL OR e.state NOT IN ('active', 'revoking')`
  ],
  [
    "I10: no queue runs more than its limit",
    `SELECT q.name || ' runs ' || count(*) FROM tenure.claimed c JOIN tenure.queue q ON q.id = c.queue_id
      GROUP BY q.id HAVING count(*) > q.global_limit`
  ],
  [
    "I10: no key runs more than its limit",
    `SELECT q.name || ' runs ' || count(*) || ' of ' || c.key FROM tenure.claimed c
       JOIN tenure.queue q ON q.id = c.queue_id
      WHERE c.key IS NOT NULL GROUP BY q.id, c.key HAVING count(*) > q.per_key_limit`
  ],
  [
    "R1: no window that a rate looks back at holds more starts than the rate",
    `SELECT q.name || ' ' || r.key || ' started ' || sum(l.started) FROM tenure.rate_log r
       JOIN tenure.queue q ON q.id = r.queue_id
       CROSS JOIN LATERAL (
         SELECT CASE r.key WHEN '' THEN q.rate_limit ELSE q.key_rate_limit END AS rate,
                CASE r.key WHEN '' THEN q.rate_window ELSE q.key_rate_window END AS span) p
       JOIN tenure.rate_log l ON l.queue_id = r.queue_id AND l.key = r.key
        AND l.last_at <= r.last_at AND l.last_at > r.last_at - p.span
      GROUP BY q.name, r.key, r.first_at, p.rate HAVING sum(l.started) > p.rate`
  ],
  [
    "I9: nothing waits that has been lost too often",
    `SELECT w.id || ' losses ' || w.losses || ' stuck ' || w.stuck
       FROM (SELECT id, lane_id, losses, stuck FROM tenure.ready
             UNION ALL SELECT id, lane_id, losses, stuck FROM tenure.delayed) w
       JOIN tenure.lane l ON l.id = w.lane_id JOIN tenure.queue q ON q.id = l.queue_id
      WHERE CASE q.recovery_limit WHEN 'executions' THEN w.losses ELSE w.stuck END >= q.recovery_max`
  ],
  [
    "I9: an item is quarantined for its losses and for nothing else",
    `SELECT d.id || ' ' || d.reason || ' losses ' || d.losses FROM tenure.done d
       JOIN tenure.queue q ON q.id = d.queue_id
      WHERE d.reason = 'MAX_RECOVERY_ATTEMPTS_EXCEEDED' AND d.losses <> q.recovery_max
         OR d.reason = 'EXECUTION_RECOVERY_EXHAUSTED' AND d.losses < q.recovery_max`
  ],
  [
    "I9: an exhausted item is in quarantine, and no other",
    `SELECT coalesce(d.id, q.item_id)::text
       FROM (SELECT * FROM tenure.done
              WHERE reason IN ('MAX_RECOVERY_ATTEMPTS_EXCEEDED', 'EXECUTION_RECOVERY_EXHAUSTED')) d
       FULL JOIN tenure.quarantine q ON q.item_id = d.id AND q.reason = d.reason AND q.executions = d.losses
      WHERE d.id IS NULL OR q.item_id IS NULL`
  ],
  [
    "Q1: an item leaves the quarantine with the application's row, or by an operator's hand",
    `SELECT q.item_id || ' is ' || q.state || ' by ' || q.settled_by FROM tenure.quarantine q
       LEFT JOIN model.settlement s ON s.item = q.item_id AND s.quarantined_at = q.quarantined_at
      WHERE (s.item IS NOT NULL) <> (q.state = 'settled' AND q.settled_by <> 'tenure_test_api')`
  ],
  [
    "what waits with losses is in a lane of suspects, and nothing else is",
    `SELECT w.id || ' losses ' || w.losses
       FROM (SELECT id, lane_id, losses FROM tenure.ready
             UNION ALL SELECT id, lane_id, losses FROM tenure.delayed
             UNION ALL SELECT id, lane_id, 0 FROM tenure.parked) w
       JOIN tenure.lane l ON l.id = w.lane_id WHERE l.suspect <> (w.losses > 0)`
  ],
  [
    "a live item with a deadline is watched for it",
    `SELECT p.id::text FROM model.place p JOIN tenure.item i USING (id) LEFT JOIN tenure.deadline d USING (id)
      WHERE p.place <> 'done' AND i.deadline_at IS NOT NULL AND d.id IS NULL
        AND NOT EXISTS (SELECT FROM model.retried r WHERE r.id = p.id)`
  ],
  [
    "an idempotency key names the one item that has it",
    `SELECT i.id || ' ' || i.idempotency_key FROM tenure.item i
       LEFT JOIN tenure.item_key k ON k.queue_id = i.queue_id AND k.key = i.idempotency_key
      WHERE i.idempotency_key IS NOT NULL AND k.item_id IS DISTINCT FROM i.id
      UNION ALL
     SELECT 'no item for ' || k.key FROM tenure.item_key k LEFT JOIN tenure.item i ON i.id = k.item_id
      WHERE i.id IS NULL`
  ],
  [
    "G2: an open group has counted each of its members once",
    `SELECT g.id || ' says ' || concat_ws(' ', g.members, g.completed, g.failed, g.cancelled)
            || ', its members ' || concat_ws(' ', m.members, m.completed, m.failed, m.cancelled)
       FROM tenure.item_group g
      CROSS JOIN LATERAL (
        SELECT count(i.id) AS members, count(*) FILTER (WHERE d.outcome = 'completed') AS completed,
               count(*) FILTER (WHERE d.outcome = 'failed') AS failed,
               count(*) FILTER (WHERE d.outcome = 'cancelled') AS cancelled
          FROM tenure.item i LEFT JOIN tenure.done d USING (id) WHERE i.group_id = g.id) m
      WHERE g.ended_at IS NULL
        AND (g.members, g.completed, g.failed, g.cancelled) <> (m.members, m.completed, m.failed, m.cancelled)`
  ],
  [
    "G1: a group has ended when it is sealed and all of its members have ended, and not before",
    `SELECT g.id::text FROM tenure.item_group g
      WHERE (g.ended_at IS NOT NULL)
            <> (g.sealed_at IS NOT NULL AND g.members = g.completed + g.failed + g.cancelled)`
  ],
  [
    "G1: a group that has ended has handed in its callback once, with its counts",
    `SELECT g.id || ' has ' || count(i.id) FROM tenure.item_group g
       LEFT JOIN (SELECT id, payload -> 'group' ->> 'id' AS group_id, payload -> 'group' AS counts
                    FROM tenure.item WHERE json_typeof(payload) = 'object') i ON i.group_id = g.id::text
      GROUP BY g.id
     HAVING count(i.id) <> (g.ended_at IS NOT NULL AND g.callback_queue_id IS NOT NULL)::int
         OR bool_or(i.counts::jsonb <> tenure.group_counts(g)::jsonb OR i.id <> g.callback_id)`
  ],
  [
    "G3: what a transaction has done to a group ends with it",
    `SELECT t.xid::text FROM tenure.group_tally t`
  ],
  [
    "a debounced item waits until its key ends, and no key is without an end",
    `SELECT p.key FROM tenure.pace_key p LEFT JOIN tenure.delayed d ON d.id = p.item_id
      WHERE p.ends_at = '-infinity' OR p.kind = 'debounce' AND d.attempt = 0 AND d.due_at <> p.ends_at`
  ],
  [
    "a user's fenced rows come in whole transactions",
    `SELECT transaction || ' has ' || count(*) FROM model.account GROUP BY transaction HAVING count(*) <> 2`
  ]
]

export const invariantNames: ReadonlyArray<string> = invariants.map(([name]) => name)

/** The tables that only the test has. Made by the owner before anybody else is there. */
export const prepare = (owner: Sql): Effect.Effect<void, SqlError> =>
  Effect.forEach(
    [
      `CREATE SCHEMA model`,
      `CREATE TABLE model.claim_log (id uuid, attempt int, owner uuid, PRIMARY KEY (id, attempt))`,
      `CREATE TABLE model.retried (id uuid PRIMARY KEY)`,
      `CREATE TABLE model.account (transaction uuid, entry int)`,
      `CREATE TABLE model.settlement (item uuid, quarantined_at timestamptz, PRIMARY KEY (item, quarantined_at))`,
      `SELECT tenure.fence_table('model.account'), tenure.fence_table('model.settlement')`,
      `CREATE VIEW model.place AS
         SELECT id, 'ready' AS place FROM tenure.ready UNION ALL SELECT id, 'claimed' FROM tenure.claimed
         UNION ALL SELECT id, 'delayed' FROM tenure.delayed UNION ALL SELECT id, 'parked' FROM tenure.parked
         UNION ALL SELECT id, 'done' FROM tenure.done`,
      `GRANT USAGE ON SCHEMA model TO tenure_worker, tenure_api`,
      `GRANT SELECT, INSERT ON ALL TABLES IN SCHEMA model TO tenure_worker, tenure_api`
    ],
    (statement) => owner.unsafe(statement).unprepared,
    { discard: true }
  )

/** What is wrong in one snapshot: at most three examples of each kind. */
export const check = Effect.fnUntraced(function* (
  owner: Sql
): Effect.fn.Return<ReadonlyArray<Violation>, SqlError> {
  yield* owner`BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY`
  const found = yield* violations(owner)
  yield* owner`COMMIT`
  return found
})

/** The same in the transaction that is open. */
export const violations = Effect.fnUntraced(function* (
  owner: Sql
): Effect.fn.Return<ReadonlyArray<Violation>, SqlError> {
  const found: Array<Violation> = []
  for (const [invariant, query] of invariants) {
    const rows = yield* owner.unsafe<{ example: string }>(
      `SELECT wrong.* FROM (${query}) wrong(example) LIMIT 3`
    )
    found.push(...rows.map(({ example }) => ({ invariant, example })))
  }
  return found
})
