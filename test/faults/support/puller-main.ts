/**
 * A pull worker that is served by its own process: it opens a session, sends heartbeats, and executes
 * one item after the other. The orders come as JSON in the first argument; what the test waits for is
 * one line each.
 */
import { Effect, Layer, Redacted } from "effect"
import * as Store from "../../../src/capacity/CapacityStore.ts"
import { Executor } from "../../../src/executor/Executor.ts"
import { Tenure } from "../../../src/index.ts"

export interface Orders {
  readonly url: string
  readonly queue: string
  /** It executes what it gets for ever. */
  readonly holds: boolean
}

const orders = JSON.parse(process.argv[2] ?? "") as Orders

const say = (line: string) => Effect.sync(() => process.stdout.write(`> ${line}\n`))

const work = Effect.gen(function* () {
  const { pools, settings } = yield* Executor
  const sql = pools.work
  const { session } = yield* Store.openSession(sql, {
    worker: "puller",
    queues: [orders.queue],
    slots: 1,
    clocks: {
      heartbeatMillis: settings.pullHeartbeat,
      leaseMillis: settings.pullLease,
      reservationMillis: settings.pullReservation
    }
  })
  yield* say(`session ${session}`)
  yield* Effect.forkScoped(
    Store.heartbeat(sql, session).pipe(
      Effect.delay(settings.pullHeartbeat),
      Effect.repeat({ while: ({ gone }) => !gone })
    )
  )
  const turn = Effect.gen(function* () {
    const { items } = yield* Store.pull(sql, session, 1)
    for (const { executionSeq, id } of items) {
      yield* Store.activate(sql, session, id, executionSeq)
      yield* say(`active ${id} ${executionSeq}`)
      if (orders.holds) return yield* Effect.never
      const { status } = yield* Store.complete(sql, session, id, executionSeq, null)
      yield* say(`${status} ${id} ${executionSeq}`)
    }
  })
  yield* Effect.forkScoped(Effect.forever(Effect.andThen(turn, Effect.sleep("50 millis"))))
})

Layer.effectDiscard(work).pipe(
  Layer.provide(
    Tenure.layer({
      application: "faults",
      version: "v1",
      profile: "short",
      // Whose lease it is that ends must not be a question of how busy the machine is.
      settings: {
        leaseValidity: "30 seconds",
        watchdog: "20 seconds",
        leaseRenewal: "1 second",
        abandonAfter: "3 seconds",
        forcedExit: "2 seconds"
      }
    })
  ),
  Layer.provide(Tenure.layerPostgres({ url: Redacted.make(orders.url) })),
  Tenure.runMain
)
