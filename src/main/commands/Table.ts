/** Rows as text for a terminal. Pure. */

export type Cell = string | number | boolean | Date | null

/** Columns as wide as their widest cell; numbers to the right. */
export const formatTable = (
  columns: ReadonlyArray<string>,
  rows: ReadonlyArray<ReadonlyArray<Cell>>
): string => {
  const texts = [columns, ...rows.map((row) => row.map(formatCell))]
  const widths = columns.map((_, at) => Math.max(...texts.map((line) => line[at]?.length ?? 0)))
  const isNumber = columns.map(
    (_, at) => rows.length > 0 && rows.every((row) => typeof row[at] === "number")
  )
  return texts
    .map((line) =>
      line
        .map((text, at) =>
          isNumber[at] === true ? text.padStart(widths[at] ?? 0) : text.padEnd(widths[at] ?? 0)
        )
        .join("  ")
        .trimEnd()
    )
    .join("\n")
}

export const formatCell = (cell: Cell): string => {
  if (cell === null) return "-"
  return typeof cell === "object" ? cell.toISOString() : String(cell)
}
