/** `npm start -- search`: ranked snippets from the index, as text for a terminal or a pipe. */
import { Effect, Layer } from "effect"
import { existsSync } from "node:fs"
import { join } from "node:path"
import { defaultDirectory } from "../../database/EmbeddedPostgres.ts"
import { printable } from "./Documents.ts"
import { displayPath } from "./Folder.ts"
import { type Hit, marks, search as searchIndex, totals } from "./IndexQueries.ts"
import { isThere } from "./IndexTables.ts"
import { count } from "./Report.ts"
import { isEmbedded, layerDatabase, layerSql } from "./Setup.ts"
import { paint } from "./View.ts"

const nothingYet = "\n  Nothing is indexed yet: run `npm start` first.\n"

export const search = Effect.fnUntraced(function* (words: string, limit: number) {
  // A server of one's own is not made to say that it is empty.
  if ((yield* isEmbedded) && !existsSync(join(defaultDirectory, "data"))) return nothingYet
  return yield* Effect.gen(function* () {
    if (!(yield* isThere)) return nothingYet
    const hits = yield* searchIndex(words, limit)
    return render(words, hits, yield* totals)
  }).pipe(Effect.provide(layerSql.pipe(Layer.provideMerge(layerDatabase))))
})

const render = (
  words: string,
  hits: ReadonlyArray<Hit>,
  total: { readonly documents: number }
): string => {
  const colour = process.stdout.isTTY && process.env["NO_COLOR"] === undefined
  const [first] = hits
  if (first === undefined) {
    return `\n  None of the ${count(total.documents, "document")} matches ${printable(words)}.\n`
  }
  const rest = first.found - hits.length
  return [
    "",
    ...hits.flatMap((hit, index) => lines(hit, index + 1, colour)),
    `  ${count(first.found, "document")} of ${total.documents} match${first.found === 1 ? "es" : ""}` +
      (rest > 0 ? `, --limit ${first.found} shows all.\n` : ".\n")
  ].join("\n")
}

const lines = (hit: Hit, place: number, colour: boolean): ReadonlyArray<string> => {
  const { heading, line, path, title } = hit
  const under = heading === "" || heading === title ? "" : ` > ${heading}`
  const where = `${displayPath(`${hit.folder}/${path}`, process.cwd())}:${line}`
  return [
    `  ${String(place).padStart(2)}. ${paint(colour, 1, printable(title + under))}  (${hit.rank.toFixed(3)})`,
    `      ${paint(colour, 2, printable(where))}`,
    `      ${highlight(hit.snippet, colour)}`,
    ""
  ]
}

/** The marks are control characters, so the text is made printable around them. */
const highlight = (snippet: string, colour: boolean): string =>
  snippet
    .split(marks.start)
    .map((part, index) => {
      if (index === 0) return safe(part)
      const [found = "", after = ""] = part.split(marks.stop)
      return (colour ? paint(true, 33, safe(found)) : `*${safe(found)}*`) + safe(after)
    })
    .join("")
    .trim()

/** Without `trim`, so that the spaces around a mark stay. */
const safe = (text: string): string => text.replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\s]+/gu, " ")
