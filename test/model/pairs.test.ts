/**
 * Goal: whatever operations meet, every snapshot keeps the invariants, nothing deadlocks, and after the
 * storm nothing that was acknowledged is missing (I4, I5, I7, I9, I10, L1, rows 16, 23, 40 and 52).
 * Method: the storm for TENURE_STRESS_SECONDS (60) with the choices of TENURE_SEED; the invariants about
 * every 0.7 s in one snapshot; then everything is drained. A run that never reached a refusal, a
 * takeover, a poison, an unknown outcome or a terminated backend has proved nothing and fails.
 */
import { it } from "@effect/vitest"
import { secondsOr, storm } from "./storm.ts"

const seconds = secondsOr(60)

it.live(
  "random pairs of everything keep every invariant in every snapshot",
  () => storm(seconds),
  (4 * seconds + 300) * 1000
)
