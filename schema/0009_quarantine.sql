-- Quarantine: items that were running when too many executors were lost, until somebody has dealt with
-- them. Nothing makes one available again but an operator's retry.
--
--   --revoke (0005)--> open --settled, with the application's rows; or closed by an operator--> settled
--                      |  ^                                                                       |
--          try begun --+  +-- it did not succeed: due later                                retention (0005)
--
--   open, settled --retry (0004)--> gone: available, with fresh counters
--
-- Q1. An item is settled in the transaction that writes the application's own rows, once, whoever else
--     tries: the row is locked for as long as that transaction lasts.
-- Q2. A try is charged, and the next one postponed, before it begins: a settlement that takes its
--     process along is no faster than one that fails.
-- Q3. An open row keeps the bucket of its item.
--
-- Locks: none that another session can wait for.
-- Overlap: nothing older exists that could quarantine an item without its row here.

CREATE TABLE tenure.quarantine (
  item_id         uuid        NOT NULL PRIMARY KEY,
  queue_id        int         NOT NULL,
  quarantined_at  timestamptz NOT NULL,
  -- Executors that were lost with it.
  executions      int         NOT NULL,
  reason          text        NOT NULL
    CONSTRAINT quarantine_reason CHECK (reason IN ('MAX_RECOVERY_ATTEMPTS_EXCEEDED', 'EXECUTION_RECOVERY_EXHAUSTED')),
  state           text        NOT NULL DEFAULT 'open'
    CONSTRAINT quarantine_state CHECK (state IN ('open', 'settled')),
  settled_at      timestamptz,
  -- An executor's id, or the role of the operator who closed it.
  settled_by      text,
  -- Tries that have begun and not succeeded.
  failures        int         NOT NULL DEFAULT 0,
  due_at          timestamptz NOT NULL,
  last_error_code text,
  CONSTRAINT settled_iff_settled_at_present CHECK ((state = 'settled') = (settled_at IS NOT NULL)),
  CONSTRAINT settled_iff_settled_by_present CHECK ((state = 'settled') = (settled_by IS NOT NULL))
);
CREATE INDEX quarantine_for_settlement ON tenure.quarantine (queue_id, due_at) WHERE state = 'open';

SELECT tenure.fence_table('tenure.quarantine');

-- Called by each executor that settles the queue's quarantined items, whether it runs the queue or not.
-- The queue belongs to its application from then on; one of another is refused (TN011).
CREATE FUNCTION tenure.settling_queue(queue_name text, application text) RETURNS int
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  queue    int := tenure.queue_id(queue_name);
  owned_by text;
BEGIN
  UPDATE tenure.queue q SET application_name = application WHERE q.id = queue AND q.application_name IS NULL;
  SELECT q.application_name INTO owned_by FROM tenure.queue q WHERE q.id = queue;
  IF owned_by <> application THEN
    RAISE EXCEPTION 'queue % belongs to the application %', queue_name, owned_by USING
      ERRCODE = 'TN011', HINT = 'Settle it from a process of that application.';
  END IF;
  RETURN queue;
END $$;

-- Charges one try of one due item of each queue, of `taken_max` queues, those that have waited longest
-- first. The next try is due after `first_pause`, which doubles with each failure up to `longest_pause`,
-- less up to half of it. What another session has locked is skipped: it is being settled at this moment.
-- The caller settles each in a transaction of its own. A last row without an item tells in how many
-- milliseconds the next one is due.
CREATE FUNCTION tenure.take_settlements(queues int[], first_pause interval, longest_pause interval, taken_max int)
RETURNS TABLE (item_id uuid, queue_id int, failures int, next_due_ms float8)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
  now    timestamptz := tenure.clock();
  queue_ int;
  due    uuid;
  taken  int := 0;
BEGIN
  FOR queue_ IN
    SELECT u.id FROM unnest(queues) u(id)
     CROSS JOIN LATERAL (
       SELECT q.due_at FROM tenure.quarantine q
        WHERE q.queue_id = u.id AND q.state = 'open' AND q.due_at <= now ORDER BY q.due_at LIMIT 1) x
     ORDER BY x.due_at
  LOOP
    -- Before the row: see the lock order.
    PERFORM tenure.admit();
    SELECT q.item_id INTO due FROM tenure.quarantine q
     WHERE q.queue_id = queue_ AND q.state = 'open' AND q.due_at <= now
     ORDER BY q.due_at LIMIT 1 FOR UPDATE SKIP LOCKED;
    CONTINUE WHEN NOT FOUND;
    RETURN QUERY
    UPDATE tenure.quarantine q
       SET failures = q.failures + 1,
           due_at = now + least(longest_pause, first_pause * 2 ^ least(q.failures, 30)) * (0.5 + random() / 2)
     WHERE q.item_id = due
    RETURNING q.item_id, q.queue_id, q.failures, NULL::float8;
    taken := taken + 1;
    EXIT WHEN taken = taken_max;
  END LOOP;
  RETURN QUERY
  SELECT NULL::uuid, NULL::int, NULL::int, (extract(epoch FROM x.due_at - now) * 1000)::float8
    FROM unnest(queues) u(id)
   CROSS JOIN LATERAL (
     SELECT q.due_at FROM tenure.quarantine q
      WHERE q.queue_id = u.id AND q.state = 'open' AND q.due_at > now ORDER BY q.due_at LIMIT 1) x
   ORDER BY x.due_at LIMIT 1;
