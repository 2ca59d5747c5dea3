/**
 * What an executor and the main of its process know of each other. An executor is built somewhere
 * inside the application's layer and seldom part of its output, so it introduces itself here; the
 * main watches it, and says when the whole layer is up.
 *
 * Without a main (tests, an application that runs the layer itself) nobody is told, and a layer
 * counts as complete from the start.
 */
import { Context, Effect } from "effect"
import type * as Supervisor from "../actor/Supervisor.ts"
import type { Executor } from "./Executor.ts"

export interface Launched {
  readonly executor: Executor["Service"]
  readonly supervisor: Supervisor.Service
}

export const Launch = Context.Reference<{
  readonly announce: (launched: Launched) => Effect.Effect<void>
  readonly isCompleteUnsafe: () => boolean
}>("tenure/executor/Launch", {
  defaultValue: () => ({ announce: () => Effect.void, isCompleteUnsafe: () => true })
})
