/**
 * `tenure doctor`: what is wrong with a database, the way to it, and the work in it, each with what
 * mends it. Reads only. A server that cannot be reached is a finding too: nobody waits for it.
 */
import { PgClient } from "@effect/sql-pg"
import { Clock, Console, Effect, Runtime, Schema, type Scope } from "effect"
import { Command, Flag } from "effect/cli"
import * as Reactivity from "effect/reactivity/Reactivity"
import { isSqlError, type SqlError } from "effect/sql/SqlError"
import { randomUUID } from "node:crypto"
import { Database, type Endpoint } from "../../database/Database.ts"
import { Abandoned, abandonAfter } from "../../database/Deadline.ts"
import * as Migrations from "../../database/Migrations.ts"
import * as Pool from "../../database/Pool.ts"
import * as Pooler from "../../database/Pooler.ts"
import { classify } from "../../database/SqlState.ts"
import { refusalOf, serverMessage } from "../../database/Startup.ts"
import { StartupRefused } from "../../database/StartupRefused.ts"
import { serverFacts } from "../../executor/ExecutorStore.ts"
import { type Profile, resolve, starvationMillis } from "../../executor/Settings.ts"
import { roleFacts } from "./CommandStore.ts"
import { json, layerDatabase, url } from "./Connection.ts"
import { type Facts, judge, type Limits, type TenureFacts, type WayFacts } from "./Diagnosis.ts"
import * as DoctorStore from "./DoctorStore.ts"
import { whyWaiting } from "./DiagnosisOfWork.ts"
import { formatFinding } from "./Finding.ts"

/** Something has to be changed. What it is has been printed. */
class Unhealthy extends Schema.TaggedError<Unhealthy>()("Unhealthy", {
  problems: Schema.Number
}) {
  override readonly [Runtime.errorReported] = false

  override get message(): string {
    return `${this.problems} problems were found`
  }
}

const profile = Flag.Literals("profile", ["default", "short", "capacity"]).pipe(
  Flag.withDescription("The settings whose margins are meant."),
  Flag.withDefault("default")
)

const unrevoked = Flag.Int("unrevoked").pipe(
  Flag.withDescription("Seconds that an executor may be expired without being revoked."),
  Flag.withDefault(30)
)

const snapshot = Flag.Int("snapshot").pipe(
  Flag.withDescription("Seconds that a transaction may hold a snapshot."),
  Flag.withDefault(60)
)

export const doctor = Command.make(
  "doctor",
  { url, json, profile, unrevoked, snapshot },
  Effect.fnUntraced(
    function* ({ json, profile, snapshot, unrevoked }) {
      const limits = yield* limitsOf(profile, {
        unrevoked: unrevoked * 1000,
        snapshot: snapshot * 1000
      })
      const facts = yield* Effect.flatMap(Database, (database) => examine(database, limits))
      const findings = judge(facts)
      yield* Console.log(
        json
          ? JSON.stringify({ facts, findings }, undefined, 2)
          : findings.map(formatFinding).join("\n")
      )
      const problems = findings.filter(({ level }) => level === "problem").length
      if (problems > 0) return yield* new Unhealthy({ problems })
    },
    (effect, { url }) => Effect.provide(effect, layerDatabase(url))
  )
).pipe(
  Command.withDescription(
    "Looks for what stops workers or work, and says what mends it. Exit code 1 when there is a problem."
  )
)

export const limitsOf = Effect.fnUntraced(function* (
  profile: Profile = "default",
  changes: Partial<Limits> = {}
): Effect.fn.Return<Limits, StartupRefused> {
  const settings = resolve(profile)
  if (settings instanceof StartupRefused) return yield* settings
  return {
    settings,
    unrevoked: 30_000,
    snapshot: 60_000,
    waiting: starvationMillis(settings),
    overdue: 60_000,
    clockDifference: 1000,
    // Long enough for a claim after the last look.
    again: settings.pollInterval + 1000,
    ...changes
  }
})

/** A person waits: no question is asked for longer. */
const askedMax = "1 minute"

const nothing = { defaults: [], prepared: [], slots: [] }

/** Everything there is to know, from two connections: one as a worker opens it, and one as it comes. */
export const examine = (database: Endpoint, limits: Limits): Effect.Effect<Facts, StartupRefused> =>
  Effect.gen(function* () {
    const plain = yield* openPlain(database)
    const own = yield* openOwn(database)
    return yield* ask(database, plain, own, limits)
  }).pipe(
    Effect.scoped,
    abandonAfter(askedMax),
    Effect.catch((error) => {
      if (error instanceof StartupRefused) return Effect.fail(error)
      const isAway = error instanceof Abandoned || classify(error) === "reconnect"
      if (isAway) {
        const unreachable = isSqlError(error) ? serverMessage(error) : error.message
        return Effect.succeed<Facts>({ ...nothing, limits, unreachable })
      }
      return Effect.flatMap(Effect.succeed(refusalOf(error)), (refusal) =>
        refusal === undefined ? Effect.die(error) : Effect.fail(refusal)
      )
    })
  )

type Connection = Effect.Effect<PgClient.PgClient, SqlError, Scope.Scope>

const open = (config: PgClient.PgClientConfig): Connection =>
  PgClient.makeClient({ ...config, prepare: false }).pipe(
    Effect.provideServiceEffect(Reactivity.Reactivity, Reactivity.make)
  )

const openPlain = (database: Endpoint): Connection =>
  open({ ...database.config, applicationName: "tenure command" })

