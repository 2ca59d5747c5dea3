/**
 * For tests that run `Tenure.layer` in their own process, and must not be killed while somebody looks
 * at a breakpoint: no thread is started. Provide it to the layer.
 */
import { Layer } from "effect"
import { none, WatchdogThread } from "../watchdog/WatchdogThread.ts"

export const layerNone: Layer.Layer<never> = Layer.succeed(WatchdogThread, none)
