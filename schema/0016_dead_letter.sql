-- Dead letters: items that have failed for good, whatever the reason, until somebody brings them back, purges
-- them, or retention drops them. And what people ask about queues and items.
--
--   failed --take--> in somebody's hands, until the lease's time is over --reinject--> available again
--     ^  |                    |                                        +--discard--> gone
--     |  |                    +--release, or the time is over--> failed
--     |  +--redrive, retry--> available again        purge--> gone
--
-- D1. One dead letter is in one taker's hands at a time, whoever else looks: what he does names his lease,
--     and after its time is over changes nothing.
-- D2. Whoever acts on many passes over what is in somebody's hands, and over what is locked: he waits for nobody.
-- D3. What is in quarantine and open is brought back as by a retry, and never purged (K-118).
-- D4. What an operator does is in the audit, in the same transaction.
--
-- A walk goes by id, and ids do not change: each letter is met once, whatever moves meanwhile, and what fails
-- after the walk has begun is not its concern. Rows of `done` are inserted and deleted, never updated.
--
-- Locks: SHARE on `done` while its index is built: settling waits.
-- Overlap: older code brings items back without looking at leases.

-- Costs a completed item nothing but the comparison of its outcome.
CREATE INDEX done_for_dead_letters ON tenure.done (queue_id, id) WHERE outcome = 'failed';

CREATE TABLE tenure.dead_letter_lease (
  item_id    uuid        NOT NULL PRIMARY KEY,
  lease      uuid        NOT NULL,
  holder     text        NOT NULL CONSTRAINT holder_length CHECK (length(holder) BETWEEN 1 AND 200),
  taken_at   timestamptz NOT NULL,
  expires_at timestamptz NOT NULL
);

SELECT tenure.fence_table('tenure.dead_letter_lease');

-- Who did it: the role that logged in, and the name that its session goes by.
ALTER TABLE tenure.audit_event
  ADD COLUMN actor       text NOT NULL DEFAULT session_user,
  ADD COLUMN application text NOT NULL DEFAULT current_setting('application_name', true);

-- The next dead letters of a queue after an id, no more than are looked at, and whether each is one that is
-- asked for. NULL asks for any; a declared failure has the reason 'DeclaredError'.
CREATE FUNCTION tenure.scan_dead_letters(
  of_queue int, of_reason text, failed_after timestamptz, failed_before timestamptz, error_contains text,
  after_id uuid, looked_max int
) RETURNS TABLE (id uuid, matches boolean)
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
  SELECT d.id,
         (of_reason IS NULL OR coalesce(d.reason, 'DeclaredError') = of_reason)
         AND (failed_after IS NULL OR d.finished_at > failed_after)
         AND (failed_before IS NULL OR d.finished_at <= failed_before)
         -- The failure is searched as text: for what is given, or for what it is inside a JSON string.
         AND (error_contains IS NULL OR coalesce(
               strpos(d.result::text, error_contains) > 0 OR strpos(d.result::text,
                 substr(to_json(error_contains)::text, 2, length(to_json(error_contains)::text) - 2)) > 0, false))
    FROM tenure.done d
   WHERE d.queue_id = of_queue AND d.outcome = 'failed'
     AND d.id > coalesce(after_id, '00000000-0000-0000-0000-000000000000')
   ORDER BY d.id LIMIT looked_max
$$;

-- The queues that have dead letters, by name.
CREATE FUNCTION tenure.dead_letter_queues() RETURNS TABLE (queue text)
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
  SELECT q.name FROM tenure.queue q
   WHERE (SELECT true FROM tenure.done d WHERE d.queue_id = q.id AND d.outcome = 'failed' LIMIT 1)
   ORDER BY q.name
$$;

