-- Limits beyond counts: pause, rates over a rolling window, turns between keys, priorities that age. All of
-- them are columns of the queue's row, which a claim reads anyway; a queue without them pays nothing.
--
-- R1. In any window of its rate a queue starts at most its limit, by `tenure.clock()`, whoever claims; so does
--     each key under the rate of its keys. A start is a claim, whatever becomes of it: what is handed back
--     before it has run has used its place.
-- R2. What is stored of it is bounded: at most a thousand rows for each window, of a queue or of a key.
--
-- Locks: tenure.queue and tenure.item, for as long as adding a column takes.
-- Overlap: older code knows no rate and no pause, and claims from such queues as if they had none.

-- `aging` is the time for which an item gains one step of priority on those that are handed in later. An
-- item's place is fixed at enqueue, so this is done the other way round: at `aging_since` the queue was
-- `aging_steps` steps old, and an item is placed as many steps lower as the queue is old when it comes.
-- Both go on where they are when the policy changes, so that no item overtakes those before it by that.
ALTER TABLE tenure.queue
  ADD COLUMN paused_at       timestamptz,
  ADD COLUMN rate_limit      int CONSTRAINT rate_limit_positive CHECK (rate_limit > 0),
  ADD COLUMN rate_window     interval CONSTRAINT rate_window_positive CHECK (rate_window > interval '0'),
  ADD COLUMN key_rate_limit  int CONSTRAINT key_rate_limit_positive CHECK (key_rate_limit > 0),
  ADD COLUMN key_rate_window interval CONSTRAINT key_rate_window_positive CHECK (key_rate_window > interval '0'),
  ADD COLUMN takes_turns     boolean NOT NULL DEFAULT false,
  ADD COLUMN aging           interval CONSTRAINT aging_at_least_a_second CHECK (aging >= interval '1 second'),
  ADD COLUMN aging_since     timestamptz,
  ADD COLUMN aging_steps     int NOT NULL DEFAULT 0,
  ADD CONSTRAINT rate_has_a_window CHECK ((rate_limit IS NULL) = (rate_window IS NULL)),
  ADD CONSTRAINT key_rate_has_a_window CHECK ((key_rate_limit IS NULL) = (key_rate_window IS NULL)),
  ADD CONSTRAINT aging_since_an_instant CHECK (aging IS NULL OR aging_since IS NOT NULL);

-- By how many steps `priority` is lower than what was asked for. NULL where nothing ages, and a NULL is free.
ALTER TABLE tenure.item ADD COLUMN aged int;

-- What was started, for as long as a rate looks back. Starts within a thousandth of the window are one
-- row, which counts until its last one is over: a window is never passed, and a place may come back that
-- much later. The key '' is the queue as a whole. Written under the queue's lock.
CREATE TABLE tenure.rate_log (
  queue_id int         NOT NULL,
  key      text        NOT NULL,
  first_at timestamptz NOT NULL,
  last_at  timestamptz NOT NULL,
  started  int         NOT NULL,
  PRIMARY KEY (queue_id, key, first_at)
) WITH (
  -- Updated once for each claim while its row is young, so last_at is in no index.
  fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000
);
CREATE INDEX rate_log_for_pruning ON tenure.rate_log (queue_id, first_at);
SELECT tenure.fence_table('tenure.rate_log');

-- The policy of a queue, by the executor that registers it (0004); the last one decides. Members: rateLimit,
-- rateWindowMs, keyRateLimit, keyRateWindowMs, takesTurns, agingMs; one that is missing is off. After a
-- window has become longer, the first one may know less than all of its starts.
CREATE FUNCTION tenure.set_limits(limited_queue int, limits jsonb) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  queue     tenure.queue;
  now       timestamptz;
  new_aging interval := make_interval(secs => (limits ->> 'agingMs')::float8 / 1000);
