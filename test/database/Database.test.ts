/**
 * Goal: an endpoint is exactly one, and a URL that cannot be used is refused with its reason and
 * without its password.
 * Method: a table of URLs, and the configuration of an application.
 */
import { assert, describe, it } from "@effect/vitest"
import { ConfigProvider, Effect, Layer, Redacted } from "effect"
import { Database, layerPostgresConfig, parseEndpoint } from "../../src/database/Database.ts"

const parse = (url: string) => parseEndpoint({ url: Redacted.make(url) })

const refusal = (url: string) => {
  const parsed = parse(url)
  assert(parsed._tag === "Failure", url)
  return parsed.failure
}

describe("parseEndpoint", () => {
  it("reads what a URL says and fills in what it leaves out", () => {
    const parsed = parse("postgres://us%40er:p%2Fw@db.internal/app?sslmode=prefer")
    assert(parsed._tag === "Success")
    const { password, config, ...rest } = parsed.success
    assert.deepStrictEqual(rest, {
      host: "db.internal",
      port: 5432,
      database: "app",
      username: "us@er",
      ssl: undefined
    })
    assert.strictEqual(password === undefined ? "" : Redacted.value(password), "p/w")
    assert.strictEqual(config.host, "db.internal")
    const short = parse("postgresql://tenure@[::1]:6000")
    assert(short._tag === "Success")
    assert.strictEqual(short.success.host, "::1")
    assert.strictEqual(short.success.database, "tenure")
    const socket = parse("postgresql://tenure@/app?host=/run/postgresql")
    assert(socket._tag === "Success")
    assert.strictEqual(socket.success.host, "/run/postgresql")
  })

  it.each([
    "postgresql://u:secret@one,two/app",
    "postgresql://u:secret@one:5432,two:5433/app",
    "postgresql://u:secret@/app?host=one,two",
    "postgresql://u:secret@one/app?port=5432,5433"
  ])("refuses several hosts: %s", (url) => {
    const refused = refusal(url)
    assert(refused.reason._tag === "DatabaseRejected")
    assert.strictEqual(refused.reason.problem, "otherEndpoint")
    assert.include(refused.message, "several hosts")
    assert.notInclude(refused.message, "secret")
  })

  it.each([
    ["nonsense-secret", "postgresql://user:password@host"],
    ["mysql://u:secret@host/app", "must start with postgresql://"],
    ["postgresql://u:secret%zz@host/app", "hexadecimal"],
    ["postgresql://host/app", "names no user"],
    ["postgresql://u:secret@host/app?port=99999", "port"]
  ])("refuses %s", (url, why) => {
    const refused = refusal(url)
    assert.strictEqual(refused.reason._tag, "SettingsRejected")
    assert.include(refused.message, why)
    assert.notInclude(refused.message, "secret")
  })
})

describe("layerPostgresConfig", () => {
  it.effect("reads DATABASE_URL without connecting to it", () =>
    Effect.gen(function* () {
      const database = yield* Database
      assert.strictEqual(database.database, "app")
    }).pipe(
      Effect.provide(
        layerPostgresConfig().pipe(
          Layer.provide(
            ConfigProvider.layer(
              ConfigProvider.fromEnv({ env: { DATABASE_URL: "postgresql://u@127.0.0.1:1/app" } })
            )
          )
        )
      )
    )
  )
})
