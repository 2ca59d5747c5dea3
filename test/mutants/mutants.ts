/**
 * Deliberate bugs. Each is a textual change of one source file and the test that has to fail because of
 * it: a test that passes with the bug in place proves nothing. The unchanged sources must pass the same
 * tests. A text that is not found any more is an error, so that the list follows the sources.
 */
export interface Mutant {
  /** The bug, in the words of a reviewer who has found it. */
  readonly name: string
  /** From the root of the repository. */
  readonly file: string
  /** Each text is replaced at its first place, or in the function that `within` names. */
  readonly changes: ReadonlyArray<readonly [from: string, to: string]>
  readonly within?: string
  readonly test: { readonly file: string; readonly name: string }
}

const executor = "schema/0002_executor.sql"
const queue = "schema/0004_queue.sql"
const recovery = "schema/0005_recovery.sql"
const capacity = "schema/0013_capacity.sql"
const monitor = "schema/0008_monitor.sql"
const quarantine = "schema/0009_quarantine.sql"
const limits = "schema/0010_limits.sql"
const groups = "schema/0011_groups.sql"
const wait = "schema/0012_wait.sql"
const schedule = "schema/0015_schedule.sql"
const calendar = "src/queue/Calendar.ts"
const deadLetter = "schema/0016_dead_letter.sql"
const progress = "schema/0017_progress.sql"
const step = "src/queue/Step.ts"
const enqueuer = "src/queue/Enqueuer.ts"

const lease = (name: string) => ({ file: "test/isolation/Lease.test.ts", name })
const revocation = (name: string) => ({ file: "test/isolation/Revocation.test.ts", name })
const identity = (name: string) => ({ file: "test/fence/Identity.test.ts", name })
const kernel = (file: string, name: string) => ({ file: `test/kernel/${file}.test.ts`, name })
const watchdog = (file: string, name: string) => ({ file: `test/watchdog/${file}.test.ts`, name })
const settlement = (name: string) => ({ file: "test/recovery/Settlement.test.ts", name })
const steps = (name: string) => ({ file: "test/queue/Step.test.ts", name })
const api = (name: string) => ({ file: "test/http/Api.test.ts", name })
const pulling = (name: string) => ({ file: "test/http/Sessions.test.ts", name })
const enqueues = (name: string) => ({ file: "test/queue/Enqueuer.test.ts", name })
const transactions = (name: string) => ({ file: "test/queue/Transaction.test.ts", name })
const waits = (name: string) => ({ file: "test/queue/Wait.test.ts", name })
const budgets = (name: string) => ({ file: "test/queue/Budgets.test.ts", name })

const doctor = (name: string) => ({ file: "test/main/Doctor.test.ts", name })
const recovering = (name: string) => ({ file: "test/queue/Recovery.test.ts", name })

const slots = (name: string) => ({ file: "test/queue/Calendar.test.ts", name })

const presence = "schema/0006_presence.sql"
const watching = "src/executor/PresenceWatch.ts"
const ring = (name: string) => ({ file: "test/executor/Presence.test.ts", name })
const deathWatch = (name: string) => ({ file: "test/executor/PresenceWatch.test.ts", name })
const everyHistory = deathWatch("condemns whom the whole history condemns")
const everyRefusal = kernel("presence", "is refused with a word of its own for each thing")

const everyOrder = lease("a revocation commits after every admitted transaction")

