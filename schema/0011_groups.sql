-- Items that depend on other items: groups, whose callback is handed in when the last member has ended,
-- and pace keys, under which items are postponed and replaced (debounce) or not taken again (throttle).
--
--   open --seal--> sealed --its last member has ended--> ended, callback handed in
--    |                                                      |
--    +-- never sealed, nothing of it alive --> retention <--+
--
-- G1. A group ends once, in the transaction in which its last member ends, or which seals it after that;
--     the same transaction hands in the callback, with the counts.
-- G2. A member counts once, by its outcome at the end of the group. One that is brought back before that is
--     waited for again; one that is brought back later changes nothing.
-- G3. Nobody waits for a group's row but transactions that are committing: a client that has cancelled a
--     member and does not commit holds up no other member's end.
--
-- For G3 a transaction notes what it has done to a group in a row of its own, `group_tally`, and a trigger
-- that is deferred to the commit adds it to the group's row, locked first. Two transactions that end the
-- last two members meet at that lock, and the second sees what the first has committed: none waits before
-- its own work is done, and neither can miss the other. A counter that each end updated at once would be
-- held for as long as the slowest of these transactions, and with it every batch of outcomes.
--
-- Locks: none that another session can wait for.
-- Overlap: older code runs on; what it settles is counted here, in the database.

CREATE TABLE tenure.item_group (
  id                uuid        NOT NULL PRIMARY KEY,
  created_at        timestamptz NOT NULL,
  members           int         NOT NULL DEFAULT 0,
  completed         int         NOT NULL DEFAULT 0,
  failed            int         NOT NULL DEFAULT 0,
  cancelled         int         NOT NULL DEFAULT 0,
  sealed_at         timestamptz,
  ended_at          timestamptz,
  -- The lane is made with the group: at a commit we may wait for nobody who makes one.
  callback_queue_id int,
  callback_lane_id  int,
  callback_priority int,
  callback_key      text,
  -- An object without its field `group`, which the end adds.
  callback_payload  json,
  callback_trace    text,
  callback_id       uuid,
  -- That members count once is proved by tests and stands in no constraint: an outcome must not be refused
  -- because a counter is wrong.
  CONSTRAINT ended_groups_are_sealed CHECK (ended_at IS NULL OR sealed_at IS NOT NULL),
  CONSTRAINT callback_only_of_ended CHECK (callback_id IS NULL OR ended_at IS NOT NULL)
) WITH (
  -- One update for each batch of outcomes, which must stay HOT.
  fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500
);
-- Most databases have no open group most of the time: what asks first reads one page of this.
CREATE INDEX item_group_for_ends ON tenure.item_group (id) WHERE ended_at IS NULL;
CREATE INDEX item_group_for_retention ON tenure.item_group (ended_at) WHERE ended_at IS NOT NULL;

-- Inserted and deleted by one transaction: nobody else ever sees a row.
CREATE TABLE tenure.group_tally (
  xid       xid8    NOT NULL,
  group_id  uuid    NOT NULL,
  members   int     NOT NULL DEFAULT 0,
  completed int     NOT NULL DEFAULT 0,
  failed    int     NOT NULL DEFAULT 0,
  cancelled int     NOT NULL DEFAULT 0,
  seals     boolean NOT NULL DEFAULT false,
  PRIMARY KEY (xid, group_id)
) WITH (
  vacuum_truncate = off, autovacuum_vacuum_scale_factor = 0,
  autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0
);

-- A key that holds until `ends_at`: a debounced item is due then, a throttled one excludes others until then.
CREATE TABLE tenure.pace_key (
  queue_id int         NOT NULL,
  kind     text        NOT NULL CONSTRAINT pace_kind CHECK (kind IN ('debounce', 'throttle')),
  key      text        NOT NULL CONSTRAINT pace_key_not_empty CHECK (key <> ''),
  item_id  uuid        NOT NULL,
  began_at timestamptz NOT NULL,
  ends_at  timestamptz NOT NULL,
  PRIMARY KEY (queue_id, kind, key)
) WITH (
  vacuum_truncate = off, autovacuum_vacuum_scale_factor = 0,
  autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0
);
CREATE INDEX pace_key_for_retention ON tenure.pace_key (ends_at);

