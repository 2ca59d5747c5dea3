/**
 * When a schedule is due: its slots, as milliseconds of the epoch. Pure, and without a clock: "now" is an
 * argument, and comes from the database.
 *
 *   cron    the instants at which the clock on a wall in the time zone shows a matching time
 *   every   anchor + n x interval, in elapsed time
 *   at      one instant
 *
 * Slots are found from the definition alone, so that all executors name the same ones.
 *
 * When a zone's clock is moved, a cron expression means
 *
 *   D1. with every hour (`0 * * * *`): each instant at which the clock shows a matching time. A time that is
 *       skipped does not come, one that is repeated comes twice: every hour stays every hour.
 *   D2. with certain hours (`30 2 * * *`): each matching time of the calendar once. One that is skipped
 *       fires at the moment at which the clock jumps over it, several such together once; of a repeated one
 *       the first fires.
 *
 * Effect's `Cron` does the calendar, on wall time taken for UTC; the way from wall time to instants is
 * here. Given the zone, `Cron` fires a skipped 02:30 at 03:30, so that where half an hour is skipped a
 * `15 * * * *` fires at :45; and for a repeated hour it has one policy for both kinds of expression.
 */
import { Cron, DateTime, Duration, Option, Result } from "effect"

export interface Calendar {
  /** In one form, to be compared and read back by `parse`. */
  readonly definition: string
  /** The first slot at or after an instant, if there is one. */
  readonly atOrAfter: (millis: number) => number | undefined
}

const hourMillis = 3_600_000
const dayMillis = 24 * hourMillis

/** Shorter ones are work for a loop in a handler. */
const everyMinMillis = 1000

export const cron = (
  expression: string,
  timeZone: DateTime.TimeZone | string = "UTC"
): Result.Result<Calendar, string> => {
  const fields = expression.trim().split(/\s+/).join(" ")
  // As it is written: what it is an alias of depends on the release of Node.
  const zoneName = typeof timeZone === "string" ? timeZone.trim() : DateTime.zoneToString(timeZone)
  const zone =
    typeof timeZone === "string" ? DateTime.zoneFromString(zoneName) : Option.some(timeZone)
  if (Option.isNone(zone)) {
    return Result.fail(`there is no time zone ${JSON.stringify(zoneName)}`)
  }
  return Result.match(Cron.parse(fields, "UTC"), {
    onFailure: ({ input, message }) =>
      Result.fail(
        `${JSON.stringify(fields)} is no cron expression: ${message.charAt(0).toLowerCase()}${message.slice(1)}` +
          (input === undefined || input === fields ? "" : `, not ${JSON.stringify(input)}`)
      ),
    onSuccess: (parsed): Result.Result<Calendar, string> => {
      const calendar: Calendar = {
        definition: `cron ${fields} ${zoneName}`,
        atOrAfter: wallClock(parsed, makeZone(zone.value))
      }
      return calendar.atOrAfter(0) === undefined
        ? Result.fail(`the cron expression ${JSON.stringify(fields)} never comes true`)
        : Result.succeed(calendar)
    }
  })
}

export const every = (
  interval: Duration.Input,
  anchorMillis: number = 0
): Result.Result<Calendar, string> => {
  const millis = Option.match(Duration.fromInput(interval), {
    onNone: () => Number.NaN,
    onSome: Duration.toMillis
  })
  if (!Number.isSafeInteger(millis) || millis < everyMinMillis) {
    return Result.fail("an interval is a whole number of milliseconds, one second or more")
  }
  if (!isInstant(anchorMillis)) return Result.fail("the anchor of an interval is an instant")
  const from = anchorMillis === 0 ? "" : ` from ${iso(anchorMillis)}`
  return Result.succeed({
    definition: `every ${millis / 1000} s${from}`,
    atOrAfter: (at) => anchorMillis + Math.ceil((at - anchorMillis) / millis) * millis
  })
}

export const once = (atMillis: number): Result.Result<Calendar, string> =>
  isInstant(atMillis)
    ? Result.succeed({
        definition: `at ${iso(atMillis)}`,
        atOrAfter: (from) => (from <= atMillis ? atMillis : undefined)
      })
    : Result.fail("the time of a schedule is an instant")

/** What a definition stands for. */
export const parse = (definition: string): Result.Result<Calendar, string> => {
  const [kind, rest = ""] = splitOnce(definition)
  if (kind === "cron") {
    const at = rest.lastIndexOf(" ")
    return cron(rest.slice(0, at), rest.slice(at + 1))
  }
  if (kind === "every") {
    const [, seconds, from] = /^([0-9.]+) s(?: from (\S+))?$/.exec(rest) ?? []
    if (seconds !== undefined) {
      return every(Math.round(Number(seconds) * 1000), from === undefined ? 0 : millisOf(from))
    }
  }
  if (kind === "at") return once(millisOf(rest))
  return Result.fail(`this version does not know schedules like ${JSON.stringify(definition)}`)
}