export const mutants: ReadonlyArray<Mutant> = [
  // --- leases and the fence
  {
    name: "the revocation takes no lock on the executor",
    file: recovery,
    within: "tenure.revoke",
    changes: [["WHERE e.id = executor FOR UPDATE;", "WHERE e.id = executor;"]],
    test: everyOrder
  },
  {
    name: "the revocation skips an executor whose row is locked",
    file: recovery,
    within: "tenure.revoke",
    changes: [
      ["WHERE e.id = executor FOR UPDATE;", "WHERE e.id = executor FOR UPDATE SKIP LOCKED;"]
    ],
    test: everyOrder
  },
  {
    name: "the fence holds FOR SHARE, and load expires a healthy executor",
    file: executor,
    within: "tenure.admit",
    changes: [["FOR KEY SHARE", "FOR SHARE"]],
    test: everyOrder
  },
  {
    name: "the fence reads the executor's row and does not hold it",
    file: executor,
    within: "tenure.admit",
    changes: [["WHERE e.id = me::uuid FOR KEY SHARE", "WHERE e.id = me::uuid"]],
    test: everyOrder
  },
  {
    name: "the fence takes the transaction's start for the time",
    file: executor,
    within: "tenure.admit",
    changes: [["lease.expires_at <= tenure.clock()", "lease.expires_at <= now()"]],
    test: lease("a write that waited past the expiry is refused")
  },
  {
    name: "the fence reads the clock before the lock",
    file: executor,
    within: "tenure.admit",
    changes: [
      ["  lease record;\nBEGIN", "  lease record;\n  early timestamptz := tenure.clock();\nBEGIN"],
      ["lease.expires_at <= tenure.clock()", "lease.expires_at <= early"]
    ],
    test: lease("a write that waited past the expiry is refused")
  },
  {
    name: "the renewal reads the clock before the lock",
    file: executor,
    within: "tenure.renew_lease",
    changes: [
      ["\nBEGIN\n", "\nBEGIN\n  now := tenure.clock();\n"],
      ["RETURN 'unknown'; END IF;\n  now := tenure.clock();", "RETURN 'unknown'; END IF;"]
    ],
    test: lease("a renewal that waited past its expiry does not revive the lease")
  },
  {
    name: "the mark does not look at the lease again behind the lock",
    file: executor,
    within: "tenure.mark_revoking",
    changes: [["OR NOT (forced OR lease.expires_at <= tenure.clock())", ""]],
    test: lease("a mark that waited for a renewal spares the renewed lease")
  },
  {
    name: "a session of the worker role passes the fence without an executor",
    file: executor,
    within: "tenure.admit",
    changes: [
      ["IF current_setting('role') = 'tenure_worker' OR EXISTS (", "IF false AND EXISTS ("]
    ],
    test: identity("is refused without an executor, with an unknown one, and with a tombstone")
  },
  {
    name: "an empty identity is taken for one",
    file: executor,
    within: "tenure.admit",
    changes: [
      [
        "nullif(current_setting('tenure.executor_id', true), '')",
        "current_setting('tenure.executor_id', true)"
      ]
    ],
    test: identity("stays refused after a local setting has left an empty string behind")
  },
  {
    name: "an admission counts for every transaction without a number",
    file: executor,
    within: "tenure.admit",
    changes: [
      [
        "me || '/' || pg_current_xact_id_if_assigned()::text",
        "me || '/' || coalesce(pg_current_xact_id_if_assigned()::text, '-')"
      ]
    ],
    test: identity("is never matched by what a session has set itself")
  },
  {
    name: "the fence searches the session's path",
    file: executor,
    within: "tenure.admit",
    changes: [["SECURITY DEFINER SET search_path = pg_catalog, pg_temp", "SECURITY DEFINER"]],
    test: {
      file: "test/fence/SearchPath.test.ts",
      name: "finds no function with the owner's rights that leaves its path open"
    }
  },
  {
    name: "the fence does not see TRUNCATE",
    file: executor,
    within: "tenure.fence_table",
    changes: [["INSERT OR UPDATE OR DELETE OR TRUNCATE", "INSERT OR UPDATE OR DELETE"]],
    test: {
      file: "test/fence/WritePaths.test.ts",
      name: "is refused to a revoked executor, and open to a live one"
    }
  },
  {
    name: "the fence is left behind by replica mode",
    file: executor,
    within: "tenure.fence_table",
    changes: [["ENABLE ALWAYS TRIGGER", "ENABLE TRIGGER"]],
    test: {
      file: "test/fence/WritePaths.test.ts",
      name: "is refused to a revoked executor, and open to a live one"
    }
  },
  {
    name: "the fence is put on the parent and not on its partitions",
    file: "schema/0003_item.sql",
    within: "tenure.create_buckets",
    changes: [["PERFORM tenure.fence_table", "PERFORM pg_typeof"]],
    test: kernel("retention", "makes room ahead: every bucket and all its tables, with the fence")
  },
  {
    name: "the revocation is one step: it takes an active executor",
    file: recovery,
    within: "tenure.revoke",
    changes: [
      [
        "state NOT IN ('revoking', 'revoked', 'released')",
        "state NOT IN ('active', 'revoking', 'revoked', 'released')"
      ],
      ["IF state = 'revoking' THEN", "IF state IN ('active', 'revoking') THEN"]
    ],
    test: revocation(
      "does nothing to an executor that has renewed, was never known, or is a tombstone"
    )
  },
  {
    name: "the revoker is fenced by its own row",
    file: recovery,
    within: "tenure.revoke",
    changes: [["IF me IS NOT NULL THEN", "IF me IS NOT NULL THEN\n    PERFORM tenure.admit();"]],
    test: revocation("both succeed in every order, and nobody deadlocks")
  },

  // --- presence
  {
    name: "presence: whom the watcher has never seen is condemned",
    file: watching,
    changes: [
      [
        "look.missing.filter((id) => before.seen.has(id) || look.newcomers.includes(id))",
        "look.missing"
      ]
    ],
    test: deathWatch("never condemns whom it has not seen since its own session began")
  },
  {
    name: "presence: what was seen in an earlier session of the watcher counts",
    file: watching,
    changes: [["heldAtMicros === watch.heldAtMicros ? watch", "true ? watch"]],
    test: ring("leaves to the lease who does not come back when every session was lost")
  },
  {
    name: "presence: the watcher does not renew before it condemns",
    file: watching,
    changes: [[" && look.renewedAtMicros > absence.sinceMicros", ""]],
    test: everyHistory
  },
  {
    name: "presence: the grace is counted on the database's clock alone",
    file: watching,
    changes: [["    Number(look.nanos - absence.sinceNanos) / 1e6\n", "    Infinity\n"]],
    test: everyHistory
  },
  {
    name: "presence: a clock that was set back leaves an absence in the future",
    file: watching,
    changes: [[" && known.sinceMicros <= look.atMicros", ""]],
    test: everyHistory
  },
  {
    name: "presence: a member that has renewed is asked about again",
    file: watching,
    changes: [["isSpared: true", "isSpared: false"]],
    test: everyHistory
  },
  {
    name: "presence: a watcher that has just come back condemns who has not",
    file: watching,
    changes: [["look.atMicros - heldAtMicros >= graceMillis * 1000", "true"]],
    test: everyHistory
  },
  {
    name: "presence: a lost session is not told to the database",
    file: "src/executor/Presence.ts",
    changes: [["      lost = { heldAtMicros }\n", ""]],
    test: ring("does not take for dead who says that it cannot get its session back")
  },
  {
    name: "presence: a late leave is not noticed",
    file: "src/executor/Presence.ts",
    changes: [["holdAgain.openUnsafe()", "undefined"]],
    test: ring("is taken up again by a member that finds itself taken out of it")
  },
  {
    name: "presence: an orderly end is not told to the database",
    file: "src/main/Tenure.ts",
    changes: [["yield* Effect.addFinalizer(() => presence.leave)", ""]],
    test: ring("says that it leaves, also when work that does not stop keeps its lease")
  },
  {
    name: "presence: the watch waits for its neighbour's lock in the database",
    file: presence,
    within: "tenure.watch_presence",
    changes: [
      [
        "IF pg_try_advisory_xact_lock_shared(1413828182, member.key) THEN\n        missing",
        "PERFORM pg_advisory_xact_lock_shared(1413828182, member.key); IF true THEN\n        missing"
      ]
    ],
    test: ring("lets VACUUM remove dead rows")
  },
  {
    name: "presence: a watcher takes the lock exclusively",
    file: presence,
    within: "tenure.watch_presence",
    changes: [
      [
        "IF pg_try_advisory_xact_lock_shared(1413828182, member.key) THEN\n        missing",
        "IF pg_try_advisory_xact_lock(1413828182, member.key) THEN\n        missing"
      ]
    ],
    test: kernel("presence", "keeps the owner out for the length of the statement only")
  },
  {
    name: "presence: a look ends at a newcomer",
    file: presence,
    within: "tenure.watch_presence",
    changes: [["AND member.held_at < seen_at - interval '10 seconds'", ""]],
    test: ring("finds a member whose place is taken by its own replacement at once")
  },
  {
    name: "presence: a look ends at a member of another version",
    file: presence,
    within: "tenure.watch_presence",
    changes: [["AND member.application_version = own.application_version", ""]],
    test: kernel("presence", "passes those who may not look further")
  },
  {
    name: "presence: who is followed is not asked for",
    file: presence,
    within: "tenure.watch_presence",
    changes: [["WHERE p.executor_id = ANY(followed)", "WHERE false"]],
    test: kernel("presence", "passes those who may not look further")
  },
  {
    name: "presence: the ring ends at the highest key",
    file: presence,
    within: "tenure.watch_presence",
    changes: [["FOR past IN 0..1 LOOP", "FOR past IN 0..0 LOOP"]],
    test: kernel("presence", "ends at the first who is there and looks further")
  },
  {
    name: "presence: what a session before says empties the next one's row",
    file: presence,
    within: "tenure.leave_presence",
    changes: [[" AND p.held_at = coalesce(held, p.held_at)", ""]],
    test: kernel("presence", "is not emptied by what was sent for the session before")
  },
  {
    name: "presence: the mark reads the lease and does not lock it",
    file: presence,
    within: "tenure.mark_absent",
    changes: [["WHERE e.id = absent FOR NO KEY UPDATE;", "WHERE e.id = absent;"]],
    test: kernel("presence", "one to mark and one to renew")
  },
  {
    name: "presence: two marks at a time",
    file: presence,
    within: "tenure.mark_absent",
    changes: [["IF NOT pg_try_advisory_xact_lock(1413828182, 0)", "IF false"]],
    test: kernel("presence", "about each other mark one at most")
  },
  {
    name: "presence: a watcher without a lock of its own may mark",
    file: presence,
    within: "tenure.mark_absent",
    changes: [["OR pg_try_advisory_xact_lock_shared(1413828182, own.key) THEN", "THEN"]],
    test: kernel("presence", "about each other mark nobody when their sessions dropped together")
  },
  {
    name: "presence: a renewal since the loss does not spare",
    file: presence,
    within: "tenure.mark_absent",
    changes: [["IF lease.heartbeat_at >= observed_at THEN RETURN 'renewed'; END IF;", ""]],
    test: everyRefusal
  },
  {
    name: "presence: who came back and went again counts as gone all the time",
    file: presence,
    within: "tenure.mark_absent",
    changes: [["IF held >= observed_at THEN RETURN 'returned'; END IF;", ""]],
    test: everyRefusal
  },
  {
    name: "presence: nobody is spared after the server was started",
    file: presence,
    within: "tenure.mark_absent",
    changes: [["started > now - interval '15 seconds' OR ", ""]],
    test: kernel("presence", "is spared for fifteen seconds after the server was started")
  },
  {
    name: "presence: a revoked executor keeps its row",
    file: recovery,
    within: "tenure.revoke",
    changes: [["  DELETE FROM tenure.presence p WHERE p.executor_id = executor;\n", ""]],
    test: kernel("presence", "is marked, once, and its work goes to the next")
  },
  {
    name: "presence: a released executor keeps its row",
    file: recovery,
    within: "tenure.release_executor",
    changes: [["  DELETE FROM tenure.presence p WHERE p.executor_id = executor;\n", ""]],
    test: kernel("presence", "goes with an orderly release")
  },
  {
    name: "work of a lost executor comes back unannounced",
    file: recovery,
    within: "tenure.revoke",
    changes: [["    PERFORM tenure.tell('tenure_work', queue_::text);\n", ""]],
    test: kernel("presence", "is announced to whoever runs its queue, by the commit itself")
  },
  {
    name: "work of a released executor comes back unannounced",
    file: recovery,
    within: "tenure.release_executor",
    changes: [["    PERFORM tenure.tell('tenure_work', queue_::text);\n", ""]],
    test: kernel("presence", "is announced to whoever runs its queue, by the commit itself")
  },
  // --- enqueue
  {
    name: "of two items with one key in a batch any may win",
    file: queue,
    within: "tenure.enqueue_all",
    changes: [["ORDER BY u.key, u.place\n", "ORDER BY u.key, u.place DESC\n"]],
    test: kernel("idempotency", "a key that is twice in a batch names one item: the first")
  },
  {
    name: "a conflict leaves what was written before it",
    file: queue,
    within: "tenure.enqueue_all",
    changes: [
      [
        "IF FOUND THEN RAISE EXCEPTION USING ERRCODE = 'TN020', MESSAGE = 'idempotency conflict'; END IF;",
        "IF FOUND THEN RETURN; END IF;"
      ]
    ],
    test: kernel(
      "idempotency",
      "a conflict names the key and its item, and nothing of the batch is written"
    )
  },
  {
    name: "nobody makes the bucket that retention would have made",
    file: queue,
    within: "tenure.enqueue_all",
    changes: [["PERFORM tenure.create_buckets(interval '1344 hours');", "NULL;"]],
    test: kernel(
      "enqueue",
      "the first enqueue after weeks without maintenance makes its own bucket"
    )
  },
  {
    name: "the lookup of a queue uses up an identity value each time",
    file: queue,
    within: "tenure.queue_id",
    changes: [
      [
        "    SELECT q.id INTO found_id",
        "    PERFORM nextval('tenure.queue_id_seq');\n    SELECT q.id INTO found_id"
      ]
    ],
    test: kernel("enqueue", "a thousand enqueues move no sequence but the one of the items")
  },

  // --- claim
  {
    name: "the claim counts without the queue's lock",
    file: queue,
    within: "tenure.claim",
    changes: [["PERFORM pg_advisory_xact_lock(1413828181, claimed_queue);", "NULL;"]],
    test: kernel("limits", "eight claimers never run more than the global limit")
  },
  {
    name: "the claim takes the queue's lock before the executor's row",
    file: queue,
    within: "tenure.claim",
    changes: [["    PERFORM tenure.admit();\n", ""]],
    test: kernel("limits", "a claim that is refused by the fence does not hold the queue's lock")
  },
  {
    name: "the claim copies the item and leaves it available",
    file: queue,
    within: "tenure.claim",
    changes: [
      [
        "DELETE FROM tenure.ready r WHERE r.ctid = ANY(ARRAY(SELECT p.tid FROM picked p))",
        "SELECT FROM tenure.ready r WHERE r.ctid = ANY(ARRAY(SELECT p.tid FROM picked p))"
      ]
    ],
    test: kernel("claim", "raises the attempt at each claim and by nothing else")
  },
  {
    name: "the claim accepts an older snapshot",
    file: queue,
    within: "tenure.claim",
    changes: [["current_setting('transaction_isolation') <> 'read committed'", "false"]],
    test: kernel(
      "claim",
      "refuses a snapshot older than its lock, and a session that is no executor"
    )
  },
  {
    name: "a process holds any number of suspects",
    file: queue,
    within: "tenure.claim",
    changes: [
      [
        "ORDER BY r.rank, r.seq LIMIT suspects_wanted FOR UPDATE SKIP LOCKED",
        "ORDER BY r.rank, r.seq LIMIT wanted FOR UPDATE SKIP LOCKED"
      ],
      ["ORDER BY s.rank, s.seq LIMIT suspects_wanted", "ORDER BY s.rank, s.seq"]
    ],
    test: kernel("recovery", "a poison item among a thousand is quarantined alone")
  },
  {
    name: "suspects with a key and without have a bound each",
    file: queue,
    within: "tenure.claim",
    changes: [
      [
        "ORDER BY s.rank, s.seq LIMIT suspects_wanted",
        "ORDER BY s.rank, s.seq LIMIT 2 * suspects_wanted"
      ]
    ],
    test: kernel("claim", "takes no more suspects than wanted, beside as many others")
  },
  {
    name: "the floor is not looked at",
    file: queue,
    within: "tenure.claim",
    changes: [["(r.rank, r.seq) > (l.floor_rank, l.floor_seq)", "true"]],
    test: kernel(
      "claim",
      "begins above the floor of each lane, and from the start sees what is below"
    )
  },
  {
    name: "the cursor follows the lane that is furthest",
    file: queue,
    within: "tenure.claim",
    changes: [
      [
        "SELECT min(h.key) AS until FROM head h WHERE h.n = key_window",
        "SELECT CASE WHEN max(h.n) = key_window THEN max(h.key) END AS until FROM head h"
      ]
    ],
    test: kernel(
      "limits",
      "the cursor leaves out no key of one lane because another lane has later ones"
    )
  },
  {
    name: "the limit of a key is not looked at",
    file: queue,
    within: "tenure.claim",
    changes: [["THEN limits.per_key_limit - (", "THEN 1 + limits.per_key_limit - ("]],
    test: kernel("limits", "of each key no more run than its limit, in the order of the key")
  },

  // --- pause, rates, turns, aging
  {
    name: "a pause is not looked at",
    file: queue,
    within: "tenure.claim",
    changes: [["IF limits.paused_at IS NOT NULL THEN", "IF false THEN"]],
    test: kernel("turns", "gives nothing from the commit on, and all of it when it goes on: plain")
  },
  {
    name: "starts of a rate are forgotten at the end of a fixed window",
    file: limits,
    within: "tenure.rate_room",
    changes: [
      [
        "l.last_at > now - span",
        "l.last_at > to_timestamp(floor(extract(epoch FROM now) / extract(epoch FROM span)) * extract(epoch FROM span))"
      ]
    ],
    test: kernel(
      "rates",
      "is never passed in any window, and never given away by more than a thousandth of it"
    )
  },
  {
    name: "starts that share a row count until the first of them is over",
    file: limits,
    within: "tenure.note_starts",
    changes: [[", last_at = excluded.last_at", ""]],
    test: kernel("rates", "holds for eight sessions at once, in real time")
  },
  {
    name: "the rate of a key is not noted",
    file: limits,
    within: "tenure.note_starts",
    changes: [["IF key_rate_window IS NOT NULL THEN", "IF false THEN"]],
    test: kernel("rates", "holds back the key and nobody else, and tells when")
  },
  {
    name: "the next claim begins at the first key again",
    file: queue,
    within: "tenure.claim",
    changes: [["ORDER BY l.round DESC, l.key DESC LIMIT 1)", "ORDER BY l.round, l.key LIMIT 0)"]],
    test: kernel(
      "turns",
      "of each that waits one starts before the second of any, in its own order"
    )
  },
  {
    name: "a queue is as old as its new policy",
    file: limits,
    within: "tenure.set_limits",
    changes: [
      [
        "aging_steps = coalesce(tenure.aged_at(now, q.aging, q.aging_since, q.aging_steps), 0)",
        "aging_steps = 0"
      ]
    ],
    test: kernel("turns", "nobody overtakes those before him because the policy changes")
  },
  {
    name: "a claimer under a rate waits for somebody to tell it",
    file: "src/queue/Runner.ts",
    changes: [["Hold.pauseMillis(hold, nowMillis()),", "Number.POSITIVE_INFINITY,"]],
    test: {
      file: "test/queue/Limits.test.ts",
      name: "a rate is kept without polling, for the queue and for each key"
    }
  },

  // --- settle and checkpoint
  {
    name: "a settle does not name its attempt",
    file: queue,
    within: "tenure.settle",
    changes: [
      [
        "k.id = g.id AND k.attempt = g.attempt AND k.owner IS NOT DISTINCT FROM me",
        "k.id = g.id AND k.owner IS NOT DISTINCT FROM me"
      ]
    ],
    test: kernel("settle", "an attempt that is over settles nothing")
  },
  {
    name: "a settle does not name its owner",
    file: queue,
    within: "tenure.settle",
    changes: [
      [
        "k.id = g.id AND k.attempt = g.attempt AND k.owner IS NOT DISTINCT FROM me",
        "k.id = g.id AND k.attempt = g.attempt"
      ]
    ],
    test: kernel("settle", "an attempt that is over settles nothing")
  },
  {
    name: "a settle drops failed outcomes",
    file: queue,
    within: "tenure.settle",
    changes: [
      [
        "WHERE (o.outcome IN ('retry', 'hand-back')) IS NOT TRUE",
        "WHERE (o.outcome IN ('retry', 'hand-back', 'failed')) IS NOT TRUE"
      ]
    ],
    test: kernel("settle", "each outcome puts the item where it belongs")
  },
  {
    name: "a settle loses an item whose outcome it does not know",
    file: queue,
    within: "tenure.settle",
    changes: [
      [
        "WHERE (o.outcome IN ('retry', 'hand-back')) IS NOT TRUE",
        "WHERE o.outcome IN ('completed', 'failed', 'cancelled')"
      ]
    ],
    test: kernel("settle", "an outcome that does not exist is refused, and no item is lost by it")
  },
  {
    name: "a settle waits for a locked row",
    file: queue,
    within: "tenure.settle",
    changes: [["          FOR UPDATE SKIP LOCKED) c", "          FOR UPDATE) c"]],
    test: kernel(
      "settle",
      "a locked row is answered with busy and does not hold up ninety-nine others"
    )
  },
  {
    name: "a settle locks its items before the executor's row",
    file: queue,
    within: "tenure.settle",
    changes: [["  PERFORM tenure.admit();\n", ""]],
    test: kernel("settle", "a settle behind a revoker has locked no work row")
  },
  {
    name: "a settled item hides the stale attempt beside it",
    file: queue,
    within: "tenure.settle",
    changes: [
      [
        "WHERE places IS NULL OR u.place <> ALL(places)",
        "WHERE settled IS NULL OR u.id <> ALL(settled)"
      ]
    ],
    test: kernel("settle", "two attempts of one item in a batch")
  },
  {
    name: "a hand-back counts as a loss",
    file: queue,
    within: "tenure.settle",
    changes: [
      [
        "(o.outcome = 'retry')::int, o.losses,\n           o.stuck",
        "(o.outcome = 'retry')::int, o.losses + 1,\n           o.stuck"
      ]
    ],
    test: kernel("recovery", "twenty hand-backs and retries are no loss")
  },
  {
    name: "anybody may store a checkpoint",
    file: queue,
    within: "tenure.checkpoint",
    changes: [
      [
        "WHERE c.id = g.id AND c.attempt = g.attempt AND c.owner IS NOT DISTINCT FROM me FOR KEY SHARE",
        "WHERE c.id = g.id AND c.attempt = g.attempt FOR KEY SHARE"
      ]
    ],
    test: kernel("settle", "an attempt that is over settles nothing")
  },
  {
    name: "a settle passes a checkpoint that is being written",
    file: queue,
    within: "tenure.checkpoint",
    changes: [
      ["c.owner IS NOT DISTINCT FROM me FOR KEY SHARE) c", "c.owner IS NOT DISTINCT FROM me) c"]
    ],
    test: kernel("settle", "a settle does not pass a checkpoint that is being written")
  },

  // --- durable waits
  {
    name: "an event whose item is on its way to park is forgotten",
    file: wait,
    within: "tenure.claim_waits",
    changes: [["w.looks < 4", "w.looks < 0"]],
    test: kernel(
      "wait",
      "that a park on its way has not seen, nor it the park, wakes the item all the same"
    )
  },
  {
    name: "a park does not look at what was told since the question",
    file: wait,
    within: "tenure.park",
    changes: [["s.name = ANY(h.names) LIMIT 1", "s.name = '' LIMIT 1"]],
    test: kernel("wait", "that comes between the question and the park makes the item due at once")
  },
  {
    name: "the time of a wait begins anew with each attempt",
    file: wait,
    within: "tenure.ask_waits",
    changes: [
      [
        "ON CONFLICT DO NOTHING;",
        "ON CONFLICT ON CONSTRAINT wait_pkey DO UPDATE SET due_at = excluded.due_at;"
      ]
    ],
    test: kernel(
      "wait",
      "gives the item back when its time is over and not before, in the place it had"
    )
  },
  {
    name: "the stale-claim sweep forgets what a wait was before",
    file: wait,
    within: "tenure.sweep_stale_claims",
    changes: [["SET state = p.pre_claim_status", "SET state = 'waiting'"]],
    test: kernel(
      "wait",
      "puts back what it was, after the threshold, and nothing that was dispatched"
    )
  },
  {
    name: "the stale-claim sweep takes what the scanner has",
    file: wait,
    within: "tenure.sweep_stale_claims",
    changes: [["NOT EXISTS (SELECT FROM tenure.capacity_owns(p.id) owns WHERE owns)", "true"]],
    test: kernel(
      "wait",
      "and the scanner have every stranded item in one domain, whatever the thresholds"
    )
  },
  {
    name: "an attempt parks under a step that runs",
    file: "src/queue/Attempt.ts",
    changes: [
      [
        "if (attempt.busyCount > 0 || attempt.pending === undefined) return",
        "if (attempt.pending === undefined) return"
      ]
    ],
    test: waits("in several branches parks for all of them, after the step that runs beside them")
  },

  // --- what waits
  {
    name: "a promotion copies the item and leaves it delayed",
    file: queue,
    within: "tenure.promote",
    changes: [
      [
        "DELETE FROM tenure.delayed d WHERE d.ctid = ANY(ARRAY(SELECT x.tid FROM due x)) RETURNING d.*",
        "SELECT d.* FROM tenure.delayed d WHERE d.ctid = ANY(ARRAY(SELECT x.tid FROM due x))"
      ]
    ],
    test: kernel(
      "waiting",
      "moves what is due, as it is, and tells for whom and when the next one is"
    )
  },
  {
    name: "a promotion waits for a locked row",
    file: queue,
    within: "tenure.promote",
    changes: [["FOR UPDATE SKIP LOCKED", "FOR UPDATE"]],
    test: kernel("waiting", "a due item that somebody holds does not hold up a hundred others")
  },
  {
    name: "a promotion asks the clock for each row",
    file: queue,
    within: "tenure.promote",
    changes: [
      ["IF NOT EXISTS (SELECT FROM tenure.delayed d WHERE d.due_at <= now)", "IF false"],
      [
        "SELECT d.ctid AS tid FROM tenure.delayed d WHERE d.due_at <= now",
        "SELECT d.ctid AS tid FROM tenure.delayed d WHERE d.due_at <= tenure.clock()"
      ]
    ],
    test: kernel("plans", "a promotion reads no more than what is due")
  },
  {
    name: "the place of an item is read one table after the other",
    file: queue,
    within: "tenure.item_place",
    changes: [
      [
        "  UNION ALL SELECT 'claimed', c.owner, NULL",
        ";  RETURN QUERY SELECT 'claimed', c.owner, NULL::text"
      ],
      [
        "  UNION ALL SELECT 'leased', c.session, NULL",
        ";  RETURN QUERY SELECT 'leased', c.session, NULL::text"
      ],
      [
        "  UNION ALL SELECT 'delayed', NULL, NULL",
        ";  RETURN QUERY SELECT 'delayed', NULL::uuid, NULL::text"
      ],
      [
        "  UNION ALL SELECT 'parked', NULL, NULL",
        ";  RETURN QUERY SELECT 'parked', NULL::uuid, NULL::text"
      ],
      ["  UNION ALL SELECT 'done'", ";  RETURN QUERY SELECT 'done'"]
    ],
    test: kernel(
      "waiting",
      "an item that keeps moving is in exactly one place whenever anybody looks"
    )
  },
  {
    name: "the sweep of deadlines waits for what a user's transaction has cancelled",
    file: queue,
    within: "tenure.expire_deadlines",
    changes: [["FOR UPDATE OF r SKIP LOCKED", "FOR UPDATE OF r"]],
    test: kernel(
      "waiting",
      "pass by an item that a user's transaction has cancelled and may yet keep"
    )
  },
  {
    name: "an item that is brought back is cancelled by a request for its failed run",
    file: queue,
    within: "tenure.bring_back",
    changes: [["  DELETE FROM tenure.cancel_request x WHERE x.id = item;\n", ""]],
    test: kernel(
      "waiting",
      "is not ended by a request to cancel that came too late for the failed run"
    )
  },
  {
    name: "waiters stay when they were told",
    file: queue,
    within: "tenure.notify_settled",
    changes: [
      [
        "DELETE FROM tenure.waiter w WHERE w.item_id = ANY(items) RETURNING w.item_id, w.channel",
        "SELECT w.item_id, w.channel FROM tenure.waiter w WHERE w.item_id = ANY(items)"
      ]
    ],
    test: kernel("push", "an outcome is told once to each who waits")
  },

  // --- recovery and retention
  {
    name: "a loss is not counted",
    file: recovery,
    within: "tenure.return_lost",
    changes: [
      [
        "d.attempt, d.failures, d.losses + 1, d.stuck_now, d.key\n      FROM decided d WHERE d.verdict IS NULL AND d.pause <= interval '0'",
        "d.attempt, d.failures, d.losses, d.stuck_now, d.key\n      FROM decided d WHERE d.verdict IS NULL AND d.pause <= interval '0'"
      ]
    ],
    test: kernel(
      "recovery",
      "an item that four executors were lost with is quarantined, and visible"
    )
  },
  {
    name: "a checkpoint of an earlier run counts as progress of this one",
    file: recovery,
    within: "tenure.return_lost",
    changes: [
      ["WHERE s.item_id = r.id AND s.attempt = r.attempt LIMIT 1", "WHERE s.item_id = r.id LIMIT 1"]
    ],
    test: kernel(
      "recovery",
      "with the limit on consecutive losses a checkpoint begins the count anew"
    )
  },
  {
    name: "a request to cancel is forgotten with its executor",
    file: recovery,
    within: "tenure.return_lost",
    changes: [
      ["CASE WHEN j.is_cancelled THEN 'cancelled'\n", "CASE WHEN false THEN 'cancelled'\n"]
    ],
    test: kernel("recovery", "a lost item that was to be cancelled is")
  },
  {
    name: "a release counts as a loss",
    file: recovery,
    within: "tenure.release_executor",
    changes: [
      [
        "r.rank, r.seq, r.id, r.attempt, r.failures, r.losses, r.stuck, r.key\n    FROM removed r",
        "r.rank, r.seq, r.id, r.attempt, r.failures, r.losses + 1, r.stuck, r.key\n    FROM removed r"
      ]
    ],
    test: kernel("recovery", "gives everything back without a loss, and ends the lease with it")
  },
  {
    name: "retention does not look again behind its lock",
    file: recovery,
    within: "tenure.retain",
    changes: [
      [
        "nothing comes back.\n        kept := tenure.kept_in_range(low, high, before, moved_max + 1);\n",
        "nothing comes back.\n"
      ]
    ],
    test: kernel(
      "retention",
      "does not drop the payload of a failed item that an operator brings back meanwhile"
    )
  },
  {
    name: "retention leaves the idempotency keys of what it has emptied",
    file: recovery,
    within: "tenure.forget_range",
    changes: [
      ["DELETE FROM tenure.item_key k WHERE", "DELETE FROM tenure.item_key k WHERE false AND"]
    ],
    test: kernel("retention", "takes everything of the items with it, and leaves what is younger")
  },
  // --- the queue monitor, reservations and budgets
  {
    name: "a look does not see that the limit is reached",
    file: monitor,
    within: "tenure.is_full",
    changes: [["queue_limit) >= queue_limit", "queue_limit) > queue_limit"]],
    test: kernel("monitor", "tells of a global limit that is reached, and only then")
  },
  {
    name: "a look takes every key for free",
    file: monitor,
    within: "tenure.has_free_key",
    changes: [["key_limit) < key_limit\n", "key_limit) <= key_limit\n"]],
    test: kernel("monitor", "passes over keys at their limit, and finds the one behind them")
  },
  {
    name: "a look takes a key for free whose next item is a suspect",
    file: monitor,
    within: "tenure.has_free_key",
    changes: [["WHERE (x.rank, x.seq) < (h.rank, h.seq) LIMIT 1", "WHERE false LIMIT 1"]],
    test: kernel("monitor", "does not take a key for free whose next item is a suspect")
  },
  {
    name: "a look counts the work of other versions",
    file: monitor,
    within: "tenure.observe_queues",
    changes: [["(x.version IS NULL OR x.version = ANY(versions))", "true"]],
    test: kernel("monitor", "sees work of its own version and of those it accepts")
  },
  {
    name: "a look that is asked for certainty counts what a client has locked",
    file: monitor,
    within: "tenure.has_startable",
    changes: [["LIMIT 1 FOR KEY SHARE SKIP LOCKED) x", "LIMIT 1) x"]],
    test: kernel(
      "monitor",
      "counts an item that a client has locked, unless asked for certainty: of none"
    )
  },
  {
    name: "a look sorts all that waits",
    file: monitor,
    within: "tenure.has_startable",
    changes: [["ORDER BY r.rank, r.seq LIMIT 1) x\n", "ORDER BY r.seq LIMIT 1) x\n"]],
    test: kernel("monitor", "does not depend on what waits, what runs, or what was ever done")
  },
  {
    name: "a claim in the future is the last one for an hour",
    file: monitor,
    within: "tenure.observe_queues",
    changes: [[" AND a.claimed_at <= now) END", ") END"]],
    test: kernel("monitor", "is not a time that a clock has left in the future")
  },
  {
    name: "the last claim of a lost executor stays known",
    file: recovery,
    within: "tenure.revoke",
    changes: [
      [
        "  DELETE FROM tenure.queue_activity a\n   WHERE",
        "  PERFORM FROM tenure.queue_activity a\n   WHERE"
      ]
    ],
    test: kernel("monitor", "is anybody's, as told by their looks, and goes with their lease")
  },
  {
    name: "the monitor's clocks run on while nobody looks",
    file: "src/watchdog/Starvation.ts",
    changes: [["look.atMillis - clocks.lookedMillis > pauseMillis", "false"]],
    test: watchdog("Starvation", "forgets what was before a pause in which nobody looked")
  },
  {
    name: "a process whose claims are answered counts as stalled",
    file: "src/watchdog/Starvation.ts",
    changes: [["before.stalledMillis, look.answeredMillis", "before.stalledMillis, -Infinity"]],
    test: watchdog("Starvation", "is never `stalled` for a process whose claims are answered")
  },
  {
    name: "the time until a queue starves leaves out the jitter",
    file: "src/executor/Settings.ts",
    changes: [["settings.pollInterval) * 1.05", "settings.pollInterval)"]],
    test: watchdog("Starvation", "is 136 s by default: two minutes, 5 % of it, and two looks")
  },
  {
    name: "a full queue starves",
    file: "src/watchdog/QueueMonitor.ts",
    changes: [["        !seen.is_full &&\n", ""]],
    test: watchdog(
      "QueueMonitor",
      "lets be what a limit, a key, a time, a pause, a rate or a version holds back"
    )
  },
  {
    name: "suspects starve while one of them runs here",
    file: "src/watchdog/QueueMonitor.ts",
    changes: [["(seen.has_suspect && facts.hasRoomForSuspect)", "seen.has_suspect"]],
    test: watchdog(
      "QueueMonitor",
      "lets be what a limit, a key, a time, a pause, a rate or a version holds back"
    )
  },
  {
    name: "work that goes back unstarted is forgotten by the monitor",
    file: "src/watchdog/QueueMonitor.ts",
    changes: [["facts.hasUnstarted || facts.expiredCount > before.expiredCount", "false"]],
    test: watchdog(
      "QueueMonitor",
      "fires when claimed work is not started: though it goes back after 300 millis"
    )
  },
  {
    name: "what waits for a slot never goes back",
    file: "src/queue/Runner.ts",
    changes: [["      expireReservations(now)\n      return", "      return"]],
    test: budgets("goes back when the handler before it has become slow, and a peer runs it")
  },
  {
    name: "what was given back is claimed ahead again",
    file: "src/queue/Runner.ts",
    changes: [["    prefetch = 0\n    handBack(late)", "    handBack(late)"]],
    test: budgets("goes back when the handler before it has become slow, and a peer runs it")
  },
  {
    name: "a deaf handler is left alone",
    file: "src/queue/Runner.ts",
    changes: [
      [
        'if (isStubborn(entry, now)) executor.fireUnsafe("stubborn", options.queue)\n        else if',
        "if"
      ]
    ],
    test: budgets("and does not, ends the process: by its timeout")
  },
  {
    name: "a handler that cleans up within its grace ends the process",
    file: "src/queue/Runner.ts",
    changes: [["executor.settings.cancelGrace + graceSlackMillis <= now", "0 <= now"]],
    test: budgets("may clean up within its grace")
  },
  {
    name: "outcomes are late although the lease is in doubt",
    file: "src/queue/QueueRuntime.ts",
    changes: [["Math.min(waitedMillis, trustedMillis)", "waitedMillis"]],
    test: budgets("ends the process, but not while the lease is in doubt")
  },
  {
    name: "an outcome whose row is locked is young at each try",
    file: "src/queue/Runner.ts",
    changes: [["if (!busy.has(work)) busy.set(work, nowMillis())", "busy.set(work, nowMillis())"]],
    test: budgets("ends the process, but not while the lease is in doubt")
  },
  {
    name: "a group that was written counts as on its way",
    file: "src/queue/GroupCommit.ts",
    changes: [["      sent.delete(on)\n", ""]],
    test: {
      file: "test/queue/GroupCommit.test.ts",
      name: "tells how long the oldest group has been on its way"
    }
  },

  // --- quarantine and settlement
  {
    name: "an exhausted item is not quarantined",
    file: recovery,
    within: "tenure.return_lost",
    changes: [
      [
        "     WHERE d.verdict IN ('MAX_RECOVERY_ATTEMPTS_EXCEEDED', 'EXECUTION_RECOVERY_EXHAUSTED')\n  ), forgotten",
        "     WHERE d.verdict IN ('MAX_RECOVERY_ATTEMPTS_EXCEEDED')\n  ), forgotten"
      ]
    ],
    test: kernel("quarantine", "holds an exhausted item from the commit of its outcome on")
  },
  {
    name: "retention drops what is in quarantine",
    file: recovery,
    within: "tenure.kept_in_range",
    changes: [["AND q.state = 'open' LIMIT", "AND q.state = 'closed' LIMIT"]],
    test: kernel("retention", "keeps a bucket as long as one of its items is in quarantine")
  },
  {
    name: "a retry leaves the item in quarantine",
    file: queue,
    within: "tenure.bring_back",
    changes: [["  DELETE FROM tenure.quarantine q WHERE q.item_id = item;\n", ""]],
    test: kernel("quarantine", "is left by an operator's retry")
  },
  {
    name: "two processes settle one quarantined item",
    file: quarantine,
    within: "tenure.begin_settlement",
    changes: [["AND q.state = 'open' FOR UPDATE SKIP LOCKED;", "AND q.state = 'open';"]],
    test: kernel("quarantine", "is left in the transaction that writes the application's rows")
  },
  {
    name: "a settled item is taken out of quarantine again",
    file: quarantine,
    within: "tenure.begin_settlement",
    changes: [
      [
        "WHERE q.item_id = item AND q.state = 'open' FOR UPDATE",
        "WHERE q.item_id = item FOR UPDATE"
      ]
    ],
    test: kernel("quarantine", "is left in the transaction that writes the application's rows")
  },
  {
    name: "a quarantined item that cannot be settled is tried without a pause",
    file: quarantine,
    within: "tenure.take_settlements",
    changes: [["due_at = now + least(", "due_at = now + 0 * least("]],
    test: kernel("quarantine", "charges a try before it begins")
  },
  {
    name: "one quarantined item is given to two settlers",
    file: quarantine,
    within: "tenure.take_settlements",
    changes: [["ORDER BY q.due_at LIMIT 1 FOR UPDATE SKIP LOCKED;", "ORDER BY q.due_at LIMIT 1;"]],
    test: kernel("quarantine", "gives each settler items of its own")
  },
  {
    name: "anybody may settle a quarantined item, revoked or not",
    file: quarantine,
    within: "tenure.begin_settlement",
    changes: [["  PERFORM tenure.admit();\n", ""]],
    test: kernel("quarantine", "is no business of a revoked executor")
  },
  {
    name: "the rows of a quarantined item are committed before it is settled",
    file: "src/recovery/Settlement.ts",
    changes: [["  sql.withTransaction(\n", "  Effect.suspend(() =>\n"]],
    test: settlement("that fails in whatever way is rolled back")
  },
  {
    name: "a quarantined item's payload is told with the failure of its settlement",
    file: "src/recovery/Settlement.ts",
    changes: [["  return name.slice(0, 100)\n", "  return String(error).slice(0, 100)\n"]],
    test: settlement("that fails in whatever way is rolled back")
  },
  {
    name: "a settlement of quarantined items that hangs is waited for",
    file: "src/recovery/Settlement.ts",
    changes: [
      ["withinBudget(settings.settleTimeout, ", "withinBudget(1_000 * settings.settleTimeout, "]
    ],
    test: settlement("that fails in whatever way is rolled back")
  },
  {
    name: "who quarantines an item leaves its settlement to the next look",
    file: "src/main/Tenure.ts",
    changes: [["        if (settled.length > 0) settlement.wakeUnsafe()\n", ""]],
    test: settlement("begins at once in the process that has found the item exhausted")
  },

  // --- capacity
  {
    name: "a claim does not count what sessions hold",
    file: queue,
    within: "tenure.claim",
    changes: [["limits.global_limit - used - leased", "limits.global_limit - used"]],
    test: kernel("capacityLimits", "hold in every snapshot of a storm")
  },
  {
    name: "a claim does not count what sessions hold of a key",
    file: queue,
    within: "tenure.claim",
    changes: [["CASE WHEN leased > 0 THEN", "CASE WHEN false THEN"]],
    test: kernel("capacity", "has its queue's slot, and its key's, against executors")
  },
  {
    name: "an expired reservation is activated",
    file: capacity,
    within: "tenure.hold_lease",
    changes: [["WHEN lease.expires_at <= now THEN", "WHEN false THEN"]],
    test: kernel("capacity", "is refused with a word of its own for each thing")
  },
  {
    name: "a heartbeat revives a session that has expired",
    file: capacity,
    within: "tenure.heartbeat",
    changes: [["WHEN held.expires_at <= now THEN 'session expired'", "WHEN false THEN ''"]],
    test: kernel("capacity", "a heartbeat pushes every clock but those of reservations")
  },
  {
    name: "a heartbeat keeps what is not activated",
    file: capacity,
    within: "tenure.heartbeat",
    changes: [["AND c.state = 'active' AND c.expires_at > now", "AND c.expires_at > now"]],
    test: kernel(
      "capacityClock",
      "runs out 60 to 90 seconds after its death, is seen within 30 more, and once"
    )
  },
  {
    name: "two sweeps take the same lease back",
    file: capacity,
    within: "tenure.capacity_sweep",
    changes: [
      [
        "ORDER BY c.item_id LIMIT rows_max FOR UPDATE SKIP LOCKED);\n  IF",
        "ORDER BY c.item_id LIMIT rows_max);\n  IF"
      ]
    ],
    test: kernel("capacity", "two at once take back once, and none waits for the other")
  },
  {
    name: "an item in its grace is not the capacity layer's",
    file: capacity,
    changes: [["'leased', 'delayed')", "'leased')"]],
    test: kernel("capacity", "is owned by the capacity layer from its hand-in to its outcome")
  },

  // --- the API
  {
    name: "a revoked token is as good as any",
    file: "schema/0014_token.sql",
    within: "tenure.authenticate",
    changes: [["found_token.revoked_at IS NOT NULL", "false"]],
    test: api("says 401 without a token, and of one that is unknown, revoked or expired, which")
  },
  {
    name: "an organisation sees what other organisations hold",
    file: "src/http/Token.ts",
    changes: [[`capacity: ["platform"]`, `capacity: ["platform", "organisation"]`]],
    test: api("lets a role do what it is for, and says whose credentials it wants otherwise")
  },
  {
    name: "a poll that waits outlives its token",
    file: "src/http/SessionEndpoints.ts",
    changes: [["if (!(yield* ask((sql) => isUsable(sql, principal.id))))", "if (draining)"]],
    test: pulling("ends with the token that it was asked with")
  },
  {
    name: "who found work does not tell the next in line",
    file: "src/http/SessionEndpoints.ts",
    changes: [["if (items.length > 0) yield* passOn", "if (items.length < 0) yield* passOn"]],
    test: pulling("of many that wait is answered one for each item, and none is left over")
  },
  {
    name: "a hint is lost with a poll that leaves",
    file: "src/http/Waiting.ts",
    changes: [["if (waiter.told) hintUnsafe(line)", ""]],
    test: {
      file: "test/http/Waiting.test.ts",
      name: "tells the next when one leaves with a hint that it has not followed"
    }
  },

  // --- outbound effects
  {
    name: "what may have been sent is sent again",
    file: step,
    changes: [["      if (since === undefined) {", "      if (options.resolve === undefined) {"]],
    test: steps("without a way to ask is unknown after a failure")
  },
  {
    name: "an effect is sent before its intent is stored",
    file: step,
    changes: [["        yield* write(attempt, intent, JSON.stringify(now))\n", ""]],
    test: steps("is sent once under the item's key")
  },
  {
    name: "the lease is not looked at between the intent and what is sent",
    file: step,
    changes: [["return refused === undefined ? begin() : Effect.fail(refused)", "return begin()"]],
    test: steps("is refused with a lease in doubt")
  },
  {
    name: "what is being sent goes on without a lease",
    file: step,
    changes: [["    lease.lost\n  )", "    Effect.never\n  )"]],
    test: steps("is interrupted when the lease is lost, also where nothing else interrupts")
  },
  {
    name: "an answer about what was sent is not kept",
    file: step,
    changes: [
      [
        "if (Option.isSome(found)) return yield* receipt.keep(found.value)",
        "if (Option.isSome(found)) return found.value"
      ]
    ],
    test: steps("and has failed is asked for by the next attempt")
  },
  {
    name: "each attempt sends under a key of its own",
    file: step,
    changes: [["`${attempt.id}/${name}`", "`${attempt.id}/${attempt.attempt}/${name}`"]],
    test: steps("is sent again under the same key when nothing was done")
  },
  {
    name: "a report on a slow connection takes the place of a later one",
    file: progress,
    within: "tenure.report_progress",
    changes: [["\n    WHERE (p.attempt, p.number) < (excluded.attempt, excluded.number)", ""]],
    test: {
      file: "test/kernel/progress.test.ts",
      name: "is the latest report of the latest attempt, whatever comes late"
    }
  },
  {
    name: "a report counts whoever has claimed the item since",
    file: progress,
    within: "tenure.report_progress",
    changes: [["c.id = u.id AND c.attempt = u.attempt", "c.id = u.id"]],
    test: {
      file: "test/kernel/progress.test.ts",
      name: "is refused to who does not hold the attempt, one by one"
    }
  },
  {
    name: "an outcome does not wait for the report before it",
    file: "src/queue/ProgressReports.ts",
    changes: [
      ["if (value === undefined && !isSent) return Effect.void", "if (isEnding) return Effect.void"]
    ],
    test: {
      file: "test/queue/Progress.test.ts",
      name: "keeps no handler waiting while the database does not take it"
    }
  },
  {
    name: "minus zero becomes zero on its way",
    file: "src/queue/Storable.ts",
    changes: [["if (Object.is(value, -0)) look.hasNegativeZero = true", ""]],
    test: { file: "test/queue/Storable.test.ts", name: "keeps what other writers of JSON lose" }
  },
  {
    name: "a policy that throws leaves its item without an end",
    file: "src/queue/Verdict.ts",
    changes: [["always(() => retryOrDie(", "Effect.suspend(() => retryOrDie("]],
    test: {
      file: "test/queue/Values.test.ts",
      name: "is written when the policy that judges a failure throws"
    }
  },
  {
    name: "a text that is no id fails the statement of all who wait",
    file: "src/queue/Client.ts",
    changes: [["if (!isId(id)) ", "if (id.length > 100) "]],
    test: {
      file: "test/queue/WorkQueue.test.ts",
      name: "that nobody knows is answered with UnknownId"
    }
  },
  {
    name: "a takeover notifies although the server can take no more",
    file: queue,
    within: "tenure.tell",
    changes: [["IF pg_notification_queue_usage() < 0.9 THEN", "IF true THEN"]],
    test: {
      file: "test/queue/Unheard.test.ts",
      name: "refuses no enqueue, settle, cancel or takeover: whoever waits finds out by looking"
    }
  },

  // --- dead letters, and what outlives its bucket
  {
    name: "whoever brings a dead letter back does not look whose hands it is in",
    file: queue,
    within: "tenure.bring_back",
    changes: [["  IF held IS DISTINCT FROM lease THEN", "  IF false THEN"]],
    test: kernel("deadLetters", "are touched by no retry, redrive or purge")
  },
  {
    name: "a purge takes what is in quarantine and nobody has dealt with",
    file: deadLetter,
    within: "tenure.remove_dead_letter",
    changes: [["q.item_id = item AND q.state = 'open') THEN", "q.item_id = item AND false) THEN"]],
    test: kernel("deadLetters", "are purged with all that belongs to them")
  },
  {
    name: "a redrive brings back what fails while it goes on",
    file: deadLetter,
    within: "tenure.scan_dead_letters",
    changes: [["d.finished_at <= failed_before", "true"]],
    test: kernel("deadLetters", "are brought back in batches")
  },
  {
    name: "checkpoints are read with a snapshot older than the wait for their bucket",
    file: queue,
    within: "tenure.checkpoints",
    changes: [["LANGUAGE sql VOLATILE", "LANGUAGE sql STABLE"]],
    test: kernel("retention", "shows whoever waits for the move what was moved")
  },
  {
    name: "a bucket that two were made into ends where the first did",
    file: recovery,
    within: "tenure.merge_buckets",
    changes: [["SET upper_at = pair.upper_at", "SET upper_at = b.upper_at"]],
    test: kernel("retention", "makes one bucket of neighbours")
  },

  // --- commits that are shared, and commits of one item
  {
    name: "an enqueue with a key waits in the group, and everybody with it",
    file: enqueuer,
    changes: [["    if (item.idempotencyKey !== null) return undefined\n", ""]],
    test: enqueues("do not wait for a key that somebody's open transaction holds")
  },
  {
    name: "an enqueue leaves the transaction of its caller",
    file: enqueuer,
    changes: [["Option.isSome(transaction) ? undefined : enqueuer.value", "enqueuer.value"]],
    test: enqueues("stay with the transaction of their caller, and go with it")
  },
  {
    name: "a handler whose attempt is over commits what it has written",
    file: "src/queue/WorkQueue.ts",
    changes: [
      [
        'status === "settled"\n            ? Effect.succeed',
        "status !== undefined\n            ? Effect.succeed"
      ]
    ],
    test: transactions("whose attempt is over by then leaves nothing either")
  },
  {
    name: "a step of a handler in a transaction outlives its rollback",
    file: "src/queue/Attempt.ts",
    changes: [["if (attempt.inTransaction) {", "if (false as boolean) {"]],
    test: transactions("runs no durable steps: their results would outlive a rollback")
  },
  {
    name: "a pool makes no connection for the finalizers of its scope",
    file: "src/database/Pool.ts",
    changes: [["Reactivity.make), openUntilClosed)", "Reactivity.make))"]],
    test: {
      file: "test/database/Pool.test.ts",
      name: "serves a finalizer whose connection was lost, while its scope closes"
    }
  },
  {
    name: "the uptime, which is read later, calls the end of a lease a suspended machine",
    file: "src/watchdog/judge.js",
    changes: [
      ["const isLease = isOver(Slot.lease, nowNanos + 2n * pollNanos)", "const isLease = false"]
    ],
    test: watchdog("Judge", "calls it the lease, or the loop, where the uptime is only read first")
  },

  // --- groups, pace keys, batches
  {
    name: "a group is counted without a lock on its row",
    file: groups,
    within: "tenure.add_tallies",
    changes: [["ORDER BY g.id FOR UPDATE;", "ORDER BY g.id;"]],
    test: kernel("groups", "hands in one callback when its last members commit at the same moment")
  },
  {
    name: "a group is held from the end of a member on, and not from its commit on",
    file: groups,
    changes: [["DEFERRABLE INITIALLY DEFERRED", "DEFERRABLE INITIALLY IMMEDIATE"]],
    test: kernel(
      "groups",
      "hands in one callback when the last two members end in two transactions"
    )
  },
  {
    name: "a revocation counts its members when it is exempt from the fence no longer",
    file: recovery,
    changes: [["tenure.items_ended(settled, at_once => true)", "tenure.items_ended(settled)"]],
    test: kernel("groups", "ends with a revocation whose own executor is being revoked")
  },
  {
    name: "a member that is brought back stays counted",
    file: queue,
    changes: [["  PERFORM tenure.items_returned(ARRAY[item], 'failed');\n", ""]],
    test: kernel("groups", "waits for a failed member that is brought back")
  },
  {
    name: "a debounced item that has run is replaced while it waits for its next attempt",
    file: groups,
    changes: [[" AND d.attempt = 0 AND", " AND"]],
    test: kernel("pace", "that has become due, runs or has ended is left alone")
  },
  {
    name: "a burst can put its item off for ever",
    file: groups,
    changes: [
      ["IF winner IS NULL THEN held.began_at := paced_at; END IF;", "held.began_at := paced_at;"]
    ],
    test: kernel("pace", "is never put off for longer than its maximum")
  },
  {
    name: "a stopped batch gives its items back while its handler still runs",
    file: "src/queue/Batch.ts",
    changes: [
      [": Fiber.interrupt(handling.fiber)", ": Effect.forkDetach(Fiber.interrupt(handling.fiber))"]
    ],
    test: {
      file: "test/queue/Batch.test.ts",
      name: "whose process stops is given back once its call has ended"
    }
  },

  // --- schedules
  {
    name: "a slot is fired by whoever comes, whatever has been fired since he looked",
    file: schedule,
    within: "tenure.fire_schedule",
    changes: [["held.next_at IS DISTINCT FROM seen_next OR new_next", "new_next"]],
    test: kernel("schedule", "is one item, and the schedule has moved on with it")
  },
  {
    name: "a pause holds back the next look, and not the slot that was seen before it",
    file: schedule,
    within: "tenure.fire_schedule",
    changes: [["  IF held.paused THEN answer := 'paused'; RETURN; END IF;\n", ""]],
    test: kernel("schedule", "that an open transaction pauses is not fired before it ends")
  },
  {
    name: "a slot fires when the process says so",
    file: schedule,
    within: "tenure.fire_schedule",
    changes: [["seen_next > now OR slots[last] > now", "false"]],
    test: kernel("schedule", "decides what is due; set back, it fires nothing twice")
  },
  {
    name: "a backfill fires what was fired",
    file: schedule,
    within: "tenure.enqueue_slots",
    changes: [["SELECT 0, tenure.slot_key", "SELECT -p.at, tenure.slot_key"]],
    test: kernel("schedule", "to backfill leaves out what was fired")
  },
  {
    name: "every expression means every instant at which the clock shows it",
    file: calendar,
    changes: [["parsed.hours.size === 0 || parsed.hours.size === 24", "parsed.hours.size >= 0"]],
    test: slots("a time that is skipped fires at the moment of the jump")
  },
  {
    name: "a schedule that is registered after the clock was set back fires its last slot again",
    file: calendar,
    changes: [["row.last === undefined ? -Infinity : row.last + 1", "-Infinity"]],
    test: slots("follows a change of its zone's rules, and never goes back")
  },
  {
    name: "an older version fires beside the newer one",
    file: "src/queue/Scheduler.ts",
    changes: [["if (state.isKnown && state.hasRunner) continue", ""]],
    test: {
      file: "test/queue/Schedules.test.ts",
      name: "follows the version that came last"
    }
  },

  // --- one item, completed by its handler
  {
    name: "an item that its handler completes leaves the request to cancel it",
    file: queue,
    within: "tenure.complete_item",
    changes: [["IF EXISTS (SELECT FROM tenure.cancel_request) THEN", "IF false THEN"]],
    test: kernel("settle", "leaves what a settle would leave, with its transaction or not at all")
  },
  {
    name: "an item that its handler completes is not counted by its group",
    file: queue,
    within: "tenure.complete_item",
    changes: [["    PERFORM tenure.items_ended(ARRAY[item]);\n", "    NULL;\n"]],
    test: kernel("settle", "ends its group")
  },
  {
    name: "an item is completed by an attempt of somebody else's",
    file: queue,
    within: "tenure.complete_item",
    changes: [[" AND k.owner IS NOT DISTINCT FROM me\n", "\n"]],
    test: kernel(
      "settle",
      "is told that it was before, that somebody holds it, or that its attempt is over"
    )
  },
  {
    name: "each outcome has a hint of its own",
    file: "src/queue/Waker.ts",
    changes: [["if (leftMillis > 0) yield* Effect.sleep(leftMillis)", ""]],
    test: {
      file: "test/queue/Waker.test.ts",
      name: "leave at once, and those soon after it together"
    }
  },

  // --- the watchdog and the scanner
  {
    name: "the watchdog counts time in which the process was stopped",
    file: "src/watchdog/judge.js",
    changes: [["stoodNanos += nowNanos - previousNanos", "stoodNanos += 0n"]],
    test: watchdog(
      "Judge",
      "does not count time in which the process was stopped, but for the lease"
    )
  },
  {
    name: "the watchdog pardons a starved machine for ever",
    file: "src/watchdog/judge.js",
    changes: [["return nanos < watchdogNanos ? nanos : watchdogNanos", "return nanos"]],
    test: watchdog("Judge", "pardons standing still for the watchdog's time at most")
  },
  {
    name: "the watchdog pardons the lease as any deadline",
    file: "src/watchdog/judge.js",
    changes: [
      ["isOver(Slot.lease, nowNanos)) {", "isOver(Slot.lease, nowNanos - pardon(Slot.lease))) {"]
    ],
    test: watchdog(
      "Judge",
      "does not count time in which the process was stopped, but for the lease"
    )
  },
  {
    name: "the watchdog does not read the uptime",
    file: "src/watchdog/judge.js",
    changes: [["isOver(Slot.uptime, uptimeNanos)", "isOver(Slot.uptime, nowNanos)"]],
    test: watchdog("Judge", "sees a suspended machine by the uptime")
  },
  {
    name: "the watchdog calls a stopped process blocked",
    file: "src/watchdog/judge.js",
    changes: [["- watchdogNanos + stood(Slot.main)", "- watchdogNanos"]],
    test: watchdog(
      "Judge",
      "does not count time in which the process was stopped, but for the lease"
    )
  },
  {
    name: "the watchdog looks at the first actor only",
    file: "src/watchdog/judge.js",
    changes: [["slot = Slot.actors; slot < slots", "slot = Slot.actors; slot < Slot.actors + 1"]],
    test: watchdog("Judge", "finds each actor by itself, with everything else in order")
  },
  {
    name: "the watchdog names the actor that a blocked loop holds up",
    file: "src/watchdog/judge.js",
    changes: [['isBlocked ? "eventLoop" : "actor"', '"actor"']],
    test: watchdog(
      "Judge",
      "finds a blocked loop before the lease is over, and says that it is the loop"
    )
  },
  {
    name: "the watchdog waits until it has said why",
    file: "src/watchdog/thread.js",
    changes: [["attempt < 20", "attempt < Infinity"]],
    test: watchdog("Thread", "is killed when standard error is a pipe that is full")
  },
  {
    name: "the watchdog trusts its signal to end process 1",
    file: "src/watchdog/thread.js",
    changes: [['new Script("%SystemBreak()").runInThisContext()', ""]],
    test: watchdog("Thread", "is killed as process 1 of a container, too")
  },
  {
    name: "the watchdog's deadlines are written by another clock than they are read by",
    file: "src/watchdog/Watchdog.ts",
    changes: [
      ["apartNanos < sameClockNanos && apartNanos > -sameClockNanos ? 0n : apartNanos", "0n"]
    ],
    test: watchdog("Watchdog", "shows the thread who owes progress, by the thread's own clock")
  },
  {
    name: "the watchdog blames a loop for a lease that is in doubt",
    file: "src/watchdog/Watchdog.ts",
    changes: [["deadlineNanos > soonestNanos ? deadlineNanos : soonestNanos", "deadlineNanos"]],
    test: watchdog(
      "Watchdog",
      "leaves the end to a lease that is in doubt, and to the late loop once it is not"
    )
  },
  {
    name: "the watchdog says twice what its thread has said",
    file: "src/watchdog/Watchdog.ts",
    changes: [["reported ? Effect.void : log(firing)", "log(firing)"]],
    test: watchdog(
      "Watchdog",
      "passes on what the thread has found, without saying it a second time"
    )
  },
  {
    name: "the watchdog's end leaves the lease trusted",
    file: "src/watchdog/Watchdog.ts",
    changes: [['if (reason === "lease" || reason === "suspended") lease.checkUnsafe()', ""]],
    test: watchdog("Watchdog", "lets the lease itself find out that its time is over")
  },
  {
    name: "the watchdog ends a process that gave its lease back",
    file: "src/watchdog/Watchdog.ts",
    changes: [['if (cause !== "released") thread', "thread"]],
    test: watchdog(
      "Watchdog",
      "lets no process outlive a lost lease, unless it gave the lease back"
    )
  },
  {
    name: "nobody watches the watchdog's thread",
    file: "src/watchdog/Watchdog.ts",
    changes: [['if (silent === silentMax) fireUnsafe("watcher")', ""]],
    test: watchdog("Watchdog", "ends a process whose thread has gone, or says nothing any more")
  },
  {
    name: "the watchdog lets a process live that has lost a loop for good",
    file: "src/watchdog/Watchdog.ts",
    changes: [["onLost, onEscalated]", "onLost]"]],
    test: watchdog(
      "Watchdog",
      "ends a process that has lost a loop for good, when its own main does not"
    )
  },
  {
    name: "the scanner looks for lost claims once in its life",
    file: "src/recovery/Scanner.ts",
    changes: [["scans++ % scansPerSweep === 0", "scans++ === 0"]],
    test: recovering("and got past the fence with a late claim")
  },
  {
    name: "the sweep takes claims of live executors, and not those of others",
    file: recovery,
    changes: [["c.owner NOT IN (", "c.owner IN ("]],
    test: recovering("and got past the fence with a late claim")
  },

  // --- the doctor
  {
    name: "the doctor takes an executor for lost before a scan could have seen it",
    file: "src/main/commands/DiagnosisOfWork.ts",
    changes: [["one.expiredMillis <= limits.unrevoked ? []", "one.expiredMillis <= 0 ? []"]],
    test: doctor("expired for less than the limit is the scan's, and no trouble")
  },
  {
    name: "the doctor guesses whose a claim is",
    file: "src/main/commands/DoctorStore.ts",
    changes: [["WHEN e.id IS NULL THEN 'unknown'", "WHEN e.id IS NULL THEN 'expired'"]],
    test: doctor("claimed by an owner that is in no registry: only a person says whose it is")
  },
  {
    name: "the doctor takes one look at what may be moving",
    file: "src/main/commands/Doctor.ts",
    changes: [["return again.map(({ item }) => item)", "return heads.map(({ item }) => item)"]],
    test: doctor("is not what was delayed, became available, and is claimed at the next look")
  },
  {
    name: "the doctor looks at one owner of each queue",
    file: "src/main/commands/DoctorStore.ts",
    changes: [["AND c.owner > o.owner", "AND c.owner < o.owner"]],
    test: doctor("claimed by many owners of many queues: each of them is looked at")
  },
  {
    name: "the doctor takes a deadline for a timer",
    file: "src/main/commands/DoctorStore.ts",
    changes: [["FROM tenure.deadline d ORDER BY", "FROM tenure.delayed d ORDER BY"]],
    test: doctor("items and deadlines whose time has passed")
  },
  {
    name: "the doctor calls a full queue unclaimed",
    file: "src/watchdog/Waiting.ts",
    changes: [['  if (facts.isFull) return "globalLimit"\n', ""]],
    test: doctor("at the limit of the queue, and at the limit of a key")
  },
  {
    name: "the doctor calls a paused queue unclaimed",
    file: "src/watchdog/Waiting.ts",
    changes: [['  if (facts.isPaused) return "paused"\n', ""]],
    test: doctor("while its queue is paused: resumed as printed, it is anybody's again")
  },
  {
    name: "the doctor counts a rate that is no limit's",
    file: "src/main/commands/DoctorStore.ts",
    changes: [
      [
        "tenure.rate_room(q.id, '', q.rate_limit, q.rate_window",
        "tenure.rate_room(q.id, '', q.key_rate_limit, q.key_rate_window"
      ]
    ],
    test: doctor("while the rate of the queue, or of its key, is used up")
  },
  {
    name: "the doctor calls a wake late that loop 2 has not looked at",
    file: "src/main/commands/DiagnosisOfWork.ts",
    changes: [["staleClaimThreshold + staleClaimSweep,", "0,"]],
    test: doctor("a durable wait that is over, and a wake that nobody has finished")
  },
  {
    name: "the doctor calls a paused schedule late",
    file: "src/main/commands/DoctorStore.ts",
    changes: [["NOT s.paused AND ", ""]],
    test: doctor("a schedule whose code nobody has: paused, or started")
  },
  {
    name: "the doctor asks any executor for what only an application hands back",
    file: "src/main/commands/DiagnosisOfWork.ts",
    changes: [["live.some((one) => one.application === application)", "live.length > 0"]],
    test: doctor("items of pull workers that are gone, which only their application hands back")
  }
]
