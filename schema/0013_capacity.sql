-- Capacity: what pull sessions hold. A worker that is no process of ours opens a session, reserves
-- slots by pulling, and activates what it starts; each of these has a clock of its own.
--
--   ready --pull--> leased: reserved --activate--> active --complete, fail--> done, delayed, ready
--     ^  ^                    |                      |
--     |  +-- 30 s, no loss ---+                      +-- no heartbeat for 90 s: a loss is charged
--     +------ delayed until the grace has passed <---+
--
-- A reservation or lease that has run out is refused whether or not the sweep has seen it. Any executor
-- serves any session: its own fence guards its statements, and revoking it touches nothing here.
--
-- C1. An item is executed by at most one session at a time: each write names (session, item,
--     execution_seq), which is the attempt of the claim, and changes that lease or nothing.
-- C2. Slots in use of a queue, claims of executors and leases together, never exceed its limits, nor
--     those of a session its own.
-- C3. The slot of a dead holder comes back once, in the transaction that takes the item back.
-- C4. What happened to a lease is written in the same transaction; no setting switches that off.
--
-- Locks: none that another session can wait for.
-- Overlap: older code does not count leases against a queue's limits, and cannot cancel what is leased.

-- What happened that no setting may keep from being recorded, and who did it, in `detail`.
CREATE TABLE tenure.audit_event (
  id       bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  at       timestamptz NOT NULL,
  event    text        NOT NULL,
  item_id  uuid,
  queue_id int,
  detail   json
);
CREATE INDEX audit_event_of_item ON tenure.audit_event (item_id) WHERE item_id IS NOT NULL;

CREATE FUNCTION tenure.audit(event text, item uuid, queue int, detail json) RETURNS void
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
  INSERT INTO tenure.audit_event (at, event, item_id, queue_id, detail)
  VALUES (tenure.clock(), audit.event, item, queue, audit.detail)
$$;

-- A pull worker's liveness. The intervals are those of the executor that opened it, so that every other
-- one keeps to them.
CREATE TABLE tenure.session (
  id               uuid        NOT NULL PRIMARY KEY,
  application_name text        NOT NULL,
  worker           text        NOT NULL CONSTRAINT session_worker_length CHECK (length(worker) BETWEEN 1 AND 200),
  version          text        NOT NULL CONSTRAINT session_version_length CHECK (length(version) BETWEEN 1 AND 200),
  slots            int         NOT NULL CONSTRAINT session_slots CHECK (slots BETWEEN 1 AND 1000),
  lease            interval    NOT NULL,
  reservation      interval    NOT NULL,
  opened_at        timestamptz NOT NULL,
  heartbeat_at     timestamptz NOT NULL,
  expires_at       timestamptz NOT NULL
) WITH (
  -- Heartbeats must stay HOT, so nothing they change is indexed.
  fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500
);

-- The credits of a session: the queues it offers its slots to, and where it goes on among their keys.
-- They go with the session, so that a dead worker offers nothing.
CREATE TABLE tenure.session_credit (
  session        uuid NOT NULL,
  queue_id       int  NOT NULL,
  place          int  NOT NULL,
  unstarted_lane int  NOT NULL,
  started_lane   int  NOT NULL,
  suspect_lane   int  NOT NULL,
  key_cursor     text NOT NULL DEFAULT '',
  PRIMARY KEY (session, queue_id)
) WITH (fillfactor = 50);

-- A slot in use, and all that the item needs to go back. Not part of `claimed`: an executor's claims go
-- with its lease, these do not.
CREATE TABLE tenure.capacity_lease (
  item_id       uuid        NOT NULL PRIMARY KEY,
  queue_id      int         NOT NULL,
  session       uuid        NOT NULL,
  version       text        NOT NULL,
  execution_seq int         NOT NULL,
  state         text        NOT NULL
    CONSTRAINT capacity_lease_state CHECK (state IN ('reserved', 'active')),
  expires_at    timestamptz NOT NULL,
  lane_id       int         NOT NULL,
  rank          int         NOT NULL,
  seq           bigint      NOT NULL,
  failures      int         NOT NULL,
  losses        smallint    NOT NULL,
  stuck         smallint    NOT NULL,
  key           text,
  reserved_at   timestamptz NOT NULL,
  activated_at  timestamptz,
  CONSTRAINT active_iff_activated_at_present CHECK ((state = 'active') = (activated_at IS NOT NULL))
) WITH (
  -- One heartbeat updates all of a session: HOT, so no clock is indexed, and a sweep reads the table.
  fillfactor = 50, vacuum_truncate = off, autovacuum_vacuum_scale_factor = 0,
  autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0
);
CREATE INDEX capacity_lease_for_limits ON tenure.capacity_lease (queue_id, key);
CREATE INDEX capacity_lease_for_session ON tenure.capacity_lease (session);

