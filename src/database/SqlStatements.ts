/**
 * Cuts a script into statements where psql cuts it, because the driver sends one statement at a time.
 * Nothing is added, dropped or rewritten: the pieces put together are the script.
 *
 * A semicolon ends a statement unless it stands in a string, a quoted name, a dollar-quoted body, a
 * comment, parentheses, or the `BEGIN ATOMIC ... END` of a function. Backslashes escape in E'' strings
 * only (`standard_conforming_strings` is on). psql's own commands are not understood.
 */

export const splitStatements = (text: string): ReadonlyArray<string> => {
  const statements: Array<string> = []
  let start = 0
  let position = 0
  let state = fresh
  while (position < text.length) {
    const token = tokenAt(text, position)
    position = token.end
    if (token.kind === "semicolon" && state.parentheses === 0 && state.blocks === 0) {
      statements.push(text.slice(start, position))
      start = position
      state = fresh
    } else {
      state = advance(state, token)
    }
  }
  if (start < text.length) statements.push(text.slice(start))
  return statements
}

/** Whether a piece holds nothing the server would execute. */
export const isBlank = (statement: string): boolean => {
  let position = 0
  while (position < statement.length) {
    const token = tokenAt(statement, position)
    if (token.kind !== "space" && token.kind !== "semicolon") return false
    position = token.end
  }
  return true
}

interface Token {
  readonly kind: "space" | "word" | "open" | "close" | "semicolon" | "other"
  readonly end: number
  readonly word: string
}

interface State {
  readonly parentheses: number
  /** Depth of BEGIN and CASE, counted only in a statement that creates a routine. */
  readonly blocks: number
  readonly firstWords: string
}

const fresh: State = { parentheses: 0, blocks: 0, firstWords: "" }

const routine = /^create (?:or replace )?(?:function|procedure) /

const advance = (state: State, token: Token): State => {
  if (token.kind === "open") return { ...state, parentheses: state.parentheses + 1 }
  if (token.kind === "close") {
    return { ...state, parentheses: Math.max(0, state.parentheses - 1) }
  }
  if (token.kind !== "word") return state
  if (state.parentheses === 0 && routine.test(state.firstWords)) {
    if (token.word === "begin") return { ...state, blocks: state.blocks + 1 }
    if (token.word === "case" && state.blocks > 0) return { ...state, blocks: state.blocks + 1 }
    if (token.word === "end" && state.blocks > 0) return { ...state, blocks: state.blocks - 1 }
  }
  // Four words decide whether it is a routine; the rest of a long statement is not collected.
  return state.firstWords.split(" ").length > 4
    ? state
    : { ...state, firstWords: `${state.firstWords}${token.word} ` }
}

// Sticky, so that each is tried exactly where the last token ended.
const spaces = /[ \t\n\r\f\v]+|--[^\n\r]*/y
const words = /[A-Za-z_\u0080-\uffff][A-Za-z0-9_$\u0080-\uffff]*/y
const dollarTag = /\$(?:[A-Za-z_\u0080-\uffff][A-Za-z0-9_\u0080-\uffff]*)?\$/y
const numbers = /\$?[0-9]+/y
// A string goes on behind a line break, and an E'' string keeps its escapes there.
const continuation = /(?:[ \t\f\v]|--[^\n\r]*)*[\n\r](?:[ \t\n\r\f\v]|--[^\n\r]*[\n\r])*'/y

const matchAt = (pattern: RegExp, text: string, position: number): string | undefined => {
  pattern.lastIndex = position
  return pattern.exec(text)?.[0]
}

const tokenAt = (text: string, position: number): Token => {
  const space = matchAt(spaces, text, position)
  if (space !== undefined) return { kind: "space", end: position + space.length, word: "" }
  if (text.startsWith("/*", position)) {
    return { kind: "space", end: endOfComment(text, position), word: "" }
  }
  const word = matchAt(words, text, position)
  if (word !== undefined) {
    const end = position + word.length
    return /^e$/i.test(word) && text[end] === "'"
      ? { kind: "other", end: endOfEscapeString(text, end + 1), word: "" }
      : { kind: "word", end, word: word.toLowerCase() }
  }
  const tag = matchAt(dollarTag, text, position)
  if (tag !== undefined)
    return { kind: "other", end: endOf(text, tag, position + tag.length), word: "" }
  const number = matchAt(numbers, text, position)
  if (number !== undefined) return { kind: "other", end: position + number.length, word: "" }
  const character = text[position]
  if (character === "'" || character === '"') {
    // A doubled quote ends here and opens again at once, which cuts at the same places.
    return { kind: "other", end: endOf(text, character, position + 1), word: "" }
  }
  return { kind: singles.get(character ?? "") ?? "other", end: position + 1, word: "" }
}

const singles: ReadonlyMap<string, Token["kind"]> = new Map([
  ["(", "open"],
  [")", "close"],
  [";", "semicolon"]
])

const endOf = (text: string, closing: string, from: number): number => {
  const at = text.indexOf(closing, from)
  return at === -1 ? text.length : at + closing.length
}

const endOfEscapeString = (text: string, from: number): number => {
  for (let position = from; position < text.length; position++) {
    if (text[position] === "\\") position++
    else if (text[position] === "'") {
      const more = matchAt(continuation, text, position + 1)
      if (more === undefined) {
        // A doubled quote is part of the string, and here the escapes go on behind it.
        if (text[position + 1] !== "'") return position + 1
        position++
      } else position += more.length
    }
  }
  return text.length
}

const endOfComment = (text: string, from: number): number => {
  let depth = 0
  for (let position = from; position < text.length; position++) {
    if (text.startsWith("/*", position)) {
      depth++
      position++
    } else if (text.startsWith("*/", position)) {
      depth--
      position++
      if (depth === 0) return position + 1
    }
  }
  return text.length
}
