/**
 * Goal and method of Outage.test.ts, for longer: ten replicas through an outage of minutes, and more
 * items under more terminations (rows 22 and 23).
 */
import { describe, it } from "@effect/vitest"
import { outage, terminations } from "./support/Outage.ts"
import { run } from "./support/World.ts"

describe.concurrent("a long outage", () => {
  it.live(
    "ends ten replicas, and their replacements wait for its end in turns and recover everything",
    () => run(outage(10, 7)),
    600_000
  )

  it.live(
    "of single sessions for a minute and more fails no item and ends no process",
    () => run(terminations(3000, 300)),
    600_000
  )
})
