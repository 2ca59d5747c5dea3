-- Taking over: the second step of a revocation, the orderly release, retention, and the grants.
--
-- I4. Revocation and hand-back of the work are one transaction; any number of scanners may run it.
-- I9. Executions are bounded; exhaustion is a visible terminal row, never a deletion. In the same
--     transaction the item is quarantined (0009).
--
-- Locks: none that another session can wait for.
-- Overlap: nothing older exists.

-- Executors that a scan has to look at: expired, or left half revoked by a scanner that died. Only of
-- the given application and versions: work of an unknown or incompatible owner is never taken.
CREATE FUNCTION tenure.recoverable_executors(application text, versions text[], executors_max int)
RETURNS TABLE (id uuid, state text)
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
  SELECT e.id, e.state FROM tenure.executor e
   WHERE e.application_name = application AND e.application_version = ANY(versions)
     AND e.state IN ('active', 'revoking')
     AND (e.state = 'revoking' OR e.expires_at <= (SELECT tenure.clock()))
   ORDER BY e.expires_at LIMIT executors_max
$$;

-- Tombstones that own claims. The fence lets nobody make one, so this looks after what got past it: a
-- session without an identity, a restored table. It reads every claim (20 ms for 200,000), so it is no
-- part of every scan. It goes from the claims to the tombstones: those are kept for ever, and a join
-- that read them took 3 ms with 10,000. NOT IN, because its subplan is hashed whatever the statistics say.
CREATE FUNCTION tenure.stranded_executors(application text, versions text[], executors_max int)
RETURNS TABLE (id uuid, state text)
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET max_parallel_workers_per_gather = 0
AS $$
  SELECT e.id, e.state
    FROM (SELECT DISTINCT c.owner FROM tenure.claimed c
           WHERE c.owner NOT IN (
             SELECT live.id FROM tenure.executor live WHERE live.state IN ('active', 'revoking'))) c
    JOIN tenure.executor e ON e.id = c.owner
   WHERE e.state IN ('revoked', 'released')
     AND e.application_name = application AND e.application_version = ANY(versions)
   LIMIT executors_max
$$;

-- An item whose holder was lost: an executor, or a pull session (0013). `lane_id` is where it waits from
-- now on; `owner` the lost one.
CREATE TYPE tenure.lost_item AS (
  id uuid, queue_id int, owner uuid, attempt int, lane_id int, rank int, seq bigint,
  failures int, losses smallint, stuck smallint, key text
);

