/**
 * Claim: the work of a process that is killed goes on elsewhere within two seconds, of one that stops
 * in order at once, and of one that is frozen as soon as its lease has ended.
 *
 * A round has two processes of its own on a database of its own, and one item, whose only step never
 * ends. Whoever has begun it gets the signal; timed is until the same step begins in the other process.
 * Rounds are set up some at a time and struck one after the other, so that the machine does nothing
 * else meanwhile. The wait is bounded: where the bound was reached, the result is "more than" that.
 */
import { Clock, Deferred, Effect, Option, type Scope } from "effect"
import { type Resolved, resolve, type Settings } from "../src/executor/Settings.ts"
import type { Message, Role } from "./child.ts"
import * as ChildProcess from "./ChildProcess.ts"
import * as Coordinated from "./Coordinated.ts"
import { dbos, effectCluster, type System, tenure } from "./Coordinated.ts"
import { quantile, type Report } from "./Report.ts"
import type { Bench, Server } from "./Server.ts"

interface Scenario {
  readonly workload: "kill" | "stop" | "pause" | "kill-and-restart"
  readonly system: System
  readonly settings: Role["settings"]
  readonly rounds: number
  readonly withinMillis: number
  readonly goalMillis?: number
}

const signals = {
  kill: "SIGKILL",
  stop: "SIGTERM",
  pause: "SIGSTOP",
  "kill-and-restart": "SIGKILL"
} as const

/** The defaults with a shorter lease, and what its margins then ask for. */
const shortLease = {
  leaseValidity: 10_000,
  leaseRenewal: 1_500,
  watchdog: 5_000,
  probe: 1_600,
  forcedExit: 1_000,
  abandonAfter: 2_000
} satisfies Partial<Settings>

// The item never ends by itself, so a drain would only wait before it hands the item over.
const noDrain = { drain: 1 } satisfies Partial<Settings>
const noTermination = { entityTerminationTimeout: 1 }

/** Rounds of one group are set up so many at a time, and struck with this pause between them. */
interface Group {
  readonly atATime: number
  readonly pauseMillis: number
  readonly scenarios: ReadonlyArray<Scenario>
}

const groups = (quick: boolean): ReadonlyArray<Group> => {
  const withinMillis = quick ? 20_000 : 120_000
  const rounds = (long: number, short: number) => (quick ? short : long)
  return [
    {
      atATime: 6,
      pauseMillis: 2500,
      scenarios: [
        {
          workload: "kill",
          system: tenure,
          settings: {},
          rounds: rounds(20, 3),
          withinMillis: quick ? 10_000 : 90_000,
          goalMillis: 2000
        },
        {
          workload: "stop",
          system: tenure,
          settings: noDrain,
          rounds: rounds(20, 3),
          withinMillis: 30_000,
          goalMillis: 500
        }
      ]
    },
    // What mostly waits, side by side.
    {
      atATime: 10,
      pauseMillis: 500,
      scenarios: [
        {
          workload: "pause",
          system: tenure,
          settings: shortLease,
          rounds: rounds(20, 2),
          withinMillis,
          goalMillis: shortLease.leaseValidity + defaults.recoveryScan + 1000
        },
        ...(
          [
            ["kill", {}, rounds(10, 2)],
            ["stop", noTermination, rounds(10, 1)],
            ["pause", {}, rounds(4, 1)]
          ] as const
        ).map(([workload, settings, rounds]) => ({
          workload,
          system: effectCluster,
          settings,
          rounds,
          withinMillis
        })),
        ...(
          [
            ["kill", rounds(2, 1)],
            ["stop", rounds(2, 1)],
            ["pause", rounds(2, 1)],
            ["kill-and-restart", rounds(4, 1)]
          ] as const
        ).map(([workload, rounds]) => ({
          workload,
          system: dbos,
          settings: {},
          rounds,
          withinMillis
        }))
      ]
    }
  ]
}

const defaults = resolve() as Resolved

export const run = Effect.fnUntraced(function* (
  server: Server,
  report: Report
): Effect.fn.Return<void, never, Scope.Scope> {
  for (const line of settingsOf(defaults)) report.note(line)
  const templates = yield* Coordinated.templates(server)
  const results = new Map<Scenario, ReadonlyArray<number>>()
  for (const group of groups(report.quick)) {
    const rounds = group.scenarios.flatMap((scenario) =>
      Array.from({ length: scenario.rounds }, () => scenario)
    )
    for (let at = 0; at < rounds.length; at += group.atATime) {
      const batch = rounds.slice(at, at + group.atATime)
      const millis = yield* strikeAll(server, templates, batch, group.pauseMillis)
      batch.forEach((scenario, index) =>
        results.set(scenario, [...(results.get(scenario) ?? []), millis[index] ?? Infinity])
      )
    }
    for (const scenario of group.scenarios) tellRows(report, results, scenario)
  }
})

