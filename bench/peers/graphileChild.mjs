/**
 * graphile-worker's part in the queue benchmark, with its own batched settings: jobs handed in 5,000 a
 * call, a local queue of 2,000, completions written in batches. It deletes a completed job.
 */
import { Logger, makeWorkerUtils, run } from "graphile-worker"
import { inParallel } from "./inParallel.mjs"
import { counter, millisSince, nowNanos, order, pause, role, tell } from "../child.ts"

const { items, role: name, url, warmUp } = role()
const logger = new Logger(() => () => {})

const utils = () => makeWorkerUtils({ connectionString: url, logger })

const batched = {
  concurrentJobs: 50,
  maxPoolSize: 10,
  localQueue: { size: 2000, refetchDelay: { durationMs: 10 } },
  completeJobBatchDelay: 0,
  failJobBatchDelay: 0
}

const start = (settings, taskList) =>
  run({
    preset: {
      worker: {
        connectionString: url,
        pollInterval: 2000,
        preparedStatements: true,
        logger,
        ...settings
      }
    },
    taskList,
    noHandleSignals: true
  })

const timed = (onTimed) =>
  start({ concurrentJobs: 1, maxPoolSize: 5 }, { timed: async (payload) => onTimed(payload) })

const sendTimed = async (addJob) => {
  for (let i = 0; i < items; i++) {
    await addJob("timed", { begunNanos: String(nowNanos()) })
    await pause(5)
  }
}

const startMillis = []
const onTimed = ({ begunNanos }) => {
  startMillis.push(Number(nowNanos() - BigInt(begunNanos)) / 1e6)
  if (startMillis.length === items) tell({ _tag: "latency", startMillis, resultMillis: [] })
}

switch (name) {
  case "setup": {
    const worker = await utils()
    await worker.migrate()
    await worker.release()
    process.exit(0)
    break
  }
  case "enqueue": {
    const worker = await utils()
    const jobs = (identifier, count) =>
      Array.from({ length: count }, (_, i) => ({ identifier, payload: { i } }))
    const add = async (all) => {
      for (let at = 0; at < all.length; at += 5000) await worker.addJobs(all.slice(at, at + 5000))
    }
    await add(jobs("warm-up", warmUp))
    const measured = jobs("noop", items)
    const begun = nowNanos()
    await add(measured)
    tell({ _tag: "done", millis: millisSince(begun) })
    await worker.release()
    process.exit(0)
    break
  }
  case "single": {
    const worker = await utils()
    await inParallel(warmUp, (i) => worker.addJob("warm-up", { i }))
    const begun = nowNanos()
    await inParallel(items, (i) => worker.addJob("noop", { i }))
    tell({ _tag: "done", millis: millisSince(begun) })
    process.exit(0)
    break
  }
  case "work": {
    await order("warm")
    // Goes on without work: stopped, now and then it keeps the next runner of its process from starting.
    await start(batched, { "warm-up": async () => {} })
    await order("cool")
    const started = counter()
    tell({ _tag: "ready" })
    await order("go")
    await start(batched, { noop: async () => started() })
    break
  }
  case "serve": {
    await timed(onTimed)
    await pause(500)
    tell({ _tag: "ready" })
    break
  }
  case "produce": {
    const worker = await utils()
    await sendTimed((task, payload) => worker.addJob(task, payload))
    process.disconnect()
    await worker.release()
    break
  }
  case "both": {
    const runner = await timed(onTimed)
    await pause(500)
    await sendTimed((task, payload) => runner.addJob(task, payload))
    break
  }
  default:
    throw new Error(`no such role: ${name}`)
}
