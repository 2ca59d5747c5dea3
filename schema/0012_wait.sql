-- Durable waits: an item whose handler waits gives its slot back, and is handed out again when a wait
-- is over. And loop 2: what is left between two steps of a wake is put back.
--
--   claimed --park--> sleeping | waiting --due, claim_waits--> waking --dispatch_waits--> ready
--                         ^       |                               |
--                         |       +------ cancel, deadline -------+--> done
--                         |                                       |
--                         +-- sweep: stale, and in no other place +
--
-- `sleeping`: every wait of the item is a sleep. `waiting`: it waits for an event, or for an item that
-- it has handed in. Both end by a due time, and what happens earlier makes that time now.
--
-- W1. A wait is over when the clock has passed its due time, or when its event is there, and never
--     before. The first due time stays, whatever runs the handler again (I13).
-- W2. How a wait ended is a checkpoint: decided once, by the attempt that asks, and replayed (I6).
-- W3. No wake is lost. Whoever has something to tell writes it down and then a row of `wake`, in one
--     transaction; whoever parks looks for what was told. What neither has seen of the other, because
--     both were on their way, is found by the loop that reads `wake`.
-- W4. A row of `waking` has left the domain of the wake loop, and is in that of the sweep and of no
--     other: what is ready, claimed or delayed is not in this table, and the sweep's own statement says
--     so once more. No threshold makes one loop take what is the other's (I8).
--
-- Rows of `parked` and `wake` are updated, so that they are locked in statements of their own: see the
-- trap in README.md.
--
-- Locks: none that another session can wait for.
-- Overlap: older code neither parks nor wakes. While it is the only one that runs, parked items stay;
-- it cancels none of them, and does not end them at their deadline.

-- `names` are the waits that it has parked for. A row has no owner: executors come and go meanwhile. Its
-- losses are forgotten, because the limit guards one stretch of running.
CREATE TABLE tenure.parked (
  id               uuid        NOT NULL PRIMARY KEY,
  state            text        NOT NULL
    CONSTRAINT parked_state CHECK (state IN ('sleeping', 'waiting', 'waking')),
  names            text[]      NOT NULL,
  -- Null: only something that is told ends it.
  due_at           timestamptz,
  parked_at        timestamptz NOT NULL,
  lane_id          int         NOT NULL,
  rank             int         NOT NULL,
  seq              bigint      NOT NULL,
  attempt          int         NOT NULL,
  failures         int         NOT NULL,
  key              text,
  pre_claim_status text
    CONSTRAINT parked_pre_claim_status CHECK (pre_claim_status IN ('sleeping', 'waiting')),
  claimed_by       uuid,
  claimed_at       timestamptz,
  CONSTRAINT waking_iff_claimed CHECK (
    num_nonnulls(pre_claim_status, claimed_by, claimed_at) = CASE state WHEN 'waking' THEN 3 ELSE 0 END)
) WITH (
  autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0
);
CREATE INDEX parked_for_waking ON tenure.parked (due_at) WHERE state <> 'waking';
CREATE INDEX parked_for_sweep ON tenure.parked (claimed_at) WHERE state = 'waking';

-- Waits that have begun and are not over. Those that a handler has given up go with their item's bucket.
CREATE TABLE tenure.wait (
  item_id  uuid NOT NULL,
  name     text NOT NULL,
  kind     text NOT NULL CONSTRAINT wait_kind CHECK (kind IN ('sleep', 'event', 'invoke')),
  due_at   timestamptz,
  -- Of `invoke`: what was handed in.
  child_id uuid,
  PRIMARY KEY (item_id, name),
  CONSTRAINT invoked_iff_child_present CHECK ((kind = 'invoke') = (child_id IS NOT NULL))
);

-- What was told and no wait has taken yet: an event, which may come before its wait begins, or the
-- outcome of an invoked item. The first one of a name stays.
CREATE TABLE tenure.signal (
  item_id uuid        NOT NULL,
  kind    text        NOT NULL CONSTRAINT signal_kind CHECK (kind IN ('event', 'invoke')),
  name    text        NOT NULL,
  value   json        NOT NULL,
  sent_at timestamptz NOT NULL,
  PRIMARY KEY (item_id, kind, name)
);

