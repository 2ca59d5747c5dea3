/**
 * The handle of the watchdog's thread: starts it, writes what it reads, ends it.
 *
 * It costs 40 to 100 ms beside the registration, some 10 MB, and a thousandth of a core.
 */
import { Cause, Context, Deferred, Effect, type Scope } from "effect"
import { existsSync } from "node:fs"
import { fileURLToPath } from "node:url"
import { Worker } from "node:worker_threads"
import { summarize } from "../actor/Actor.ts"
import { abandonAfter } from "../database/Deadline.ts"
import { refuse, SettingsRejected, type StartupRefused } from "../database/StartupRefused.ts"
import { subjectOf } from "../executor/WatchdogFired.ts"
import {
  Control,
  controls,
  type Firing,
  type FromThread,
  type Orders,
  Slot,
  slotsMax,
  type ToThread
} from "./memory.js"

export interface Thread {
  /** From here on it judges. */
  readonly armUnsafe: (orders: Orders) => void
  /** A deadline for each name, and the ones that are not about an actor; 0 where nothing is owed. */
  readonly writeUnsafe: (owed: Owed) => void
  /** This process ends, and has its time from now on. */
  readonly firingUnsafe: (firing: Firing) => void
  /** From this side, when the thread is gone. A loop that is blocked by then would never come to it. */
  readonly killUnsafe: () => void
  /** Moves while the thread lives. */
  readonly beatUnsafe: () => number
  readonly ready: Effect.Effect<void, StartupRefused>
  /** Completes when the thread has found a reason to end the process. */
  readonly fired: Effect.Effect<Firing>
  /** Completes when the thread has ended before its scope, with why. */
  readonly gone: Effect.Effect<string>
}

export interface Owed {
  readonly mainNanos: bigint
  readonly leaseNanos: bigint
  readonly uptimeNanos: bigint
  readonly actors: Iterable<readonly [name: string, nanos: bigint]>
}

/** How one is started. Tests, whose process must not be killed, put `none` here. */
export const WatchdogThread = Context.Reference<Effect.Effect<Thread, StartupRefused, Scope.Scope>>(
  "tenure/watchdog/WatchdogThread",
  {
    defaultValue: () => start(() => new URL("./thread.js", import.meta.url))
  }
)

const readyWithin = "30 seconds"

