-- Items: durable units of work on queues. The table a row is in is its state, so that the tables
-- that are polled stay small and no update ever touches a payload.
--
--   enqueue --------> ready (available) <------------- hand-back, recovery ---+
--      |                |       ^                                             |
--      | due later      |       | promote (due)                               |
--      v                |       |                                             |
--   delayed ------------|-------+                                             |
--      ^                | claim, attempt + 1                                  |
--      |                v                                                     |
--      +--- retry -- claimed (leased) ----------------------------------------+
--                       | settle
--                       v
--                     done: completed | failed | cancelled     <-- cancel, deadline (ready, delayed)
--
-- I5. An attempt number is used by at most one claim; a settle names its attempt and changes exactly
--     one row or nothing.
-- I7. No accepted item is lost: it is in exactly one of ready, claimed, delayed and done.
--
-- Locks: none that another session can wait for.
-- Overlap: nothing older exists.

CREATE SEQUENCE tenure.item_seq;

-- A queue's name is unique in its database; the first application that runs it owns it.
CREATE TABLE tenure.queue (
  id               int     GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  name             text    NOT NULL UNIQUE CONSTRAINT queue_name_length CHECK (length(name) BETWEEN 1 AND 200),
  application_name text,
  global_limit     int     CONSTRAINT global_limit_positive CHECK (global_limit > 0),
  per_key_limit    int     CONSTRAINT per_key_limit_positive CHECK (per_key_limit > 0),
  recovery_limit   text    NOT NULL DEFAULT 'executions'
    CONSTRAINT queue_recovery_limit CHECK (recovery_limit IN ('executions', 'consecutive')),
  recovery_max     int     NOT NULL DEFAULT 4 CONSTRAINT recovery_max_positive CHECK (recovery_max > 0)
);

-- What a claim reads in order. A lane without a version holds what no executor has started yet; one
-- with a version, what only executors of that version, or that accept it, may go on with. Suspects
-- are items whose executor was lost: a process holds at most one, so that one poison item does not
-- take the items that were claimed beside it into quarantine.
CREATE TABLE tenure.lane (
  id       int     GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  queue_id int     NOT NULL,
  version  text,
  suspect  boolean NOT NULL DEFAULT false,
  CONSTRAINT lane_once UNIQUE NULLS NOT DISTINCT (queue_id, version, suspect),
  CONSTRAINT suspects_have_a_version CHECK (version IS NOT NULL OR NOT suspect)
);

-- Written once, but for a debounced item that waits (0011). `seq` gives the order; ids do not, because
-- clocks jump.
CREATE TABLE tenure.item (
  id              uuid        NOT NULL,
  queue_id        int         NOT NULL,
  priority        int         NOT NULL,
  seq             bigint      NOT NULL DEFAULT nextval('tenure.item_seq'),
  -- Not empty: a keyed claim walks the keys upwards from ''.
  key             text        CONSTRAINT key_not_empty CHECK (key <> ''),
  idempotency_key text,
  payload         json        NOT NULL,
  trace           text,
  deadline_at     timestamptz,
  enqueued_at     timestamptz NOT NULL,
  -- Of 0011: the group it is a member of.
  group_id        uuid,
  PRIMARY KEY (id)
) PARTITION BY RANGE (id);

-- rank = -priority, so that one ascending index gives "higher priority first, then the older one".
-- No index on id: an item's own row tells its place.
CREATE TABLE tenure.ready (
  lane_id  int      NOT NULL,
  rank     int      NOT NULL,
  seq      bigint   NOT NULL,
  id       uuid     NOT NULL,
  attempt  int      NOT NULL,
  failures int      NOT NULL,
  losses   smallint NOT NULL,
  stuck    smallint NOT NULL,
  key      text,
  PRIMARY KEY (lane_id, rank, seq)
) WITH (
  -- Rows live for milliseconds and every claim walks the dead ones before its first live one.
  vacuum_truncate = off, autovacuum_vacuum_scale_factor = 0,
  autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0
);
CREATE INDEX ready_for_keyed_claim ON tenure.ready (lane_id, key, rank, seq) WHERE key IS NOT NULL;

-- Insert and delete only: ctid is a safe address inside a statement because no row ever moves.
CREATE TABLE tenure.claimed (
  id         uuid        NOT NULL PRIMARY KEY,
  queue_id   int         NOT NULL,
  lane_id    int         NOT NULL,
  owner      uuid        NOT NULL,
  attempt    int         NOT NULL,
  rank       int         NOT NULL,
  seq        bigint      NOT NULL,
  failures   int         NOT NULL,
  losses     smallint    NOT NULL,
  stuck      smallint    NOT NULL,
  key        text,
  claimed_at timestamptz NOT NULL
) WITH (
  vacuum_truncate = off, autovacuum_vacuum_scale_factor = 0,
  autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0
);
CREATE INDEX claimed_for_owner ON tenure.claimed (queue_id, owner);
CREATE INDEX claimed_for_key ON tenure.claimed (queue_id, key) WHERE key IS NOT NULL;

CREATE TABLE tenure.delayed (
  id       uuid        NOT NULL PRIMARY KEY,
  due_at   timestamptz NOT NULL,
  lane_id  int         NOT NULL,
  rank     int         NOT NULL,
  seq      bigint      NOT NULL,
  attempt  int         NOT NULL,
  failures int         NOT NULL,
  losses   smallint    NOT NULL,
  stuck    smallint    NOT NULL,
  key      text
) WITH (
  vacuum_truncate = off, autovacuum_vacuum_scale_factor = 0,
  autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0
);
CREATE INDEX delayed_for_promotion ON tenure.delayed (due_at);

