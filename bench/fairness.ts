/**
 * Claim: no key starves another. Items of small keys that are handed in behind thousands of a huge key's wait
 * about as long as if that key were not there.
 *
 * One executor with four slots, in this process: what is measured are turns, and they are of the same length
 * for all. `alone`: the small keys without the huge one. `turns`: beside it. `by-age`: the same with
 * `fair: false`: of the keys that may run those with the oldest items, one item of each in a claim. Waiting is from the enqueue to the start, and
 * stands beside the time that all of it takes.
 */
import { Clock, Effect, Layer, Redacted, References, Schema, type Scope } from "effect"
import { Tenure, WorkQueue } from "../src/index.ts"
import { layerNone } from "../src/testing/Watchdog.ts"
import { quantile, type Report, summarize } from "./Report.ts"
import type { Bench, Server } from "./Server.ts"

class Tenants extends WorkQueue.make("tenants", {
  payload: { tenant: Schema.String },
  key: ({ tenant }) => tenant
}) {}

const itemMillis = 2
const smallKeys = 20
const itemsPerKey = 5

interface Run {
  readonly p50: number
  readonly max: number
  readonly allMillis: number
}

const runOnce = Effect.fnUntraced(function* (
  server: Server,
  template: Bench,
  options: { readonly huge: number; readonly fair: boolean }
): Effect.fn.Return<Run, never, Scope.Scope> {
  const bench = yield* server.database("fairness", template)
  const clock = yield* Clock.Clock
  const nowMillis = () => Number(clock.monotonicTimeNanosUnsafe()) / 1e6
  const waited: Array<number> = []
  let handedIn = 0
  const live = Tenants.toLayer(
    ({ tenant }) => {
      if (tenant !== "huge") waited.push(nowMillis() - handedIn)
      return Effect.sleep(itemMillis)
    },
    { concurrency: { perExecutor: 4, perKey: 1_000_000 }, fair: options.fair }
  )
  const program = Effect.gen(function* () {
    const hugeIds = yield* Tenants.enqueueAll(
      Array.from({ length: options.huge }, () => ({ tenant: "huge" }))
    )
    yield* Layer.build(live)
    // The huge key is under way when the others come.
    for (const early of hugeIds.slice(50, 51)) yield* Tenants.await(early)
    handedIn = nowMillis()
    const ids = yield* Tenants.enqueueAll(
      Array.from({ length: smallKeys * itemsPerKey }, (_, n) => ({
        tenant: `small ${n % smallKeys}`
      }))
    )
    yield* Effect.forEach([...ids, ...hugeIds], (id) => Tenants.await(id), {
      concurrency: "unbounded",
      discard: true
    })
    return nowMillis() - handedIn
  })
  const allMillis = yield* program.pipe(
    Effect.scoped,
    Effect.provide(
      Tenure.layer({ application: "bench", version: "v1", settings: { drain: 100 } }).pipe(
        Layer.provide(Tenure.layerPostgres({ url: Redacted.make(bench.url) })),
        Layer.provide(layerNone)
      )
    ),
    Effect.provideService(References.MinimumLogLevel, "Error"),
    Effect.orDie
  )
  return { p50: quantile(waited, 0.5), max: quantile(waited, 1), allMillis }
})

export const run = Effect.fnUntraced(function* (
  server: Server,
  report: Report
): Effect.fn.Return<void, never, Scope.Scope> {
  const template = yield* server.database("template_fairness")
  yield* template.migrate
  const huge = report.quick ? 1000 : 10_000
  const rounds = report.quick ? 1 : 5
  const once = (options: { readonly huge: number; readonly fair: boolean }) =>
    Effect.scoped(runOnce(server, template, options))
  const runs: Record<"alone" | "turns" | "by-age", Array<Run>> = {
    alone: [],
    turns: [],
    "by-age": []
  }
  yield* once({ huge: 0, fair: true })
  for (let round = 0; round < rounds; round++) {
    runs.alone.push(yield* once({ huge: 0, fair: true }))
    runs.turns.push(yield* once({ huge, fair: true }))
    runs["by-age"].push(yield* once({ huge, fair: false }))
  }
  const workload = `${smallKeys} keys of ${itemsPerKey} behind ${huge}`
  const metrics = [
    ["small_wait_p50_ms", (one: Run) => one.p50],
    ["small_wait_max_ms", (one: Run) => one.max],
    ["all_done_ms", (one: Run) => one.allMillis]
  ] as const
  for (const [metric, of] of metrics) {
    for (const system of ["alone", "turns", "by-age"] as const) {
      const { median, spread } = summarize(runs[system].map(of))
      const base = system === "turns" ? runs.alone : runs.turns
      const ratio = summarize(runs[system].map((one, at) => of(one) / of(base[at] ?? one)))
      report.row({
        workload,
        system,
        metric,
        value: median,
        spread,
        ...(system === "alone" || (system === "turns" && metric === "all_done_ms")
          ? {}
          : { ratio }),
        // Beside it they have four fifths of the turns and more, and what was claimed ahead goes first.
        ...(system === "turns" && metric === "small_wait_max_ms"
          ? { goal: { of: "ratio", is: "below", limit: 4 } as const }
          : {})
      })
    }
  }
})
