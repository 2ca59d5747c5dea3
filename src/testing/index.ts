// What tests of applications use, as our own do.
export * as FaultPoint from "./FaultPoint.ts"
export * as Watchdog from "./Watchdog.ts"
