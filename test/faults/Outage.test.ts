/**
 * Goal: losing the database stops progress and never correctness, and its return needs no operator
 * (rows 22 and 23; I14, L1; P-36, P-37; K-181, K-185 to K-190, K-195, K-197 to K-199; bug reports 2
 * and 28).
 * Method: replicas behind a proxy that resets every connection; the server ends sessions at random.
 */
import { describe, it } from "@effect/vitest"
import { outage, terminations } from "./support/Outage.ts"
import { run } from "./support/World.ts"

describe.concurrent("an outage", () => {
  it.live(
    "ends five replicas, and their replacements wait for its end in turns and recover everything",
    () => run(outage(5, 3)),
    400_000
  )

  it.live(
    "of single sessions at random moments fails no item and ends no process",
    () => run(terminations(500, 15)),
    400_000
  )
})
