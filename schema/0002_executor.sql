-- Executors, their leases, and the fence.
--
--   active --renew--> active
--   active --mark_revoking--> revoking --revoke (0005)--> revoked
--   active --release (0005)--> released
--
-- revoked and released rows are tombstones: an id is never active again (I3).
--
-- I1. A worker session writes only while its lease is active and unexpired at its first fenced
--     statement in each transaction, by this database's clock.
-- I2. A revocation commits only after every transaction the fence admitted has ended: the fence
--     holds FOR KEY SHARE on the executor's row, the revoker waits for FOR UPDATE behind it.
--
-- Locks: none that another session can wait for.
-- Overlap: nothing older exists.

CREATE TABLE tenure.executor (
  id                  uuid        NOT NULL PRIMARY KEY,
  application_name    text        NOT NULL,
  application_version text        NOT NULL,
  state               text        NOT NULL DEFAULT 'active'
    CONSTRAINT executor_state CHECK (state IN ('active', 'revoking', 'revoked', 'released')),
  registered_at       timestamptz NOT NULL,
  heartbeat_at        timestamptz NOT NULL,
  expires_at          timestamptz NOT NULL,
  revoked_at          timestamptz,
  host                text,
  pid                 int,
  CONSTRAINT revoked_iff_revoked_at_present CHECK ((state = 'revoked') = (revoked_at IS NOT NULL))
) WITH (
  -- The hottest row of an idle system: renewals must stay HOT, so nothing they change is indexed.
  fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500
);

CREATE INDEX executor_for_scan ON tenure.executor (application_name, application_version)
  WHERE state IN ('active', 'revoking');

CREATE FUNCTION tenure.register_executor(
  executor_id uuid, application text, version text, validity interval, host text, pid int
) RETURNS void
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
  INSERT INTO tenure.executor (id, application_name, application_version,
                               registered_at, heartbeat_at, expires_at, host, pid)
  SELECT executor_id, application, version, now.at, now.at, now.at + validity, host, pid
    FROM (SELECT tenure.clock() AS at) now
$$;

-- Answers 'renewed', or why not: 'expired', 'unknown', or the state the row is in. Lock, then clock,
-- then decide: compared before the wait, a lease that expired during it would come back to life.
-- FOR NO KEY UPDATE does not wait for the fence's KEY SHARE: load cannot expire a healthy executor.
CREATE FUNCTION tenure.renew_lease(executor_id uuid, validity interval) RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  lease tenure.executor;
  now   timestamptz;
BEGIN
  SELECT * INTO lease FROM tenure.executor e WHERE e.id = executor_id FOR NO KEY UPDATE;
  IF NOT FOUND THEN RETURN 'unknown'; END IF;
  now := tenure.clock();
  IF lease.state <> 'active' THEN RETURN lease.state; END IF;
  IF lease.expires_at <= now THEN RETURN 'expired'; END IF;
  UPDATE tenure.executor e SET heartbeat_at = now, expires_at = now + validity WHERE e.id = executor_id;
  RETURN 'renewed';
END $$;

-- What the database says of a lease, without a lock: 'active', 'expired', 'unknown', or the state.
CREATE FUNCTION tenure.lease_state(executor_id uuid) RETURNS text
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
  SELECT coalesce((
    SELECT CASE WHEN e.state = 'active' AND e.expires_at <= (SELECT tenure.clock()) THEN 'expired'
                ELSE e.state END
      FROM tenure.executor e WHERE e.id = executor_id), 'unknown')
$$;

-- First step of a revocation, committed alone: from here on the fence refuses newcomers, so the
-- barrier of the second step waits only for those already admitted. In one step it starves under a
-- stream of them. Answers the state the row is in afterwards, or 'unknown'. A lease that is neither
-- expired nor forced stays 'active'.
CREATE FUNCTION tenure.mark_revoking(executor_id uuid, forced boolean DEFAULT false) RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  lease tenure.executor;
BEGIN
  SELECT * INTO lease FROM tenure.executor e WHERE e.id = executor_id FOR NO KEY UPDATE;
  IF NOT FOUND THEN RETURN 'unknown'; END IF;
  -- The clock is read after the lock: a renewal may have come in while we waited.
  IF lease.state <> 'active' OR NOT (forced OR lease.expires_at <= tenure.clock()) THEN
    RETURN lease.state;
  END IF;
  UPDATE tenure.executor e SET state = 'revoking' WHERE e.id = executor_id;
  RETURN 'revoking';
END $$;

-- Refuses the transaction unless its session's executor may write, and holds the executor's row
-- until the transaction ends.
--
-- Admission counts once for each transaction: the flag is transaction-local and names the
-- transaction, so that it is undone together with the lock by ROLLBACK TO and cannot leak into the
-- next one; an unassigned transaction id matches nothing.
-- A worker pool's transaction_timeout stays below the validity.
CREATE FUNCTION tenure.admit() RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  me    text := nullif(current_setting('tenure.executor_id', true), '');
  lease record;
