/**
 * Keys that hold items back: debounce postpones and replaces, throttle takes no other. Decided in the
 * database, under the key's lock; here is only what a caller says.
 */
import { Duration } from "effect"

/**
 * The item waits for `delay`. Another one with the same key that comes while it waits replaces its payload
 * and options and puts it off again; all of these calls answer one id, whose outcome is that of the last
 * payload. What has become due is not touched any more: then a new item begins.
 */
export interface Debounce {
  readonly key: string
  readonly delay: Duration.Input
  /** Never put off for longer than this after the first call. Without it a constant stream postpones for ever. */
  readonly maxWait?: Duration.Input | undefined
}

/**
 * The first item is taken. Until `period` has passed since, whatever became of it, another one with the
 * same key is dropped and answers the id of the first.
 */
export interface Throttle {
  readonly key: string
  readonly period: Duration.Input
}

export interface Pace {
  readonly kind: "debounce" | "throttle"
  readonly key: string
  readonly millis: number
  readonly millisMax: number | null
}

/** Of one call. What contradicts itself is the caller's bug. */
export const paceOf = (
  options: {
    readonly debounce?: Debounce | undefined
    readonly throttle?: Throttle | undefined
    readonly delay?: unknown
    readonly group?: unknown
  },
  /** Also the definition's. */
  idempotencyKey: string | null
): Pace | null => {
  const { debounce, throttle } = options
  if (debounce === undefined && throttle === undefined) return null
  if (idempotencyKey !== null || options.group !== undefined) {
    throw new RangeError(
      "a debounced or throttled item has no idempotency key, and is no member of a group"
    )
  }
  if (debounce === undefined) return throttle === undefined ? null : ofThrottle(throttle)
  if (throttle !== undefined || options.delay !== undefined) {
    throw new RangeError("a debounced item has neither a throttle nor another delay")
  }
  return {
    kind: "debounce",
    key: checkKey(debounce.key),
    millis: checkTime(debounce.delay),
    millisMax: debounce.maxWait === undefined ? null : checkTime(debounce.maxWait)
  }
}

const ofThrottle = (throttle: Throttle): Pace => ({
  kind: "throttle",
  key: checkKey(throttle.key),
  millis: checkTime(throttle.period),
  millisMax: null
})

const checkKey = (key: string): string => {
  if (key !== "") return key
  throw new RangeError("a key is not empty")
}

const checkTime = (input: Duration.Input): number => {
  const millis = Duration.toMillis(input)
  if (Number.isFinite(millis) && millis > 0) return millis
  throw new RangeError("a delay or a period is longer than nothing, and ends")
}
