/**
 * Runs scripted sessions against a real database in chosen orders, one order after the other.
 *
 * A step is started when its turn comes, and the next one only when every session is at rest: it has
 * answered, or it is seen in the server to wait for a lock of a session that is at rest itself. So no
 * order depends on how fast the machine is, and there is no sleep. A step whose session still waits
 * is started as soon as the session is free; a deadlock is waited out until the server resolves it.
 *
 * Each order gives a transcript with one line an event: `victim.write: waits`, `victim.write: ok`.
 * A crash or a failed check leaves nothing behind: the database belongs to the test.
 */
import type { PgClient, PgConnection } from "@effect/sql-pg"
import { Effect, Exit, type Fiber } from "effect"
import type { SqlError } from "effect/sql/SqlError"
import { sqlState } from "../../src/database/SqlState.ts"

/** One physical connection. */
export interface Session {
  readonly sql: PgClient.PgClient
  readonly pid: number
}

/** Statements that run one after the other; the answer of the last one is the step's. */
export type Step = string | ReadonlyArray<string> | Effect.Effect<unknown, SqlError>

export interface Spec {
  /** Sees the locks of all sessions. */
  readonly observer: PgClient.PgClient
  /** Runs before each order. */
  readonly reset: Effect.Effect<unknown, SqlError>
  readonly sessions: Readonly<Record<string, Session>>
  /** Of each session, in the order in which it runs them. */
  readonly steps: Readonly<Record<string, Readonly<Record<string, Step>>>>
}

/**
 * Steps as `session.step`. A session alone stands for: wait until it has answered. That is for what
 * no lock shows, a backend that has been told to end or a timeout that is running.
 */
export type Order = ReadonlyArray<string>

export interface Transcript {
  readonly lines: ReadonlyArray<string>
  /** `ok`, a value, or an SQLSTATE. */
  readonly answer: (step: string) => string
  readonly waited: (step: string) => boolean
  /** Whether the first had answered before the second did. */
  readonly isBefore: (first: string, second: string) => boolean
}

/** What was wrong in one order: the rules that its transcript and the database break. */
export interface Finding {
  readonly order: Order
  readonly transcript: Transcript
  readonly broken: ReadonlyArray<string>
}

export type Judge = (transcript: Transcript) => Effect.Effect<ReadonlyArray<string>, SqlError>

/** All orders that keep each session's own. */
export const interleavings = (steps: Spec["steps"]): ReadonlyArray<Order> => {
  const merge = (rest: ReadonlyArray<Order>): ReadonlyArray<Order> => {
    const open = rest.filter((own) => own.length > 0)
    if (open.length === 0) return [[]]
    return open.flatMap((own) =>
      merge(rest.map((other) => (other === own ? other.slice(1) : other))).map((tail) => [
        ...own.slice(0, 1),
        ...tail
      ])
    )
  }
  return merge(
    Object.entries(steps).map(([session, own]) =>
      Object.keys(own).map((step) => `${session}.${step}`)
    )
  )
}

/** Runs the orders and returns what the judge holds against each; wrong forms are shown with it. */
export const explore = (spec: Spec, judge: Judge, orders = interleavings(spec.steps)) =>
  Effect.forEach(orders, (order) =>
    Effect.gen(function* () {
      const transcript = yield* run(spec, order)
      return { order, transcript, broken: yield* judge(transcript) } satisfies Finding
    })
  )

/** As `explore`, and fails with the transcripts of the first orders that break a rule. */
export const prove = Effect.fnUntraced(function* (
  spec: Spec,
  judge: Judge,
  orders?: ReadonlyArray<Order>
) {
  const findings = yield* explore(spec, judge, orders)
  const broken = findings.filter((finding) => finding.broken.length > 0)
  if (broken.length > 0) {
    const shown = broken.slice(0, 3).map(show).join("\n\n")
    throw new Error(`${broken.length} of ${findings.length} orders break a rule\n\n${shown}`)
  }
  return findings
})

export const show = ({ broken, order, transcript }: Finding): string =>
  [
    `order: ${order.join(", ")}`,
    ...transcript.lines,
    ...broken.map((rule) => `BROKEN: ${rule}`)
  ].join("\n")

/** Rules as a record: those that do not hold. */
export const brokenRules = (rules: Readonly<Record<string, boolean>>): ReadonlyArray<string> =>
  Object.entries(rules).flatMap(([rule, holds]) => (holds ? [] : [rule]))

