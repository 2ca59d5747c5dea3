/**
 * The show: three workers index, one is killed, another is frozen between a document's read and its
 * write and thawed when its work is done elsewhere, so that it attempts a write it has no right to.
 *
 *   workers up --> the first to ask keeps one document unwritten
 *              --> another is killed ------> its documents run elsewhere
 *              --> the first is frozen ----> its documents run elsewhere --> thawed --> refused, gone
 *              --> what is left is indexed --> the tables are asked what is true
 *
 * It works with a single document as well: whoever takes that over from the frozen worker is then the
 * one that is killed. Interrupted at any point, it drains the workers; what is left waits in the
 * database, and the next start goes on with it.
 */
import { readFileSync } from "node:fs"
import { Cause, Clock, Effect, Exit, FiberSet, Option } from "effect"
import {
  type Crew,
  make as makeCrew,
  type Member,
  type MemberState,
  WorkerNotStarted
} from "./Crew.ts"
import { slots } from "./DocumentQueue.ts"
import type { HandedIn } from "./HandIn.ts"
import { evidence } from "./IndexQueries.ts"
import * as Outcomes from "./Outcomes.ts"
import {
  count,
  type Elsewhere,
  elsewhereText,
  type Facts,
  type Freeze,
  type Outcome,
  type Takeover
} from "./Report.ts"
import type { View } from "./View.ts"

const workers = 3

/** What the documents of a show take together, if they are enough to be slowed down so far. */
const paceTotalMillis = 9000
const paceMaxMillis = 1200

export const paceMillis = (todo: number): number =>
  Math.min(paceMaxMillis, Math.floor((paceTotalMillis * workers * slots) / Math.max(1, todo)))

const startBudget = "45 seconds"
const takeoverBudget = "30 seconds"
const thawBudget = "10 seconds"
const watchable = "1 second"

/** Without any news for so long, what is left is lost. */
const silenceMillis = 45_000
const restartsMax = 3

export interface Options {
  readonly folder: string
  readonly handedIn: HandedIn
  readonly view: View
  readonly environment: Readonly<Record<string, string | undefined>>
  readonly output: number
  readonly outputName: string
}

export const run = Effect.fnUntraced(function* (options: Options) {
  const { folder, handedIn, view } = options
  const { todo } = handedIn
  const begun = yield* Clock.monotonicTimeNanos
  const outcomes = Outcomes.empty()
  const restart = yield* FiberSet.makeRuntime<never, unknown, unknown>()
  let crashed = 0
  const crew: Crew = yield* makeCrew({
    environment: options.environment,
    output: options.output,
    // A process runs one document of a lost worker at a time: slowed down like the others, they would
    // queue, and the next takeover would be measured with them in front. Until somebody is killed,
    // they may be all there is to be killed at.
    pace: (attempt) =>
      attempt > 1 && crew.members.some(({ state }) => state === "killed")
        ? 0
        : paceMillis(todo.length),
    onCrashUnsafe: (member) => {
      crashed++
      view.sayUnsafe(
        `  worker ${member.number} has ended by itself (exit code ${member.exitCode ?? "none"}), ` +
          `${options.outputName} says why`
      )
      if (crashed <= restartsMax) restart(Effect.ignore(crew.start))
    }
  })
  yield* Effect.addFinalizer((exit) =>
    Exit.isFailure(exit) && Cause.hasInterrupts(exit.cause)
      ? view.say("  Ctrl-C: the workers finish what they have in hand")
      : Effect.void
  )
  const watching = yield* Effect.forkScoped(
    Outcomes.watch(todo, outcomes, (problem) => {
      if (problem !== undefined) view.sayUnsafe(`  not indexed: ${problem.path}: ${problem.text}`)
      crew.lookUnsafe()
    })
  )
  yield* startAll(crew, options.outputName)
  const facts = yield* Effect.scoped(
    Effect.gen(function* () {
      yield* view.follow(() => ({
        todo: todo.length,
        indexed: outcomes.indexed,
        problems: outcomes.problems.length + outcomes.lost.length,
        refused: crew.refused.length,
        members: crew.members
      }))
      const facts = yield* script({ crew, outcomes, todo: todo.length, view })
      yield* untilSettledOrSilent(crew, outcomes, todo.length)
      return facts
    })
  )
  watching.interruptUnsafe()
  yield* view.say("  all documents are settled, the workers drain and end")
  yield* crew.stop
  const ended = yield* Clock.monotonicTimeNanos
  return {
    facts: { ...facts, crashed },
    evidence: yield* evidence(
      folder,
      todo.map(({ itemId }) => itemId)
    ),
    todo: todo.length,
    problems: outcomes.problems,
    lost: [
      ...outcomes.lost,
      ...todo
        .filter(({ itemId }) => !outcomes.settled.has(itemId))
        .map(({ path }) => ({ path, text: "it has no outcome" }))
    ],
    unchanged: handedIn.unchanged.length,
    gone: handedIn.gone,
    seconds: millisBetween(begun, ended) / 1000
  } satisfies Outcome
})

