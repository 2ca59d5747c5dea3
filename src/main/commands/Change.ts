/** What the commands that change something share: they say that they have changed nothing, and why. */
import type { PgClient } from "@effect/sql-pg"
import { Duration, Effect } from "effect"
import { Argument, Flag } from "effect/cli"
import type { SqlError } from "effect/sql/SqlError"
import * as Migrations from "../../database/Migrations.ts"
import { sqlState } from "../../database/SqlState.ts"
import { waitOrRefuse } from "../../database/Startup.ts"
import { connect } from "./Connection.ts"
import { refuseChange } from "./Refused.ts"

/** A connection to a database that has the schema. */
export const connected = Effect.gen(function* () {
  const sql: PgClient.PgClient = yield* connect
  yield* Migrations.check(sql)
  return sql
})

const uuid = /^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$/i

export const isItemId = (text: string): boolean => uuid.test(text)

/** The same, for a command about one item. */
export const connectFor = Effect.fnUntraced(function* (item: string) {
  if (!isItemId(item)) return yield* refuseChange(`${item} is not an item id`)
  return yield* connected
})

export const changing = <A, E = never>(
  statement: Effect.Effect<A, SqlError | E>,
  operation: string
) =>
  waitOrRefuse(
    Effect.catchIf(
      statement as Effect.Effect<A, SqlError>,
      (error) => sqlState(error) === "TN004",
      () =>
        refuseChange(
          "workers log in as this role; use the schema's owner, or a login with tenure_api"
        )
    ),
    operation
  )

export const item = Argument.String("item id")

export const max = Flag.Int("max").pipe(
  Flag.withDescription("Rows at most."),
  Flag.withDefault(100)
)

/** `90s`, `15min`, `2h`, `7d`; in milliseconds. */
export const parseAge = (text: string): number => {
  const [, count, unit] = /^(\d+) ?(s|min|h|d)$/.exec(text.trim()) ?? []
  const names = { s: "seconds", min: "minutes", h: "hours", d: "days" } as const
  if (count === undefined || unit === undefined) {
    throw new Error(`${text} is no age: write 90s, 15min, 2h or 7d`)
  }
  return Duration.toMillis(`${Number(count)} ${names[unit as keyof typeof names]}`)
}

export const age = (name: string, description: string) =>
  Flag.String(name).pipe(
    Flag.withDescription(`${description} 90s, 15min, 2h or 7d.`),
    Flag.mapTryCatch(parseAge, (error) => (error instanceof Error ? error.message : String(error))),
    Flag.optional
  )