/** The slots from an instant on and before another, in order, `slotsMax` at most. */
export const slotsFrom = (
  { atOrAfter }: Calendar,
  fromMillis: number,
  untilMillis: number,
  slotsMax: number
): ReadonlyArray<number> => {
  const slots: Array<number> = []
  let slot = atOrAfter(fromMillis)
  while (slot !== undefined && slot < untilMillis && slots.length < slotsMax) {
    slots.push(slot)
    slot = atOrAfter(slot + 1)
  }
  return slots
}

/** The same, but the latest of them when there are more. */
export const latestSlots = (
  calendar: Calendar,
  fromMillis: number,
  untilMillis: number,
  slotsMax: number
): ReadonlyArray<number> => {
  const slots: Array<number> = []
  let until = untilMillis
  let guess = hourMillis
  while (slots.length < slotsMax) {
    const slot = latestSlot(calendar, fromMillis, until, guess)
    if (slot === undefined) break
    slots.push(slot)
    guess = Math.max(1, until - slot)
    until = slot
  }
  return slots.reverse()
}

/**
 * Looks back as far as the last pause between slots, then twice as far, and so on; then halves what is
 * left, since there may be many more slots than anybody wants to walk along.
 */
const latestSlot = (
  { atOrAfter }: Calendar,
  fromMillis: number,
  untilMillis: number,
  guessMillis: number
): number | undefined => {
  const before = (millis: number) => {
    const slot = atOrAfter(millis)
    return slot !== undefined && slot < untilMillis ? slot : undefined
  }
  let back = guessMillis
  let slot: number | undefined
  while (slot === undefined) {
    const start = Math.max(fromMillis, untilMillis - back)
    if (start >= untilMillis) return undefined
    slot = before(start)
    if (slot === undefined && start === fromMillis) return undefined
    back *= 2
  }
  let empty = untilMillis
  for (;;) {
    const next = before(slot + 1)
    if (next === undefined) return slot
    slot = next
    const middle = Math.ceil((slot + empty) / 2)
    const later = before(middle)
    if (later === undefined) empty = middle
    else slot = later
  }
}

/** What an executor knows of a schedule that may be due. Instants are milliseconds of the epoch. */
export interface Standing {
  /** Undefined: no slot is left. */
  readonly next: number | undefined
  readonly last: number | undefined
  /** Slots before it passed while the schedule was paused. */
  readonly resumed: number | undefined
  readonly now: number
}

/** Which slots are fired that nobody has fired in time. */
export type CatchUp = "none" | "last" | "all"

/** A slot found later than this was missed: it waited for somebody, as a take-over does, and nobody came. */
const onTimeMillis = 60_000

/** Of more missed slots only the latest are made up. */
export const catchUpMax = 1000

export interface Due {
  /** To be fired, in order. */
  readonly slots: ReadonlyArray<number>
  /** The first slot after them, and after those that are given up. */
  readonly next: number | undefined
}

/** What is to be done, or nothing when nothing is due. `slotsMax` at a time; what is left is due at once. */
export const due = (
  calendar: Calendar,
  { next, now, resumed }: Standing,
  catchUp: CatchUp,
  slotsMax: number
): Due | undefined => {
  if (next === undefined || next > now) return undefined
  const from = Math.max(next, resumed ?? next, catchUp === "none" ? now - onTimeMillis : next)
  const found = latestSlots(calendar, from, now + 1, catchUp === "all" ? catchUpMax : 1)
  // The row's own slot is one, even if whoever wrote it has other rules for the time zone.
  const missed = found.length === 0 && from === next ? [next] : found
  const slots = missed.slice(0, slotsMax)
  const rest = missed[slotsMax]
  return { slots, next: rest ?? calendar.atOrAfter(now + 1) }
}

/**
 * The next slot of a schedule that is registered, by what its row says, or of a new one.
 *
 * What is overdue stays so, for `due` to decide about: a changed definition goes on where the old one stood.
 * What is to come is computed anew, because the rules of a time zone may have changed since; never a slot
 * up to the last one fired, even if the clock was set back.
 */
export const registered = (
  calendar: Calendar,
  row: (Standing & { readonly isSame: boolean }) | undefined,
  now: number
): number | undefined => {
  if (row === undefined) return calendar.atOrAfter(now + 1)
  const overdue = row.next !== undefined && row.next <= now
  if (overdue && row.isSame) return row.next
  return calendar.atOrAfter(
    Math.max(overdue ? row.next : now + 1, row.last === undefined ? -Infinity : row.last + 1)
  )
}

