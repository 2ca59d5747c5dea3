-- Schedules: items that are enqueued at set times. What a schedule is belongs to the code; a row holds
-- how far it has come, whether it is paused, and which definition is in force.
--
--   (no row) --register--> active --pause--> paused --resume--> active
--                            |                 `- slots that pass meanwhile are not made up
--                            `--no slot is left--> finished (next_at is null)
--
--   active or paused, and no live executor has its code: an orphan, until one has it again or a person
--   removes it.
--
-- S1. A slot is fired once: the items are enqueued in the transaction that moves `next_at` past their
--     slots, under the row's lock, and `next_at` is always later than the last slot fired. So neither two
--     executors, nor a lost answer to a COMMIT, nor a clock set back, nor the end of the retention of
--     idempotency keys fires one again.
-- S2. One definition is in force, the one registered last; an executor with another fires nothing. It
--     takes the schedule over when no live executor has the definition in force any more.
-- S3. No slot is fired before tenure.clock() has reached it, whatever a process believes.
--
-- The slots' keys are in `item_key` under queue 0, which no queue has, so that no key of a user's is one.
-- They keep a backfill from firing what was fired, for as long as its item is retained.
--
-- Lock order: executor row (the fence) -> schedule -> schedule_request -> item_key -> inserts. A
-- schedule that is locked is skipped and tried again: a user's transaction may be pausing it.
--
-- Locks: none that another session can wait for.
-- Overlap: older code has no schedules, and enqueues as before.

CREATE TABLE tenure.schedule (
  name             text        NOT NULL PRIMARY KEY
    CONSTRAINT schedule_name_length CHECK (length(name) BETWEEN 1 AND 200),
  queue            text        NOT NULL,
  application_name text        NOT NULL,
  -- For people, and for a backfill to count slots by; written and read by the code alone.
  definition       text        NOT NULL,
  paused           boolean     NOT NULL DEFAULT false,
  -- Slots before it passed while the schedule was paused.
  resumed_at       timestamptz,
  -- The first slot that nobody has decided about; null when there is none.
  next_at          timestamptz,
  last_slot        timestamptz,
  last_item        uuid,
  updated_at       timestamptz NOT NULL,
  CONSTRAINT next_is_later_than_last CHECK (next_at > last_slot)
);

-- Which executors have the code of a schedule, and with which definition. Rows of executors that have
-- ended mean nothing, and go when the schedule is registered the next time.
CREATE TABLE tenure.schedule_runner (
  schedule_name text NOT NULL,
  executor_id   uuid NOT NULL,
  queue         text NOT NULL,
  definition    text NOT NULL,
  PRIMARY KEY (schedule_name, executor_id)
);

-- What only an executor can do, because it has the calendar and the payload: one item now, or the slots
-- from from_at until to_at. A backfill goes on at from_at, some slots at a time.
CREATE TABLE tenure.schedule_request (
  id            bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  schedule_name text        NOT NULL,
  kind          text        NOT NULL CONSTRAINT schedule_request_kind CHECK (kind IN ('trigger', 'backfill')),
  from_at       timestamptz NOT NULL,
  to_at         timestamptz,
  CONSTRAINT only_a_backfill_has_an_end CHECK ((kind = 'backfill') = (to_at IS NOT NULL))
);
CREATE INDEX schedule_request_for_schedule ON tenure.schedule_request (schedule_name, id);

SELECT tenure.fence_table('tenure.schedule');
SELECT tenure.fence_table('tenure.schedule_runner');
SELECT tenure.fence_table('tenure.schedule_request');

