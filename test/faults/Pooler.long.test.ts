/**
 * Goal: what `Pooler.test.ts` proves behind a pooler of our own holds behind PgBouncer (row 36, P-28).
 * Method: PgBouncer of Debian's packages, in both of its modes that lend sessions, strict and lenient.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect } from "effect"
import { startupParameters } from "../../src/database/Pool.ts"
import { judge } from "../../src/main/commands/Diagnosis.ts"
import { examine, limitsOf } from "../../src/main/commands/Doctor.ts"
import * as PgBouncer from "../support/PgBouncer.ts"
import { refusesWorker, servesClients, waitsForResults } from "./support/PoolerCases.ts"
import { endpointAt } from "./support/Server.ts"
import { run, type World } from "./support/World.ts"

const found = PgBouncer.find()

/** Everything a worker's session brings. */
const ours = Object.keys(
  startupParameters({
    database: endpointAt("postgresql://nobody@127.0.0.1/none"),
    applicationName: "",
    executorId: "",
    statementTimeout: 1,
    lockTimeout: 1,
    idleInTransactionTimeout: 1,
    transactionTimeout: 1
  })
)

const pooler = Effect.fnUntraced(function* (world: World, options: PgBouncer.Options) {
  const { api, worker } = world.server
  const made = yield* PgBouncer.start(found as PgBouncer.Found, [worker, api], options)
  return { worker: made.through(worker), api: made.through(api) }
})

describe(`PgBouncer (${found?.version ?? "cannot be had"})`, () => {
  for (const mode of ["transaction", "session"] as const) {
    it.live.skipIf(found === undefined)(
      `lets no worker start, in ${mode} mode, strict or lenient`,
      () =>
        run(
          Effect.fnUntraced(function* (world) {
            const strict = yield* pooler(world, { mode })
            yield* refusesWorker(world, strict.worker, /startup parameter/)
            const lenient = yield* pooler(world, { mode, ignored: ours })
            yield* refusesWorker(
              world,
              lenient.worker,
              mode === "transaction" ? /lends one session/ : /drops the session's identity/
            )
            for (const [{ worker }, code] of [
              [strict, "way.refusesSettings"],
              [lenient, "way.dropsIdentity"]
            ] as const) {
              const findings = judge(yield* examine(endpointAt(worker), yield* limitsOf()))
              const codes = findings.map((one) => one.code)
              assert.include(codes, code)
              assert.strictEqual(
                codes.includes("way.sharesSessions"),
                mode === "transaction" && code !== "way.refusesSettings"
              )
            }
          })
        ),
      300_000
    )

    it.live.skipIf(found === undefined)(
      `serves clients in ${mode} mode, each exactly once`,
      () =>
        run(
          Effect.fnUntraced(function* (world) {
            // In session mode a connection waits for another to end.
            const { api } = yield* pooler(world, { mode, sessions: mode === "session" ? 20 : 2 })
            yield* servesClients(world, api)
          })
        ),
      300_000
    )

    it.live.skipIf(found === undefined)(
      `lets a client wait for results in ${mode} mode`,
      () =>
        run(
          Effect.fnUntraced(function* (world) {
            const { api } = yield* pooler(world, { mode, sessions: mode === "session" ? 20 : 2 })
            yield* waitsForResults(world, api)
          })
        ),
      300_000
    )
  }
})