-- Appended by whoever tells, deleted by the wake loop. Several rows for one item, because a single one
-- that somebody is just deleting would swallow the next wake.
CREATE TABLE tenure.wake (
  seq     bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  item_id uuid        NOT NULL,
  name    text        NOT NULL,
  look_at timestamptz NOT NULL,
  looks   smallint    NOT NULL DEFAULT 0
) WITH (
  autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0
);
CREATE INDEX wake_for_look ON tenure.wake (look_at);

-- Invoked items that have not ended, and who waits for them.
CREATE TABLE tenure.invocation (
  child_id uuid NOT NULL PRIMARY KEY,
  item_id  uuid NOT NULL,
  name     text NOT NULL
);

SELECT tenure.fence_table(t::regclass)
  FROM unnest(ARRAY['tenure.parked', 'tenure.wait', 'tenure.signal', 'tenure.wake', 'tenure.invocation']) t;

-- Begins waits of claimed items, and asks whether they are over; both in one, since an attempt that
-- replays does not know which. Each names its attempt. Answers, by place:
--   over     `value` is how it ended, and is stored
--   pending  the time left is `due_in_ms`, or null without one
--   stale    the attempt is over
--   unknown  an `invoke` whose item was not handed in yet: see invoke
CREATE FUNCTION tenure.ask_waits(ids uuid[], attempts int[], wait_names text[], kinds text[], durations_ms float8[])
RETURNS TABLE (place int, status text, value json, due_in_ms float8)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
  me    uuid := nullif(current_setting('tenure.executor_id', true), '')::uuid;
  now   timestamptz;
  asked record;
  known record;
  told  json;
BEGIN
  PERFORM tenure.admit();
  now := tenure.clock();
  FOR asked IN
    SELECT u.* FROM unnest(ids, attempts, wait_names, kinds, durations_ms) WITH ORDINALITY
           u(id, attempt, name, kind, duration_ms, place)
     ORDER BY u.id, u.place
  LOOP
    place := asked.place; value := NULL; due_in_ms := NULL;
    -- As a checkpoint does: the end of the attempt cannot pass what is decided here.
    PERFORM FROM tenure.claimed c
      WHERE c.id = asked.id AND c.attempt = asked.attempt AND c.owner IS NOT DISTINCT FROM me FOR KEY SHARE;
    IF NOT FOUND THEN
      status := 'stale';
      RETURN NEXT;
      CONTINUE;
    END IF;
    SELECT s.value INTO value FROM tenure.step s WHERE s.item_id = asked.id AND s.name = asked.name;
    IF FOUND THEN
      status := 'over';
      RETURN NEXT;
      CONTINUE;
    END IF;
    IF asked.kind <> 'invoke' THEN
      INSERT INTO tenure.wait (item_id, name, kind, due_at)
      VALUES (asked.id, asked.name, asked.kind, now + make_interval(secs => asked.duration_ms / 1000))
      ON CONFLICT DO NOTHING;
    END IF;
    SELECT w.kind, w.due_at, w.child_id INTO known FROM tenure.wait w
     WHERE w.item_id = asked.id AND w.name = asked.name;
    IF NOT FOUND THEN
      status := 'unknown';
      RETURN NEXT;
      CONTINUE;
    END IF;
    SELECT s.value INTO told FROM tenure.signal s
     WHERE s.item_id = asked.id AND s.kind = known.kind AND s.name = asked.name;
    -- What was told counts although the time is over: nobody has decided before.
    IF FOUND THEN
      value := json_build_object('value', told);
    ELSIF known.due_at <= now THEN
      value := CASE known.kind WHEN 'sleep' THEN 'null'::json
                    WHEN 'event' THEN '{"timedOut": true}'::json
                    ELSE json_build_object('timedOut', true, 'invoked', known.child_id) END;
    ELSE
      status := 'pending';
      due_in_ms := extract(epoch FROM known.due_at - now) * 1000;
      RETURN NEXT;
      CONTINUE;
    END IF;
    INSERT INTO tenure.step (item_id, name, attempt, value, written_at)
    VALUES (asked.id, asked.name, asked.attempt, ask_waits.value, now);
    DELETE FROM tenure.wait w WHERE w.item_id = asked.id AND w.name = asked.name;
    DELETE FROM tenure.signal s WHERE s.item_id = asked.id AND s.kind = known.kind AND s.name = asked.name;
    IF known.child_id IS NOT NULL THEN
      DELETE FROM tenure.invocation v WHERE v.child_id = known.child_id;
    END IF;
    status := 'over';
    RETURN NEXT;
  END LOOP;
