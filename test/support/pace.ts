/**
 * How many times slower this machine is than the one on which the short leases of the tests were chosen:
 * 1 to 4, measured once a run by vitest.config.ts. The windows of a process under test grow with it, for
 * one that is starved of a processor is ended by its watchdog, and rightly so. Nothing is asserted about it.
 */
import { spawnSync } from "node:child_process"

const variable = "TENURE_TEST_PACE"

/** What starting Node with Effect takes there. */
const referenceMillis = 250

export const pace = Number(process.env[variable] ?? 1)

/** Inherited by the processes that run the tests. */
export const measurePace = (root: string): void => {
  if (process.env[variable] !== undefined) return
  const start = () => {
    const before = performance.now()
    spawnSync(process.execPath, ["--input-type=module", "-e", "await import('effect')"], {
      cwd: root
    })
    return performance.now() - before
  }
  // The first one reads from the disk.
  start()
  const measured = Math.min(start(), start()) / referenceMillis
  const rounded = Math.round(Math.min(4, Math.max(1, measured)) * 10) / 10
  process.env[variable] = String(rounded)
  console.log(`${variable}=${rounded}`)
}