-- A page of a queue's dead letters, oldest first. The last row has no item: its `cursor_id` is where the next
-- page begins, NULL after the last one. Error and payload are read only when they are asked for.
CREATE FUNCTION tenure.dead_letters(
  of_queue text, of_reason text, failed_after timestamptz, failed_before timestamptz, error_contains text,
  after_id uuid, looked_max int, with_payload boolean
) RETURNS TABLE (
  id uuid, queue text, reason text, error json, payload json, key text, attempt int, failures int, losses smallint,
  enqueued_at timestamptz, failed_at timestamptz, quarantine text, holder text, held_until timestamptz, cursor_id uuid
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
  now      timestamptz := tenure.clock();
  queue_   int := (SELECT q.id FROM tenure.queue q WHERE q.name = of_queue);
  matching uuid[];
  looked   int;
  last_id  uuid;
BEGIN
  SELECT coalesce(array_agg(s.id ORDER BY s.id) FILTER (WHERE s.matches), '{}'), count(*),
         (array_agg(s.id ORDER BY s.id DESC))[1]
    INTO matching, looked, last_id
    FROM tenure.scan_dead_letters(queue_, of_reason, failed_after, failed_before, error_contains, after_id,
                                  looked_max) s;
  RETURN QUERY
  SELECT d.id, of_queue, coalesce(d.reason, 'DeclaredError'), d.result, CASE WHEN with_payload THEN i.payload END,
         i.key, d.attempt, d.failures, d.losses, i.enqueued_at, d.finished_at,
         (SELECT q.state FROM tenure.quarantine q WHERE q.item_id = d.id),
         l.holder, l.expires_at, NULL::uuid
    FROM unnest(matching) WITH ORDINALITY u(id, place)
   CROSS JOIN LATERAL (
     SELECT * FROM tenure.done x WHERE x.id = u.id AND x.outcome = 'failed' OFFSET 0) d
   CROSS JOIN LATERAL (SELECT * FROM tenure.item x WHERE x.id = u.id OFFSET 0) i
    LEFT JOIN LATERAL (
      SELECT * FROM tenure.dead_letter_lease x WHERE x.item_id = u.id AND x.expires_at > now OFFSET 0) l ON true
   ORDER BY u.place;
  IF looked = looked_max THEN
    cursor_id := last_id;
    RETURN NEXT;
  END IF;
END $$;

-- Puts up to `taken_max` dead letters into the caller's hands for the time `visibility`, oldest first: nobody
-- else gets them, and no retry or redrive touches them, until he is done with each or the time is over. Without
-- a name the taker goes by that of his session.
CREATE FUNCTION tenure.take_dead_letters(
  of_queue text, of_reason text, failed_after timestamptz, failed_before timestamptz, error_contains text,
  visibility interval, taken_max int, taker text
) RETURNS TABLE (
  id uuid, lease uuid, reason text, error json, payload json, key text, attempt int, failures int, losses smallint,
  enqueued_at timestamptz, failed_at timestamptz
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_column
DECLARE
  now      timestamptz;
  queue_   int := (SELECT q.id FROM tenure.queue q WHERE q.name = of_queue);
  after_id uuid;
  looked   int;
  matching uuid[];
  locked   uuid[];
  taken    uuid[] := '{}';
BEGIN
  PERFORM tenure.admit();
  LOOP
    SELECT coalesce(array_agg(s.id ORDER BY s.id) FILTER (WHERE s.matches), '{}'), count(*),
           (array_agg(s.id ORDER BY s.id DESC))[1]
      INTO matching, looked, after_id
      FROM tenure.scan_dead_letters(queue_, of_reason, failed_after, failed_before, error_contains, after_id, 500) s;
    now := tenure.clock();
    locked := ARRAY(
      SELECT x.id FROM unnest(matching) u(id)
       CROSS JOIN LATERAL (
         SELECT d.id FROM tenure.done d
          WHERE d.id = u.id AND d.outcome = 'failed'
            AND (SELECT true FROM tenure.dead_letter_lease l
                  WHERE l.item_id = d.id AND l.expires_at > now LIMIT 1) IS NULL
            FOR UPDATE SKIP LOCKED) x
       LIMIT taken_max - cardinality(taken));
    -- Decides between takers: one that has waited for nothing may have looked before the other's commit, and
    -- the row as it is now says whose it is.
    WITH given AS (
      INSERT INTO tenure.dead_letter_lease AS l (item_id, lease, holder, taken_at, expires_at)
      SELECT u.id, gen_random_uuid(),
             left(coalesce(taker, nullif(current_setting('application_name'), ''), session_user), 200), now,
             now + visibility
        FROM unnest(locked) u(id) ORDER BY u.id
      ON CONFLICT ON CONSTRAINT dead_letter_lease_pkey DO UPDATE
         SET lease = excluded.lease, holder = excluded.holder, taken_at = excluded.taken_at,
             expires_at = excluded.expires_at
       WHERE l.expires_at <= excluded.taken_at
      RETURNING l.item_id)
    SELECT taken || coalesce(array_agg(g.item_id), '{}') INTO taken FROM given g;
    EXIT WHEN cardinality(taken) >= taken_max OR looked < 500;
  END LOOP;
  RETURN QUERY
  SELECT d.id, (SELECT l.lease FROM tenure.dead_letter_lease l WHERE l.item_id = d.id),
         coalesce(d.reason, 'DeclaredError'), d.result, i.payload, i.key, d.attempt, d.failures, d.losses,
         i.enqueued_at, d.finished_at
    FROM unnest(taken) u(id)
   CROSS JOIN LATERAL (SELECT * FROM tenure.done x WHERE x.id = u.id OFFSET 0) d
   CROSS JOIN LATERAL (SELECT * FROM tenure.item x WHERE x.id = u.id OFFSET 0) i
   ORDER BY d.id;
END $$;

-- Gives one back before its time is over. False: it is not in the caller's hands any more.
CREATE FUNCTION tenure.release_dead_letter(item uuid, held uuid) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
  DELETE FROM tenure.dead_letter_lease l WHERE l.item_id = item AND l.lease = held;
  RETURN FOUND;
END $$;

-- Brings one back under the caller's lease: see bring_back (0004).
CREATE FUNCTION tenure.reinject_dead_letter(item uuid, held uuid) RETURNS text
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$ SELECT tenure.bring_back(item, 'dead_letter.reinjected', held, false) $$;

-- Removes all that there is of a dead letter. The caller holds its row. Answers whether he may: 'purged', 'taken',
-- 'stale', or 'quarantined' while nobody has dealt with that.
CREATE FUNCTION tenure.remove_dead_letter(item uuid, event text, held uuid) RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
  now     timestamptz := tenure.clock();
  holds   uuid;
  removed record;
BEGIN
  SELECT l.lease INTO holds FROM tenure.dead_letter_lease l WHERE l.item_id = item AND l.expires_at > now;
  IF holds IS DISTINCT FROM held THEN RETURN CASE WHEN held IS NULL THEN 'taken' ELSE 'stale' END; END IF;
  -- A settlement in progress has the row as open until it is committed.
  IF EXISTS (SELECT FROM tenure.quarantine q WHERE q.item_id = item AND q.state = 'open') THEN
    RETURN 'quarantined';
  END IF;
  DELETE FROM tenure.quarantine q WHERE q.item_id = item;
  DELETE FROM tenure.done d WHERE d.id = item RETURNING d.queue_id, d.attempt, d.reason INTO removed;
  DELETE FROM tenure.dead_letter_lease l WHERE l.item_id = item;
  DELETE FROM tenure.cancel_request x WHERE x.id = item;
  DELETE FROM tenure.deadline d WHERE d.id = item;
  DELETE FROM tenure.waiter w WHERE w.item_id = item;
  -- Of 0012. Whoever has invoked it was told when it failed.
  DELETE FROM tenure.wait w WHERE w.item_id = item;
  DELETE FROM tenure.signal s WHERE s.item_id = item;
  DELETE FROM tenure.invocation v WHERE v.child_id = item;
  DELETE FROM tenure.item_key k WHERE k.item_id = item;
  DELETE FROM tenure.step s WHERE s.item_id = item;
  DELETE FROM tenure.item i WHERE i.id = item;
  PERFORM tenure.audit(event, item, removed.queue_id, json_build_object(
    'attempt', removed.attempt, 'reason', coalesce(removed.reason, 'DeclaredError')));
  RETURN 'purged';
END $$;

-- As reinject_dead_letter, and away with it. Also 'unknown', when it is no dead letter.
CREATE FUNCTION tenure.discard_dead_letter(item uuid, held uuid) RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
SET plan_cache_mode = force_generic_plan
AS $$
BEGIN
  PERFORM tenure.admit();
  PERFORM FROM tenure.done d WHERE d.id = item AND d.outcome = 'failed' FOR UPDATE;
  IF NOT FOUND THEN RETURN 'unknown'; END IF;
  RETURN tenure.remove_dead_letter(item, 'dead_letter.discarded', held);
END $$;

-- One step of a walk that brings back what matches: of the next `looked_max` after an id. Tells how many of them
-- matched (`processed`), how many were brought back, and where to go on; NULL at the end. What a walk has brought
-- back is no dead letter any more, so one that was cut off is begun again and goes on where it was.
CREATE FUNCTION tenure.redrive_dead_letters(
  of_queue text, of_reason text, failed_after timestamptz, failed_before timestamptz, error_contains text,
  after_id uuid, looked_max int,
  OUT processed int, OUT reinjected int, OUT next_id uuid
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
  queue_ int := (SELECT q.id FROM tenure.queue q WHERE q.name = of_queue);
  looked int := 0;
  one    record;
BEGIN
  processed := 0; reinjected := 0;
  PERFORM tenure.admit();
  FOR one IN
    SELECT s.id, s.matches
      FROM tenure.scan_dead_letters(queue_, of_reason, failed_after, failed_before, error_contains, after_id,
                                    looked_max) s
  LOOP
    looked := looked + 1; next_id := one.id;
    CONTINUE WHEN NOT one.matches;
    processed := processed + 1;
    PERFORM FROM tenure.done d WHERE d.id = one.id AND d.outcome = 'failed' FOR UPDATE SKIP LOCKED;
    CONTINUE WHEN NOT FOUND;
    IF tenure.bring_back(one.id, 'dead_letter.redriven', NULL, false) = 'available' THEN
      reinjected := reinjected + 1;
    END IF;
  END LOOP;
  IF looked < looked_max THEN next_id := NULL; END IF;
END $$;

-- As redrive_dead_letters, and away with them.
CREATE FUNCTION tenure.purge_dead_letters(
  of_queue text, of_reason text, failed_after timestamptz, failed_before timestamptz, error_contains text,
  after_id uuid, looked_max int,
  OUT processed int, OUT purged int, OUT next_id uuid
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
  queue_ int := (SELECT q.id FROM tenure.queue q WHERE q.name = of_queue);
  looked int := 0;
  one    record;
BEGIN
  processed := 0; purged := 0;
  PERFORM tenure.admit();
  FOR one IN
    SELECT s.id, s.matches
      FROM tenure.scan_dead_letters(queue_, of_reason, failed_after, failed_before, error_contains, after_id,
                                    looked_max) s
  LOOP
    looked := looked + 1; next_id := one.id;
    CONTINUE WHEN NOT one.matches;
    processed := processed + 1;
    PERFORM FROM tenure.done d WHERE d.id = one.id AND d.outcome = 'failed' FOR UPDATE SKIP LOCKED;
    CONTINUE WHEN NOT FOUND;
    IF tenure.remove_dead_letter(one.id, 'dead_letter.purged', NULL) = 'purged' THEN purged := purged + 1; END IF;
  END LOOP;
  IF looked < looked_max THEN next_id := NULL; END IF;
END $$;

-- What is known of items, without payloads and results: one snapshot, so that a moving one is in one place.
CREATE FUNCTION tenure.item_rows(ids uuid[]) RETURNS TABLE (
  id uuid, queue text, state text, priority int, key text, idempotency_key text, attempt int, failures int,
  losses smallint, stuck smallint, version text, suspect boolean, owner uuid, reason text, enqueued_at timestamptz,
  deadline_at timestamptz, due_at timestamptz, claimed_at timestamptz, finished_at timestamptz
)
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
  SELECT i.id, (SELECT q.name FROM tenure.queue q WHERE q.id = i.queue_id), p.state,
         i.priority + coalesce(i.aged, 0), i.key,
         i.idempotency_key, p.attempt, p.failures, p.losses, p.stuck, l.version, l.suspect, p.owner, p.reason,
         i.enqueued_at, i.deadline_at, p.due_at, p.claimed_at, p.finished_at
    FROM unnest(ids) WITH ORDINALITY u(id, place)
   CROSS JOIN LATERAL (SELECT * FROM tenure.item x WHERE x.id = u.id OFFSET 0) i
   CROSS JOIN LATERAL (
     SELECT 'available' AS state, r.lane_id, r.attempt, r.failures, r.losses, r.stuck, NULL::uuid AS owner,
            NULL::text AS reason, NULL::timestamptz AS due_at, NULL::timestamptz AS claimed_at,
            NULL::timestamptz AS finished_at
       FROM tenure.lane x JOIN tenure.ready r ON r.lane_id = x.id AND r.rank = -i.priority AND r.seq = i.seq
      WHERE x.queue_id = i.queue_id
     UNION ALL
     SELECT 'leased', c.lane_id, c.attempt, c.failures, c.losses, c.stuck, c.owner, NULL, NULL, c.claimed_at, NULL
       FROM tenure.claimed c WHERE c.id = i.id
     UNION ALL
     SELECT 'delayed', d.lane_id, d.attempt, d.failures, d.losses, d.stuck, NULL, NULL, d.due_at, NULL, NULL
       FROM tenure.delayed d WHERE d.id = i.id
     UNION ALL
     -- Of 0012: it waits durably, and of 0013: a pull session has it.
     SELECT p.state, p.lane_id, p.attempt, p.failures, 0, 0, p.claimed_by, NULL, p.due_at, NULL, NULL
       FROM tenure.parked p WHERE p.id = i.id
     UNION ALL
     SELECT 'leased', c.lane_id, c.execution_seq, c.failures, c.losses, c.stuck, c.session, NULL, NULL,
            coalesce(c.activated_at, c.reserved_at), NULL
       FROM tenure.capacity_lease c WHERE c.item_id = i.id
     UNION ALL
     SELECT d.outcome, NULL, d.attempt, d.failures, d.losses, NULL, d.owner,
            CASE WHEN d.outcome = 'failed' THEN coalesce(d.reason, 'DeclaredError') END, NULL, NULL, d.finished_at
       FROM tenure.done d WHERE d.id = i.id
     LIMIT 1) p
    LEFT JOIN tenure.lane l ON l.id = p.lane_id
   ORDER BY u.place
$$;

-- A page of items, newest first, without payloads. Each is met once, however it moves meanwhile: a page begins
-- after what never changes of an item, its id or its place in the order of hand-in. It looks at `looked_max` at
-- most, so a page can be empty and not the last. The last row has no item: its `next_cursor` is where the next
-- page begins, NULL after the last one.
--
-- States that few items are in are looked for where those are; completed and cancelled ones among all.
CREATE FUNCTION tenure.list_items(
  of_queue text, of_state text, of_key text, enqueued_after timestamptz, enqueued_before timestamptz,
  after_cursor text, looked_max int
) RETURNS TABLE (
  id uuid, queue text, state text, priority int, key text, attempt int, failures int, losses smallint, owner uuid,
  reason text, enqueued_at timestamptz, deadline_at timestamptz, due_at timestamptz, claimed_at timestamptz,
  finished_at timestamptz, next_cursor text
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
  queue_  int := (SELECT q.id FROM tenure.queue q WHERE q.name = of_queue);
  -- Newest first, so what was handed in too late is passed over by where the walk begins.
  first   uuid := CASE WHEN enqueued_before < '9999-01-01'
                       THEN tenure.id_at(greatest(enqueued_before, '1970-01-02') + interval '1 second')
                       ELSE 'ffffffff-ffff-ffff-ffff-ffffffffffff' END;
  looked  uuid[];
  last_   text;
BEGIN
  IF of_queue IS NOT NULL AND queue_ IS NULL THEN RETURN; END IF;
  IF of_state = 'available' THEN
    WITH RECURSIVE lanes AS (
      SELECT l.id FROM tenure.lane l WHERE l.queue_id > 0 AND (queue_ IS NULL OR l.queue_id = queue_)
    ), head (lane_id, rank) AS (
      SELECT l.id, x.rank FROM lanes l
       CROSS JOIN LATERAL (
         SELECT r.rank FROM tenure.ready r WHERE r.lane_id = l.id ORDER BY r.rank LIMIT 1) x
      UNION ALL
      SELECT h.lane_id, x.rank FROM head h
       CROSS JOIN LATERAL (
         SELECT r.rank FROM tenure.ready r
          WHERE r.lane_id = h.lane_id AND r.rank > h.rank ORDER BY r.rank LIMIT 1) x
    ), newest AS (
      SELECT x.id, x.seq FROM head h
       CROSS JOIN LATERAL (
         SELECT r.id, r.seq FROM tenure.ready r
          WHERE r.lane_id = h.lane_id AND r.rank = h.rank
            AND r.seq < coalesce(after_cursor, '9223372036854775807')::bigint
          ORDER BY r.seq DESC LIMIT looked_max) x
       ORDER BY x.seq DESC LIMIT looked_max
    )
    SELECT coalesce(array_agg(n.id ORDER BY n.seq DESC), '{}'), min(n.seq)::text INTO looked, last_ FROM newest n;
  ELSE
    first := coalesce(after_cursor::uuid, first);
    IF of_state = 'leased' THEN
      looked := ARRAY(
        SELECT x.id FROM (
          (SELECT c.id FROM tenure.claimed c WHERE c.id < first ORDER BY c.id DESC LIMIT looked_max)
          UNION ALL
          (SELECT c.item_id FROM tenure.capacity_lease c WHERE c.item_id < first ORDER BY c.item_id DESC LIMIT looked_max)) x
         ORDER BY x.id DESC LIMIT looked_max);
    ELSIF of_state IN ('sleeping', 'waiting', 'waking') THEN
      looked := ARRAY(
        SELECT p.id FROM tenure.parked p WHERE p.id < first ORDER BY p.id DESC LIMIT looked_max);
    ELSIF of_state = 'delayed' THEN
      looked := ARRAY(
        SELECT d.id FROM tenure.delayed d WHERE d.id < first ORDER BY d.id DESC LIMIT looked_max);
    ELSIF of_state = 'failed' AND queue_ IS NOT NULL THEN
      looked := ARRAY(
        SELECT d.id FROM tenure.done d
         WHERE d.queue_id = queue_ AND d.outcome = 'failed' AND d.id < first ORDER BY d.id DESC LIMIT looked_max);
    ELSE
      looked := ARRAY(
        SELECT i.id FROM tenure.item i WHERE i.id < first ORDER BY i.id DESC LIMIT looked_max);
    END IF;
    last_ := looked[cardinality(looked)]::text;
  END IF;
  RETURN QUERY
  SELECT r.id, r.queue, r.state, r.priority, r.key, r.attempt, r.failures, r.losses, r.owner, r.reason,
         r.enqueued_at, r.deadline_at, r.due_at, r.claimed_at, r.finished_at, NULL::text
    FROM tenure.item_rows(looked) r
   -- A private queue (0007) has no name.
   WHERE r.queue IS NOT NULL AND (of_queue IS NULL OR r.queue = of_queue)
     AND (of_state IS NULL OR r.state = of_state) AND (of_key IS NULL OR r.key = of_key)
     AND (enqueued_after IS NULL OR r.enqueued_at > enqueued_after)
     AND (enqueued_before IS NULL OR r.enqueued_at <= enqueued_before);
  IF cardinality(looked) = looked_max
     AND (of_state = 'available' OR enqueued_after IS NULL
          OR last_::uuid > tenure.id_at(least(greatest(enqueued_after, '1970-01-02'), '9999-01-01')
                                        - interval '1 second')) THEN
    next_cursor := last_;
    RETURN NEXT;
  END IF;
END $$;

-- What is known of why an available item waits; no row when it is not available. Counts no further than a limit.
CREATE FUNCTION tenure.wait_facts(item uuid) RETURNS TABLE (
  application_name text, version text, suspect boolean, executors int, executors_of_version int,
  paused_at timestamptz, global_limit int, is_full boolean, per_key_limit int, is_key_full boolean,
  is_rate_used boolean, is_key_rate_used boolean, last_claim_at timestamptz, observed_at timestamptz
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
  now timestamptz := tenure.clock();
BEGIN
  RETURN QUERY
  SELECT q.application_name, l.version, l.suspect, x.executors, x.of_version, q.paused_at, q.global_limit,
         tenure.is_full(q.id, q.global_limit), q.per_key_limit,
         coalesce(q.per_key_limit IS NOT NULL AND i.key IS NOT NULL AND (
           SELECT count(*) FROM (
             SELECT FROM tenure.claimed c WHERE c.queue_id = q.id AND c.key = i.key LIMIT q.per_key_limit) u)
             >= q.per_key_limit, false),
         coalesce(tenure.rate_room(q.id, '', q.rate_limit, q.rate_window, now) <= 0, false),
         coalesce(tenure.rate_room(q.id, i.key, q.key_rate_limit, q.key_rate_window, now) <= 0, false),
         -- The claims that still run tell it without a monitor.
         greatest((SELECT max(a.claimed_at) FROM tenure.queue_activity a WHERE a.queue_id = q.id),
                  (SELECT max(u.claimed_at) FROM (
                     SELECT c.claimed_at FROM tenure.claimed c WHERE c.queue_id = q.id LIMIT 1000) u)), now
    FROM tenure.item i
    JOIN tenure.queue q ON q.id = i.queue_id
    JOIN tenure.lane l ON l.queue_id = q.id
    JOIN tenure.ready r ON r.lane_id = l.id AND r.rank = -i.priority AND r.seq = i.seq
   CROSS JOIN LATERAL (
     SELECT count(*)::int AS executors,
            (count(*) FILTER (WHERE l.version IS NULL OR e.application_version = l.version))::int AS of_version
       FROM tenure.executor e
      WHERE e.application_name = q.application_name AND e.state = 'active' AND e.expires_at > now) x
   WHERE i.id = item;
END $$;

-- Every queue, with what is in it. Counts stop at `counted_max`; those of delayed and of parked items are taken from
-- the first `counted_max` of all queues, and `.._is_more` says that there are others.
CREATE FUNCTION tenure.queue_overview(counted_max int) RETURNS TABLE (
  queue text, application_name text, settings json, waiting int, delayed int, delayed_is_more boolean, parked int,
  parked_is_more boolean, running int, failed int, oldest_waiting_at timestamptz, observed_at timestamptz
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
  now timestamptz := tenure.clock();
BEGIN
  RETURN QUERY
  WITH postponed AS MATERIALIZED (
    SELECT d.lane_id FROM tenure.delayed d ORDER BY d.due_at LIMIT counted_max
  ), resting AS MATERIALIZED (
    SELECT p.lane_id FROM tenure.parked p ORDER BY p.id LIMIT counted_max
  )
  SELECT q.name, q.application_name, row_to_json(q), least(w.n, counted_max),
         (SELECT count(*)::int FROM postponed p JOIN tenure.lane l ON l.id = p.lane_id WHERE l.queue_id = q.id),
         (SELECT count(*) FROM postponed) = counted_max,
         (SELECT count(*)::int FROM resting p JOIN tenure.lane l ON l.id = p.lane_id WHERE l.queue_id = q.id),
         (SELECT count(*) FROM resting) = counted_max,
         -- Slots in use: of executors, and of pull sessions (0013).
         least(counted_max, (SELECT count(*)::int FROM (
            SELECT FROM tenure.claimed c WHERE c.queue_id = q.id LIMIT counted_max) x)
           + (SELECT count(*)::int FROM (
                SELECT FROM tenure.capacity_lease c WHERE c.queue_id = q.id LIMIT counted_max) x)),
         (SELECT count(*)::int FROM (
            SELECT FROM tenure.done d WHERE d.queue_id = q.id AND d.outcome = 'failed' LIMIT counted_max) x),
         w.oldest_at, now
    FROM tenure.queue q
   CROSS JOIN LATERAL (
     SELECT coalesce(sum(x.n), 0)::int AS n, min(x.oldest_at) AS oldest_at
       FROM tenure.lane l
      CROSS JOIN LATERAL (
        SELECT count(*) AS n,
               -- Of the next to be claimed; with priorities another one may be older.
               (SELECT i.enqueued_at
                  FROM (SELECT r.id FROM tenure.ready r WHERE r.lane_id = l.id ORDER BY r.rank, r.seq LIMIT 1) h
                 CROSS JOIN LATERAL (SELECT it.enqueued_at FROM tenure.item it WHERE it.id = h.id OFFSET 0) i)
                 AS oldest_at
          FROM (SELECT FROM tenure.ready r WHERE r.lane_id = l.id LIMIT counted_max) c) x
      WHERE l.queue_id = q.id) w
   ORDER BY q.name;
END $$;

-- A page of the audit, newest first, before the event `before_id`.
CREATE FUNCTION tenure.audit_events(
  of_event text, of_item uuid, of_queue text, since timestamptz, before_id bigint, rows_max int
) RETURNS TABLE (
  id bigint, at timestamptz, event text, item_id uuid, queue text, actor text, application text, detail json
)
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
  SELECT e.id, e.at, e.event, e.item_id, q.name, e.actor, e.application, e.detail
    FROM tenure.audit_event e LEFT JOIN tenure.queue q ON q.id = e.queue_id
   WHERE (before_id IS NULL OR e.id < before_id)
     AND (of_event IS NULL OR e.event = of_event OR e.event LIKE of_event || '.%')
     AND (of_item IS NULL OR e.item_id = of_item)
     AND (of_queue IS NULL OR q.name = of_queue)
     AND (since IS NULL OR e.at >= since)
   ORDER BY e.id DESC LIMIT rows_max
$$;

-- Forgets events older than `before`, of the oldest `forgotten_max`; skips what another one forgets.
CREATE FUNCTION tenure.forget_audit(before timestamptz, forgotten_max int) RETURNS int
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
  old       bigint[];
  forgotten int := 0;
BEGIN
  old := ARRAY(
    SELECT e.id FROM tenure.audit_event e ORDER BY e.id LIMIT forgotten_max);
  IF NOT EXISTS (SELECT FROM tenure.audit_event e WHERE e.id = old[1] AND e.at < before) THEN RETURN 0; END IF;
  WITH locked AS MATERIALIZED (
    SELECT e.id FROM tenure.audit_event e
     WHERE e.id = ANY(old) AND e.at < before ORDER BY e.id FOR UPDATE SKIP LOCKED)
  DELETE FROM tenure.audit_event e USING locked l WHERE e.id = l.id;
  GET DIAGNOSTICS forgotten = ROW_COUNT;
  RETURN forgotten;
END $$;

SELECT tenure.grant_roles();

INSERT INTO tenure.migration (number, name) VALUES (16, 'dead_letter');
