/**
 * The textual change of a mutant. Pure: a text that is not there, or a function that is not, is a
 * problem of the list and is told as one.
 */
import type { Mutant } from "./mutants.ts"

export const mutate = (
  source: string,
  mutant: Pick<Mutant, "changes" | "within">
): string | { readonly problem: string } => {
  const from = mutant.within === undefined ? 0 : source.indexOf(`CREATE FUNCTION ${mutant.within}(`)
  if (from === -1) return { problem: `there is no function ${mutant.within}` }
  // A function ends where the next statement of its file begins.
  const next = mutant.within === undefined ? -1 : source.indexOf("\nCREATE FUNCTION ", from + 1)
  const to = next === -1 ? source.length : next
  let text = source.slice(from, to)
  for (const [right, wrong] of mutant.changes) {
    if (!text.includes(right)) return { problem: `the source does not contain: ${right}` }
    text = text.replace(right, () => wrong)
  }
  return source.slice(0, from) + text + source.slice(to)
}
