/** The packages that Tenure is compared with: in a folder of their own, installed when first needed. */
import { Effect } from "effect"
import { execFile } from "node:child_process"
import { existsSync } from "node:fs"
import { fileURLToPath } from "node:url"

const folder = fileURLToPath(new URL("peers", import.meta.url))

export const installed = (name: string): Effect.Effect<void> =>
  Effect.callback((resume) => {
    if (existsSync(`${folder}/node_modules/${name}`)) return resume(Effect.void)
    process.stderr.write("  installing the peers, once\n")
    execFile("npm", ["ci", "--no-audit", "--no-fund"], { cwd: folder }, (error, _stdout, stderr) =>
      resume(
        error === null
          ? Effect.void
          : Effect.die(new Error(`npm ci in bench/peers has failed: ${stderr.trim()}`))
      )
    )
  })
