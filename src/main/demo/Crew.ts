/**
 * The worker processes of a show, as their parent sees them, and what it may do to them.
 *
 *   starting --up--> running --stop--> stopped
 *                    |  |  +--kill--> killed
 *                    |  +--freeze--> frozen --thaw--> thawed --lease lost--> lost
 *                    +--ended by itself--> crashed
 *
 * Every document asks before it is written. The answer paces the show, and it is held back where a
 * worker is to be met exactly between its read and its write. Once the crew is stopping, every
 * document is let go at once.
 *
 * The processes are in sessions of their own: a Ctrl-C reaches this process alone, which then drains
 * them. Should it die, they see its channel close and drain by themselves.
 */
import { Clock, type Duration, Effect, FiberSet, Latch, Option, Schema, type Scope } from "effect"
import { type ChildProcess, fork } from "node:child_process"
import { fileURLToPath } from "node:url"
import { ExitCode } from "../ExitCode.ts"
import type { FromWorker, ToWorker } from "./Messages.ts"

export type MemberState =
  | "starting"
  | "running"
  | "killed"
  | "frozen"
  | "thawed"
  | "lost"
  | "stopped"
  | "crashed"

export interface Member {
  readonly number: number
  readonly pid: number
  state: MemberState
  indexed: number
  /** Items whose handlers run, and the paths of their documents. */
  readonly running: Map<string, string>
  /** Those of them that wait for leave to write. */
  readonly asking: Set<string>
  exitCode: number | undefined
}

export interface Start {
  readonly item: string
  readonly member: Member
  readonly atNanos: bigint
}

export interface Refused {
  readonly item: string
  readonly member: Member
  readonly sqlState: string
}

export interface Crew {
  readonly members: ReadonlyArray<Member>
  readonly starts: ReadonlyArray<Start>
  readonly refused: ReadonlyArray<Refused>
  readonly start: Effect.Effect<Member, WorkerNotStarted>
  /** From here on, what asks is answered after the pace. */
  readonly open: Effect.Effect<boolean>
  /** Answers to this item, or to any of this worker's, are held back from now on. */
  readonly holdUnsafe: (held: string | Member) => void
  /** These tell when it was done. */
  readonly kill: (member: Member) => Effect.Effect<bigint>
  readonly freeze: (member: Member) => Effect.Effect<bigint>
  /** With leave to write, so that it does what it was about to do. */
  readonly thaw: (member: Member) => Effect.Effect<bigint>
  /** Waits until there is an answer. Looked at after each message, and when `look` is called. */
  readonly until: <A>(answer: () => A | undefined) => Effect.Effect<A>
  readonly lookUnsafe: () => void
  /** Ends all of them in order. */
  readonly stop: Effect.Effect<void>
}

export class WorkerNotStarted extends Schema.TaggedError<WorkerNotStarted>()("WorkerNotStarted", {
  worker: Schema.Int,
  problem: Schema.String
}) {
  override get message(): string {
    return `Worker ${this.worker} cannot be started: ${this.problem.replace(/\.$/, "")}.`
  }
}

export interface Options {
  readonly environment: Readonly<Record<string, string | undefined>>
  /** Where the workers' own output goes: a file descriptor. */
  readonly output: number
  /** How long a document waits for leave to be written. */
  readonly pace: (attempt: number) => Duration.Input
  /** A worker ended that nobody has ended. */
  readonly onCrashUnsafe: (member: Member) => void
}

// Beside this file: as TypeScript in the repository, compiled in a package.
const script = fileURLToPath(
  new URL(import.meta.url.endsWith(".ts") ? "./Worker.ts" : "./Worker.js", import.meta.url)
)

/** What a worker gets to end by itself before it is killed. */
const stopBudget = "9 seconds"

