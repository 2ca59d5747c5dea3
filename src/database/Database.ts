/**
 * Where the registry lives: one endpoint, not a pool. Building this layer opens no connection, so it
 * succeeds while the server is down; the pools made from it wait or fail by their own rules.
 *
 * There is exactly one endpoint. A list of failover hosts is refused, because two pools could then
 * reach two servers, and a fence read on one says nothing about a write on the other.
 */
import type { PgClient } from "@effect/sql-pg"
import { Config, Context, Effect, Layer, Redacted, Result } from "effect"
import type { ConnectionOptions } from "node:tls"
import {
  DatabaseRejected,
  refuse,
  SettingsRejected,
  type StartupRefused
} from "./StartupRefused.ts"

export interface Endpoint {
  readonly host: string
  readonly port: number
  readonly database: string
  readonly username: string
  readonly password: Redacted.Redacted | undefined
  /** `undefined` leaves it to the `sslmode` of the URL. */
  readonly ssl: boolean | ConnectionOptions | undefined
  /** The same endpoint as the driver takes it. Pools add their session settings to it. */
  readonly config: PgClient.PgPoolConfig
}

export class Database extends Context.Service<Database, Endpoint>()("tenure/Database") {}

export interface PostgresOptions {
  readonly url: Redacted.Redacted
  readonly ssl?: boolean | undefined
}

export const layerPostgres = (options: PostgresOptions): Layer.Layer<Database, StartupRefused> =>
  Layer.effect(
    Database,
    Effect.suspend(() => Effect.fromResult(parseEndpoint(options)))
  )

/** Reads `DATABASE_URL` unless told otherwise. */
export const layerPostgresConfig = (
  options: Config.Wrap<PostgresOptions> = { url: Config.Redacted("DATABASE_URL") }
): Layer.Layer<Database, StartupRefused | Config.ConfigError> =>
  Layer.effect(
    Database,
    Effect.flatMap(Config.unwrap(options), (unwrapped) =>
      Effect.fromResult(parseEndpoint(unwrapped))
    )
  )

const several = /^postgres(?:ql)?:\/\/(?:[^@/?#]*@)?[^/?#]*,/
// libpq takes a user without a host, as in postgresql://user@/app?host=/run/postgresql; URL does not.
const withoutHost = /^(postgres(?:ql)?:\/\/[^@/?#]*@)(?=[/?#]|$)/

/** The message of a refusal never repeats the URL: it carries the password. */
export const parseEndpoint = (
  options: PostgresOptions
): Result.Result<Endpoint, StartupRefused> => {
  const raw = Redacted.value(options.url).replace(withoutHost, "$1localhost")
  // Asked before parsing: such a list is no URL to the parser, and its error would not say why.
  if (several.test(raw)) return severalHosts
  let url: URL
  try {
    url = new URL(raw)
  } catch {
    return malformed("it is not of the form postgresql://user:password@host:port/database")
  }
  if (url.protocol !== "postgres:" && url.protocol !== "postgresql:") {
    return malformed("it must start with postgresql://")
  }
  const host = url.searchParams.get("host") ?? decode(url.hostname.replace(/^\[(.*)\]$/, "$1"))
  const port = url.searchParams.get("port") ?? (url.port === "" ? "5432" : url.port)
  if (host?.includes(",") || port.includes(",")) return severalHosts
  const username = url.searchParams.get("user") ?? decode(url.username)
  const password = url.searchParams.get("password") ?? decode(url.password)
  const database = url.searchParams.get("dbname") ?? decode(url.pathname.replace(/^\//, ""))
  if (host === undefined || username === undefined || password === undefined) {
    return malformed("a % in it is not followed by two hexadecimal digits")
  }
  if (database === undefined) {
    return malformed("a % in the database name is not followed by two hexadecimal digits")
  }
  if (username === "") return malformed("it names no user")
  if (!/^\d{1,5}$/.test(port) || Number(port) < 1 || Number(port) > 65_535) {
    return malformed("its port is not a number between 1 and 65535")
  }
  const endpoint = {
    host: host === "" ? "localhost" : host,
    port: Number(port),
    // As libpq does: the database of a URL without one is named like the user.
    database: database === "" ? username : database,
    username,
    password: password === "" ? undefined : Redacted.make(password),
    ssl: options.ssl
  }
  // The URL stays in the driver's settings for what only it can express: `sslmode=prefer`,
  // `connect_timeout` and `options`. The explicit fields win over it.
  return Result.succeed({ ...endpoint, config: { url: Redacted.make(raw), ...endpoint } })
}

const decode = (text: string): string | undefined => {
  try {
    return decodeURIComponent(text)
  } catch {
    return undefined
  }
}

const malformed = (why: string): Result.Result<never, StartupRefused> =>
  Result.fail(
    refuse(
      new SettingsRejected({
        rule: `the database URL cannot be used: ${why}`,
        settings: ["DATABASE_URL"]
      })
    )
  )

const severalHosts: Result.Result<never, StartupRefused> = Result.fail(
  refuse(
    new DatabaseRejected({
      problem: "otherEndpoint",
      detail: "the database URL lists several hosts, so two pools could reach two servers"
    })
  )
)
