/**
 * Goal: every row gets its own answer, whatever its neighbours do, and nothing is written twice or
 * forgotten.
 * Method: generated rows, some of which the "database" refuses, against a write that records groups.
 */
import { assert, describe, it } from "@effect/vitest"
import { Deferred, Effect, Exit, Fiber, Ref, Schema } from "effect"
import { TestClock } from "effect/testing"
import * as GroupCommit from "../../src/queue/GroupCommit.ts"
import { present } from "../support/present.ts"

interface Row {
  readonly id: number
  readonly bad: boolean
}

const recording = Effect.gen(function* () {
  const groups: Array<ReadonlyArray<number>> = []
  const stored: Array<number> = []
  const commit = yield* GroupCommit.make<Row, number, { readonly bad: true }, never>({
    groupMax: 50,
    bytesMax: 1000,
    sizeOf: () => 10,
    isRowError: (error) => error.bad,
    write: (rows) =>
      Effect.suspend(() => {
        groups.push(rows.map((row) => row.id))
        if (rows.some((row) => row.bad)) return Effect.fail({ bad: true as const })
        stored.push(...rows.map((row) => row.id))
        return Effect.succeed(rows.map((row) => row.id * 2))
      })
  })
  return { commit, groups, stored }
})

describe("a group commit", () => {
  it.effect.prop(
    "answers each row for itself, and a bad one fails alone",
    { bad: Schema.Array(Schema.Boolean) },
    ({ bad }) =>
      Effect.gen(function* () {
        const { commit, groups, stored } = yield* recording
        const exits = yield* Effect.forEach(
          bad,
          (isBad, id) => Effect.exit(commit.push({ id, bad: isBad })),
          { concurrency: "unbounded" }
        )
        exits.forEach((exit, id) => {
          if (bad[id]) assert.isTrue(Exit.isFailure(exit))
          else assert.deepStrictEqual(exit, Exit.succeed(id * 2))
        })
        assert.deepStrictEqual(
          [...stored].sort((a, b) => a - b),
          bad.flatMap((isBad, id) => (isBad ? [] : [id]))
        )
        assert.isTrue(groups.every((group) => group.length <= 50))
        assert.strictEqual(commit.pendingUnsafe(), 0)
        yield* commit.idle
      }).pipe(Effect.scoped)
  )

  it.live("writes what arrives during a write as one group", () =>
    Effect.gen(function* () {
      const gate = yield* Deferred.make<void>()
      const sizes = yield* Ref.make<ReadonlyArray<number>>([])
      const commit = yield* GroupCommit.make<number, void, never, never>({
        groupMax: 1000,
        bytesMax: 1_000_000,
        sizeOf: () => 1,
        isRowError: () => false,
        write: (rows) =>
          Ref.update(sizes, (all) => [...all, rows.length]).pipe(
            Effect.andThen(Deferred.await(gate)),
            Effect.as(rows.map(() => undefined))
          )
      })
      const first = yield* Effect.forkChild(commit.push(0))
      while ((yield* Ref.get(sizes)).length === 0) yield* Effect.yieldNow
      const later = yield* Effect.forEach(
        Array.from({ length: 100 }, (_, n) => n),
        (n) => Effect.forkChild(commit.push(n), { startImmediately: true })
      )
      // One that gives up before it is sent is never written.
      yield* Fiber.interrupt(present(later[50]))
      yield* Deferred.succeed(gate, undefined)
      yield* Fiber.join(first)
      yield* Effect.forEach(
        later.filter((_, n) => n !== 50),
        Fiber.join
      )
      assert.deepStrictEqual(yield* Ref.get(sizes), [1, 99])
    }).pipe(Effect.scoped)
  )

  it.live("writes a full group beside the one before it, and a partial one after it", () =>
    Effect.gen(function* () {
      const gate = yield* Deferred.make<void>()
      const sizes = yield* Ref.make<ReadonlyArray<number>>([])
      const commit = yield* GroupCommit.make<number, void, never, never>({
        groupMax: 10,
        bytesMax: 1_000_000,
        sizeOf: () => 1,
        isRowError: () => false,
        write: (rows) =>
          Ref.update(sizes, (all) => [...all, rows.length]).pipe(
            Effect.andThen(Deferred.await(gate)),
            Effect.as(rows.map(() => undefined))
          )
      })
      const push = (count: number) =>
        Effect.forEach(
          Array.from({ length: count }, (_, n) => n),
          (n) => Effect.forkChild(commit.push(n), { startImmediately: true })
        )
      const first = yield* push(1)
      while ((yield* Ref.get(sizes)).length < 1) yield* Effect.yieldNow
      const second = yield* push(10)
      while ((yield* Ref.get(sizes)).length < 2) yield* Effect.yieldNow
      // Full or not, there is no third connection.
      const third = yield* push(13)
      yield* Deferred.succeed(gate, undefined)
      yield* Effect.forEach([...first, ...second, ...third], Fiber.join)
      assert.deepStrictEqual(yield* Ref.get(sizes), [1, 10, 10, 3])
      yield* commit.idle
    }).pipe(Effect.scoped)
  )

  it.effect("tells how long the oldest group has been on its way", () =>
    Effect.gen(function* () {
      const gates = [yield* Deferred.make<void>(), yield* Deferred.make<void>()]
      let groups = 0
      const commit = yield* GroupCommit.make<number, void, never, never>({
        groupMax: 1,
        bytesMax: 100,
        sizeOf: () => 1,
        isRowError: () => false,
        write: (rows) =>
          Effect.as(
            Deferred.await(present(gates[groups++])),
            rows.map(() => undefined)
          )
      })
      const written = Effect.fnUntraced(function* (row: number) {
        const writing = yield* Effect.forkChild(commit.push(row), { startImmediately: true })
        while (groups <= row) yield* Effect.yieldNow
        return writing
      })
      assert.strictEqual(commit.waitedMillisUnsafe(), 0)
      const first = yield* written(0)
      yield* TestClock.adjust("3 seconds")
      const second = yield* written(1)
      yield* TestClock.adjust("2 seconds")
      assert.strictEqual(commit.waitedMillisUnsafe(), 5000)
      yield* Deferred.succeed(present(gates[0]), undefined)
      yield* Fiber.join(first)
      assert.strictEqual(commit.waitedMillisUnsafe(), 2000)
      yield* Deferred.succeed(present(gates[1]), undefined)
      yield* Fiber.join(second)
      assert.strictEqual(commit.waitedMillisUnsafe(), 0)
    }).pipe(Effect.scoped)
  )

  it.live("keeps a group below its bytes, and still writes a row that is larger", () =>
    Effect.gen(function* () {
      const sizes: Array<number> = []
      const commit = yield* GroupCommit.make<number, void, never, never>({
        groupMax: 1000,
        bytesMax: 100,
        sizeOf: (row) => row,
        isRowError: () => false,
        write: (rows) =>
          Effect.sync(() => rows.map(() => undefined)).pipe(
            Effect.tap(() => Effect.sync(() => sizes.push(rows.length)))
          )
      })
      yield* Effect.forEach([60, 60, 500, 30, 30, 30], commit.push, { concurrency: "unbounded" })
      assert.deepStrictEqual(sizes, [1, 1, 1, 3])
    }).pipe(Effect.scoped)
  )
})
