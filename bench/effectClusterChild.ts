/**
 * The part of Effect's own cluster: its workflow engine on sockets, with its storage in SQL and its
 * defaults. Ends as its users' processes do, by `NodeRuntime.runMain`.
 */
import { NodeClusterSocket, NodeRuntime } from "@effect/platform-node"
import { PgClient } from "@effect/sql-pg"
import { Effect, Layer, Option, Redacted, References, Schema } from "effect"
import { ClusterWorkflowEngine, RunnerAddress } from "effect/cluster"
import { Activity, Workflow } from "effect/workflow"
import { order, role, tell, tellBegan, tellUsed } from "./child.ts"
import { freePort } from "./freePort.ts"

const { role: name, settings, url } = role()

void tellUsed()

const Work = Workflow.make("Work", {
  payload: { id: Schema.String },
  idempotencyKey: ({ id }) => id
})

const WorkLive = Work.toLayer(({ id }) =>
  Activity.make({
    name: "work",
    execute: Effect.suspend(() => {
      tellBegan(id)
      return Effect.never
    })
  })
)

const Cluster = Layer.unwrap(
  Effect.map(Effect.promise(freePort), (port) =>
    NodeClusterSocket.layer({
      shardingConfig: {
        ...settings,
        runnerAddress: Option.some(RunnerAddress.make("127.0.0.1", port))
      }
    })
  )
)

const HandIn = Layer.effectDiscard(
  Effect.gen(function* () {
    tell({ _tag: "ready" })
    if (name === "setup") process.exit(0)
    yield* Effect.promise(() => order("go"))
    yield* Work.execute({ id: "item" }, { discard: true })
  }).pipe(Effect.forkScoped)
)

Layer.launch(
  HandIn.pipe(
    Layer.provideMerge(WorkLive),
    Layer.provide(ClusterWorkflowEngine.layer),
    Layer.provide(Cluster),
    Layer.provide(PgClient.layer({ url: Redacted.make(url) })),
    Layer.provide(Layer.succeed(References.MinimumLogLevel, "None"))
  )
).pipe(NodeRuntime.runMain({ disableErrorReporting: true }))
