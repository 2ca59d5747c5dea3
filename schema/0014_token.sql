-- Tokens: who may talk to our processes over HTTP, and as what.
--
--   usable --revoked--> revoked         usable --expires_at passes--> expired
--
-- T1. The table holds no secret, only its SHA-256. A secret is 32 random bytes: there is nothing to guess,
--     so neither salt nor a slow hash would add anything, and finding a hash by an index tells nobody
--     anything about a secret.
-- T2. Each request asks: a token that was revoked is refused from the next request on.
--
-- Only the schema's owner makes and revokes them; workers ask whether one is good.
--
-- Locks: none that another session can wait for.
-- Overlap: older code serves no requests, and knows none of this.

CREATE TABLE tenure.token (
  id           uuid        NOT NULL DEFAULT tenure.new_id() PRIMARY KEY,
  role         text        NOT NULL
    CONSTRAINT token_role CHECK (role IN ('worker', 'organisation', 'platform')),
  -- Whose it is, for people.
  name         text        NOT NULL CONSTRAINT token_name_length CHECK (length(name) BETWEEN 1 AND 200),
  hash         bytea       NOT NULL UNIQUE CONSTRAINT token_hash_is_sha256 CHECK (length(hash) = 32),
  created_at   timestamptz NOT NULL,
  created_by   text        NOT NULL,
  expires_at   timestamptz,
  revoked_at   timestamptz,
  -- To the minute: who wonders whether a token may go needs no more, and each request would write.
  last_used_at timestamptz
);

SELECT tenure.fence_table('tenure.token');

CREATE FUNCTION tenure.create_token(token_role text, token_name text, token_hash bytea, valid_for interval)
RETURNS uuid
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  made uuid;
  now  timestamptz := tenure.clock();
BEGIN
  INSERT INTO tenure.token (role, name, hash, created_at, created_by, expires_at)
  VALUES (token_role, token_name, token_hash, now, session_user, now + valid_for)
  RETURNING id INTO made;
  RETURN made;
END $$;

-- Answers 'revoked', 'already' or 'unknown'.
CREATE FUNCTION tenure.revoke_token(token uuid) RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  revoked timestamptz;
BEGIN
  SELECT t.revoked_at INTO revoked FROM tenure.token t WHERE t.id = token FOR NO KEY UPDATE;
  IF NOT FOUND THEN RETURN 'unknown'; END IF;
  IF revoked IS NOT NULL THEN RETURN 'already'; END IF;
  UPDATE tenure.token t SET revoked_at = tenure.clock() WHERE t.id = token;
  RETURN 'revoked';
END $$;

-- What a request may do whose secret has this hash. No row: nobody has ever made it.
CREATE FUNCTION tenure.authenticate(secret_hash bytea)
RETURNS TABLE (id uuid, role text, name text, state text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  found_token tenure.token;
  now         timestamptz := tenure.clock();
BEGIN
  SELECT * INTO found_token FROM tenure.token t WHERE t.hash = secret_hash;
  IF NOT FOUND THEN RETURN; END IF;
  id := found_token.id; role := found_token.role; name := found_token.name;
  state := CASE WHEN found_token.revoked_at IS NOT NULL THEN 'revoked'
                WHEN found_token.expires_at <= now THEN 'expired'
                ELSE 'usable' END;
  RETURN NEXT;
  IF state = 'usable' AND (found_token.last_used_at IS NULL OR found_token.last_used_at < now - interval '1 minute') THEN
    PERFORM tenure.admit();
    -- Skipping: one of many requests of the same minute is enough, and nobody waits for another.
    PERFORM FROM tenure.token t WHERE t.id = found_token.id FOR NO KEY UPDATE SKIP LOCKED;
    IF FOUND THEN UPDATE tenure.token t SET last_used_at = now WHERE t.id = found_token.id; END IF;
  END IF;
END $$;

SELECT tenure.grant_roles();

INSERT INTO tenure.migration (number, name) VALUES (14, 'token');
