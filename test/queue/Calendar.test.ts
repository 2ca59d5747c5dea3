/**
 * Goal: slots are a function of the definition alone, strictly increasing, and what happens to them when
 * a zone's clock is moved is as stated (D1, D2). What was missed is made up as the policy says, and no
 * order of executors fires a slot twice, or leaves one out.
 * Method: tables of known moves, half an hour and at midnight too; and an oracle that walks in small
 * steps and looks at the clock on the wall, against generated expressions, zones and moves.
 */
import { assert, describe, it } from "@effect/vitest"
import { Cron, DateTime, Effect, Option, Result, Schema } from "effect"
import * as Calendar from "../../src/queue/Calendar.ts"

const minute = 60_000
const hour = 60 * minute

const at = (text: string): number => Option.getOrThrow(DateTime.make(text)).epochMilliseconds

const cron = (expression: string, timeZone = "UTC") =>
  Result.getOrThrow(Calendar.cron(expression, timeZone))

/** The slots between two instants, as minutes of UTC. */
const slots = (calendar: Calendar.Calendar, from: string, until: string): ReadonlyArray<string> =>
  Calendar.slotsFrom(calendar, at(from), at(until), 1000).map((slot) =>
    DateTime.formatIso(DateTime.makeUnsafe(slot)).slice(5, 16)
  )

// [zone, expression, from, until, slots]
const tables: Readonly<
  Record<string, ReadonlyArray<readonly [string, string, string, string, ReadonlyArray<string>]>>
> = {
  "a time that is skipped fires at the moment of the jump": [
    [
      "Europe/Berlin",
      "30 2 * * *",
      "2026-03-28T00:00Z",
      "2026-03-31T00:00Z",
      ["03-28T01:30", "03-29T01:00", "03-30T00:30"]
    ],
    [
      "America/New_York",
      "30 2 * * *",
      "2026-03-07T12:00Z",
      "2026-03-10T00:00Z",
      ["03-08T07:00", "03-09T06:30"]
    ],
    [
      "Australia/Lord_Howe",
      "15 2 * * *",
      "2026-10-02T00:00Z",
      "2026-10-05T00:00Z",
      ["10-02T15:45", "10-03T15:30", "10-04T15:15"]
    ],
    // Midnight itself does not come.
    [
      "America/Santiago",
      "0 0 * * *",
      "2026-09-05T00:00Z",
      "2026-09-08T00:00Z",
      ["09-05T04:00", "09-06T04:00", "09-07T03:00"]
    ],
    // Neither does a whole day.
    ["Pacific/Apia", "0 12 30 12 *", "2011-12-01T00:00Z", "2012-12-01T00:00Z", ["12-30T10:00"]]
  ],
  "several times that are skipped fire once": [
    [
      "Europe/Berlin",
      "*/20 1-3 * * *",
      "2026-03-28T23:30Z",
      "2026-03-29T12:00Z",
      ["03-29T00:00", "03-29T00:20", "03-29T00:40", "03-29T01:00", "03-29T01:20", "03-29T01:40"]
    ],
    ["Europe/Berlin", "0 2,3 * * *", "2026-03-29T00:00Z", "2026-03-29T12:00Z", ["03-29T01:00"]]
  ],
  "a time that is repeated fires at the first": [
    [
      "Europe/Berlin",
      "30 2 * * *",
      "2026-10-24T00:00Z",
      "2026-10-27T00:00Z",
      ["10-24T00:30", "10-25T00:30", "10-26T01:30"]
    ],
    [
      "America/New_York",
      "30 1 * * *",
      "2026-11-01T00:00Z",
      "2026-11-03T00:00Z",
      ["11-01T05:30", "11-02T06:30"]
    ],
    [
      "Australia/Lord_Howe",
      "45 1 * * *",
      "2026-04-03T15:00Z",
      "2026-04-06T00:00Z",
      ["04-04T14:45", "04-05T15:15"]
    ],
    // From inside the second time: what comes next is after it.
    ["Europe/Berlin", "*/20 2 * * *", "2026-10-25T01:10Z", "2026-10-26T01:10Z", ["10-26T01:00"]]
  ],
  "with every hour, each hour that passes has its slot": [
    [
      "Europe/Berlin",
      "0 * * * *",
      "2026-03-28T23:30Z",
      "2026-03-29T03:30Z",
      ["03-29T00:00", "03-29T01:00", "03-29T02:00", "03-29T03:00"]
    ],
    [
      "Europe/Berlin",
      "0 * * * *",
      "2026-10-24T22:30Z",
      "2026-10-25T03:30Z",
      ["10-24T23:00", "10-25T00:00", "10-25T01:00", "10-25T02:00", "10-25T03:00"]
    ],
    [
      "America/New_York",
      "30 0-23 * * *",
      "2026-11-01T04:00Z",
      "2026-11-01T08:00Z",
      ["11-01T04:30", "11-01T05:30", "11-01T06:30", "11-01T07:30"]
    ]
  ],
  "with every hour, the clock on the wall shows the minute of the expression": [
    // 02:15 does not come.
    [
      "Australia/Lord_Howe",
      "15 * * * *",
      "2026-10-03T14:00Z",
      "2026-10-03T17:00Z",
      ["10-03T14:45", "10-03T16:15"]
    ],
    // 01:45 comes twice, half an hour apart.
    [
      "Australia/Lord_Howe",
      "45 * * * *",
      "2026-04-04T14:00Z",
      "2026-04-04T17:00Z",
      ["04-04T14:45", "04-04T15:15", "04-04T16:15"]
    ]
  ],
  "a zone that is no longer moved has the same hours all the year": [
    [
      "Europe/Istanbul",
      "0 3 * * *",
      "2026-03-28T00:00Z",
      "2026-03-31T00:00Z",
      ["03-28T00:00", "03-29T00:00", "03-30T00:00"]
    ],
    [
      "Europe/Istanbul",
      "0 3 25 10 *",
      "2026-01-01T00:00Z",
      "2028-01-01T00:00Z",
      ["10-25T00:00", "10-25T00:00"]
    ],
    // In 2015 it still was, on a day of its own.
    [
      "Europe/Istanbul",
      "0 3 * * *",
      "2015-11-06T00:00Z",
      "2015-11-10T00:00Z",
      ["11-06T00:00", "11-07T00:00", "11-08T00:00", "11-09T01:00"]
    ]
  ]
}