export const make = Effect.fnUntraced(function* (
  options: Options
): Effect.fn.Return<Crew, never, Scope.Scope> {
  const clock = yield* Clock.Clock
  const opened = yield* Latch.make()
  const run = yield* FiberSet.makeRuntime<never, unknown, unknown>()
  const members: Array<Member> = []
  const children = new Map<Member, ChildProcess>()
  const starts: Array<Start> = []
  const refused: Array<Refused> = []
  const held = new Set<string | Member>()
  const waiters = new Set<() => void>()
  let stopping = false

  const lookUnsafe = () => {
    for (const look of waiters) look()
  }

  /** Completes when the message has left this process, or cannot. */
  const sent = (member: Member, message: ToWorker): Effect.Effect<void> =>
    Effect.callback<void>((resume) => {
      const child = children.get(member)
      if (child?.connected !== true) return resume(Effect.void)
      child.send(message, () => resume(Effect.void))
    })

  const send = (member: Member, message: ToWorker) => {
    const child = children.get(member)
    // A worker that was killed a moment ago has no channel any more.
    if (child?.connected === true) child.send(message, () => {})
  }

  const answerUnsafe = (member: Member, item: string) => {
    if (!stopping && (held.has(item) || held.has(member))) return
    if (member.state !== "frozen" && member.asking.delete(item)) send(member, { type: "go", item })
  }

  const answerLater = (member: Member, item: string, attempt: number) =>
    opened.await.pipe(
      Effect.andThen(Effect.suspend(() => Effect.sleep(options.pace(attempt)))),
      Effect.andThen(Effect.sync(() => answerUnsafe(member, item)))
    )

  const heard = (member: Member, message: FromWorker) => {
    switch (message.type) {
      case "up":
        if (member.state === "starting") member.state = "running"
        break
      case "started":
        member.running.set(message.item, message.path)
        starts.push({ item: message.item, member, atNanos: clock.monotonicTimeNanosUnsafe() })
        break
      case "asks":
        member.asking.add(message.item)
        if (stopping) answerUnsafe(member, message.item)
        else run(answerLater(member, message.item, message.attempt))
        break
      case "ended":
        member.running.delete(message.item)
        member.asking.delete(message.item)
        if (message.indexed) member.indexed++
        break
      case "refused":
        refused.push({ item: message.item, member, sqlState: message.sqlState })
        break
    }
    lookUnsafe()
  }

  const ended = (member: Member, exitCode: number | undefined) => {
    member.exitCode = exitCode
    if (member.state === "thawed" && exitCode === ExitCode.leaseLost) member.state = "lost"
    else if (stopping) member.state = "stopped"
    else if (member.state !== "killed") {
      member.state = "crashed"
      options.onCrashUnsafe(member)
    }
    member.running.clear()
    member.asking.clear()
    lookUnsafe()
  }

  const start = Effect.callback<Member, WorkerNotStarted>((resume) => {
    const number = members.length + 1
    const child = launch(options)
    child.once("error", ({ message }) =>
      resume(Effect.fail(new WorkerNotStarted({ worker: number, problem: message })))
    )
    // After its exit a channel may still fail to send; the exit has said it all.
    child.on("error", () => {})
    if (child.pid === undefined) return
    const member: Member = {
      number,
      pid: child.pid,
      state: "starting",
      indexed: 0,
      running: new Map(),
      asking: new Set(),
      exitCode: undefined
    }
    members.push(member)
    children.set(member, child)
    child.on("message", (message) => heard(member, message as FromWorker))
    child.once("exit", (code) => ended(member, code ?? undefined))
    for (const peer of members) {
      if (peer.state === "frozen") send(member, { type: "frozen", pid: peer.pid })
    }
    resume(Effect.succeed(member))
  })

  const signal = (member: Member, name: NodeJS.Signals, state: MemberState) =>
    Effect.sync(() => {
      const atNanos = clock.monotonicTimeNanosUnsafe()
      member.state = state
      // Whoever runs its documents from here on is paced like everybody.
      held.delete(member)
      for (const item of member.running.keys()) held.delete(item)
      children.get(member)?.kill(name)
      lookUnsafe()
      return atNanos
    })

  const until: Crew["until"] = (answer) =>
    Effect.callback((resume) => {
      const look = () => {
        const found = answer()
        if (found === undefined) return
        waiters.delete(look)
        resume(Effect.succeed(found))
      }
      waiters.add(look)
      look()
      return Effect.sync(() => waiters.delete(look))
    })

  const stop = Effect.gen(function* () {
    stopping = true
    for (const member of members) {
      if (isOver(member)) continue
      if (member.state === "frozen") yield* signal(member, "SIGCONT", "thawed")
      for (const item of [...member.asking]) answerUnsafe(member, item)
      children.get(member)?.kill("SIGTERM")
    }
    const left = yield* until(() => (members.every(isOver) ? true : undefined)).pipe(
      Effect.timeoutOption(stopBudget)
    )
    if (Option.isSome(left)) return
    for (const member of members) if (!isOver(member)) yield* signal(member, "SIGKILL", "killed")
  })
  yield* Effect.addFinalizer(() => stop)

  return {
    members,
    starts,
    refused,
    start,
    open: opened.open,
    holdUnsafe: (one) => void held.add(one),
    kill: (member) => signal(member, "SIGKILL", "killed"),
    // Its peers know of it first: if this process is killed now, they let it run on and end.
    freeze: (member) =>
      Effect.andThen(
        Effect.forEach(
          members.filter((peer) => peer !== member && !isOver(peer)),
          (peer) => sent(peer, { type: "frozen", pid: member.pid }),
          { discard: true }
        ),
        signal(member, "SIGSTOP", "frozen")
      ),
    thaw: (member) =>
      Effect.suspend(() => {
        for (const item of member.asking) send(member, { type: "go", item })
        member.asking.clear()
        return signal(member, "SIGCONT", "thawed")
      }),
    until,
    lookUnsafe,
    stop
  }
})

export const isOver = (member: Member): boolean =>
  ["killed", "lost", "stopped", "crashed"].includes(member.state)

const launch = (options: Options): ChildProcess =>
  fork(script, [], {
    detached: true,
    env: { ...process.env, ...options.environment },
    stdio: ["ignore", options.output, options.output, "ipc"]
  })