END $$;

-- Hands in an item of another queue for a claimed one to wait for, once for each name: its row of
-- `wait` is written with it, so that it cannot end before there is somebody to tell. Answers 'begun',
-- or 'stale' for an attempt that is over.
CREATE FUNCTION tenure.invoke(
  item uuid, item_attempt int, wait_name text, duration_ms float8,
  queue_name text, payload text, priority int, item_key text, trace_context text,
  OUT status text, OUT queue_id int
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
  me    uuid := nullif(current_setting('tenure.executor_id', true), '')::uuid;
  child record;
BEGIN
  PERFORM tenure.admit();
  PERFORM FROM tenure.claimed c
    WHERE c.id = item AND c.attempt = item_attempt AND c.owner IS NOT DISTINCT FROM me FOR KEY SHARE;
  IF NOT FOUND THEN
    status := 'stale';
    RETURN;
  END IF;
  status := 'begun';
  IF EXISTS (SELECT FROM tenure.wait w WHERE w.item_id = item AND w.name = wait_name)
     OR EXISTS (SELECT FROM tenure.step s WHERE s.item_id = item AND s.name = wait_name) THEN
    RETURN;
  END IF;
  SELECT e.ids[1] AS id, e.queue_id INTO child
    FROM tenure.enqueue_all(queue_name => queue_name, payloads => ARRAY[payload], priorities => ARRAY[priority],
           keys => ARRAY[item_key], traces => ARRAY[trace_context]) e;
  queue_id := child.queue_id;
  INSERT INTO tenure.wait (item_id, name, kind, due_at, child_id)
  VALUES (item, wait_name, 'invoke', tenure.clock() + make_interval(secs => duration_ms / 1000), child.id);
  INSERT INTO tenure.invocation (child_id, item_id, name) VALUES (child.id, item, wait_name);
END $$;

-- Ends attempts by parking their items for the waits that each names, as a JSON array. Not a failure and
-- not a loss; the count of losses begins anew. Returns only what is not simply parked:
--   due    something it waits for is there already: look at once
--   busy   somebody holds the row for a moment: try this one again
--   stale  the attempt is over
CREATE FUNCTION tenure.park(ids uuid[], attempts int[], lanes int[], wait_names text[])
RETURNS TABLE (id uuid, attempt int, status text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
  me   uuid := nullif(current_setting('tenure.executor_id', true), '')::uuid;
  now  timestamptz;
  done uuid[];
  due  uuid[];
BEGIN
  PERFORM tenure.admit();
  now := tenure.clock();
  WITH given AS MATERIALIZED (
    SELECT u.id, u.attempt, u.lane, ARRAY(SELECT json_array_elements_text(u.names::json)) AS names
      FROM unnest(ids, attempts, lanes, wait_names) u(id, attempt, lane, names)
     ORDER BY u.id
  ), held AS MATERIALIZED (
    SELECT c.*, g.lane, g.names FROM given g
     CROSS JOIN LATERAL (
       SELECT k.ctid AS tid, k.id, k.attempt, k.rank, k.seq, k.failures, k.key
         FROM tenure.claimed k
        WHERE k.id = g.id AND k.attempt = g.attempt AND k.owner IS NOT DISTINCT FROM me
          FOR UPDATE SKIP LOCKED) c
  ), judged AS MATERIALIZED (
    -- A wait that is over (told, or not even there any more) makes it due; else the first of its times.
    SELECT h.*,
           CASE WHEN (SELECT count(*) FROM unnest(h.names) n(name)
                       WHERE (SELECT true FROM tenure.wait w WHERE w.item_id = h.id AND w.name = n.name LIMIT 1))
                     < cardinality(h.names)
                  OR (SELECT true FROM tenure.signal s
                       WHERE s.item_id = h.id AND s.name = ANY(h.names) LIMIT 1)
                THEN now
                ELSE (SELECT min(w.due_at) FROM tenure.wait w WHERE w.item_id = h.id AND w.name = ANY(h.names))
           END AS due_at,
           (SELECT bool_and(w.kind = 'sleep') FROM tenure.wait w
             WHERE w.item_id = h.id AND w.name = ANY(h.names)) IS TRUE AS sleeps
      FROM held h
  ), removed AS (
    DELETE FROM tenure.claimed c WHERE c.ctid = ANY(ARRAY(SELECT h.tid FROM held h))
  ), inserted AS (
    INSERT INTO tenure.parked (id, state, names, due_at, parked_at, lane_id, rank, seq, attempt, failures, key)
    SELECT j.id, CASE WHEN j.sleeps THEN 'sleeping' ELSE 'waiting' END, j.names, j.due_at, now, j.lane, j.rank,
           j.seq, j.attempt, j.failures, j.key
      FROM judged j
  )
  SELECT array_agg(j.id), array_agg(j.id) FILTER (WHERE j.due_at <= now) INTO done, due FROM judged j;
  RETURN QUERY
  SELECT u.id, u.attempt, CASE
    WHEN u.id = ANY(due) THEN 'due'
    WHEN (SELECT true FROM tenure.claimed c WHERE c.id = u.id AND c.attempt = u.attempt AND c.owner IS NOT DISTINCT FROM me LIMIT 1)
    THEN 'busy'
    ELSE 'stale' END
    FROM unnest(ids, attempts) u(id, attempt)
   WHERE done IS NULL OR u.id <> ALL(done) OR u.id = ANY(due);
END $$;

-- An event for an item, from anybody, in the transaction of the caller. It is kept until the item waits
-- for it, and the first one of a name stays. Answers 'sent'; 'already' when that name was told, or
-- waited for in vain, before; 'unknown'; or the outcome of an item that has ended.
--
-- The second one of a name waits for the first one's transaction, as with any unique key.
CREATE FUNCTION tenure.signal(item uuid, event_name text, event_value json DEFAULT 'null') RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
  at record;
BEGIN
  SELECT * INTO at FROM tenure.item_place(item);
  IF NOT FOUND THEN RETURN 'unknown'; END IF;
  IF at.place = 'done' THEN RETURN at.outcome; END IF;
  IF EXISTS (SELECT FROM tenure.step s WHERE s.item_id = item AND s.name = event_name) THEN RETURN 'already'; END IF;
  INSERT INTO tenure.signal (item_id, kind, name, value, sent_at)
  VALUES (item, 'event', event_name, event_value, tenure.clock())
  ON CONFLICT DO NOTHING;
  IF NOT FOUND THEN RETURN 'already'; END IF;
  -- Not the parked row itself: it may be there only when this transaction, which is the caller's,
  -- commits, and nobody may wait for that.
  INSERT INTO tenure.wake (item_id, name, look_at) VALUES (item, event_name, tenure.clock());
  RETURN 'sent';
END $$;

-- Called wherever items end, in the same transaction and after the outcome is written: tells those that
-- have invoked them. What is in `items` and has not ended is left alone.
CREATE FUNCTION tenure.end_invocations(items uuid[]) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
  now  timestamptz := tenure.clock();
  told int;
BEGIN
  WITH ended AS MATERIALIZED (
    SELECT v.child_id, v.item_id, v.name,
           json_build_object('id', d.id, 'outcome', d.outcome, 'reason', d.reason, 'result', d.result,
                             'losses', d.losses) AS value
      FROM unnest(items) u(id)
     CROSS JOIN LATERAL (SELECT x.* FROM tenure.invocation x WHERE x.child_id = u.id OFFSET 0) v
     CROSS JOIN LATERAL (SELECT x.* FROM tenure.done x WHERE x.id = u.id OFFSET 0) d
  ), removed AS (
    DELETE FROM tenure.invocation v WHERE v.child_id = ANY(ARRAY(SELECT e.child_id FROM ended e))
  ), living AS MATERIALIZED (
    SELECT e.* FROM ended e
     WHERE (SELECT true FROM tenure.item i WHERE i.id = e.item_id LIMIT 1)
       AND (SELECT true FROM tenure.done d WHERE d.id = e.item_id LIMIT 1) IS NULL
  ), told AS (
    INSERT INTO tenure.signal (item_id, kind, name, value, sent_at)
    SELECT l.item_id, 'invoke', l.name, l.value, now FROM living l
    ON CONFLICT DO NOTHING
  )
  INSERT INTO tenure.wake (item_id, name, look_at) SELECT l.item_id, l.name, now FROM living l;
  GET DIAGNOSTICS told = ROW_COUNT;
  -- Any executor may wake any item; whoever listens looks after the commit.
  IF told > 0 THEN PERFORM tenure.tell('tenure_work', 'wake'); END IF;
END $$;

-- Ends parked items, for end_waiting and expire_deadlines. Skips what somebody else holds unless `waits`.
-- Answers those that have ended.
CREATE FUNCTION tenure.end_parked(items uuid[], ended_as text, because text, waits boolean) RETURNS uuid[]
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
  mine uuid[];
BEGIN
  -- Statements of their own: see the trap in README.md.
  IF waits THEN
    mine := ARRAY(SELECT p.id FROM tenure.parked p WHERE p.id = ANY(items) ORDER BY p.id FOR UPDATE);
  ELSE
    mine := ARRAY(SELECT p.id FROM tenure.parked p WHERE p.id = ANY(items) ORDER BY p.id FOR UPDATE SKIP LOCKED);
  END IF;
  IF mine = '{}' THEN RETURN mine; END IF;
  INSERT INTO tenure.done (id, queue_id, attempt, outcome, reason, failures, losses, finished_at)
  SELECT p.id, l.queue_id, p.attempt, ended_as, because, p.failures, 0, tenure.clock()
    FROM tenure.parked p JOIN tenure.lane l ON l.id = p.lane_id WHERE p.id = ANY(mine);
  DELETE FROM tenure.parked p WHERE p.id = ANY(mine);
  DELETE FROM tenure.wait w WHERE w.item_id = ANY(mine);
  DELETE FROM tenure.signal s WHERE s.item_id = ANY(mine);
  RETURN mine;
END $$;

-- First step of a wake: takes what is due for this executor, which dispatches it in a transaction of its
-- own. Before that it reads what was told. Tells also in how many milliseconds there is something to do.
-- Writes nothing while nothing is due.
CREATE FUNCTION tenure.claim_waits(executor uuid, waits_max int, OUT ids uuid[], OUT next_due_ms float8)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
  now  timestamptz := tenure.clock();
  told bigint[];
  hit  uuid[];
BEGIN
  ids := '{}';
  IF EXISTS (SELECT FROM tenure.wake w WHERE w.look_at <= now) THEN
    -- Before any row: see the lock order.
    PERFORM tenure.admit();
    told := ARRAY(
      SELECT w.seq FROM tenure.wake w WHERE w.look_at <= now
       ORDER BY w.look_at LIMIT waits_max FOR UPDATE SKIP LOCKED);
    hit := ARRAY(
      SELECT p.id FROM tenure.parked p
       WHERE p.id = ANY(ARRAY(SELECT DISTINCT w.item_id FROM tenure.wake w WHERE w.seq = ANY(told)))
         AND p.state <> 'waking'
         AND (SELECT true FROM tenure.wake w
               WHERE w.seq = ANY(told) AND w.item_id = p.id AND w.name = ANY(p.names) LIMIT 1)
       ORDER BY p.id FOR UPDATE SKIP LOCKED);
    UPDATE tenure.parked p SET due_at = now WHERE p.id = ANY(hit) AND (p.due_at IS NULL OR p.due_at > now);
    -- An item that is claimed may be on its way to park, with a look at what was told that is older than
    -- this; one that somebody has locked was not seen. Look again. Any other will ask before it parks,
    -- and then sees what was told. After a minute such a statement is certainly over.
    UPDATE tenure.wake w
       SET looks = w.looks + 1,
           look_at = now + CASE WHEN w.looks < 3 THEN interval '1 second' ELSE interval '1 minute' END
     WHERE w.seq = ANY(told) AND w.looks < 4 AND w.item_id <> ALL(hit)
       AND ((SELECT true FROM tenure.claimed c WHERE c.id = w.item_id LIMIT 1)
            OR (SELECT true FROM tenure.parked p
                 WHERE p.id = w.item_id AND p.state <> 'waking' AND w.name = ANY(p.names) LIMIT 1));
    DELETE FROM tenure.wake w WHERE w.seq = ANY(told) AND w.look_at <= now;
  END IF;
  -- A request that came while its item was parking: the next claim obeys it.
  IF EXISTS (SELECT FROM tenure.cancel_request) THEN
    hit := ARRAY(
      SELECT x.id FROM tenure.cancel_request x
       WHERE (SELECT true FROM tenure.parked p
               WHERE p.id = x.id AND p.state <> 'waking' AND (p.due_at > now) IS NOT FALSE LIMIT 1)
       LIMIT waits_max);
    IF hit <> '{}' THEN
      PERFORM tenure.admit();
      hit := ARRAY(
        SELECT p.id FROM tenure.parked p
         WHERE p.id = ANY(hit) AND p.state <> 'waking' ORDER BY p.id FOR UPDATE SKIP LOCKED);
      UPDATE tenure.parked p SET due_at = now WHERE p.id = ANY(hit);
    END IF;
  END IF;
  IF EXISTS (SELECT FROM tenure.parked p WHERE p.state <> 'waking' AND p.due_at <= now) THEN
    PERFORM tenure.admit();
    ids := ARRAY(
      SELECT p.id FROM tenure.parked p WHERE p.state <> 'waking' AND p.due_at <= now
       ORDER BY p.due_at LIMIT waits_max FOR UPDATE SKIP LOCKED);
    -- The due time stays, and has passed: a sweep that puts the row back leaves it to the next look.
    UPDATE tenure.parked p
       SET state = 'waking', pre_claim_status = p.state, claimed_by = executor, claimed_at = now
     WHERE p.id = ANY(ids);
  END IF;
  SELECT extract(epoch FROM least(
           (SELECT min(p.due_at) FROM tenure.parked p WHERE p.state <> 'waking' AND p.due_at > now),
           (SELECT min(w.look_at) FROM tenure.wake w WHERE w.look_at > now)) - now) * 1000
    INTO next_due_ms;
END $$;

-- Second step: what this executor has taken becomes available, in the place it had. What was swept,
-- cancelled or dispatched before is not there any more, so that a repeated or late call does nothing.
CREATE FUNCTION tenure.dispatch_waits(executor uuid, items uuid[], OUT dispatched int, OUT queue_ids int[])
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
  mine uuid[];
BEGIN
  PERFORM tenure.admit();
  mine := ARRAY(
    SELECT p.id FROM tenure.parked p
     WHERE p.id = ANY(items) AND p.state = 'waking' AND p.claimed_by = executor
     ORDER BY p.id FOR UPDATE SKIP LOCKED);
  WITH removed AS (
    DELETE FROM tenure.parked p WHERE p.id = ANY(mine) RETURNING p.*
  ), moved AS (
    INSERT INTO tenure.ready AS r (lane_id, rank, seq, id, attempt, failures, losses, stuck, key)
    SELECT p.lane_id, p.rank, p.seq, p.id, p.attempt, p.failures, 0, 0, p.key FROM removed p
    RETURNING r.lane_id
  )
  SELECT count(*)::int, coalesce(array_agg(DISTINCT l.queue_id), '{}') INTO dispatched, queue_ids
    FROM moved m JOIN tenure.lane l ON l.id = m.lane_id;
END $$;

-- Whether loop 1 has an item: it is available, claimed or delayed, and so has an owner, a lease or a due
-- time of its own.
CREATE FUNCTION tenure.capacity_owns(item uuid) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
  RETURN EXISTS (SELECT FROM tenure.item_place(item) p WHERE p.place IN ('ready', 'claimed', 'delayed'));
END $$;

-- Loop 2: puts back what was taken longer than `threshold` ago and not dispatched, because whoever took
-- it died in between. It is due, so that the next look takes it. Safe on every executor at once.
CREATE FUNCTION tenure.sweep_stale_claims(threshold interval, swept_max int) RETURNS int
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
  now   timestamptz := tenure.clock();
  stale uuid[];
  swept int;
BEGIN
  IF NOT EXISTS (SELECT FROM tenure.parked p WHERE p.state = 'waking' AND p.claimed_at <= now - threshold) THEN
    RETURN 0;
  END IF;
  PERFORM tenure.admit();
  stale := ARRAY(
    SELECT p.id FROM tenure.parked p WHERE p.state = 'waking' AND p.claimed_at <= now - threshold
     ORDER BY p.claimed_at LIMIT swept_max FOR UPDATE SKIP LOCKED);
  UPDATE tenure.parked p
     SET state = p.pre_claim_status, pre_claim_status = NULL, claimed_by = NULL, claimed_at = NULL
   WHERE p.id = ANY(stale) AND NOT EXISTS (SELECT FROM tenure.capacity_owns(p.id) owns WHERE owns);
  GET DIAGNOSTICS swept = ROW_COUNT;
  RETURN swept;
END $$;

SELECT tenure.grant_roles();

INSERT INTO tenure.migration (number, name) VALUES (12, 'wait');
