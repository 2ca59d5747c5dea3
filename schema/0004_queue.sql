-- What queues do: enqueue, claim, settle, checkpoint, promote, cancel, retry, deadlines, results.
--
-- One lock order for all transactions: executor row (FOR KEY SHARE by the fence, or a victim's
-- FOR UPDATE, never both) -> queue advisory lock -> quarantine -> pace_key in key order -> ready ->
-- claimed in id order -> delayed -> item_key in key order -> inserts -> item_group, at the commit.
-- Work rows are skipped when locked; only the revoker waits.
--
-- The settings on the functions keep statistics from turning a lookup into a scan: autoanalyze sees
-- these tables empty at one moment and full at the next. A bitmap is a scan as well: with one, each
-- claim reads and sorts the whole backlog. Rows are deleted by the ctid just locked, and payloads are
-- looked up row by row, so that there is no join for the planner to turn round; and EXISTS is written
-- as a subquery with LIMIT 1, because EXISTS may be planned as a hash of all rows. A claimed row is
-- found by its id alone: "owner = me" may choose the index on owners, and then each lookup reads all
-- that the owner has (1,000 rows: 115 us each instead of 5). Plans are made once: making them for nine
-- partitions takes 3 ms, as long as all the rest of a small claim.
-- Without jit = off a server before 18 compiles code at each call, because a plan that must use what is
-- switched off costs 1e10 there: 30 to 60 ms for a claim or a settle instead of 1.
--
-- Locks: none that another session can wait for.
-- Overlap: nothing older exists.

-- Selects first: ON CONFLICT DO NOTHING would use up an identity value at each call.
CREATE FUNCTION tenure.queue_id(queue_name text) RETURNS int
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  found_id int;
BEGIN
  LOOP
    SELECT q.id INTO found_id FROM tenure.queue q WHERE q.name = queue_name;
    IF FOUND THEN RETURN found_id; END IF;
    INSERT INTO tenure.queue (name) VALUES (queue_name) ON CONFLICT (name) DO NOTHING;
  END LOOP;
END $$;

CREATE FUNCTION tenure.lane_id(lane_queue int, lane_version text, lane_suspect boolean) RETURNS int
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  found_id int;
BEGIN
  LOOP
    SELECT l.id INTO found_id FROM tenure.lane l
     WHERE l.queue_id = lane_queue AND l.version IS NOT DISTINCT FROM lane_version AND l.suspect = lane_suspect;
    IF FOUND THEN RETURN found_id; END IF;
    INSERT INTO tenure.lane (queue_id, version, suspect) VALUES (lane_queue, lane_version, lane_suspect)
    ON CONFLICT ON CONSTRAINT lane_once DO NOTHING;
  END LOOP;
END $$;