BEGIN
  SELECT * INTO queue FROM tenure.queue q WHERE q.id = limited_queue FOR NO KEY UPDATE;
  UPDATE tenure.queue q
     SET rate_limit = (limits ->> 'rateLimit')::int,
         rate_window = make_interval(secs => (limits ->> 'rateWindowMs')::float8 / 1000),
         key_rate_limit = (limits ->> 'keyRateLimit')::int,
         key_rate_window = make_interval(secs => (limits ->> 'keyRateWindowMs')::float8 / 1000),
         takes_turns = coalesce((limits ->> 'takesTurns')::boolean, false)
   WHERE q.id = limited_queue
     AND (q.rate_limit, q.rate_window, q.key_rate_limit, q.key_rate_window, q.takes_turns)
         IS DISTINCT FROM (
           (limits ->> 'rateLimit')::int, make_interval(secs => (limits ->> 'rateWindowMs')::float8 / 1000),
           (limits ->> 'keyRateLimit')::int, make_interval(secs => (limits ->> 'keyRateWindowMs')::float8 / 1000),
           coalesce((limits ->> 'takesTurns')::boolean, false));
  IF queue.aging IS DISTINCT FROM new_aging THEN
    now := tenure.clock();
    UPDATE tenure.queue q
       SET aging = new_aging, aging_since = now,
           aging_steps = coalesce(tenure.aged_at(now, q.aging, q.aging_since, q.aging_steps), 0)
     WHERE q.id = limited_queue;
  END IF;
END $$;

-- How many steps a queue is old; NULL for one that has never aged. Not below where it was, should the clock
-- have been set back.
CREATE FUNCTION tenure.aged_at(now timestamptz, aging interval, since timestamptz, steps int) RETURNS int
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
  SELECT CASE WHEN since IS NOT NULL THEN
    least(2000000000, steps + CASE WHEN aging IS NULL THEN 0 ELSE
      greatest(0, floor(extract(epoch FROM now - since) / extract(epoch FROM aging))) END)::int END
$$;

-- Holds for claims that begin after its commit; what runs goes on. A name that nobody has used yet is as good
-- as any: a queue may be paused before its first item comes. Answers since when it is paused.
CREATE FUNCTION tenure.pause_queue(queue_name text) RETURNS timestamptz
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  paused int := tenure.queue_id(queue_name);
  since  timestamptz;
BEGIN
  UPDATE tenure.queue q SET paused_at = coalesce(q.paused_at, tenure.clock()) WHERE q.id = paused
  RETURNING q.paused_at INTO since;
  PERFORM tenure.audit('queue.paused', NULL, paused, NULL);
  RETURN since;
END $$;

-- Answers whether it was paused. Claimers are told at the commit.
CREATE FUNCTION tenure.resume_queue(queue_name text) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  resumed int;
BEGIN
  UPDATE tenure.queue q SET paused_at = NULL WHERE q.name = queue_name AND q.paused_at IS NOT NULL
  RETURNING q.id INTO resumed;
  IF resumed IS NULL THEN RETURN false; END IF;
  PERFORM tenure.audit('queue.resumed', NULL, resumed, NULL);
  PERFORM tenure.tell('tenure_work', resumed::text);
  RETURN true;
END $$;

-- How many starts a window still has room for: of the queue ('') or of a key. Read under the queue's lock it
-- is exact, otherwise good for a look.
CREATE FUNCTION tenure.rate_room(
  looked_queue int, looked_key text, rate int, span interval, now timestamptz
) RETURNS int
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
SET plan_cache_mode = force_generic_plan
AS $$
BEGIN
  RETURN rate - (
    SELECT coalesce(sum(l.started), 0)::int FROM tenure.rate_log l
     WHERE l.queue_id = looked_queue AND l.key = looked_key
       AND l.first_at > now - span * 1.001 AND l.last_at > now - span);
END $$;

-- In how many milliseconds the oldest start leaves a window; NULL when there is none in it. Somewhat later,
-- rather: for each place alone a claim would be made, and a hundred in a window, or ten a second, are enough.
CREATE FUNCTION tenure.rate_due_ms(looked_queue int, looked_key text, span interval, now timestamptz)
RETURNS float8
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
SET plan_cache_mode = force_generic_plan
AS $$
BEGIN
  RETURN (
    SELECT extract(epoch FROM greatest(l.last_at + span - now, least(span / 100, interval '100 ms'))) * 1000
      FROM tenure.rate_log l
     WHERE l.queue_id = looked_queue AND l.key = looked_key
       AND l.first_at > now - span * 1.001 AND l.last_at > now - span
     ORDER BY l.first_at LIMIT 1);
END $$;