SELECT tenure.fence_table('tenure.item_group');
SELECT tenure.fence_table('tenure.group_tally');
SELECT tenure.fence_table('tenure.pace_key');

-- A new group, open. With a callback: an item of `callback_queue` that is handed in at the group's end,
-- whose payload gets the field "group": {"id", "completed", "failed", "cancelled"}.
CREATE FUNCTION tenure.make_group(
  callback_queue text DEFAULT NULL, callback_payload json DEFAULT '{}', callback_priority int DEFAULT 0,
  callback_key text DEFAULT NULL, trace_context text DEFAULT NULL
) RETURNS uuid
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  made  uuid := tenure.new_id();
  queue int;
BEGIN
  IF callback_queue IS NULL THEN
    INSERT INTO tenure.item_group (id, created_at) VALUES (made, tenure.clock());
    RETURN made;
  END IF;
  IF json_typeof(callback_payload) <> 'object' THEN
    RAISE EXCEPTION 'the payload of a group''s callback is an object' USING ERRCODE = 'TN021',
      HINT = 'It gets a field "group" at the end.';
  END IF;
  queue := tenure.queue_id(callback_queue);
  INSERT INTO tenure.item_group (id, created_at, callback_queue_id, callback_lane_id, callback_priority,
                                 callback_key, callback_payload, callback_trace)
  VALUES (made, tenure.clock(), queue, tenure.lane_id(queue, NULL, false), callback_priority,
          callback_key, make_group.callback_payload, trace_context);
  RETURN made;
END $$;

-- No more members: from now on the group ends with the last of those it has, at once if it has none.
-- Answers 'sealed', also when it was before, or 'unknown'.
CREATE FUNCTION tenure.seal_group(sealed uuid) RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  sealed_before boolean;
BEGIN
  SELECT g.sealed_at IS NOT NULL INTO sealed_before FROM tenure.item_group g WHERE g.id = sealed;
  IF NOT FOUND THEN RETURN 'unknown'; END IF;
  IF NOT sealed_before THEN
    INSERT INTO tenure.group_tally AS t (xid, group_id, seals) VALUES (pg_current_xact_id(), sealed, true)
    ON CONFLICT ON CONSTRAINT group_tally_pkey DO UPDATE SET seals = true;
  END IF;
  RETURN 'sealed';
END $$;

-- One of these groups that takes no more members, or is unknown.
CREATE FUNCTION tenure.closed_group(groups uuid[]) RETURNS uuid
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
  SELECT u.id FROM (SELECT DISTINCT x.id FROM unnest(groups) x(id) WHERE x.id IS NOT NULL) u
   WHERE (SELECT g.sealed_at IS NULL FROM tenure.item_group g WHERE g.id = u.id) IS NOT TRUE
      OR (SELECT t.seals FROM tenure.group_tally t
           WHERE t.xid = pg_current_xact_id_if_assigned() AND t.group_id = u.id) IS TRUE
   LIMIT 1
$$;

-- `groups`: one entry for each new member.
CREATE FUNCTION tenure.members_added(groups uuid[]) RETURNS void
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
  INSERT INTO tenure.group_tally AS t (xid, group_id, members)
  SELECT pg_current_xact_id(), u.id, count(*) FROM unnest(groups) u(id) GROUP BY u.id
  ON CONFLICT ON CONSTRAINT group_tally_pkey DO UPDATE SET members = t.members + excluded.members
$$;

-- Whatever ends items calls this after it has written their outcomes; those that have none are passed
-- over. `at_once` for a caller whose exemption from the fence does not last until the commit.
--
-- One index scan for all ids, where a look for each goes through the partitions each time (10 us instead
-- of 1), and so a hash join of what is found: the callers have switched that off for their own statements.
-- The bounds let the scan pass over the partitions in which none of them is; the ids alone do not.
CREATE FUNCTION tenure.items_ended(items uuid[], at_once boolean DEFAULT false) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = on SET enable_nestloop = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
  low     uuid;
  high    uuid;
  members uuid[];
