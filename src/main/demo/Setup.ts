/**
 * What the demo stands on: the database, its own pool in it, a log that does not disturb the view, and
 * the lock that keeps a second show out. Nothing here is an executor: the workers are.
 */
import { PgClient } from "@effect/sql-pg"
import { Config, Context, Effect, Layer, Logger, LogLevel, Option, Redacted, Schema } from "effect"
import * as Reactivity from "effect/reactivity/Reactivity"
import { SqlClient } from "effect/sql"
import { closeSync, mkdirSync, openSync, writeSync } from "node:fs"
import { hostname } from "node:os"
import { dirname, join } from "node:path"
import { Database, layerPostgresConfig } from "../../database/Database.ts"
import { defaultDirectory, layerEmbedded } from "../../database/EmbeddedPostgres.ts"
import { layerMigrations } from "../../database/Migrations.ts"
import * as Pool from "../../database/Pool.ts"
import { waitOrRefuse } from "../../database/Startup.ts"
import { printable } from "./Documents.ts"
import { lockHolder, tryLock } from "./IndexTables.ts"
import type { View } from "./View.ts"

export class AlreadyRunning extends Schema.TaggedError<AlreadyRunning>()("AlreadyRunning", {
  holder: Schema.String
}) {
  override get message(): string {
    return (
      `Another \`npm start\` is at work on this database (${this.holder}): wait for its report, or end it ` +
      `with Ctrl-C. \`npm start -- search <words>\` works meanwhile.`
    )
  }
}

export const isEmbedded = Effect.map(Config.option(Config.Redacted("DATABASE_URL")), Option.isNone)

/** `DATABASE_URL`, or the embedded server of the working directory. */
export const layerDatabase = Layer.unwrap(
  Effect.map(isEmbedded, (embedded) =>
    embedded
      ? layerEmbedded({ directory: defaultDirectory })
      : layerMigrations.pipe(Layer.provideMerge(layerPostgresConfig()))
  )
)

const session = {
  statementTimeout: "1 minute",
  lockTimeout: "10 seconds",
  idleInTransactionTimeout: "1 minute"
} as const

export const layerSql = Layer.effectContext(
  Effect.gen(function* () {
    const database = yield* Database
    const pool = yield* waitOrRefuse(
      Pool.make({ ...session, database, applicationName: "tenure demo", connectionsMax: 4 }),
      "demo"
    )
    return Context.make(PgClient.PgClient, pool).pipe(Context.add(SqlClient.SqlClient, pool))
  })
)

const holderPrefix = "tenure demo of "

/** Held by a session of its own until the scope closes, and gone with the process after a crash. */
export const lock = Effect.gen(function* () {
  const database = yield* Database
  const config = Pool.connectionConfig({
    ...session,
    database,
    applicationName: `${holderPrefix}pid ${process.pid} on ${hostname()}`
  })
  const sql = yield* PgClient.makeClient(config).pipe(
    Effect.provideServiceEffect(Reactivity.Reactivity, Reactivity.make)
  )
  if (yield* tryLock(sql)) return
  const holder = (yield* lockHolder(sql)) ?? ""
  return yield* new AlreadyRunning({
    holder: holder.startsWith(holderPrefix) ? holder.slice(holderPrefix.length) : "of another user"
  })
})

/** What a worker's environment names the same database by. */
export const environmentOf = Effect.gen(function* () {
  const { config } = yield* Database
  const embedded = yield* isEmbedded
  return {
    DATABASE_URL: config.url === undefined ? undefined : Redacted.value(config.url),
    TENURE_DEMO_UNFENCED: embedded ? undefined : "warn"
  }
})

export const outputName = join(dirname(defaultDirectory), "demo.log")

/** Where everything is logged that is not for the eyes of whoever watches: anew with each show. */
export const openOutput = Effect.acquireRelease(
  Effect.sync(() => {
    mkdirSync(dirname(outputName), { recursive: true })
    return openSync(outputName, "w")
  }),
  (output) => Effect.sync(() => closeSync(output))
)

/** Into the log, and what asks for attention in front of the person as well. */
export const layerLogger = (output: number, view: View): Layer.Layer<never> =>
  Logger.layer([
    Logger.make((entry) => {
      writeSync(output, `${Logger.formatLogFmt.log(entry)}\n`)
      if (LogLevel.isGreaterThanOrEqualTo(entry.logLevel, "Warn")) {
        view.sayUnsafe(`  ! ${printable(Logger.formatSimple.log(entry)).slice(0, 300)}`)
      }
    })
  ])