DO $$
BEGIN
  PERFORM tenure.fence_table('tenure.audit_event');
  PERFORM tenure.fence_table('tenure.session');
  PERFORM tenure.fence_table('tenure.session_credit');
  PERFORM tenure.fence_table('tenure.capacity_lease');
END $$;

-- What waits to be dispatched, and from when on it may be: a segment in its grace is here.
CREATE VIEW tenure.dispatch_queue AS
  SELECT d.id AS item_id, l.queue_id, d.attempt AS execution_seq, d.due_at AS eligible_at,
         l.version, d.losses, d.stuck, d.key
    FROM tenure.delayed d JOIN tenure.lane l ON l.id = d.lane_id
  UNION ALL
  SELECT r.id, l.queue_id, r.attempt, NULL::timestamptz, l.version, r.losses, r.stuck, r.key
    FROM tenure.ready r JOIN tenure.lane l ON l.id = r.lane_id;

-- Whether the capacity layer has the item: it holds a slot, or waits to be dispatched. The sweep of
-- stranded wake-ups (0012) leaves it alone then.
CREATE OR REPLACE FUNCTION tenure.capacity_owns(item uuid) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
  RETURN EXISTS (SELECT FROM tenure.item_place(item) p WHERE p.place IN ('ready', 'claimed', 'leased', 'delayed'));
END $$;

-- Opens a session of a worker that runs these queues. They belong to the application of the executor
-- that serves it; one of another is refused (TN011). `version` names the worker's code: what it has
-- started, only sessions and executors of that version go on with. A queue that nobody has run yet gets
-- the recovery limit.
CREATE FUNCTION tenure.open_session(
  worker text, queues text[], slots int, version text, lease interval, reservation interval,
  limit_recovery text, limit_recovery_max int
) RETURNS uuid
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  me          uuid := nullif(current_setting('tenure.executor_id', true), '')::uuid;
  application text;
  opened      uuid := gen_random_uuid();
  queue       int;
  named       record;
  now         timestamptz;
BEGIN
  IF me IS NULL THEN
    RAISE EXCEPTION 'a session without an executor cannot serve workers' USING ERRCODE = 'TN004';
  END IF;
  PERFORM tenure.admit();
  SELECT e.application_name INTO application FROM tenure.executor e WHERE e.id = me;
  now := tenure.clock();
  INSERT INTO tenure.session (id, application_name, worker, version, slots, lease, reservation,
                              opened_at, heartbeat_at, expires_at)
  VALUES (opened, application, open_session.worker, open_session.version, open_session.slots,
          open_session.lease, open_session.reservation, now, now, now + open_session.lease);
  -- In the order of their names: two sessions that make the same queues must not wait for each other.
  FOR named IN
    SELECT u.name, (row_number() OVER (ORDER BY u.name) - 1)::int AS place
      FROM (SELECT DISTINCT q.name FROM unnest(queues) q(name)) u ORDER BY u.name
  LOOP
    queue := tenure.queue_id(named.name);
    UPDATE tenure.queue q SET recovery_limit = limit_recovery, recovery_max = limit_recovery_max
     WHERE q.id = queue AND q.application_name IS NULL;
    PERFORM tenure.settling_queue(named.name, application);
    INSERT INTO tenure.session_credit (session, queue_id, place, unstarted_lane, started_lane, suspect_lane)
    VALUES (opened, queue, named.place, tenure.lane_id(queue, NULL, false),
            tenure.lane_id(queue, open_session.version, false), tenure.lane_id(queue, open_session.version, true));
  END LOOP;
  RETURN opened;
END $$;