/** `source` may throw: what a bundler makes of `import.meta.url` is no address of a file, perhaps. */
export const start = Effect.fnUntraced(function* (
  source: () => URL
): Effect.fn.Return<Thread, StartupRefused, Scope.Scope> {
  const control = new Int32Array(new SharedArrayBuffer(controls * 4))
  const deadlines = new BigInt64Array(new SharedArrayBuffer(slotsMax * 8))
  const ready = yield* Deferred.make<void, StartupRefused>()
  const fired = yield* Deferred.make<Firing>()
  const gone = yield* Deferred.make<string>()

  const worker = yield* Effect.acquireRelease(
    Effect.try({
      try: () => open(source(), { control, deadlines }),
      catch: (error) => rejected(lineOf(error))
    }),
    (worker) =>
      Effect.promise(() => {
        // Before anything is awaited: from here on nobody is killed.
        Atomics.store(control, Control.stop, 1)
        return worker.terminate()
      }).pipe(abandonAfter("1 second"), Effect.ignore)
  )
  const onExit = () => void Atomics.store(control, Control.exiting, 1)
  yield* Effect.acquireRelease(
    Effect.sync(() => process.once("exit", onExit)),
    () => Effect.sync(() => process.off("exit", onExit))
  )
  worker.on("message", (message: FromThread) => {
    if (message.tell === "ready") Deferred.doneUnsafe(ready, Effect.void)
    else Deferred.doneUnsafe(fired, Effect.succeed(message.firing))
  })
  const ended = (why: string) => {
    Deferred.doneUnsafe(ready, Effect.fail(rejected(why)))
    if (Atomics.load(control, Control.stop) === 0) Deferred.doneUnsafe(gone, Effect.succeed(why))
  }
  worker.on("error", (error) => ended(lineOf(error)))
  worker.on("exit", (code) => ended(`it ended with ${code}`))

  const slots = new Map<string, number>()
  const owed = new BigInt64Array(slotsMax)
  const post = (message: ToThread) => {
    worker.postMessage(message)
    Atomics.add(control, Control.wake, 1)
    Atomics.notify(control, Control.wake)
  }
  const slotOf = (name: string): number => {
    const known = slots.get(name)
    if (known !== undefined) return known
    const slot = Math.min(Slot.actors + slots.size, slotsMax - 1)
    slots.set(name, slot)
    // Posted before the deadline is written, so that the thread can name what it finds.
    worker.postMessage({ tell: "name", slot, name: subjectOf(name) } satisfies ToThread)
    return slot
  }

  return {
    armUnsafe: (orders) => post({ tell: "arm", orders }),
    writeUnsafe: ({ actors, leaseNanos, mainNanos, uptimeNanos }) => {
      owed.fill(0n)
      owed[Slot.main] = mainNanos
      owed[Slot.lease] = leaseNanos
      owed[Slot.uptime] = uptimeNanos
      for (const [name, nanos] of actors) {
        const slot = slotOf(name)
        const other = owed[slot] ?? 0n
        if (other === 0n || nanos < other) owed[slot] = nanos
      }
      const used = Math.min(Slot.actors + slots.size, slotsMax)
      for (let slot = 0; slot < used; slot++) Atomics.store(deadlines, slot, owed[slot] ?? 0n)
      Atomics.store(control, Control.slots, used)
    },
    firingUnsafe: (firing) => post({ tell: "firing", firing }),
    killUnsafe: () => {
      process.kill(process.pid, "SIGKILL")
      // As process 1 of a container, which gets no signal of its own making.
      process.abort()
    },
    beatUnsafe: () => Atomics.load(control, Control.beat),
    ready: Effect.timeoutOrElse(Deferred.await(ready), {
      duration: readyWithin,
      orElse: () => Effect.fail(rejected(`it is not there after ${readyWithin}`))
    }),
    fired: Deferred.await(fired),
    gone: Deferred.await(gone)
  }
})

const open = (source: URL, workerData: object): Worker => {
  // A worker reports a missing file when it is on its way already, and so would the registration be.
  const path = fileURLToPath(source)
  if (!existsSync(path)) throw new Error(`there is no file ${path}`)
  // A pipe that nobody reads would stop a thread that writes into it, the watchdog's as well. With its
  // stream made, Node has set it so that the write fails instead.
  void process.stderr
  const worker = new Worker(source, {
    name: "tenure watchdog",
    workerData,
    // What the process was started with, a loader say, is of no use there and takes time.
    env: {},
    execArgv: [],
    resourceLimits: { maxOldGenerationSizeMb: 16, maxYoungGenerationSizeMb: 2, stackSizeMb: 1 }
  })
  // A process that has nothing else to do ends.
  worker.unref()
  return worker
}

const lineOf = (error: unknown): string => summarize(Cause.die(error))

const rejected = (why: string): StartupRefused =>
  refuse(
    new SettingsRejected({
      rule:
        `the watchdog's thread cannot run (${why}); ` +
        "where the program is bundled, leave the package tenure out of the bundle, as an external one",
      settings: []
    })
  )

/** No thread: nothing is judged and nobody is killed. */
export const none: Effect.Effect<Thread> = Effect.sync(() => {
  let beat = 0
  return {
    armUnsafe: () => {},
    writeUnsafe: () => {},
    firingUnsafe: () => {},
    killUnsafe: () => {},
    beatUnsafe: () => beat++,
    ready: Effect.void,
    fired: Effect.never,
    gone: Effect.never
  }
})
