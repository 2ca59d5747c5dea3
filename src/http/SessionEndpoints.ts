/**
 * The pull protocol: the endpoints of the group `sessions`. Any process serves any session, whoever
 * opened it: what a worker holds is in the database, and nothing of it is here but the polls that wait.
 *
 * A poll whose client goes away leaves the line. What it had reserved and could not deliver is back for
 * others when the reservation runs out.
 */
import { Clock, Effect, Layer, type Schema } from "effect"
import { HttpApiBuilder } from "effect/http-api"
import type { SqlError } from "effect/sql/SqlError"
import * as CapacityStore from "../capacity/CapacityStore.ts"
import { sqlState } from "../database/SqlState.ts"
import { serverMessage } from "../database/Startup.ts"
import type { QueueRuntime } from "../queue/QueueRuntime.ts"
import { readCheckpoints } from "../queue/QueueStore.ts"
import { Api, Conflict, NotFound, Principal, Stale, Unauthorized } from "./Api.ts"
import { offerOf } from "./ApiStore.ts"
import { statement, tooLarge, unavailable } from "./Boundary.ts"
import { isUsable } from "./TokenStore.ts"
import * as Waiting from "./Waiting.ts"

/** Polls that wait in one process. Each holds a connection of the server and little else. */
const pollsMax = 10_000

export const layerSessions = (runtime: QueueRuntime["Service"]) =>
  Layer.unwrap(
    Effect.gen(function* () {
      const waiting = Waiting.make()
      yield* runtime.overhear(waiting.hintUnsafe)
      return group(runtime, waiting)
    })
  )

