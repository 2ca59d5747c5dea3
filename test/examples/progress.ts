import { Effect, Schema, Stream } from "effect"
import { WorkQueue } from "tenure"

export class Import extends WorkQueue.make("import", {
  payload: { lines: Schema.Array(Schema.String) },
  progress: Schema.Struct({ done: Schema.Int, of: Schema.Int })
}) {}

export const ImportLive = Import.toLayer(
  Effect.fn("import")(function* ({ lines }, item) {
    for (const [index] of lines.entries()) {
      // Waits for nothing, so as often as you like. From deeper down: Progress.report(Import, …).
      yield* item.progress({ done: index + 1, of: lines.length })
    }
  })
)

// In whatever process: ends with the item, and then tells how it went.
export const follow = (id: WorkQueue.ItemId) =>
  Import.progress(id).pipe(
    Stream.runForEach(({ done, of }) => Effect.log(`${done} of ${of}`)),
    Effect.andThen(Import.await(id))
  )
