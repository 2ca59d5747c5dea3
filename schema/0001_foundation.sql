-- Foundation: the schema, the record of migrations, the roles, the clock.
--
-- Locks: none that another session can wait for.
-- Overlap: nothing older exists.

CREATE SCHEMA IF NOT EXISTS tenure;

-- A file that psql applied has no checksum until our runner has seen it. `oldest_code` is the highest
-- migration that the oldest code which may still run beside this one knows: a deploy that overlaps
-- keeps its older workers, and one that cannot says so here.
CREATE TABLE IF NOT EXISTS tenure.migration (
  number      int         NOT NULL PRIMARY KEY,
  name        text        NOT NULL,
  checksum    text,
  oldest_code int         NOT NULL DEFAULT 1,
  applied_at  timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- Roles belong to the server, not to the database, and a managed server may refuse to make them:
-- then everything works under one role, and `tenure migrate` says what that role does not protect.
-- Two databases of one server may migrate at once, hence the two "somebody was first" conditions.
DO $$
DECLARE
  wanted text;
BEGIN
  FOREACH wanted IN ARRAY ARRAY['tenure_worker', 'tenure_api'] LOOP
    IF NOT EXISTS (SELECT FROM pg_catalog.pg_roles WHERE rolname = wanted) THEN
      BEGIN
        EXECUTE format('CREATE ROLE %I NOLOGIN', wanted);
      EXCEPTION
        WHEN insufficient_privilege THEN
          RAISE NOTICE 'role % not created: the migrating role may not create roles', wanted;
        WHEN duplicate_object OR unique_violation THEN
          NULL;
      END;
    END IF;
  END LOOP;
END $$;

-- The one clock of every decision. VOLATILE, because STABLE would freeze it before a lock wait;
-- read it once, after the lock, into a variable or through `(SELECT tenure.clock())`: a bare call in
-- a predicate keeps the planner from using it as an index condition.
CREATE FUNCTION tenure.clock() RETURNS timestamptz
LANGUAGE sql VOLATILE PARALLEL SAFE
AS $$ SELECT pg_catalog.clock_timestamp() $$;

-- Time-ordered ids (UUID version 7, RFC 9562) made by the server: they choose the bucket a row is
-- stored in, and a client's wrong clock must not choose it. They give no order: `seq` does.
DO $do$
BEGIN
  IF current_setting('server_version_num')::int >= 180000 THEN
    CREATE FUNCTION tenure.new_id() RETURNS uuid
    LANGUAGE sql VOLATILE PARALLEL SAFE
    AS $$ SELECT pg_catalog.uuidv7() $$;
  ELSE
    CREATE FUNCTION tenure.new_id() RETURNS uuid
    LANGUAGE sql VOLATILE PARALLEL SAFE
    AS $$
      SELECT encode(
        set_bit(set_bit(
          overlay(uuid_send(gen_random_uuid())
            PLACING substring(int8send(floor(extract(epoch FROM pg_catalog.clock_timestamp()) * 1000)::bigint)
              FROM 3)
            FROM 1 FOR 6),
          52, 1), 53, 1), 'hex')::uuid
    $$;
  END IF;
END $do$;

-- The smallest id made at or after an instant: bucket bounds.
CREATE FUNCTION tenure.id_at(instant timestamptz) RETURNS uuid
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
  SELECT (lpad(to_hex(floor(extract(epoch FROM instant) * 1000)::bigint), 12, '0')
    || '70008000000000000000')::uuid
$$;

INSERT INTO tenure.migration (number, name) VALUES (1, 'foundation');