const group = (runtime: QueueRuntime["Service"], waiting: Waiting.Waiting) => {
  const { executor } = runtime
  const { settings } = executor
  const ask = statement(executor)
  let draining = false

  const pullOnce = (session: string, wanted: number) =>
    ask((sql) => CapacityStore.pull(sql, session, wanted)).pipe(
      Effect.flatMap((pulled) =>
        pulled.refused === null
          ? Effect.succeed(pulled.items)
          : Effect.fail(sessionGone(session, pulled.refused))
      )
    )

  const poll = Effect.fnUntraced(function* (session: string, wanted: number, waitMillis: number) {
    const clock = yield* Clock.Clock
    const principal = yield* Principal
    const nowMillis = () => Number(clock.monotonicTimeNanosUnsafe()) / 1e6
    const endMillis = nowMillis() + waitMillis
    let offered: ReadonlyArray<number> = []
    // Whoever leaves before it looked, or found something, leaves the rest to the next in line.
    const passOn = Effect.sync(() => {
      for (const queueId of offered) waiting.hintUnsafe(queueId)
    })
    const turn = Effect.gen(function* () {
      const offer = yield* ask((sql) => offerOf(sql, session))
      if (offer === undefined) return yield* sessionGone(session, "unknown session")
      offered = offer.is_full ? [] : offer.queue_ids
      const told = yield* waiting.join([...offered, session])
      const items = yield* pullOnce(session, wanted)
      const leftMillis = endMillis - nowMillis()
      if (items.length > 0 || leftMillis <= 0 || draining) return items
      yield* Effect.raceFirst(told, Effect.sleep(Math.min(leftMillis, settings.pollInterval)))
      return undefined
    }).pipe(Effect.scoped)
    const turns = Effect.gen(function* () {
      for (;;) {
        const items = yield* turn
        if (items !== undefined) return items
        if (draining) return []
        // It may have been revoked while it waited.
        if (!(yield* ask((sql) => isUsable(sql, principal.id)))) {
          return yield* new Unauthorized({
            message: `token ${principal.id} is not usable any more`
          })
        }
      }
    })
    const items = yield* turns.pipe(Effect.onInterrupt(() => passOn))
    if (items.length > 0) yield* passOn
    return items
  })

  /** Freed a slot: a poll of the same session may have waited for it. */
  const settled =
    (item: string, executionSeq: number, session: string) =>
    (answer: CapacityStore.SettledExecution) =>
      Effect.suspend(() => {
        if (answer.status === "stale") return Effect.fail(stale(item, executionSeq, answer))
        waiting.hintUnsafe(session)
        return Effect.succeed({ status: answer.status })
      })

  const bounded = (value: unknown) =>
    Effect.suspend(() => {
      const encoded = value === undefined ? null : JSON.stringify(value)
      return encoded !== null && Buffer.byteLength(encoded) > settings.payloadMax
        ? Effect.fail(tooLarge(settings.payloadMax))
        : Effect.succeed(encoded)
    })

  return HttpApiBuilder.group(Api, "sessions", (handlers) =>
    Effect.gen(function* () {
      yield* Effect.forkScoped(
        Effect.andThen(
          executor.drained,
          Effect.sync(() => {
            draining = true
            waiting.tellAllUnsafe()
          })
        )
      )
      return handlers.handleAll({
        open: ({ payload }) =>
          ask((sql) =>
            othersQueue(
              CapacityStore.openSession(sql, {
                worker: payload.worker,
                version: payload.version,
                recovery: {
                  limit: payload.recovery ?? "executions",
                  max:
                    payload.recovery === "consecutive"
                      ? settings.recoveriesMax
                      : settings.executionsMax
                },
                queues: payload.queues,
                slots: payload.slots,
                clocks: {
                  heartbeatMillis: settings.pullHeartbeat,
                  leaseMillis: settings.pullLease,
                  reservationMillis: settings.pullReservation
                }
              })
            )
          ).pipe(
            Effect.map((opened) => ({
              id: opened.session,
              heartbeatMillis: opened.heartbeatMillis,
              validityMillis: opened.expiresInMillis
            }))
          ),

        pull: Effect.fnUntraced(function* ({ params: { session }, payload }) {
          if (draining) return yield* unavailable("this process is ending: ask another one")
          const { waitMillis = 0, wanted } = payload
          if (waitMillis > 0 && waiting.countUnsafe() >= pollsMax) {
            return yield* unavailable(`${pollsMax} polls wait here already: ask another process`)
          }
          const items = yield* waitMillis === 0
            ? pullOnce(session, wanted)
            : poll(session, wanted, waitMillis)
          return { items: items.map(wired) }
        }),

        activate: Effect.fnUntraced(function* ({ params: { item, session }, payload }) {
          const { executionSeq } = payload
          const answer = yield* ask((sql) =>
            CapacityStore.activate(sql, session, item, executionSeq)
          )
          if (answer.status === "stale") return yield* stale(item, executionSeq, answer)
          const checkpoints =
            executionSeq === 1 ? [] : yield* ask((sql) => readCheckpoints(sql, item))
          return { expiresInMillis: answer.expiresInMillis, checkpoints: checkpoints as never }
        }),

        heartbeat: Effect.fnUntraced(function* ({ params: { session } }) {
          const answer = yield* ask((sql) => CapacityStore.heartbeat(sql, session))
          if (answer.reason !== null) return yield* sessionGone(session, answer.reason)
          return { cancelled: answer.cancelled, expiresInMillis: answer.expiresInMillis }
        }),

        extend: Effect.fnUntraced(function* ({ params: { item, session }, payload }) {
          const { executionSeq, millis } = payload
          const answer = yield* ask((sql) =>
            CapacityStore.extend(sql, session, item, executionSeq, millis)
          )
          if (answer.status === "stale") return yield* stale(item, executionSeq, answer)
          return { expiresInMillis: answer.expiresInMillis }
        }),

        complete: Effect.fnUntraced(function* ({ params: { item, session }, payload }) {
          const result = yield* bounded(payload.result)
          return yield* Effect.flatMap(
            ask((sql) => CapacityStore.complete(sql, session, item, payload.executionSeq, result)),
            settled(item, payload.executionSeq, session)
          )
        }),

        fail: ({ params: { item, session }, payload }) =>
          Effect.flatMap(
            ask((sql) =>
              CapacityStore.fail(sql, session, item, payload.executionSeq, {
                message: payload.message,
                retriesLeft: payload.retriesLeft,
                retryAfterMillis: payload.delayMillis
              })
            ),
            settled(item, payload.executionSeq, session)
          ).pipe(
            Effect.tap(({ status }) =>
              Effect.sync(() => {
                if (status === "retried") runtime.dueInUnsafe(payload.delayMillis ?? 0)
              })
            )
          ),

        businessError: Effect.fnUntraced(function* ({ params: { item, session }, payload }) {
          yield* bounded(payload.fields)
          return yield* Effect.flatMap(
            ask((sql) =>
              CapacityStore.businessError(sql, session, item, payload.executionSeq, {
                code: payload.code,
                result: payload.fields
              })
            ),
            settled(item, payload.executionSeq, session)
          )
        }),

        checkpoint: Effect.fnUntraced(function* ({ params: { item, session }, payload }) {
          const { executionSeq, name } = payload
          const value = (yield* bounded(payload.value)) ?? "null"
          const answer = yield* ask((sql) =>
            CapacityStore.checkpoint(sql, session, item, executionSeq, { name, value })
          )
          if (answer.status === "stale") return yield* stale(item, executionSeq, answer)
          return { value: answer.value as never }
        }),

        close: Effect.fnUntraced(function* ({ params: { session } }) {
          const answer = yield* ask((sql) => CapacityStore.closeSession(sql, session))
          if (answer.refused !== null) return yield* sessionGone(session, answer.refused)
          return { handedBack: answer.handedBack }
        })
      })
    })
  )
}

const sessionGone = (session: string, reason: CapacityStore.SessionRefusal) =>
  new NotFound({ message: `session ${session}: ${reason}; open another one` })

/** An item that never was is unknown; everything else is an execution that may not write. */
const stale = (
  item: string,
  executionSeq: number,
  { reason }: CapacityStore.Stale
): NotFound | Stale =>
  reason === "unknown item"
    ? new NotFound({ message: `there is no item ${item}` })
    : new Stale({ item, executionSeq, reason })

const othersQueue = <A>(opening: Effect.Effect<A, SqlError>) =>
  Effect.catchIf(
    opening,
    (error) => sqlState(error) === "TN011",
    (error) => Effect.fail(new Conflict({ message: serverMessage(error) }))
  )

const wired = (item: CapacityStore.PulledItem) => ({
  id: item.id,
  executionSeq: item.executionSeq,
  queue: item.queue,
  key: item.key,
  payload: item.payload as Schema.Json,
  failures: item.failures,
  losses: item.losses,
  enqueuedAt: item.enqueuedAt,
  deadlineMillis: item.deadlineInMillis,
  reservedMillis: item.reservedForMillis,
  traceparent: item.trace
})