const startAll = Effect.fnUntraced(function* (crew: Crew, outputName: string) {
  yield* Effect.replicateEffect(crew.start, workers, { discard: true })
  const bad = yield* crew
    .until(() => {
      const failed = crew.members.find(({ state }) => state === "crashed")
      if (failed !== undefined) return failed
      return crew.members.every(({ state }) => state === "running") ? ("up" as const) : undefined
    })
    .pipe(Effect.timeoutOption(startBudget))
  if (Option.isSome(bad) && bad.value === "up") return
  const number = Option.isSome(bad) && bad.value !== "up" ? bad.value.number : workers
  return yield* new WorkerNotStarted({
    worker: number,
    problem: (yield* refusalIn(outputName)) ?? `it does not come up, ${outputName} says why`
  })
})

/** What a process that may not start says of it: one sentence, with the cure in it. */
const refusalIn = (outputName: string): Effect.Effect<string | undefined> =>
  Effect.sync(() => {
    const said = readFileSync(outputName, "utf8").split("\n")
    return said.findLast((line) => line.startsWith("tenure: "))?.slice("tenure: ".length, 500)
  })

interface Stage {
  readonly crew: Crew
  readonly outcomes: Outcomes.Outcomes
  readonly todo: number
  readonly view: View
}

const script = Effect.fnUntraced(function* (stage: Stage) {
  const { crew, outcomes, todo, view } = stage
  const isDone = () => (outcomes.settled.size >= todo ? ("done" as const) : undefined)
  // Nobody has leave to write yet, so whoever asks first still has it unwritten when it is frozen.
  const first = yield* crew.until(() => holdOneDocument(crew) ?? isDone())
  yield* crew.open
  if (first === "done") return { kill: undefined, freeze: undefined }
  // A folder of few documents is over before anybody would have seen anything.
  if (todo > workers * slots) yield* Effect.sleep(watchable)
  // Others must have work, or the frozen worker's own is what another one is killed with.
  const early = yield* killOne(stage, first, () =>
    outcomes.settled.size >= todo - first.running.size ? ("nobody" as const) : undefined
  )
  const freeze = yield* freezeOne(stage, first)
  const kill = early ?? (yield* killOne(stage, first, isDone))
  yield* view.say("  the rest is indexed")
  return { kill, freeze } satisfies Omit<Facts, "crashed">
})

// Processes end while we wait, which a compiler that has seen the state once does not know.
const stateOf = (member: Member): MemberState => member.state

const holdOneDocument = (crew: Crew): Member | undefined => {
  const first = crew.members.find((member) => member.asking.size > 0)
  const [item] = first?.asking ?? []
  if (first !== undefined && item !== undefined) crew.holdUnsafe(item)
  return first
}

