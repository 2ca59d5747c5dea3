/**
 * Goal: the README's worker works as it stands there.
 * Method: its block, run by a shell against a process that serves the API.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect, Schema } from "effect"
import { spawnSync } from "node:child_process"
import { readFileSync } from "node:fs"
import { WorkQueue } from "tenure"
import * as World from "../http/api.ts"
import { start } from "../main/Child.ts"
import { present } from "../support/present.ts"

class Charge extends WorkQueue.make("charge", {
  payload: { orderId: Schema.String, cents: Schema.Int },
  success: Schema.Struct({ receipt: Schema.String })
}) {}

const hasCurl = spawnSync("curl", ["--version"]).status === 0

describe.runIf(hasCurl)("the README's worker of a shell and curl", () => {
  it.live("opens a session, gets an item, and settles it", () =>
    Effect.gen(function* () {
      const readme = readFileSync(new URL("../../README.md", import.meta.url), "utf8")
      const script = /<!-- example: worker\.sh -->\s*```sh\n([\s\S]*?)```/.exec(readme)?.[1]
      const world = yield* World.process()
      const { secret } = yield* world.token("worker")
      const id = yield* Charge.enqueue({ orderId: "7", cents: 995 }).pipe(
        Effect.provideContext(world.context)
      )
      const shell = yield* start(["-euc", present(script)], {
        program: "bash",
        env: { TENURE_URL: world.url, TENURE_TOKEN: secret }
      })
      const { code } = yield* shell.end
      assert.strictEqual(code, 0, shell.stdout() + shell.stderr())
      assert.deepStrictEqual(yield* Charge.await(id).pipe(Effect.provideContext(world.context)), {
        receipt: "r-1"
      })
      assert.include(shell.stdout(), `{"handedBack":0}`)
    }).pipe(Effect.scoped)
  )
})
