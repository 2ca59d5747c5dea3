/** What a queue's definition says in JSON, for modules of ours that hand in and await its items by themselves. */
import type { Effect, Schema } from "effect"
import type { EnqueueRefused, ItemFailed } from "./Errors.ts"
import type { NewItem, OutcomeRow } from "./QueueStore.ts"
import type { EnqueueOptions } from "./WorkQueue.ts"

export const Coding = Symbol.for("tenure/queue/Coding")

export interface Coding<
  Payload extends Schema.Top,
  Success extends Schema.Top,
  Error extends Schema.Top
> {
  readonly toNewItem: (
    payload: Payload["Type"],
    options: EnqueueOptions,
    bytesMax: number,
    trace: string | null
  ) => Effect.Effect<NewItem, EnqueueRefused, Payload["EncodingServices"]>
  readonly decodeOutcome: (
    row: OutcomeRow
  ) => Effect.Effect<
    Success["Type"],
    Error["Type"] | ItemFailed,
    Success["DecodingServices"] | Error["DecodingServices"]
  >
}
