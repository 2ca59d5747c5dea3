/**
 * Goal: dead letters by the public API: taken, decided and given back whatever becomes of the decision; and
 * items as a stream (W-009 to W-012).
 * Method: an executor and its queue, with a handler that fails until it is mended.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect, Layer, Option, Schema, Stream } from "effect"
import { DeadLetter, WorkQueue } from "tenure"
import { again, sift } from "../examples/deadLetters.ts"
import { layerRuntime } from "./runtime.ts"

class Refused extends Schema.TaggedError<Refused>()("Refused", { n: Schema.Int }) {}

class Letters extends WorkQueue.make("letters", {
  payload: { n: Schema.Int },
  success: Schema.Int,
  error: Refused
}) {}

describe("DeadLetter", () => {
  it.live("takes, reinjects, discards and gives back; redrives and purges", () => {
    let mended = false
    const handler = Letters.toLayer(({ n }) =>
      mended ? Effect.succeed(n) : Effect.fail(new Refused({ n }))
    )
    return Effect.gen(function* () {
      const ids = yield* Letters.enqueueAll([1, 2, 3, 4, 5, 6].map((n) => ({ n })))
      yield* Effect.forEach(ids, (id) => Effect.flip(Letters.await(id)))
      const listed = yield* Stream.runCollect(DeadLetter.list(Letters))
      assert.deepStrictEqual(
        listed.map(({ error, id, reason }) => [id, reason, error]),
        ids.map((id, at) => [id, "DeclaredError", { _tag: "Refused", n: at + 1 }])
      )

      mended = true
      // Whatever happens to the one who decides, what he has not dealt with is given back.
      const failed = yield* Effect.flip(
        DeadLetter.handle("letters", { max: 3 }, ({ payload }) =>
          (payload as { n: number }).n === 1
            ? Effect.succeed("reinject" as const)
            : Effect.fail("no idea")
        )
      )
      assert.strictEqual(failed, "no idea")
      assert.strictEqual(yield* Letters.await(ids[0] as WorkQueue.ItemId), 1)

      const [taken] = yield* DeadLetter.take(Letters, { holder: "somebody" })
      assert.strictEqual(taken?.id, ids[1])
      if (taken === undefined) return
      const [held] = yield* Stream.runCollect(DeadLetter.list(Letters))
      assert.strictEqual(
        Option.getOrUndefined(Option.map(held?.heldBy ?? Option.none(), ({ holder }) => holder)),
        "somebody"
      )
      const retried = yield* Effect.flip(Letters.retry(taken.id))
      assert.deepInclude(retried, { _tag: "AlreadySettled", state: "leased" })
      assert.isTrue(yield* DeadLetter.release(taken))
      assert.isFalse(yield* DeadLetter.release(taken))
      assert.isFalse(yield* DeadLetter.reinject(taken))
      assert.isFalse(yield* DeadLetter.discard(taken))

      const handled = yield* DeadLetter.handle(Letters, { max: 2 }, ({ payload }) =>
        Effect.succeed(
          (payload as { n: number }).n === 2 ? ("discard" as const) : ("keep" as const)
        )
      )
      assert.deepStrictEqual(handled, { processed: 2, reinjected: 0, discarded: 1 })
      assert.strictEqual(
        (yield* Effect.flip(Letters.poll(taken.id)))._tag,
        "UnknownId",
        "it is gone"
      )
      assert.deepStrictEqual(
        yield* DeadLetter.purge(Letters, { errorContains: `"n":3`, reason: "DeclaredError" }),
        { processed: 1, purged: 1 }
      )
      // As the README shows it.
      assert.deepStrictEqual(yield* again(Letters), { processed: 0, reinjected: 0 })
      assert.deepStrictEqual(
        yield* DeadLetter.redrive(Letters, { batch: 2, errorContains: `"n":4` }),
        { processed: 1, reinjected: 1 }
      )
      assert.deepStrictEqual(yield* sift(Letters), { processed: 2, reinjected: 2, discarded: 0 })
      assert.deepStrictEqual(
        yield* Effect.forEach(ids.slice(3), (id) => Letters.await(id)),
        [4, 5, 6]
      )
      const items = yield* Stream.runCollect(Letters.list())
      assert.deepStrictEqual(
        items.map(({ attempt, id, state }) => [id, state, attempt]),
        [5, 4, 3, 0].map((at) => [ids[at], "completed", 2])
      )
      assert.deepStrictEqual(yield* Stream.runCollect(Letters.list({ state: "failed" })), [])
    }).pipe(Effect.provide(handler.pipe(Layer.provideMerge(layerRuntime()))))
  })
})
