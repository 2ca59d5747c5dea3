-- Presence: an executor whose process has died is revoked without waiting for its lease to run out.
--
--   no row --hold--> held --its session ends--> absent --marked--> row gone
--                     |  ^                        |
--               leave |  | hold                   +--hold, or leave in order--> held, or not watched
--                     v  |
--               not watched (held_at is null)
--
-- Each executor holds a session-level advisory lock, exclusively, on a session that waits for nothing.
-- When the process dies its sockets close and the server frees the lock. Peers form a ring, in the
-- order of the keys: each asks for the lock of the next one, shared, without waiting and for the
-- length of one statement, so that nobody keeps a returning owner out and no snapshot is held.
--
-- Whoever is marked by mistake is fenced like any other: this only decides how soon a peer may go on.
-- What a lost session does not prove (a pause, a partition) is left to the lease.
--
-- Locks: none that another session can wait for.
-- Overlap: older code takes no part and is not watched; its leases run out as before.

-- One row for each executor that takes part. `key` is its place in the ring and its lock's second key;
-- the first one is 1413828182. `held_at` names the session that holds the lock: null when there is
-- none and the executor says so itself.
CREATE TABLE tenure.presence (
  executor_id uuid NOT NULL PRIMARY KEY,
  key         int  GENERATED ALWAYS AS IDENTITY UNIQUE,
  held_at     timestamptz
);

-- Takes the lock for this session, and answers since when it is held, or null when another session
-- has it: one of this executor whose end the server has not noticed, or a peer for a moment. Never
-- waits for it. The fence comes before the lock, which no rollback would give back.
CREATE FUNCTION tenure.hold_presence(executor uuid) RETURNS timestamptz
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  place int;
  since timestamptz;
BEGIN
  PERFORM tenure.admit();
  SELECT p.key INTO place FROM tenure.presence p WHERE p.executor_id = executor;
  IF NOT FOUND THEN
    INSERT INTO tenure.presence AS p (executor_id) VALUES (executor) RETURNING p.key INTO place;
  END IF;
  IF NOT pg_try_advisory_lock(1413828182, place) THEN RETURN NULL; END IF;
  UPDATE tenure.presence p SET held_at = tenure.clock() WHERE p.executor_id = executor
  RETURNING p.held_at INTO since;
  RETURN since;
END $$;

-- The session that held the lock since `held` is over, or about to be, in order: no peer has to look.
-- Names that session, because this may arrive after the next one holds the lock; null names any.
CREATE FUNCTION tenure.leave_presence(executor uuid, held timestamptz) RETURNS void
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
  UPDATE tenure.presence p SET held_at = NULL
   WHERE p.executor_id = executor AND p.held_at = coalesce(held, p.held_at)
$$;

-- Looks along the ring of those whose work the watcher may take: from its next one on, around, until
-- somebody is there who looks further. Of another version, he may not be allowed to; and who came in
-- the last ten seconds may not know who was behind him, as when a process that died is started again
-- at once. `everyone` goes all the way round, `followed` are asked for wherever they stand. Answers
-- nobody when the watcher itself is not there. `seen_at` is read before any lock is tried, so it is
-- never later than the absence that it stands for. `newcomers` are those of the missing who took
-- their lock after the watcher took its own: they were there, whether it has seen them or not.
--
-- Bounds: a thousand members on either side, and the first hundred who are missing.
CREATE FUNCTION tenure.watch_presence(watcher uuid, versions text[], everyone boolean, followed uuid[],
  OUT seen_at timestamptz, OUT held_at timestamptz, OUT renewed_at timestamptz, OUT is_round boolean,
  OUT present uuid[], OUT missing uuid[], OUT newcomers uuid[])
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET enable_sort = off
AS $$
DECLARE
  own    record;
  member record;
BEGIN
  seen_at := tenure.clock(); is_round := false; present := '{}'; missing := '{}'; newcomers := '{}';
  SELECT e.application_name, e.application_version, e.heartbeat_at, p.key, p.held_at INTO own
    FROM tenure.executor e JOIN tenure.presence p ON p.executor_id = e.id WHERE e.id = watcher;
  renewed_at := own.heartbeat_at;
  -- Free again at the end of this statement: the owner's next try comes soon.
  IF own.held_at IS NULL OR pg_try_advisory_xact_lock_shared(1413828182, own.key) THEN RETURN; END IF;
  held_at := own.held_at;
  <<ring>>
  FOR past IN 0..1 LOOP
    FOR member IN
      SELECT p.executor_id AS id, p.key, p.held_at, e.application_version
        FROM tenure.presence p JOIN tenure.executor e ON e.id = p.executor_id
       WHERE p.key > CASE past WHEN 0 THEN own.key ELSE 0 END
         AND p.key < CASE past WHEN 0 THEN 2147483647 ELSE own.key END
         AND p.held_at IS NOT NULL AND e.state = 'active' AND e.expires_at > seen_at
         AND e.application_name = own.application_name AND e.application_version = ANY(versions)
       ORDER BY p.key LIMIT 1000
    LOOP
      IF pg_try_advisory_xact_lock_shared(1413828182, member.key) THEN
        missing := missing || member.id;
        IF member.held_at > own.held_at THEN newcomers := newcomers || member.id; END IF;
        EXIT ring WHEN cardinality(missing) >= 100;
      ELSE
        present := present || member.id;
        EXIT ring WHEN NOT everyone AND member.application_version = own.application_version
                   AND member.held_at < seen_at - interval '10 seconds';
      END IF;
    END LOOP;
    is_round := past = 1;
  END LOOP;
  FOR member IN
    SELECT p.executor_id AS id, p.key
      FROM tenure.presence p JOIN tenure.executor e ON e.id = p.executor_id
     WHERE p.executor_id = ANY(followed) AND p.executor_id <> ALL(missing || present)
       AND p.held_at IS NOT NULL AND e.state = 'active' AND e.expires_at > seen_at
     LIMIT 100
  LOOP
    IF pg_try_advisory_xact_lock_shared(1413828182, member.key) THEN
      missing := missing || member.id;
    ELSE
      present := present || member.id;
    END IF;
  END LOOP;
