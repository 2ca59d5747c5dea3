/**
 * What an actor should do, without fibers: a clock, a mailbox and a few times. Every time of a
 * command is a multiple of 50, and every deadline is not, so that no two events fall together.
 */
import { Arbitrary, Schema } from "effect"

export const cadenceMillis = 1000
export const firstMillis = 200
export const backoffMaxMillis = 700
export const failuresMax = 3
/** Both are told to the actor, so that jitter has one value. */
export const random = 0.5

const ordinary = [
  "start",
  "wake",
  "ask",
  "ask for 37 ms",
  "ask for 437 ms",
  "abort the oldest ask",
  "abort the newest ask",
  "step succeeds",
  "step fails",
  "step fails for good",
  "step dies",
  "step interrupts itself",
  "50 ms pass",
  "150 ms pass",
  "1000 ms pass"
] as const

const stops = ["stop", "stop within 21 ms", "stop within 221 ms"] as const

export type Command = (typeof ordinary)[number] | (typeof stops)[number]

// The rare half of the commands ends most runs early, so the others come more often.
const frequent = ["step fails", "step succeeds", "wake", "50 ms pass", "150 ms pass"]

const oneOf = <A>(values: ReadonlyArray<A>): Arbitrary.Arbitrary<A> => {
  const index = Schema.Int.check(Schema.isBetween({ minimum: 0, maximum: values.length - 1 }))
  return Arbitrary.map(Arbitrary.schema(index), (at) => values[at] as A)
}

export const running: Arbitrary.Arbitrary<Command> = oneOf<Command>([
  ...ordinary,
  ...ordinary.filter((command) => frequent.includes(command)),
  ...ordinary.filter((command) => frequent.includes(command))
])
export const stopping: Arbitrary.Arbitrary<Command> = oneOf<Command>(stops)
export const any: Arbitrary.Arbitrary<Command> = oneOf<Command>([...ordinary, ...stops])

export type Settled = "Report" | "Failed" | "Died" | "Stopped" | "AskTimeout" | "Aborted"

interface Ask {
  settled: Settled | undefined
  deadlineAt: number
  served: boolean
}

export class ActorModel {
  now = 0
  lifecycle: "new" | "running" | "crashed" | "stopping" | "stopped" = "new"
  starts = 0
  steps = 0
  failures = 0
  inFlight = false
  readonly asks: Array<Ask> = []
  readonly stops: Array<{ returned: boolean; deadlineAt: number }> = []
  readonly uninterruptible: boolean
  #woken = false
  #streak = 0
  #dueAt = Number.POSITIVE_INFINITY
  #wakeableAt = Number.POSITIVE_INFINITY
  #interrupted = false

  constructor(uninterruptible: boolean) {
    this.uninterruptible = uninterruptible
  }

  get isClosed(): boolean {
    return this.lifecycle === "stopping" || this.lifecycle === "stopped"
  }

  get pending(): ReadonlyArray<Ask> {
    return this.asks.filter((ask) => ask.settled === undefined)
  }

  start() {
    if (this.lifecycle !== "new" && this.lifecycle !== "crashed") return
    this.lifecycle = "running"
    this.#streak = 0
    this.#dueAt = this.#wakeableAt = this.now
    this.#stepIfDue()
  }

  wake() {
    if (!this.isClosed) this.#woken = true
    this.#stepIfDue()
  }

  ask(deadlineMillis: number) {
    const settled = this.isClosed ? "Stopped" : undefined
    this.asks.push({ settled, deadlineAt: this.now + deadlineMillis, served: false })
    this.wake()
  }

  stop(withinMillis: number) {
    if (!this.isClosed) {
      this.lifecycle = this.inFlight ? "stopping" : "stopped"
      this.#settle(() => true, "Stopped")
    }
    this.stops.push({ returned: false, deadlineAt: this.now + withinMillis })
    this.#returnStops()
  }

  end(outcome: "Report" | "Failed" | "Failed for good" | "Died") {
    if (!this.inFlight) return
    this.inFlight = false
    if (this.lifecycle === "stopping") {
      this.lifecycle = "stopped"
      this.#returnStops()
      if (this.#interrupted) return
    }
    if (outcome === "Report") {
      this.steps++
      this.failures = this.#streak = 0
      this.#dueAt = this.now + cadenceMillis
      this.#wakeableAt = this.now
      this.#settle((ask) => ask.served, "Report")
    } else {
      this.failures++
      this.#streak++
      this.#settle((ask) => ask.served, outcome === "Died" ? "Died" : "Failed")
      const ceiling = Math.min(backoffMaxMillis, firstMillis * 2 ** this.#streak)
      this.#dueAt = this.now + firstMillis + random * (ceiling - firstMillis)
      this.#wakeableAt = this.now + firstMillis
      const isFatal = outcome !== "Failed" || this.#streak >= failuresMax
      if (isFatal && !this.isClosed) this.lifecycle = "crashed"
    }
    this.#stepIfDue()
  }

  pass(millis: number) {
    const until = this.now + millis
    for (let at = this.#nextEvent(); at <= until; at = this.#nextEvent()) {
      this.now = at
      this.#settle((ask) => ask.deadlineAt <= at, "AskTimeout")
      for (const stop of this.stops) {
        if (!stop.returned && stop.deadlineAt <= at) {
          stop.returned = this.#interrupted = true
          if (!this.uninterruptible) {
            this.lifecycle = "stopped"
            this.inFlight = false
          }
        }
      }
      this.#returnStops()
      this.#stepIfDue()
    }
    this.now = until
  }

  #nextEvent(): number {
    const isResting = this.lifecycle === "running" && !this.inFlight
    return Math.min(
      isResting ? this.#dueAt : Number.POSITIVE_INFINITY,
      isResting && this.#woken ? this.#wakeableAt : Number.POSITIVE_INFINITY,
      ...this.pending.map((ask) => ask.deadlineAt),
      ...this.stops.filter((stop) => !stop.returned).map((stop) => stop.deadlineAt)
    )
  }

  #stepIfDue() {
    if (this.lifecycle !== "running" || this.inFlight) return
    if (this.now < this.#dueAt && !(this.#woken && this.now >= this.#wakeableAt)) return
    this.inFlight = true
    this.#woken = false
    this.starts++
    for (const ask of this.pending) ask.served = true
  }

  #settle(which: (ask: Ask) => boolean, settled: Settled) {
    for (const ask of this.pending) if (which(ask)) ask.settled = settled
  }

  #returnStops() {
    if (this.lifecycle === "stopped") for (const stop of this.stops) stop.returned = true
  }
}
