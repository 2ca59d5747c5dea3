-- What the queue monitor of a process asks: is there work that it could claim, and who has claimed last.
--
-- M1. A look costs the same however much waits, runs or has ever been done: it stops at the first item
--     that could start, counts no further than a limit, and never reads history.
-- M2. Nothing is written for a queue from which the executor has claimed nothing since its last look.
--
-- Locks: none that another session can wait for.
-- Overlap: older code neither writes nor reads the table; its claims are then not seen by the monitors
-- of newer processes, which count a queue as starved when only older ones claim from it.

-- The last claim of each executor that took something, as told by its own monitor. The row goes with the
-- executor's lease: what it had is handed back then.
CREATE TABLE tenure.queue_activity (
  queue_id    int         NOT NULL,
  executor_id uuid        NOT NULL,
  claimed_at  timestamptz NOT NULL,
  PRIMARY KEY (queue_id, executor_id)
) WITH (
  -- Written every few seconds by each busy executor: HOT, so claimed_at is in no index.
  fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500
);
SELECT tenure.fence_table('tenure.queue_activity');

-- Slots that pull sessions (0013) hold: of a queue, or of one of its keys. Counts no further than to
-- `counted_max`. In PL/pgSQL, because the table comes later.
CREATE FUNCTION tenure.slots_leased(looked_queue int, looked_key text, counted_max int) RETURNS int
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
BEGIN
  RETURN (SELECT count(*) FROM (
    SELECT FROM tenure.capacity_lease c
     WHERE c.queue_id = looked_queue AND (looked_key IS NULL OR c.key = looked_key) LIMIT counted_max) u);
END $$;

-- Whether some key of these lanes could start its next item: the key runs fewer than it may, its rate has
-- room, and its next item is in one of `walked` and not in another lane. At most 500 keys of a lane are
-- looked at, as by a claim, and usually one: the walk ends with the first that may.
CREATE FUNCTION tenure.has_free_key(
  looked_queue int, walked int[], lanes int[], key_limit int, unlocked boolean
) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
  now  timestamptz := tenure.clock();
  rate record;
BEGIN
  SELECT q.key_rate_limit, q.key_rate_window INTO rate FROM tenure.queue q WHERE q.id = looked_queue;
  RETURN (
  WITH RECURSIVE head (lane_id, key, rank, seq, tid, n) AS (
    SELECT x.lane_id, x.key, x.rank, x.seq, x.tid, 1
      FROM unnest(walked) l(lane)
     CROSS JOIN LATERAL (
       SELECT r.lane_id, r.key, r.rank, r.seq, r.ctid AS tid FROM tenure.ready r
        WHERE r.lane_id = l.lane AND r.key IS NOT NULL
        ORDER BY r.key, r.rank, r.seq LIMIT 1) x
    UNION ALL
    SELECT x.lane_id, x.key, x.rank, x.seq, x.tid, h.n + 1
      FROM head h
     CROSS JOIN LATERAL (
       SELECT r.lane_id, r.key, r.rank, r.seq, r.ctid AS tid FROM tenure.ready r
        WHERE r.lane_id = h.lane_id AND r.key IS NOT NULL AND r.key > h.key
        ORDER BY r.key, r.rank, r.seq LIMIT 1) x
     WHERE h.n < 500
  )
  SELECT coalesce((
    SELECT true FROM head h
     WHERE (SELECT count(*) FROM (
              SELECT FROM tenure.claimed c WHERE c.queue_id = looked_queue AND c.key = h.key LIMIT key_limit) u)
           + tenure.slots_leased(looked_queue, h.key, key_limit) < key_limit
       AND (rate.key_rate_limit IS NULL
            OR tenure.rate_room(looked_queue, h.key, rate.key_rate_limit, rate.key_rate_window, now) > 0)
       AND (SELECT true FROM unnest(lanes) o(lane)
             CROSS JOIN LATERAL (
               SELECT r.rank, r.seq FROM tenure.ready r
                WHERE r.lane_id = o.lane AND r.key = h.key ORDER BY r.rank, r.seq LIMIT 1) x
             WHERE (x.rank, x.seq) < (h.rank, h.seq) LIMIT 1) IS NULL
       AND (NOT unlocked OR EXISTS (
              SELECT FROM tenure.ready r WHERE r.ctid = h.tid FOR KEY SHARE SKIP LOCKED))
     LIMIT 1), false));
END $$;

-- What a key of the queue may run at once; NULL where keys do not matter. One that has only a rate counts
-- as one with a limit that is never reached.
CREATE FUNCTION tenure.limit_of_key(per_key_limit int, key_rate_limit int) RETURNS int
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$ SELECT coalesce(per_key_limit, CASE WHEN key_rate_limit IS NOT NULL THEN 2147483647 END) $$;

