/** The systems whose processes depend on one another, and a database with the tables of each. */
import { Effect, type Scope } from "effect"
import * as ChildProcess from "./ChildProcess.ts"
import * as Peers from "./Peers.ts"
import type { Bench, Server } from "./Server.ts"

export interface System {
  readonly name: "tenure" | "effect-cluster" | "dbos"
  readonly module: string
  readonly prepare: (bench: Bench) => Effect.Effect<void, never, Scope.Scope>
}

/** Makes its tables, so that they are there in every copy. */
const setUpBy = (module: string) => (bench: Bench) =>
  Effect.flatMap(
    ChildProcess.start({ module, role: "setup", url: bench.url, items: 1 }),
    (child) => child.exited
  )

export const tenure: System = {
  name: "tenure",
  module: "coordinationChild.ts",
  prepare: (bench) => bench.migrate
}

export const effectCluster: System = {
  name: "effect-cluster",
  module: "effectClusterChild.ts",
  prepare: setUpBy("effectClusterChild.ts")
}

export const dbos: System = {
  name: "dbos",
  module: "peers/dbosChild.mjs",
  prepare: setUpBy("peers/dbosChild.mjs")
}

export const templates = Effect.fnUntraced(function* (
  server: Server
): Effect.fn.Return<ReadonlyMap<System, Bench>, never, Scope.Scope> {
  yield* Peers.installed("@dbos-inc/dbos-sdk")
  const made = new Map<System, Bench>()
  for (const system of [tenure, effectCluster, dbos]) {
    const template = yield* server.database(`template_${system.name.replaceAll("-", "_")}`)
    yield* Effect.scoped(system.prepare(template))
    made.set(system, template)
  }
  return made
})
