/**
 * Goal: a worker in another language does all that one of ours does; when it is killed or frozen its work goes
 * on elsewhere, and once it is back it is refused.
 * Method: Python's standard library and nothing else, as a process that gets signals; sessions of five seconds, more on
 * a slow machine.
 * Covers I-001, I-007, I-009, I-011, I-016 to I-018, I-021, I-064, I-065.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect, type Scope, Schema } from "effect"
import { spawnSync } from "node:child_process"
import { fileURLToPath } from "node:url"
import { WorkQueue } from "tenure"
import * as World from "../http/api.ts"
import { eventually } from "../kernel/kernel.ts"
import { type Child, start } from "../main/Child.ts"
import { pace } from "../support/pace.ts"

class Unreadable extends Schema.TaggedError<Unreadable>()("Unreadable", {}) {}

class Words extends WorkQueue.make("words", {
  payload: { text: Schema.String },
  success: Schema.Struct({ words: Schema.Int, losses: Schema.Int }),
  error: Unreadable
}) {}

const program = fileURLToPath(new URL("worker.py", import.meta.url))

const hasPython = spawnSync("python3", ["--version"]).status === 0

const python = ({ url }: World.Process, secret: string): Effect.Effect<Child, never, Scope.Scope> =>
  start([program, "words"], {
    program: "python3",
    env: { TENURE_URL: url, TENURE_TOKEN: secret }
  })

// Of the process the production lease: it is not what is killed here.
const settings = {
  pullHeartbeat: "1 second",
  pullLease: 5000 * pace,
  capacityScan: "200 millis",
  capacityGrace: "200 millis"
} as const

describe.runIf(hasPython)("a worker in Python", () => {
  it.live(
    "that is frozen beyond its lease loses its item, and once thawed is told so and goes on",
    () =>
      Effect.gen(function* () {
        const world = yield* World.process({ settings })
        const { secret } = yield* world.token("worker")
        const frozen = yield* python(world, secret)
        yield* frozen.line("> session")
        yield* Effect.gen(function* () {
          const slow = yield* Words.enqueue({ text: "slow item" })
          yield* frozen.line(`> executing ${slow}`)
          yield* frozen.kill("SIGSTOP")
          const heir = yield* python(world, secret)
          assert.deepStrictEqual(yield* Words.await(slow), { words: 2, losses: 1 })
          yield* heir.kill("SIGTERM")
          yield* heir.line("> closed")
          yield* frozen.kill("SIGCONT")
          assert.strictEqual(yield* frozen.line("> stale"), "unknown session")
          const next = yield* Words.enqueue({ text: "in a session of its own" })
          assert.deepInclude(yield* Words.await(next), { words: 6 })
          assert.notInclude(frozen.stdout(), `> settled ${slow}`)
          assert.deepStrictEqual(
            yield* world.sql`
              SELECT outcome, attempt, losses FROM tenure.done WHERE id = ${slow}::uuid`,
            [{ outcome: "completed", attempt: 2, losses: 1 }]
          )
        }).pipe(Effect.provideContext(world.context))
      }).pipe(Effect.scoped),
    120_000
  )

  it.live(
    "pulls, settles, fails and is told to stop; killed, it loses its item to another one",
    () =>
      Effect.gen(function* () {
        const world = yield* World.process({ settings })
        const { secret } = yield* world.token("worker")
        const first = yield* python(world, secret)
        yield* first.line("> session")
        yield* Effect.gen(function* () {
          const hand = (text: string) => Words.enqueue({ text })
          const counted = yield* hand("three words here")
          assert.deepInclude(yield* Words.await(counted), { words: 3 })

          const flaky = yield* hand("flaky item")
          assert.deepInclude(yield* Words.await(flaky), { words: 2 })
          assert.deepStrictEqual(
            yield* world.sql`SELECT failures FROM tenure.done WHERE id = ${flaky}::uuid`,
            [{ failures: 1 }]
          )

          const unreadable = yield* hand("unreadable")
          assert.deepStrictEqual(yield* Effect.flip(Words.await(unreadable)), new Unreadable({}))

          const endless = yield* hand("endless")
          yield* first.line(`> executing ${endless}`)
          yield* Words.cancel(endless)
          const cancelled = yield* Effect.flip(Words.await(endless))
          assert.deepNestedInclude(cancelled, { "reason._tag": "Cancelled" })
          yield* first.line(`> settled ${endless}`)

          const deadly = yield* hand("deadly item")
          yield* first.line(`> executing ${deadly}`)
          yield* first.kill("SIGKILL")
          yield* first.end
          const second = yield* python(world, secret)
          assert.deepStrictEqual(yield* Effect.timeout(Words.await(deadly), "60 seconds"), {
            words: 2,
            losses: 1
          })
          assert.deepStrictEqual(
            yield* world.sql`
              SELECT event, count(*)::int AS count FROM tenure.audit_event
               WHERE item_id = ${deadly}::uuid GROUP BY event ORDER BY event`,
            [
              { event: "capacity.lease.expired", count: 1 },
              { event: "capacity.segment.recovered", count: 1 }
            ]
          )
          yield* second.kill("SIGTERM")
          yield* second.line("> closed")
          assert.strictEqual((yield* second.end).code, 0, second.stderr())
          // The killed one's went by its clock, this one in order.
          yield* eventually(
            "no session is left",
            Effect.map(world.sql`SELECT FROM tenure.session`, (rows) => rows.length === 0)
          )
        }).pipe(Effect.provideContext(world.context))
      }).pipe(Effect.scoped),
    120_000
  )
})
