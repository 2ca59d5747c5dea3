/**
 * Goal: a show in which anything was lost, done twice, or not proven is a failed one, and says so.
 * Method: a good outcome, spoiled in one place at a time.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect } from "effect"
import { paceMillis } from "../../src/main/demo/Show.ts"
import { brokenPromises, type Outcome, reportLines } from "../../src/main/demo/Report.ts"
import { block, plain } from "../../src/main/demo/View.ts"

const takeover = {
  worker: 1,
  pid: 4711,
  documents: 2,
  elsewhere: { firstMillis: 3100, lastMillis: 3400 }
}

const good: Outcome = {
  facts: {
    kill: takeover,
    freeze: {
      ...takeover,
      worker: 2,
      attempted: 1,
      refused: 1,
      sqlStates: ["TN002"],
      frozenMillis: 3500,
      exitCode: 75
    },
    crashed: 0
  },
  evidence: { documents: 9, chunks: 20, duplicates: 0, incomplete: 0, late: 0 },
  todo: 10,
  problems: [{ path: "a.bin", text: "it is not text" }],
  lost: [],
  unchanged: 0,
  gone: 0,
  seconds: 12
}

const freeze = good.facts.freeze
assert(freeze !== undefined)

const spoiled: Readonly<Record<string, Outcome>> = {
  "indexed twice": { ...good, evidence: { ...good.evidence, duplicates: 1 } },
  lost: { ...good, lost: [{ path: "b.md", text: "it has no outcome" }] },
  "1 document lost": { ...good, evidence: { ...good.evidence, incomplete: 1 } },
  "after a takeover": { ...good, evidence: { ...good.evidence, late: 1 } },
  "ended by itself": { ...good, facts: { ...good.facts, crashed: 1 } },
  "could be killed": { ...good, facts: { ...good.facts, kill: undefined } },
  "killed worker's documents": {
    ...good,
    facts: { ...good.facts, kill: { ...takeover, elsewhere: undefined } }
  },
  "could be frozen": { ...good, facts: { ...good.facts, freeze: undefined } },
  "frozen worker's documents": {
    ...good,
    facts: { ...good.facts, freeze: { ...freeze, elsewhere: undefined } }
  },
  "no stale write was refused": {
    ...good,
    facts: { ...good.facts, freeze: { ...freeze, refused: 0 } }
  }
}

describe("the report", () => {
  it.effect("finds nothing wrong with a good show, and tells its numbers", () =>
    Effect.sync(() => {
      assert.deepStrictEqual(brokenPromises(good), [])
      const text = reportLines(good).join("\n")
      for (const line of [
        /documents +9 indexed\n/,
        /chunks +20\n/,
        /a\.bin: it is not text/,
        /kill -> running elsewhere: 3\.1 s, and all 2 after 3\.4 s/,
        /freeze -> running elsewhere: 3\.1 s/,
        /stale writes +1 attempted .* 1 refused by the database \(TN002\)/,
        /duplicates +0\n/,
        /losses +0\n/
      ]) {
        assert.match(text, line)
      }
    })
  )

  for (const [promise, outcome] of Object.entries(spoiled)) {
    it.effect(`calls a promise broken: ${promise}`, () =>
      Effect.sync(() => {
        const broken = brokenPromises(outcome)
        assert.lengthOf(broken, 1)
        assert.include(broken[0], promise)
      })
    )
  }

  it.effect("asks for no proof of a folder in which nothing could be written", () =>
    Effect.sync(() => {
      const facts = { kill: undefined, freeze: undefined, crashed: 0 }
      const evidence = { ...good.evidence, documents: 0, chunks: 0 }
      assert.deepStrictEqual(brokenPromises({ ...good, facts, evidence }), [])
    })
  )
})

describe("the view", () => {
  const member = (state: "running" | "frozen", path: string) => ({
    number: 1,
    pid: 4711,
    state,
    indexed: 3,
    running: new Map([["item", path]]),
    asking: new Set<string>(),
    exitCode: undefined
  })
  const progress = {
    todo: 10,
    indexed: 6,
    problems: 1,
    refused: 0,
    members: [
      member("running", `docs/${"x".repeat(300)}.md`),
      member("frozen", "docs/\u001b[2Jy.md")
    ]
  }

  it.effect("draws no line that a terminal would wrap, however narrow", () =>
    Effect.sync(() => {
      for (const columns of [20, 50, 80, 200]) {
        for (const line of block(progress, columns, false)) {
          assert.isBelow(line.length, Math.max(columns, 45))
          assert.notInclude(line, "\u001b")
        }
      }
    })
  )

  it.effect("counts what a frozen worker still holds as waiting", () =>
    Effect.sync(() => {
      assert.include(
        plain(progress),
        "6 of 10 indexed, 1 running, 2 waiting, 0 stale writes refused"
      )
    })
  )

  it.effect("slows a small folder down, and a large one not", () =>
    Effect.sync(() => {
      assert.isAtMost(paceMillis(1), 1200)
      assert.isAbove(paceMillis(1), 500)
      assert.isBelow(paceMillis(20_000), 5)
    })
  )
})
