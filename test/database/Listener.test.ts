/**
 * Goal: whoever relies on notifications knows whether they get through, and a session that only does
 * not hear is kept.
 * Method: a listener on a real database behind a proxy that keeps notifications to itself.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect, Redacted } from "effect"
import * as Listener from "../../src/database/Listener.ts"
import { parseEndpoint } from "../../src/database/Database.ts"
import * as Proxy from "../faults/support/Proxy.ts"
import { connect, freshDatabase } from "../support/Postgres.ts"

const eventually = (what: string, condition: () => boolean) =>
  Effect.gen(function* () {
    while (!condition()) yield* Effect.sleep("5 millis")
  }).pipe(
    Effect.timeoutOrElse({
      duration: "10 seconds",
      orElse: () => Effect.die(new Error(`never: ${what}`))
    })
  )

describe("a listener", () => {
  it.live("tells whether notifications get through, and stays when they do not", () =>
    Effect.gen(function* () {
      const database = yield* freshDatabase
      const proxy = yield* Proxy.make(database.urlOf("api"))
      const endpoint = parseEndpoint({ url: Redacted.make(proxy.url) })
      assert(endpoint._tag === "Success")
      const heard: Array<boolean> = []
      const told: Array<string> = []
      let ups = 0
      yield* Effect.forkScoped(
        Listener.run({
          connection: { ...endpoint.success.config, applicationName: "listener" },
          channels: ["hints"],
          quietMillis: 50,
          answerWithin: 300,
          onUp: Effect.sync(() => void ups++),
          onDown: Effect.void,
          onHeard: (hears) => Effect.sync(() => void heard.push(hears)),
          onNotification: (channel, payload) =>
            Effect.sync(() => void told.push(`${channel} ${payload}`))
        })
      )
      yield* eventually("it hears itself", () => heard.length === 1)
      yield* proxy.set("quiet", "listener")
      yield* eventually("it does not", () => heard.length === 2)
      yield* proxy.set("pass", "listener")
      yield* eventually("it does again", () => heard.length === 3)
      assert.deepStrictEqual(heard, [true, false, true])
      const sql = yield* connect(database.api)
      yield* sql`SELECT pg_notify('hints', 'work')`
      yield* eventually("it is told", () => told.length === 1)
      // Of what it says to itself nobody is told.
      assert.deepStrictEqual(told, ["hints work"])
      assert.strictEqual(ups, 1)
    }).pipe(Effect.scoped)
  )
})