-- Whether these lanes have an item that no key's limit holds back.
--
-- `unlocked`: nor another transaction. A client that has cancelled an item and does not commit hides it
-- from every claim, and no process must be ended for that. Not always, because a lock held for a moment
-- makes a claim pass over the item, and then it waits for a poll.
CREATE FUNCTION tenure.has_startable(
  looked_queue int, walked int[], lanes int[], key_limit int, unlocked boolean
) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
  IF key_limit IS NOT NULL THEN
    IF tenure.has_free_key(looked_queue, walked, lanes, key_limit, unlocked) THEN RETURN true; END IF;
    -- Items without a key stand among those with one, and no index leads to them: the next 1,000.
    PERFORM FROM unnest(walked) l(lane)
      CROSS JOIN LATERAL (
        SELECT x.tid FROM (
          SELECT r.ctid AS tid, r.key FROM tenure.ready r
           WHERE r.lane_id = l.lane ORDER BY r.rank, r.seq LIMIT 1000) x
         WHERE x.key IS NULL
           AND (NOT unlocked OR EXISTS (
                  SELECT FROM tenure.ready r WHERE r.ctid = x.tid FOR KEY SHARE SKIP LOCKED))
         LIMIT 1) x
     LIMIT 1;
  ELSIF unlocked THEN
    PERFORM FROM unnest(walked) l(lane)
      CROSS JOIN LATERAL (
        SELECT FROM tenure.ready r WHERE r.lane_id = l.lane
         ORDER BY r.rank, r.seq LIMIT 1 FOR KEY SHARE SKIP LOCKED) x
     LIMIT 1;
  ELSE
    PERFORM FROM unnest(walked) l(lane)
      CROSS JOIN LATERAL (
        SELECT FROM tenure.ready r WHERE r.lane_id = l.lane ORDER BY r.rank, r.seq LIMIT 1) x
     LIMIT 1;
  END IF;
  RETURN FOUND;
END $$;