const settingsOf = (settings: Resolved): ReadonlyArray<string> => [
  `tenure, kill: defaults (lease ${settings.leaseValidity / 1000} s, scan ${settings.recoveryScan / 1000} s, ` +
    `presence grace ${settings.presenceGrace} ms)`,
  `tenure, stop: defaults but a drain of ${noDrain.drain} ms, because the item never ends by itself`,
  `tenure, pause: defaults but a lease of ${shortLease.leaseValidity / 1000} s, renewed every ` +
    `${shortLease.leaseRenewal / 1000} s, watchdog ${shortLease.watchdog / 1000} s`,
  "effect-cluster: defaults (shard locks expire after 35 s), SQL storage, socket runners; in stop " +
    `an entity gets ${noTermination.entityTerminationTimeout} ms to end`,
  "dbos: defaults, without Conductor; each process with an executor id of its own, " +
    "in kill-and-restart the same one again"
]

/** Infinity for a round in which nobody went on. */
const tellRows = (
  report: Report,
  results: ReadonlyMap<Scenario, ReadonlyArray<number>>,
  scenario: Scenario
) => {
  const { goalMillis, system, workload } = scenario
  const ours = [...results].find(
    ([other]) => other.system === tenure && other.workload === workload
  )?.[1]
  const millis = results.get(scenario) ?? []
  for (const [metric, share] of [
    ["p50_ms", 0.5],
    ["p99_ms", 0.99]
  ] as const) {
    const value = quantile(millis, share)
    const our = quantile(ours ?? [], share)
    // With a lease of another length there is nothing to compare.
    const comparable = system !== tenure && workload !== "pause"
    report.row({
      workload,
      system: system.name,
      metric,
      value: Number.isFinite(value) ? value : undefined,
      moreThan: Number.isFinite(value) ? undefined : scenario.withinMillis,
      ratio:
        comparable && Number.isFinite(value) && Number.isFinite(our)
          ? { median: value / our, spread: undefined }
          : undefined,
      goal:
        goalMillis === undefined || share === 0.5
          ? undefined
          : { of: "value", is: "below", limit: goalMillis }
    })
  }
  report.row({
    workload,
    system: system.name,
    metric: "taken_over_percent",
    value: (100 * millis.filter(Number.isFinite).length) / millis.length
  })
}

/** Answers with the milliseconds of each round. */
const strikeAll = Effect.fnUntraced(function* (
  server: Server,
  templates: ReadonlyMap<System, Bench>,
  batch: ReadonlyArray<Scenario>,
  pauseMillis: number
) {
  const rounds = yield* Effect.forEach(
    batch,
    (scenario, at) => setUp(server, templates.get(scenario.system), scenario, at),
    { concurrency: 2 }
  )
  yield* server.hasBeenUpFor(20)
  yield* Effect.sleep(settled)
  return yield* Effect.forEach(
    rounds,
    ({ strike }, at) => Effect.andThen(Effect.sleep(pauseMillis * at), strike),
    { concurrency: "unbounded" }
  )
}, Effect.scoped)

/** For every process: its loops have all had a turn, and nothing of its start is left. */
const settled = "5 seconds"

const setUp = Effect.fnUntraced(function* (
  server: Server,
  template: Bench | undefined,
  scenario: Scenario,
  at: number
) {
  const { settings, system, workload } = scenario
  const clock = yield* Clock.Clock
  const bench = yield* server.database(`takeover_${at}`, template)
  let begins: ReadonlyArray<{ readonly child: number; readonly atNanos: bigint }> = []
  const observers = new Set<() => void>()
  const start = (child: number) =>
    ChildProcess.start({
      module: system.module,
      role: "executor",
      url: bench.url,
      items: 1,
      // A drain says so, each time.
      quiet: workload === "stop",
      settings:
        system === dbos
          ? { executor: workload === "kill-and-restart" ? "the same" : `executor ${child}` }
          : settings,
      onMessage: (message: Message) => {
        if (message._tag !== "began") return
        begins = [...begins, { child, atNanos: BigInt(message.atNanos) }]
        for (const observer of observers) observer()
      }
    })
  /** The first one that counts, whenever it comes. */
  const begun = (counts: (begin: (typeof begins)[number]) => boolean) =>
    Effect.gen(function* () {
      const found = yield* Deferred.make<(typeof begins)[number]>()
      const observer = () => {
        const begin = begins.find(counts)
        if (begin !== undefined) Deferred.doneUnsafe(found, Effect.succeed(begin))
      }
      observers.add(observer)
      observer()
      return yield* Effect.ensuring(
        Deferred.await(found),
        Effect.sync(() => observers.delete(observer))
      )
    })

  const restarts = workload === "kill-and-restart"
  const children = yield* Effect.forEach(restarts ? [0] : [0, 1], start)
  for (const child of children) yield* child.message("ready")
  children[0]?.order("go")
  yield* begun(() => true).pipe(
    Effect.timeout("1 minute"),
    Effect.catch(() => Effect.die(new Error(`${system.name} does not begin its item`)))
  )

  const strike = Effect.gen(function* () {
    const victim = begins.at(-1)?.child ?? 0
    const struckNanos = clock.monotonicTimeNanosUnsafe()
    children[victim]?.signal(signals[workload])
    if (restarts) {
      yield* children[victim]?.exited ?? Effect.void
      yield* start(2)
    }
    const taken = yield* begun(
      ({ atNanos, child }) => child !== victim && atNanos > struckNanos
    ).pipe(Effect.timeoutOption(scenario.withinMillis))
    return Option.match(taken, {
      onNone: () => Infinity,
      onSome: ({ atNanos }) => Number(atNanos - struckNanos) / 1e6
    })
  })
  return { strike }
})