/** Offsets from UTC in milliseconds; a zone's clock is taken to be moved at most once a day. */
interface Zone {
  readonly offsetAt: (millis: number) => number
  /** The first instant of the new offset, if the clock is moved after an instant and within a day. */
  readonly nextMove: (millis: number) => number | undefined
  /** The same, looking back, the instant itself included. */
  readonly lastMove: (millis: number) => number | undefined
}

const makeZone = (zone: DateTime.TimeZone): Zone => {
  if (zone._tag === "Offset") {
    return {
      offsetAt: () => zone.offset,
      nextMove: () => undefined,
      lastMove: () => undefined
    }
  }
  const ask = (millis: number) =>
    DateTime.zonedOffset(DateTime.makeZonedUnsafe(millis, { timeZone: zone }))
  // An offset costs 10 us: of each day the one at its start is kept, and when it changes in the day.
  const starts = new Map<number, number>()
  const moves = new Map<number, number | undefined>()
  const startOf = (day: number) => {
    let offset = starts.get(day)
    if (offset === undefined) {
      if (starts.size >= daysKept) starts.clear()
      offset = ask(day * dayMillis)
      starts.set(day, offset)
    }
    return offset
  }
  const moveIn = (day: number) => {
    const before = startOf(day)
    if (before === startOf(day + 1)) return undefined
    if (!moves.has(day)) {
      let low = day * dayMillis
      let high = low + dayMillis
      while (high - low > 1) {
        const middle = Math.floor((low + high) / 2)
        if (ask(middle) === before) low = middle
        else high = middle
      }
      if (moves.size >= daysKept) moves.clear()
      moves.set(day, high)
    }
    return moves.get(day)
  }
  const dayOf = (millis: number) => Math.floor(millis / dayMillis)
  return {
    offsetAt: (millis) => {
      const day = dayOf(millis)
      const move = moveIn(day)
      return startOf(move === undefined || millis < move ? day : day + 1)
    },
    nextMove: (millis) =>
      [moveIn(dayOf(millis)), moveIn(dayOf(millis) + 1)].find(
        (move) => move !== undefined && move > millis && move <= millis + dayMillis
      ),
    lastMove: (millis) =>
      [moveIn(dayOf(millis)), moveIn(dayOf(millis) - 1)].find(
        (move) => move !== undefined && move <= millis && move > millis - dayMillis
      )
  }
}

const daysKept = 1000

/** Further ahead than any date comes true that ever does: 29 February on a given weekday. */
const turnsMax = 1000

/**
 * Walks from one move of the clock to the next. Between two of them wall time and instants differ by a
 * constant, so the first match in wall time is the first slot.
 */
const wallClock = (parsed: Cron.Cron, zone: Zone): ((millis: number) => number | undefined) => {
  const everyHour = parsed.hours.size === 0 || parsed.hours.size === 24
  const matchFrom = (wall: number): number | undefined => {
    try {
      return Cron.next(parsed, wall - 1).getTime()
    } catch {
      return undefined
    }
  }
  return (millis) => {
    let from = Math.ceil(millis)
    for (let turn = 0; turn < turnsMax; turn++) {
      const offset = zone.offsetAt(from)
      if (!everyHour) {
        const moved = zone.lastMove(from)
        const before = moved === undefined ? offset : zone.offsetAt(moved - 1)
        if (moved !== undefined && before < offset && from === moved) {
          const skipped = matchFrom(moved + before)
          if (skipped !== undefined && skipped < moved + offset) return moved
        }
        // The clock shows what it has shown before.
        if (moved !== undefined) from = Math.max(from, moved + before - offset)
      }
      const wall = matchFrom(from + offset)
      if (wall === undefined) return undefined
      const slot = wall - offset
      const move = zone.nextMove(from)
      if (move !== undefined && slot >= move) from = move
      else if (slot < from + dayMillis) return slot
      // Nothing matches until then, however the clock is moved meanwhile: by a day at most.
      else from = Math.max(from + dayMillis, slot - 2 * dayMillis)
    }
    return undefined
  }
}

const isInstant = (millis: number): boolean =>
  Number.isSafeInteger(millis) && Math.abs(millis) <= 8_640_000_000_000_000

const iso = (millis: number): string => DateTime.formatIso(DateTime.makeUnsafe(millis))

const millisOf = (text: string): number =>
  Option.match(DateTime.make(text), {
    onNone: () => Number.NaN,
    onSome: ({ epochMilliseconds }) => epochMilliseconds
  })

const splitOnce = (text: string): readonly [string, string] => {
  const at = text.indexOf(" ")
  return at < 0 ? [text, ""] : [text.slice(0, at), text.slice(at + 1)]
}
