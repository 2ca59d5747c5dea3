/**
 * Goal: no call of the kernel is compiled before it runs. Servers before 18 price a plan that must use
 * what a function has switched off at 1e10, and that starts the compiler: 30 to 60 ms for each claim
 * and each settle, on a server with its default settings, instead of 1.
 * Method: the catalog, because the embedded server has no compiler to measure.
 */
import { assert, it } from "@effect/vitest"
import { Effect } from "effect"
import * as Fixture from "./Fixture.ts"

it.live("every function that switches a kind of plan off switches the compiler off too", () =>
  Effect.gen(function* () {
    const fixture = yield* Fixture.make
    const functions = yield* fixture.owner<{ readonly name: string; readonly compiled: boolean }>`
      SELECT p.proname AS name, NOT p.proconfig @> ARRAY['jit=off'] AS compiled
        FROM pg_proc p
       WHERE p.pronamespace = 'tenure'::regnamespace AND p.proconfig::text LIKE '%enable_%'`
    assert.isAbove(functions.length, 10)
    assert.deepStrictEqual(
      functions.filter(({ compiled }) => compiled),
      []
    )
  })
)
