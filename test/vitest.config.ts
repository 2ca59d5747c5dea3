/**
 * Run with `vitest --config test/vitest.config.ts`, from anywhere in the repository. One PostgreSQL
 * serves the whole run; TENURE_TEST_PG=/usr/lib/postgresql/15/bin takes another release's binaries.
 */
import { fileURLToPath } from "node:url"
import { defineConfig } from "vitest/config"
import { BaseSequencer, type TestSpecification } from "vitest/node"
import { measurePace } from "./support/pace.ts"

const path = (relative: string): string => fileURLToPath(new URL(relative, import.meta.url))

/** One file waits for 75 s, whatever the machine: at the end of the run it would add them all. */
class LongestFirst extends BaseSequencer {
  override async sort(files: Array<TestSpecification>): Promise<Array<TestSpecification>> {
    const sorted = await super.sort(files)
    const isLongest = (file: TestSpecification) => file.moduleId.includes("ProductionLease")
    return [...sorted.filter(isLongest), ...sorted.filter((file) => !isLongest(file))]
  }
}

measurePace(path(".."))

// vitest takes its settings from a default export only.
export default defineConfig({
  root: path(".."),
  resolve: {
    alias: [
      { find: /^tenure\/http$/, replacement: path("../src/http/index.ts") },
      { find: /^tenure\/testing$/, replacement: path("../src/testing/index.ts") },
      { find: /^tenure$/, replacement: path("../src/index.ts") }
    ]
  },
  test: {
    include: ["test/**/*.test.ts"],
    globalSetup: [path("support/globalSetup.ts")],
    pool: "forks",
    // With three on two cores their sessions wait for a processor, and some are judged for it.
    maxWorkers: 2,
    sequence: { sequencer: LongestFirst },
    testTimeout: 60_000,
    hookTimeout: 60_000
  }
})