-- What becomes of items whose holder was lost; the caller has taken them out of their place in this
-- transaction. A loss is charged to each. With the limit `executions` the item ends when `recovery_max`
-- holders were lost with it; with `consecutive`, when that many were lost since its last checkpoint.
-- Others become suspects, at once after the first loss, then after 1 and 6 times `backoff`, and
-- not before `grace`.
CREATE FUNCTION tenure.return_lost(lost tenure.lost_item[], now timestamptz, backoff interval, grace interval,
  OUT requeued int, OUT cancelled int, OUT exhausted uuid[], OUT settled uuid[])
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
  WITH judged AS MATERIALIZED (
    SELECT r.*, q.recovery_limit, q.recovery_max,
           CASE WHEN (SELECT true FROM tenure.step s WHERE s.item_id = r.id AND s.attempt = r.attempt LIMIT 1)
                THEN 0 ELSE r.stuck + 1 END AS stuck_now,
           EXISTS (SELECT FROM tenure.cancel_request x WHERE x.id = r.id) AS is_cancelled,
           coalesce((SELECT i.deadline_at <= now FROM tenure.item i WHERE i.id = r.id), false) AS is_late
      FROM unnest(lost) r CROSS JOIN LATERAL (SELECT * FROM tenure.queue x WHERE x.id = r.queue_id OFFSET 0) q
  ), decided AS MATERIALIZED (
    SELECT j.*,
           CASE WHEN j.is_cancelled THEN 'cancelled'
                WHEN j.is_late THEN 'DeadlineExceeded'
                WHEN j.recovery_limit = 'executions' AND j.losses + 1 >= j.recovery_max
                THEN 'MAX_RECOVERY_ATTEMPTS_EXCEEDED'
                WHEN j.recovery_limit = 'consecutive' AND j.stuck_now >= j.recovery_max
                THEN 'EXECUTION_RECOVERY_EXHAUSTED' END AS verdict,
           greatest(grace, backoff * (CASE j.losses WHEN 0 THEN 0 WHEN 1 THEN 1 ELSE 6 END)) AS pause
      FROM judged j
  ), ended AS (
    INSERT INTO tenure.done (id, queue_id, attempt, owner, outcome, reason, failures, losses, finished_at)
    SELECT d.id, d.queue_id, d.attempt, d.owner,
           CASE WHEN d.is_cancelled THEN 'cancelled' ELSE 'failed' END,
           CASE WHEN NOT d.is_cancelled THEN d.verdict END, d.failures, d.losses + 1, now
      FROM decided d WHERE d.verdict IS NOT NULL
  ), quarantined AS (
    INSERT INTO tenure.quarantine (item_id, queue_id, quarantined_at, executions, reason, due_at)
    SELECT d.id, d.queue_id, now, d.losses + 1, d.verdict, now FROM decided d
     WHERE d.verdict IN ('MAX_RECOVERY_ATTEMPTS_EXCEEDED', 'EXECUTION_RECOVERY_EXHAUSTED')
  ), forgotten AS (
    DELETE FROM tenure.cancel_request x WHERE x.id IN (SELECT d.id FROM decided d WHERE d.is_cancelled)
  ), postponed AS (
    INSERT INTO tenure.delayed (id, due_at, lane_id, rank, seq, attempt, failures, losses, stuck, key)
    SELECT d.id, now + d.pause, d.lane_id, d.rank, d.seq, d.attempt, d.failures, d.losses + 1, d.stuck_now, d.key
      FROM decided d WHERE d.verdict IS NULL AND d.pause > interval '0'
  ), returned AS (
    INSERT INTO tenure.ready (lane_id, rank, seq, id, attempt, failures, losses, stuck, key)
    SELECT d.lane_id, d.rank, d.seq, d.id, d.attempt, d.failures, d.losses + 1, d.stuck_now, d.key
      FROM decided d WHERE d.verdict IS NULL AND d.pause <= interval '0'
  )
  SELECT count(*) FILTER (WHERE d.verdict IS NULL), count(*) FILTER (WHERE d.is_cancelled),
         coalesce(array_agg(d.id) FILTER (WHERE d.verdict IN (
           'MAX_RECOVERY_ATTEMPTS_EXCEEDED', 'EXECUTION_RECOVERY_EXHAUSTED')), '{}'),
         coalesce(array_agg(d.id) FILTER (WHERE d.verdict IS NOT NULL), '{}')
    INTO requeued, cancelled, exhausted, settled FROM decided d;
END $$;

-- Second step: waits for every transaction the fence has admitted, and in the same transaction marks
-- the executor revoked and hands its work back. An executor that is not at least `revoking` is left
-- alone, so a second scanner with an older list does nothing.
--
-- The caller takes no KEY SHARE on its own row here, as if it had been admitted already: two
-- executors that revoke each other would deadlock, each holding its own row and waiting for the
-- other's. Revoking is safe whoever does it; what the caller writes afterwards in this transaction
-- is not, so the exemption ends with the function.
--
-- What pull sessions hold through this executor is theirs: any node goes on serving them.
CREATE FUNCTION tenure.revoke(executor uuid, backoff interval, grace interval,
  OUT state text, OUT requeued int, OUT cancelled int, OUT exhausted uuid[], OUT settled uuid[])
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
  me       text := nullif(current_setting('tenure.executor_id', true), '');
  admitted text := coalesce(current_setting('tenure.admitted', true), '');
  victim   tenure.executor;
  now      timestamptz;
  queue_   int;
  lost     tenure.lost_item[];
