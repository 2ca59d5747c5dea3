/**
 * What the show has proven, in words, and whether a promise was broken. Pure.
 *
 * A show that refused no stale write has failed, even when every document is there: it has not shown
 * what it is for.
 */
import type { Evidence } from "./IndexQueries.ts"

export interface Takeover {
  readonly worker: number
  readonly pid: number
  /** Documents it had in hand. */
  readonly documents: number
  /** `undefined`: not all of them ran elsewhere in the time for it. */
  readonly elsewhere: Elsewhere | undefined
}

/** From the signal until the first and the last document of a worker ran in another. */
export interface Elsewhere {
  readonly firstMillis: number
  readonly lastMillis: number
}

export interface Freeze extends Takeover {
  /** Writes it was about to make, and made after the thaw. */
  readonly attempted: number
  readonly refused: number
  readonly sqlStates: ReadonlyArray<string>
  readonly frozenMillis: number
  readonly exitCode: number | undefined
}

export interface Facts {
  readonly kill: Takeover | undefined
  readonly freeze: Freeze | undefined
  readonly crashed: number
}

export interface Problem {
  readonly path: string
  readonly text: string
}

export interface Outcome {
  readonly facts: Facts
  readonly evidence: Evidence
  readonly todo: number
  /** Files with a declared failure. */
  readonly problems: ReadonlyArray<Problem>
  /** Files without an outcome, or with one that no handler gave. */
  readonly lost: ReadonlyArray<Problem>
  readonly unchanged: number
  readonly gone: number
  readonly seconds: number
}

/** What was promised and not kept. Empty when all is well. */
export const brokenPromises = (outcome: Outcome): ReadonlyArray<string> => {
  const { evidence, facts, lost } = outcome
  const broken: Array<string> = []
  const losses = lossesOf(outcome)
  if (evidence.duplicates > 0)
    broken.push(`${count(evidence.duplicates, "document")} indexed twice`)
  if (losses > 0) {
    broken.push(
      `${count(losses, "document")} lost${lost[0] === undefined ? "" : `, the first: ${lost[0].path}: ${lost[0].text}`}`
    )
  }
  if (evidence.late > 0) broken.push(`${count(evidence.late, "write")} committed after a takeover`)
  if (facts.crashed > 0) broken.push(`${count(facts.crashed, "worker")} ended by itself`)
  // Nothing was written, so nothing could be killed or frozen on the way to a write.
  if (evidence.documents === 0 && losses === 0) return broken
  if (facts.kill === undefined) broken.push("no worker could be killed at its work")
  else if (facts.kill.elsewhere === undefined)
    broken.push("the killed worker's documents did not go on")
  if (facts.freeze === undefined) broken.push("no worker could be frozen before a write")
  else if (facts.freeze.elsewhere === undefined) {
    broken.push("the frozen worker's documents did not go on")
  } else if (facts.freeze.refused === 0) broken.push("no stale write was refused")
  return broken
}

export const lossesOf = ({ evidence, lost }: Outcome): number => lost.length + evidence.incomplete

const shownMax = 50

export const reportLines = (outcome: Outcome): ReadonlyArray<string> => {
  const { evidence, facts, gone, problems, unchanged } = outcome
  const { freeze, kill } = facts
  const rest = [
    unchanged === 0 ? "" : `${unchanged} unchanged`,
    gone === 0 ? "" : `${gone} gone from the folder`
  ].filter((text) => text !== "")
  return [
    line("documents", `${evidence.documents} indexed${rest.map((text) => `, ${text}`).join("")}`),
    line("chunks", `${evidence.chunks}`),
    ...(problems.length === 0 ? [] : [line("not indexable", count(problems.length, "file"))]),
    ...problems.slice(0, shownMax).map(({ path, text }) => `                   ${path}: ${text}`),
    ...(problems.length > shownMax
      ? [`                   and ${problems.length - shownMax} more, named above`]
      : []),
    ...(kill === undefined
      ? []
      : [
          line("kill", `${who(kill)} was killed with ${count(kill.documents, "document")} in hand`),
          line("", `kill -> running elsewhere: ${elsewhereText(kill)}`)
        ]),
    ...(freeze === undefined
      ? []
      : [
          line(
            "freeze",
            `${who(freeze)} was frozen between a read and its write, with ${count(freeze.documents, "document")} in hand`
          ),
          line("", `freeze -> running elsewhere: ${elsewhereText(freeze)}`),
          line(
            "stale writes",
            `${freeze.attempted} attempted when it was thawed after ${seconds(freeze.frozenMillis)}, ` +
              `${freeze.refused} refused by the database` +
              (freeze.sqlStates.length === 0 ? "" : ` (${freeze.sqlStates.join(", ")})`)
          )
        ]),
    line("duplicates", `${evidence.duplicates}`),
    line("losses", `${lossesOf(outcome)}`),
    line("took", seconds(outcome.seconds * 1000))
  ]
}

const line = (name: string, text: string): string => `  ${name.padEnd(16)} ${text}`

const who = ({ pid, worker }: Takeover): string => `worker ${worker} (pid ${pid})`

export const count = (of: number, noun: string): string => `${of} ${noun}${of === 1 ? "" : "s"}`

export const seconds = (millis: number): string => `${(millis / 1000).toFixed(1)} s`

/** Each process takes one document of a lost worker at a time, so the last may follow the first. */
export const elsewhereText = ({
  documents,
  elsewhere
}: Pick<Takeover, "documents" | "elsewhere">) => {
  if (elsewhere === undefined) return "not within the time for it"
  const { firstMillis, lastMillis } = elsewhere
  return documents === 1
    ? seconds(firstMillis)
    : `${seconds(firstMillis)}, and all ${documents} after ${seconds(lastMillis)}`
}