-- The instant of a claim under a rate, and before that what has become too old goes. Under the queue's lock.
-- No two claims of a queue have the same instant, so that it names what one of them has taken.
--
-- After the clock was set back, starts of the future count as if they were made now: they were made before,
-- so that nothing is forgotten, and no queue waits longer than for one more window.
CREATE FUNCTION tenure.begin_start(
  started_queue int, rate_window interval, key_rate_window interval
) RETURNS timestamptz
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
  now     timestamptz := tenure.clock();
  latest  timestamptz;
  keys    text[];
  counts  int[];
BEGIN
  SELECT l.last_at INTO latest FROM tenure.rate_log l
   WHERE l.queue_id = started_queue AND l.key = '' ORDER BY l.first_at DESC LIMIT 1;
  IF latest > now + interval '1 second' THEN
    SELECT array_agg(f.key), array_agg(f.started) INTO keys, counts FROM (
      SELECT l.key, sum(l.started)::int AS started FROM tenure.rate_log l
       WHERE l.queue_id = started_queue AND l.last_at > now GROUP BY l.key) f;
    DELETE FROM tenure.rate_log l WHERE l.queue_id = started_queue AND l.last_at > now;
    INSERT INTO tenure.rate_log AS l (queue_id, key, first_at, last_at, started)
    SELECT started_queue, u.key, now, now, u.started FROM unnest(keys, counts) u(key, started)
    ON CONFLICT (queue_id, key, first_at) DO UPDATE SET started = l.started + excluded.started;
    latest := now;
  END IF;
  now := greatest(now, latest + interval '1 microsecond');
  PERFORM tenure.prune_rates(started_queue, greatest(rate_window, key_rate_window), now, 500);
  RETURN now;
END $$;

-- Notes what a claim has taken at `now`, under the queue's lock and before it is let go.
CREATE FUNCTION tenure.note_starts(
  started_queue int, executor uuid, now timestamptz, started_count int, rate_window interval, key_rate_window interval
) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
  keys   text[] := ARRAY[''];
  counts int[]  := ARRAY[started_count];
BEGIN
  IF key_rate_window IS NOT NULL THEN
    SELECT keys || array_agg(t.key), counts || array_agg(t.started) INTO keys, counts FROM (
      SELECT c.key, count(*)::int AS started FROM tenure.claimed c
       WHERE c.queue_id = started_queue AND c.owner = executor AND c.claimed_at = now AND c.key IS NOT NULL
       GROUP BY c.key) t;
  END IF;
  WITH taken AS MATERIALIZED (
    SELECT u.key, u.started,
           coalesce((SELECT max(l.first_at) FROM tenure.rate_log l
                      WHERE l.queue_id = started_queue AND l.key = u.key
                        AND l.first_at > now - coalesce(
                              CASE u.key WHEN '' THEN rate_window ELSE key_rate_window END, key_rate_window) / 1000),
                    now) AS first_at
      FROM unnest(keys, counts) u(key, started)
  )
  INSERT INTO tenure.rate_log AS l (queue_id, key, first_at, last_at, started)
  SELECT started_queue, t.key, t.first_at, now, t.started FROM taken t
  ON CONFLICT (queue_id, key, first_at) DO UPDATE SET started = l.started + excluded.started, last_at = excluded.last_at;
END $$;

-- Forgets starts that no window looks back at any more; skips rows that somebody else is about to delete.
CREATE FUNCTION tenure.prune_rates(pruned_queue int, longest interval, now timestamptz, pruned_max int) RETURNS int
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
  old    tid[];
BEGIN
  old := ARRAY(
    SELECT l.ctid FROM tenure.rate_log l
     WHERE l.queue_id = pruned_queue AND l.first_at <= now - longest * 1.001
     ORDER BY l.first_at LIMIT pruned_max FOR UPDATE SKIP LOCKED);
  IF old <> '{}' THEN
    DELETE FROM tenure.rate_log l WHERE l.ctid = ANY(old);
  END IF;
  RETURN cardinality(old);
END $$;

-- The same for queues that have gone quiet or have no rate any more; a part of retention.
CREATE FUNCTION tenure.prune_quiet_rates() RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  now timestamptz := tenure.clock();
BEGIN
  IF NOT EXISTS (SELECT FROM tenure.rate_log) THEN RETURN; END IF;
  PERFORM tenure.prune_rates(q.id, coalesce(greatest(q.rate_window, q.key_rate_window), interval '0'), now, 10000)
     FROM tenure.queue q ORDER BY q.id;
END $$;

SELECT tenure.grant_roles();

INSERT INTO tenure.migration (number, name) VALUES (10, 'limits');
