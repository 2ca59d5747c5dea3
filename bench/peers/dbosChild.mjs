/**
 * DBOS's part: the open-source SDK with its defaults, and without its Conductor, which is a service
 * of its own. Each process has an executor id of its own, as the replicas of a deployment have.
 */
import { DBOS } from "@dbos-inc/dbos-sdk"
import { order, role, tell, tellBegan, tellUsed } from "../child.ts"

const { items: queues, role: name, settings, url } = role()

const silent = { info() {}, debug() {}, warn() {}, error() {} }

const work = DBOS.registerWorkflow(
  () =>
    DBOS.runStep(
      () => {
        tellBegan(DBOS.workflowID ?? "")
        return new Promise(() => {})
      },
      { name: "work" }
    ),
  { name: "work" }
)

const launch = async () => {
  DBOS.setConfig({
    name: "bench",
    systemDatabaseUrl: url,
    applicationVersion: "v1",
    executorID: settings.executor ?? `process ${process.pid}`,
    logger: silent
  })
  await DBOS.launch()
  for (let queue = 0; queue < queues; queue++) await DBOS.registerQueue(`work ${queue}`, {})
}

process.on("SIGTERM", async () => {
  await DBOS.shutdown()
  process.exit(0)
})

await launch()
if (name === "setup") {
  await DBOS.shutdown()
  process.exit(0)
}
void tellUsed()
tell({ _tag: "ready" })
await order("go")
await DBOS.startWorkflow(work, { queueName: "work 0" })()
