import { Array, Effect, Layer, Result, Schema } from "effect"
import { SqlClient } from "effect/sql"
import { Group, WorkQueue } from "tenure"

const Page = { book: Schema.String, page: Schema.Int }
export class Print extends WorkQueue.make("print", { payload: Page }) {}
export class Bind extends WorkQueue.make("bind", {
  payload: { book: Schema.String, group: Group.Ended } // how many completed, failed, cancelled
}) {}
export class Reindex extends WorkQueue.make("reindex", { payload: { book: Schema.String } }) {}

export const PressLive = Layer.mergeAll(
  // One call for up to 100 pages, 200 ms after the first one at the latest; a Result for each, in order.
  Print.toLayerBatch(
    Effect.fn("print")(function* (batch) {
      const sql = yield* SqlClient.SqlClient
      yield* sql`INSERT INTO printed ${sql.insert(Array.map(batch, ({ payload }) => payload))}`
      return batch.map(() => Result.void)
    }),
    { batch: { size: 100, within: "200 millis" } }
  ),
  Bind.toLayer(({ book, group }) => Effect.logInfo(`${book}: ${group.completed} pages`)),
  Reindex.toLayer(({ book }) => Effect.logInfo(`the index of ${book}`))
)

// The callback is handed in with the end of the last page, once, however it ends.
export const publish = Effect.fn("publish")(function* (book: string, pages: number) {
  const sql = yield* SqlClient.SqlClient
  return yield* sql.withTransaction(
    Effect.gen(function* () {
      const group = yield* Group.make({ onDone: { queue: Bind, payload: { book } } })
      const all = Array.makeBy(pages, (page) => ({ book, page }))
      yield* Print.enqueueAll(all, { group })
      yield* Group.seal(group)
      return group // Group.await(group), Group.status(group)
    })
  )
})

// Two seconds after the last change, and a minute after the first one at the latest; or once a minute.
export const changed = (book: string) =>
  Reindex.enqueue({ book }, { debounce: { key: book, delay: "2 seconds", maxWait: "1 minute" } })
export const opened = (book: string) =>
  Reindex.enqueue({ book }, { throttle: { key: book, period: "1 minute" } })