describe("a cron expression, when a zone's clock is moved:", () => {
  for (const [rule, rows] of Object.entries(tables)) {
    it(rule, () => {
      for (const [zone, expression, from, until, expected] of rows) {
        assert.deepStrictEqual(
          slots(cron(expression, zone), from, until),
          expected,
          `${expression} ${zone}`
        )
      }
    })
  }

  it("is not left to Cron with a zone, which has other rules", () => {
    const next = (expression: string, zone: string, from: string) =>
      Cron.next(Cron.parseUnsafe(expression, zone), from).toISOString()
    assert.strictEqual(
      next("30 2 * * *", "Europe/Berlin", "2026-03-28T12:00Z"),
      "2026-03-29T01:30:00.000Z",
      "an hour after the jump"
    )
    assert.strictEqual(
      next("15 * * * *", "Australia/Lord_Howe", "2026-10-03T15:00Z"),
      "2026-10-03T15:45:00.000Z",
      "at 02:45"
    )
    assert.strictEqual(
      next("0 * * * *", "Europe/Berlin", "2026-10-25T00:00Z"),
      "2026-10-25T02:00:00.000Z",
      "two hours later"
    )
  })
})

/** Of the oracle: all generated expressions and all moves are multiples of it. */
const step = 5 * minute

/** From an instant before a move of the clock: 26 hours, in steps. */
const moves = [
  ["Europe/Berlin", "2026-03-29T01:00Z"],
  ["Europe/Berlin", "2026-10-25T01:00Z"],
  ["America/New_York", "2026-03-08T07:00Z"],
  ["America/New_York", "2026-11-01T06:00Z"],
  ["Australia/Lord_Howe", "2026-04-04T15:00Z"],
  ["Australia/Lord_Howe", "2026-10-03T15:30Z"],
  ["America/Santiago", "2026-09-06T04:00Z"],
  ["America/Santiago", "2026-04-05T03:00Z"],
  ["Antarctica/Casey", "2023-03-08T16:00Z"],
  ["Europe/Istanbul", "2026-03-29T01:00Z"],
  ["+05:45", "2026-03-29T01:00Z"]
] as const

const generated = {
  move: Schema.Literals(moves.map((_, index) => index)),
  beforeHours: Schema.Int.check(Schema.isBetween({ minimum: 0, maximum: 25 })),
  minutes: Schema.Literals(["0", "30", "*/15", "5,45", "55", "*/5", "0-20/10"]),
  hours: Schema.Literals(["*", "0-23", "2", "1-3", "0", "23", "*/2", "0,12", "1,2"]),
  days: Schema.Literals(["*", "1-15", "29", "8,25"]),
  weekdays: Schema.Literals(["*", "0", "1-5", "6,0"])
}

