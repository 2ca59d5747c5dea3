/**
 * JSON text of a value that a codec has encoded, or why the database cannot keep it: pure.
 *
 * What is written is what is read. JSON itself is not so strict: it leaves out an undefined field and a
 * function, makes NaN null, -0 zero and a Date a string, and calls `toJSON`. A codec passes such
 * values on where its schema lets anything through; here they are refused by name, and -0 is written as
 * the number it is.
 *
 * NUL characters and lone surrogates are written as escapes, which the type `json` keeps as they are. In
 * a column of type `text` the first is an error and the second becomes another character, so names and
 * keys may not have them.
 */
import { Schema } from "effect"

/** It has more bytes as JSON than are allowed. */
export class TooLarge extends Schema.TaggedError<TooLarge>()("TooLarge", {
  bytes: Schema.Int,
  bytesMax: Schema.Int
}) {
  override get message(): string {
    return `it is ${this.bytes} bytes, the limit is ${this.bytesMax}`
  }
}

/** JSON cannot hold it. `detail` tells what is in the way, and no value. */
export class NotJson extends Schema.TaggedError<NotJson>()("NotJson", { detail: Schema.String }) {
  override get message(): string {
    return `JSON cannot hold it: ${this.detail}`
  }
}

export type Refused = TooLarge | NotJson

/**
 * Levels of arrays and objects inside each other. PostgreSQL gives up at some thousands, by the stack it
 * has, and so does V8.
 */
export const depthMax = 1000

/** What a name or a key may have, so that an index can hold it. */
export const keyBytesMax = 2000

const detailMax = 300

/** One bounded line about whatever was thrown. Never throws itself. */
export const describe = (error: unknown, lengthMax = detailMax): string => {
  try {
    const text = error instanceof Error ? `${error.name}: ${error.message}` : String(error)
    return text.length > lengthMax ? `${text.slice(0, lengthMax - 1)}~` : text
  } catch {
    // A getter, a proxy or a symbol in the place of a message.
    return "something that cannot be read"
  }
}

export const notJson = (error: unknown): NotJson => new NotJson({ detail: describe(error) })

interface Look {
  hasNegativeZero: boolean
  /** Each takes a byte at least. What is reached in two ways counts twice, as it is written twice. */
  valuesLeft: number
}

const isPlain = (value: object): boolean => {
  const prototype: unknown = Object.getPrototypeOf(value)
  // That of another realm is not ours, and has none itself.
  return (
    prototype === null ||
    prototype === Object.prototype ||
    Object.getPrototypeOf(prototype) === null
  )
}

const trouble = (value: unknown, depth: number, look: Look): string | undefined => {
  if (look.valuesLeft-- <= 0) return "too much"
  switch (typeof value) {
    case "string":
    case "boolean":
      return undefined
    case "number":
      if (!Number.isFinite(value)) return `the number ${value}`
      if (Object.is(value, -0)) look.hasNegativeZero = true
      return undefined
    case "object":
      return value === null ? undefined : troubleInside(value, depth, look)
    case "undefined":
      return "an undefined value, or a hole in an array"
    default:
      return `a ${typeof value}`
  }
}

const troubleInside = (value: object, depth: number, look: Look): string | undefined => {
  if (depth === depthMax) return `more than ${depthMax} levels, or a cycle`
  if (Array.isArray(value)) {
    // By its places: a hole has none of its own, and `for .. of` is slower.
    for (let place = 0; place < value.length; place++) {
      const found = trouble(value[place], depth + 1, look)
      if (found !== undefined) return found
    }
    return undefined
  }
  if (!isPlain(value)) return "an object of a class"
  for (const key of Object.keys(value)) {
    const found = trouble((value as Readonly<Record<string, unknown>>)[key], depth + 1, look)
    if (found !== undefined) return found
  }
  return undefined
}

// Of ECMAScript 2026, and in every Node that we support.
const { rawJSON } = JSON as unknown as { readonly rawJSON: (text: string) => unknown }

const negativeZero = rawJSON("-0")

const keepNegativeZero = (_: string, value: unknown): unknown =>
  Object.is(value, -0) ? negativeZero : value

/** The text, or why there is none. Never throws, whatever the value does when it is read. */
export const textOf = (value: unknown, bytesMax: number): string | Refused => {
  try {
    const look: Look = { hasNegativeZero: false, valuesLeft: bytesMax }
    const found = trouble(value, 0, look)
    // Unbounded, a small value that holds another one many times, and that one a third, would fill the
    // memory as text.
    if (look.valuesLeft < 0) return new TooLarge({ bytes: bytesMax + 1, bytesMax })
    if (found !== undefined) return new NotJson({ detail: found })
    const text = look.hasNegativeZero
      ? JSON.stringify(value, keepNegativeZero)
      : JSON.stringify(value)
    const bytes = Buffer.byteLength(text)
    return bytes > bytesMax ? new TooLarge({ bytes, bytesMax }) : text
  } catch (error) {
    return notJson(error)
  }
}

/** Why a text cannot be a name or a key: the words after "it". */
export const troubleOfKey = (key: string): string | undefined => {
  if (key === "") return "is empty"
  if (key.includes("\0")) return "has a NUL character"
  if (!key.isWellFormed()) return "has half of a surrogate pair"
  // A character has three bytes at most for each unit: most need not be counted.
  if (key.length * 3 > keyBytesMax && Buffer.byteLength(key) > keyBytesMax) {
    return `has more than ${keyBytesMax} bytes`
  }
  return undefined
}