BEGIN
  requeued := 0; cancelled := 0; exhausted := '{}'; settled := '{}';
  SELECT * INTO victim FROM tenure.executor e WHERE e.id = executor FOR UPDATE;
  state := coalesce(victim.state, 'unknown');
  IF state NOT IN ('revoking', 'revoked', 'released') THEN RETURN; END IF;
  IF me IS NOT NULL THEN
    PERFORM set_config('tenure.admitted', me || '/' || pg_current_xact_id()::text, true);
  END IF;
  -- After the wait, and in statements of their own: a combined one would not see the claims that the
  -- barrier waited for.
  now := tenure.clock();
  IF state = 'revoking' THEN
    UPDATE tenure.executor e SET state = 'revoked', revoked_at = now WHERE e.id = executor;
    state := 'revoked';
  END IF;
  DELETE FROM tenure.presence p WHERE p.executor_id = executor;
  PERFORM tenure.drop_probe(executor);
  -- Of 0008: what its monitor has told goes with the lease.
  DELETE FROM tenure.queue_activity a
   WHERE a.queue_id = ANY(ARRAY(SELECT q.id FROM tenure.queue q)) AND a.executor_id = executor;
  FOR queue_ IN
    SELECT DISTINCT c.queue_id FROM tenure.claimed c
     WHERE c.queue_id = ANY(ARRAY(SELECT q.id FROM tenure.queue q)) AND c.owner = executor
  LOOP
    PERFORM tenure.lane_id(queue_, victim.application_version, true);
    -- Here and not by the caller, which may run other queues only; whoever listens is told at the commit.
    PERFORM tenure.tell('tenure_work', queue_::text);
  END LOOP;
  WITH locked AS MATERIALIZED (
    SELECT c.ctid AS tid FROM tenure.claimed c
     WHERE c.queue_id = ANY(ARRAY(SELECT q.id FROM tenure.queue q)) AND c.owner = executor
     ORDER BY c.id FOR UPDATE
  ), removed AS MATERIALIZED (
    DELETE FROM tenure.claimed c WHERE c.ctid = ANY(ARRAY(SELECT l.tid FROM locked l)) RETURNING c.*
  )
  SELECT coalesce(array_agg(ROW(r.id, r.queue_id, r.owner, r.attempt, (
           SELECT l.id FROM tenure.lane l
            WHERE l.queue_id = r.queue_id AND l.version = victim.application_version AND l.suspect),
           r.rank, r.seq, r.failures, r.losses, r.stuck, r.key)::tenure.lost_item), '{}')
    INTO lost FROM removed r;
  -- A statement later, which sees the checkpoints that the locks above have waited for.
  SELECT r.requeued, r.cancelled, r.exhausted, r.settled INTO requeued, cancelled, exhausted, settled
    FROM tenure.return_lost(lost, now, backoff, grace) r;
  -- At once, and not at the commit, when the caller is no longer exempt.
  PERFORM tenure.items_ended(settled, at_once => true);
  IF requeued > 0 OR settled <> '{}' THEN
    PERFORM tenure.audit('executor.revoked', NULL, NULL, json_build_object(
      'executor', executor, 'requeued', requeued, 'cancelled', cancelled, 'exhausted', cardinality(exhausted)));
  END IF;
  PERFORM set_config('tenure.admitted', admitted, true);
END $$;

-- The orderly end: gives back what is still claimed, without a loss to anybody, and the lease with
-- it. FOR UPDATE first, never after a fenced write: that would be an upgrade, and upgrades deadlock.
-- Answers the state the executor is in.
CREATE FUNCTION tenure.release_executor(executor uuid, OUT state text, OUT handed_back int)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
  me       text := nullif(current_setting('tenure.executor_id', true), '');
  admitted text := coalesce(current_setting('tenure.admitted', true), '');
  holder   tenure.executor;
  queue_   int;
