/**
 * Goal: a hint wakes one of those in line, and is not lost with one that leaves.
 * Method: three in line by hand, then any number of random acts against a list of names.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect, Exit, Schema, Scope } from "effect"
import * as Waiting from "../../src/http/Waiting.ts"

const room = () => {
  const waiting = Waiting.make()
  const told: Array<string> = []
  const enter = Effect.fnUntraced(function* (name: string, lines: ReadonlyArray<Waiting.Line>) {
    const scope = yield* Scope.make()
    const heard = yield* waiting.join(lines).pipe(Scope.provide(scope))
    return {
      listen: Effect.forkChild(
        Effect.andThen(
          heard,
          Effect.sync(() => told.push(name))
        ),
        { startImmediately: true }
      ),
      leave: Scope.close(scope, Exit.void)
    }
  })
  return { waiting, told, enter }
}

describe("a line of polls", () => {
  it.effect("tells the first of the line and nobody else", () =>
    Effect.gen(function* () {
      const { enter, told, waiting } = room()
      yield* (yield* enter("a", [1, "session"])).listen
      yield* (yield* enter("b", [1])).listen
      yield* (yield* enter("c", [2])).listen
      waiting.hintUnsafe(3)
      yield* Effect.yieldNow
      assert.deepStrictEqual(told, [])
      waiting.hintUnsafe(2)
      waiting.hintUnsafe("session")
      yield* Effect.yieldNow
      assert.deepStrictEqual(told.sort(), ["a", "c"])
    })
  )

  it.effect("keeps what is told during a look for the one that looks", () =>
    Effect.gen(function* () {
      const { enter, told, waiting } = room()
      const a = yield* enter("a", [1])
      yield* (yield* enter("b", [1])).listen
      waiting.hintUnsafe(1)
      yield* Effect.yieldNow
      assert.deepStrictEqual(told, [])
      yield* a.listen
      yield* Effect.yieldNow
      assert.deepStrictEqual(told, ["a"])
    })
  )

  it.effect("tells the next when one leaves with a hint that it has not followed", () =>
    Effect.gen(function* () {
      const { enter, told, waiting } = room()
      const a = yield* enter("a", [1])
      yield* (yield* enter("b", [1])).listen
      waiting.hintUnsafe(1)
      yield* a.leave
      yield* Effect.yieldNow
      assert.deepStrictEqual(told, ["b"])
    })
  )

  it.effect("tells all of them when the process ends", () =>
    Effect.gen(function* () {
      const { enter, told, waiting } = room()
      for (const name of ["a", "b", "c"]) yield* (yield* enter(name, [name])).listen
      waiting.tellAllUnsafe()
      yield* Effect.yieldNow
      assert.deepStrictEqual(told.sort(), ["a", "b", "c"])
    })
  )

  it.effect.prop(
    "never loses a hint while anybody is in line, and forgets everybody who left",
    {
      acts: Schema.Array(
        Schema.Struct({
          act: Schema.Literals(["enter", "leave", "hint"]),
          who: Schema.Int.check(Schema.isBetween({ minimum: 0, maximum: 4 }))
        })
      )
    },
    ({ acts }) =>
      Effect.gen(function* () {
        const { enter, waiting, told } = room()
        const inLine: Array<{ readonly name: string; readonly leave: Effect.Effect<void> }> = []
        let entered = 0
        let owed = 0
        for (const { act, who } of acts) {
          if (act === "enter") {
            const name = String(entered++)
            inLine.push({ name, leave: (yield* enter(name, [1])).leave })
          } else if (act === "leave") {
            const [one] = inLine.splice(who, 1)
            if (one !== undefined) yield* one.leave
            if (inLine.length === 0) owed = 0
          } else {
            waiting.hintUnsafe(1)
            owed = inLine.length > 0 ? 1 : 0
          }
          assert.strictEqual(waiting.countUnsafe(), inLine.length)
        }
        // Nobody has listened so far: whoever listens first in the order of the line has the hint.
        const last = yield* enter("last", [1])
        yield* Effect.forEach(inLine, (one) => one.leave)
        yield* last.listen
        yield* Effect.yieldNow
        assert.deepStrictEqual(told, owed === 1 ? ["last"] : [])
        yield* last.leave
        assert.strictEqual(waiting.countUnsafe(), 0)
      })
  )
})