-- Reserves up to `wanted` slots of the session, for items of its queues in order. What was cancelled, or
-- is past its deadline, ends here and is answered as `ended`. A session that may not pull gets one row
-- that says why.
--
-- The items are claimed as an executor claims, which keeps all limits, and moved on in the same
-- transaction: nobody ever sees them in both places, or in none.
--
-- The session's row is locked, so that its slots are counted exactly. Of the queues' locks only the
-- first is waited for, because the order is another each time: whoever holds one and finds the next one
-- taken leaves that queue out.
CREATE FUNCTION tenure.pull(holder uuid, wanted int)
RETURNS TABLE (
  refused text, ended uuid, id uuid, execution_seq int, queue text, payload json, key text, trace text,
  failures int, losses smallint, enqueued_at timestamptz, deadline_in_ms float8, reserved_for_ms float8
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
  me             uuid := nullif(current_setting('tenure.executor_id', true), '')::uuid;
  held           tenure.session;
  now            timestamptz := tenure.clock();
  credit         record;
  taken          record;
  slots_left     int;
  suspects_left  int;
  first_place    int;
  visited        boolean := false;
  from_key       text;
  next_key       text;
  wrapped        boolean;
  reserved       uuid[];
  gone           uuid[] := '{}';
  gone_attempts  int[] := '{}';
  gone_outcomes  text[] := '{}';
  gone_reasons   text[] := '{}';
BEGIN
  IF me IS NULL THEN
    RAISE EXCEPTION 'a session without an executor cannot serve workers' USING ERRCODE = 'TN004';
  END IF;
  -- Without a lock: a worker that waits for work asks often, and mostly there is none.
  SELECT * INTO held FROM tenure.session s WHERE s.id = holder;
  refused := CASE WHEN held.id IS NULL THEN 'unknown session' WHEN held.expires_at <= now THEN 'session expired' END;
  IF refused IS NOT NULL THEN
    RETURN NEXT;
    RETURN;
  END IF;
  IF (SELECT true FROM tenure.session_credit c
       WHERE c.session = holder
         AND (SELECT true FROM tenure.ready r
               WHERE r.lane_id IN (c.unstarted_lane, c.started_lane, c.suspect_lane) LIMIT 1) LIMIT 1) IS NULL THEN
    RETURN;
  END IF;
  PERFORM tenure.admit();
  SELECT * INTO held FROM tenure.session s WHERE s.id = holder FOR NO KEY UPDATE;
  now := tenure.clock();
  refused := CASE WHEN held.id IS NULL THEN 'unknown session' WHEN held.expires_at <= now THEN 'session expired' END;
  IF refused IS NOT NULL THEN
    RETURN NEXT;
    RETURN;
  END IF;
  SELECT least(wanted, held.slots - count(*)), CASE WHEN bool_or(l.losses > 0) THEN 0 ELSE 1 END
    INTO slots_left, suspects_left FROM tenure.capacity_lease l WHERE l.session = holder;
  first_place := floor(random() * (SELECT count(*) FROM tenure.session_credit c WHERE c.session = holder))::int;
  FOR credit IN
    SELECT c.*, q.name FROM tenure.session_credit c JOIN tenure.queue q ON q.id = c.queue_id
     WHERE c.session = holder ORDER BY c.place < first_place, c.place
  LOOP
    EXIT WHEN slots_left <= 0;
    CONTINUE WHEN visited AND NOT pg_try_advisory_xact_lock(1413828181, credit.queue_id);
    visited := true;
    reserved := '{}';
    from_key := credit.key_cursor;
    wrapped := from_key = '';
    -- With a limit for each key a claim looks at 500 keys: eight looks at most, and on from there.
    FOR turn IN 1..8 LOOP
      next_key := '';
      FOR taken IN
        SELECT c.id, c.attempt, c.failures, c.losses, c.key, c.payload, c.trace, c.deadline_in_ms,
               c.enqueued_at, c.cancel_requested
          FROM tenure.claim(credit.queue_id, ARRAY[credit.unstarted_lane, credit.started_lane],
                 ARRAY[-2147483648, -2147483648], ARRAY[-1, -1]::bigint[], slots_left,
                 ARRAY[credit.suspect_lane], suspects_left, from_key) c
      LOOP
        IF taken.id IS NULL THEN
          -- Without one when a pause or a rate ends the claim.
          next_key := coalesce(taken.key, '');
          CONTINUE;
        END IF;
        IF taken.cancel_requested OR taken.deadline_in_ms <= 0 THEN
          gone := gone || taken.id;
          gone_attempts := gone_attempts || taken.attempt;
          gone_outcomes := gone_outcomes || CASE WHEN taken.cancel_requested THEN 'cancelled' ELSE 'failed' END;
          gone_reasons := gone_reasons || CASE WHEN NOT taken.cancel_requested THEN 'DeadlineExceeded' END;
          CONTINUE;
        END IF;
        reserved := reserved || taken.id;
        slots_left := slots_left - 1;
        IF taken.losses > 0 THEN suspects_left := 0; END IF;
        id := taken.id;
        execution_seq := taken.attempt;
        queue := credit.name;
        payload := taken.payload;
        key := taken.key;
        trace := taken.trace;
        failures := taken.failures;
        losses := taken.losses;
        enqueued_at := taken.enqueued_at;
        deadline_in_ms := taken.deadline_in_ms;
        reserved_for_ms := extract(epoch FROM held.reservation)::float8 * 1000;
        RETURN NEXT;
      END LOOP;
      from_key := next_key;
      EXIT WHEN slots_left <= 0;
      IF from_key = '' THEN
        EXIT WHEN wrapped;
        wrapped := true;
      END IF;
    END LOOP;
    IF from_key <> credit.key_cursor THEN
      UPDATE tenure.session_credit c SET key_cursor = from_key
       WHERE c.session = holder AND c.queue_id = credit.queue_id;
    END IF;
    CONTINUE WHEN reserved = '{}';
    now := tenure.clock();
    WITH moved AS (
      DELETE FROM tenure.claimed c WHERE c.id = ANY(reserved) RETURNING c.*)
    INSERT INTO tenure.capacity_lease (item_id, queue_id, session, version, execution_seq, state, expires_at,
                                       lane_id, rank, seq, failures, losses, stuck, key, reserved_at)
    SELECT m.id, m.queue_id, holder, held.version, m.attempt, 'reserved', now + held.reservation,
           m.lane_id, m.rank, m.seq, m.failures, m.losses, m.stuck, m.key, now
      FROM moved m;
    -- For the monitors (0008): somebody claims here. The row has no other writer than this executor.
    INSERT INTO tenure.queue_activity AS a (queue_id, executor_id, claimed_at) VALUES (credit.queue_id, me, now)
    ON CONFLICT ON CONSTRAINT queue_activity_pkey DO UPDATE SET claimed_at = excluded.claimed_at
      WHERE a.claimed_at < excluded.claimed_at - interval '1 second';
  END LOOP;
  IF gone <> '{}' THEN
    PERFORM tenure.settle(gone, gone_attempts, gone_outcomes, gone_reasons, NULL, NULL, NULL);
    id := NULL;
    FOREACH ended IN ARRAY gone LOOP
      RETURN NEXT;
    END LOOP;
  END IF;
END $$;

-- Why a write that names an execution is refused when it holds no lease.
CREATE FUNCTION tenure.why_not_leased(item uuid) RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  at record;
BEGIN
  SELECT * INTO at FROM tenure.item_place(item);
  RETURN CASE WHEN at.place IS NULL THEN 'unknown item'
              WHEN at.outcome = 'cancelled' THEN 'cancelled'
              WHEN at.place = 'done' THEN 'settled'
              ELSE 'older execution_seq' END;
END $$;

-- The choke point of every write of a worker: locks its lease and says why it may not be used, if so.
-- In a statement of its own, because these rows are updated: see expire_deadlines (0004). Lock, then
-- clock, then decide.
CREATE FUNCTION tenure.hold_lease(holder uuid, item uuid, seq int, OUT lease tenure.capacity_lease, OUT reason text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
  live_until timestamptz;
  now        timestamptz;
BEGIN
  PERFORM tenure.admit();
  SELECT * INTO lease FROM tenure.capacity_lease c
   WHERE c.item_id = item AND c.session = holder AND c.execution_seq = hold_lease.seq FOR UPDATE;
  SELECT s.expires_at INTO live_until FROM tenure.session s WHERE s.id = holder;
  now := tenure.clock();
  reason := CASE
    WHEN live_until IS NULL THEN 'unknown session'
    WHEN live_until <= now THEN 'session expired'
    WHEN lease.item_id IS NULL THEN tenure.why_not_leased(item)
    WHEN lease.expires_at <= now THEN
      CASE lease.state WHEN 'reserved' THEN 'reservation expired' ELSE 'lease expired' END
  END;
END $$;

-- A reservation becomes a lease: from here on its worker executes the item. Twice is once.
CREATE FUNCTION tenure.activate(holder uuid, item uuid, seq int,
  OUT status text, OUT reason text, OUT expires_in_ms float8)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
  held      record;
  allowance interval;
  now       timestamptz;
BEGIN
  SELECT * INTO held FROM tenure.hold_lease(holder, item, seq);
  status := 'stale';
  reason := held.reason;
  IF reason IS NOT NULL THEN RETURN; END IF;
  IF (held.lease).state = 'reserved' AND EXISTS (SELECT FROM tenure.cancel_request x WHERE x.id = item) THEN
    PERFORM tenure.settle_lease(held.lease, 'cancelled', NULL, NULL, NULL);
    reason := 'cancelled';
    RETURN;
  END IF;
  SELECT s.lease INTO allowance FROM tenure.session s WHERE s.id = holder;
  now := tenure.clock();
  UPDATE tenure.capacity_lease c
     SET state = 'active', activated_at = coalesce(c.activated_at, now),
         expires_at = CASE c.state WHEN 'reserved' THEN now + allowance ELSE c.expires_at END
   WHERE c.item_id = item
  RETURNING extract(epoch FROM c.expires_at - now) * 1000 INTO expires_in_ms;
  status := 'active';
END $$;

-- One heartbeat pushes every clock of the session forward: its own, and those of all that it executes.
-- Not those of its reservations: what is not activated in time goes back. Lock, then clock, then decide,
-- as for a lease (0002). Says why not, or which items are to be cancelled.
CREATE FUNCTION tenure.heartbeat(holder uuid, OUT reason text, OUT cancelled uuid[], OUT expires_in_ms float8)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
  held tenure.session;
  now  timestamptz;
BEGIN
  cancelled := '{}';
  PERFORM tenure.admit();
  SELECT * INTO held FROM tenure.session s WHERE s.id = holder FOR NO KEY UPDATE;
  now := tenure.clock();
  reason := CASE WHEN held.id IS NULL THEN 'unknown session' WHEN held.expires_at <= now THEN 'session expired' END;
  IF reason IS NOT NULL THEN RETURN; END IF;
  WITH alive AS (
    UPDATE tenure.session s SET heartbeat_at = now, expires_at = greatest(s.expires_at, now + held.lease)
     WHERE s.id = holder)
  UPDATE tenure.capacity_lease c SET expires_at = greatest(c.expires_at, now + held.lease)
   WHERE c.session = holder AND c.state = 'active' AND c.expires_at > now;
  IF EXISTS (SELECT FROM tenure.cancel_request) THEN
    cancelled := ARRAY(
      SELECT c.item_id FROM tenure.capacity_lease c
       WHERE c.session = holder AND (SELECT true FROM tenure.cancel_request x WHERE x.id = c.item_id LIMIT 1));
  END IF;
  expires_in_ms := extract(epoch FROM greatest(held.expires_at, now + held.lease) - now) * 1000;
END $$;

-- For a worker that cannot send heartbeats for a while: this item's clock, and with it the session's,
-- run for `by_ms` from now at least, of which a day counts.
CREATE FUNCTION tenure.extend(holder uuid, item uuid, seq int, by_ms float8,
  OUT status text, OUT reason text, OUT expires_in_ms float8)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
  held  record;
  until timestamptz;
  now   timestamptz;
BEGIN
  PERFORM tenure.admit();
  -- The session's row before that of the lease, as a heartbeat does.
  PERFORM FROM tenure.session s WHERE s.id = holder FOR NO KEY UPDATE;
  SELECT * INTO held FROM tenure.hold_lease(holder, item, seq);
  status := 'stale';
  reason := held.reason;
  IF reason IS NULL AND (held.lease).state = 'reserved' THEN reason := 'not activated'; END IF;
  IF reason IS NOT NULL THEN RETURN; END IF;
  now := tenure.clock();
  until := now + least(make_interval(secs => greatest(by_ms, 0) / 1000), interval '24 hours');
  UPDATE tenure.session s SET expires_at = greatest(s.expires_at, until) WHERE s.id = holder;
  UPDATE tenure.capacity_lease c SET expires_at = greatest(c.expires_at, until) WHERE c.item_id = item
  RETURNING extract(epoch FROM c.expires_at - now) * 1000 INTO expires_in_ms;
  status := 'extended';
END $$;

-- Ends a lease that the caller has locked. Through a claim of the serving executor, for as long as this
-- transaction lasts: so that whatever belongs to a settlement is done by the one function that settles.
CREATE FUNCTION tenure.settle_lease(
  lease tenure.capacity_lease, outcome text, because text, result text, delay_ms float8
) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
  me   uuid := nullif(current_setting('tenure.executor_id', true), '')::uuid;
  lane int := tenure.lane_id(lease.queue_id, lease.version, lease.losses > 0);
BEGIN
  IF me IS NULL THEN
    RAISE EXCEPTION 'a session without an executor cannot serve workers' USING ERRCODE = 'TN004';
  END IF;
  DELETE FROM tenure.capacity_lease c WHERE c.item_id = lease.item_id;
  INSERT INTO tenure.claimed (id, queue_id, lane_id, owner, attempt, rank, seq, failures, losses, stuck, key, claimed_at)
  VALUES (lease.item_id, lease.queue_id, lease.lane_id, me, lease.execution_seq, lease.rank, lease.seq,
          lease.failures, lease.losses, lease.stuck, lease.key, lease.reserved_at);
  PERFORM FROM tenure.settle(ARRAY[lease.item_id], ARRAY[lease.execution_seq], ARRAY[outcome], ARRAY[because],
                             ARRAY[result], ARRAY[lane], ARRAY[delay_ms]);
  IF FOUND THEN
    RAISE EXCEPTION 'item % could not be settled for its session', lease.item_id USING ERRCODE = '40001';
  END IF;
  IF outcome IN ('retry', 'hand-back') AND coalesce(delay_ms, 0) <= 0 THEN
    PERFORM tenure.tell('tenure_work', lease.queue_id::text);
  END IF;
END $$;

-- The outcome of an execution: completed, failed, or retry after `delay_ms`. One that was to be
-- cancelled and did not complete is cancelled. 'settled', 'retried', 'cancelled'; 'already' for the
-- outcome of this execution a second time, because the answer to the first was lost; or 'stale'.
CREATE FUNCTION tenure.settle_execution(
  holder uuid, item uuid, seq int, outcome text, because text, result text, delay_ms float8,
  OUT status text, OUT reason text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
  held record;
BEGIN
  SELECT * INTO held FROM tenure.hold_lease(holder, item, seq);
  reason := held.reason;
  IF reason IS NULL AND (held.lease).state = 'reserved' THEN reason := 'not activated'; END IF;
  IF reason IS NOT NULL THEN
    -- A settlement is written by the executor that served it; what the sweep ended, by the lost session,
    -- and what ended while it waited, by nobody.
    IF EXISTS (SELECT FROM tenure.done d WHERE d.id = item AND d.attempt = seq AND d.owner <> holder) THEN
      status := 'already';
      reason := NULL;
    ELSE
      status := 'stale';
    END IF;
    RETURN;
  END IF;
  status := CASE outcome WHEN 'retry' THEN 'retried' ELSE 'settled' END;
  IF outcome <> 'completed' AND EXISTS (SELECT FROM tenure.cancel_request x WHERE x.id = item) THEN
    status := 'cancelled';
    PERFORM tenure.settle_lease(held.lease, 'cancelled', NULL, NULL, NULL);
  ELSE
    PERFORM tenure.settle_lease(held.lease, outcome, because, result, delay_ms);
  END IF;
END $$;

-- Stores a step result of an execution: it is progress, so that losses in a row are counted from it.
-- 'written', 'exists' (with the first value, which stays), or 'stale'.
CREATE FUNCTION tenure.checkpoint_execution(holder uuid, item uuid, seq int, step text, step_value text,
  OUT status text, OUT reason text, OUT value json)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
  held record;
BEGIN
  SELECT * INTO held FROM tenure.hold_lease(holder, item, seq);
  status := 'stale';
  reason := held.reason;
  IF reason IS NULL AND (held.lease).state = 'reserved' THEN reason := 'not activated'; END IF;
  IF reason IS NOT NULL THEN RETURN; END IF;
  INSERT INTO tenure.step (item_id, name, attempt, value, written_at)
  VALUES (item, step, seq, step_value::json, tenure.clock()) ON CONFLICT DO NOTHING;
  status := CASE WHEN FOUND THEN 'written' ELSE 'exists' END;
  SELECT s.value INTO value FROM tenure.step s WHERE s.item_id = item AND s.name = step;
END $$;

-- The orderly end of a session: gives back what it holds, without a loss to anybody. One whose clock has
-- run out is the sweep's, which counts the loss.
CREATE FUNCTION tenure.close_session(holder uuid, OUT reason text, OUT handed_back int)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
  held   tenure.session;
  now    timestamptz;
  ids    uuid[];
  queue_ int;
BEGIN
  handed_back := 0;
  PERFORM tenure.admit();
  SELECT * INTO held FROM tenure.session s WHERE s.id = holder FOR UPDATE;
  now := tenure.clock();
  reason := CASE WHEN held.id IS NULL THEN 'unknown session' WHEN held.expires_at <= now THEN 'session expired' END;
  IF reason IS NOT NULL THEN RETURN; END IF;
  ids := ARRAY(
    SELECT c.item_id FROM tenure.capacity_lease c
     WHERE c.session = holder AND c.expires_at > now ORDER BY c.item_id FOR UPDATE);
  FOR queue_ IN SELECT DISTINCT c.queue_id FROM tenure.capacity_lease c WHERE c.session = holder LOOP
    PERFORM tenure.tell('tenure_work', queue_::text);
  END LOOP;
  handed_back := tenure.hand_back_leases(ids);
  DELETE FROM tenure.session s WHERE s.id = holder;
  DELETE FROM tenure.session_credit c WHERE c.session = holder;
END $$;

-- Items that nobody was lost with: a reservation to where it came from, a started one to its version.
CREATE FUNCTION tenure.hand_back_leases(ids uuid[]) RETURNS int
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
  handed_back int;
BEGIN
  WITH removed AS (
    DELETE FROM tenure.capacity_lease c WHERE c.item_id = ANY(ids) RETURNING c.*)
  INSERT INTO tenure.ready (lane_id, rank, seq, id, attempt, failures, losses, stuck, key)
  SELECT CASE r.state WHEN 'reserved' THEN r.lane_id ELSE (
           SELECT l.id FROM tenure.lane l
            WHERE l.queue_id = r.queue_id AND l.version = r.version AND l.suspect = (r.losses > 0)) END,
         r.rank, r.seq, r.item_id, r.execution_seq, r.failures, r.losses, r.stuck, r.key
    FROM removed r;
  GET DIAGNOSTICS handed_back = ROW_COUNT;
  RETURN handed_back;
END $$;

-- Ends leased items whose deadline has passed; called with the deadlines that are due (0004).
CREATE FUNCTION tenure.end_late_leases(late uuid[], now timestamptz) RETURNS uuid[]
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
  ids uuid[];
BEGIN
  ids := ARRAY(
    SELECT c.item_id FROM tenure.capacity_lease c WHERE c.item_id = ANY(late)
     ORDER BY c.item_id FOR UPDATE SKIP LOCKED);
  IF ids = '{}' THEN RETURN ids; END IF;
  WITH removed AS (
    DELETE FROM tenure.capacity_lease c WHERE c.item_id = ANY(ids) RETURNING c.*)
  INSERT INTO tenure.done (id, queue_id, attempt, owner, outcome, reason, failures, losses, finished_at)
  SELECT r.item_id, r.queue_id, r.execution_seq, r.session, 'failed', 'DeadlineExceeded', r.failures, r.losses, now
    FROM removed r;
  DELETE FROM tenure.cancel_request x WHERE x.id = ANY(ids);
  RETURN ids;
END $$;

-- The capacity sweep, of one application: takes back what holds a slot and whose clock has passed, by
-- this database's time, and deletes sessions without heartbeats.
--
--   reservation  goes back where it was: its worker died before it began, so there is no loss
--   lease        goes back after `grace`, under the execution_seq that its next claim gives it, and a loss
--                is charged (return_lost, 0005)
--   session      goes, and its credits with it; its leases have the same clock and are found by theirs
--
-- An active item that was to be cancelled and whose worker has been told so for `cancel_grace` is ended.
-- Everything that another session holds is skipped: any number of executors may do this at once.
-- The clock is read before the locks: what was pushed forward since is looked at again by the lock.
CREATE FUNCTION tenure.capacity_sweep(
  application text, backoff interval, grace interval, cancel_grace interval, rows_max int,
  OUT reservations int, OUT leases int, OUT recovered int, OUT cancelled int, OUT sessions int,
  OUT exhausted uuid[], OUT settled uuid[])
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
  now    timestamptz := tenure.clock();
  ids    uuid[];
  lost   tenure.lost_item[];
  lease  tenure.capacity_lease;
  queue_ int;
BEGIN
  reservations := 0; leases := 0; recovered := 0; cancelled := 0; sessions := 0;
  exhausted := '{}'; settled := '{}';
  IF NOT EXISTS (SELECT FROM tenure.session) AND NOT EXISTS (SELECT FROM tenure.capacity_lease) THEN RETURN; END IF;
  PERFORM tenure.admit();
  ids := ARRAY(
    SELECT c.item_id FROM tenure.capacity_lease c
     WHERE c.expires_at <= now AND c.queue_id = ANY(ARRAY(
             SELECT q.id FROM tenure.queue q WHERE q.application_name = application))
     ORDER BY c.item_id LIMIT rows_max FOR UPDATE SKIP LOCKED);
  IF ids <> '{}' THEN
    FOR queue_ IN SELECT DISTINCT c.queue_id FROM tenure.capacity_lease c WHERE c.item_id = ANY(ids) LOOP
      PERFORM tenure.tell('tenure_work', queue_::text);
    END LOOP;
    reservations := tenure.hand_back_leases(ARRAY(
      SELECT c.item_id FROM tenure.capacity_lease c WHERE c.item_id = ANY(ids) AND c.state = 'reserved'));
    INSERT INTO tenure.audit_event (at, event, item_id, queue_id, detail)
    SELECT now, 'capacity.lease.expired', c.item_id, c.queue_id, json_build_object(
             'session', c.session, 'worker', s.worker, 'executionSeq', c.execution_seq,
             'expiredAt', c.expires_at, 'activatedAt', c.activated_at)
      FROM tenure.capacity_lease c LEFT JOIN tenure.session s ON s.id = c.session
     WHERE c.item_id = ANY(ids) ORDER BY c.item_id;
    GET DIAGNOSTICS leases = ROW_COUNT;
    IF leases > 0 THEN
      WITH removed AS (
        DELETE FROM tenure.capacity_lease c WHERE c.item_id = ANY(ids) RETURNING c.*)
      SELECT array_agg(ROW(r.item_id, r.queue_id, r.session, r.execution_seq, (
               SELECT l.id FROM tenure.lane l WHERE l.queue_id = r.queue_id AND l.version = r.version AND l.suspect),
               r.rank, r.seq, r.failures, r.losses, r.stuck, r.key)::tenure.lost_item)
        INTO lost FROM removed r;
      SELECT r.requeued, r.cancelled, r.exhausted, r.settled INTO recovered, cancelled, exhausted, settled
        FROM tenure.return_lost(lost, now, backoff, grace) r;
      PERFORM tenure.items_ended(settled);
      -- The sequence number of the lost execution is spent: whoever comes next has a higher one.
      INSERT INTO tenure.audit_event (at, event, item_id, queue_id, detail)
      SELECT now, 'capacity.segment.recovered', u.id, u.queue_id, json_build_object(
               'lostExecutionSeq', u.attempt, 'executionSeq', u.attempt + 1, 'losses', u.losses + 1,
               'eligibleAt', coalesce((SELECT d.due_at FROM tenure.delayed d WHERE d.id = u.id), now))
        FROM unnest(lost) u WHERE u.id <> ALL(settled) ORDER BY u.id;
    END IF;
  END IF;
  IF EXISTS (SELECT FROM tenure.cancel_request) THEN
    FOR lease IN
      SELECT c.* FROM tenure.capacity_lease c
       WHERE c.state = 'active' AND c.queue_id = ANY(ARRAY(
               SELECT q.id FROM tenure.queue q WHERE q.application_name = application))
         AND (SELECT true FROM tenure.cancel_request x WHERE x.id = c.item_id AND x.at <= now - cancel_grace LIMIT 1)
       ORDER BY c.item_id LIMIT rows_max FOR UPDATE OF c SKIP LOCKED
    LOOP
      PERFORM tenure.settle_lease(lease, 'cancelled', NULL, NULL, NULL);
      cancelled := cancelled + 1;
      settled := settled || lease.item_id;
    END LOOP;
  END IF;
  ids := ARRAY(
    SELECT x.id FROM tenure.session x WHERE x.expires_at <= now AND x.application_name = application
     LIMIT rows_max FOR UPDATE SKIP LOCKED);
  IF ids <> '{}' THEN
    DELETE FROM tenure.session_credit c WHERE c.session = ANY(ids);
    DELETE FROM tenure.session s WHERE s.id = ANY(ids);
    sessions := cardinality(ids);
  END IF;
END $$;

-- Removes what was recorded before `before`, a bounded number at a time.
CREATE FUNCTION tenure.trim_audit(before timestamptz, rows_max int) RETURNS int
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
  trimmed int;
BEGIN
  -- In the order of ids, which is that of time but for transactions that ran side by side.
  IF (SELECT e.at >= before FROM tenure.audit_event e ORDER BY e.id LIMIT 1) IS NOT FALSE THEN RETURN 0; END IF;
  DELETE FROM tenure.audit_event e
   WHERE e.id = ANY(ARRAY(SELECT x.id FROM tenure.audit_event x ORDER BY x.id LIMIT rows_max)) AND e.at < before;
  GET DIAGNOSTICS trimmed = ROW_COUNT;
  RETURN trimmed;
END $$;

-- For people, and bounded: leases that have not expired, sessions, and what waits in the queues that
-- sessions have offered slots to, or that has lost a holder, the next one to be dispatched first.
CREATE FUNCTION tenure.capacity_leases(rows_max int)
RETURNS TABLE (item_id uuid, queue text, session uuid, worker text, execution_seq int, state text, key text,
               losses smallint, reserved_at timestamptz, activated_at timestamptz, expires_at timestamptz,
               expires_in_ms float8)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET jit = off
AS $$
DECLARE
  now timestamptz := tenure.clock();
BEGIN
  RETURN QUERY
  SELECT c.item_id, q.name, c.session, s.worker, c.execution_seq, c.state, c.key, c.losses, c.reserved_at,
         c.activated_at, c.expires_at, (extract(epoch FROM c.expires_at - now) * 1000)::float8
    FROM tenure.capacity_lease c JOIN tenure.queue q ON q.id = c.queue_id
    LEFT JOIN tenure.session s ON s.id = c.session
   WHERE c.expires_at > now ORDER BY c.expires_at, c.item_id LIMIT rows_max;
END $$;

CREATE FUNCTION tenure.capacity_sessions(rows_max int)
RETURNS TABLE (id uuid, application_name text, worker text, version text, queues text[], slots int,
               reserved int, active int, opened_at timestamptz, heartbeat_at timestamptz,
               expires_at timestamptz, expires_in_ms float8)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET jit = off
AS $$
DECLARE
  now timestamptz := tenure.clock();
BEGIN
  RETURN QUERY
  SELECT s.id, s.application_name, s.worker, s.version,
         ARRAY(SELECT q.name FROM tenure.session_credit c JOIN tenure.queue q ON q.id = c.queue_id
                WHERE c.session = s.id ORDER BY c.place), s.slots,
         (SELECT count(*)::int FROM tenure.capacity_lease c WHERE c.session = s.id AND c.state = 'reserved'),
         (SELECT count(*)::int FROM tenure.capacity_lease c WHERE c.session = s.id AND c.state = 'active'),
         s.opened_at, s.heartbeat_at, s.expires_at, (extract(epoch FROM s.expires_at - now) * 1000)::float8
    FROM tenure.session s ORDER BY s.opened_at, s.id LIMIT rows_max;
END $$;

CREATE FUNCTION tenure.capacity_queue(rows_max int)
RETURNS TABLE (item_id uuid, queue text, execution_seq int, version text, key text, losses smallint,
               stuck smallint, eligible_at timestamptz, eligible_in_ms float8)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET jit = off
AS $$
DECLARE
  now timestamptz := tenure.clock();
BEGIN
  RETURN QUERY
  SELECT d.item_id, q.name, d.execution_seq, d.version, d.key, d.losses, d.stuck, d.eligible_at,
         greatest(coalesce(extract(epoch FROM d.eligible_at - now) * 1000, 0), 0)::float8
    FROM tenure.dispatch_queue d JOIN tenure.queue q ON q.id = d.queue_id
   WHERE d.losses > 0 OR d.queue_id IN (SELECT c.queue_id FROM tenure.session_credit c)
   ORDER BY d.losses > 0 DESC, d.eligible_at NULLS FIRST, d.item_id LIMIT rows_max;
END $$;

SELECT tenure.grant_roles();

INSERT INTO tenure.migration (number, name) VALUES (13, 'capacity');