describe("the slots of a cron expression", () => {
  it.effect.prop(
    "are those of somebody who watches the clock on the wall, whatever is done to it",
    generated,
    ({ beforeHours, days, hours, minutes, move, weekdays }) =>
      Effect.sync(() => {
        const [zone, movedAt] = moves[move] ?? moves[0]
        const expression = `${minutes} ${hours} ${days} * ${weekdays}`
        const from = at(movedAt) - beforeHours * hour
        const until = from + 26 * hour
        const named = Option.getOrThrow(DateTime.zoneFromString(zone))
        const wallAt = (millis: number) =>
          millis + DateTime.zonedOffset(DateTime.makeZonedUnsafe(millis, { timeZone: named }))
        const parsed = Cron.parseUnsafe(expression, "UTC")
        const everyHour = hours === "*" || hours === "0-23"
        const expected: Array<number> = []
        let shown = -Infinity
        // What was shown a few hours before may be shown again.
        for (let millis = from - 4 * hour; millis < until; millis += step) {
          const wall = wallAt(millis)
          let matches = everyHour && Cron.match(parsed, wall)
          if (!everyHour && shown !== -Infinity) {
            for (let passed = shown + step; passed <= wall; passed += step) {
              matches ||= Cron.match(parsed, passed)
            }
          }
          shown = Math.max(shown, wall)
          if (matches && millis >= from) expected.push(millis)
        }
        assert.deepStrictEqual(
          Calendar.slotsFrom(cron(expression, zone), from, until, 10_000),
          expected,
          `${expression} ${zone} from ${from}`
        )
      }),
    { arbitrary: { runs: 40 } }
  )
})

const anyCalendar = Schema.Literals([
  "cron * * * * * Europe/Berlin",
  "cron */20 2 * * * Europe/Berlin",
  "cron 30 * * * * Australia/Lord_Howe",
  "cron 0 0 * * * America/Santiago",
  "cron */7 * * * * * UTC",
  "cron 0 12 1 1 * +03:00",
  "every 900 s",
  "every 7.5 s from 2026-10-25T00:00:01.000Z",
  "every 604800 s",
  "at 2026-10-25T01:00:00.000Z"
])
const anInstant = Schema.Int.check(
  Schema.isBetween({ minimum: at("2026-10-20T00:00Z"), maximum: at("2026-11-03T00:00Z") })
)
const parse = (definition: string) => Result.getOrThrow(Calendar.parse(definition))