-- How each of these schedules stands for an executor that has these definitions of it, and what the
-- time is: instants are milliseconds of the epoch. A name without a row has is_known false. `has_runner`
-- tells whether a live executor has the definition in force; of the requests the oldest is given.
CREATE FUNCTION tenure.schedule_states(names text[], queues text[], definitions text[])
RETURNS TABLE (
  name text, is_known boolean, is_mine boolean, has_runner boolean, definition text, paused boolean,
  now_ms float8, next_ms float8, last_ms float8, resumed_ms float8,
  request_id bigint, request_kind text, request_from_ms float8, request_to_ms float8
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
  now timestamptz := tenure.clock();
BEGIN
  RETURN QUERY
  SELECT u.name, s.name IS NOT NULL, coalesce(s.queue = u.queue AND s.definition = u.definition, false),
         coalesce((
           SELECT true FROM tenure.schedule_runner x JOIN tenure.executor e ON e.id = x.executor_id
            WHERE x.schedule_name = s.name AND x.queue = s.queue AND x.definition = s.definition
              AND e.state = 'active' AND e.expires_at > now LIMIT 1), false),
         s.definition, coalesce(s.paused, false),
         (extract(epoch FROM now) * 1000)::float8, (extract(epoch FROM s.next_at) * 1000)::float8,
         (extract(epoch FROM s.last_slot) * 1000)::float8, (extract(epoch FROM s.resumed_at) * 1000)::float8,
         r.id, r.kind, (extract(epoch FROM r.from_at) * 1000)::float8, (extract(epoch FROM r.to_at) * 1000)::float8
    FROM unnest(names, queues, definitions) u(name, queue, definition)
    LEFT JOIN tenure.schedule s ON s.name = u.name
    LEFT JOIN LATERAL (
      SELECT q.id, q.kind, q.from_at, q.to_at FROM tenure.schedule_request q
       WHERE q.schedule_name = s.name ORDER BY q.id LIMIT 1) r ON true;
END $$;

-- An executor has the code of a schedule: puts its definition in force, with `new_next` as the slot that
-- is next. That was computed from what the caller has read; if it is no longer so, or somebody holds the
-- row, it answers 'moved', and the caller reads again. Otherwise 'registered'. A schedule of another
-- application is refused (TN011).
CREATE FUNCTION tenure.register_schedule(
  schedule_name text, schedule_queue text, application text, new_definition text, new_next timestamptz,
  seen_definition text, seen_next timestamptz
) RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
  me   uuid := nullif(current_setting('tenure.executor_id', true), '')::uuid;
  held tenure.schedule;
  now  timestamptz;
BEGIN
  IF me IS NULL THEN
    RAISE EXCEPTION 'a session without an executor cannot run schedules' USING ERRCODE = 'TN004';
  END IF;
  PERFORM tenure.admit();
  now := tenure.clock();
  IF seen_definition IS NULL THEN
    INSERT INTO tenure.schedule AS s (name, queue, application_name, definition, next_at, updated_at)
    VALUES (schedule_name, schedule_queue, application, new_definition, new_next, now)
    ON CONFLICT (name) DO NOTHING;
    IF NOT FOUND THEN RETURN 'moved'; END IF;
  ELSE
    SELECT * INTO held FROM tenure.schedule s WHERE s.name = schedule_name FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN RETURN 'moved'; END IF;
    IF held.application_name <> application THEN
      RAISE EXCEPTION 'schedule % belongs to the application %', schedule_name, held.application_name USING
        ERRCODE = 'TN011', HINT = 'Give the schedule another name, or use another database.';
    END IF;
    IF held.definition <> seen_definition OR held.next_at IS DISTINCT FROM seen_next THEN RETURN 'moved'; END IF;
    UPDATE tenure.schedule s
       SET queue = schedule_queue, definition = new_definition, next_at = new_next, updated_at = now
     WHERE s.name = schedule_name
       AND (s.queue, s.definition, s.next_at) IS DISTINCT FROM (schedule_queue, new_definition, new_next);
  END IF;
  DELETE FROM tenure.schedule_runner x
   WHERE x.schedule_name = register_schedule.schedule_name
     AND x.executor_id = ANY(ARRAY(
       SELECT y.executor_id FROM tenure.schedule_runner y
        WHERE y.schedule_name = register_schedule.schedule_name
          AND (SELECT true FROM tenure.executor e WHERE e.id = y.executor_id AND e.state = 'active' LIMIT 1) IS NULL
          FOR UPDATE SKIP LOCKED));
  INSERT INTO tenure.schedule_runner AS x (schedule_name, executor_id, queue, definition)
  VALUES (register_schedule.schedule_name, me, schedule_queue, new_definition)
  ON CONFLICT ON CONSTRAINT schedule_runner_pkey
  DO UPDATE SET queue = excluded.queue, definition = excluded.definition;
  RETURN 'registered';
END $$;

-- This executor no longer has the code.
CREATE FUNCTION tenure.unregister_schedule(schedule text) RETURNS void
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
  DELETE FROM tenure.schedule_runner x
   WHERE x.schedule_name = schedule
     AND x.executor_id = nullif(current_setting('tenure.executor_id', true), '')::uuid
$$;

CREATE FUNCTION tenure.slot_key(schedule text, slot timestamptz) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
  SELECT 'schedule/' || schedule || '/' || to_char(slot AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"')
$$;

-- The items of those slots that have none, in the transaction of a caller who holds the schedule's row;
-- so nobody else writes these keys. Nulls for the others. Arrays as in enqueue_all.
CREATE FUNCTION tenure.enqueue_slots(
  schedule text, queue_name text, slots timestamptz[], payloads text[], priorities int[], keys text[],
  deadlines_ms float8[], OUT ids uuid[], OUT queue_id int
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
  places   int[];
  enqueued record;
BEGIN
  places := ARRAY(
    SELECT u.place::int FROM unnest(slots) WITH ORDINALITY u(slot, place)
     WHERE (SELECT true FROM tenure.item_key k
             WHERE k.queue_id = 0 AND k.key = tenure.slot_key(schedule, u.slot) LIMIT 1) IS NULL
     ORDER BY u.place);
  ids := array_fill(NULL::uuid, ARRAY[cardinality(slots)]);
  IF cardinality(places) = 0 THEN RETURN; END IF;
  SELECT * INTO enqueued FROM tenure.enqueue_all(
    queue_name => enqueue_slots.queue_name,
    payloads => ARRAY(SELECT payloads[p.at] FROM unnest(places) WITH ORDINALITY p(at, n) ORDER BY p.n),
    priorities => ARRAY(SELECT priorities[p.at] FROM unnest(places) WITH ORDINALITY p(at, n) ORDER BY p.n),
    keys => ARRAY(SELECT keys[p.at] FROM unnest(places) WITH ORDINALITY p(at, n) ORDER BY p.n),
    deadlines_ms => ARRAY(SELECT deadlines_ms[p.at] FROM unnest(places) WITH ORDINALITY p(at, n) ORDER BY p.n));
  queue_id := enqueued.queue_id;
  INSERT INTO tenure.item_key (queue_id, key, item_id)
  SELECT 0, tenure.slot_key(schedule, slots[p.at]), p.id
    FROM unnest(places, enqueued.ids) p(at, id);
  FOR n IN 1..cardinality(places) LOOP
    ids[places[n]] := enqueued.ids[n];
  END LOOP;
END $$;

-- Fires these slots, in ascending order, and moves the schedule on to `new_next`, null for none: one
-- transaction. Without slots it only moves on. Answers 'fired', or why nothing was done: 'moved' when the
-- next slot is not what the caller has seen, 'other' when another definition is in force, 'paused',
-- 'early' when the clock has not reached the last of them, 'busy' when somebody holds the row, or there
-- is none. `enqueued` counts the items, which may be fewer: what a backfill has fired is not fired again.
CREATE FUNCTION tenure.fire_schedule(
  schedule text, own_queue text, own_definition text, seen_next timestamptz, slots timestamptz[],
  payloads text[], priorities int[], keys text[], deadlines_ms float8[], new_next timestamptz,
  OUT answer text, OUT enqueued int, OUT queue_id int
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
  held  tenure.schedule;
  now  timestamptz;
  made record;
  last int := cardinality(slots);
BEGIN
  enqueued := 0;
  PERFORM tenure.admit();
  SELECT * INTO held FROM tenure.schedule s WHERE s.name = schedule FOR UPDATE SKIP LOCKED;
  IF NOT FOUND THEN answer := 'busy'; RETURN; END IF;
  IF held.queue <> own_queue OR held.definition <> own_definition THEN answer := 'other'; RETURN; END IF;
  IF held.paused THEN answer := 'paused'; RETURN; END IF;
  IF held.next_at IS DISTINCT FROM seen_next OR new_next <= seen_next THEN answer := 'moved'; RETURN; END IF;
  now := tenure.clock();
  IF seen_next > now OR slots[last] > now THEN answer := 'early'; RETURN; END IF;
  IF last > 0 THEN
    SELECT * INTO made FROM tenure.enqueue_slots(
      schedule, held.queue, slots, payloads, priorities, keys, deadlines_ms);
    enqueued := cardinality(array_remove(made.ids, NULL));
    queue_id := made.queue_id;
    held.last_slot := slots[last];
    held.last_item := coalesce(made.ids[last], (
      SELECT k.item_id FROM tenure.item_key k
       WHERE k.queue_id = 0 AND k.key = tenure.slot_key(schedule, slots[last])));
  END IF;
  UPDATE tenure.schedule s
     SET next_at = new_next, last_slot = held.last_slot, last_item = held.last_item, updated_at = now
   WHERE s.name = schedule;
  answer := 'fired';
END $$;

-- Does some or all of a request: a trigger's one item, or these slots of a backfill, which goes on at
-- `rest_from`, or is over when that is null. Answers as fire_schedule, but for 'paused': a request is
-- somebody's explicit wish.
CREATE FUNCTION tenure.serve_schedule_request(
  request bigint, schedule text, own_queue text, own_definition text, slots timestamptz[], payloads text[],
  priorities int[], keys text[], deadlines_ms float8[], rest_from timestamptz,
  OUT answer text, OUT enqueued int, OUT queue_id int
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
  held   tenure.schedule;
  asked tenure.schedule_request;
  made  record;
  last  int := cardinality(slots);
BEGIN
  enqueued := 0;
  PERFORM tenure.admit();
  SELECT * INTO held FROM tenure.schedule s WHERE s.name = schedule FOR UPDATE SKIP LOCKED;
  IF NOT FOUND THEN answer := 'busy'; RETURN; END IF;
  IF held.queue <> own_queue OR held.definition <> own_definition THEN answer := 'other'; RETURN; END IF;
  SELECT * INTO asked FROM tenure.schedule_request q WHERE q.id = request FOR UPDATE;
  IF NOT FOUND OR rest_from <= asked.from_at THEN answer := 'moved'; RETURN; END IF;
  IF asked.kind = 'backfill' AND slots[last] > tenure.clock() THEN answer := 'early'; RETURN; END IF;
  IF asked.kind = 'trigger' THEN
    SELECT * INTO made FROM tenure.enqueue_all(
      queue_name => held.queue, payloads => serve_schedule_request.payloads,
      priorities => serve_schedule_request.priorities, keys => serve_schedule_request.keys,
      deadlines_ms => serve_schedule_request.deadlines_ms);
    enqueued := cardinality(made.ids);
    queue_id := made.queue_id;
  ELSIF last > 0 THEN
    SELECT * INTO made FROM tenure.enqueue_slots(
      schedule, held.queue, slots, payloads, priorities, keys, deadlines_ms);
    enqueued := cardinality(array_remove(made.ids, NULL));
    queue_id := made.queue_id;
  END IF;
  IF rest_from IS NULL THEN
    DELETE FROM tenure.schedule_request q WHERE q.id = request;
  ELSE
    UPDATE tenure.schedule_request q SET from_at = rest_from WHERE q.id = request;
  END IF;
  answer := 'fired';
END $$;

-- Answers 'paused', 'already' or 'unknown'. A slot that is being fired at this moment is waited for.
CREATE FUNCTION tenure.pause_schedule(schedule text) RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
  PERFORM tenure.admit();
  UPDATE tenure.schedule s SET paused = true, updated_at = tenure.clock() WHERE s.name = schedule AND NOT s.paused;
  IF FOUND THEN RETURN 'paused'; END IF;
  RETURN CASE WHEN EXISTS (SELECT FROM tenure.schedule s WHERE s.name = schedule) THEN 'already' ELSE 'unknown' END;
END $$;

-- Answers 'resumed', 'already' or 'unknown'.
CREATE FUNCTION tenure.resume_schedule(schedule text) RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  now timestamptz;
BEGIN
  PERFORM tenure.admit();
  PERFORM FROM tenure.schedule s WHERE s.name = schedule AND s.paused FOR UPDATE;
  IF FOUND THEN
    now := tenure.clock();
    UPDATE tenure.schedule s SET paused = false, resumed_at = now, updated_at = now WHERE s.name = schedule;
    PERFORM tenure.tell('tenure_work', 'schedules');
    RETURN 'resumed';
  END IF;
  RETURN CASE WHEN EXISTS (SELECT FROM tenure.schedule s WHERE s.name = schedule) THEN 'already' ELSE 'unknown' END;
END $$;

-- Asks for one item now (no bounds), or for the slots from range_from until range_to, exclusive, of the
-- past. Answers 'requested', 'unknown', or 'full' when a hundred requests wait; and whether a live
-- executor has the definition in force: without one a request waits.
CREATE FUNCTION tenure.request_schedule(
  schedule text, range_from timestamptz DEFAULT NULL, range_to timestamptz DEFAULT NULL,
  OUT answer text, OUT has_runner boolean
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
  held tenure.schedule;
  now timestamptz := tenure.clock();
BEGIN
  SELECT * INTO held FROM tenure.schedule s WHERE s.name = schedule;
  IF NOT FOUND THEN answer := 'unknown'; has_runner := false; RETURN; END IF;
  has_runner := EXISTS (
    SELECT FROM tenure.schedule_runner x JOIN tenure.executor e ON e.id = x.executor_id
     WHERE x.schedule_name = held.name AND x.queue = held.queue AND x.definition = held.definition
       AND e.state = 'active' AND e.expires_at > now);
  IF (SELECT count(*) FROM tenure.schedule_request q WHERE q.schedule_name = schedule) >= 100 THEN
    answer := 'full';
    RETURN;
  END IF;
  INSERT INTO tenure.schedule_request (schedule_name, kind, from_at, to_at)
  VALUES (schedule, CASE WHEN range_to IS NULL THEN 'trigger' ELSE 'backfill' END, coalesce(range_from, date_trunc('milliseconds', now)),
          CASE WHEN range_to IS NOT NULL THEN least(range_to, now) END);
  PERFORM tenure.tell('tenure_work', 'schedules');
  answer := 'requested';
END $$;

-- Forgets a schedule that no live executor has the code of. Answers 'removed', 'running' when one has,
-- or 'unknown'. Its items stay.
CREATE FUNCTION tenure.remove_schedule(schedule text) RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  now timestamptz;
BEGIN
  PERFORM tenure.admit();
  PERFORM FROM tenure.schedule s WHERE s.name = schedule FOR UPDATE;
  IF NOT FOUND THEN RETURN 'unknown'; END IF;
  now := tenure.clock();
  IF EXISTS (
    SELECT FROM tenure.schedule_runner x JOIN tenure.executor e ON e.id = x.executor_id
     WHERE x.schedule_name = schedule AND e.state = 'active' AND e.expires_at > now) THEN
    RETURN 'running';
  END IF;
  DELETE FROM tenure.schedule_request q WHERE q.schedule_name = schedule;
  DELETE FROM tenure.schedule_runner x WHERE x.schedule_name = schedule;
  DELETE FROM tenure.schedule s WHERE s.name = schedule;
  RETURN 'removed';
END $$;

SELECT tenure.grant_roles();

INSERT INTO tenure.migration (number, name) VALUES (15, 'schedule');
