/**
 * The lease as handlers and applications see it: `check` before every step and outbound call,
 * `verify` where certainty is worth a round trip, `guard` around what must not outlive it.
 *
 * None of them makes a write safe, the fence in the database does. They keep a process that has lost
 * its lease from acting on the outside, where no fence is; a call that was already sent cannot be
 * taken back, and an expired lease is no proof that a provider did nothing.
 */
import { Effect, Layer } from "effect"
import { HttpClient } from "effect/http"
import { Executor } from "./Executor.ts"
import { LeaseLost, LeaseUnverified } from "./HeldLease.ts"

export { LeaseLost, LeaseUnverified }

/**
 * Is the lease trusted? No I/O, errs towards no: it refuses when the trust window is over, while the
 * last renewal has failed, and while the connection to the database is known to be lost.
 */
export const check: Effect.Effect<void, LeaseLost | LeaseUnverified, Executor> = Effect.flatMap(
  Executor,
  ({ lease }) => lease.check
)

/** Asks the database. Fails closed when it cannot be reached. */
export const verify: Effect.Effect<void, LeaseLost | LeaseUnverified, Executor> = Effect.flatMap(
  Executor,
  ({ lease }) => lease.verify
)

/** Runs the effect only while the lease holds, and interrupts it when the lease is lost. */
export const guard = <A, E, R>(
  self: Effect.Effect<A, E, R>
): Effect.Effect<A, E | LeaseLost | LeaseUnverified, R | Executor> =>
  Effect.flatMap(Executor, ({ lease }) =>
    Effect.andThen(lease.check, Effect.raceFirst(self, lease.lost))
  )

/**
 * The `HttpClient` below, checked before each request, with nothing between the check and the
 * sending. A refused request dies with the lease's error (the client's error type has no room for
 * it); the runtime recognises that defect and settles nothing.
 */
export const layerHttpClient: Layer.Layer<
  HttpClient.HttpClient,
  never,
  HttpClient.HttpClient | Executor
> = Layer.effect(
  HttpClient.HttpClient,
  Effect.gen(function* () {
    const { lease } = yield* Executor
    const client = yield* HttpClient.HttpClient
    return HttpClient.transform(client, (request) =>
      Effect.suspend(() => {
        const refused = lease.checkUnsafe()
        return refused === undefined ? request : Effect.die(refused)
      })
    )
  })
)