END $$;

-- The first statement of the transaction that settles an item: locks it and answers what is known of it.
-- No row: it is settled, brought back, or in another session's hands.
CREATE FUNCTION tenure.begin_settlement(item uuid)
RETURNS TABLE (payload json, key text, executions int, reason text, quarantined_at timestamptz)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
  held tenure.quarantine;
BEGIN
  PERFORM tenure.admit();
  -- A statement of its own, because these rows are updated and the one below chooses a partition: see
  -- expire_deadlines (0004).
  SELECT * INTO held FROM tenure.quarantine q WHERE q.item_id = item AND q.state = 'open' FOR UPDATE SKIP LOCKED;
  IF NOT FOUND THEN RETURN; END IF;
  RETURN QUERY
  SELECT i.payload, i.key, held.executions, held.reason, held.quarantined_at FROM tenure.item i WHERE i.id = item;
END $$;

-- The last one of that transaction. False: the application has brought the item back in it.
CREATE FUNCTION tenure.end_settlement(item uuid) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
  UPDATE tenure.quarantine q
     SET state = 'settled', settled_at = tenure.clock(), failures = greatest(q.failures - 1, 0),
         settled_by = current_setting('tenure.executor_id')
   WHERE q.item_id = item AND q.state = 'open';
  RETURN FOUND;
END $$;

-- After a try that did not succeed, as far as its process knows. False: it did, and the answer was lost;
-- or the item is not in quarantine any more. Waits for nobody.
CREATE FUNCTION tenure.settlement_failed(item uuid, error_code text) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
  PERFORM tenure.admit();
  PERFORM FROM tenure.quarantine q WHERE q.item_id = item AND q.state = 'open' FOR UPDATE SKIP LOCKED;
  IF NOT FOUND THEN
    RETURN EXISTS (SELECT FROM tenure.quarantine q WHERE q.item_id = item AND q.state = 'open');
  END IF;
  UPDATE tenure.quarantine q SET last_error_code = left(error_code, 100) WHERE q.item_id = item;
  RETURN true;
END $$;

-- What an operator does waits for no settlement: its transaction is the application's.
--
-- The item was dealt with by hand: nobody settles it any more, and retention may drop it. Answers
-- 'closed', 'settled' (it was before), 'busy' (it is being settled at this moment) or 'unknown'.
CREATE FUNCTION tenure.close_quarantine(item uuid) RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  found_state text;
  of_queue    int;
BEGIN
  PERFORM tenure.admit();
  SELECT q.state, q.queue_id INTO found_state, of_queue FROM tenure.quarantine q WHERE q.item_id = item FOR UPDATE SKIP LOCKED;
  IF NOT FOUND THEN
    RETURN CASE WHEN EXISTS (SELECT FROM tenure.quarantine q WHERE q.item_id = item) THEN 'busy' ELSE 'unknown' END;
  END IF;
  IF found_state <> 'open' THEN RETURN found_state; END IF;
  UPDATE tenure.quarantine q SET state = 'settled', settled_at = tenure.clock(), settled_by = session_user
   WHERE q.item_id = item;
  PERFORM tenure.audit('quarantine.closed', item, of_queue, NULL);
  RETURN 'closed';
END $$;

-- As tenure.retry (0004), for quarantined items alone. Answers 'available', 'busy', 'unknown', or the
-- state of an item that is not in quarantine.
CREATE FUNCTION tenure.retry_quarantined(item uuid) RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  at record;
BEGIN
  PERFORM tenure.admit();
  PERFORM FROM tenure.quarantine q WHERE q.item_id = item FOR UPDATE SKIP LOCKED;
  IF FOUND THEN RETURN tenure.retry(item); END IF;
  IF EXISTS (SELECT FROM tenure.quarantine q WHERE q.item_id = item) THEN RETURN 'busy'; END IF;
  SELECT * INTO at FROM tenure.item_place(item);
  RETURN CASE WHEN at.place IS NULL THEN 'unknown' ELSE coalesce(at.outcome, at.place) END;
END $$;

SELECT tenure.grant_roles();

INSERT INTO tenure.migration (number, name) VALUES (9, 'quarantine');