-- Called by each executor that runs the queue. The last one decides the limits; those in `limits` are
-- set_limits' (0010). Refuses (TN011) a queue that another application runs.
CREATE FUNCTION tenure.register_queue(
  queue_name text, application text, own_version text, accepted_versions text[],
  limit_global int, limit_per_key int, limit_recovery text, limit_recovery_max int,
  limits jsonb DEFAULT '{}',
  OUT queue_id int, OUT unstarted_lane int, OUT started_lane int, OUT suspect_lane int,
  OUT lanes int[], OUT suspect_lanes int[]
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  queue    tenure.queue;
  accepted text;
BEGIN
  queue_id := tenure.queue_id(queue_name);
  SELECT * INTO queue FROM tenure.queue q WHERE q.id = queue_id FOR NO KEY UPDATE;
  IF queue.application_name <> application THEN
    RAISE EXCEPTION 'queue % belongs to the application %', queue_name, queue.application_name USING
      ERRCODE = 'TN011', HINT = 'Give the queue another name, or use another database.';
  END IF;
  UPDATE tenure.queue q
     SET application_name = application, global_limit = limit_global, per_key_limit = limit_per_key,
         recovery_limit = limit_recovery, recovery_max = limit_recovery_max
   WHERE q.id = queue_id
     AND (q.application_name, q.global_limit, q.per_key_limit, q.recovery_limit, q.recovery_max)
         IS DISTINCT FROM (application, limit_global, limit_per_key, limit_recovery, limit_recovery_max);
  PERFORM tenure.set_limits(queue_id, limits);
  unstarted_lane := tenure.lane_id(queue_id, NULL, false);
  started_lane := tenure.lane_id(queue_id, own_version, false);
  suspect_lane := tenure.lane_id(queue_id, own_version, true);
  lanes := ARRAY[unstarted_lane, started_lane];
  suspect_lanes := ARRAY[suspect_lane];
  FOREACH accepted IN ARRAY accepted_versions LOOP
    lanes := lanes || tenure.lane_id(queue_id, accepted, false);
    suspect_lanes := suspect_lanes || tenure.lane_id(queue_id, accepted, true);
  END LOOP;
END $$;

-- Whether two payloads are one. Other spelling of the same value counts as the same, unless jsonb
-- cannot hold it (a NUL, a lone surrogate): then only the same text does.
CREATE FUNCTION tenure.same_json(a json, b json) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
  IF a::text = b::text THEN RETURN true; END IF;
  BEGIN
    RETURN a::jsonb = b::jsonb;
  EXCEPTION WHEN data_exception OR program_limit_exceeded THEN
    RETURN false;
  END;
END $$;

-- Hands in items, in the transaction of the caller, whoever he is and whatever driver he uses.
-- `ids` come in the order of the payloads; a known idempotency key gives the first item's id. When a
-- key is known with another payload, nothing is written and the conflict is named instead; nor when
-- one of `group_ids` (0011) is sealed or unknown, which is then `refused_group`.
-- Instants win over durations; NULL arrays mean "for none of them". `pace_*`: see pace_items (0011).
CREATE FUNCTION tenure.enqueue_all(
  queue_name text, payloads text[],
  priorities int[] DEFAULT NULL, keys text[] DEFAULT NULL, idempotency_keys text[] DEFAULT NULL,
  delays_ms float8[] DEFAULT NULL, not_before timestamptz[] DEFAULT NULL,
  deadlines_ms float8[] DEFAULT NULL, not_after timestamptz[] DEFAULT NULL,
  traces text[] DEFAULT NULL,
  pace_kinds text[] DEFAULT NULL, pace_keys text[] DEFAULT NULL,
  pace_ms float8[] DEFAULT NULL, pace_max_ms float8[] DEFAULT NULL, group_ids uuid[] DEFAULT NULL,
  OUT ids uuid[], OUT queue_id int, OUT conflict_key text, OUT conflict_id uuid, OUT refused_group uuid
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
  lane     int;
  now      timestamptz := tenure.clock();
  aged     int;
  fresh    uuid[];
  paced    record;
  winners  uuid[];
  attempts int := 0;
BEGIN
  IF group_ids IS NOT NULL THEN
    refused_group := tenure.closed_group(group_ids);
    IF refused_group IS NOT NULL THEN RETURN; END IF;
  END IF;
  SELECT q.id, tenure.aged_at(now, q.aging, q.aging_since, q.aging_steps) INTO queue_id, aged
    FROM tenure.queue q WHERE q.name = queue_name;
  IF queue_id IS NULL THEN
    queue_id := tenure.queue_id(queue_name);
    -- Somebody else's first item may have been waited for.
    now := tenure.clock();
  END IF;
  lane := tenure.lane_id(queue_id, NULL, false);
  IF coalesce((SELECT max(b.upper_at) FROM tenure.bucket b), '-infinity') < now + interval '24 hours' THEN
    -- Nothing has run for weeks: the first enqueue makes the room that retention would have made.
    PERFORM tenure.create_buckets(interval '1344 hours');
  END IF;
  SELECT coalesce(array_agg(tenure.new_id()), '{}') INTO fresh FROM generate_series(1, cardinality(payloads));
  IF idempotency_keys IS NULL AND pace_keys IS NULL THEN
    PERFORM tenure.insert_items(queue_id, lane, now, fresh, fresh, payloads, priorities, keys, NULL,
      delays_ms, not_before, deadlines_ms, not_after, traces, group_ids, aged);
    ids := fresh;
    RETURN;
  END IF;
  -- A block of its own, so that a conflict takes back what this call has written and nothing else.
  BEGIN
    winners := fresh;
    IF pace_keys IS NOT NULL THEN
      SELECT * INTO paced FROM tenure.pace_items(queue_id, lane, fresh, pace_kinds, pace_keys, pace_ms,
        pace_max_ms, payloads, priorities, keys, idempotency_keys, delays_ms, not_before, deadlines_ms,
        not_after, traces, group_ids);
      winners := paced.winners;
      not_before := paced.due_at;
      now := paced.paced_at;
    END IF;
    WHILE idempotency_keys IS NOT NULL LOOP
      -- In key order: like a pace's key, a place where a transaction of ours can wait for a user's. Of
      -- twins in one batch the first wins. Two statements: a combined one misses the row it has just
      -- waited for.
      INSERT INTO tenure.item_key (queue_id, key, item_id)
      SELECT enqueue_all.queue_id, u.key, u.id
        FROM unnest(idempotency_keys, fresh) WITH ORDINALITY u(key, id, place)
       WHERE u.key IS NOT NULL ORDER BY u.key, u.place
      ON CONFLICT DO NOTHING;
      SELECT coalesce(array_agg(CASE WHEN u.key IS NULL THEN coalesce(u.paced, u.id) ELSE (
               SELECT k.item_id FROM tenure.item_key k
                WHERE k.queue_id = enqueue_all.queue_id AND k.key = u.key) END ORDER BY u.place), '{}')
        INTO winners
        FROM unnest(idempotency_keys, fresh, winners) WITH ORDINALITY u(key, id, paced, place);
      EXIT WHEN array_position(winners, NULL) IS NULL;
      -- Retention took a key between the two statements.
      attempts := attempts + 1;
      IF attempts = 5 THEN
        RAISE EXCEPTION 'idempotency keys of queue % keep changing', queue_name USING ERRCODE = '40001';
      END IF;
    END LOOP;
    PERFORM tenure.insert_items(queue_id, lane, now, fresh, winners, payloads, priorities, keys,
      idempotency_keys, delays_ms, not_before, deadlines_ms, not_after, traces, group_ids, aged);
    SELECT u.key, u.winner INTO conflict_key, conflict_id
      FROM unnest(idempotency_keys, fresh, winners, payloads) u(key, id, winner, payload)
     WHERE u.id <> u.winner AND u.key IS NOT NULL
       AND NOT tenure.same_json((SELECT i.payload FROM tenure.item i WHERE i.id = u.winner), u.payload::json)
     LIMIT 1;
    IF FOUND THEN RAISE EXCEPTION USING ERRCODE = 'TN020', MESSAGE = 'idempotency conflict'; END IF;
    ids := winners;
  EXCEPTION WHEN SQLSTATE 'TN020' THEN
    ids := NULL;
  END;
END $$;

-- The rows of an enqueue: those whose id won. Order of arrays = order of `seq`. `aged` are the steps by
-- which the queue's age places them behind those that came earlier (0010).
CREATE FUNCTION tenure.insert_items(
  item_queue int, lane int, now timestamptz, candidate_ids uuid[], winner_ids uuid[], payloads text[],
  priorities int[], keys text[], idempotency_keys text[], delays_ms float8[], not_before timestamptz[],
  deadlines_ms float8[], not_after timestamptz[], traces text[], group_ids uuid[] DEFAULT NULL,
  aged int DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
  IF delays_ms IS NULL AND not_before IS NULL AND deadlines_ms IS NULL AND not_after IS NULL
     AND group_ids IS NULL THEN
    WITH inserted AS (
      INSERT INTO tenure.item (id, queue_id, priority, key, idempotency_key, payload, trace, enqueued_at, aged)
      SELECT u.id, item_queue, coalesce(u.priority, 0) - coalesce(insert_items.aged, 0), u.key, u.idempotency_key,
             u.payload::json, u.trace, now, insert_items.aged
        FROM unnest(candidate_ids, winner_ids, payloads, priorities, keys, idempotency_keys, traces)
             WITH ORDINALITY u(id, winner, payload, priority, key, idempotency_key, trace, place)
       WHERE u.id = u.winner ORDER BY u.place
      RETURNING id, priority, seq, key)
    INSERT INTO tenure.ready (lane_id, rank, seq, id, attempt, failures, losses, stuck, key)
    SELECT lane, -i.priority, i.seq, i.id, 0, 0, 0, 0, i.key FROM inserted i;
    RETURN;
  END IF;
  -- `seq` is taken here and not by its default: joined with what the insert returns, 1,000 rows are
  -- compared with 1,000 (160 ms instead of 11).
  WITH given AS MATERIALIZED (
    SELECT u.*, nextval('tenure.item_seq') AS seq, coalesce(u.priority_, 0) - coalesce(insert_items.aged, 0) AS priority,
           coalesce(u.begin_at, now + make_interval(secs => u.delay_ms / 1000)) AS due_at,
           coalesce(u.end_at, now + make_interval(secs => u.deadline_ms / 1000)) AS deadline_at
      FROM (
        SELECT x.*
          FROM unnest(candidate_ids, winner_ids, payloads, priorities, keys, idempotency_keys, delays_ms,
                      not_before, deadlines_ms, not_after, traces, group_ids) WITH ORDINALITY
               x(id, winner, payload, priority_, key, idempotency_key, delay_ms, begin_at, deadline_ms,
                 end_at, trace, group_id, place)
         WHERE x.id = x.winner ORDER BY x.place OFFSET 0) u
  ), inserted AS (
    INSERT INTO tenure.item (id, queue_id, priority, seq, key, idempotency_key, payload, trace, deadline_at,
                             enqueued_at, group_id, aged)
    SELECT g.id, item_queue, g.priority, g.seq, g.key, g.idempotency_key, g.payload::json,
           g.trace, g.deadline_at, now, g.group_id, insert_items.aged
      FROM given g
  ), deadlined AS (
    INSERT INTO tenure.deadline (id, due_at)
    SELECT g.id, g.deadline_at FROM given g WHERE g.deadline_at IS NOT NULL
  ), waiting AS (
    INSERT INTO tenure.delayed (id, due_at, lane_id, rank, seq, attempt, failures, losses, stuck, key)
    SELECT g.id, g.due_at, lane, -g.priority, g.seq, 0, 0, 0, 0, g.key FROM given g WHERE g.due_at > now
  )
  INSERT INTO tenure.ready (lane_id, rank, seq, id, attempt, failures, losses, stuck, key)
  SELECT lane, -g.priority, g.seq, g.id, 0, 0, 0, 0, g.key
    FROM given g WHERE g.due_at IS NULL OR g.due_at <= now;
  IF group_ids IS NOT NULL THEN
    PERFORM tenure.members_added(array_agg(u.group_id))
       FROM unnest(candidate_ids, winner_ids, group_ids) u(id, winner, group_id)
      WHERE u.id = u.winner AND u.group_id IS NOT NULL HAVING count(*) > 0;
  END IF;
END $$;

-- One item, for any client: SELECT tenure.enqueue('thumbnails', '{"imageId": "a"}', '{"priority": 5}').
-- Options: priority, key, idempotencyKey, delayMs, notBefore, deadlineMs, notAfter, group,
-- debounce: {"key", "delayMs", "maxWaitMs"}, throttle: {"key", "periodMs"}; an unknown one is refused
-- (TN021). A known idempotency key gives the first item's id; with another payload it is refused
-- (TN020), as is a group that is sealed or unknown (TN030).
CREATE FUNCTION tenure.enqueue(queue_name text, payload json, options jsonb DEFAULT '{}') RETURNS uuid
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  unknown text;
  result  record;
  pace    jsonb;
BEGIN
  SELECT string_agg(k, ', ') INTO unknown FROM (
    SELECT k FROM jsonb_object_keys(options) k
     WHERE k NOT IN ('priority', 'key', 'idempotencyKey', 'delayMs', 'notBefore', 'deadlineMs', 'notAfter',
                     'group', 'debounce', 'throttle')
    UNION ALL SELECT 'debounce.' || k FROM jsonb_object_keys(options -> 'debounce') k
     WHERE k NOT IN ('key', 'delayMs', 'maxWaitMs')
    UNION ALL SELECT 'throttle.' || k FROM jsonb_object_keys(options -> 'throttle') k
     WHERE k NOT IN ('key', 'periodMs')) u;
  IF unknown IS NOT NULL THEN
    RAISE EXCEPTION 'unknown option: %', unknown USING ERRCODE = 'TN021',
      HINT = 'Known: priority, key, idempotencyKey, delayMs, notBefore, deadlineMs, notAfter, group, '
        'debounce (key, delayMs, maxWaitMs), throttle (key, periodMs).';
  END IF;
  IF options ? 'debounce' AND options ? 'throttle' THEN
    RAISE EXCEPTION 'an item is debounced or throttled, not both' USING ERRCODE = 'TN021';
  END IF;
  pace := coalesce(options -> 'debounce', options -> 'throttle');
  SELECT * INTO result FROM tenure.enqueue_all(queue_name, ARRAY[payload::text],
    CASE WHEN options ? 'priority' THEN ARRAY[(options ->> 'priority')::int] END,
    CASE WHEN options ? 'key' THEN ARRAY[options ->> 'key'] END,
    CASE WHEN options ? 'idempotencyKey' THEN ARRAY[options ->> 'idempotencyKey'] END,
    CASE WHEN options ? 'delayMs' THEN ARRAY[(options ->> 'delayMs')::float8] END,
    CASE WHEN options ? 'notBefore' THEN ARRAY[(options ->> 'notBefore')::timestamptz] END,
    CASE WHEN options ? 'deadlineMs' THEN ARRAY[(options ->> 'deadlineMs')::float8] END,
    CASE WHEN options ? 'notAfter' THEN ARRAY[(options ->> 'notAfter')::timestamptz] END, NULL,
    CASE WHEN pace IS NOT NULL THEN
      ARRAY[CASE WHEN options ? 'debounce' THEN 'debounce' ELSE 'throttle' END] END,
    CASE WHEN pace IS NOT NULL THEN ARRAY[pace ->> 'key'] END,
    CASE WHEN pace IS NOT NULL THEN ARRAY[coalesce(pace ->> 'delayMs', pace ->> 'periodMs')::float8] END,
    CASE WHEN pace ? 'maxWaitMs' THEN ARRAY[(pace ->> 'maxWaitMs')::float8] END,
    CASE WHEN options ? 'group' THEN ARRAY[(options ->> 'group')::uuid] END);
  IF result.refused_group IS NOT NULL THEN
    RAISE EXCEPTION 'group % is sealed, or unknown', result.refused_group USING ERRCODE = 'TN030',
      HINT = 'Hand in all members before the group is sealed.';
  END IF;
  IF result.conflict_id IS NOT NULL THEN
    RAISE EXCEPTION 'queue %: the idempotency key names item %, which has another payload',
      queue_name, result.conflict_id USING ERRCODE = 'TN020',
      HINT = 'Use another key, or hand in the same payload.';
  END IF;
  RETURN result.ids[1];
END $$;

-- Takes up to `wanted` items in order of priority and age, and at most `suspects_wanted` suspects.
--
-- Each lane is read from its floor, the last place this claimer has seen: without it every claim
-- walks the dead rows of all earlier ones, and collapses under one old snapshot. The caller begins
-- again at the start every second and after every hint.
--
-- With limits, the queue's lock makes the count exact, and only READ COMMITTED sees what the lock
-- waited for. With a limit for each key, a claim looks at a window of keys from `key_cursor` on. Where keys
-- take turns it takes from the next ones that may run, equally much from each, and their order is by
-- priority inside a key alone; otherwise priority holds inside the window as well, which is 500 keys.
--
-- A last row without an id tells how to go on: its key is the next cursor, '' after the last key, or NULL
-- to keep it; `deadline_in_ms` is in how long a rate lets the next one start, or 0 where keys have had their
-- share and there is room for more; and `cancel_requested` that nothing of the queue starts before: for a
-- rate, or without a time, because the queue is paused or full.
CREATE FUNCTION tenure.claim(
  claimed_queue int, lanes int[], floor_ranks int[], floor_seqs bigint[], wanted int,
  suspect_lanes int[], suspects_wanted int, key_cursor text DEFAULT ''
) RETURNS TABLE (
  id uuid, attempt int, lane_id int, rank int, seq bigint, failures int, losses smallint, key text,
  payload json, trace text, deadline_in_ms float8, enqueued_at timestamptz, cancel_requested boolean
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
  me         uuid := nullif(current_setting('tenure.executor_id', true), '')::uuid;
  limits     record;
  leased     int := 0;
  heads      tid[] := '{}';
  used       int;
  now        timestamptz;
  cursor_    text;
  is_rated   boolean;
  is_by_key  boolean;
  room       int;
  keys       text[];
  key_window int := 500;
  free_keys  int;
  head_keys  text[];
  has_more   boolean;
  keyless    int;
BEGIN
  IF me IS NULL THEN
    RAISE EXCEPTION 'a session without an executor cannot claim' USING ERRCODE = 'TN004';
  END IF;
  IF current_setting('transaction_isolation') <> 'read committed' THEN
    RAISE EXCEPTION 'a claim needs READ COMMITTED' USING ERRCODE = 'TN010',
      HINT = 'A stricter snapshot is older than the lock that makes the count of running items exact.';
  END IF;
  SELECT q.global_limit, q.per_key_limit, q.paused_at, q.rate_limit, q.rate_window, q.key_rate_limit,
         q.key_rate_window, q.takes_turns
    INTO limits FROM tenure.queue q WHERE q.id = claimed_queue;
  -- Before any row: whoever revokes this executor holds its row, and deletes what is on its private queue.
  IF claimed_queue < 0 THEN PERFORM tenure.admit(); END IF;
  IF limits.paused_at IS NOT NULL THEN
    cancel_requested := true;
    RETURN NEXT;
    RETURN;
  END IF;
  is_rated := limits.rate_limit IS NOT NULL OR limits.key_rate_limit IS NOT NULL;
  is_by_key := coalesce(limits.takes_turns, false) OR limits.per_key_limit IS NOT NULL
               OR limits.key_rate_limit IS NOT NULL;
  IF is_rated OR is_by_key OR limits.global_limit IS NOT NULL THEN
    -- The executor's row before the queue's lock: behind a revoker we must not hold up the queue.
    PERFORM tenure.admit();
    PERFORM pg_advisory_xact_lock(1413828181, claimed_queue);
    -- What pull sessions hold (0013) has a slot as well.
    SELECT count(*) INTO leased FROM tenure.capacity_lease c WHERE c.queue_id = claimed_queue;
    IF limits.global_limit IS NOT NULL THEN
      SELECT count(*) INTO used FROM tenure.claimed c WHERE c.queue_id = claimed_queue;
      wanted := least(wanted, limits.global_limit - used - leased);
    END IF;
  END IF;
  IF wanted <= 0 THEN
    IF is_by_key THEN
      cancel_requested := true;
      RETURN NEXT;
    END IF;
    RETURN;
  END IF;
  IF is_rated THEN
    now := tenure.begin_start(claimed_queue, limits.rate_window, limits.key_rate_window);
    IF limits.rate_limit IS NOT NULL THEN
      room := tenure.rate_room(claimed_queue, '', limits.rate_limit, limits.rate_window, now);
      wanted := least(wanted, room);
      IF wanted <= 0 THEN
        deadline_in_ms := tenure.rate_due_ms(claimed_queue, '', limits.rate_window, now);
        cancel_requested := true;
        RETURN NEXT;
        RETURN;
      END IF;
    END IF;
  ELSE
    now := tenure.clock();
  END IF;
  keyless := wanted;
  IF is_by_key THEN
    -- Those behind the last that has had its turn are first the next time, so that a small claim need not
    -- look far; but far enough not to come back for each of many keys that may not run.
    IF limits.takes_turns THEN key_window := least(500, greatest(100, 2 * wanted)); END IF;
    WITH RECURSIVE head (lane_id, key, rank, seq, tid, n) AS (
      SELECT x.lane_id, x.key, x.rank, x.seq, x.tid, 1
        FROM unnest(lanes || suspect_lanes) l(lane)
       CROSS JOIN LATERAL (
         SELECT r.lane_id, r.key, r.rank, r.seq, r.ctid AS tid FROM tenure.ready r
          WHERE r.lane_id = l.lane AND r.key IS NOT NULL AND r.key > key_cursor
          ORDER BY r.key, r.rank, r.seq LIMIT 1) x
      UNION ALL
      SELECT x.lane_id, x.key, x.rank, x.seq, x.tid, h.n + 1
        FROM head h
       CROSS JOIN LATERAL (
         SELECT r.lane_id, r.key, r.rank, r.seq, r.ctid AS tid FROM tenure.ready r
          WHERE r.lane_id = h.lane_id AND r.key IS NOT NULL AND r.key > h.key
          ORDER BY r.key, r.rank, r.seq LIMIT 1) x
       WHERE h.n < key_window
    ), walked AS (
      -- Every lane has been read up to here. Later keys of a lane that is further wait for their
      -- window: with them the cursor would leave out what the other lanes have in between.
      SELECT min(h.key) AS until FROM head h WHERE h.n = key_window
    ), first_of_key AS (
      SELECT DISTINCT ON (h.key) h.* FROM head h CROSS JOIN walked w
       WHERE w.until IS NULL OR h.key <= w.until
       ORDER BY h.key, h.rank, h.seq
    ), room_of_key AS (
      SELECT f.*, f.lane_id = ANY(suspect_lanes) AS is_suspect,
             least(wanted,
               CASE WHEN limits.per_key_limit IS NOT NULL THEN limits.per_key_limit - (
                 SELECT count(*) FROM tenure.claimed c WHERE c.queue_id = claimed_queue AND c.key = f.key)
                 - CASE WHEN leased > 0 THEN (
                     SELECT count(*) FROM tenure.capacity_lease c
                      WHERE c.queue_id = claimed_queue AND c.key = f.key) ELSE 0 END END,
               CASE WHEN limits.key_rate_limit IS NOT NULL THEN limits.key_rate_limit - (
                 SELECT coalesce(sum(l.started), 0) FROM tenure.rate_log l
                  WHERE l.queue_id = claimed_queue AND l.key = f.key
                    AND l.first_at > now - limits.key_rate_window * 1.001
                    AND l.last_at > now - limits.key_rate_window) END)::int AS room
        FROM first_of_key f
    ), free AS MATERIALIZED (
      SELECT n.* FROM (
        SELECT k.*, row_number() OVER (
                 PARTITION BY k.is_suspect
                 ORDER BY CASE WHEN NOT limits.takes_turns THEN k.rank END,
                          CASE WHEN NOT limits.takes_turns THEN k.seq END, k.key) AS place
          FROM room_of_key k WHERE k.room > 0) n
       WHERE NOT n.is_suspect OR n.place <= suspects_wanted
    ), share AS (
      SELECT ceil(wanted / greatest(count(*), 1)::numeric)::int AS each FROM free
    ), turn AS (
      -- The first of each key, then the second of each, and so on: only from the first key on, because those
      -- behind the cursor are the rest of a turn that the others have had. What is read for that is read
      -- only where a key may have more than one.
      SELECT f.tid, f.key, f.rank, f.seq, f.room, 1 AS round FROM free f
      UNION ALL
      SELECT x.tid, f.key, x.rank, x.seq, f.room, x.round
        FROM (SELECT * FROM free y
               WHERE limits.takes_turns AND key_cursor = '' AND NOT y.is_suspect AND y.room > 1) f
       CROSS JOIN LATERAL (
         SELECT z.tid, z.rank, z.seq, row_number() OVER (ORDER BY z.rank, z.seq) AS round
           FROM (
             SELECT r.tid, r.rank, r.seq FROM unnest(lanes) l(lane)
              CROSS JOIN LATERAL (
                SELECT e.ctid AS tid, e.rank, e.seq FROM tenure.ready e
                 WHERE e.lane_id = l.lane AND e.key = f.key
                 ORDER BY e.rank, e.seq LIMIT least(f.room, (SELECT s.each FROM share s))) r
              ORDER BY r.rank, r.seq LIMIT least(f.room, (SELECT s.each FROM share s))) z) x
       WHERE x.round > 1 AND (SELECT s.each FROM share s) > 1
    ), chosen AS (
      SELECT t.tid, t.key, t.room, t.round FROM turn t
       ORDER BY CASE WHEN limits.takes_turns THEN t.round END, CASE WHEN limits.takes_turns THEN t.key END,
                t.rank, t.seq LIMIT wanted
    )
    SELECT coalesce(array_agg(c.tid), '{}'), array_agg(c.key), (SELECT count(*) FROM free),
           CASE WHEN limits.takes_turns AND count(*) < (SELECT count(*) FROM turn)
                THEN (SELECT l.key FROM chosen l ORDER BY l.round DESC, l.key DESC LIMIT 1)
                ELSE coalesce((SELECT w.until FROM walked w), '') END,
           limits.takes_turns AND bool_or(c.room > c.round AND c.round = CASE key_cursor
             WHEN '' THEN (SELECT s.each FROM share s) ELSE 1 END),
           CASE WHEN limits.key_rate_limit IS NOT NULL THEN ARRAY(SELECT f.key FROM first_of_key f) END
      INTO heads, head_keys, free_keys, cursor_, has_more, keys FROM chosen c;
    IF limits.takes_turns AND free_keys > 0 THEN
      -- Items without a key have what the keys leave, and one place of a claim in any case; of claims that
      -- are smaller than a turn, as many as a key: a memory of whose turn it is would be another cursor. Not
      -- more, because most queues have none, and what is kept free for them costs another claim.
      keyless := greatest(wanted - cardinality(heads), (random() * (free_keys + 1) < wanted)::int);
      IF cardinality(heads) > wanted - keyless THEN
        -- Those that make room are the first ones of the next claim.
        heads := heads[1:wanted - keyless];
        cursor_ := coalesce(head_keys[wanted - keyless], key_cursor);
        has_more := true;
      END IF;
    END IF;
  END IF;
  RETURN QUERY
  -- The locked row itself goes through all of it: what a DELETE or an INSERT returns is stored once
  -- more. Those picked are read in their order, which nothing after that disturbs.
  WITH fresh AS MATERIALIZED (
    SELECT x.*
      FROM unnest(lanes, floor_ranks, floor_seqs) l(lane, floor_rank, floor_seq)
     CROSS JOIN LATERAL (
       SELECT r.ctid AS tid, r.* FROM tenure.ready r
        WHERE r.lane_id = l.lane AND (r.rank, r.seq) > (l.floor_rank, l.floor_seq)
          AND (NOT is_by_key OR r.key IS NULL)
        ORDER BY r.rank, r.seq LIMIT keyless FOR UPDATE SKIP LOCKED) x
  ), suspect AS MATERIALIZED (
    SELECT x.*
      FROM unnest(suspect_lanes) l(lane)
     CROSS JOIN LATERAL (
       SELECT r.ctid AS tid, r.* FROM tenure.ready r
        WHERE r.lane_id = l.lane AND (NOT is_by_key OR r.key IS NULL)
        ORDER BY r.rank, r.seq LIMIT suspects_wanted FOR UPDATE SKIP LOCKED) x
  ), keyed AS MATERIALIZED (
    SELECT r.ctid AS tid, r.* FROM tenure.ready r WHERE r.ctid = ANY(heads) FOR UPDATE SKIP LOCKED
  ), picked AS MATERIALIZED (
    SELECT p.* FROM (
      SELECT * FROM fresh
      UNION ALL SELECT * FROM keyed k WHERE k.lane_id <> ALL(suspect_lanes)
      -- One bound for suspects with a key and without.
      UNION ALL (
        SELECT * FROM (
          SELECT * FROM suspect
          UNION ALL SELECT * FROM keyed k WHERE k.lane_id = ANY(suspect_lanes)) s
         ORDER BY s.rank, s.seq LIMIT suspects_wanted)) p
     ORDER BY p.rank, p.seq LIMIT wanted
  ), removed AS (
    DELETE FROM tenure.ready r WHERE r.ctid = ANY(ARRAY(SELECT p.tid FROM picked p))
  ), inserted AS (
    INSERT INTO tenure.claimed (id, queue_id, lane_id, owner, attempt, rank, seq, failures, losses, stuck,
                                key, claimed_at)
    SELECT p.id, claimed_queue, p.lane_id, me, p.attempt + 1, p.rank, p.seq, p.failures, p.losses, p.stuck,
           p.key, now
      FROM picked p
  )
  SELECT p.id, p.attempt + 1, p.lane_id, p.rank, p.seq, p.failures, p.losses, p.key, i.payload, i.trace,
         extract(epoch FROM i.deadline_at - now)::float8 * 1000, i.enqueued_at,
         CASE WHEN (SELECT true FROM tenure.cancel_request LIMIT 1)
              THEN (SELECT true FROM tenure.cancel_request x WHERE x.id = p.id LIMIT 1) IS TRUE
              ELSE false END
    FROM picked p
   CROSS JOIN LATERAL (
     SELECT it.payload, it.trace, it.deadline_at, it.enqueued_at FROM tenure.item it
      WHERE it.id = p.id OFFSET 0) i;
  GET DIAGNOSTICS used = ROW_COUNT;
  IF NOT (is_by_key OR is_rated) THEN RETURN; END IF;
  key := cursor_;
  cancel_requested := false;
  IF is_rated THEN
    IF used > 0 THEN
      PERFORM tenure.note_starts(claimed_queue, me, now, used, limits.rate_window, limits.key_rate_window);
    END IF;
    IF used = room THEN
      deadline_in_ms := tenure.rate_due_ms(claimed_queue, '', limits.rate_window, now);
      cancel_requested := true;
    ELSIF used < wanted AND limits.key_rate_limit IS NOT NULL THEN
      SELECT min(tenure.rate_due_ms(claimed_queue, u.key, limits.key_rate_window, now)) INTO deadline_in_ms
        FROM unnest(keys) u(key)
       WHERE tenure.rate_room(claimed_queue, u.key, limits.key_rate_limit, limits.key_rate_window, now) <= 0;
    END IF;
  END IF;
  IF has_more AND used < wanted THEN deadline_in_ms := 0; END IF;
  RETURN NEXT;
END $$;

-- Writes outcomes, many in one statement. Each names its attempt; the answer for each is
--   settled  the outcome is stored
--   already  it was stored before: the answer to an earlier call was lost
--   busy     somebody holds the row for a moment: try this one again
--   stale    the attempt is over: drop the result
-- and only those that are not `settled` are returned. Outcomes: completed, failed, cancelled; retry
-- (counts a failure) and hand-back (counts nothing) go to `lanes`, at once or after `delays_ms`.
-- NULL in place of an array: completed, or nothing, for all of them.
CREATE FUNCTION tenure.settle(
  ids uuid[], attempts int[], outcomes text[], reasons text[], results text[], lanes int[], delays_ms float8[]
) RETURNS TABLE (id uuid, attempt int, status text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
  me      uuid := nullif(current_setting('tenure.executor_id', true), '')::uuid;
  now     timestamptz;
  settled uuid[];
  places  bigint[];
BEGIN
  -- Here and not by the triggers: they fire after the rows of `claimed` are locked, and a revoker that
  -- holds the executor's row waits for those.
  PERFORM tenure.admit();
  now := tenure.clock();
  outcomes := coalesce(outcomes, array_fill('completed'::text, ARRAY[cardinality(ids)]));
  -- In id order and skipping: one row that somebody else has locked must not hold up the group. An
  -- attempt that is twice in the group is settled by its first outcome.
  WITH given AS MATERIALIZED (
    SELECT DISTINCT ON (u.id, u.attempt) u.*
      FROM unnest(ids, attempts, outcomes, reasons, results, lanes, delays_ms) WITH ORDINALITY
           u(id, attempt, outcome, reason, result, lane, delay_ms, place)
     ORDER BY u.id, u.attempt, u.place
  ), outcome AS MATERIALIZED (
    -- The locked row itself, not what the DELETE returns: joining the two again is quadratic here
    -- (1,000 rows: 50 us each instead of 8).
    SELECT c.*, g.outcome, g.reason, g.result, g.lane, g.delay_ms, g.place FROM given g
     CROSS JOIN LATERAL (
       SELECT k.ctid AS tid, k.id, k.queue_id, k.attempt, k.rank, k.seq, k.failures, k.losses, k.stuck, k.key
         FROM tenure.claimed k
        WHERE k.id = g.id AND k.attempt = g.attempt AND k.owner IS NOT DISTINCT FROM me
          FOR UPDATE SKIP LOCKED) c
  ), removed AS (
    DELETE FROM tenure.claimed c WHERE c.ctid = ANY(ARRAY(SELECT o.tid FROM outcome o))
  ), ended AS (
    -- All that goes nowhere else, so that a name which is no outcome meets the table's constraint.
    INSERT INTO tenure.done (id, queue_id, attempt, owner, outcome, reason, result, failures, losses, finished_at)
    SELECT o.id, o.queue_id, o.attempt, me, o.outcome, o.reason, o.result::json, o.failures, o.losses, now
      FROM outcome o WHERE (o.outcome IN ('retry', 'hand-back')) IS NOT TRUE
  ), postponed AS (
    INSERT INTO tenure.delayed (id, due_at, lane_id, rank, seq, attempt, failures, losses, stuck, key)
    SELECT o.id, now + make_interval(secs => o.delay_ms / 1000), o.lane, o.rank, o.seq, o.attempt,
           o.failures + (o.outcome = 'retry')::int, o.losses, o.stuck, o.key
      FROM outcome o WHERE o.outcome IN ('retry', 'hand-back') AND o.delay_ms > 0
  ), returned AS (
    INSERT INTO tenure.ready (lane_id, rank, seq, id, attempt, failures, losses, stuck, key)
    SELECT o.lane, o.rank, o.seq, o.id, o.attempt, o.failures + (o.outcome = 'retry')::int, o.losses,
           o.stuck, o.key
      FROM outcome o WHERE o.outcome IN ('retry', 'hand-back') AND coalesce(o.delay_ms, 0) <= 0
  )
  SELECT array_agg(o.id), array_agg(o.place) INTO settled, places FROM outcome o;
  IF EXISTS (SELECT FROM tenure.item_group g WHERE g.ended_at IS NULL) OR EXISTS (SELECT FROM tenure.invocation) THEN
    PERFORM tenure.items_ended(settled);
  END IF;
  IF EXISTS (SELECT FROM tenure.cancel_request) THEN
    DELETE FROM tenure.cancel_request x
     WHERE x.id = ANY(settled) AND EXISTS (SELECT FROM tenure.done d WHERE d.id = x.id);
  END IF;
  IF cardinality(places) = cardinality(ids) THEN RETURN; END IF;
  -- By place: another attempt of an item that was settled is stale all the same.
  RETURN QUERY
  SELECT u.id, u.attempt, CASE
    WHEN (SELECT true FROM tenure.done d WHERE d.id = u.id AND d.attempt = u.attempt AND d.owner = me LIMIT 1)
    THEN 'already'
    WHEN (SELECT true FROM tenure.claimed c WHERE c.id = u.id AND c.attempt = u.attempt AND c.owner IS NOT DISTINCT FROM me LIMIT 1)
    THEN 'busy'
    ELSE 'stale' END
    FROM unnest(ids, attempts) WITH ORDINALITY u(id, attempt, place)
   WHERE places IS NULL OR u.place <> ALL(places);
END $$;

-- Completes one item, for a transaction that is its handler's: as settle, which answers in its place when
-- there is nothing to complete. A plan of twelve nodes is no price for a thousand items; for one it costs
-- three times as much as these two statements. The executor's row comes before the item's here as well: the
-- fence's trigger fires before a DELETE looks for rows.
CREATE FUNCTION tenure.complete_item(item uuid, item_attempt int, item_result text) RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
  me   uuid := nullif(current_setting('tenure.executor_id', true), '')::uuid;
  held record;
BEGIN
  DELETE FROM tenure.claimed c
   WHERE c.ctid = (SELECT k.ctid FROM tenure.claimed k
                    WHERE k.id = item AND k.attempt = item_attempt AND k.owner IS NOT DISTINCT FROM me
                      FOR UPDATE SKIP LOCKED)
  RETURNING c.queue_id, c.failures, c.losses INTO held;
  IF NOT FOUND THEN
    RETURN coalesce((SELECT s.status FROM tenure.settle(ARRAY[item], ARRAY[item_attempt], NULL, NULL,
                                                        ARRAY[item_result], NULL, NULL) s), 'settled');
  END IF;
  INSERT INTO tenure.done (id, queue_id, attempt, owner, outcome, result, failures, losses, finished_at)
  VALUES (item, held.queue_id, item_attempt, me, 'completed', item_result::json, held.failures, held.losses,
          tenure.clock());
  IF EXISTS (SELECT FROM tenure.item_group g WHERE g.ended_at IS NULL) OR EXISTS (SELECT FROM tenure.invocation) THEN
    PERFORM tenure.items_ended(ARRAY[item]);
  END IF;
  IF EXISTS (SELECT FROM tenure.cancel_request) THEN
    DELETE FROM tenure.cancel_request x WHERE x.id = item;
  END IF;
  RETURN 'settled';
END $$;

-- Stores step results of claimed items. Answers, for those that it has not written: exists (this
-- attempt wrote it before: the earlier answer was lost), stale. FOR KEY SHARE on the claim: a settle
-- or hand-back of the same attempt cannot pass a checkpoint that is being written.
CREATE FUNCTION tenure.checkpoint(ids uuid[], attempts int[], names text[], step_values text[])
RETURNS TABLE (id uuid, name text, status text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
  me  uuid := nullif(current_setting('tenure.executor_id', true), '')::uuid;
  now timestamptz := tenure.clock();
  written int;
BEGIN
  WITH given AS MATERIALIZED (
    SELECT * FROM unnest(ids, attempts, names, step_values) u(id, attempt, name, value)
     ORDER BY u.id, u.name
  ), held AS MATERIALIZED (
    SELECT g.* FROM given g
     CROSS JOIN LATERAL (
       SELECT FROM tenure.claimed c
        WHERE c.id = g.id AND c.attempt = g.attempt AND c.owner IS NOT DISTINCT FROM me FOR KEY SHARE) c
  )
  INSERT INTO tenure.step (item_id, name, attempt, value, written_at)
  SELECT h.id, h.name, h.attempt, h.value::json, now FROM held h
  ON CONFLICT DO NOTHING;
  GET DIAGNOSTICS written = ROW_COUNT;
  IF written = cardinality(ids) THEN RETURN; END IF;
  RETURN QUERY
  SELECT u.id, u.name, CASE
    WHEN (SELECT true FROM tenure.claimed c WHERE c.id = u.id AND c.attempt = u.attempt AND c.owner IS NOT DISTINCT FROM me LIMIT 1)
    THEN 'exists' ELSE 'stale' END
    FROM unnest(ids, attempts, names) u(id, attempt, name)
   WHERE NOT EXISTS (
     SELECT FROM tenure.step s
      WHERE s.item_id = u.id AND s.name = u.name AND s.attempt = u.attempt AND s.written_at = now);
END $$;

-- VOLATILE, for the snapshot is then younger than the locks: retention moves rows on behind a lock on their
-- bucket, and who has waited for that must not find that nothing was written.
CREATE FUNCTION tenure.checkpoints(item uuid) RETURNS TABLE (name text, value json)
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$ SELECT s.name, s.value FROM tenure.step s WHERE s.item_id = item $$;

-- Moves what is due from delayed to ready. Tells how many, for which queues, and in how many
-- milliseconds the next one is due.
CREATE FUNCTION tenure.promote(promoted_max int, OUT promoted int, OUT queue_ids int[], OUT next_due_ms float8)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
  now timestamptz := tenure.clock();
BEGIN
  IF NOT EXISTS (SELECT FROM tenure.delayed d WHERE d.due_at <= now) THEN
    promoted := 0; queue_ids := '{}';
  ELSE
    -- Before any row, as everywhere: whoever revokes this executor holds its row, and deletes its probes.
    PERFORM tenure.admit();
    WITH due AS MATERIALIZED (
      SELECT d.ctid AS tid FROM tenure.delayed d WHERE d.due_at <= now
       ORDER BY d.due_at LIMIT promoted_max FOR UPDATE SKIP LOCKED
    ), removed AS (
      DELETE FROM tenure.delayed d WHERE d.ctid = ANY(ARRAY(SELECT x.tid FROM due x)) RETURNING d.*
    ), moved AS (
      INSERT INTO tenure.ready AS r (lane_id, rank, seq, id, attempt, failures, losses, stuck, key)
      SELECT d.lane_id, d.rank, d.seq, d.id, d.attempt, d.failures, d.losses, d.stuck, d.key FROM removed d
      RETURNING r.lane_id
    )
    SELECT count(*)::int, coalesce(array_agg(DISTINCT l.queue_id), '{}') INTO promoted, queue_ids
      FROM moved m JOIN tenure.lane l ON l.id = m.lane_id;
  END IF;
  SELECT extract(epoch FROM min(d.due_at) - now) * 1000 INTO next_due_ms
    FROM tenure.delayed d WHERE d.due_at > now;
END $$;

-- Where an item is, in one statement and so in one snapshot: read one table after the other, a
-- moving item can be missed in all of them. In PL/pgSQL, because the body of an SQL function is checked
-- when it is made, and some of the places are tables of later files.
CREATE FUNCTION tenure.item_place(item uuid) RETURNS TABLE (place text, owner uuid, outcome text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
  RETURN QUERY
  SELECT 'ready', NULL::uuid, NULL::text
    FROM tenure.item i JOIN tenure.lane l ON l.queue_id = i.queue_id
    JOIN tenure.ready r ON r.lane_id = l.id AND r.rank = -i.priority AND r.seq = i.seq
   WHERE i.id = item
  UNION ALL SELECT 'claimed', c.owner, NULL FROM tenure.claimed c WHERE c.id = item
  UNION ALL SELECT 'leased', c.session, NULL FROM tenure.capacity_lease c WHERE c.item_id = item
  UNION ALL SELECT 'delayed', NULL, NULL FROM tenure.delayed d WHERE d.id = item
  UNION ALL SELECT 'parked', NULL, NULL FROM tenure.parked p WHERE p.id = item
  UNION ALL SELECT 'done', d.owner, d.outcome FROM tenure.done d WHERE d.id = item;
END $$;

-- Ends an item that is waiting. Answers 'ended', 'claimed' (by an executor, or leased by a session),
-- 'unknown', or the outcome it has.
CREATE FUNCTION tenure.end_waiting(item uuid, ended_as text, because text) RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
  at    record;
  ended int;
BEGIN
  -- Between the look and the act the item may move; each turn is one step of its life further.
  FOR turn IN 1..20 LOOP
    SELECT * INTO at FROM tenure.item_place(item);
    IF NOT FOUND THEN RETURN 'unknown'; END IF;
    IF at.place = 'done' THEN RETURN at.outcome; END IF;
    IF at.place IN ('claimed', 'leased') THEN RETURN 'claimed'; END IF;
    IF at.place = 'ready' THEN
      WITH removed AS (
        DELETE FROM tenure.ready r USING tenure.item i, tenure.lane l
         WHERE i.id = item AND l.queue_id = i.queue_id
           AND r.lane_id = l.id AND r.rank = -i.priority AND r.seq = i.seq
        RETURNING r.id, l.queue_id, r.attempt, r.failures, r.losses)
      INSERT INTO tenure.done (id, queue_id, attempt, outcome, reason, failures, losses, finished_at)
      SELECT r.id, r.queue_id, r.attempt, ended_as, because, r.failures, r.losses, tenure.clock() FROM removed r;
      GET DIAGNOSTICS ended = ROW_COUNT;
    ELSIF at.place = 'parked' THEN
      ended := cardinality(tenure.end_parked(ARRAY[item], ended_as, because, true));
    ELSE
      WITH removed AS (
        DELETE FROM tenure.delayed d USING tenure.lane l
         WHERE d.id = item AND l.id = d.lane_id
        RETURNING d.id, l.queue_id, d.attempt, d.failures, d.losses)
      INSERT INTO tenure.done (id, queue_id, attempt, outcome, reason, failures, losses, finished_at)
      SELECT r.id, r.queue_id, r.attempt, ended_as, because, r.failures, r.losses, tenure.clock() FROM removed r;
      GET DIAGNOSTICS ended = ROW_COUNT;
    END IF;
    IF ended = 1 THEN
      PERFORM tenure.items_ended(ARRAY[item]);
      PERFORM tenure.notify_settled(ARRAY[item]);
      RETURN 'ended';
    END IF;
  END LOOP;
  RAISE EXCEPTION 'item % keeps moving', item USING ERRCODE = '40001', HINT = 'Try again.';
END $$;

-- Cancels an item, or asks the owner of a running one. The first terminal commit wins. Answers
-- 'cancelled', 'requested', 'unknown', or the outcome the item has.
CREATE FUNCTION tenure.cancel(item uuid) RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  answer text;
  holder uuid;
BEGIN
  FOR turn IN 1..20 LOOP
    answer := tenure.end_waiting(item, 'cancelled', NULL);
    IF answer = 'ended' THEN
      PERFORM tenure.audit('item.cancelled', item, (SELECT i.queue_id FROM tenure.item i WHERE i.id = item), NULL);
      RETURN 'cancelled';
    END IF;
    IF answer <> 'claimed' THEN RETURN answer; END IF;
    INSERT INTO tenure.cancel_request (id, at) VALUES (item, tenure.clock()) ON CONFLICT DO NOTHING;
    -- Still claimed after the request is in place: whoever holds it, or claims it next, will see it. A
    -- session is told at its next heartbeat, and nobody listens to its channel.
    SELECT p.owner INTO holder FROM tenure.item_place(item) p WHERE p.place IN ('claimed', 'leased');
    IF FOUND THEN
      PERFORM tenure.tell('tenure_' || replace(holder::text, '-', ''), 'cancel');
      PERFORM tenure.audit('item.cancel_requested', item,
        (SELECT i.queue_id FROM tenure.item i WHERE i.id = item), json_build_object('holder', holder));
      RETURN 'requested';
    END IF;
    DELETE FROM tenure.cancel_request x WHERE x.id = item;
  END LOOP;
  RAISE EXCEPTION 'item % keeps moving', item USING ERRCODE = '40001', HINT = 'Try again.';
END $$;

-- Which running items of an executor are to be cancelled.
CREATE FUNCTION tenure.cancel_requests(executor uuid) RETURNS TABLE (id uuid, attempt int)
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
  SELECT c.id, c.attempt FROM tenure.cancel_request x JOIN tenure.claimed c ON c.id = x.id
   WHERE c.owner = executor
$$;

-- The one way back for a failed item: available again, with fresh counters, out of quarantine, and without
-- its dead letter's lease (0016). The attempt goes on counting. A deadline that has passed is lifted: with it
-- the item would end as it did before. `event` says in the audit who asked.
--
-- `lease` is the caller's own, or NULL. Without `patient` nobody waits for a settlement in progress, whose
-- transaction is the application's. Answers 'available'; 'taken' or 'stale' when the dead letter is in another's
-- hands, or not in the caller's any more; 'busy'; 'unknown'; or the state that forbids it.
CREATE FUNCTION tenure.bring_back(item uuid, event text, lease uuid, patient boolean) RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
  now     timestamptz;
  at      record;
  held    uuid;
  removed record;
BEGIN
  -- Before the row: see the lock order.
  PERFORM tenure.admit();
  PERFORM FROM tenure.done d WHERE d.id = item AND d.outcome = 'failed' FOR UPDATE;
  IF NOT FOUND THEN
    SELECT * INTO at FROM tenure.item_place(item);
    RETURN CASE WHEN at.place IS NULL THEN 'unknown' ELSE coalesce(at.outcome, at.place) END;
  END IF;
  -- A statement of its own, after the lock that every taker holds: it sees whoever was first.
  now := tenure.clock();
  SELECT l.lease INTO held FROM tenure.dead_letter_lease l WHERE l.item_id = item AND l.expires_at > now;
  IF held IS DISTINCT FROM lease THEN RETURN CASE WHEN lease IS NULL THEN 'taken' ELSE 'stale' END; END IF;
  IF NOT patient THEN
    PERFORM FROM tenure.quarantine q WHERE q.item_id = item FOR UPDATE SKIP LOCKED;
    IF NOT FOUND AND EXISTS (SELECT FROM tenure.quarantine q WHERE q.item_id = item) THEN RETURN 'busy'; END IF;
  END IF;
  DELETE FROM tenure.quarantine q WHERE q.item_id = item;
  DELETE FROM tenure.done d WHERE d.id = item AND d.outcome = 'failed'
  RETURNING d.queue_id, d.attempt, d.outcome, d.reason, d.failures, d.losses INTO removed;
  DELETE FROM tenure.dead_letter_lease l WHERE l.item_id = item;
  PERFORM tenure.items_returned(ARRAY[item], 'failed');
  -- A request that came too late for the failed run must not end the next one.
  DELETE FROM tenure.cancel_request x WHERE x.id = item;
  UPDATE tenure.item i SET deadline_at = NULL WHERE i.id = item AND i.deadline_at <= now;
  IF FOUND THEN DELETE FROM tenure.deadline d WHERE d.id = item; END IF;
  INSERT INTO tenure.ready (lane_id, rank, seq, id, attempt, failures, losses, stuck, key)
  SELECT tenure.lane_id(removed.queue_id, NULL, false), -i.priority, i.seq, i.id, removed.attempt, 0, 0, 0, i.key
    FROM tenure.item i WHERE i.id = item;
  PERFORM tenure.audit(event, item, removed.queue_id, json_build_object(
    'attempt', removed.attempt, 'reason', coalesce(removed.reason, 'DeclaredError'),
    'failures', removed.failures, 'losses', removed.losses));
  PERFORM tenure.tell('tenure_work', removed.queue_id::text);
  RETURN 'available';
END $$;

-- An operator's: see bring_back. Waits for a settlement in progress, and for another operator.
CREATE FUNCTION tenure.retry(item uuid) RETURNS text
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$ SELECT tenure.bring_back(item, 'item.retried', NULL, true) $$;

-- Ends waiting items whose deadline has passed, and those of pull sessions (0013), which nobody here can
-- stop. Running ones are their owner's: it has the same deadline on its own clock, and if it dies the
-- next sweep finds them waiting.
-- Whoever waits for the ids is told again by the caller, after the commit: see await_items.
CREATE FUNCTION tenure.expire_deadlines(expired_max int, OUT expired int, OUT next_due_ms float8, OUT ids uuid[])
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
  now   timestamptz := tenure.clock();
  seen  uuid[];
  ended uuid[];
BEGIN
  -- Skipping everywhere: a user's transaction that has cancelled one of these items may go on to wait
  -- for another of them.
  --
  -- A statement of its own, because these rows are updated: PostgreSQL 18 (18.4, seen in a core) reads
  -- freed memory when it looks again at a row that was updated meanwhile, in a statement that also
  -- chooses partitions while it runs, as the one below does for `item` and `done`. The rows it locks
  -- are never updated, only inserted and deleted.
  seen := ARRAY(
    SELECT d.id FROM tenure.deadline d WHERE d.due_at <= now
     ORDER BY d.due_at LIMIT expired_max FOR UPDATE SKIP LOCKED);
  -- Nothing is written while nothing is due: even an empty INSERT goes through the fence, whose lock on
  -- the executor's row makes a transaction of it, every second in every idle process.
  IF seen <> '{}' THEN
    WITH late AS MATERIALIZED (
      SELECT u.id FROM unnest(seen) u(id)
    ), available AS MATERIALIZED (
      SELECT x.* FROM late
       CROSS JOIN LATERAL (
         SELECT r.ctid AS tid, r.id, l.queue_id, r.attempt, r.failures, r.losses
           FROM tenure.item i JOIN tenure.lane l ON l.queue_id = i.queue_id
           JOIN tenure.ready r ON r.lane_id = l.id AND r.rank = -i.priority AND r.seq = i.seq
          WHERE i.id = late.id FOR UPDATE OF r SKIP LOCKED) x
    ), waiting AS MATERIALIZED (
      SELECT x.* FROM late
       CROSS JOIN LATERAL (
         SELECT d.ctid AS tid, d.id, l.queue_id, d.attempt, d.failures, d.losses
           FROM tenure.delayed d JOIN tenure.lane l ON l.id = d.lane_id
          WHERE d.id = late.id FOR UPDATE OF d SKIP LOCKED) x
    ), removed_available AS (
      DELETE FROM tenure.ready r WHERE r.ctid = ANY(ARRAY(SELECT a.tid FROM available a))
    ), removed_waiting AS (
      DELETE FROM tenure.delayed d WHERE d.ctid = ANY(ARRAY(SELECT w.tid FROM waiting w))
    ), inserted AS (
      INSERT INTO tenure.done AS d (id, queue_id, attempt, outcome, reason, failures, losses, finished_at)
      SELECT x.id, x.queue_id, x.attempt, 'failed', 'DeadlineExceeded', x.failures, x.losses, now
        FROM (SELECT * FROM available UNION ALL SELECT * FROM waiting) x
      RETURNING d.id
    )
    SELECT coalesce(array_agg(i.id), '{}') INTO ended FROM inserted i;
    ended := ended || tenure.end_parked(seen, 'failed', 'DeadlineExceeded', false)
                   || tenure.end_late_leases(seen, now);
    PERFORM tenure.items_ended(ended);
    DELETE FROM tenure.deadline d
     WHERE d.id = ANY(seen)
       AND ((SELECT true FROM tenure.done x WHERE x.id = d.id LIMIT 1)
            OR (SELECT true FROM tenure.item i WHERE i.id = d.id LIMIT 1) IS NULL);
    UPDATE tenure.deadline d SET due_at = now + interval '5 seconds' WHERE d.id = ANY(seen);
  END IF;
  expired := coalesce(cardinality(ended), 0);
  ids := coalesce(ended, '{}');
  SELECT extract(epoch FROM min(d.due_at) - now) * 1000 INTO next_due_ms
    FROM tenure.deadline d WHERE d.due_at > now;
END $$;

-- What an executor does every second, in one statement: moves what is due, ends what is late, takes what
-- has waited long enough (its caller dispatches it, in a transaction of its own), and asks which of its running items are to be cancelled, and which of `lanes` have something waiting.
-- That something may be held back by a limit: a claim decides.
CREATE FUNCTION tenure.look(
  executor uuid, rows_max int, lanes int[],
  OUT promoted int, OUT promoted_queues int[], OUT expired int, OUT expired_ids uuid[],
  OUT next_due_ms float8, OUT cancel_ids uuid[], OUT cancel_attempts int[], OUT waiting_lanes int[],
  OUT woken_ids uuid[]
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
  due   record;
  late  record;
  waits record;
BEGIN
  SELECT * INTO due FROM tenure.promote(rows_max);
  SELECT * INTO late FROM tenure.expire_deadlines(rows_max);
  promoted := due.promoted; promoted_queues := due.queue_ids;
  expired := late.expired; expired_ids := late.ids;
  SELECT * INTO waits FROM tenure.claim_waits(executor, rows_max);
  woken_ids := waits.ids;
  next_due_ms := least(due.next_due_ms, late.next_due_ms, waits.next_due_ms);
  SELECT coalesce(array_agg(r.id), '{}'), coalesce(array_agg(r.attempt), '{}')
    INTO cancel_ids, cancel_attempts FROM tenure.cancel_requests(executor) r;
  waiting_lanes := ARRAY(
    SELECT l.lane FROM unnest(lanes) l(lane)
     WHERE (SELECT true FROM tenure.ready r WHERE r.lane_id = l.lane LIMIT 1));
END $$;

-- The outcome of an item, or of a group (0011), for whoever waits for it; no row for an unknown one.
CREATE FUNCTION tenure.item_outcome(items uuid[])
RETURNS TABLE (id uuid, settled boolean, outcome text, reason text, result json, attempt int, losses smallint)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
  RETURN QUERY
  SELECT i.id, d.id IS NOT NULL, d.outcome, d.reason, d.result, d.attempt, d.losses
    FROM unnest(items) u(id)
   CROSS JOIN LATERAL (SELECT x.id FROM tenure.item x WHERE x.id = u.id OFFSET 0) i
    LEFT JOIN LATERAL (SELECT * FROM tenure.done x WHERE x.id = u.id OFFSET 0) d ON true;
  IF EXISTS (SELECT FROM tenure.item_group) THEN
    RETURN QUERY
    SELECT g.id, g.ended_at IS NOT NULL, CASE WHEN g.ended_at IS NOT NULL THEN 'completed' END, NULL::text,
           tenure.group_counts(g), 0, 0::smallint
      FROM tenure.item_group g WHERE g.id = ANY(items);
  END IF;
END $$;

-- A waiter registers, commits, then reads the outcome; whoever settles commits, then reads the
-- waiters. So one of the two sees the other.
--
-- A group's end is told in its own transaction, by nobody after it: so whoever waits for one holds its
-- row until he has registered.
CREATE FUNCTION tenure.await_items(items uuid[], channel text) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
  IF EXISTS (SELECT FROM tenure.item_group g WHERE g.ended_at IS NULL) THEN
    PERFORM FROM tenure.item_group g WHERE g.id = ANY(items) ORDER BY g.id FOR KEY SHARE;
  END IF;
  INSERT INTO tenure.waiter (item_id, channel) SELECT DISTINCT u.id, await_items.channel FROM unnest(items) u(id)
  ON CONFLICT DO NOTHING;
END $$;

CREATE FUNCTION tenure.forget_items(items uuid[], waiter_channel text) RETURNS void
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$ DELETE FROM tenure.waiter w WHERE w.item_id = ANY(items) AND w.channel = waiter_channel $$;

-- A notification inside a transaction that matters. When the server's queue of them is full, because some
-- session listens and has been in a transaction for days, the commit that notifies fails: then nobody is
-- told, and who waits finds out by looking.
CREATE FUNCTION tenure.tell(channel text, payload text) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
  IF pg_notification_queue_usage() < 0.9 THEN PERFORM pg_notify(channel, payload); END IF;
END $$;

CREATE FUNCTION tenure.notify_settled(items uuid[]) RETURNS int
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
  told int;
BEGIN
  IF NOT EXISTS (SELECT FROM tenure.waiter) THEN RETURN 0; END IF;
  WITH gone AS (
    DELETE FROM tenure.waiter w WHERE w.item_id = ANY(items) RETURNING w.item_id, w.channel)
  SELECT count(tenure.tell(g.channel, g.item_id::text)) INTO told FROM gone g;
  RETURN told;
END $$;

-- Claims of an executor older than `older_than`, for its audit: the process gives back those that it
-- does not know, because the answer to the claim's COMMIT was lost.
CREATE FUNCTION tenure.claims_of(executor uuid, older_than interval, claims_max int)
RETURNS TABLE (id uuid, attempt int, lane_id int)
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
  SELECT c.id, c.attempt, c.lane_id FROM tenure.claimed c
   WHERE c.queue_id = ANY(ARRAY(SELECT q.id FROM tenure.queue q)) AND c.owner = executor
     AND c.claimed_at < (SELECT tenure.clock()) - older_than
   ORDER BY c.claimed_at LIMIT claims_max
$$;

INSERT INTO tenure.migration (number, name) VALUES (4, 'queue');
