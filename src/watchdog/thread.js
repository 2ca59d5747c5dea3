// @ts-check
/**
 * The watchdog's own thread: reads deadlines from shared memory, and ends the process when one is over.
 *
 *   idle --arm--> watching --a deadline is over, or the main thread says so--> firing --time over--> SIGKILL
 *     |              |                                                            |
 *     +--------------+------------------------ stop ------------------------------+--> ended
 *
 * It runs while the main thread may be stuck, in JavaScript or in the operating system. So nothing here
 * waits for an event loop or a timer, and nothing is asked of the main thread: there is only the memory
 * they share, and what was posted before. It cannot be written with `await`.
 *
 * `process.exit` ends no more than the thread in which it is called: only a signal ends the process.
 */
import { writeSync } from "node:fs"
import { uptime } from "node:os"
import { setFlagsFromString } from "node:v8"
import { Script } from "node:vm"
import { parentPort, receiveMessageOnPort, workerData } from "node:worker_threads"
import { makeJudge } from "./judge.js"
import { Control } from "./memory.js"

/** @type {{ readonly control: Int32Array, readonly deadlines: BigInt64Array }} */
const { control, deadlines } = workerData
const port = parentPort
if (port === null) throw new Error("the watchdog's thread is not a program of its own")

/** @type {import("./memory.js").Orders | undefined} */
let orders
/** @type {ReturnType<typeof makeJudge> | undefined} */
let judge
/** @type {Array<string | undefined>} */
const names = []
/**
 * `answered`: the main thread knows, and has its time from then on. `exiting`: it has begun to exit.
 *
 * @typedef {object} End
 * @property {import("./memory.js").Firing} firing
 * @property {bigint} killNanos
 * @property {bigint} latestNanos
 * @property {boolean} answered
 * @property {boolean} exiting
 */
/** @type {End | undefined} */
let end

const pause = new Int32Array(new SharedArrayBuffer(4))

/**
 * One line, as the main thread would log it. Standard error does not block (see WatchdogThread.ts); where it is
 * full, and still is after 100 ms, the line is lost and not the time.
 *
 * @param {string} message
 * @param {import("./memory.js").Firing} firing
 */
const log = (message, { reason, subject }) => {
  const entry = {
    message,
    level: "FATAL",
    timestamp: new Date().toISOString(),
    annotations: { executorId: orders?.executorId, reason, subject }
  }
  for (let attempt = 0; attempt < 20; attempt++) {
    try {
      writeSync(2, `${JSON.stringify(entry)}\n`)
      return
    } catch (error) {
      if (!(error instanceof Error && "code" in error && error.code === "EAGAIN")) return
      Atomics.wait(pause, 0, 0, 5)
    }
  }
}

/** @param {End} ending */
const kill = ({ firing }) => {
  if (Atomics.load(control, Control.stop) === 1) return
  log("executor_watchdog: killed, the lease is left to expire", firing)
  process.kill(process.pid, "SIGKILL")
  // Still here as process 1 of a container: to that one the kernel delivers no signal of its own making,
  // not even this. A trap of the processor it does.
  setFlagsFromString("--allow-natives-syntax")
  new Script("%SystemBreak()").runInThisContext()
}

/**
 * @param {import("./memory.js").Firing} firing
 * @param {import("./memory.js").Orders} orders
 * @returns {End}
 */
const fire = (firing, { abandonAfterNanos, forcedExitNanos }) => {
  const killNanos = process.hrtime.bigint() + forcedExitNanos
  // What the margins of the lease leave for a main thread that comes to itself in between.
  const latestNanos = killNanos + abandonAfterNanos
  return { firing, killNanos, latestNanos, answered: false, exiting: false }
}

/**
 * @param {End} ending
 * @param {bigint} nanos
 */
const later = (ending, nanos) => {
  const killNanos = process.hrtime.bigint() + nanos
  return killNanos < ending.latestNanos ? killNanos : ending.latestNanos
}

const receive = () => {
  for (;;) {
    /** @type {{ message: import("./memory.js").ToThread } | undefined} */
    const received = receiveMessageOnPort(port)
    if (received === undefined) return
    const { message } = received
    if (message.tell === "arm") {
      orders = message.orders
      judge = makeJudge(orders)
    } else if (message.tell === "name") {
      names[message.slot] = message.name
    } else if (orders !== undefined) {
      end ??= fire(message.firing, orders)
      if (end.answered) continue
      // It can stop in order, and a main of ours exits by itself, with a code that says more than a
      // signal: it comes first by two polls.
      const killNanos = later(end, orders.forcedExitNanos + 2n * orders.pollNanos)
      end = { ...end, killNanos, answered: true }
    }
  }
}

/** @param {import("./memory.js").Orders} orders */
const look = (orders) => {
  const nowNanos = process.hrtime.bigint()
  const uptimeNanos = BigInt(Math.round(uptime() * 1000)) * 1_000_000n
  const slots = Atomics.load(control, Control.slots)
  const verdict = judge?.(deadlines, slots, nowNanos, uptimeNanos)
  if (verdict === undefined) return
  // Its name was posted before the deadline was written, perhaps since the messages were taken.
  receive()
  if (end !== undefined) return
  const { reason, slot } = verdict
  const firing = { reason, subject: reason === "actor" ? names[slot] : undefined }
  end = fire(firing, orders)
  log("executor_watchdog", firing)
  port.postMessage({ tell: "fired", firing })
}

/** @param {import("./memory.js").Orders} orders */
const round = (orders) => {
  const pollMillis = Number(orders.pollNanos) / 1e6
  if (end === undefined) look(orders)
  if (end === undefined) return pollMillis
  if (process.hrtime.bigint() >= end.killNanos) {
    // The handlers of an exit, and what Node does then, take their time on a busy machine.
    if (end.exiting || Atomics.load(control, Control.exiting) === 0) kill(end)
    end = { ...end, killNanos: later(end, orders.forcedExitNanos), exiting: true }
  }
  const leftMillis = Number(end.killNanos - process.hrtime.bigint()) / 1e6
  return Math.max(1, Math.min(pollMillis, leftMillis))
}

port.postMessage({ tell: "ready" })
while (Atomics.load(control, Control.stop) === 0) {
  const woken = Atomics.load(control, Control.wake)
  receive()
  const pauseMillis = orders === undefined ? 1000 : round(orders)
  Atomics.add(control, Control.beat, 1)
  Atomics.wait(control, Control.wake, woken, pauseMillis)
}
