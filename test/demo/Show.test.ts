/**
 * Goal: the command of the README does what it promises to somebody who has never seen it: documents
 * are indexed while one worker is killed and another frozen, the stale write is refused, bad files
 * stop nothing, and a second run indexes only what has changed.
 * Method: the real command with its embedded PostgreSQL, on a small folder with bad files of each kind.
 * Faults: SIGKILL at work, SIGSTOP between a read and its write past the lease, SIGCONT.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect } from "effect"
import { writeFileSync } from "node:fs"
import { join } from "node:path"
import { demo, isAlive, temporaryFolder, writeBadFiles, writeDocuments } from "./command.ts"

const pidsOf = (output: string): ReadonlyArray<number> =>
  [...output.matchAll(/\(pid (\d+)\)/g)].map(([, pid]) => Number(pid))

describe("npm start", () => {
  it.live(
    "indexes each document once through a kill and a freeze, and only what has changed the second time",
    () =>
      Effect.gen(function* () {
        const directory = yield* temporaryFolder
        const nothing = yield* Effect.flatMap(
          demo(directory, ["search", "fox"]),
          (run) => run.ended
        )
        assert.strictEqual(nothing.exitCode, 0, nothing.output)
        assert.include(nothing.output, "Nothing is indexed yet")

        writeDocuments(directory, 20)
        const complaints = writeBadFiles(join(directory, "bad"))
        const first = yield* demo(directory, ["--dir", "."])
        yield* first.untilItSays(/is frozen with SIGSTOP/)
        const meanwhile = yield* Effect.flatMap(
          demo(directory, ["search", "interruption", "--limit", "3"]),
          (run) => run.ended
        )
        assert.strictEqual(meanwhile.exitCode, 0, meanwhile.output)
        assert.match(meanwhile.output, /1\. Document \d+[^]*\*interruption\*/)
        const { exitCode, output } = yield* first.ended
        assert.strictEqual(exitCode, 0, output)
        for (const complaint of complaints) assert.match(output, complaint)
        for (const line of [
          /documents +20 indexed\n/,
          /not indexable +6 files\n/,
          /kill -> running elsewhere: [\d.]+ s/,
          /freeze -> running elsewhere: [\d.]+ s/,
          /stale writes +([12]) attempted .*, \1 refused by the database \(TN002\)\n/,
          /has lost its lease and ended \(exit code 75\)/,
          /duplicates +0\n/,
          /losses +0\n/,
          /Every document was indexed exactly once/,
          /npm start -- search/
        ]) {
          assert.match(output, line)
        }
        assert.deepStrictEqual(pidsOf(output).filter(isAlive), [], "no worker is left")

        writeFileSync(join(directory, "good", "7.md"), "# Rewritten\n\nAnother text, a zebra.\n")
        const second = yield* Effect.flatMap(demo(directory, ["--dir", "."]), (run) => run.ended)
        assert.strictEqual(second.exitCode, 0, second.output)
        assert.match(second.output, /1 document to index, 25 unchanged \(6 not indexable\)/)
        assert.match(second.output, /documents +1 indexed, 25 unchanged\n/)
        assert.match(second.output, /stale writes +1 attempted .*, 1 refused by the database/)
        const zebra = yield* Effect.flatMap(
          demo(directory, ["search", "zebra"]),
          (run) => run.ended
        )
        assert.match(zebra.output, /Rewritten[^]*good\/7\.md:1[^]*1 document of 20 matches/)
        const old = yield* Effect.flatMap(demo(directory, ["search", "word7"]), (run) => run.ended)
        assert.match(old.output, /None of the 20 documents matches word7/)

        const third = yield* Effect.flatMap(demo(directory, ["--dir", "."]), (run) => run.ended)
        assert.strictEqual(third.exitCode, 0, third.output)
        assert.match(third.output, /Nothing has changed since the last time: 20 documents indexed/)
        for (const complaint of complaints) assert.match(third.output, complaint)
      }).pipe(Effect.scoped),
    300_000
  )
})
