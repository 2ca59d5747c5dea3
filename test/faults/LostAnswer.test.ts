/**
 * Goal: when the answer to a commit is lost, nobody guesses: what was committed is found by its token,
 * and there is exactly one effect (row 20; I5; K-158; bug reports 2 and 13).
 * Method: a proxy forwards a statement whole and then resets its connection, so that the server has
 * executed what the client must think failed.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect } from "effect"
import { SqlClient } from "effect/sql"
import { endpointAt } from "./support/Server.ts"
import { connect } from "../support/Postgres.ts"
import { type Instruction, Work } from "./support/Work.ts"
import { run, steady, type World } from "./support/World.ts"

/** One item, with the connection cut at the first statement of that kind. */
const cutAt = Effect.fnUntraced(function* (
  world: World,
  statement: RegExp,
  program: ReadonlyArray<Instruction>,
  options: { readonly answer?: string; readonly transaction?: boolean } = {}
) {
  const { answer, transaction = false } = options
  const proxy = yield* world.proxy
  const settings = { ...steady, probe: "6 seconds" }
  const worker = yield* world.ready({ url: proxy.url, settings, transaction })
  // Until the next one, the statements are those of the item.
  yield* world.betweenProbes
  const hasCut = proxy.cutAfter(statement, answer)
  const [item = ""] = yield* world.enqueue([program])
  // The audit looks at claims that are older than ten seconds, every ten seconds.
  yield* world.allSettled()
  assert.isTrue(hasCut())
  assert.isFalse(worker.hasEnded())
  const outcome = (yield* world.outcomes)[0]
  assert.deepInclude(outcome, { id: item, outcome: "completed", losses: 0 })
  return outcome
})

describe.concurrent("a lost answer", () => {
  it.live(
    "to an outcome changes nothing: it is sent again, and known",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const outcome = yield* cutAt(world, /tenure\.settle\(/, [{ do: "step", name: "work" }])
          assert.deepInclude(outcome, { attempt: 1, failures: 0 })
        })
      ),
    300_000
  )

  it.live(
    "to a checkpoint does not run the step again",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const outcome = yield* cutAt(world, /tenure\.checkpoint\(/, [
            { do: "step", name: "charge" }
          ])
          assert.deepInclude(outcome, { attempt: 1, failures: 0 })
          assert.strictEqual(world.sink.arrivalsOf("charge").length, 1)
        })
      ),
    300_000
  )

  it.live(
    "to a handler's commit has the attempt repeated, which finds its row",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const outcome = yield* cutAt(world, /^COMMIT$/, [{ do: "write once" }])
          assert.deepInclude(outcome, { attempt: 2, failures: 1 })
          assert.strictEqual(yield* world.count("app.once WHERE attempt = 1"), 1)
        })
      ),
    300_000
  )

  it.live(
    "to the commit of a handler and its outcome changes nothing: it is known",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const transaction = true
          const outcome = yield* cutAt(world, /^COMMIT$/, [{ do: "write once" }], { transaction })
          assert.deepInclude(outcome, { attempt: 1, failures: 0 })
          assert.strictEqual(yield* world.count("app.once WHERE attempt = 1"), 1)
        })
      ),
    300_000
  )

  it.live(
    "to a claim has the items handed back by the audit, at nobody's cost",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          // One that finds nothing has nothing to lose.
          const answer = world.secret
          const program = [{ do: "step", name: "work" }] as const
          const outcome = yield* cutAt(world, /tenure\.claim\(/, program, { answer })
          assert.deepInclude(outcome, { attempt: 2, failures: 0 })
        })
      ),
    300_000
  )

  it.live(
    "to an enqueue leaves one item, when it is repeated with its idempotency key",
    () =>
      run(
        Effect.fnUntraced(function* (world) {
          const proxy = yield* world.proxy
          const sql = yield* connect(endpointAt(proxy.through(world.server.api)))
          const enqueue = Work.enqueue(
            { program: [{ do: "step", name: "work" }], secret: world.secret },
            { idempotencyKey: "once" }
          ).pipe(Effect.provideService(SqlClient.SqlClient, sql))
          const hasCut = proxy.cutAfter(/tenure\.enqueue_all\(/)
          const error = yield* Effect.flip(enqueue)
          assert.strictEqual(error._tag, "SqlError")
          assert.isTrue(hasCut())
          const item = yield* enqueue
          yield* world.ready({ settings: steady })
          yield* world.allSettled()
          assert.deepStrictEqual(
            (yield* world.outcomes).map(({ id }) => id),
            [item]
          )
        })
      ),
    300_000
  )
})
