/**
 * What really happened, written down by the database itself: each claim and each outcome leaves a row
 * that no later statement takes away, in the order of the commits' own statements.
 *
 * The checker then asks for the promises, whatever the faults were:
 *   - an attempt of an item was claimed once, and attempts increase by one
 *   - an item was settled at most once, and by the owner of its last attempt
 *   - no item is lost: it is settled, or in exactly one of ready, claimed, delayed and parked
 *   - nobody wrote to the fenced table for an attempt after a later one was claimed
 *   - the outside world refused no effect as older than one it had seen
 *   - a step has one checkpoint, and every later answer is that one
 *   - an item is in quarantine exactly when too many executors were lost with it
 */
import type { PgClient } from "@effect/sql-pg"
import { Effect } from "effect"
import type { SqlError } from "effect/sql/SqlError"
import type { Sink } from "./Sink.ts"

/** As a superuser: the workers have no right to any of it, so it needs no fence. */
export const statements: ReadonlyArray<string> = [
  "CREATE SCHEMA history",
  `CREATE TABLE history.claim (
     place bigint GENERATED ALWAYS AS IDENTITY, item uuid NOT NULL, attempt int NOT NULL,
     owner uuid NOT NULL, running bigint NOT NULL, at timestamptz NOT NULL)`,
  `CREATE TABLE history.outcome (
     place bigint GENERATED ALWAYS AS IDENTITY, item uuid NOT NULL, attempt int NOT NULL,
     owner uuid, outcome text NOT NULL, reason text, at timestamptz NOT NULL)`,
  // Without probes, which each worker sends itself.
  // A queue with a limit serves its claims one after the other, so this count is exact for it.
  `CREATE FUNCTION history.claimed() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
   BEGIN
     INSERT INTO history.claim (item, attempt, owner, running, at)
     SELECT n.id, n.attempt, n.owner, (SELECT count(*) FROM tenure.claimed WHERE queue_id > 0), clock_timestamp()
       FROM new_rows n WHERE n.queue_id > 0;
     RETURN NULL;
   END $$`,
  `CREATE TRIGGER history AFTER INSERT ON tenure.claimed REFERENCING NEW TABLE AS new_rows
     FOR EACH STATEMENT EXECUTE FUNCTION history.claimed()`,
  `CREATE FUNCTION history.settled() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
   BEGIN
     INSERT INTO history.outcome (item, attempt, owner, outcome, reason, at)
     VALUES (NEW.id, NEW.attempt, NEW.owner, NEW.outcome, NEW.reason, clock_timestamp());
     RETURN NULL;
   END $$`,
  `CREATE TRIGGER history AFTER INSERT ON tenure.done FOR EACH ROW WHEN (NEW.queue_id > 0)
     EXECUTE FUNCTION history.settled()`
]

export interface Finding {
  readonly promise: string
  readonly about: string
}

const questions: ReadonlyArray<readonly [promise: string, statement: string]> = [
  [
    "an attempt is claimed once",
    `SELECT item || ' attempt ' || attempt || ' claimed ' || count(*) FROM history.claim
      GROUP BY item, attempt HAVING count(*) > 1`
  ],
  [
    "attempts increase by one",
    `SELECT item || ' attempt ' || attempt || ' after ' || coalesce(before::text, 'none')
       FROM (SELECT *, lag(attempt) OVER (PARTITION BY item ORDER BY place) AS before FROM history.claim) c
      WHERE attempt <> coalesce(before, 0) + 1`
  ],
  [
    "an item is settled once",
    "SELECT item || ' settled ' || count(*) FROM history.outcome GROUP BY item HAVING count(*) > 1"
  ],
  [
    "an outcome is the last attempt's",
    `SELECT o.item || ' settled in attempt ' || o.attempt || ', attempt ' || c.attempt || ' was claimed'
       FROM history.outcome o JOIN history.claim c ON c.item = o.item AND c.attempt > o.attempt`
  ],
  [
    "an outcome is written by the owner of its attempt",
    `SELECT o.item || ' settled by ' || o.owner FROM history.outcome o
       JOIN history.claim c ON c.item = o.item AND c.attempt = o.attempt
      WHERE o.owner IS NOT NULL AND o.owner <> c.owner`
  ],
  [
    "an item is in exactly one place",
    `SELECT i.id || ' is in ' || count(p.id) || ' places' FROM tenure.item i
       LEFT JOIN (SELECT id FROM tenure.ready UNION ALL SELECT id FROM tenure.claimed
                  UNION ALL SELECT id FROM tenure.delayed UNION ALL SELECT id FROM tenure.parked
                  UNION ALL SELECT id FROM tenure.done) p ON p.id = i.id
      GROUP BY i.id HAVING count(p.id) <> 1`
  ],
  [
    "an exhausted item is in quarantine, and no other",
    `SELECT coalesce(d.id, q.item_id) || ' ended by ' || coalesce(d.reason, 'nothing')
       FROM (SELECT * FROM tenure.done
              WHERE reason IN ('MAX_RECOVERY_ATTEMPTS_EXCEEDED', 'EXECUTION_RECOVERY_EXHAUSTED')) d
       FULL JOIN tenure.quarantine q ON q.item_id = d.id AND q.reason = d.reason AND q.executions = d.losses
      WHERE d.id IS NULL OR q.item_id IS NULL`
  ],
  [
    "no write of an attempt follows the claim of a later one",
    `SELECT DISTINCT w.item || ' attempt ' || w.attempt || ' wrote after attempt ' || c.attempt || ' was claimed'
       FROM app.written w JOIN history.claim c ON c.item = w.item AND c.attempt > w.attempt AND c.at < w.at`
  ]
]

/** Everything that broke a promise; empty is right. */
export const check = Effect.fnUntraced(function* (
  sql: PgClient.PgClient,
  sink: Sink
): Effect.fn.Return<ReadonlyArray<Finding>, SqlError> {
  const findings: Array<Finding> = []
  for (const [promise, statement] of questions) {
    const rows = yield* sql.unsafe<Record<string, string>>(statement)
    for (const row of rows) findings.push({ promise, about: Object.values(row).join(" ") })
  }
  for (const one of sink.arrivals().filter((arrival) => !arrival.accepted)) {
    findings.push({
      promise: "no effect of an older attempt follows one of a newer",
      about: `${one.name} of ${one.item} attempt ${one.attempt} by ${one.executor}`
    })
  }
  const stored = yield* sql<{
    readonly item: string
    readonly name: string
    readonly value: string
  }>`
    SELECT s.item_id AS item, s.name, s.value #>> '{}' AS value FROM tenure.step s`
  const results = yield* sql<{
    readonly item: string
    readonly name: string
    readonly value: string
  }>`
    SELECT d.id AS item, e.key AS name, e.value FROM tenure.done d
     CROSS JOIN LATERAL json_each_text(d.result -> 'steps') e WHERE d.outcome = 'completed'`
  for (const result of results) {
    const checkpoint = stored.find((one) => one.item === result.item && one.name === result.name)
    if (checkpoint?.value === result.value) continue
    findings.push({
      promise: "a step's answer is its checkpoint",
      about: `${result.item} ${result.name}: ${result.value}, stored ${checkpoint?.value ?? "nothing"}`
    })
  }
  return findings
})
