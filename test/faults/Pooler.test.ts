/**
 * Goal: behind a pooler that lends its sessions no worker starts, and it says why; nobody writes under
 * another's identity or under none; who only hands in work is served (row 36, P-28; bug report 27).
 * Method: a small pooler of our own, in the ways in which poolers differ; real worker processes; the
 * clients that an application would write.
 */
import { assert, describe, it } from "@effect/vitest"
import { PgClient } from "@effect/sql-pg"
import { Effect, Layer, Redacted } from "effect"
import * as Reactivity from "effect/reactivity/Reactivity"
import { randomUUID } from "node:crypto"
import { Tenure } from "../../src/index.ts"
import { judge } from "../../src/main/commands/Diagnosis.ts"
import { examine, limitsOf } from "../../src/main/commands/Doctor.ts"
import { sqlState } from "../../src/database/SqlState.ts"
import * as PoolingProxy from "../support/PoolingProxy.ts"
import { layerPlain, refusesWorker, servesClients, waitsForResults } from "./support/PoolerCases.ts"
import { endpointAt } from "./support/Server.ts"
import { run, steady, type World } from "./support/World.ts"

const pooler = (world: World, options: PoolingProxy.Options) =>
  Effect.map(PoolingProxy.make(world.server.worker, options), (made) => ({
    ...made,
    worker: made.through(world.server.worker),
    api: made.through(world.server.api)
  }))

const open = (url: string, options: Partial<PgClient.PgClientConfig> = {}) =>
  PgClient.makeClient({ ...endpointAt(url).config, prepare: false, ...options }).pipe(
    Effect.provideServiceEffect(Reactivity.Reactivity, Reactivity.make)
  )

describe.concurrent("a worker", () => {
  const ways: ReadonlyArray<readonly [PoolingProxy.Options, RegExp]> = [
    [{ mode: "transaction", settings: "reject" }, /unsupported startup parameter/],
    [{ mode: "transaction", settings: "drop" }, /lends one session to several connections/],
    [{ mode: "transaction", settings: "pass" }, /lends one session to several connections/],
    [{ mode: "transaction", settings: "pass", sessions: 1 }, /lends one session to several/],
    [{ mode: "session", settings: "reject" }, /unsupported startup parameter/],
    [{ mode: "session", settings: "drop" }, /drops the session's identity/]
  ]
  for (const [options, why] of ways) {
    it.live(`is refused: ${Object.values(options).join(", ")}`, () =>
      run(
        Effect.fnUntraced(function* (world) {
          const { worker } = yield* pooler(world, options)
          const refused = yield* Tenure.layer({ application: "faults", version: "v1" }).pipe(
            Layer.provide(Tenure.layerPostgres({ url: Redacted.make(worker) })),
            Layer.build,
            Effect.scoped,
            Effect.flip
          )
          assert.match(refused.message, why)
          assert.strictEqual(yield* world.count("tenure.executor"), 0)
        })
      )
    )
  }

  it.live("as a process ends with 78 and one sentence", () =>
    run(
      Effect.fnUntraced(function* (world) {
        const { worker } = yield* pooler(world, { mode: "transaction", settings: "drop" })
        yield* refusesWorker(world, worker, /lends one session to several connections/)
      })
    )
  )

  it.live(
    "runs behind one that gives it sessions of its own, with the settings it brings",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const { worker } = yield* pooler(world, { mode: "session", settings: "pass" })
          const runs = yield* world.ready({ url: worker, settings: steady })
          // Polling is every ten minutes: it is told of them, so it listens.
          const items = yield* world.enqueue([
            [{ do: "step", name: "one" }, { do: "write" }],
            [{ do: "post", name: "two" }]
          ])
          yield* world.allSettled()
          assert.deepStrictEqual(
            new Set((yield* world.outcomes).map(({ outcome, owner }) => `${outcome} ${owner}`)),
            new Set([`completed ${runs.executor()}`])
          )
          assert.lengthOf(items, 2)
        })
      ),
    300_000
  )

  it.live(
    "whose identity did not come through is refused each write, whatever session it is lent",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const { changes, worker } = yield* pooler(world, {
            mode: "transaction",
            settings: "drop"
          })
          const id = randomUUID()
          yield* world.sql`SELECT tenure.register_executor(${id}::uuid, 'faults', 'v1', interval '1 minute', 'h', 1)`
          const clients = yield* Effect.replicateEffect(
            open(worker, { startupParameters: { "tenure.executor_id": id } }),
            4
          )
          for (let turn = 0; turn < 3; turn++) {
            const states = yield* Effect.forEach(
              clients,
              (sql) =>
                Effect.map(
                  Effect.flip(
                    sql`INSERT INTO app.once (item, attempt) VALUES (gen_random_uuid(), 1)`
                  ),
                  sqlState
                ),
              { concurrency: 4 }
            )
            assert.deepStrictEqual(states, ["TN004", "TN004", "TN004", "TN004"])
          }
          assert.isAbove(changes(), 0)
          assert.strictEqual(yield* world.count("app.once"), 0)
        })
      ),
    300_000
  )
})

