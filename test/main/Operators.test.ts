/**
 * Goal: what an operator asks about queues, items and dead letters is answered in words, without payloads,
 * and what he does is done once and in the audit (I-064, I-065).
 * Method: the command as a process, as the role that hands in; the words for one item as a pure function.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect, type Scope } from "effect"
import { whyItem } from "../../src/main/commands/ItemHistory.ts"
import { parseAge } from "../../src/main/commands/Change.ts"
import type { ItemDetail, WaitRow } from "../../src/queue/ItemStore.ts"
import * as K from "../kernel/kernel.ts"
import { present } from "../support/present.ts"
import { freshDatabase } from "../support/Postgres.ts"
import { bin, start } from "./Child.ts"

const tenure = (
  url: string,
  ...args: ReadonlyArray<string>
): Effect.Effect<{ code: number | null; stdout: string; stderr: string }, never, Scope.Scope> =>
  Effect.gen(function* () {
    const child = yield* start([bin, ...args, "--url", url])
    const { code } = yield* child.end
    return { code, stdout: child.stdout(), stderr: child.stderr() }
  })

const scene = Effect.gen(function* () {
  const database = yield* freshDatabase
  const sql = yield* K.sessionOf(database, "owner")
  const runner = yield* K.executorOf(database, { queue: "mail", globalLimit: 20_000 })
  return { database, sql, runner, url: database.urlOf("api") }
})

describe("tenure queues", () => {
  it.live(
    "counts no further than it says, and pauses and resumes",
    () =>
      Effect.gen(function* () {
        const { runner, sql, url } = yield* scene
        yield* K.enqueueMany(sql, "mail", 10_050)
        const [running] = yield* K.claim(runner, 2)
        yield* K.settle(runner, [{ ...present(running), outcome: "failed" }])
        const paused = yield* tenure(url, "queues", "pause", "mail")
        assert.strictEqual(paused.code, 0, paused.stderr)
        assert.include(paused.stdout, "What runs goes on")
        const { code, stderr, stdout } = yield* tenure(url, "queues")
        assert.strictEqual(code, 0, stderr)
        assert.match(
          stdout,
          /mail +app +10,000\+ +\d+ (s|min) +0 +0 +1 +1 +20\d\d-\S+ +global_limit 20000/
        )
        const resumed = yield* tenure(url, "queues", "resume", "mail")
        assert.include(resumed.stdout, "Queue mail is not paused.")
        assert.deepStrictEqual(yield* sql`SELECT paused_at FROM tenure.queue`, [
          { paused_at: null }
        ])
      }),
    120_000
  )
})

describe("tenure items", () => {
  it.live(
    "shows one with its history and reason, and no payload unless asked; cancels, retries",
    () =>
      Effect.gen(function* () {
        const { runner, sql, url } = yield* scene
        const id = yield* K.enqueueOne(sql, "mail", `"a-secret"`, { key: "k" })
        const [claimed] = yield* K.claim(runner, 1)
        yield* K.checkpoint(runner, [
          { ...present(claimed), name: "charged", value: `"another-secret"` }
        ])
        yield* K.settle(runner, [
          { ...present(claimed), outcome: "failed", result: `{"_tag":"Refused","why":"a-secret"}` }
        ])
        const waiting = yield* K.enqueueOne(sql, "mail", `"a-secret"`)
        const listed = yield* tenure(url, "items", "list", "--state", "failed", "--json")
        assert.strictEqual(listed.code, 0, listed.stderr)
        assert.deepStrictEqual(
          (JSON.parse(listed.stdout) as ReadonlyArray<Record<string, unknown>>).map((one) => [
            one["id"],
            one["reason"],
            one["key"]
          ]),
          [[id, "DeclaredError", "k"]]
        )
        assert.include((yield* tenure(url, "items", "retry", id)).stdout, "is available again")
        const cancelled = yield* tenure(url, "items", "cancel", waiting)
        assert.include(cancelled.stdout, `Item ${waiting} is cancelled.`)
        const shown = yield* tenure(url, "items", "show", id)
        assert.strictEqual(shown.code, 0, shown.stderr)
        assert.include(shown.stdout, "It is available: ")
        assert.include(shown.stdout, "Checkpoints: charged")
        assert.match(
          shown.stdout,
          /handed in\n.*checkpoint charged, attempt 1\n.*item.retried by tenure_test_api/
        )
        assert.notInclude(listed.stdout + shown.stdout, "secret")
        const withPayload = yield* tenure(url, "items", "show", id, "--payload", "--json")
        assert.strictEqual(
          (JSON.parse(withPayload.stdout) as { payload: unknown }).payload,
          "a-secret"
        )
        assert.notInclude(withPayload.stdout, "another-secret")
      }),
    120_000
  )
})

describe("tenure dead-letters", () => {
  it.live(
    "lists, redrives and purges by the same conditions; the audit says who did it",
    () =>
      Effect.gen(function* () {
        const { runner, sql, url } = yield* scene
        const ids = yield* K.enqueueMany(sql, "mail", 3)
        const claimed = yield* K.claim(runner, 3)
        yield* K.settle(
          runner,
          claimed.map(({ attempt, id }, at) => ({
            id,
            attempt,
            outcome: "failed",
            ...(at === 0 ? { reason: "HandlerDied" } : {}),
            result: `{"_tag":"Refused","n":"secret ${at}"}`
          }))
        )
        const listed = yield* tenure(url, "dead-letters", "list")
        assert.strictEqual(listed.code, 0, listed.stderr)
        assert.match(listed.stdout, new RegExp(`${ids[0]} +mail +HandlerDied +Refused`))
        assert.notInclude(listed.stdout, "secret")
        const refused = yield* tenure(url, "dead-letters", "purge", "mail")
        assert.strictEqual(refused.code, 1)
        assert.include(refused.stderr, "give a condition, or --all")
        const purged = yield* tenure(
          url,
          ...["dead-letters", "purge", "mail", "--error-contains", "secret 2", "--json"]
        )
        assert.deepStrictEqual(JSON.parse(purged.stdout), { processed: 1, purged: 1 })
        const redriven = yield* tenure(url, "dead-letters", "redrive", "mail")
        assert.include(redriven.stdout, "2 of 2 items of queue mail are available again")
        assert.deepStrictEqual(yield* K.placesOf(sql, ids), {
          [present(ids[0])]: "ready",
          [present(ids[1])]: "ready",
          [present(ids[2])]: "nowhere"
        })
        const audit = yield* tenure(url, "audit", "--event", "dead_letter")
        assert.match(
          audit.stdout,
          new RegExp(
            `dead_letter.purged +${ids[2]} +mail +tenure_test_api +tenure command +attempt 1`
          )
        )
        assert.lengthOf(audit.stdout.match(/dead_letter.redriven/g) ?? [], 2)
      }),
    120_000
  )
})

describe("the words for one item", () => {
  const at = new Date(1_000_000)
  const item: ItemDetail = {
    id: "i",
    queue: "mail",
    state: "available",
    priority: 0,
    key: null,
    idempotency_key: null,
    attempt: 2,
    failures: 0,
    losses: 0,
    stuck: 0,
    version: null,
    suspect: false,
    owner: null,
    reason: null,
    enqueued_at: at,
    deadline_at: null,
    due_at: at,
    claimed_at: null,
    finished_at: null
  }
  const wait: WaitRow = {
    application_name: "shop",
    version: "v0",
    suspect: true,
    executors: 2,
    executors_of_version: 1,
    paused_at: null,
    global_limit: 3,
    is_full: false,
    per_key_limit: 1,
    is_key_full: false,
    is_rate_used: false,
    is_key_rate_used: false,
    last_claim_at: at,
    observed_at: new Date(1_200_000)
  }
  // Each line is true of more than one reason; the first in the order of reasons is the one that helps.
  const table: ReadonlyArray<readonly [Partial<ItemDetail>, Partial<WaitRow>, string]> = [
    [{}, { application_name: null, executors: 0 }, "no executor has ever run"],
    [{}, { executors: 0, executors_of_version: 0, paused_at: at }, "no executor of shop holds"],
    [{}, { executors_of_version: 0, paused_at: at }, "version v0 has started it"],
    [{}, { paused_at: at, is_rate_used: true }, "paused for 3 min"],
    [{}, { is_rate_used: true, is_full: true }, "the rate of its queue"],
    [{}, { is_full: true, is_key_full: true }, "as many items as it may (3)"],
    [{}, { is_key_full: true, is_key_rate_used: true }, "its key runs as many items as it may (1)"],
    [{}, { is_key_rate_used: true }, "the rate of its key"],
    [{}, {}, "an executor was lost with it"],
    [{}, { suspect: false }, "the last claim was 3 min ago"],
    [{}, { suspect: false, last_claim_at: null }, "nobody has claimed"],
    [{ state: "leased", owner: "x" }, {}, "x has claimed it, and this is attempt 2"],
    [{ state: "delayed", losses: 1, failures: 1 }, {}, "a pause after an executor was lost"],
    [{ state: "delayed", failures: 1 }, {}, "the pause before its next try"],
    [{ state: "delayed", attempt: 0 }, {}, "as it was handed in"],
    [{ state: "failed", reason: "DeclaredError" }, {}, "has answered with an error"],
    [{ state: "failed", reason: "DeadlineExceeded" }, {}, "its deadline"],
    [{ state: "sleeping" }, {}, "It is sleeping in a durable wait, until 1970"],
    [{ state: "waiting", due_at: null }, {}, "until it is told"]
  ]
  for (const [ofItem, ofWait, words] of table) {
    it(`are: ${words}`, () => {
      assert.include(whyItem({ ...item, ...ofItem }, { ...wait, ...ofWait }, undefined), words)
    })
  }

  it("an age is a number and a unit", () => {
    assert.deepStrictEqual(
      ["90s", "15min", "2h", "7 d"].map(parseAge),
      [90_000, 900_000, 7_200_000, 604_800_000]
    )
    for (const wrong of ["soon", "5", "-1h", "1.5h", ""]) {
      assert.throws(() => parseAge(wrong), "is no age")
    }
  })
})