BEGIN
  handed_back := 0;
  SELECT * INTO holder FROM tenure.executor e WHERE e.id = executor FOR UPDATE;
  state := coalesce(holder.state, 'unknown');
  IF state <> 'active' OR holder.expires_at <= tenure.clock() THEN RETURN; END IF;
  IF me IS NOT NULL THEN
    PERFORM set_config('tenure.admitted', me || '/' || pg_current_xact_id()::text, true);
  END IF;
  PERFORM tenure.drop_probe(executor);
  -- Of 0008: what its monitor has told goes with the lease.
  DELETE FROM tenure.queue_activity a
   WHERE a.queue_id = ANY(ARRAY(SELECT q.id FROM tenure.queue q)) AND a.executor_id = executor;
  FOR queue_ IN
    SELECT DISTINCT c.queue_id FROM tenure.claimed c
     WHERE c.queue_id = ANY(ARRAY(SELECT q.id FROM tenure.queue q)) AND c.owner = executor
  LOOP
    PERFORM tenure.lane_id(queue_, holder.application_version, false);
    PERFORM tenure.lane_id(queue_, holder.application_version, true);
    PERFORM tenure.tell('tenure_work', queue_::text);
  END LOOP;
  WITH locked AS MATERIALIZED (
    SELECT c.ctid AS tid FROM tenure.claimed c
     WHERE c.queue_id = ANY(ARRAY(SELECT q.id FROM tenure.queue q)) AND c.owner = executor
     ORDER BY c.id FOR UPDATE
  ), removed AS MATERIALIZED (
    DELETE FROM tenure.claimed c WHERE c.ctid = ANY(ARRAY(SELECT l.tid FROM locked l)) RETURNING c.*
  )
  INSERT INTO tenure.ready (lane_id, rank, seq, id, attempt, failures, losses, stuck, key)
  SELECT (SELECT l.id FROM tenure.lane l
           WHERE l.queue_id = r.queue_id AND l.version = holder.application_version AND l.suspect = (r.losses > 0)),
         r.rank, r.seq, r.id, r.attempt, r.failures, r.losses, r.stuck, r.key
    FROM removed r;
  GET DIAGNOSTICS handed_back = ROW_COUNT;
  DELETE FROM tenure.presence p WHERE p.executor_id = executor;
  UPDATE tenure.executor e SET state = 'released' WHERE e.id = executor;
  state := 'released';
  PERFORM set_config('tenure.admitted', CASE WHEN me = executor::text THEN '' ELSE admitted END, true);
END $$;

-- Ends the sessions of an executor that hold up its revocation: a client that is stopped while the
-- server sends it rows, or inside COPY, is bounded by no timeout. After the mark none of them can do
-- anything useful, so all of the executor's go at once (one blocker at a time took twelve rounds for
-- twelve), then whoever still blocks, because application code may rename its session.
-- With the caller's rights: workers of one login, or pg_signal_backend.
CREATE FUNCTION tenure.terminate_sessions(executor uuid, blocked_pid int DEFAULT NULL) RETURNS int
LANGUAGE sql VOLATILE
AS $$
  SELECT count(*) FILTER (WHERE pg_terminate_backend(a.pid))::int
    FROM pg_catalog.pg_stat_activity a
   WHERE a.datname = current_database() AND a.pid <> pg_backend_pid()
     AND (a.application_name LIKE '%' || executor::text OR a.pid = ANY(pg_blocking_pids(blocked_pid)))
$$;