const killOne = Effect.fnUntraced(function* (
  { crew, outcomes, view }: Stage,
  spared: Member,
  giveUp: () => string | undefined
): Effect.fn.Return<Takeover | undefined> {
  const victim = yield* crew.until(() => {
    const found = crew.members.find(
      (member) => member !== spared && member.state === "running" && member.asking.size > 0
    )
    // In the same breath, so that what it asks for is certain to be unwritten.
    if (found !== undefined) crew.holdUnsafe(found)
    return found ?? giveUp()
  })
  if (typeof victim === "string") return undefined
  const items = [...victim.running.keys()]
  yield* view.say(
    `  worker ${victim.number} (pid ${victim.pid}) is killed with SIGKILL, ${count(items.length, "document")} in hand`
  )
  const killed = yield* crew.kill(victim)
  yield* Effect.ignore(crew.start)
  const elsewhere = yield* takenOver(crew, outcomes, items, victim, killed)
  const { number: worker, pid } = victim
  const taken = { worker, pid, documents: items.length, elsewhere }
  yield* view.say(`  kill -> running elsewhere: ${elsewhereText(taken)}`)
  return taken
})

const freezeOne = Effect.fnUntraced(function* (
  { crew, outcomes, todo, view }: Stage,
  member: Member
): Effect.fn.Return<Freeze | undefined> {
  if (member.state !== "running" || member.asking.size === 0) return undefined
  const items = [...member.running.keys()]
  yield* view.say(
    `  worker ${member.number} (pid ${member.pid}) is frozen with SIGSTOP, between a read and its write`
  )
  const frozen = yield* crew.freeze(member)
  const elsewhere = yield* takenOver(crew, outcomes, items, member, frozen)
  yield* view.say(
    `  freeze -> running elsewhere: ${elsewhereText({ documents: items.length, elsewhere })}`
  )
  const attempted = member.asking.size
  yield* view.say(
    `  worker ${member.number} is thawed and goes on with its ${count(attempted, "write")}`
  )
  const thawed = yield* crew.thaw(member)
  yield* crew
    .until(() => (member.state === "thawed" ? undefined : true))
    .pipe(Effect.timeoutOption(thawBudget))
  const refusals = crew.refused.filter((one) => one.member === member)
  yield* view.say(
    `  the database refused ${count(refusals.length, "stale write")}, worker ${member.number} ` +
      (stateOf(member) === "lost"
        ? `has lost its lease and ended (exit code ${member.exitCode})`
        : `is ${stateOf(member)}`)
  )
  // As whatever supervises processes does with this exit code.
  if (todo - outcomes.settled.size > workers * slots) yield* Effect.ignore(crew.start)
  return {
    worker: member.number,
    pid: member.pid,
    documents: items.length,
    elsewhere,
    attempted,
    refused: refusals.length,
    sqlStates: [...new Set(refusals.map(({ sqlState }) => sqlState))],
    frozenMillis: millisBetween(frozen, thawed),
    exitCode: member.exitCode
  }
})

/** Until all of them run elsewhere; those that had been settled in the last moment have to nowhere. */
const takenOver = Effect.fnUntraced(function* (
  crew: Crew,
  outcomes: Outcomes.Outcomes,
  items: ReadonlyArray<string>,
  from: Member,
  since: bigint
): Effect.fn.Return<Elsewhere | undefined> {
  const elsewhere = (item: string): bigint | undefined =>
    crew.starts.find((one) => one.item === item && one.member !== from && one.atNanos > since)
      ?.atNanos
  const done = yield* crew
    .until(() =>
      items.every((item) => elsewhere(item) !== undefined || outcomes.settled.has(item))
        ? true
        : undefined
    )
    .pipe(Effect.timeoutOption(takeoverBudget))
  const times = items.flatMap((item) => elsewhere(item) ?? [])
  if (Option.isNone(done) || times.length === 0) return undefined
  const millis = times.map((time) => millisBetween(since, time))
  return { firstMillis: Math.min(...millis), lastMillis: Math.max(...millis) }
})

/** Bounded by silence alone: a large folder takes as long as it takes. */
const untilSettledOrSilent = Effect.fnUntraced(function* (
  crew: Crew,
  outcomes: Outcomes.Outcomes,
  todo: number
) {
  const isDone = crew.until(() => (outcomes.settled.size >= todo ? true : undefined))
  let heard = -1
  for (;;) {
    const done = yield* Effect.timeoutOption(isDone, silenceMillis)
    const news = outcomes.settled.size + crew.starts.length
    if (Option.isSome(done) || news === heard) return
    heard = news
  }
})

const millisBetween = (from: bigint, to: bigint): number => Number(to - from) / 1e6
