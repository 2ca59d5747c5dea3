/**
 * The outside world of the fault tests: an HTTP server that takes the workers' effects and keeps the
 * time at which each arrived. It checks fencing tokens itself, as a careful provider would: of each
 * item it accepts no attempt older than the newest it has seen.
 *
 * It remembers the idempotency keys that came with effects, and answers who asks for one. It also has
 * the gates that handlers wait at, so that a test decides when work goes on.
 */
import { Clock, Effect, type Scope } from "effect"
import { createServer, type ServerResponse } from "node:http"
import type { AddressInfo } from "node:net"

export interface Arrival {
  readonly item: string
  readonly attempt: number
  readonly executor: string
  readonly name: string
  readonly key?: string
  /** Monotonic. */
  readonly atNanos: bigint
  readonly accepted: boolean
  readonly value: string
}

export interface Sink {
  readonly url: string
  readonly arrivals: () => ReadonlyArray<Arrival>
  readonly arrivalsOf: (name: string) => ReadonlyArray<Arrival>
  /** Keys that were asked for. */
  readonly questions: () => ReadonlyArray<string>
  /** Whoever waits at the gate, now or later, goes on. */
  readonly open: (gate: string) => Effect.Effect<void>
  /** How many wait at it. */
  readonly waiting: (gate: string) => number
}

export const make: Effect.Effect<Sink, never, Scope.Scope> = Effect.gen(function* () {
  const clock = yield* Clock.Clock
  const arrivals: Array<Arrival> = []
  const questions: Array<string> = []
  const newest = new Map<string, number>()
  const opened = new Set<string>()
  const waiting = new Map<string, Set<ServerResponse>>()

  const take = (text: string): string => {
    const effect = JSON.parse(text) as Omit<Arrival, "atNanos" | "accepted" | "value">
    const known = newest.get(effect.item) ?? 0
    const accepted = effect.attempt >= known
    if (accepted) newest.set(effect.item, effect.attempt)
    const value = `${effect.name} ${arrivals.length}`
    arrivals.push({ ...effect, atNanos: clock.monotonicTimeNanosUnsafe(), accepted, value })
    return value
  }

  const answerTo = (key: string, response: ServerResponse) => {
    questions.push(key)
    const found = arrivals.find((arrival) => arrival.key === key)
    response.statusCode = found === undefined ? 404 : 200
    response.end(found?.value)
  }

  const waitAt = (gate: string, response: ServerResponse) => {
    if (opened.has(gate)) return response.end()
    const responses = waiting.get(gate) ?? new Set()
    waiting.set(gate, responses.add(response))
    response.on("close", () => responses.delete(response))
    return
  }

  // A frozen worker comes back to a connection that is still there.
  const server = createServer({ keepAliveTimeout: 600_000 }, (request, response) => {
    const url = request.url ?? ""
    if (url.startsWith("/gate/")) return waitAt(url.slice("/gate/".length), response)
    if (url.startsWith("/key/")) return answerTo(url.slice("/key/".length), response)
    let text = ""
    request.on("data", (chunk: Buffer) => (text += chunk.toString()))
    request.on("end", () => response.end(take(text)))
    return
  })
  yield* Effect.acquireRelease(
    Effect.callback<void>((resume) => {
      server.listen(0, "127.0.0.1", () => resume(Effect.void))
    }),
    () =>
      Effect.sync(() => {
        server.close()
        server.closeAllConnections()
      })
  )
  return {
    url: `http://127.0.0.1:${(server.address() as AddressInfo).port}`,
    arrivals: () => arrivals,
    arrivalsOf: (name) => arrivals.filter((arrival) => arrival.name === name),
    questions: () => questions,
    open: (gate) =>
      Effect.sync(() => {
        opened.add(gate)
        for (const response of waiting.get(gate) ?? []) response.end()
      }),
    waiting: (gate) => waiting.get(gate)?.size ?? 0
  }
})
