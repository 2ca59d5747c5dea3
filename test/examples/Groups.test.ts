/**
 * Goal: the README's example of groups, batches, debounce and throttle compiles and does what is said of it.
 * Method: it is a module of this folder, compared with its block in the README, and run.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect, Layer, Option } from "effect"
import { readFileSync } from "node:fs"
import { Group, Tenure } from "tenure"
import { connect, freshDatabase, layerOf } from "../support/Postgres.ts"
import { Bind, changed, opened, PressLive, publish } from "./groups.ts"

const read = (path: string) => readFileSync(new URL(path, import.meta.url), "utf8")

describe("the README's example of groups", () => {
  it("is the one that is compiled", () => {
    const block = read("../../README.md").split("<!-- example: groups.ts -->\n```ts\n")[1]
    assert.strictEqual(block?.split("```")[0], read("groups.ts"))
  })

  it.live("prints all pages, and then binds the book", () =>
    Effect.gen(function* () {
      const database = yield* freshDatabase
      const owner = yield* connect(database.owner)
      yield* owner`CREATE TABLE printed (book text, page int)`
      yield* owner`SELECT tenure.fence_table('printed')`
      yield* owner`GRANT ALL ON printed TO tenure_worker`
      yield* Effect.gen(function* () {
        const group = yield* publish("Emma", 250)
        const ended = yield* Effect.timeout(Group.await(group), "15 seconds")
        assert.deepInclude(ended, { completed: 250, failed: 0, cancelled: 0 })
        const { callback } = yield* Group.status(group)
        yield* Effect.timeout(Bind.await(Option.getOrThrow(callback)), "15 seconds")
        const rows = yield* owner<{ n: number }>`SELECT count(*)::int AS n FROM printed`
        assert.deepStrictEqual(rows, [{ n: 250 }])
        assert.strictEqual(yield* changed("Emma"), yield* changed("Emma"))
        assert.strictEqual(yield* opened("Emma"), yield* opened("Emma"))
      }).pipe(
        Effect.provide(
          PressLive.pipe(
            Layer.provideMerge(Tenure.layer({ application: "press", version: "press-v1" })),
            Layer.provide(layerOf(database.worker))
          )
        )
      )
    }).pipe(Effect.scoped)
  )
})
