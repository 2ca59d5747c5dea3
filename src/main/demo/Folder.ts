/**
 * Which files a folder holds, and what they look like from outside. What is in them is decided by
 * whoever reads them for the index: here nothing is refused, so that every file gets its answer.
 *
 * A fingerprint is the hash of the content, so that a file that was only touched counts as unchanged.
 * Where there is no content to hash (too large, unreadable) it is made of size, time and mode.
 */
import { Effect, Schema } from "effect"
import { createHash } from "node:crypto"
import { constants, type Stats } from "node:fs"
import { lstat, open, readdir, stat } from "node:fs/promises"
import { dirname, join, sep } from "node:path"
import { fileURLToPath } from "node:url"
import { bytesMax, classify, NotIndexed, type Refusal, tooLarge } from "./Documents.ts"

export interface Found {
  /** Below the folder, with "/" between its parts. */
  readonly path: string
  readonly fingerprint: string
}

export interface Scanned {
  readonly files: ReadonlyArray<Found>
  /** Folders that were not looked into, by rule. */
  readonly passedOver: ReadonlyArray<string>
}

export class FolderUnusable extends Schema.TaggedError<FolderUnusable>()("FolderUnusable", {
  folder: Schema.String,
  problem: Schema.String
}) {
  override get message(): string {
    return `${this.folder} cannot be indexed: ${this.problem}.`
  }
}

const filesMax = 20_000

/** The last one is ours, with a database in it. */
const neverEntered = new Set([".git", "node_modules", ".tenure"])

/** The documentation that ships with `effect`, which is installed wherever this runs. */
export const documentationOfEffect = (): {
  readonly folder: string
  readonly takes: (path: string) => boolean
} => ({
  folder: dirname(fileURLToPath(import.meta.resolve("effect/package.json"))),
  takes: (path) =>
    path.startsWith("ai-docs/") ? /\.(?:md|ts)$/.test(path) : /^[^/]+\.md$/.test(path)
})

export const scan = Effect.fnUntraced(function* (
  folder: string,
  takes: (path: string) => boolean = () => true
): Effect.fn.Return<Scanned, FolderUnusable> {
  const root = yield* attempt(() => stat(folder)).pipe(
    Effect.mapError((code) => new FolderUnusable({ folder, problem: codeText(code) }))
  )
  if (!root.isDirectory()) {
    return yield* new FolderUnusable({ folder, problem: "it is not a folder" })
  }
  const files: Array<Found> = []
  const passedOver: Array<string> = []
  const waiting = [""]
  for (let next = waiting.pop(); next !== undefined; next = waiting.pop()) {
    const below = next
    const entries = yield* Effect.option(
      attempt(() => readdir(join(folder, below), { withFileTypes: true }))
    )
    if (entries._tag === "None") {
      // As a file, so that its reader says what is wrong with it.
      files.push(yield* fingerprintOf(folder, below))
      continue
    }
    for (const entry of entries.value) {
      const path = below === "" ? entry.name : `${below}/${entry.name}`
      if (entry.isDirectory()) {
        if (neverEntered.has(entry.name)) passedOver.push(path)
        else waiting.push(path)
      } else if (takes(path)) {
        files.push(yield* fingerprintOf(folder, path))
        if (files.length > filesMax) {
          const problem = `it holds more than ${filesMax} files, choose a folder inside it`
          return yield* new FolderUnusable({ folder, problem })
        }
      }
    }
  }
  if (files.length === 0) return yield* new FolderUnusable({ folder, problem: "it holds no files" })
  return { files: files.sort((a, b) => (a.path < b.path ? -1 : 1)), passedOver }
})

const fingerprintOf = Effect.fnUntraced(function* (folder: string, path: string) {
  const file = join(folder, path)
  const bytes = yield* Effect.option(readBytes(file))
  if (bytes._tag === "Some") return { path, fingerprint: hash(bytes.value) }
  const seen = yield* Effect.option(
    Effect.catch(
      attempt(() => stat(file)),
      () => attempt(() => lstat(file))
    )
  )
  return { path, fingerprint: seen._tag === "Some" ? outside(seen.value) : "unseen" }
})

const outside = (stats: Stats): string => `${stats.size}-${stats.mtimeMs}-${stats.mode}`

export const hash = (bytes: Uint8Array): string => createHash("sha256").update(bytes).digest("hex")

export interface Document {
  readonly path: string
  readonly text: string
  readonly bytes: number
  readonly fingerprint: string
}

/** Reads one file. Whatever is wrong with it is a declared failure, final for this file. */
export const readDocument = Effect.fnUntraced(function* (
  folder: string,
  path: string
): Effect.fn.Return<Document, NotIndexed> {
  const refused = (refusal: Refusal) => new NotIndexed({ path, ...refusal })
  const bytes = yield* Effect.mapError(readBytes(join(folder, path)), refused)
  const text = classify(bytes)
  if (typeof text !== "string") return yield* refused(text)
  return { path, text, bytes: bytes.length, fingerprint: hash(bytes) }
})

const readBytes = (file: string): Effect.Effect<Uint8Array, Refusal> =>
  Effect.scoped(
    Effect.gen(function* () {
      // Without O_NONBLOCK the open of a pipe waits for a writer that never comes.
      const handle = yield* Effect.acquireRelease(
        attempt(() => open(file, constants.O_RDONLY | constants.O_NONBLOCK)),
        (opened) => Effect.ignore(attempt(() => opened.close()))
      ).pipe(Effect.mapError(unreadable))
      const stats = yield* Effect.mapError(
        attempt(() => handle.stat()),
        unreadable
      )
      if (!stats.isFile()) return yield* Effect.fail(unreadable("ENOTFILE"))
      if (stats.size > bytesMax) return yield* Effect.fail(tooLarge(stats.size))
      return yield* Effect.mapError(
        attempt(() => handle.readFile()),
        unreadable
      )
    })
  )

const unreadable = (code: string): Refusal => ({ reason: "unreadable", detail: codeText(code) })

/** Fails with the code of the operating system. */
const attempt = <A>(call: () => Promise<A>): Effect.Effect<A, string> =>
  Effect.tryPromise({
    try: call,
    catch: (error) =>
      error instanceof Error && "code" in error ? String(error.code) : "unknown error"
  })

const codeText = (code: string): string =>
  ({
    EACCES: "permission denied",
    EPERM: "permission denied",
    ENOENT: "there is no such file or folder",
    ELOOP: "a link that leads back to itself",
    EISDIR: "it is a folder",
    ENOTFILE: "it is not a regular file"
  })[code] ?? code

/** Shown to people: below the working directory without the way to it. */
export const displayPath = (path: string, from: string): string =>
  path.startsWith(from + sep) ? path.slice(from.length + 1) : path