describe("a calendar", () => {
  it.effect.prop(
    "has slots that only grow, and none between one and the next",
    {
      definition: anyCalendar,
      from: anInstant,
      share: Schema.Finite.check(Schema.isBetween({ minimum: 0, maximum: 1 }))
    },
    ({ definition, from, share }) =>
      Effect.sync(() => {
        const calendar = parse(definition)
        const slot = calendar.atOrAfter(from)
        if (slot === undefined) return
        assert.isAtLeast(slot, from)
        assert.strictEqual(calendar.atOrAfter(slot), slot)
        // Asked anywhere before it, it is the next one.
        assert.strictEqual(calendar.atOrAfter(Math.ceil(from + share * (slot - from))), slot)
        const next = calendar.atOrAfter(slot + 1)
        if (next !== undefined) assert.isAbove(next, slot)
      })
  )

  it.effect.prop(
    "finds the latest slots of a range, without walking along all of them",
    {
      definition: anyCalendar,
      from: anInstant,
      minutes: Schema.Int.check(Schema.isBetween({ minimum: 0, maximum: 300 })),
      max: Schema.Int.check(Schema.isBetween({ minimum: 1, maximum: 20 }))
    },
    ({ definition, from, max, minutes }) =>
      Effect.sync(() => {
        const calendar = parse(definition)
        const until = from + minutes * minute
        const all = Calendar.slotsFrom(calendar, from, until, 100_000)
        assert.deepStrictEqual(Calendar.latestSlots(calendar, from, until, max), all.slice(-max))
      }),
    { arbitrary: { runs: 40 } }
  )

  it("finds one among the last ten years of seconds", () => {
    assert.deepStrictEqual(
      Calendar.latestSlots(
        cron("* * * * 1-10 *"),
        at("2016-01-01T00:00Z"),
        at("2026-12-31T00:00Z"),
        1
      ),
      [at("2026-10-31T23:59:59Z")]
    )
  })

  it.effect.prop(
    "is read back from its definition",
    { definition: anyCalendar, from: anInstant },
    ({ definition, from }) =>
      Effect.sync(() => {
        const calendar = parse(definition)
        assert.strictEqual(calendar.definition, definition)
        assert.strictEqual(
          Result.getOrThrow(Calendar.parse(calendar.definition)).atOrAfter(from),
          calendar.atOrAfter(from)
        )
      })
  )

  it("is anchored: an interval has the same slots whenever somebody starts", () => {
    const quarter = Result.getOrThrow(Calendar.every("15 minutes"))
    assert.strictEqual(quarter.definition, "every 900 s")
    assert.deepStrictEqual(slots(quarter, "2026-11-30T09:07Z", "2026-11-30T09:40Z"), [
      "11-30T09:15",
      "11-30T09:30"
    ])
    const anchored = Result.getOrThrow(Calendar.every("1 day", at("2026-01-01T05:00Z")))
    assert.deepStrictEqual(slots(anchored, "2025-12-30T06:00Z", "2026-01-02T00:00Z"), [
      "12-31T05:00",
      "01-01T05:00"
    ])
  })

  it("refuses what is none, in a sentence", () => {
    const refusals: ReadonlyArray<readonly [Result.Result<unknown, string>, RegExp]> = [
      [
        Calendar.cron("61 * * * *"),
        /"61 \* \* \* \*" is no cron expression: .* between 0 and 59, not "61"/
      ],
      [Calendar.cron("0 3 * *"), /number of segments/],
      [Calendar.cron("0 3 * * *", "Mars/Olympus"), /there is no time zone "Mars\/Olympus"/],
      [Calendar.cron("0 0 30 2 *"), /never comes true/],
      [Calendar.every("500 millis"), /one second or more/],
      [Calendar.every("Infinity"), /one second or more/],
      [Calendar.once(Number.NaN), /an instant/],
      [Calendar.parse("every full moon"), /does not know schedules like "every full moon"/],
      [Calendar.parse("at noon"), /an instant/]
    ]
    for (const [refusal, sentence] of refusals) {
      assert.match(Result.getOrThrow(Result.flip(refusal)), sentence)
    }
  })
})

const hourly = cron("0 * * * *")
const eleven = at("2026-11-30T11:00Z")

describe("what is due", () => {
  const standing = (next: number, now: number) => ({
    next,
    now,
    last: undefined,
    resumed: undefined
  })

  it("is nothing before the slot, and the slot itself at its very time", () => {
    for (const policy of ["none", "last", "all"] as const) {
      assert.isUndefined(Calendar.due(hourly, standing(eleven, eleven - 1), policy, 100))
      assert.deepStrictEqual(Calendar.due(hourly, standing(eleven, eleven), policy, 100), {
        slots: [eleven],
        next: eleven + hour
      })
    }
  })

  it("of missed slots is the last, all of them, or none that is a minute late", () => {
    const late = standing(eleven, eleven + 3 * hour + 2 * minute)
    const next = eleven + 4 * hour
    assert.deepStrictEqual(Calendar.due(hourly, late, "last", 100), {
      slots: [eleven + 3 * hour],
      next
    })
    assert.deepStrictEqual(Calendar.due(hourly, late, "none", 100), { slots: [], next })
    const all = [0, 1, 2, 3].map((n) => eleven + n * hour)
    assert.deepStrictEqual(Calendar.due(hourly, late, "all", 100), { slots: all, next })
    // Some at a time; what is left is due at once.
    assert.deepStrictEqual(Calendar.due(hourly, late, "all", 3), {
      slots: all.slice(0, 3),
      next: all[3]
    })
    // A take-over is no miss.
    assert.deepStrictEqual(
      Calendar.due(hourly, standing(eleven, eleven + minute / 2), "none", 100)?.slots,
      [eleven]
    )
  })

  it("is the slot of the row, also for who has other rules for the time zone", () => {
    const written = eleven + 30 * minute
    for (const policy of ["none", "last", "all"] as const) {
      assert.deepStrictEqual(Calendar.due(hourly, standing(written, written + 5), policy, 100), {
        slots: [written],
        next: eleven + hour
      })
    }
  })

  it("is never more than the latest thousand", () => {
    const found = Calendar.due(hourly, standing(eleven - 5000 * hour, eleven), "all", 10_000)
    assert.strictEqual(found?.slots.length, Calendar.catchUpMax)
    assert.strictEqual(found?.slots.at(-1), eleven)
  })

  it("does not hold what passed during a pause", () => {
    const resumed = eleven + 90 * minute
    for (const policy of ["last", "all"] as const) {
      assert.deepStrictEqual(
        Calendar.due(hourly, { ...standing(eleven, resumed + 1), resumed }, policy, 100),
        { slots: [], next: eleven + 2 * hour }
      )
      assert.deepStrictEqual(
        Calendar.due(hourly, { ...standing(eleven, eleven + 2 * hour), resumed }, policy, 100)
          ?.slots,
        [eleven + 2 * hour]
      )
    }
  })
})

