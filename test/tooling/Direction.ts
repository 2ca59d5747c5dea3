/**
 * Which folder of src/ may import which: only what stands below it.
 *
 *   actor, database, testing/FaultPoint  <-  executor  <-  recovery, watchdog, queue, capacity
 *     <-  workflow, dag, process, dbos  <-  http, dashboard, main  <-  testing, index.ts
 *
 * Folders of one level may import each other in one direction, so that there is never a cycle. Pure.
 */
import { posix } from "node:path"

export interface Source {
  /** Relative to src/, with slashes. */
  readonly path: string
  readonly text: string
}

const levels: ReadonlyArray<ReadonlyArray<string>> = [
  ["actor", "database", "testing/FaultPoint"],
  ["executor"],
  ["recovery", "watchdog", "queue", "capacity"],
  ["workflow", "dag", "process", "dbos"],
  ["http", "dashboard", "main"],
  ["testing", "index"]
]

const unitOf = (path: string): string => {
  if (path === "testing/FaultPoint.ts") return "testing/FaultPoint"
  return path.includes("/") ? (path.split("/")[0] ?? "") : path.replace(/\.ts$/, "")
}

const levelOf = (unit: string): number => levels.findIndex((level) => level.includes(unit))

const imports = /(?:from|import)\s*\(?\s*"(\.{1,2}\/[^"]+)"/g

/** One line for each import that is not allowed, and one for each cycle. */
export const violations = (sources: ReadonlyArray<Source>): ReadonlyArray<string> => {
  const found: Array<string> = []
  const edges = new Map<string, Set<string>>()
  for (const { path, text } of sources) {
    const from = unitOf(path)
    if (levelOf(from) < 0) found.push(`${path}: the folder ${from} has no place in the direction`)
    for (const [, specifier] of text.matchAll(imports)) {
      const target = posix.join(posix.dirname(path), specifier ?? "")
      const to = unitOf(target)
      if (to === from || target.startsWith("..")) continue
      if (levelOf(to) > levelOf(from)) {
        found.push(`${path}: ${from} must not import ${to} (${target})`)
      }
      edges.set(from, (edges.get(from) ?? new Set()).add(to))
    }
  }
  return [...found, ...cycles(edges)]
}

const cycles = (edges: ReadonlyMap<string, ReadonlySet<string>>): ReadonlyArray<string> => {
  const found = new Set<string>()
  const walk = (unit: string, trail: ReadonlyArray<string>): void => {
    const at = trail.indexOf(unit)
    if (at >= 0) {
      const cycle = trail.slice(at)
      // One name for a cycle wherever the walk entered it.
      const first = cycle.indexOf([...cycle].sort()[0] ?? "")
      const turned = [...cycle.slice(first), ...cycle.slice(0, first)]
      found.add(`a cycle: ${[...turned, turned[0]].join(" -> ")}`)
      return
    }
    for (const next of edges.get(unit) ?? []) walk(next, [...trail, unit])
  }
  for (const unit of edges.keys()) walk(unit, [])
  return [...found]
}
