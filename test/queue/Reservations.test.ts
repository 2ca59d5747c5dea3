/**
 * Goal: what was claimed and waits here keeps its order, is given out once, and is let go of.
 * Method: generated operations against a plain array with the time beside each item.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect, Schema } from "effect"
import { setFlagsFromString } from "node:v8"
import { runInNewContext } from "node:vm"
import * as Reservations from "../../src/queue/Reservations.ts"

const small = Schema.Int.check(Schema.isBetween({ minimum: 0, maximum: 6 }))
const Operation = Schema.Union([
  Schema.Struct({ do: Schema.Literal("add"), count: small }),
  Schema.Struct({ do: Schema.Literal("next"), count: small }),
  Schema.Struct({ do: Schema.Literal("remove"), which: small }),
  Schema.Struct({ do: Schema.Literal("takeSince"), ago: small }),
  Schema.Struct({ do: Schema.Literal("takeAll") })
])

describe("reservations", () => {
  it.effect.prop(
    "are what an array of items would be",
    { operations: Schema.Array(Operation).check(Schema.isMaxLength(40)) },
    ({ operations }) =>
      Effect.sync(() => {
        const real = Reservations.make<number>()
        let model: Array<{ readonly id: number; readonly since: number }> = []
        let id = 0
        for (const [now, operation] of operations.entries()) {
          switch (operation.do) {
            case "add": {
              const ids = Array.from({ length: operation.count }, () => id++)
              real.add(ids, now)
              model.push(...ids.map((one) => ({ id: one, since: now })))
              break
            }
            case "next":
              for (let n = 0; n < operation.count; n++) {
                assert.strictEqual(real.next(), model.shift()?.id)
              }
              break
            case "remove": {
              const wanted = model[operation.which]?.id ?? -1
              assert.strictEqual(
                real.remove((one) => one === wanted),
                wanted < 0 ? undefined : wanted
              )
              model = model.filter((one) => one.id !== wanted)
              break
            }
            case "takeSince": {
              const since = now - operation.ago
              const old = model.filter((one) => one.since <= since)
              assert.deepStrictEqual(
                real.takeSince(since),
                old.map((one) => one.id)
              )
              model = model.filter((one) => one.since > since)
              break
            }
            case "takeAll":
              assert.deepStrictEqual(
                real.takeAll(),
                model.map((one) => one.id)
              )
              model = []
          }
          assert.strictEqual(real.count(), model.length)
        }
      }),
    { arbitrary: { runs: 300 } }
  )

  it("that never run out do not keep what has left", async () => {
    const real = Reservations.make<object>()
    real.add([{}], 0)
    const gone: Array<WeakRef<object>> = []
    for (let n = 0; n < 1000; n++) {
      real.add([{}], n)
      const item = real.next()
      if (item !== undefined) gone.push(new WeakRef(item))
    }
    // What a WeakRef was made for stays until the end of the turn.
    await new Promise(setImmediate)
    collect()
    const kept = gone.filter((one) => one.deref() !== undefined).length
    // The last one may still be in a register.
    assert.isAtMost(kept, 1)
    assert.strictEqual(real.count(), 1)
  })
})

const collect = (): void => {
  setFlagsFromString("--expose-gc")
  const gc = runInNewContext("gc") as () => void
  gc()
}