-- One look at the queues of a process: those in `looked`, of which `unlocked` ask for certainty. Tells
-- of each whether its global limit is reached, whether it is held, being paused or having used up its
-- rate, whether a claim with these versions would find a fresh item or a suspect, and how long ago anybody
-- has claimed, if the monitors have told and it matters.
--
-- Before that it notes the caller's own claims: `claimed` queues, so many milliseconds ago. Alone in
-- its row, so it waits for nobody; the executor's row comes first, by the fence.
CREATE FUNCTION tenure.observe_queues(
  versions text[], looked int[], unlocked int[], claimed int[], claimed_ago_ms float8[]
) RETURNS TABLE (
  queue int, is_full boolean, is_held boolean, has_fresh boolean, has_suspect boolean, last_claim_ms float8
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
  me  uuid := nullif(current_setting('tenure.executor_id', true), '')::uuid;
  now timestamptz;
BEGIN
  IF me IS NOT NULL AND cardinality(claimed) > 0 THEN
    now := tenure.clock();
    INSERT INTO tenure.queue_activity AS a (queue_id, executor_id, claimed_at)
    SELECT u.id, me, now - make_interval(secs => u.ago_ms / 1000)
      FROM unnest(claimed, claimed_ago_ms) u(id, ago_ms)
    ON CONFLICT ON CONSTRAINT queue_activity_pkey DO UPDATE SET claimed_at = excluded.claimed_at;
  END IF;
  now := tenure.clock();
  RETURN QUERY
  SELECT q.id, f.is_full, f.is_held, s.has_fresh, s.has_suspect,
         -- A clock that was set back leaves times in the future: they are no claims of now.
         CASE WHEN (s.has_fresh OR s.has_suspect) AND NOT f.is_full AND NOT f.is_held THEN (
           SELECT extract(epoch FROM now - max(a.claimed_at))::float8 * 1000 FROM tenure.queue_activity a
            WHERE a.queue_id = q.id AND a.claimed_at <= now) END
    FROM tenure.queue q
   CROSS JOIN LATERAL (
     SELECT tenure.is_full(q.id, q.global_limit) AS is_full,
            q.paused_at IS NOT NULL OR (q.rate_limit IS NOT NULL
              AND tenure.rate_room(q.id, '', q.rate_limit, q.rate_window, now) <= 0) AS is_held
     OFFSET 0) f
   CROSS JOIN LATERAL (
     SELECT coalesce(array_agg(x.id) FILTER (WHERE NOT x.suspect), '{}') AS fresh,
            coalesce(array_agg(x.id) FILTER (WHERE x.suspect), '{}') AS suspect
       FROM tenure.lane x
      WHERE x.queue_id = q.id AND (x.version IS NULL OR x.version = ANY(versions))) l
   CROSS JOIN LATERAL (
     SELECT tenure.has_startable(q.id, l.fresh, l.fresh || l.suspect,
              tenure.limit_of_key(q.per_key_limit, q.key_rate_limit), q.id = ANY(unlocked)) AS has_fresh,
            tenure.has_startable(q.id, l.suspect, l.fresh || l.suspect,
              tenure.limit_of_key(q.per_key_limit, q.key_rate_limit), q.id = ANY(unlocked)) AS has_suspect
     OFFSET 0) s
   WHERE q.id = ANY(looked);
END $$;

-- Counts no further than the limit.
CREATE FUNCTION tenure.is_full(looked_queue int, queue_limit int) RETURNS boolean
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
  SELECT queue_limit IS NOT NULL AND (
    SELECT count(*) FROM (
      SELECT FROM tenure.claimed c WHERE c.queue_id = looked_queue LIMIT queue_limit) u)
    + tenure.slots_leased(looked_queue, NULL, queue_limit) >= queue_limit
$$;

-- For people: what waits and what is claimed, of every queue that has either, and what is known of why.
-- `waiting_*` is the item that was handed in first of those that could be claimed, looked for in the first
-- 100 priorities of each lane; `claimed_*` the one that was claimed first. Executors are those that hold
-- a live lease: of the queue's application, and of them those of the waiting item's version.
CREATE FUNCTION tenure.queue_facts()
RETURNS TABLE (
  queue text, application_name text, global_limit int, per_key_limit int, paused_at timestamptz,
  rate_limit int, rate_window_ms float8, is_rate_full boolean, is_full boolean, has_startable boolean,
  waiting_id uuid, waiting_since timestamptz, waiting_version text, waiting_is_suspect boolean,
  claimed int, claimed_id uuid, claimed_by uuid, claimed_since timestamptz,
  last_claim_at timestamptz, executors int, executors_of_version int, observed_at timestamptz
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
  now timestamptz := tenure.clock();
BEGIN
  RETURN QUERY
  SELECT q.name, q.application_name, q.global_limit, q.per_key_limit, q.paused_at,
         q.rate_limit, extract(epoch FROM q.rate_window)::float8 * 1000,
         q.rate_limit IS NOT NULL AND tenure.rate_room(q.id, '', q.rate_limit, q.rate_window, now) <= 0,
         tenure.is_full(q.id, q.global_limit),
         CASE WHEN w.id IS NULL THEN false
              ELSE tenure.has_startable(q.id, l.ids, l.ids,
                     tenure.limit_of_key(q.per_key_limit, q.key_rate_limit), false) END,
         w.id, (SELECT i.enqueued_at FROM tenure.item i WHERE i.id = w.id), w.version, w.suspect,
         r.claimed, r.id, r.owner, r.claimed_at,
         -- The claims that still run tell it without a monitor.
         greatest(r.last_at, (
           SELECT max(a.claimed_at) FROM tenure.queue_activity a WHERE a.queue_id = q.id)),
         x.executors, x.of_version, now
    FROM tenure.queue q
   CROSS JOIN LATERAL (
     SELECT coalesce(array_agg(y.id), '{}') AS ids FROM tenure.lane y WHERE y.queue_id = q.id) l
    LEFT JOIN LATERAL (
      WITH RECURSIVE head (lane_id, rank, seq, id, n) AS (
        SELECT y.lane_id, y.rank, y.seq, y.id, 1
          FROM unnest(l.ids) u(lane)
         CROSS JOIN LATERAL (
           SELECT e.lane_id, e.rank, e.seq, e.id FROM tenure.ready e
            WHERE e.lane_id = u.lane ORDER BY e.rank, e.seq LIMIT 1) y
        UNION ALL
        SELECT y.lane_id, y.rank, y.seq, y.id, h.n + 1
          FROM head h
         CROSS JOIN LATERAL (
           SELECT e.lane_id, e.rank, e.seq, e.id FROM tenure.ready e
            WHERE e.lane_id = h.lane_id AND e.rank > h.rank ORDER BY e.rank, e.seq LIMIT 1) y
         WHERE h.n < 100
      )
      SELECT h.id, y.version, y.suspect FROM head h JOIN tenure.lane y ON y.id = h.lane_id
       ORDER BY h.seq LIMIT 1) w ON true
    LEFT JOIN LATERAL (
      SELECT (count(*) OVER ())::int AS claimed, c.id, c.owner, c.claimed_at,
             max(c.claimed_at) OVER () AS last_at
        FROM tenure.claimed c WHERE c.queue_id = q.id ORDER BY c.claimed_at, c.id LIMIT 1) r ON true
   CROSS JOIN LATERAL (
     SELECT count(*)::int AS executors,
            (count(*) FILTER (WHERE w.version IS NULL OR e.application_version = w.version))::int AS of_version
       FROM tenure.executor e
      WHERE e.application_name = q.application_name AND e.state = 'active' AND e.expires_at > now) x
   WHERE w.id IS NOT NULL OR r.id IS NOT NULL;
END $$;

SELECT tenure.grant_roles();

INSERT INTO tenure.migration (number, name) VALUES (8, 'monitor');
