/**
 * `tenure capacity`: what holds slots, which pull workers are there, and what waits for a slot and from
 * when on it may have one. With TENURE_URL it asks a process over HTTP, with the token in TENURE_TOKEN,
 * whose role has to be `platform`; otherwise the database, whose roles then decide. Reads only.
 */
import { Config, Console, Effect, Option, Redacted } from "effect"
import { Command, Flag } from "effect/cli"
import type { SqlClient } from "effect/sql"
import type { SqlError } from "effect/sql/SqlError"
import * as Migrations from "../../database/Migrations.ts"
import { waitOrRefuse } from "../../database/Startup.ts"
import { refuse, SettingsRejected } from "../../database/StartupRefused.ts"
import type { Client } from "../../http/Api.ts"
import { listLeases, listQueued, listSessions } from "../../http/CapacityFacts.ts"
import { connect, json, layerDatabase, url } from "./Connection.ts"
import { refuseCommand } from "./Refused.ts"
import { type Cell, formatTable } from "./Table.ts"

const max = Flag.Int("max").pipe(Flag.withDescription("Rows at most."), Flag.withDefault(100))

/** One of the three views: the same rows from either side. */
const view = <Row extends Readonly<Record<string, Cell | ReadonlyArray<string>>>>(options: {
  readonly name: string
  readonly description: string
  readonly none: string
  readonly columns: ReadonlyArray<keyof Row & string>
  readonly ask: (
    client: Client,
    max: number
  ) => Effect.Effect<ReadonlyArray<Row>, { readonly _tag: string; readonly message: string }>
  readonly read: (
    sql: SqlClient.SqlClient,
    max: number
  ) => Effect.Effect<ReadonlyArray<Row>, SqlError>
}) =>
  Command.make(
    options.name,
    { url, json, max },
    Effect.fnUntraced(function* ({ json, max, url }) {
      const remote = Option.isSome(url)
        ? Option.none()
        : Option.filter(yield* Config.option(Config.String("TENURE_URL")), (set) => set !== "")
      const rows = yield* Option.isSome(remote)
        ? throughHttp(remote.value, (client) => options.ask(client, max))
        : fromDatabase((sql) => options.read(sql, max)).pipe(
            Effect.scoped,
            Effect.provide(layerDatabase(url))
          )
      if (json) return yield* Console.log(JSON.stringify(rows, undefined, 2))
      if (rows.length === 0) return yield* Console.log(options.none)
      yield* Console.log(
        formatTable(
          options.columns,
          rows.map((row) => options.columns.map((column) => cellOf(row[column])))
        )
      )
    })
  ).pipe(Command.withDescription(options.description))

const cellOf = (value: Cell | ReadonlyArray<string> | undefined): Cell => {
  if (value === undefined) return null
  return Array.isArray(value) ? value.join(" ") : (value as Cell)
}

const fromDatabase = Effect.fnUntraced(function* <Row>(
  read: (sql: SqlClient.SqlClient) => Effect.Effect<ReadonlyArray<Row>, SqlError>
) {
  const sql = yield* connect
  yield* Migrations.check(sql)
  return yield* waitOrRefuse(read(sql), "capacity")
})

const throughHttp = Effect.fnUntraced(function* <Row>(
  url: string,
  ask: (
    client: Client
  ) => Effect.Effect<ReadonlyArray<Row>, { readonly _tag: string; readonly message: string }>
) {
  const token = yield* Config.option(Config.Redacted("TENURE_TOKEN"))
  if (!URL.canParse(url)) return yield* rejected("TENURE_URL is no URL")
  if (Option.isNone(token) || Redacted.value(token.value) === "") {
    return yield* rejected(
      "TENURE_URL is set and TENURE_TOKEN is not: put the secret of " +
        "`tenure token create --role platform` into it"
    )
  }
  yield* Console.error(`tenure: asking ${new URL(url).origin}`)
  // Loaded here: no other command needs it, and it takes 0.1 s.
  const [Api, FetchHttpClient] = yield* Effect.promise(() =>
    Promise.all([import("../../http/Api.ts"), import("effect/http/FetchHttpClient")])
  )
  return yield* Api.client({ url, token: token.value }).pipe(
    Effect.flatMap(ask),
    Effect.timeout("1 minute"),
    Effect.provide(FetchHttpClient.layer),
    Effect.catch((error) => refuseCommand(error.message))
  )
})

const rejected = (rule: string) =>
  Effect.fail(refuse(new SettingsRejected({ rule, settings: ["TENURE_URL", "TENURE_TOKEN"] })))

const leases = view({
  name: "leases",
  description: "Slots that are held, by whom, and until when: the next to run out first.",
  none: "No slot is held.",
  columns: [
    "item",
    "queue",
    "worker",
    "session",
    "executionSeq",
    "state",
    "key",
    "losses",
    "reservedAt",
    "activatedAt",
    "expiresAt"
  ],
  ask: (client, max) => client.capacity.leases({ query: { max } }),
  read: listLeases
})

const sessions = view({
  name: "sessions",
  description: "Pull workers, and when each is given up without another heartbeat.",
  none: "No pull worker is there.",
  columns: [
    "session",
    "worker",
    "application",
    "version",
    "queues",
    "slots",
    "reserved",
    "active",
    "openedAt",
    "heartbeatAt",
    "expiresAt"
  ],
  ask: (client, max) => client.capacity.sessions({ query: { max } }),
  read: listSessions
})

const queue = view({
  name: "queue",
  description:
    "What waits for a slot, and from when on it may have one: after a lost worker, the grace counts down there.",
  none: "Nothing waits for a slot.",
  columns: ["item", "queue", "executionSeq", "version", "key", "losses", "eligibleAt"],
  ask: (client, max) => client.capacity.queue({ query: { max } }),
  read: listQueued
})

export const capacity = Command.make("capacity").pipe(
  Command.withDescription("What pull workers hold, and what waits for them. Shows no payload."),
  Command.withSubcommands([leases, sessions, queue])
)
