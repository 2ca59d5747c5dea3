/**
 * DBOS's part in the benchmarks of queues: workflows without steps, enqueued 250 in a transaction on four
 * connections, which is the fastest of its documented ways, and run by up to 1,000 at a time. Its queue
 * of keys is a partitioned one.
 */
import { DBOS, DBOSClient } from "@dbos-inc/dbos-sdk"
import pg from "pg"
import { counter, millisSince, nowNanos, order, role, tell } from "../child.ts"
import { inParallel } from "./inParallel.mjs"

const { items, role: name, settings, url, warmUp } = role()
const silent = { info() {}, debug() {}, warn() {}, error() {} }
const applicationVersion = "v1"

let started = () => {}
DBOS.registerWorkflow(async () => started(), { name: "noop" })

const launch = async (queues) => {
  DBOS.setConfig({
    name: "bench",
    systemDatabaseUrl: url,
    systemDatabasePoolSize: 40,
    applicationVersion,
    executorID: `process ${process.pid}`,
    logger: silent,
    useListenNotify: true,
    listenQueues: queues
  })
  await DBOS.launch()
}

const client = () =>
  DBOSClient.create({
    systemDatabaseUrl: url,
    systemDatabasePoolSize: 20,
    logger: silent,
    applicationName: "bench"
  })

const queues = {
  work: { minPollingIntervalMs: 10, workerConcurrency: 1000 },
  keyed: { minPollingIntervalMs: 10, partitionConcurrency: 1 },
  limited: { minPollingIntervalMs: 10, concurrency: 10 }
}

const target = (queueName, i) => ({
  queueName,
  workflowName: "noop",
  appVersion: applicationVersion,
  ...(queueName === "keyed" ? { queuePartitionKey: `${i % 1000}` } : {})
})

const addAll = async (dbos, queue, count) => {
  let next = 0
  const sender = async () => {
    const connection = new pg.Client(url)
    await connection.connect()
    while (next < count) {
      await connection.query("BEGIN")
      for (let at = 0; at < 250 && next < count; at++) {
        await dbos.enqueueInTransaction(connection, target(queue, next), next++)
      }
      await connection.query("COMMIT")
    }
    await connection.end()
  }
  await Promise.all(Array.from({ length: 4 }, sender))
}

switch (name) {
  case "setup": {
    await launch([])
    for (const [queue, limits] of Object.entries(queues)) await DBOS.registerQueue(queue, limits)
    await DBOS.shutdown()
    process.exit(0)
    break
  }
  case "enqueue": {
    const dbos = await client()
    const begun = nowNanos()
    await addAll(dbos, settings.for, items)
    tell({ _tag: "done", millis: millisSince(begun) })
    process.exit(0)
    break
  }
  case "single": {
    const dbos = await client()
    await inParallel(warmUp, (i) => dbos.enqueue(target("work", i), i))
    const begun = nowNanos()
    await inParallel(items, (i) => dbos.enqueue(target("work", i), i))
    tell({ _tag: "done", millis: millisSince(begun) })
    process.exit(0)
    break
  }
  case "keyed":
  case "limited":
  case "work": {
    started = counter()
    tell({ _tag: "ready" })
    await order("go")
    await launch([name])
    break
  }
  default:
    throw new Error(`no such role: ${name}`)
}