END $$;

-- First step of a revocation, as mark_revoking: of an executor that `watcher` has missed since
-- `observed_at` and for longer than `grace`. Answers 'marked', or the reason why not:
--
--   unknown, revoking, revoked, released   nothing is left to do
--   left, present, returned                it is there again, or does not take part
--   renewed                                it lives: its lease decides, for as long as it is absent
--   early, busy, restarted                 ask again: the grace is not over, another one is being marked,
--                                          the server was started a moment ago and frees every lock
--   unfit                                  the watcher itself is lost, or has not renewed since: it may
--                                          be the one that was cut off
--   alone                                  the watcher holds no lock, or not for long enough
--
-- The row lock comes first, then the clock: a renewal is either before us, and seen, or finds the
-- mark. One mark at a time, and the watcher is read under that lock: of two that mark each other the
-- second sees itself marked. It is only tried, and behind the row: while one of us waits for a row,
-- no other waits for it. Takes nothing on the watcher's row, and writes no fenced table.
CREATE FUNCTION tenure.mark_absent(absent uuid, watcher uuid, observed_at timestamptz, grace interval) RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  lease   tenure.executor;
  own     record;
  place   int;
  held    timestamptz;
  now     timestamptz;
  started timestamptz := pg_postmaster_start_time();
BEGIN
  IF current_setting('transaction_isolation') <> 'read committed' THEN
    RAISE EXCEPTION 'presence is judged in read committed only' USING
      ERRCODE = 'TN010', HINT = 'Use the pools of Tenure.layer.';
  END IF;
  SELECT * INTO lease FROM tenure.executor e WHERE e.id = absent FOR NO KEY UPDATE;
  IF NOT FOUND THEN RETURN 'unknown'; END IF;
  IF lease.state <> 'active' THEN RETURN lease.state; END IF;
  -- Keys begin at 1, so 0 is nobody's place.
  IF NOT pg_try_advisory_xact_lock(1413828182, 0) THEN RETURN 'busy'; END IF;
  now := tenure.clock();
  IF now < observed_at + grace THEN RETURN 'early'; END IF;
  IF lease.heartbeat_at >= observed_at THEN RETURN 'renewed'; END IF;
  SELECT p.key INTO place FROM tenure.presence p WHERE p.executor_id = absent;
  IF NOT FOUND THEN RETURN 'left'; END IF;
  IF NOT pg_try_advisory_xact_lock_shared(1413828182, place) THEN RETURN 'present'; END IF;
  -- In this order: with the lock in our hands it cannot come back unseen.
  SELECT p.held_at INTO held FROM tenure.presence p WHERE p.executor_id = absent;
  IF held IS NULL THEN RETURN 'left'; END IF;
  IF held >= observed_at THEN RETURN 'returned'; END IF;
  IF started > now - interval '15 seconds' OR held < started THEN RETURN 'restarted'; END IF;
  SELECT e.state, e.expires_at, e.heartbeat_at, p.key, p.held_at INTO own
    FROM tenure.executor e LEFT JOIN tenure.presence p ON p.executor_id = e.id WHERE e.id = watcher;
  IF own.state IS DISTINCT FROM 'active' OR own.expires_at <= now OR own.heartbeat_at <= observed_at THEN
    RETURN 'unfit';
  END IF;
  IF own.held_at IS NULL OR own.held_at > observed_at - grace
     OR pg_try_advisory_xact_lock_shared(1413828182, own.key) THEN
    RETURN 'alone';
  END IF;
  UPDATE tenure.executor e SET state = 'revoking' WHERE e.id = absent;
  RETURN 'marked';
END $$;

SELECT tenure.fence_table('tenure.presence');
SELECT tenure.grant_roles();

INSERT INTO tenure.migration (number, name) VALUES (6, 'presence');
