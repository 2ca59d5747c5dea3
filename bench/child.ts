/**
 * The side of a benchmark's child process that all systems share. A worker first runs items of another
 * kind, because the compiler of a young process is not what is measured, and waits for the word; then
 * it tells the parent when its first handler started, how many have run, and what processor time that
 * took. Instants are monotonic, and on one machine comparable between processes.
 */

export interface Order {
  readonly _tag: "warm" | "cool" | "go" | "stop"
}

export type Message =
  | { readonly _tag: "ready" }
  | { readonly _tag: "first"; readonly atNanos: string }
  | { readonly _tag: "handled"; readonly count: number }
  /** Since the first handler started. */
  | { readonly _tag: "cpu"; readonly micros: number }
  | { readonly _tag: "done"; readonly millis: number }
  /** One item of a latency run: from the call to the handler, and from there to the caller. */
  | {
      readonly _tag: "latency"
      readonly startMillis: ReadonlyArray<number>
      readonly resultMillis: ReadonlyArray<number>
    }
  /** A step of an item has begun here. */
  | { readonly _tag: "began"; readonly item: string; readonly atNanos: string }
  /** From `warm` to `stop`. */
  | { readonly _tag: "used"; readonly rssBytes: number; readonly cpuMicros: number }

export interface Role {
  readonly role: string
  readonly url: string
  readonly items: number
  readonly warmUp: number
  readonly settings: Readonly<Record<string, string | number>>
}

export const role = (): Role => {
  const [name = "", url = "", items = "0", warmUp = "0", settings = "{}"] = process.argv.slice(2)
  return {
    role: name,
    url,
    items: Number(items),
    warmUp: Number(warmUp),
    settings: JSON.parse(settings) as Role["settings"]
  }
}

export const tell = (message: Message): void => {
  process.send?.(message)
}

export const tellBegan = (item: string): void =>
  tell({ _tag: "began", item, atNanos: String(nowNanos()) })

export const nowNanos = (): bigint => process.hrtime.bigint()

export const millisSince = (nanos: bigint): number => Number(nowNanos() - nanos) / 1e6

const given = new Set<Order["_tag"]>()
const observers = new Set<() => void>()

// From the start: an order that comes before anybody asks for it must not be lost.
process.on("message", ({ _tag }: Order) => {
  given.add(_tag)
  for (const observer of observers) observer()
})

export const order = (wanted: Order["_tag"]): Promise<void> =>
  new Promise((resolve) => {
    const look = () => {
      if (!given.has(wanted)) return
      observers.delete(look)
      resolve()
    }
    observers.add(look)
    look()
  })

/** To be called by the handler. Reports every 20 ms, and the processor time when the parent asks. */
export const counter = (): (() => void) => {
  let count = 0
  let reported = 0
  let before: NodeJS.CpuUsage | undefined
  setInterval(() => {
    if (count !== reported) tell({ _tag: "handled", count: (reported = count) })
  }, 20)
  void order("stop").then(() => {
    const used = process.cpuUsage(before)
    tell({ _tag: "cpu", micros: before === undefined ? 0 : used.user + used.system })
  })
  return () => {
    if (count++ > 0) return
    before = process.cpuUsage()
    tell({ _tag: "first", atNanos: String(nowNanos()) })
  }
}

/** Tells what this process has used between two words of the parent. */
export const tellUsed = async (): Promise<void> => {
  await order("warm")
  const before = process.cpuUsage()
  await order("stop")
  const { system, user } = process.cpuUsage(before)
  tell({ _tag: "used", rssBytes: process.memoryUsage.rss(), cpuMicros: system + user })
}

export const pause = (millis: number): Promise<void> =>
  new Promise((resolve) => {
    setTimeout(resolve, millis)
  })