-- The items that keep a range of ids, no more than `ids_max` of each kind: those that live, those that have
-- ended after `before`, those in quarantine that nobody has dealt with (K-118), and those whose dead letter is in
-- somebody's hands. What is on a private queue (0007) keeps nothing: its executor may have died where no peer
-- may revoke it.
CREATE FUNCTION tenure.kept_in_range(low uuid, high uuid, before timestamptz, ids_max int) RETURNS uuid[]
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  now timestamptz := tenure.clock();
BEGIN
  RETURN ARRAY(
    SELECT x.id FROM (
      (SELECT c.id FROM tenure.claimed c WHERE c.id >= low AND c.id < high AND c.queue_id > 0 LIMIT ids_max)
      UNION ALL
      (SELECT d.id FROM tenure.delayed d WHERE d.id >= low AND d.id < high AND d.lane_id > 0 LIMIT ids_max)
      UNION ALL
      (SELECT r.id FROM tenure.ready r WHERE r.id >= low AND r.id < high AND r.lane_id > 0 LIMIT ids_max)
      UNION ALL
      -- Of 0012 and 0013: what waits durably, and what a pull session has.
      (SELECT p.id FROM tenure.parked p WHERE p.id >= low AND p.id < high LIMIT ids_max)
      UNION ALL
      (SELECT c.item_id FROM tenure.capacity_lease c WHERE c.item_id >= low AND c.item_id < high LIMIT ids_max)
      UNION
      (SELECT q.item_id FROM tenure.quarantine q
        WHERE q.item_id >= low AND q.item_id < high AND q.state = 'open' LIMIT ids_max)
      UNION
      (SELECT l.item_id FROM tenure.dead_letter_lease l
        WHERE l.item_id >= low AND l.item_id < high AND l.expires_at > now LIMIT ids_max)
      UNION
      (SELECT d.id FROM tenure.done d
        WHERE d.id >= low AND d.id < high AND d.finished_at > before AND d.queue_id > 0 LIMIT ids_max)) x);
END $$;

-- Removes what belongs to items of a range that are not in its bucket any more.
CREATE FUNCTION tenure.forget_range(low uuid, high uuid) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
  DELETE FROM tenure.item_key k WHERE k.item_id >= low AND k.item_id < high
     AND NOT EXISTS (SELECT FROM tenure.item i WHERE i.id = k.item_id AND i.id >= low AND i.id < high);
  DELETE FROM tenure.deadline d WHERE d.id >= low AND d.id < high
     AND NOT EXISTS (SELECT FROM tenure.item i WHERE i.id = d.id AND i.id >= low AND i.id < high);
  DELETE FROM tenure.cancel_request x WHERE x.id >= low AND x.id < high
     AND NOT EXISTS (SELECT FROM tenure.item i WHERE i.id = x.id AND i.id >= low AND i.id < high);
  DELETE FROM tenure.waiter w WHERE w.item_id >= low AND w.item_id < high
     AND NOT EXISTS (SELECT FROM tenure.item i WHERE i.id = w.item_id AND i.id >= low AND i.id < high);
  DELETE FROM tenure.quarantine q WHERE q.item_id >= low AND q.item_id < high
     AND NOT EXISTS (SELECT FROM tenure.item i WHERE i.id = q.item_id AND i.id >= low AND i.id < high);
  DELETE FROM tenure.dead_letter_lease l WHERE l.item_id >= low AND l.item_id < high
     AND NOT EXISTS (SELECT FROM tenure.item i WHERE i.id = l.item_id AND i.id >= low AND i.id < high);
  -- Of 0017.
  DELETE FROM tenure.progress p WHERE p.item_id >= low AND p.item_id < high
     AND NOT EXISTS (SELECT FROM tenure.item i WHERE i.id = p.item_id AND i.id >= low AND i.id < high);
  DELETE FROM tenure.progress_waiter w WHERE w.item_id >= low AND w.item_id < high
     AND NOT EXISTS (SELECT FROM tenure.item i WHERE i.id = w.item_id AND i.id >= low AND i.id < high);
  -- Of 0012.
  DELETE FROM tenure.wait w WHERE w.item_id >= low AND w.item_id < high
     AND NOT EXISTS (SELECT FROM tenure.item i WHERE i.id = w.item_id AND i.id >= low AND i.id < high);
  DELETE FROM tenure.signal s WHERE s.item_id >= low AND s.item_id < high
     AND NOT EXISTS (SELECT FROM tenure.item i WHERE i.id = s.item_id AND i.id >= low AND i.id < high);
  DELETE FROM tenure.invocation v WHERE v.child_id >= low AND v.child_id < high
     AND NOT EXISTS (SELECT FROM tenure.item i WHERE i.id = v.child_id AND i.id >= low AND i.id < high);
