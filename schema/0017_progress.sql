-- Progress: the last report of each item that reports, for whoever watches it.
--
-- A report is a hint to people: it is written beside the work, replaces the one before, and decides
-- nothing. The last one stays with the item's outcome and goes with its bucket, so that nothing has to
-- be deleted when an item settles, which is done in groups of a thousand. Items without reports have
-- no row.
--
-- P1. An attempt replaces what earlier attempts have reported, and an earlier one nothing of a later
--     one: (attempt, number) only grows.
-- P2. Only the executor that holds the claim of an attempt reports for it, under the fence.
--
-- Locks: none that another session can wait for.
-- Overlap: nothing older exists.

CREATE TABLE tenure.progress (
  item_id     uuid        NOT NULL PRIMARY KEY,
  attempt     int         NOT NULL,
  -- Of the attempt's reports, those that were never written counted too.
  number      int         NOT NULL,
  value       json        NOT NULL,
  reported_at timestamptz NOT NULL
) WITH (
  -- Updated several times a second while it is watched or not; nothing that changes is indexed.
  fillfactor = 70, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 1000
);

-- Who is to be told of the next report of an item, once. As with `waiter` (0003), rows of clients that
-- died go with their item's bucket, if no report has taken them before.
CREATE TABLE tenure.progress_waiter (
  item_id uuid NOT NULL,
  channel text NOT NULL,
  PRIMARY KEY (item_id, channel)
);

SELECT tenure.fence_table('tenure.progress'), tenure.fence_table('tenure.progress_waiter');

-- Answers the reports of attempts that hold no claim (any more): there is nothing to repeat.
--
-- The claim is looked at and not locked: a settle of the same attempt would have to wait, and a report
-- that comes just behind it does no harm. In the order of ids, because these rows are updated.
CREATE FUNCTION tenure.report_progress(ids uuid[], attempts int[], numbers int[], reports text[])
RETURNS TABLE (id uuid, attempt int)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
  me  uuid := nullif(current_setting('tenure.executor_id', true), '')::uuid;
  now timestamptz;
BEGIN
  PERFORM tenure.admit();
  now := tenure.clock();
  INSERT INTO tenure.progress AS p (item_id, attempt, number, value, reported_at)
  SELECT u.id, u.attempt, u.number, u.report::json, now
    FROM unnest(ids, attempts, numbers, reports) u(id, attempt, number, report)
   WHERE EXISTS (
     SELECT FROM tenure.claimed c WHERE c.id = u.id AND c.attempt = u.attempt AND c.owner IS NOT DISTINCT FROM me)
   ORDER BY u.id
  ON CONFLICT (item_id) DO UPDATE
    SET attempt = excluded.attempt, number = excluded.number, value = excluded.value, reported_at = excluded.reported_at
    WHERE (p.attempt, p.number) < (excluded.attempt, excluded.number);
  RETURN QUERY
  SELECT u.id, u.attempt FROM unnest(ids, attempts) u(id, attempt)
   WHERE NOT EXISTS (
     SELECT FROM tenure.claimed c WHERE c.id = u.id AND c.attempt = u.attempt AND c.owner IS NOT DISTINCT FROM me);
END $$;

-- A watcher registers, commits, then reads; whoever reports commits, then reads the watchers. So one of
-- the two sees the other.
CREATE FUNCTION tenure.watch_progress(items uuid[], channel text) RETURNS void
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
  INSERT INTO tenure.progress_waiter (item_id, channel)
  SELECT DISTINCT u.id, watch_progress.channel FROM unnest(items) u(id)
  ON CONFLICT DO NOTHING
$$;

CREATE FUNCTION tenure.forget_progress(items uuid[], watcher_channel text) RETURNS void
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$ DELETE FROM tenure.progress_waiter w WHERE w.item_id = ANY(items) AND w.channel = watcher_channel $$;

CREATE FUNCTION tenure.notify_progress(items uuid[]) RETURNS int
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
  told int;
BEGIN
  IF NOT EXISTS (SELECT FROM tenure.progress_waiter) THEN RETURN 0; END IF;
  WITH gone AS (
    DELETE FROM tenure.progress_waiter w WHERE w.item_id = ANY(items) RETURNING w.item_id, w.channel)
  SELECT count(pg_notify(g.channel, 'progress ' || g.item_id::text)) INTO told FROM gone g;
  RETURN told;
END $$;

-- The last reports of those items that have one later than the one the caller knows.
CREATE FUNCTION tenure.item_progress(items uuid[], known_attempts int[], known_numbers int[])
RETURNS TABLE (id uuid, attempt int, number int, value json)
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
  SELECT p.item_id, p.attempt, p.number, p.value
    FROM unnest(items, known_attempts, known_numbers) u(id, attempt, number)
   CROSS JOIN LATERAL (SELECT * FROM tenure.progress x WHERE x.item_id = u.id OFFSET 0) p
   WHERE (p.attempt, p.number) > (u.attempt, u.number)
$$;

SELECT tenure.grant_roles();

INSERT INTO tenure.migration (number, name) VALUES (17, 'progress');
