/**
 * What a person sees while the show goes on. On a terminal a block that is drawn anew in place, with
 * what happened above it; elsewhere, and in CI, one plain line for each event and now and then one of
 * progress. A reader that goes away does not end the show.
 */
import { Effect, type Scope } from "effect"
import type { Member, MemberState } from "./Crew.ts"
import { printable } from "./Documents.ts"
import { count } from "./Report.ts"

export interface Progress {
  readonly todo: number
  readonly indexed: number
  readonly problems: number
  readonly refused: number
  readonly members: ReadonlyArray<Member>
}

export interface View {
  readonly colour: boolean
  /** A line that stays. */
  readonly sayUnsafe: (line: string) => void
  readonly say: (line: string) => Effect.Effect<void>
  /** Draws what it is given until the scope closes. */
  readonly follow: (progress: () => Progress) => Effect.Effect<void, never, Scope.Scope>
}

const redrawMillis = 120
const plainMillis = 2000

export const make = (stream: NodeJS.WriteStream): View => {
  const isLive = stream.isTTY === true && process.env["CI"] === undefined
  const colour = isLive && process.env["NO_COLOR"] === undefined
  let current: (() => Progress) | undefined
  let drawn = 0
  stream.on("error", () => {})

  const clear = (): string => (drawn === 0 ? "" : `\u001b[${drawn}A\u001b[J`)

  const draw = (above: string): void => {
    const before = clear()
    const lines =
      current === undefined || !isLive ? [] : block(current(), stream.columns || 80, colour)
    drawn = lines.length
    stream.write(before + above + lines.map((line) => `${line}\n`).join(""))
  }

  const sayUnsafe = (line: string): void => draw(`${line}\n`)

  return {
    colour,
    sayUnsafe,
    say: (line) => Effect.sync(() => sayUnsafe(line)),
    follow: Effect.fnUntraced(function* (progress) {
      let last = ""
      const tick = Effect.sync(() => {
        if (isLive) return draw("")
        const line = plain(progress())
        if (line !== last) sayUnsafe(line)
        last = line
      })
      yield* Effect.acquireRelease(
        Effect.sync(() => {
          current = progress
        }),
        () =>
          Effect.sync(() => {
            current = undefined
            draw("")
          })
      )
      yield* Effect.sleep(isLive ? redrawMillis : plainMillis).pipe(
        Effect.andThen(tick),
        Effect.forever,
        Effect.forkScoped
      )
    })
  }
}

export const paint = (colour: boolean, code: number, text: string): string =>
  colour ? `\u001b[${code}m${text}\u001b[0m` : text

const dim = 2
const green = 32
const colourOf: Readonly<Record<MemberState, number>> = {
  starting: dim,
  running: green,
  killed: 31,
  frozen: 36,
  thawed: 33,
  lost: 33,
  stopped: dim,
  crashed: 31
}

const wordOf: Readonly<Record<MemberState, string>> = {
  starting: "starting",
  running: "running",
  killed: "killed",
  frozen: "frozen",
  thawed: "thawed",
  lost: "lost its lease",
  stopped: "stopped",
  crashed: "crashed"
}

export const plain = (progress: Progress): string => {
  const { indexed, refused, running, todo, waiting } = countsOf(progress)
  return (
    `  ${indexed} of ${todo} indexed, ${running} running, ${waiting} waiting, ` +
    `${count(refused, "stale write")} refused`
  )
}

const countsOf = (progress: Progress) => {
  const { indexed, members, problems, refused, todo } = progress
  // A worker that is frozen still believes in its items; who took them over runs them.
  const running = members
    .filter(({ state }) => state === "running")
    .reduce((sum, member) => sum + member.running.size, 0)
  const waiting = Math.max(0, todo - indexed - problems - running)
  return { indexed, problems, refused, running, todo, waiting }
}

const barWidth = 24

export const block = (progress: Progress, columns: number, colour: boolean): Array<string> => {
  const { indexed, problems, refused, running, todo, waiting } = countsOf(progress)
  const filled = todo === 0 ? barWidth : Math.floor((barWidth * (indexed + problems)) / todo)
  const bar = `${"█".repeat(filled)}${"░".repeat(barWidth - filled)}`
  const lines = [
    "",
    `  ${bar}  ${indexed} of ${todo} indexed   ${running} running   ${waiting} waiting` +
      (problems === 0 ? "" : `   ${problems} not indexable`),
    `  stale writes refused by the database: ${refused}`
  ]
  return [
    ...lines.map((line) => fit(line, columns)),
    ...progress.members.map((member) => memberLine(member, columns, colour))
  ]
}

const memberLine = (member: Member, columns: number, colour: boolean): string => {
  const word = wordOf[member.state].padEnd(14)
  const [path] = member.running.values()
  const now = member.state === "running" || member.state === "frozen" ? (path ?? "") : ""
  const before = `  worker ${member.number}  pid ${String(member.pid).padEnd(7)} `
  const after = ` ${String(member.indexed).padStart(4)} indexed   ${printable(now)}`
  const room = columns - 1 - before.length - word.length
  return before + paint(colour, colourOf[member.state], word) + fit(after, Math.max(0, room + 1))
}

/** A line that wraps would be drawn over wrongly. */
const fit = (line: string, columns: number): string =>
  line.length < columns ? line : `${line.slice(0, Math.max(0, columns - 2))}…`
