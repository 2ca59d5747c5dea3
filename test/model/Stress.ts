/**
 * Random pairs of everything: workers that do one random thing after the other, all at once, on one
 * database. What meets is what the workers do at the same time.
 */
import { Effect } from "effect"
import type { SqlError } from "effect/sql/SqlError"
import type * as K from "../kernel/kernel.ts"
import type { FreshDatabase } from "../support/Postgres.ts"
import {
  cancel,
  closeQuarantined,
  enqueue,
  enqueueWithKeys,
  pauseOrResume,
  enqueueWithPace,
  retry,
  userTransaction
} from "./clientOperations.ts"
import {
  audit,
  checkpoint,
  claim,
  expire,
  observe,
  park,
  promote,
  settle,
  settleQuarantined,
  wake,
  write
} from "./itemOperations.ts"
import { crash, pause, release, revokeSomebody, scan } from "./leaseOperations.ts"
import { makeGroup, sealGroup } from "./groupOperations.ts"
import type { Seeded } from "./Seeded.ts"
import {
  beginAnew,
  close,
  cutOff,
  guarded,
  type Ledger,
  open,
  renewIfDue,
  see,
  type Worker
} from "./Worker.ts"

/** A worker until it is interrupted. */
export const run = Effect.fnUntraced(function* (
  database: FreshDatabase,
  superuser: K.Sql,
  ledger: Ledger,
  random: Seeded
) {
  const worker: Worker = {
    database,
    random,
    ledger,
    superuser,
    client: yield* open(database, "api"),
    session: yield* open(database, "api"),
    executorId: "",
    runners: new Map(),
    floors: new Map(),
    cursors: new Map(),
    renewedAt: 0n,
    held: new Map(),
    past: [],
    isPaused: false
  }
  yield* Effect.addFinalizer(() => Effect.andThen(close(worker.client), close(worker.session)))
  yield* beginAnew(worker)
  for (;;) yield* step(worker)
})

const step = Effect.fnUntraced(function* (worker: Worker) {
  const { random } = worker
  if (!worker.isPaused) yield* guarded(worker, "renew", renewIfDue(worker))
  const [name, operation] = random.weighted(operations)
  if (random.chance(0.02)) {
    yield* guarded(worker, `${name}, cut off`, cutOff(worker, operation(worker)))
  } else {
    yield* guarded(worker, name, operation(worker))
  }
  see(worker.ledger, name)
})

const operations: ReadonlyArray<
  readonly [number, readonly [string, (worker: Worker) => Effect.Effect<unknown, SqlError>]]
> = [
  [12, ["enqueue", enqueue]],
  [8, ["enqueue with keys", enqueueWithKeys]],
  [6, ["enqueue with a pace", enqueueWithPace]],
  [2, ["make a group", makeGroup]],
  [2, ["seal a group", sealGroup]],
  [6, ["a user's transaction", userTransaction]],
  [26, ["claim", claim]],
  [26, ["settle", settle]],
  [8, ["checkpoint", checkpoint]],
  [5, ["promote", promote]],
  [5, ["park", park]],
  [5, ["wake", wake]],
  [3, ["expire deadlines", expire]],
  [6, ["cancel", cancel]],
  [1, ["retry", retry]],
  [0.5, ["pause or resume", pauseOrResume]],
  [2, ["settle what is in quarantine", settleQuarantined]],
  [0.2, ["close a quarantine", closeQuarantined]],
  [5, ["a user's write", write]],
  [3, ["audit", audit]],
  [3, ["observe", observe]],
  [6, ["scan", scan]],
  [0.6, ["revoke somebody", revokeSomebody]],
  [0.5, ["pause", pause]],
  [0.4, ["crash", crash]],
  [0.4, ["release", release]]
]