END $$;

-- Moves the items `kept` on, with their outcomes and checkpoints, and drops all others of the bucket at once.
-- The caller holds the leaves exclusively. Ids choose the leaf, so the rows stay under the same name; the
-- storage is new. As a TRUNCATE is, this is no matter of snapshots: a transaction stricter than READ COMMITTED
-- that began before it sees none of the bucket's rows. 5,000 items of 600 bytes, of 50,000, took 0.3 to 0.5 s, and
-- making two such buckets one 0.13 s, on a busy machine that took 10 s to hand in 50,000.
CREATE FUNCTION tenure.thin_bucket(bucket_name text, kept uuid[]) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  parent text;
BEGIN
  FOREACH parent IN ARRAY ARRAY['item', 'done', 'step'] LOOP
    EXECUTE format('CREATE UNLOGGED TABLE tenure.moving AS SELECT * FROM tenure.%I WHERE %I = ANY($1)',
      parent || '_' || bucket_name, CASE parent WHEN 'step' THEN 'item_id' ELSE 'id' END) USING kept;
    EXECUTE format('TRUNCATE tenure.%I', parent || '_' || bucket_name);
    EXECUTE format('INSERT INTO tenure.%I SELECT * FROM tenure.moving', parent || '_' || bucket_name);
    DROP TABLE tenure.moving;
  END LOOP;
END $$;

-- Makes one bucket of two neighbours that were thinned, so that what lives for a year costs one partition and
-- not fifty: each is planned for, and locked, by every lookup. Only while both together are small, because the
-- parents are locked meanwhile. False: there are no such two.
CREATE FUNCTION tenure.merge_buckets(bytes_max bigint) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  pair   record;
  parent text;
BEGIN
  SELECT a.name AS first, a.lower_at, b.name AS second, b.upper_at INTO pair
    FROM tenure.bucket a
   CROSS JOIN LATERAL (
     SELECT * FROM tenure.bucket n WHERE n.lower_at > a.lower_at ORDER BY n.lower_at LIMIT 1) b
   WHERE a.thinned_at IS NOT NULL AND b.thinned_at IS NOT NULL
     AND a.emptied_at IS NULL AND b.emptied_at IS NULL
     AND (SELECT sum(pg_total_relation_size(to_regclass(format('tenure.%I', p || '_' || n))))
            FROM unnest(ARRAY['item', 'done', 'step']) p, unnest(ARRAY[a.name, b.name]) n) <= bytes_max
   ORDER BY a.lower_at LIMIT 1;
  IF NOT FOUND THEN RETURN false; END IF;
  FOREACH parent IN ARRAY ARRAY['item', 'done', 'step'] LOOP
    EXECUTE format('ALTER TABLE tenure.%I DETACH PARTITION tenure.%I', parent, parent || '_' || pair.first);
    EXECUTE format('ALTER TABLE tenure.%I DETACH PARTITION tenure.%I', parent, parent || '_' || pair.second);
    EXECUTE format('INSERT INTO tenure.%I SELECT * FROM tenure.%I', parent || '_' || pair.first,
      parent || '_' || pair.second);
    EXECUTE format('DROP TABLE tenure.%I', parent || '_' || pair.second);
    EXECUTE format('ALTER TABLE tenure.%I ATTACH PARTITION tenure.%I FOR VALUES FROM (%L) TO (%L)',
      parent, parent || '_' || pair.first, tenure.id_at(pair.lower_at), tenure.id_at(pair.upper_at));
  END LOOP;
  DELETE FROM tenure.bucket b WHERE b.name = pair.second;
  UPDATE tenure.bucket b SET upper_at = pair.upper_at WHERE b.name = pair.first;
  RETURN true;
END $$;