describe("a schedule that is registered", () => {
  const row = (
    next: number | undefined,
    last: number | undefined,
    now: number,
    isSame: boolean
  ) => ({
    next,
    last,
    now,
    resumed: undefined,
    isSame
  })
  const half = cron("30 * * * *")

  it("begins with the first slot to come, and goes on with what is overdue", () => {
    assert.strictEqual(Calendar.registered(hourly, undefined, eleven), eleven + hour)
    const now = eleven + 5 * minute
    assert.strictEqual(
      Calendar.registered(hourly, row(eleven, eleven - hour, now, true), now),
      eleven
    )
    // In another form: from where the old one stood.
    assert.strictEqual(
      Calendar.registered(half, row(eleven, eleven - hour, now + hour, false), now + hour),
      eleven + 30 * minute
    )
    assert.strictEqual(
      Calendar.registered(half, row(eleven + hour, eleven, now, false), now),
      eleven + 30 * minute
    )
  })

  it("follows a change of its zone's rules, and never goes back to a slot that was fired", () => {
    // The row says an hour later than this process would.
    assert.strictEqual(
      Calendar.registered(
        hourly,
        row(eleven + 2 * hour, eleven, eleven + minute, true),
        eleven + minute
      ),
      eleven + hour
    )
    // The clock was set back by a day.
    const yesterday = eleven - 24 * hour
    assert.strictEqual(
      Calendar.registered(hourly, row(eleven + hour, eleven, yesterday, true), yesterday),
      eleven + hour
    )
    const single = Result.getOrThrow(Calendar.once(eleven))
    assert.isUndefined(
      Calendar.registered(single, row(undefined, eleven, yesterday, true), yesterday)
    )
    assert.strictEqual(Calendar.registered(single, undefined, yesterday), eleven)
    assert.isUndefined(Calendar.registered(single, undefined, eleven))
  })
})

/** What executors may do, in any order; the row lets a write through when what it has read still holds. */
const Command = Schema.Struct({
  executor: Schema.Literals([0, 1, 2]),
  does: Schema.Literals(["reads", "fires", "starts again"]),
  clockMoves: Schema.Literals([0, 0, 1, 20, 61, 300, -45, -200])
})

describe("any number of executors", () => {
  it.effect.prop(
    "in any order, with a clock that jumps both ways, fire no slot twice, and in order",
    {
      commands: Schema.Array(Command),
      policy: Schema.Literals(["none", "last", "all"]),
      definition: Schema.Literals(["every 900 s", "cron */10 * * * * Europe/Berlin"])
    },
    ({ commands, definition, policy }) =>
      Effect.sync(() => {
        const calendar = parse(definition)
        let now = eleven
        let next = Calendar.registered(calendar, undefined, now)
        let last: number | undefined
        const fired: Array<number> = []
        const first = next
        let onlyForward = true
        const seen: Array<Calendar.Standing | undefined> = [undefined, undefined, undefined]
        for (const { clockMoves, does, executor } of commands) {
          now += clockMoves * minute
          if (clockMoves < 0) onlyForward = false
          const standing = seen[executor]
          if (does === "reads" || standing === undefined) {
            seen[executor] = { next, last, resumed: undefined, now }
          } else if (does === "starts again") {
            const again = Calendar.registered(calendar, { ...standing, isSame: true }, standing.now)
            if (next === standing.next) next = again
          } else {
            const todo = Calendar.due(calendar, standing, policy, 5)
            const latest = todo?.slots.at(-1) ?? -Infinity
            if (todo === undefined || next !== standing.next || now < Math.max(latest, next ?? 0))
              continue
            fired.push(...todo.slots)
            last = todo.slots.at(-1) ?? last
            next = todo.next
          }
          assert.isTrue(next !== undefined && (last === undefined || next > last))
        }
        assert.deepStrictEqual(
          fired,
          [...new Set(fired)].sort((a, b) => a - b)
        )
        if (policy === "all" && onlyForward && first !== undefined && next !== undefined) {
          assert.deepStrictEqual(fired, Calendar.slotsFrom(calendar, first, next, 100_000))
        }
      }),
    { arbitrary: { runs: 150 } }
  )
})
