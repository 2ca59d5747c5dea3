/**
 * `tenure token`: who may talk to processes over HTTP, and as what. Made and revoked by the schema's
 * owner; the secret is printed once, alone on standard output, and stored nowhere.
 */
import { Console, Duration, Effect, Option, Schema } from "effect"
import { Argument, Command, Flag } from "effect/cli"
import type { SqlError } from "effect/sql/SqlError"
import * as Migrations from "../../database/Migrations.ts"
import { sqlState } from "../../database/SqlState.ts"
import { waitOrRefuse } from "../../database/Startup.ts"
import { refuse, SettingsRejected } from "../../database/StartupRefused.ts"
import { hashOf, mintSecret, roles } from "../../http/Token.ts"
import { createToken, listTokens, revokeToken } from "../../http/TokenStore.ts"
import { connect, json, layerDatabase, url } from "./Connection.ts"
import { formatTable } from "./Table.ts"
import { refuseChange } from "./Refused.ts"

const role = Flag.Literals("role", roles).pipe(
  Flag.withDescription(
    "worker: pulls and settles work. organisation: hands in and looks at items. platform: sees capacity too."
  )
)

const name = Flag.String("name").pipe(
  Flag.withDescription("Whose it is, for people."),
  Flag.withDefault("unnamed")
)

const expires = Flag.String("expires").pipe(
  Flag.withDescription(
    `How long it is good for, such as "90 days". Without it, until it is revoked.`
  ),
  Flag.optional
)

const max = Flag.Int("max").pipe(Flag.withDescription("Rows at most."), Flag.withDefault(100))

const id = Argument.String("token id").pipe(
  Argument.withDescription("As `tenure token list` shows it.")
)

const create = Command.make(
  "create",
  { role, name, expires, json, url },
  Effect.fnUntraced(
    function* ({ expires, json, name, role }) {
      const validMillis = yield* toMillis(expires)
      const sql = yield* connect
      yield* Migrations.check(sql)
      const secret = mintSecret(role)
      const made = yield* ownersOnly(
        createToken(sql, { role, name, hash: hashOf(secret), validMillis })
      )
      if (json) {
        return yield* Console.log(JSON.stringify({ id: made, role, name, secret }, undefined, 2))
      }
      yield* Console.error(
        `tenure: token ${made} of role ${role}. Its secret, which nobody can show again:`
      )
      yield* Console.log(secret)
    },
    Effect.scoped,
    (effect, { url }) => Effect.provide(effect, layerDatabase(url))
  )
).pipe(Command.withDescription("Makes one, and prints its secret alone on standard output."))

const list = Command.make(
  "list",
  { url, json, max },
  Effect.fnUntraced(
    function* ({ json, max }) {
      const sql = yield* connect
      yield* Migrations.check(sql)
      const rows = yield* waitOrRefuse(listTokens(sql, max), "token")
      if (json) return yield* Console.log(JSON.stringify(rows, undefined, 2))
      if (rows.length === 0) return yield* Console.log("There is no token.")
      const columns = [
        "id",
        "role",
        "name",
        "state",
        "created_at",
        "created_by",
        "expires_at",
        "revoked_at",
        "last_used_at"
      ] as const
      yield* Console.log(
        formatTable(
          columns,
          rows.map((row) => columns.map((column) => row[column]))
        )
      )
    },
    Effect.scoped,
    (effect, { url }) => Effect.provide(effect, layerDatabase(url))
  )
).pipe(Command.withDescription("Lists them, newest first. Shows no secret: there is none to show."))

const revoke = Command.make(
  "revoke",
  { id, url },
  Effect.fnUntraced(
    function* ({ id }) {
      if (!Schema.is(Uuid)(id)) return yield* refuseChange(`${id} is not a token id`)
      const sql = yield* connect
      yield* Migrations.check(sql)
      const answer = yield* ownersOnly(revokeToken(sql, id))
      if (answer === "unknown") return yield* refuseChange(`there is no token ${id}`)
      if (answer === "already") return yield* refuseChange(`token ${id} was revoked before`)
      yield* Console.log(`Token ${id} is revoked: from now on requests with it are refused.`)
    },
    Effect.scoped,
    (effect, { url }) => Effect.provide(effect, layerDatabase(url))
  )
).pipe(Command.withDescription("Refuses one from now on."))

export const token = Command.make("token").pipe(
  Command.withDescription("Who may talk to processes over HTTP, and as what."),
  Command.withSubcommands([create, list, revoke])
)

const Uuid = Schema.String.check(Schema.isUUID())

const toMillis = (expires: Option.Option<string>) =>
  Effect.suspend(() => {
    if (Option.isNone(expires)) return Effect.succeed(null)
    const duration = Option.getOrUndefined(Duration.fromInput(expires.value as Duration.Input))
    const millis = duration === undefined ? 0 : Duration.toMillis(duration)
    return millis > 0 && Number.isFinite(millis)
      ? Effect.succeed(millis)
      : Effect.fail(
          refuse(
            new SettingsRejected({
              rule: `"${expires.value}" is no duration such as "90 days"`,
              settings: ["--expires"]
            })
          )
        )
  })

const ownersOnly = <A>(statement: Effect.Effect<A, SqlError>) =>
  waitOrRefuse(
    Effect.catchIf(
      statement,
      (error) => sqlState(error) === "42501",
      () => refuseChange("tokens are made and revoked by the role that owns the schema")
    ),
    "token"
  )
