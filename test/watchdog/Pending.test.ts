/**
 * Goal: a person is told why work waits, and the reason is the first that explains it (K-070).
 * Method: facts that differ in one thing each.
 */
import { assert, describe, it } from "@effect/vitest"
import type { QueueFacts } from "../../src/watchdog/MonitorStore.ts"
import { inWords, whyWaiting } from "../../src/watchdog/Pending.ts"

const at = (seconds: number): Date => new Date(1_000_000 + seconds * 1000)

const facts = (changes: Partial<QueueFacts>): QueueFacts => ({
  queue: "letters",
  application_name: "post",
  global_limit: 3,
  per_key_limit: 2,
  paused_at: null,
  rate_limit: 100,
  rate_window_ms: 60_000,
  is_rate_full: false,
  is_full: false,
  has_startable: true,
  waiting_id: "an id",
  waiting_since: at(0),
  waiting_version: null,
  waiting_is_suspect: false,
  claimed: 0,
  claimed_id: null,
  claimed_by: null,
  claimed_since: null,
  last_claim_at: null,
  executors: 1,
  executors_of_version: 1,
  observed_at: at(200),
  ...changes
})

describe("why work waits", () => {
  const reasons: ReadonlyArray<readonly [Partial<QueueFacts>, string | undefined]> = [
    [{ waiting_id: null }, undefined],
    [{ application_name: null, executors: 0 }, "no executor has ever run this queue"],
    [{ executors: 0 }, "no executor of post holds a lease"],
    [{ waiting_version: "v1", executors_of_version: 0 }, "version v1 has started it"],
    [{ paused_at: at(20), is_rate_full: true }, "the queue has been paused for 3 min"],
    [{ is_rate_full: true, is_full: true }, "the queue's rate is used up: 100 in 1 min"],
    [{ is_full: true }, "limit of 3 running items"],
    [{ has_startable: false }, "every key that waits runs as many items as it may (2)"],
    [{ has_startable: false, per_key_limit: null }, "every key that waits has used up its rate"],
    [{ waiting_is_suspect: true }, "an executor was lost with it"],
    [{}, "nobody has claimed"],
    [{ last_claim_at: at(10) }, "the last claim was 3 min ago"]
  ]

  for (const [changes, words] of reasons) {
    it(words === undefined ? "is nothing where nothing waits" : `is that ${words}`, () => {
      const why = whyWaiting(facts(changes))
      if (words === undefined) assert.isUndefined(why)
      else assert.include(why ?? "", words)
    })
  }

  it("counts in the largest unit", () => {
    assert.deepStrictEqual([-5, 999, 59_999, 60_000, 7_200_000, 200_000_000].map(inWords), [
      "0 s",
      "0 s",
      "59 s",
      "1 min",
      "2 h",
      "2 d"
    ])
  })
})