describe.concurrent("a client", () => {
  it.live(
    "hands in, looks and cancels over sessions that are lent, and is served exactly once",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const { api, changes, clientsMax, lentMax } = yield* pooler(world, {
            mode: "transaction",
            settings: "reject"
          })
          yield* servesClients(world, api)
          // Else it would have proved nothing.
          assert.isAbove(changes(), 50)
          assert.isAbove(clientsMax(), 2)
          assert.strictEqual(lentMax(), 2)
        })
      ),
    300_000
  )

  it.live(
    "that waits for results finds them by looking, and listens to nothing it could not hear",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const { api, statements } = yield* pooler(world, {
            mode: "transaction",
            settings: "reject"
          })
          yield* waitsForResults(world, api)
          assert.deepStrictEqual(statements(/^\s*LISTEN/i), [])
        })
      ),
    300_000
  )

  it.live(
    "hears of results at once where its session is its own",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const { api, statements } = yield* pooler(world, { mode: "session", settings: "drop" })
          yield* waitsForResults(world, api)
          // For results, and for what proves the session itself.
          assert.lengthOf(statements(/^\s*LISTEN/i), 2)
        })
      ),
    300_000
  )

  it.live(
    "with named statements is refused, since its transactions would fail",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const { api } = yield* pooler(world, { mode: "transaction", settings: "reject" })
          const refused = yield* Effect.flip(
            Effect.scoped(
              Layer.build(
                Tenure.layerClient.pipe(Layer.provide(layerPlain(api, { prepare: true })))
              )
            )
          )
          assert.match(
            (refused as Error).message,
            /preparedStatements.*give this pool `prepare: false`/
          )
          // The reason, as it would have been met: a session that has never heard of the statement.
          const [one, two] = [
            yield* open(api, { prepare: true }),
            yield* open(api, { prepare: true })
          ]
          const inTransaction = one.withTransaction(one`SELECT 1 + ${1}`)
          yield* inTransaction
          yield* two.withTransaction(
            Effect.gen(function* () {
              // Holds the session that knows it.
              yield* two`SELECT 2`
              const error = yield* Effect.flip(inTransaction)
              assert.strictEqual(sqlState(error), "26000")
            })
          )
        })
      ),
    300_000
  )

  it.live(
    "is told by the doctor what stands between",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const limits = yield* limitsOf()
          const expected: ReadonlyArray<readonly [PoolingProxy.Options, ReadonlyArray<string>]> = [
            [{ mode: "transaction", settings: "reject" }, ["way.refusesSettings"]],
            [
              { mode: "transaction", settings: "drop" },
              ["way.sharesSessions", "way.dropsIdentity", "way.noConnectionCheck"]
            ],
            [{ mode: "transaction", settings: "pass" }, ["way.sharesSessions"]],
            [{ mode: "session", settings: "drop" }, ["way.dropsIdentity", "way.noConnectionCheck"]],
            [{ mode: "session", settings: "pass" }, ["way"]]
          ]
          for (const [options, codes] of expected) {
            const { worker } = yield* pooler(world, options)
            const findings = judge(yield* examine(endpointAt(worker), limits))
            assert.deepStrictEqual(
              findings.map(({ code }) => code).filter((code) => code.startsWith("way")),
              codes
            )
          }
        })
      ),
    300_000
  )
})
