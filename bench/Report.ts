/**
 * What a benchmark says, and how it is printed: as one table, or as one JSON object a line.
 *
 * A rate is the median of several runs, and `spread` says how far that median may be off. A ratio
 * compares two runs that stood side by side, so the machine's moods fall out of it; one that does not
 * leave 1 by more than its own spread is printed as a tie.
 */

export interface Row {
  readonly workload: string
  readonly system: string
  readonly metric: string
  /** Absent where it cannot be measured here. */
  readonly value: number | undefined
  readonly spread?: number | undefined
  /** In place of a value: nobody waited any longer than this. */
  readonly moreThan?: number | undefined
  /** On a peer's row: how many times Tenure is ahead. Elsewhere the page of the benchmarks says of what. */
  readonly ratio?: Summary | undefined
  readonly goal?: Goal | undefined
}

/** What a row is to be at most, at least, or less than. */
export interface Goal {
  readonly of: "value" | "ratio"
  readonly is: "below" | "at most" | "at least"
  readonly limit: number
}

export interface Summary {
  readonly median: number
  /** Twice the standard error of the median; unknown after a single run. */
  readonly spread: number | undefined
}

/** What a benchmark uses to report; rows are printed when they are complete, in JSON at once. */
export interface Report {
  readonly quick: boolean
  /** Whether this part was asked for: all are, unless some were named. */
  readonly wants: (part: string) => boolean
  readonly row: (row: Row) => void
  readonly leftOut: (workload: string, why: string) => void
  /** What a reader of the rows has to know, on standard error. */
  readonly note: (line: string) => void
}

export const quantile = (values: ReadonlyArray<number>, share: number): number => {
  const sorted = [...values].sort((a, b) => a - b)
  const place = (sorted.length - 1) * share
  const below = sorted[Math.floor(place)] ?? Number.NaN
  const above = sorted[Math.ceil(place)] ?? Number.NaN
  return below + (above - below) * (place - Math.floor(place))
}

// From the quartiles, because a mean deviation would be made by the few worst moments: for a normal
// distribution they are 1.349 deviations apart, and a median's error is 1.253 deviations / sqrt(runs).
const errorsPerQuartiles = (2 * 1.253) / 1.349

export const summarize = (values: ReadonlyArray<number>): Summary => ({
  median: quantile(values, 0.5),
  spread:
    values.length < 2
      ? undefined
      : ((quantile(values, 0.75) - quantile(values, 0.25)) * errorsPerQuartiles) /
        Math.sqrt(values.length)
})

/** Whether the runs leave open who is ahead; a single one says nothing about that. */
export const isTie = (ratio: Summary): boolean =>
  ratio.spread !== undefined && Math.abs(ratio.median - 1) <= ratio.spread

/** Fixed digits for a reader, as many as the noise leaves meaningful. */
const format = (value: number): string =>
  value >= 1000
    ? Math.round(value).toLocaleString("en-US")
    : value >= 100
      ? value.toFixed(0)
      : value >= 10
        ? value.toFixed(1)
        : value.toFixed(2)

/** Unknown where what it is about could not be measured. */
const isMet = (row: Row, goal: Goal): boolean | undefined => {
  const measured = goal.of === "ratio" ? row.ratio?.median : (row.value ?? row.moreThan)
  if (measured === undefined) return undefined
  switch (goal.is) {
    case "below":
      return measured < goal.limit
    case "at most":
      return measured <= goal.limit
    case "at least":
      return measured >= goal.limit
  }
}

const columns = ["workload", "system", "metric", "value", "spread", "ratio", "goal"] as const

const cells = (row: Row): ReadonlyArray<string> => [
  row.workload,
  row.system,
  row.metric,
  row.value !== undefined
    ? format(row.value)
    : row.moreThan !== undefined
      ? `> ${format(row.moreThan)}`
      : "n/a",
  row.spread === undefined ? "" : `±${format(row.spread)}`,
  row.ratio === undefined ? "" : formatRatio(row.ratio),
  row.goal === undefined ? "" : formatGoal(row, row.goal)
]

const signs = { below: "<", "at most": "<=", "at least": ">=" } as const

const formatGoal = (row: Row, goal: Goal): string => {
  const met = isMet(row, goal)
  return (
    `${goal.of === "ratio" ? "ratio " : ""}${signs[goal.is]} ${format(goal.limit)}` +
    (met === undefined ? "" : met ? " met" : " missed")
  )
}

const formatRatio = (ratio: Summary): string =>
  ratio.median.toFixed(2) +
  (ratio.spread === undefined ? "" : ` ±${ratio.spread.toFixed(2)}`) +
  (isTie(ratio) ? " tie" : "")

export const table = (rows: ReadonlyArray<Row>): string => {
  const lines = [columns, ...rows.map(cells)]
  const widths = columns.map((_, at) => Math.max(...lines.map((line) => (line[at] ?? "").length)))
  const rule = widths.map((width) => "-".repeat(width))
  return [lines[0], rule, ...lines.slice(1)]
    .map((line) =>
      (line ?? [])
        .map((cell, at) => (at < 3 ? cell.padEnd(widths[at] ?? 0) : cell.padStart(widths[at] ?? 0)))
        .join("  ")
        .trimEnd()
    )
    .join("\n")
}

const significant = (value: number): number => Number(value.toPrecision(4))

export const json = (bench: string, row: Row): string =>
  JSON.stringify({
    bench,
    workload: row.workload,
    system: row.system,
    metric: row.metric,
    value: row.value === undefined ? null : significant(row.value),
    ...(row.moreThan === undefined ? {} : { moreThan: significant(row.moreThan) }),
    ...(row.spread === undefined ? {} : { spread: significant(row.spread) }),
    ...(row.ratio === undefined
      ? {}
      : {
          ratio: significant(row.ratio.median),
          ...(row.ratio.spread === undefined
            ? {}
            : { ratioSpread: significant(row.ratio.spread), tie: isTie(row.ratio) })
        }),
    ...(row.goal === undefined ? {} : { goal: row.goal, met: isMet(row, row.goal) ?? null })
  })