BEGIN
  -- Of 0012: who has invoked one of them.
  IF EXISTS (SELECT FROM tenure.invocation) THEN PERFORM tenure.end_invocations(items); END IF;
  IF NOT EXISTS (SELECT FROM tenure.item_group g WHERE g.ended_at IS NULL) THEN RETURN; END IF;
  low := (SELECT u.id FROM unnest(items) u(id) ORDER BY u.id LIMIT 1);
  high := (SELECT u.id FROM unnest(items) u(id) ORDER BY u.id DESC LIMIT 1);
  members := ARRAY(
    SELECT i.id FROM tenure.item i
     WHERE i.id = ANY(items) AND i.id BETWEEN low AND high AND i.group_id IS NOT NULL);
  IF members = '{}' THEN RETURN; END IF;
  WITH member AS MATERIALIZED (
    SELECT i.id, i.group_id FROM tenure.item i WHERE i.id = ANY(members) AND i.id BETWEEN low AND high
  ), ended AS MATERIALIZED (
    SELECT d.id, d.outcome FROM tenure.done d WHERE d.id = ANY(members) AND d.id BETWEEN low AND high
  )
  INSERT INTO tenure.group_tally AS t (xid, group_id, completed, failed, cancelled)
  SELECT pg_current_xact_id(), m.group_id, count(*) FILTER (WHERE e.outcome = 'completed'),
         count(*) FILTER (WHERE e.outcome = 'failed'), count(*) FILTER (WHERE e.outcome = 'cancelled')
    FROM member m JOIN ended e ON e.id = m.id
   GROUP BY m.group_id
  ON CONFLICT ON CONSTRAINT group_tally_pkey DO UPDATE
     SET completed = t.completed + excluded.completed, failed = t.failed + excluded.failed,
         cancelled = t.cancelled + excluded.cancelled;
  IF at_once AND FOUND THEN
    SET CONSTRAINTS tenure.group_tally_added IMMEDIATE;
  END IF;
END $$;

-- Whatever brings items back that have ended calls this, with the outcome that they had.
CREATE FUNCTION tenure.items_returned(items uuid[], ended_as text) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
  IF NOT EXISTS (SELECT FROM tenure.item_group g WHERE g.ended_at IS NULL) THEN RETURN; END IF;
  INSERT INTO tenure.group_tally AS t (xid, group_id, completed, failed, cancelled)
  SELECT pg_current_xact_id(), i.group_id, -(count(*) FILTER (WHERE ended_as = 'completed')),
         -(count(*) FILTER (WHERE ended_as = 'failed')), -(count(*) FILTER (WHERE ended_as = 'cancelled'))
    FROM unnest(items) u(id)
   CROSS JOIN LATERAL (
     SELECT x.group_id FROM tenure.item x WHERE x.id = u.id AND x.group_id IS NOT NULL OFFSET 0) i
   GROUP BY i.group_id
  ON CONFLICT ON CONSTRAINT group_tally_pkey DO UPDATE
     SET completed = t.completed + excluded.completed, failed = t.failed + excluded.failed,
         cancelled = t.cancelled + excluded.cancelled;
END $$;

CREATE FUNCTION tenure.group_counts(counted tenure.item_group) RETURNS json
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp
AS $$
  SELECT json_build_object('id', counted.id, 'completed', counted.completed, 'failed', counted.failed,
                           'cancelled', counted.cancelled)
$$;

-- At the commit: adds what this transaction has noted to its groups, and ends those that are complete.
-- The first of its rows does it for all of them, in the order of the groups' ids.
CREATE FUNCTION tenure.add_tallies() RETURNS trigger
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
  mine     xid8 := pg_current_xact_id();
  groups   uuid[];
  now      timestamptz;
  late     uuid;
  ended    uuid[];
  callback record;