-- One step of retention: makes room ahead, then does the first of these that there is to do, with the oldest
-- bucket whose ids are all older than `keep`.
--   drop    one that was emptied before
--   empty   one whose items have all been over for longer than `keep`
--   move    what is not over on, when it is no more than `moved_max` items, and drop the rest of its bucket; once
--           for each bucket. One with more of them is no remainder: it waits until they are fewer
--   merge   two neighbours that were thinned so
-- The steps lock differently: emptying and moving lock the leaves alone, and give up after 300 ms; dropping and
-- merging need the parents for a moment, everybody's inserts wait behind that, and they give up after 50 ms.
-- Last, events of the audit go that are 90 days older than `keep`.
CREATE FUNCTION tenure.retain(keep interval, moved_max int DEFAULT 5000,
  OUT made int, OUT emptied int, OUT dropped int, OUT moved int, OUT merged int, OUT forgotten int, OUT blocked int)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  old    tenure.bucket;
  low    uuid;
  high   uuid;
  kept   uuid[];
  parent text;
  before timestamptz := tenure.clock() - keep;
BEGIN
  emptied := 0; dropped := 0; moved := 0; merged := 0; blocked := 0;
  made := tenure.create_buckets(interval '1344 hours');
  PERFORM tenure.prune_quiet_rates();
  PERFORM tenure.forget_expired(before);
  FOR old IN SELECT * FROM tenure.bucket b WHERE b.upper_at < before ORDER BY b.lower_at LOOP
    low := tenure.id_at(old.lower_at);
    high := tenure.id_at(old.upper_at);
    BEGIN
      IF old.emptied_at IS NOT NULL THEN
        PERFORM set_config('lock_timeout', '50ms', true);
        FOREACH parent IN ARRAY ARRAY['item', 'done', 'step'] LOOP
          EXECUTE format('DROP TABLE tenure.%I', parent || '_' || old.name);
        END LOOP;
        DELETE FROM tenure.bucket b WHERE b.lower_at = old.lower_at;
        dropped := dropped + 1;
      ELSE
        kept := tenure.kept_in_range(low, high, before, moved_max + 1);
        CONTINUE WHEN kept <> '{}' AND NOT tenure.is_worth_thinning(old, kept, before, moved_max);
        PERFORM set_config('lock_timeout', '300ms', true);
        EXECUTE format('LOCK TABLE tenure.%I, tenure.%I, tenure.%I IN ACCESS EXCLUSIVE MODE',
          'item_' || old.name, 'done_' || old.name, 'step_' || old.name);
        -- Again, under the lock: an operator may have brought a failed item back while we waited. From here on
        -- nothing of the bucket ends and nothing comes back.
        kept := tenure.kept_in_range(low, high, before, moved_max + 1);
        IF kept = '{}' THEN
          EXECUTE format('TRUNCATE tenure.%I, tenure.%I, tenure.%I',
            'item_' || old.name, 'done_' || old.name, 'step_' || old.name);
          PERFORM tenure.forget_range(low, high);
          UPDATE tenure.bucket b SET emptied_at = tenure.clock() WHERE b.lower_at = old.lower_at;
          emptied := emptied + 1;
        ELSIF tenure.is_worth_thinning(old, kept, before, moved_max) THEN
          PERFORM tenure.thin_bucket(old.name, kept);
          PERFORM tenure.forget_range(low, high);
          UPDATE tenure.bucket b SET thinned_at = tenure.clock() WHERE b.lower_at = old.lower_at;
          moved := moved + cardinality(kept);
        END IF;
      END IF;
    EXCEPTION WHEN lock_not_available THEN
      blocked := blocked + 1;
    END;
    EXIT WHEN emptied + dropped + moved + blocked > 0;
  END LOOP;
  IF emptied + dropped + moved + blocked = 0 THEN
    BEGIN
      PERFORM set_config('lock_timeout', '50ms', true);
      IF tenure.merge_buckets(16777216) THEN merged := 1; END IF;
    EXCEPTION WHEN lock_not_available THEN
      blocked := blocked + 1;
    END;
  END IF;
  forgotten := tenure.forget_audit(before - interval '2160 hours', 5000);
END $$;