interface Own {
  readonly id: string
  readonly sql: PgClient.PgClient | undefined
  /** Why a session with the settings of a worker's is let in by nobody. */
  readonly refused: string | undefined
}

/** As a worker's, under an identity that nobody has: it only reads. */
const openOwn = Effect.fnUntraced(function* (
  database: Endpoint
): Effect.fn.Return<Own, SqlError, Scope.Scope> {
  const id = randomUUID()
  return yield* open(
    Pool.connectionConfig({
      database,
      executorId: id,
      applicationName: "tenure command",
      statementTimeout: askedMax,
      lockTimeout: "10 seconds",
      idleInTransactionTimeout: askedMax
    })
  ).pipe(
    Effect.map((sql) => ({ id, sql, refused: undefined })),
    // The plain one was let in, so it is the settings.
    Effect.catchIf(
      (error) => classify(error) === "refused",
      (error) => Effect.succeed({ id, sql: undefined, refused: serverMessage(error) })
    )
  )
})

const ask = Effect.fnUntraced(function* (
  database: Endpoint,
  plain: PgClient.PgClient,
  own: Own,
  limits: Limits
): Effect.fn.Return<Facts, StartupRefused | SqlError, Scope.Scope> {
  const sql = own.sql ?? plain
  const schema = yield* Effect.match(Migrations.check(sql), {
    onFailure: (refused) => refused.message,
    onSuccess: () => undefined
  })
  return {
    limits,
    way: yield* lookAtWay(database, plain, own),
    server: yield* serverFacts(sql),
    settings: yield* DoctorStore.serverSettings(sql),
    role: yield* roleFacts(sql),
    defaults: yield* DoctorStore.sessionDefaults(plain),
    prepared: yield* DoctorStore.preparedTransactions(sql),
    slots: yield* DoctorStore.pinningSlots(sql),
    schema,
    // The tables and functions are there once the schema is.
    tenure: schema === undefined ? yield* askTenure(sql, limits) : undefined
  }
})

const lookAtWay = Effect.fnUntraced(function* (
  database: Endpoint,
  plain: PgClient.PgClient,
  { id, refused, sql }: Own
): Effect.fn.Return<WayFacts, SqlError, Scope.Scope> {
  const other = sql ?? (yield* openPlain(database))
  return {
    refused,
    keepsIdentity: sql !== undefined && (yield* serverFacts(sql))?.executorId === id,
    sharesSessions: yield* Pooler.sharesSessions(other, plain),
    ...(yield* DoctorStore.workerSession(other))
  }
})

const askTenure = Effect.fnUntraced(function* (
  sql: PgClient.PgClient,
  limits: Limits
): Effect.fn.Return<TenureFacts, SqlError> {
  const live = yield* DoctorStore.liveExecutors(sql)
  const claims = yield* DoctorStore.claimsByOwner(sql)
  const heads = yield* DoctorStore.waitingHeads(sql, limits.waiting)
  // Only where the answer depends on it: this is what takes time.
  const undecided = heads.filter(
    (head) => whyWaiting(head, { claims, live, unmoved: [] }) === undefined
  )
  return {
    live,
    claims,
    heads,
    unmoved: yield* lookAgain(sql, limits, undecided),
    doubtful: yield* DoctorStore.doubtfulExecutors(sql),
    overdue: yield* DoctorStore.overdue(sql),
    lateSchedules: yield* DoctorStore.lateSchedules(sql, limits.overdue),
    lateLeases: yield* DoctorStore.lateLeases(sql, limits.overdue + limits.settings.capacityScan),
    roomMillis: yield* DoctorStore.roomMillis(sql),
    quarantined: yield* DoctorStore.quarantined(sql),
    unfenced: yield* DoctorStore.unfencedForWorkers(sql),
    wrongGrants: yield* DoctorStore.wrongGrants(sql),
    missingGrants: yield* DoctorStore.missingGrants(sql),
    unvacuumed: yield* DoctorStore.unvacuumedTables(sql),
    snapshots: yield* DoctorStore.longSnapshots(sql, limits.snapshot),
    hiddenSessions: yield* DoctorStore.hiddenSessions(sql),
    foreignWorkers: yield* DoctorStore.foreignWorkers(sql),
    ...(yield* compareClocks(sql))
  }
})

/**
 * An item that was delayed for an hour is an hour old when it becomes available: only what is still the
 * first of its lane after everybody has looked once stands still.
 */
const lookAgain = Effect.fnUntraced(function* (
  sql: PgClient.PgClient,
  limits: Limits,
  heads: ReadonlyArray<DoctorStore.Head>
): Effect.fn.Return<ReadonlyArray<string>, SqlError> {
  if (heads.length === 0) return []
  yield* Effect.sleep(limits.again)
  const again = yield* DoctorStore.waitingHeads(sql, limits.waiting)
  return again.map(({ item }) => item).filter((id) => heads.some(({ item }) => item === id))
})

/** The answer belongs to a moment between the question and its arrival. */
const compareClocks = Effect.fnUntraced(function* (sql: PgClient.PgClient) {
  const before = yield* Clock.currentTimeMillis
  const clock = yield* DoctorStore.serverClock(sql)
  const after = yield* Clock.currentTimeMillis
  return {
    clock,
    aheadMillis: Math.round(clock.epochMillis - (before + after) / 2),
    uncertainMillis: Math.ceil((after - before) / 2)
  }
})
