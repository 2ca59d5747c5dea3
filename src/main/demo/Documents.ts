/**
 * What is in a file, and where it is cut. Pure: bytes in, a text with its chunks or the reason why
 * there is none out.
 *
 * Cutting loses nothing: the chunks of a text, joined, are that text, so a half written document can
 * be told from a whole one by its length alone.
 */
import { Schema } from "effect"

export const bytesMax = 5 * 1_048_576

/** Why a file has no place in the index. Final: the same file would be refused again. */
export class NotIndexed extends Schema.TaggedError<NotIndexed>()("NotIndexed", {
  path: Schema.String,
  reason: Schema.Literals(["unreadable", "binary", "empty", "huge", "notUtf8"]),
  detail: Schema.String
}) {
  override get message(): string {
    return `${this.path} is not indexed: ${this.text}.`
  }

  get text(): string {
    return `${reasonText[this.reason]} (${this.detail})`
  }
}

export type Reason = NotIndexed["reason"]

export const reasonText: Readonly<Record<Reason, string>> = {
  unreadable: "it cannot be read",
  binary: "it is not text",
  empty: "it is empty",
  huge: "it is larger than 5 MB",
  notUtf8: "it is not UTF-8"
}

export interface Refusal {
  readonly reason: Reason
  readonly detail: string
}

export interface Chunk {
  /** From 1, in the order of the text. */
  readonly number: number
  /** The line it starts in, from 1. */
  readonly line: number
  /** The heading it stands under, or "". */
  readonly heading: string
  readonly text: string
}

/** The text of a file, or why it has none. */
export const classify = (bytes: Uint8Array): string | Refusal => {
  if (bytes.length > bytesMax) return tooLarge(bytes.length)
  if (bytes.length === 0) return { reason: "empty", detail: "0 bytes" }
  const [first, second] = bytes
  if ((first === 0xff && second === 0xfe) || (first === 0xfe && second === 0xff)) {
    return { reason: "notUtf8", detail: "it starts as UTF-16 does" }
  }
  // Before the encoding: a NUL is valid UTF-8, and no text of PostgreSQL can hold one.
  const nul = bytes.indexOf(0)
  if (nul >= 0) return { reason: "binary", detail: `a NUL at byte ${nul}` }
  let text: string
  try {
    // With the byte order mark: the index holds every byte of the file.
    text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes)
  } catch {
    return { reason: "notUtf8", detail: "a byte sequence that UTF-8 does not have" }
  }
  if (text.trim() === "") return { reason: "empty", detail: "nothing but white space" }
  return text
}

export const tooLarge = (bytes: number): Refusal => ({
  reason: "huge",
  detail: `${(bytes / 1_048_576).toFixed(1)} MB`
})

export const chunkMax = 1500
const chunkMin = 200

/**
 * Cuts before headings, else after paragraphs, else between lines, and inside a line only when the
 * line alone is too long.
 */
export const split = (text: string): ReadonlyArray<Chunk> => {
  const chunks: Array<Chunk> = []
  let heading = ""
  let headingOfCurrent = ""
  let line = 1
  let start = 0
  let end = 0
  let paragraphEnd = 0
  let isCode = false

  const cut = (at: number): void => {
    const piece = text.slice(start, at)
    chunks.push({ number: chunks.length + 1, line, heading: headingOfCurrent, text: piece })
    line += countLines(piece)
    start = at
    headingOfCurrent = heading
  }

  for (const piece of pieces(text)) {
    if (/^\s*(?:```|~~~)/.test(piece)) isCode = !isCode
    // In an example of Markdown, a line that starts with # is a comment of a shell.
    const found = isCode ? undefined : headingOf(piece)
    if (found !== undefined && end - start >= chunkMin) cut(end)
    while (end + piece.length - start > chunkMax) {
      cut(paragraphEnd - start >= chunkMin ? paragraphEnd : end)
    }
    if (found !== undefined) {
      heading = found
      if (start === end || headingOfCurrent === "") headingOfCurrent = found
    }
    end += piece.length
    if (piece.trim() === "") paragraphEnd = end
  }
  if (end > start) cut(end)
  return chunks
}

/** Lines with their ends; one that is too long in parts, never between two halves of a character. */
const pieces = function* (text: string): Generator<string> {
  let from = 0
  while (from < text.length) {
    const newline = text.indexOf("\n", from)
    const lineEnd = newline < 0 ? text.length : newline + 1
    while (lineEnd - from > chunkMax) {
      const middle = text.lastIndexOf(" ", from + chunkMax - 1) + 1
      let at = middle - from >= chunkMin ? middle : from + chunkMax
      if (isLowSurrogate(text.charCodeAt(at))) at--
      yield text.slice(from, at)
      from = at
    }
    yield text.slice(from, lineEnd)
    from = lineEnd
  }
}

const isLowSurrogate = (unit: number): boolean => unit >= 0xdc00 && unit <= 0xdfff

const countLines = (text: string): number => {
  let count = 0
  for (let at = text.indexOf("\n"); at >= 0; at = text.indexOf("\n", at + 1)) count++
  return count
}

const headingMax = 200

/** Of a Markdown heading, or of the title in a source file's comment. */
const headingOf = (line: string): string | undefined => {
  const found = /^(?:#{1,6}\s+|\s*(?:\/?\*+|\/\/)\s*@title\s+)(\S.*?)\s*#*\s*$/.exec(
    line.slice(0, 1000)
  )
  return found?.[1]?.slice(0, headingMax).toWellFormed()
}

/** The first heading, else the file's own name. */
export const titleOf = (path: string, chunks: ReadonlyArray<Chunk>): string =>
  chunks.find((chunk) => chunk.heading !== "")?.heading ?? path.slice(path.lastIndexOf("/") + 1)

/** For a terminal: what a file or its name contains must not move the cursor. */
export const printable = (text: string): string =>
  text.replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\s]+/gu, " ").trim()