/** One order. Ends with every session outside a transaction; fails if one waits for ever. */
export const run = Effect.fnUntraced(function* (spec: Spec, order: Order) {
  yield* spec.reset
  const lines: Array<string> = []
  const running = new Map<string, { readonly step: string; readonly fiber: Fiber.Fiber<string> }>()
  const seenWaiting = new Set<string>()

  const start = Effect.fnUntraced(function* (step: string) {
    const [name = "", own = ""] = step.split(".")
    const session = spec.sessions[name]
    const action = spec.steps[name]?.[own]
    if (session === undefined || action === undefined) throw new Error(`no step ${step}`)
    const fiber = yield* Effect.forkChild(perform(session, action), { startImmediately: true })
    running.set(name, { step, fiber })
  })

  const isAtRest = Effect.fnUntraced(function* () {
    const pids = [...running.keys()].map((name) => spec.sessions[name]?.pid ?? 0)
    const rows = yield* spec.observer<{
      readonly pid: number
      readonly blockers: ReadonlyArray<number>
    }>`
      SELECT p.pid, pg_blocking_pids(p.pid) AS blockers FROM unnest(${pids}::int[]) p(pid)`
    return areStuck(rows)
  }, Effect.orDie)

  const quiesce = Effect.fnUntraced(function* (cause: string, awaited?: string) {
    const answered: Array<string> = []
    while (true) {
      for (const [name, { fiber, step }] of running) {
        const exit = fiber.pollUnsafe()
        if (exit === undefined) continue
        running.delete(name)
        answered.push(`${step}: ${Exit.isSuccess(exit) ? exit.value : "died"}`)
      }
      const isAwaited = awaited !== undefined && running.has(awaited)
      if (running.size === 0 || ((yield* isAtRest()) && !isAwaited)) break
      yield* Effect.yieldNow
    }
    // The cause first. Those that it has released answer in no particular order.
    const isCause = (line: string) => (line.startsWith(`${cause}: `) ? 0 : 1)
    lines.push(...answered.sort().sort((a, b) => isCause(a) - isCause(b)))
    for (const { step } of running.values()) {
      if (seenWaiting.has(step)) continue
      seenWaiting.add(step)
      lines.push(`${step}: waits`)
    }
  })

  let open = [...order]
  while (open.length > 0) {
    const [first = ""] = open
    const next = first.includes(".") ? open.find((step) => !running.has(sessionOf(step))) : first
    if (next === undefined) break
    open = open.filter((step) => step !== next)
    if (next.includes(".")) yield* start(next)
    yield* quiesce(next, next.includes(".") ? undefined : next)
  }
  const transcript = transcriptOf(lines)
  if (running.size > 0 || open.length > 0) {
    throw new Error(`left waiting for ever: ${[...running.keys()].join(", ")}\n${lines.join("\n")}`)
  }
  for (const { sql } of Object.values(spec.sessions)) yield* Effect.exit(sql.unsafe("ROLLBACK"))
  return transcript
})

const sessionOf = (step: string): string => step.split(".")[0] ?? ""

/**
 * Every one of them waits, in the end, for somebody who does nothing at present. One that waits for a
 * session that is under way, or in a circle, will go on by itself.
 */
export const areStuck = (
  waits: ReadonlyArray<{ readonly pid: number; readonly blockers: ReadonlyArray<number> }>
): boolean => {
  const moving = new Map(waits.map(({ blockers, pid }) => [pid, blockers]))
  let size = 0
  while (size !== moving.size) {
    size = moving.size
    for (const [pid, blockers] of moving) {
      if (blockers.some((blocker) => !moving.has(blocker))) moving.delete(pid)
    }
  }
  return moving.size === 0
}

const perform = (session: Session, step: Step): Effect.Effect<string> => {
  const action = Effect.isEffect(step)
    ? Effect.as(step, "ok")
    : Effect.map(
        Effect.forEach(typeof step === "string" ? [step] : step, (statement) =>
          Effect.map(session.sql.unsafe(statement).raw, (answer) =>
            describe(statement, answer as PgConnection.Result)
          )
        ),
        (answers) => answers.at(-1) ?? "ok"
      )
  return Effect.match(action, {
    onSuccess: (answer) => answer,
    onFailure: (error) => sqlState(error) ?? "connection lost"
  })
}

const describe = (statement: string, { command, rows }: PgConnection.Result): string => {
  // The server does not call it an error when it rolls back what could not be committed.
  if (statement === "COMMIT" && command === "ROLLBACK") return "rolled back"
  return (
    rows
      .map((row) => Object.values(row).map(String).join(" "))
      .join("; ")
      .trim() || "ok"
  )
}

const transcriptOf = (lines: ReadonlyArray<string>): Transcript => {
  const place = (step: string): number => {
    const found = lines.findIndex(
      (line) => line.startsWith(`${step}: `) && !line.endsWith(": waits")
    )
    if (found < 0) throw new Error(`${step} has no answer\n${lines.join("\n")}`)
    return found
  }
  return {
    lines,
    answer: (step) => lines[place(step)]?.slice(step.length + 2) ?? "",
    waited: (step) => lines.includes(`${step}: waits`),
    isBefore: (first, second) => place(first) < place(second)
  }
}
