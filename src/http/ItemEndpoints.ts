/** Handing in, and looking at what became of it: the endpoints of the group `items`. */
import { Effect } from "effect"
import { HttpApiBuilder } from "effect/http-api"
import type { QueueRuntime } from "../queue/QueueRuntime.ts"
import { enqueueAll, readOutcomes } from "../queue/QueueStore.ts"
import { Api, Conflict, NotFound } from "./Api.ts"
import { statement, tooLarge } from "./Boundary.ts"
import { placeOf } from "./ApiStore.ts"

export const layerItems = (runtime: QueueRuntime["Service"]) => {
  const { executor } = runtime
  const ask = statement(executor)
  return HttpApiBuilder.group(Api, "items", (handlers) =>
    handlers.handleAll({
      enqueue: Effect.fnUntraced(function* ({ payload: item, request }) {
        const { traceparent } = request.headers
        const payload = JSON.stringify(item.payload)
        const { payloadMax } = executor.settings
        if (Buffer.byteLength(payload) > payloadMax) return yield* tooLarge(payloadMax)
        const enqueued = yield* ask((sql) =>
          enqueueAll(sql, item.queue, [
            {
              payload,
              priority: item.priority ?? 0,
              key: item.key ?? null,
              idempotencyKey: item.idempotencyKey ?? null,
              delayMillis: item.delayMillis ?? null,
              notBefore: null,
              deadlineMillis: item.deadlineMillis ?? null,
              notAfter: null,
              trace:
                traceparent !== undefined && isTraceparent.test(traceparent) ? traceparent : null
            }
          ])
        )
        const id = enqueued?.ids?.[0]
        if (enqueued === undefined || id === undefined) {
          return yield* new Conflict({
            message: `the idempotency key names item ${enqueued?.conflict_id}, which has another payload: use another key`
          })
        }
        runtime.hintUnsafe(enqueued.queue_id)
        runtime.waker.workUnsafe(enqueued.queue_id)
        for (const due of [item.delayMillis, item.deadlineMillis]) {
          if (due !== undefined) runtime.dueInUnsafe(due)
        }
        return { id }
      }),
      look: Effect.fnUntraced(function* ({ params: { item: id } }) {
        const place = yield* ask((sql) => placeOf(sql, id))
        if (place === undefined) {
          return yield* new NotFound({
            message: `no item ${id}: it never existed, or it is past its retention`
          })
        }
        const [row] = place === "done" ? yield* ask((sql) => readOutcomes(sql, [id])) : []
        // Brought back between the two statements: it waits again.
        if (row === undefined || row.outcome === null) {
          const state = running.has(place) ? ("running" as const) : ("waiting" as const)
          return { id, state, reason: null, result: null }
        }
        return { id, state: row.outcome, reason: row.reason, result: (row.result ?? null) as never }
      })
    })
  )
}

/** W3C trace context: the item's spans join the caller's. */
const isTraceparent = /^00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$/

const running = new Set(["claimed", "leased", "reserved"])
