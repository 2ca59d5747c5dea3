-- The probe: a private queue for each executor, on which it sends itself an item and waits for its
-- outcome, through the same claim and settle as all work, whatever its business queues do.
--
--   register --> idle --begin--> outstanding --claim, settle--> settled --end, all of it deleted--> idle
--                  |                  |                            |
--                  +-- revocation or release: deleted, with the item wherever it is
--
-- A private queue is a number below zero and has no row in `queue` or `lane`: nobody can name it,
-- hand in to it or list it, and what goes over all queues of an owner costs no more with a thousand
-- executors than with one. The number is the queue's and its lane's. `queue_id > 0` or `lane_id > 0`
-- leaves out, of any table of items, what is no work.
--
-- At most one item of an executor is outstanding: its row in `probe` is locked before one is made.
--
-- Locks: none that another session can wait for.
-- Overlap: older code runs on without a probe.

CREATE SEQUENCE tenure.probe_queue AS int INCREMENT BY -1;

CREATE TABLE tenure.probe (
  executor_id uuid NOT NULL PRIMARY KEY,
  queue_id    int  NOT NULL DEFAULT nextval('tenure.probe_queue')
    CONSTRAINT private_queues_are_below_zero CHECK (queue_id < 0),
  item_id     uuid
) WITH (
  -- Two updates for each probe, which must stay HOT.
  fillfactor = 50
);
SELECT tenure.fence_table('tenure.probe');

-- The number of the private queue of this session's executor, made at the first call.
CREATE FUNCTION tenure.register_probe() RETURNS int
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  me uuid := nullif(current_setting('tenure.executor_id', true), '')::uuid;
BEGIN
  INSERT INTO tenure.probe (executor_id) VALUES (me) ON CONFLICT DO NOTHING;
  RETURN (SELECT p.queue_id FROM tenure.probe p WHERE p.executor_id = me);
END $$;

-- The item of this session's executor that is outstanding: the last one, if it was not ended, or else
-- a new one. Two callers get the same.
CREATE FUNCTION tenure.begin_probe() RETURNS uuid
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  me    uuid := nullif(current_setting('tenure.executor_id', true), '')::uuid;
  probe tenure.probe;
  now   timestamptz;
BEGIN
  -- The executor's row before the probe's, as in a revocation.
  PERFORM tenure.admit();
  SELECT * INTO probe FROM tenure.probe p WHERE p.executor_id = me FOR UPDATE;
  IF NOT FOUND THEN
    RAISE EXCEPTION 'executor % has no private queue', me USING ERRCODE = 'TN003';
  END IF;
  IF probe.item_id IS NULL THEN
    now := tenure.clock();
    IF coalesce((SELECT max(b.upper_at) FROM tenure.bucket b), '-infinity') < now + interval '24 hours' THEN
      PERFORM tenure.create_buckets(interval '1344 hours');
    END IF;
    probe.item_id := tenure.new_id();
    PERFORM tenure.insert_items(probe.queue_id, probe.queue_id, now, ARRAY[probe.item_id],
      ARRAY[probe.item_id], ARRAY['null'], NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL);
    UPDATE tenure.probe p SET item_id = probe.item_id WHERE p.executor_id = me;
  END IF;
  RETURN probe.item_id;
END $$;

-- Deletes the item that is outstanding if it has settled, and tells its outcome: NULL while it has
-- not, 'none' when there is no such item.
CREATE FUNCTION tenure.end_probe() RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
  me      uuid := nullif(current_setting('tenure.executor_id', true), '')::uuid;
  item    uuid;
  outcome text;
BEGIN
  PERFORM tenure.admit();
  SELECT p.item_id INTO item FROM tenure.probe p WHERE p.executor_id = me FOR UPDATE;
  IF item IS NULL THEN RETURN 'none'; END IF;
  DELETE FROM tenure.done d WHERE d.id = item RETURNING d.outcome INTO outcome;
  IF FOUND THEN
    DELETE FROM tenure.item i WHERE i.id = item;
    UPDATE tenure.probe p SET item_id = NULL WHERE p.executor_id = me;
  END IF;
  RETURN outcome;
END $$;

-- Deletes the private queue of an executor that ends, with whatever is on it, before its work is
-- handed back: a probe is nobody's to go on with. Its transactions are over, so nothing is waited for.
CREATE FUNCTION tenure.drop_probe(executor uuid) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
  probe tenure.probe;
BEGIN
  DELETE FROM tenure.probe p WHERE p.executor_id = executor RETURNING * INTO probe;
  IF probe.item_id IS NULL THEN RETURN; END IF;
  DELETE FROM tenure.ready r WHERE r.lane_id = probe.queue_id;
  DELETE FROM tenure.claimed c WHERE c.id = probe.item_id;
  DELETE FROM tenure.delayed d WHERE d.id = probe.item_id;
  DELETE FROM tenure.done d WHERE d.id = probe.item_id;
  DELETE FROM tenure.step s WHERE s.item_id = probe.item_id;
  DELETE FROM tenure.item i WHERE i.id = probe.item_id;
  DELETE FROM tenure.deadline d WHERE d.id = probe.item_id;
  DELETE FROM tenure.cancel_request x WHERE x.id = probe.item_id;
  DELETE FROM tenure.waiter w WHERE w.item_id = probe.item_id;
END $$;

-- As before, and with the executor's private queue: a claim whose answer was lost stops a probe, too.
CREATE OR REPLACE FUNCTION tenure.claims_of(executor uuid, older_than interval, claims_max int)
RETURNS TABLE (id uuid, attempt int, lane_id int)
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
  SELECT c.id, c.attempt, c.lane_id FROM tenure.claimed c
   WHERE c.queue_id = ANY(ARRAY(SELECT q.id FROM tenure.queue q
                                UNION ALL SELECT p.queue_id FROM tenure.probe p WHERE p.executor_id = executor))
     AND c.owner = executor
     AND c.claimed_at < (SELECT tenure.clock()) - older_than
   ORDER BY c.claimed_at LIMIT claims_max
$$;

SELECT tenure.grant_roles();

INSERT INTO tenure.migration (number, name) VALUES (7, 'probe');
