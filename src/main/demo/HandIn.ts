/**
 * Hands the files of a folder in: those that are new or have changed since, and none twice.
 *
 *   unknown, changed, or all with `again` --> handed in        known, same fingerprint --> left alone
 *   known, not in the folder any more     --> forgotten
 *
 * The rows of the files and the items of the queue are written in one transaction: after a crash both
 * are there or neither.
 */
import { Effect } from "effect"
import { SqlClient } from "effect/sql"
import { DocumentQueue } from "./DocumentQueue.ts"
import type { Found } from "./Folder.ts"
import { forgetFiles, type Known, knownFiles, recordHandedIn } from "./IndexStore.ts"

export interface Comparison {
  readonly handIn: ReadonlyArray<Found & { readonly round: number }>
  /** Handed in by an earlier start that did not see the end of it. */
  readonly resumed: ReadonlyArray<Known>
  readonly unchanged: ReadonlyArray<Known>
  readonly gone: ReadonlyArray<string>
}

export const compare = (
  known: ReadonlyArray<Known>,
  found: ReadonlyArray<Found>,
  again: boolean
): Comparison => {
  const before = new Map(known.map((file) => [file.path, file]))
  const handIn: Array<Found & { readonly round: number }> = []
  const resumed: Array<Known> = []
  const unchanged: Array<Known> = []
  for (const file of found) {
    const old = before.get(file.path)
    before.delete(file.path)
    if (old === undefined) handIn.push({ ...file, round: 1 })
    else if (old.fingerprint !== file.fingerprint) handIn.push({ ...file, round: old.round + 1 })
    // What still waits is not handed in a second time, whoever asks for everything anew.
    else if (old.state === "waiting") resumed.push(old)
    else if (again) handIn.push({ ...file, round: old.round + 1 })
    else unchanged.push(old)
  }
  return { handIn, resumed, unchanged, gone: [...before.keys()] }
}

export interface Todo {
  readonly path: string
  readonly itemId: string
}

export interface HandedIn {
  readonly todo: ReadonlyArray<Todo>
  readonly resumed: number
  readonly unchanged: ReadonlyArray<Known>
  readonly gone: number
}

const filesPerStatement = 1000

export const handIn = Effect.fnUntraced(function* (
  folder: string,
  found: ReadonlyArray<Found>,
  again: boolean
) {
  const sql = yield* SqlClient.SqlClient
  return yield* sql.withTransaction(
    Effect.gen(function* () {
      const { gone, handIn, resumed, unchanged } = compare(yield* knownFiles(folder), found, again)
      const todo: Array<Todo> = resumed.map(({ itemId, path }) => ({ itemId, path }))
      for (let at = 0; at < handIn.length; at += filesPerStatement) {
        const files = handIn.slice(at, at + filesPerStatement)
        const ids = yield* DocumentQueue.enqueueAll(files.map((file) => ({ folder, ...file })))
        const handed = files.map((file, index) => ({ ...file, itemId: ids[index] ?? "" }))
        yield* recordHandedIn(folder, handed)
        for (const { itemId, path } of handed) todo.push({ itemId, path })
      }
      if (gone.length > 0) yield* forgetFiles(folder, gone)
      return { todo, resumed: resumed.length, unchanged, gone: gone.length } satisfies HandedIn
    })
  )
})
