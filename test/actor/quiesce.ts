/** Lets every fiber that can run at this virtual time run until it waits. Twenty turns is far more than any needs. */
import { Effect } from "effect"

export const quiesce: Effect.Effect<void> = Effect.repeat(Effect.yieldNow, { times: 20 })
