// @ts-check
/**
 * What the main thread and the watchdog's thread share. Plain JavaScript, as everything that the
 * thread loads: it is there in 40 ms and with 10 MB, and would need more of both with a loader.
 *
 * Deadlines are nanoseconds of `process.hrtime`, which is one clock in all threads of a process; 0
 * says that nothing is owed. Names and reasons are too long for this and are posted as messages,
 * which the thread takes without an event loop.
 */

/** One deadline each; behind them one for every actor. */
export const Slot = {
  /** Of the main thread: its last beat and the watchdog's time. */
  main: 0,
  /** The end of the trust window on the monotonic clock, */
  lease: 1,
  /** and on the uptime, which goes on while the machine is suspended. */
  uptime: 2,
  actors: 3
}

/** More share the last slot: the earliest deadline of them stands in it. */
export const slotsMax = 1024

export const Control = {
  /** Changes when the thread has something to look at. */
  wake: 0,
  /** 1: the thread ends and kills nobody. */
  stop: 1,
  /** Moves with each of the thread's rounds. */
  beat: 2,
  /** How many slots are in use. */
  slots: 3,
  /** 1: the main thread is on its way out, with a code of its own. */
  exiting: 4
}
export const controls = 5

/**
 * @typedef {object} Orders
 * @property {string} executorId
 * @property {bigint} watchdogNanos
 * @property {bigint} pollNanos
 * @property {bigint} forcedExitNanos
 * @property {bigint} abandonAfterNanos
 */

/**
 * @typedef {object} Firing
 * @property {import("../executor/WatchdogFired.js").WatchdogReason} reason
 * @property {string | undefined} subject
 */

/**
 * What is told to the thread: whom it watches, what stands in a slot, and that the main thread knows
 * of a reason to end, be it its own or the thread's.
 *
 * @typedef {{ tell: "arm", orders: Orders }
 *   | { tell: "name", slot: number, name: string }
 *   | { tell: "firing", firing: Firing }} ToThread
 */

/** @typedef {{ tell: "ready" } | { tell: "fired", firing: Firing }} FromThread */
