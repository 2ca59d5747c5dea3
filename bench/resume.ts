/**
 * Claim: what a killed pull worker held is being executed by another one within three minutes; profile
 * `capacity`, whose lease of 90 s has 60 to 90 s left at any moment, then a scan of 30 s and a grace of 30 s.
 *
 * Sixty sessions hold one item each, their heartbeats spread evenly over the interval between two of
 * them; their process is killed; sixty others wait. What counts is from the kill to the activation of the
 * same item elsewhere: what is left of its lease, the next scan, the grace, and a poll.
 */
import { Clock, Effect, Schedule, type Scope } from "effect"
import { type Resolved, resolve } from "../src/executor/Settings.ts"
import { hashOf, mintSecret } from "../src/http/Token.ts"
import { createToken } from "../src/http/TokenStore.ts"
import { until } from "./Drain.ts"
import * as ChildProcess from "./ChildProcess.ts"
import { freePort } from "./freePort.ts"
import { quantile, type Report } from "./Report.ts"
import { execute, type Server } from "./Server.ts"

const sessions = 60

const { pullHeartbeat, pullLease } = resolve("capacity") as Resolved

const within = 180_000

export const run = Effect.fnUntraced(function* (
  server: Server,
  report: Report
): Effect.fn.Return<void, never, Scope.Scope> {
  const clock = yield* Clock.Clock
  const bench = yield* server.database("resume")
  yield* bench.migrate
  const sql = yield* bench.connect
  const secret = mintSecret("worker")
  const token = { role: "worker", name: "bench", hash: hashOf(secret), validMillis: null } as const
  yield* Effect.orDie(createToken(sql, token))
  const port = yield* Effect.promise(freePort)
  const began: Array<Map<string, bigint>> = []
  const start = (role: string) => {
    const seen = new Map<string, bigint>()
    if (role === "work") began.push(seen)
    return ChildProcess.start({
      ...{ module: "pullChild.ts", role, url: bench.url, items: sessions },
      settings: { port, token: secret },
      onMessage: (message) => {
        if (message._tag === "began") seen.set(message.item, BigInt(message.atNanos))
      }
    })
  }
  const serving = yield* start("serve")
  yield* serving.message("ready")
  const victim = yield* start("work")
  yield* execute(sql, [
    `SELECT tenure.enqueue('pulled', '{}', '{}') FROM generate_series(1, ${sessions})`
  ])
  const isBegun = (at: number) => Effect.sync(() => began[at]?.size === sessions)
  yield* until("every session has an item", "100 millis", () => isBegun(0))
  yield* start("work")
  // Every session has sent a heartbeat after it had its item.
  yield* Effect.sleep(1.5 * pullHeartbeat)
  const killedNanos = clock.monotonicTimeNanosUnsafe()
  victim.signal("SIGKILL")
  yield* isBegun(1).pipe(
    Effect.repeat({ until: (all) => all, schedule: Schedule.spaced("100 millis") }),
    Effect.timeoutOption(within)
  )
  const millis = [...(began[1]?.values() ?? [])].map((at) => Number(at - killedNanos) / 1e6)
  const row = { workload: "kill-a-pull-worker", system: "tenure" }
  const shortest = pullLease - pullHeartbeat
  for (const [metric, value, goal] of [
    ["min_ms", quantile(millis, 0), { of: "value", is: "at least", limit: shortest }],
    ["p50_ms", quantile(millis, 0.5), undefined],
    ["max_ms", quantile(millis, 1), { of: "value", is: "at most", limit: within }]
  ] as const) {
    report.row({ ...row, metric, value, goal })
  }
  report.row({ ...row, metric: "resumed_percent", value: (100 * millis.length) / sessions })
})
