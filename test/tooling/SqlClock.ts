/**
 * Two rules about time in SQL. Pure.
 *
 *   C1. Decisions read `tenure.clock()` and no other clock, so that tests can shift it.
 *   C2. In a predicate it stands as `(SELECT tenure.clock())`: called bare it runs once for each row
 *       and keeps the planner from using it as an index condition.
 */
import { splitStatements } from "../../src/database/SqlStatements.ts"

const otherClocks =
  /\b(?:now\s*\(\s*\)|current_timestamp\b|current_date\b|localtimestamp\b|statement_timestamp\b|transaction_timestamp\b|clock_timestamp\b)/gi

/** The clock itself, what is there before it, and ids, which no decision compares with it. */
const exempt = /FUNCTION tenure\.(?:clock|new_id)\(|TABLE (?:IF NOT EXISTS )?tenure\.migration\b/i

const clock = /\btenure\.clock\(\)/gi

/** What begins a place where a bare call is fine, or one where it is not. */
const places =
  /\b(?:WHERE|HAVING|ON|SELECT|SET|VALUES|IF|ELSIF|RETURN|RETURNING|BEGIN|DECLARE|LOOP|LIMIT|ORDER BY)\b|:=|;/gi

const predicates = new Set(["WHERE", "HAVING", "ON"])

export const violationsInSchema = (file: string, text: string): ReadonlyArray<string> =>
  splitStatements(text).flatMap((statement) => violationsIn(file, statement))

/** The templates tagged `sql`, and the text given to `unsafe`. */
export const violationsInCode = (file: string, text: string): ReadonlyArray<string> =>
  [...text.matchAll(/(?:\bsql(?:<[^`]*?>)?|\bunsafe(?:<[^`]*?>)?\(\s*)`([^`]*)`/g)].flatMap(
    ([, statement]) => violationsIn(file, statement ?? "")
  )

const violationsIn = (file: string, statement: string): ReadonlyArray<string> => {
  const code = statement.replaceAll(/--[^\n]*/g, "")
  const found: Array<string> = []
  if (!exempt.test(code)) {
    for (const match of code.matchAll(otherClocks)) {
      found.push(`${file}: C1. ${match[0]} instead of tenure.clock(): ${line(code, match.index)}`)
    }
  }
  for (const match of code.matchAll(clock)) {
    const before = [...code.slice(0, match.index).matchAll(places)].at(-1)?.[0].toUpperCase() ?? ""
    if (predicates.has(before)) {
      found.push(`${file}: C2. tenure.clock() bare in a predicate: ${line(code, match.index)}`)
    }
  }
  return found
}

const line = (text: string, at: number): string => {
  const start = text.lastIndexOf("\n", at) + 1
  const end = text.indexOf("\n", at)
  return text.slice(start, end < 0 ? undefined : end).trim()
}
