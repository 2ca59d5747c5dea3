/**
 * Which database a command talks to: the one it is told, the one of `DATABASE_URL`, or, for
 * development, the embedded server of the working directory. It always says which.
 */
import { Config, Console, Effect, Layer, Option, type Redacted } from "effect"
import { Flag } from "effect/cli"
import { Database, parseEndpoint } from "../../database/Database.ts"
import { defaultDirectory, layerEmbedded } from "../../database/EmbeddedPostgres.ts"
import * as Pool from "../../database/Pool.ts"
import type { StartupRefused } from "../../database/StartupRefused.ts"

export const url = Flag.Redacted("url").pipe(
  Flag.withDescription(
    "postgresql://user:password@host:port/database. Otherwise DATABASE_URL, and without that the " +
      "embedded server of this directory."
  ),
  Flag.optional
)

export const json = Flag.Boolean("json").pipe(
  Flag.withDescription("One JSON document instead of tables."),
  Flag.withDefault(false)
)

/** `migrate` concerns the embedded server: the command of that name does it itself, to tell about it. */
export const layerDatabase = (
  given: Option.Option<Redacted.Redacted<string>>,
  options: { readonly migrate: boolean } = { migrate: true }
): Layer.Layer<Database, StartupRefused | Config.ConfigError> =>
  Layer.unwrap(
    Effect.gen(function* () {
      const chosen = Option.isSome(given)
        ? given
        : yield* Config.option(Config.Redacted("DATABASE_URL"))
      if (Option.isNone(chosen)) {
        yield* Console.error(
          `tenure: DATABASE_URL is not set; using the embedded PostgreSQL in ${defaultDirectory}, for development`
        )
        return layerEmbedded({ directory: defaultDirectory, migrate: options.migrate })
      }
      const endpoint = yield* Effect.fromResult(parseEndpoint({ url: chosen.value }))
      yield* Console.error(
        `tenure: using database ${endpoint.database} on ${endpoint.host}:${endpoint.port} as ${endpoint.username}`
      )
      return Layer.succeed(Database, endpoint)
    })
  )

/** A connection for a person who waits: nothing hangs for longer than a minute. */
export const connect = Effect.flatMap(Database, (database) =>
  Pool.make({
    database,
    applicationName: "tenure command",
    connectionsMax: 1,
    statementTimeout: "1 minute",
    lockTimeout: "10 seconds",
    idleInTransactionTimeout: "1 minute"
  })
)