BEGIN
  groups := ARRAY(SELECT t.group_id FROM tenure.group_tally t WHERE t.xid = mine);
  IF groups = '{}' THEN RETURN NULL; END IF;
  PERFORM FROM tenure.item_group g WHERE g.id = ANY(groups) ORDER BY g.id FOR UPDATE;
  now := tenure.clock();
  -- Sealed, or dropped by retention, since the members were handed in: they were never committed.
  SELECT t.group_id INTO late FROM tenure.group_tally t
   WHERE t.xid = mine AND t.members > 0
     AND (SELECT g.sealed_at IS NULL FROM tenure.item_group g WHERE g.id = t.group_id) IS NOT TRUE LIMIT 1;
  IF FOUND THEN
    RAISE EXCEPTION 'group % was sealed meanwhile', late USING ERRCODE = 'TN030',
      HINT = 'Hand in all members before the group is sealed.';
  END IF;
  -- What members do after the group's end is none of its business.
  WITH added AS MATERIALIZED (
    SELECT g.id, g.members + t.members AS members, g.completed + t.completed AS completed,
           g.failed + t.failed AS failed, g.cancelled + t.cancelled AS cancelled,
           coalesce(g.sealed_at, CASE WHEN t.seals THEN now END) AS sealed_at
      FROM tenure.group_tally t
     CROSS JOIN LATERAL (
       SELECT x.* FROM tenure.item_group x WHERE x.id = t.group_id AND x.ended_at IS NULL OFFSET 0) g
     WHERE t.xid = mine
  ), counted AS (
    UPDATE tenure.item_group g
       SET members = a.members, completed = a.completed, failed = a.failed, cancelled = a.cancelled,
           sealed_at = a.sealed_at,
           ended_at = CASE WHEN a.sealed_at IS NOT NULL AND a.members <= a.completed + a.failed + a.cancelled
                           THEN now END
      FROM added a WHERE g.id = a.id
    RETURNING g.id, g.ended_at
  )
  SELECT coalesce(array_agg(c.id), '{}') INTO ended FROM counted c WHERE c.ended_at IS NOT NULL;
  DELETE FROM tenure.group_tally t WHERE t.xid = mine;
  IF ended = '{}' THEN RETURN NULL; END IF;
  FOR callback IN
    SELECT g.id, g.callback_queue_id AS queue, g.callback_lane_id AS lane, g.callback_priority AS priority,
           g.callback_key AS key, g.callback_trace AS trace, tenure.new_id() AS item,
           left(rtrim(g.callback_payload::text, E' \t\r\n'), -1) AS opened, tenure.group_counts(g)::text AS counts
      FROM tenure.item_group g WHERE g.id = ANY(ended) AND g.callback_queue_id IS NOT NULL ORDER BY g.id
  LOOP
    IF coalesce((SELECT max(b.upper_at) FROM tenure.bucket b), '-infinity') < now + interval '24 hours' THEN
      PERFORM tenure.create_buckets(interval '1344 hours');
    END IF;
    PERFORM tenure.insert_items(callback.queue, callback.lane, now, ARRAY[callback.item], ARRAY[callback.item],
      ARRAY[callback.opened
        || CASE WHEN ltrim(callback.opened, E' \t\r\n{') = '' THEN '' ELSE ',' END
        || '"group":' || callback.counts || '}'],
      ARRAY[callback.priority], ARRAY[callback.key], NULL, NULL, NULL, NULL, NULL, ARRAY[callback.trace], NULL,
      (SELECT tenure.aged_at(now, q.aging, q.aging_since, q.aging_steps) FROM tenure.queue q
        WHERE q.id = callback.queue));
    UPDATE tenure.item_group g SET callback_id = callback.item WHERE g.id = callback.id;
    -- Here, because nobody else knows of it: once for a group.
    PERFORM tenure.tell('tenure_work', callback.queue::text);
  END LOOP;
  PERFORM tenure.notify_settled(ended);
  RETURN NULL;
END $$;

CREATE CONSTRAINT TRIGGER group_tally_added AFTER INSERT ON tenure.group_tally
  DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION tenure.add_tallies();
-- No session leaves it behind, as with the fence.
ALTER TABLE tenure.group_tally ENABLE ALWAYS TRIGGER group_tally_added;

