/**
 * Real worker processes: started, signalled, waited for, and gone when the scope closes. What one says
 * and logs is kept, for conditions and for the report of a failure.
 */
import { Clock, Deferred, Effect, type Scope } from "effect"
import { spawn } from "node:child_process"
import { createInterface } from "node:readline"
import { fileURLToPath } from "node:url"
import { mark, type Orders, type Said } from "./Work.ts"

export interface Options extends Partial<Omit<Orders, "url" | "sink">> {
  readonly url?: string
  readonly node?: ReadonlyArray<string>
}

export interface Ended {
  readonly code: number | null
  readonly signal: NodeJS.Signals | null
}

export interface Worker {
  readonly name: string
  readonly pid: number
  readonly said: () => ReadonlyArray<Said>
  /** Everything it has written, said or logged. */
  readonly output: () => ReadonlyArray<string>
  readonly logs: (message: string) => ReadonlyArray<string>
  readonly signal: (signal: NodeJS.Signals) => Effect.Effect<void>
  readonly ended: Effect.Effect<Ended>
  readonly hasEnded: () => boolean
  /** The executor of its last registration, when there was one. */
  readonly executor: () => string | undefined
}

const main = fileURLToPath(new URL("worker-main.ts", import.meta.url))
// A third less processor time for each start.
const compileCache = fileURLToPath(
  new URL("../../../node_modules/.cache/tenure-faults", import.meta.url)
)

export const start = Effect.fnUntraced(function* (
  name: string,
  orders: Orders,
  node: ReadonlyArray<string> = []
): Effect.fn.Return<Worker, never, Scope.Scope> {
  const clock = yield* Clock.Clock
  const startedNanos = clock.monotonicTimeNanosUnsafe()
  const said: Array<Said> = []
  const output: Array<string> = []
  const ended = yield* Deferred.make<Ended>()
  let hasEnded = false

  const stamp = () => `${(clock.monotonicTimeNanosUnsafe() - startedNanos) / 1_000_000n} ms`
  const child = yield* Effect.acquireRelease(
    Effect.sync(() => {
      const process_ = spawn(process.execPath, [...node, main, JSON.stringify(orders)], {
        stdio: ["ignore", "pipe", "pipe"],
        env: { ...process.env, NODE_COMPILE_CACHE: compileCache }
      })
      createInterface({ input: process_.stdout }).on("line", (line) => {
        output.push(`${stamp()} ${line}`)
        if (line.startsWith(mark)) said.push(JSON.parse(line.slice(mark.length)) as Said)
      })
      createInterface({ input: process_.stderr }).on("line", (line) => {
        output.push(`${stamp()} ${line}`)
      })
      // `close`, not `exit`: by then all it has said is read.
      process_.on("close", (code, signal) => {
        hasEnded = true
        output.push(`${stamp()} ended with ${code ?? signal}`)
        Deferred.doneUnsafe(ended, Effect.succeed({ code, signal }))
      })
      return process_
    }),
    // It may be stopped, and only this signal ends it then.
    (process_) =>
      Effect.suspend(() => {
        if (!hasEnded) process_.kill("SIGKILL")
        return Deferred.await(ended)
      })
  )
  return {
    name,
    pid: child.pid ?? 0,
    said: () => said,
    output: () => output,
    logs: (message) => output.filter((line) => line.includes(`"message":"${message}`)),
    signal: (signal) => Effect.sync(() => void child.kill(signal)),
    ended: Deferred.await(ended),
    hasEnded: () => hasEnded,
    executor: () => said.findLast((one) => one.say === "ready")?.executor
  }
})
