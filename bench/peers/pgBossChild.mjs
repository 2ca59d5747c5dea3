/**
 * pg-boss's part in the queue benchmark, with its own batched settings: jobs handed in 5,000 a call, and
 * two workers of a queue that each take 5,000 at a time. It keeps a completed job, without a result.
 */
import { PgBoss } from "pg-boss"
import { counter, millisSince, nowNanos, order, pause, role, tell } from "../child.ts"
import { inParallel } from "./inParallel.mjs"

const { items, role: name, url, warmUp } = role()

const start = async (settings = {}) => {
  const boss = new PgBoss({ connectionString: url, max: 10, useListenNotify: true, ...settings })
  boss.on("error", () => {})
  await boss.start()
  return boss
}

const producing = { supervise: false, schedule: false }

const serve = (boss, queue, handler) =>
  boss.work(
    queue,
    {
      batchSize: 5000,
      localConcurrency: 2,
      burstWhenBatchFull: true,
      pollingIntervalSeconds: 0.5
    },
    async (jobs) => {
      for (const job of jobs) handler(job)
    }
  )

const startMillis = []
const timed = (boss) =>
  boss.work("timed", { pollingIntervalSeconds: 0.5 }, async ([{ data }]) => {
    startMillis.push(Number(nowNanos() - BigInt(data.begunNanos)) / 1e6)
    if (startMillis.length === items) tell({ _tag: "latency", startMillis, resultMillis: [] })
  })

const sendTimed = async (boss) => {
  for (let i = 0; i < items; i++) {
    await boss.send("timed", { begunNanos: String(nowNanos()) })
    await pause(5)
  }
}

switch (name) {
  case "setup": {
    const boss = await start()
    for (const queue of ["noop", "warm-up", "timed"])
      await boss.createQueue(queue, { notify: true })
    await boss.stop({ graceful: false })
    process.exit(0)
    break
  }
  case "enqueue": {
    const boss = await start(producing)
    const jobs = (count) => Array.from({ length: count }, (_, i) => ({ data: { i } }))
    const add = async (queue, all) => {
      for (let at = 0; at < all.length; at += 5000)
        await boss.insert(queue, all.slice(at, at + 5000))
    }
    await add("warm-up", jobs(warmUp))
    const measured = jobs(items)
    const begun = nowNanos()
    await add("noop", measured)
    tell({ _tag: "done", millis: millisSince(begun) })
    process.exit(0)
    break
  }
  case "single": {
    const boss = await start(producing)
    await inParallel(warmUp, (i) => boss.send("warm-up", { i }))
    const begun = nowNanos()
    await inParallel(items, (i) => boss.send("noop", { i }))
    tell({ _tag: "done", millis: millisSince(begun) })
    process.exit(0)
    break
  }
  case "work": {
    const boss = await start()
    await order("warm")
    await serve(boss, "warm-up", () => {})
    await order("cool")
    await boss.offWork("warm-up")
    const started = counter()
    tell({ _tag: "ready" })
    await order("go")
    await serve(boss, "noop", started)
    break
  }
  case "serve": {
    await timed(await start())
    await pause(500)
    tell({ _tag: "ready" })
    break
  }
  case "produce": {
    await sendTimed(await start(producing))
    break
  }
  case "both": {
    const boss = await start()
    await timed(boss)
    await pause(500)
    await sendTimed(boss)
    break
  }
  default:
    throw new Error(`no such role: ${name}`)
}
