/**
 * Claim: limits that need a count cost only the queues that ask for them, and not much there. A thousand
 * keys of which each runs one item at a time, and ten items at a time over eight processes, beside DBOS,
 * which has both.
 *
 * How many run at once is read from the database while they do.
 */
import { Effect, type Scope } from "effect"
import {
  add,
  calibration,
  compare,
  dbos,
  drainOnce,
  prepared,
  type Runs,
  type System,
  tenure
} from "./Drain.ts"
import * as Peers from "./Peers.ts"
import type { Report } from "./Report.ts"
import type { Bench, Server } from "./Server.ts"

const workloads = [
  { workload: "1000-keys-of-1", role: "keyed", items: 20_000, peerItems: 2000, workers: 2 },
  {
    workload: "global-10-of-8-processes",
    role: "limited",
    items: 5000,
    peerItems: 1000,
    workers: 8
  }
] as const

const running: Readonly<Partial<Record<System["name"], string>>> = {
  tenure: "SELECT count(*)::int AS n FROM tenure.claimed WHERE queue_id > 0",
  dbos: "SELECT count(*)::int AS n FROM dbos.workflow_status WHERE status = 'PENDING'"
}

export const run = Effect.fnUntraced(function* (
  server: Server,
  report: Report
): Effect.fn.Return<void, never, Scope.Scope> {
  yield* Peers.installed("@dbos-inc/dbos-sdk")
  const templates = {
    tenure: yield* prepared(server, tenure),
    dbos: yield* prepared(server, dbos)
  }
  for (const { items, peerItems, role, workers, workload } of workloads) {
    yield* calibration(server, report, workload)
    const runs: Runs<number> = new Map()
    let most = 0
    for (let round = 0; round < (report.quick ? 1 : 3); round++) {
      for (const system of [tenure, dbos] as const) {
        const watch = Effect.fnUntraced(function* (bench: Bench) {
          const sql = yield* bench.connect
          const look = Effect.gen(function* () {
            const [row] = yield* Effect.orDie(
              sql.unsafe<{ readonly n: number }>(running[system.name] ?? "")
            )
            if (system === tenure) most = Math.max(most, row?.n ?? 0)
          })
          yield* Effect.forkScoped(Effect.forever(Effect.andThen(look, Effect.sleep("5 millis"))))
        })
        const drain = yield* drainOnce(server, system, {
          template: templates[system.name as "tenure" | "dbos"],
          items: system === tenure ? items : peerItems,
          workers,
          role,
          whileDraining: watch
        })
        add(runs, system, drain.drainedPerSecond)
      }
    }
    const row = { workload, metric: "items_per_s", better: "higher" } as const
    compare(report, row, runs, (rate) => rate)
    if (role === "limited") {
      const goal = { of: "value", is: "at most", limit: 10 } as const
      report.row({ workload, system: tenure.name, metric: "running_max", value: most, goal })
    }
  }
})