-- Decides for the items of an enqueue that have a pace key, and locks the keys in order until the
-- transaction ends: callers with the same key take turns. `winners`: for each item its own id, or that
-- of the item it became. `due_at`: `not_before` with the debounced ones in it.
--
--   throttle  the first one is taken, and for `pace_ms` its id is the answer to all others
--   debounce  the first one waits for `pace_ms`. One that comes while it waits replaces it, payload and
--             options, under the same id, and puts it off, though never for longer than `pace_max_ms` after
--             the first; one that comes later waits anew.
--
-- A debounced item that somebody else holds at this moment has waited: it is being promoted, ended or
-- cancelled. Should that be rolled back, it runs as it was, before the new one.
CREATE FUNCTION tenure.pace_items(
  item_queue int, lane int, fresh uuid[], pace_kinds text[], pace_keys text[], pace_ms float8[],
  pace_max_ms float8[], payloads text[], priorities int[], keys text[], idempotency_keys text[],
  delays_ms float8[], not_before timestamptz[], deadlines_ms float8[], not_after timestamptz[],
  traces text[], group_ids uuid[],
  OUT winners uuid[], OUT due_at timestamptz[], OUT paced_at timestamptz
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
  wanted   int;
  locked   int;
  attempts int := 0;
  given    record;
  held     tenure.pace_key;
  waiting  tenure.delayed;
  winner   uuid;
  at       int;
  place    int;
  due      timestamptz;
  deadline timestamptz;
  placed   int;
  taken    int := 0;
BEGIN
  IF EXISTS (SELECT FROM unnest(pace_kinds, pace_keys, pace_ms, idempotency_keys, group_ids, delays_ms, not_before)
                    u(kind, key, ms, idempotency_key, group_id, delay_ms, begin_at)
              WHERE u.kind IS NOT NULL
                AND (u.key IS NULL OR u.ms IS NULL OR u.kind NOT IN ('debounce', 'throttle')
                     OR u.idempotency_key IS NOT NULL OR u.group_id IS NOT NULL
                     OR u.kind = 'debounce' AND (u.delay_ms IS NOT NULL OR u.begin_at IS NOT NULL))) THEN
    RAISE EXCEPTION 'a debounced or throttled item has a key and a time, and neither an idempotency key nor a group'
      USING ERRCODE = 'TN021', HINT = 'Nor has a debounced one another delay.';
  END IF;
  winners := fresh;
  due_at := not_before;
  SELECT count(*) INTO wanted FROM (
    SELECT DISTINCT u.kind, u.key FROM unnest(pace_kinds, pace_keys) u(kind, key) WHERE u.key IS NOT NULL) u;
  LOOP
    -- Two statements: a combined one misses the row it has just waited for.
    INSERT INTO tenure.pace_key (queue_id, kind, key, item_id, began_at, ends_at)
    SELECT item_queue, u.kind, u.key, fresh[1], '-infinity', '-infinity'
      FROM (SELECT DISTINCT x.kind, x.key FROM unnest(pace_kinds, pace_keys) x(kind, key) WHERE x.key IS NOT NULL) u
     ORDER BY u.kind, u.key
    ON CONFLICT DO NOTHING;
    SELECT count(*) INTO locked FROM (
      SELECT FROM (SELECT DISTINCT x.kind, x.key FROM unnest(pace_kinds, pace_keys) x(kind, key)) u
        JOIN tenure.pace_key p ON p.queue_id = item_queue AND p.kind = u.kind AND p.key = u.key
       ORDER BY p.kind, p.key FOR UPDATE OF p) u;
    EXIT WHEN locked >= wanted;
    attempts := attempts + 1;
    IF attempts = 5 THEN
      RAISE EXCEPTION 'pace keys of queue % keep changing', item_queue USING ERRCODE = '40001';
    END IF;
  END LOOP;
  paced_at := tenure.clock();
  FOR given IN
    SELECT u.kind, u.key, array_agg(u.place::int ORDER BY u.place) AS places
      FROM unnest(pace_kinds, pace_keys) WITH ORDINALITY u(kind, key, place)
     WHERE u.key IS NOT NULL GROUP BY u.kind, u.key ORDER BY u.kind, u.key
  LOOP
    SELECT p.* INTO held FROM tenure.pace_key p
     WHERE p.queue_id = item_queue AND p.kind = given.kind AND p.key = given.key;
    winner := NULL;
    IF given.kind = 'throttle' THEN
      at := given.places[1];
      IF held.ends_at > paced_at THEN
        winner := held.item_id;
      ELSE
        winner := fresh[at];
        due := paced_at + make_interval(secs => pace_ms[at] / 1000);
        held.began_at := paced_at;
      END IF;
    ELSE
      at := given.places[cardinality(given.places)];
      IF held.ends_at > paced_at THEN
        SELECT d.* INTO waiting FROM tenure.delayed d
         WHERE d.id = held.item_id AND d.attempt = 0 AND d.due_at > paced_at FOR UPDATE SKIP LOCKED;
        IF FOUND THEN winner := held.item_id; END IF;
      END IF;
      IF winner IS NULL THEN held.began_at := paced_at; END IF;
      due := least(paced_at + make_interval(secs => pace_ms[at] / 1000),
                   held.began_at + make_interval(secs => pace_max_ms[at] / 1000));
      deadline := coalesce(not_after[at], paced_at + make_interval(secs => deadlines_ms[at] / 1000));
      IF winner IS NULL THEN
        winner := fresh[at];
        due_at := coalesce(due_at, array_fill(NULL::timestamptz, ARRAY[cardinality(fresh)]));
        due_at[at] := due;
      ELSE
        -- It keeps its age.
        placed := coalesce((SELECT i.aged FROM tenure.item i WHERE i.id = winner), 0) - coalesce(priorities[at], 0);
        DELETE FROM tenure.delayed d WHERE d.id = winner;
        INSERT INTO tenure.delayed (id, due_at, lane_id, rank, seq, attempt, failures, losses, stuck, key)
        VALUES (winner, due, waiting.lane_id, placed, waiting.seq, waiting.attempt,
                waiting.failures, waiting.losses, waiting.stuck, keys[at]);
        UPDATE tenure.item i
           SET payload = payloads[at]::json, priority = -placed, key = keys[at],
               trace = traces[at], deadline_at = deadline
         WHERE i.id = winner;
        DELETE FROM tenure.deadline d WHERE d.id = winner;
        INSERT INTO tenure.deadline (id, due_at) SELECT winner, deadline WHERE deadline IS NOT NULL;
      END IF;
    END IF;
    FOREACH place IN ARRAY given.places LOOP winners[place] := winner; END LOOP;
    IF given.kind = 'debounce' OR winner = fresh[at] THEN
      UPDATE tenure.pace_key p SET item_id = winner, began_at = held.began_at, ends_at = due
       WHERE p.queue_id = item_queue AND p.kind = given.kind AND p.key = given.key;
    END IF;
    IF winner = fresh[at] THEN taken := taken + 1; END IF;
  END LOOP;
  -- Whoever makes keys clears away as many that have passed, so that there are never many more than those
  -- that hold. Not every time, because each look begins behind what earlier ones have deleted.
  IF random() < taken / 50.0 AND current_setting('transaction_isolation') = 'read committed' THEN
    DELETE FROM tenure.pace_key p WHERE p.ctid = ANY(ARRAY(
      SELECT x.ctid FROM tenure.pace_key x WHERE x.ends_at < paced_at
       ORDER BY x.ends_at LIMIT greatest(100, 2 * taken) FOR UPDATE SKIP LOCKED));
  END IF;
END $$;

-- Of retention: keys that hold nothing any more, groups that have ended before an instant, and those
-- that were made before it, never sealed, and have nothing alive.
CREATE FUNCTION tenure.forget_expired(before timestamptz) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
  now timestamptz := tenure.clock();
BEGIN
  DELETE FROM tenure.pace_key p WHERE p.ctid = ANY(ARRAY(
    SELECT x.ctid FROM tenure.pace_key x WHERE x.ends_at < now
     ORDER BY x.ends_at LIMIT 10000 FOR UPDATE SKIP LOCKED));
  DELETE FROM tenure.item_group g WHERE g.ctid = ANY(ARRAY(
    SELECT x.ctid FROM tenure.item_group x WHERE x.ended_at < before
     ORDER BY x.ended_at LIMIT 10000 FOR UPDATE SKIP LOCKED));
  DELETE FROM tenure.item_group g WHERE g.ctid = ANY(ARRAY(
    SELECT x.ctid FROM tenure.item_group x
     WHERE x.ended_at IS NULL AND x.id < tenure.id_at(before) AND x.sealed_at IS NULL
       AND x.members <= x.completed + x.failed + x.cancelled
     ORDER BY x.id LIMIT 10000 FOR UPDATE SKIP LOCKED));
END $$;

SELECT tenure.grant_roles();

INSERT INTO tenure.migration (number, name) VALUES (11, 'groups');