-- Whether moving the items `kept` on lets others of their bucket go, and is done at once.
CREATE FUNCTION tenure.is_worth_thinning(old tenure.bucket, kept uuid[], before timestamptz, moved_max int)
RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  bytes bigint;
  worth boolean;
BEGIN
  IF old.thinned_at IS NOT NULL OR cardinality(kept) > moved_max THEN RETURN false; END IF;
  EXECUTE format('SELECT EXISTS (SELECT FROM tenure.%I d WHERE d.finished_at <= $1 AND d.id <> ALL($2))',
    'done_' || old.name) INTO worth USING before, kept;
  IF NOT worth THEN RETURN false; END IF;
  -- Toasted values are measured as they are stored, and not read.
  EXECUTE format('SELECT coalesce(sum(pg_column_size(i.payload)), 0) FROM tenure.%I i WHERE i.id = ANY($1)',
    'item_' || old.name) INTO bytes USING kept;
  RETURN bytes <= 16777216;
END $$;

-- Least privilege: workers and the API call functions, and write no table of ours directly.
CREATE FUNCTION tenure.grant_roles() RETURNS text[]
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
  role_name text;
  missing   text[] := '{}';
  callable  regprocedure;
BEGIN
  FOR callable IN
    SELECT p.oid FROM pg_catalog.pg_proc p WHERE p.pronamespace = 'tenure'::regnamespace
  LOOP
    EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', callable);
  END LOOP;
  FOREACH role_name IN ARRAY ARRAY['tenure_worker', 'tenure_api'] LOOP
    IF NOT EXISTS (SELECT FROM pg_catalog.pg_roles r WHERE r.rolname = role_name) THEN
      missing := missing || role_name;
      CONTINUE;
    END IF;
    EXECUTE format('GRANT USAGE ON SCHEMA tenure TO %I', role_name);
    EXECUTE format('GRANT SELECT ON ALL TABLES IN SCHEMA tenure TO %I', role_name);
    FOR callable IN
      SELECT p.oid FROM pg_catalog.pg_proc p
       WHERE p.pronamespace = 'tenure'::regnamespace
         AND (role_name = 'tenure_worker' AND p.proname <> ALL(ARRAY['grant_roles', 'insert_items', 'create_buckets', 'drop_probe',
                   'set_limits', 'begin_start', 'note_starts', 'prune_rates', 'prune_quiet_rates',
                   'pace_items', 'members_added', 'items_ended', 'items_returned', 'forget_expired',
                   'end_parked', 'end_invocations', 'return_lost', 'hold_lease', 'settle_lease',
                   'end_late_leases', 'hand_back_leases', 'create_token', 'revoke_token', 'enqueue_slots',
                   'bring_back', 'remove_dead_letter', 'thin_bucket', 'merge_buckets', 'forget_range',
                   'forget_audit'])
              OR p.proname = ANY(ARRAY['clock', 'fence', 'admit', 'enqueue', 'enqueue_all', 'cancel', 'retry', 'item_outcome',
                   'await_items', 'forget_items', 'notify_settled', 'lease_state', 'unfenced_tables',
                   'item_place', 'queue_facts', 'close_quarantine', 'retry_quarantined', 'pause_queue',
                   'resume_queue', 'rate_room', 'make_group', 'seal_group', 'signal', 'capacity_leases',
                   'capacity_sessions', 'capacity_queue', 'pause_schedule', 'resume_schedule',
                   'request_schedule', 'remove_schedule', 'dead_letter_queues', 'dead_letters',
                   'take_dead_letters', 'release_dead_letter', 'reinject_dead_letter', 'discard_dead_letter',
                   'redrive_dead_letters', 'purge_dead_letters', 'list_items', 'item_rows', 'wait_facts',
                   'queue_overview', 'audit_events', 'watch_progress', 'forget_progress', 'notify_progress',
                   'item_progress']))
    LOOP
      EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %I', callable, role_name);
    END LOOP;
  END LOOP;
  RETURN missing;
END $$;

SELECT tenure.grant_roles();

INSERT INTO tenure.migration (number, name) VALUES (5, 'recovery');