BEGIN
  IF me IS NULL THEN
    -- Once anything has set it locally, an unset setting reads as '': nullif covers both. A superuser
    -- is a member of every role, and an operator at a prompt is not a worker. Neither is who may only
    -- grant the role: from PostgreSQL 16 on, whoever creates a role is a member of it in that way.
    IF current_setting('role') = 'tenure_worker' OR EXISTS (
      SELECT FROM pg_roles r, pg_roles worker
       WHERE r.rolname = session_user AND NOT r.rolsuper AND worker.rolname = 'tenure_worker'
         AND pg_has_role(r.oid, worker.oid, 'USAGE')) THEN
      RAISE EXCEPTION 'a session of the worker role has no executor' USING
        ERRCODE = 'TN004', HINT = 'Open the connection through Tenure.layer or Tenure.layerPool.';
    END IF;
    RETURN;
  END IF;
  IF current_setting('tenure.admitted', true) = me || '/' || pg_current_xact_id_if_assigned()::text THEN
    RETURN;
  END IF;
  SELECT e.state, e.expires_at INTO lease
    FROM tenure.executor e WHERE e.id = me::uuid FOR KEY SHARE;
  IF NOT FOUND THEN
    RAISE EXCEPTION 'executor % is not registered', me USING
      ERRCODE = 'TN003', HINT = 'Stop this process; it starts again as a new executor.';
  ELSIF lease.state <> 'active' THEN
    RAISE EXCEPTION 'executor % may not write: its lease is %', me, lease.state USING
      ERRCODE = 'TN002', HINT = 'Stop this process; another executor has its work.';
  ELSIF lease.expires_at <= tenure.clock() THEN
    -- An older snapshot shows the row as it was before the last renewal: no proof of an expiry.
    IF current_setting('transaction_isolation') <> 'read committed' THEN
      RAISE EXCEPTION 'executor %: its lease was renewed or has expired since this snapshot', me USING
        ERRCODE = '40001', HINT = 'Repeat the transaction.';
    END IF;
    RAISE EXCEPTION 'executor % may not write: its lease has expired', me USING
      ERRCODE = 'TN001', HINT = 'Stop this process; another executor takes its work over.';
  END IF;
  me := set_config('tenure.admitted', me || '/' || pg_current_xact_id()::text, true);
END $$;

-- The same as a trigger. Statements after a transaction's first end at the flag.
--
-- The one function without a path of its own, because setting it costs each fenced statement 1 us and
-- more: instead every name and operator says its schema, so that a session's path, temporary tables
-- and operators change nothing. admit() is called in an expression: PERFORM would run a query. A
-- transaction of one row takes 15 us of processor time more behind this fence (17 with the path and
-- the query), one of five statements 27 (32).
CREATE FUNCTION tenure.fence() RETURNS trigger
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
AS $$
DECLARE
  admitted boolean := pg_catalog.current_setting('tenure.admitted', true) OPERATOR(pg_catalog.=) (
    pg_catalog.current_setting('tenure.executor_id', true)
      OPERATOR(pg_catalog.||) '/'
      OPERATOR(pg_catalog.||) pg_catalog.pg_current_xact_id_if_assigned()::pg_catalog.text);
BEGIN
  IF admitted IS NOT TRUE THEN
    admitted := tenure.admit() IS NOT NULL;
  END IF;
  RETURN NULL;
END $$;

-- Puts the fence on a table and on all its partitions; call it from the application's migration.
-- Runs with the caller's rights: only the table's owner can. A partition made later needs its own
-- call, because a trigger of the parent does not see writes that name the partition.
-- ENABLE ALWAYS: a session cannot leave the fence behind with session_replication_role.
CREATE FUNCTION tenure.fence_table(fenced regclass) RETURNS void
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
  part regclass;
BEGIN
  FOR part IN
    SELECT fenced UNION SELECT t.relid FROM pg_catalog.pg_partition_tree(fenced) t
  LOOP
    EXECUTE format('CREATE OR REPLACE TRIGGER tenure_fence '
      'BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON %s '
      'FOR EACH STATEMENT EXECUTE FUNCTION tenure.fence()', part);
    EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER tenure_fence', part);
  END LOOP;
END $$;

-- Tables that work never writes to, declared by the application's migration with the reason.
CREATE TABLE tenure.exempt_table (
  name   text NOT NULL PRIMARY KEY,
  reason text NOT NULL
);

CREATE FUNCTION tenure.exempt_table(exempted regclass, reason text) RETURNS void
LANGUAGE sql VOLATILE
AS $$
  INSERT INTO tenure.exempt_table AS t (name, reason)
  SELECT format('%I.%I', n.nspname, c.relname), exempt_table.reason
    FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
   WHERE c.oid = exempted
  ON CONFLICT (name) DO UPDATE SET reason = excluded.reason
$$;

-- Tables and partitions that this session's role may write and that no enabled fence guards: those
-- of the application, and our own, where a gap is our bug.
CREATE FUNCTION tenure.unfenced_tables() RETURNS TABLE (name text)
LANGUAGE sql STABLE
AS $$
  SELECT format('%I.%I', n.nspname, c.relname)
    FROM pg_catalog.pg_class c
    JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
   WHERE c.relkind IN ('r', 'p')
     AND c.relpersistence <> 't'
     AND n.nspname NOT IN ('pg_catalog', 'information_schema', 'pg_toast')
     AND CASE WHEN n.nspname = 'tenure'
              THEN c.relname NOT IN ('migration', 'executor', 'exempt_table')
              ELSE pg_catalog.has_table_privilege(c.oid, 'DELETE, TRUNCATE')
                OR pg_catalog.has_any_column_privilege(c.oid, 'INSERT, UPDATE') END
     AND NOT EXISTS (
       SELECT FROM pg_catalog.pg_trigger t
        WHERE t.tgrelid = c.oid
          AND t.tgfoid = 'tenure.fence()'::regprocedure
          AND t.tgenabled = 'A'
          AND t.tgtype = 62  -- BEFORE, statement, all four events
          AND t.tgqual IS NULL AND cardinality(t.tgattr::int[]) = 0)
     AND NOT EXISTS (
       SELECT FROM tenure.exempt_table x WHERE x.name = format('%I.%I', n.nspname, c.relname))
   ORDER BY 1
$$;

INSERT INTO tenure.migration (number, name) VALUES (2, 'executor');
