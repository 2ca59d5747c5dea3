/** One thing that a diagnosis says, and what mends it. Pure. */

export interface Mend {
  /** Statements that mend it as they stand, each run by itself, by the owner or an administrator. */
  readonly sql?: ReadonlyArray<string> | undefined
  /** What a person does, where no statement does it. */
  readonly action?: string | undefined
}

export interface Finding extends Mend {
  /** A problem stops workers or breaks a promise, a warning leaves a protection out. */
  readonly level: "ok" | "warning" | "problem"
  /** The same for ever, for scripts. */
  readonly code: string
  readonly text: string
}

export const ok = (code: string, text: string): Finding => ({ level: "ok", code, text })

export const warning = (code: string, text: string, mend: Mend): Finding => ({
  level: "warning",
  code,
  text,
  ...mend
})

export const problem = (code: string, text: string, mend: Mend): Finding => ({
  level: "problem",
  code,
  text,
  ...mend
})

const margin = " ".repeat(9)

export const formatFinding = ({ action, level, sql, text }: Finding): string =>
  [
    `${level.padEnd(7)}  ${text}`,
    ...(sql ?? []).map((statement) => `${margin}${statement};`),
    ...(action === undefined ? [] : [`${margin}(${action})`])
  ].join("\n")

export const formatMillis = (millis: number): string => {
  const seconds = millis / 1000
  if (seconds < 10) return `${Math.round(seconds * 10) / 10} s`
  if (seconds < 120) return `${Math.round(seconds)} s`
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`
  return seconds < 172_800
    ? `${Math.round(seconds / 3600)} h`
    : `${Math.round(seconds / 86_400)} days`
}

/** A text as a constant of SQL, whatever is in it. */
export const literal = (text: string): string => {
  const quoted = `'${text.replaceAll("'", "''")}'`
  // With a backslash the constant must not depend on standard_conforming_strings.
  return text.includes("\\") ? `E${quoted.replaceAll("\\", "\\\\")}` : quoted
}

/** A name as an identifier of SQL. Quoted always: it may be a word of the language. */
export const ident = (name: string): string => `"${name.replaceAll('"', '""')}"`