-- An outcome, written once. `reason` says who decided it when the handler did not.
CREATE TABLE tenure.done (
  id          uuid        NOT NULL,
  queue_id    int         NOT NULL,
  attempt     int         NOT NULL,
  owner       uuid,
  outcome     text        NOT NULL
    CONSTRAINT done_outcome CHECK (outcome IN ('completed', 'failed', 'cancelled')),
  reason      text
    CONSTRAINT done_reason CHECK (reason IN (
      'HandlerDied', 'DeadlineExceeded',
      'MAX_RECOVERY_ATTEMPTS_EXCEEDED', 'EXECUTION_RECOVERY_EXHAUSTED')),
  result      json,
  failures    int         NOT NULL,
  losses      smallint    NOT NULL,
  finished_at timestamptz NOT NULL,
  PRIMARY KEY (id),
  CONSTRAINT only_failed_has_a_reason CHECK (reason IS NULL OR outcome = 'failed')
) PARTITION BY RANGE (id);

-- I6. A checkpoint is written at most once and replayed verbatim: the primary key decides.
CREATE TABLE tenure.step (
  item_id    uuid        NOT NULL,
  name       text        NOT NULL,
  attempt    int         NOT NULL,
  value      json        NOT NULL,
  written_at timestamptz NOT NULL,
  PRIMARY KEY (item_id, name)
) PARTITION BY RANGE (item_id);

-- Only items that have a key; unpartitioned, because the key must be unique over all of them.
CREATE TABLE tenure.item_key (
  queue_id int  NOT NULL,
  key      text NOT NULL,
  item_id  uuid NOT NULL,
  PRIMARY KEY (queue_id, key)
);
CREATE INDEX item_key_for_retention ON tenure.item_key (item_id);

-- Waiting or running items that have a deadline; the row goes when the deadline has passed.
CREATE TABLE tenure.deadline (
  id     uuid        NOT NULL PRIMARY KEY,
  due_at timestamptz NOT NULL
);
CREATE INDEX deadline_for_sweep ON tenure.deadline (due_at);

-- What the owner of a claimed item is asked to do; a caller never locks `claimed`.
CREATE TABLE tenure.cancel_request (
  id uuid        NOT NULL PRIMARY KEY,
  at timestamptz NOT NULL
);

-- Who is to be told when an item settles. Rows of clients that died go with their item's bucket.
CREATE TABLE tenure.waiter (
  item_id uuid NOT NULL,
  channel text NOT NULL,
  PRIMARY KEY (item_id, channel)
);

-- One bucket is a week of ids in item, done and step, so that an item, its outcome and its
-- checkpoints are dropped together. Weeks, because each partition is planned for by every lookup.
CREATE TABLE tenure.bucket (
  lower_at   timestamptz NOT NULL PRIMARY KEY,
  upper_at   timestamptz NOT NULL UNIQUE,
  name       text        NOT NULL UNIQUE,
  -- Since then it holds only what was not over when it was old enough to go.
  thinned_at timestamptz,
  emptied_at timestamptz
);

-- Hours, because a day or a week of a session's own time zone may be an hour longer or shorter.
-- Makes the buckets up to `ahead` from here. ATTACH, not CREATE .. PARTITION OF: the parent keeps
-- serving writes meanwhile. Concurrent callers take turns.
CREATE FUNCTION tenure.create_buckets(ahead interval) RETURNS int
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  lower_at timestamptz;
  until_at timestamptz := tenure.clock() + ahead;
  suffix   text;
  parent   text;
  made     int := 0;
BEGIN
  PERFORM pg_advisory_xact_lock(1413828181, 0);
  SELECT coalesce(max(b.upper_at), date_trunc('week', tenure.clock() - interval '168 hours', 'UTC'))
    INTO lower_at FROM tenure.bucket b;
  WHILE lower_at < until_at LOOP
    suffix := to_char(lower_at AT TIME ZONE 'UTC', '"p"YYYYMMDD');
    FOREACH parent IN ARRAY ARRAY['item', 'done', 'step'] LOOP
      EXECUTE format('CREATE TABLE tenure.%I (LIKE tenure.%I INCLUDING ALL)', parent || '_' || suffix, parent);
      PERFORM tenure.fence_table(format('tenure.%I', parent || '_' || suffix)::regclass);
      EXECUTE format('ALTER TABLE tenure.%I ATTACH PARTITION tenure.%I FOR VALUES FROM (%L) TO (%L)',
        parent, parent || '_' || suffix, tenure.id_at(lower_at), tenure.id_at(lower_at + interval '168 hours'));
    END LOOP;
    INSERT INTO tenure.bucket AS b (lower_at, upper_at, name)
    VALUES (lower_at, lower_at + interval '168 hours', suffix);
    lower_at := lower_at + interval '168 hours';
    made := made + 1;
  END LOOP;
  RETURN made;
END $$;

DO $$
DECLARE
  fenced regclass;
BEGIN
  FOR fenced IN
    SELECT c.oid FROM pg_class c
     WHERE c.relnamespace = 'tenure'::regnamespace AND c.relkind IN ('r', 'p')
       AND c.relname NOT IN ('migration', 'executor', 'exempt_table')
  LOOP
    PERFORM tenure.fence_table(fenced);
  END LOOP;
  PERFORM tenure.create_buckets(interval '1344 hours');
END $$;

INSERT INTO tenure.migration (number, name) VALUES (3, 'item');
