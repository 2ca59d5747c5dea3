/**
 * `npm start`: indexes a folder of real documents while one worker is killed and another frozen, and
 * `npm start -- search`, which asks the index. What it uses is what any application uses: a queue, an
 * executor in each worker, fenced tables.
 *
 * Exit codes: 0, also when there was nothing to do; 1 when a promise was broken or the folder cannot
 * be used; 130 after a Ctrl-C, which leaves everything so that the next start goes on.
 */
import { Console, Effect, Layer, Option, References, Runtime, Schema } from "effect"
import { Argument, Command, Flag } from "effect/cli"
import { existsSync } from "node:fs"
import { join, resolve } from "node:path"
import { defaultDirectory } from "../../database/EmbeddedPostgres.ts"
import { Process } from "../Process.ts"
import { layerClient } from "../Tenure.ts"
import { displayPath, documentationOfEffect, scan } from "./Folder.ts"
import { handIn, type HandedIn } from "./HandIn.ts"
import { totals } from "./IndexQueries.ts"
import { createTables } from "./IndexTables.ts"
import { brokenPromises, count, type Outcome, reportLines } from "./Report.ts"
import { search } from "./Search.ts"
import {
  environmentOf,
  isEmbedded,
  layerDatabase,
  layerLogger,
  layerSql,
  lock,
  openOutput,
  outputName
} from "./Setup.ts"
import * as Show from "./Show.ts"
import { make as makeView, paint, type View } from "./View.ts"

/** It has been told already, by whoever fails with it. */
class DemoFailed extends Schema.TaggedError<DemoFailed>()("DemoFailed", {}) {
  override readonly [Runtime.errorReported] = false
  override readonly [Runtime.errorExitCode] = 1
}

/** Workers drain, and the embedded server stops, before a Ctrl-C has to be forced. */
const stopBudgetMillis = 20_000

const start = Effect.fnUntraced(function* (options: {
  readonly dir: Option.Option<string>
  readonly again: boolean
}) {
  const view = makeView(process.stdout)
  const main = yield* Process
  main.allowUnsafe(stopBudgetMillis)
  const output = yield* openOutput
  yield* show(options, view, output).pipe(
    Effect.provide(layerLogger(output, view)),
    Effect.provideService(References.MinimumLogLevel, "Info"),
    Effect.catchTag(["FolderUnusable", "AlreadyRunning", "WorkerNotStarted"], (error) =>
      Effect.andThen(view.say(`\n  ${error.message}\n`), Effect.fail(new DemoFailed()))
    )
  )
}, Effect.scoped)

const show = Effect.fnUntraced(function* (
  options: { readonly dir: Option.Option<string>; readonly again: boolean },
  view: View,
  output: number
) {
  const source = Option.match(options.dir, {
    onNone: documentationOfEffect,
    onSome: (dir) => ({ folder: resolve(workingDirectory(), dir), takes: () => true })
  })
  const found = yield* scan(source.folder, source.takes)
  const shownFolder = displayPath(source.folder, workingDirectory())
  yield* view.say(
    `\n  ${paint(view.colour, 1, "tenure")}  ${count(found.files.length, "file")} in ${shownFolder}`
  )
  if (found.passedOver.length > 0) {
    yield* view.say(`  not looked into: ${found.passedOver.slice(0, 5).join(", ")}`)
  }
  const embedded = yield* isEmbedded
  if (embedded) {
    const isNew = !existsSync(join(defaultDirectory, "data"))
    yield* view.say(
      `  PostgreSQL starts in ${defaultDirectory}${isNew ? ", which is made first: a few seconds" : ""}`
    )
  } else yield* view.say("  connecting to the PostgreSQL of DATABASE_URL")
  yield* Effect.gen(function* () {
    yield* lock
    yield* createTables
    const handedIn = yield* handIn(source.folder, found.files, options.again)
    if (handedIn.todo.length === 0) {
      return yield* nothingToDo(
        handedIn,
        view,
        Option.isNone(options.dir) ? undefined : shownFolder
      )
    }
    yield* view.say(`  ${handedInText(handedIn)}`)
    const outcome = yield* Effect.scoped(
      Show.run({
        folder: source.folder,
        handedIn,
        view,
        environment: yield* environmentOf,
        output,
        outputName
      })
    ).pipe(Effect.onInterrupt(() => view.say(interrupted)))
    yield* tell(outcome, view)
  }).pipe(
    Effect.provide(
      layerClient.pipe(Layer.provideMerge(layerSql), Layer.provideMerge(layerDatabase))
    )
  )
})

/** npm runs scripts in the package's folder, whatever folder one is in. */
const workingDirectory = (): string =>
  process.env["npm_lifecycle_event"] === "start"
    ? (process.env["INIT_CWD"] ?? process.cwd())
    : process.cwd()

const interrupted =
  "\n  Stopped. What is left waits in the database: `npm start` goes on with it.\n"

const handedInText = ({ resumed, todo, unchanged }: HandedIn): string =>
  [
    `${count(todo.length, "document")} to index`,
    ...(resumed === 0
      ? []
      : [`${resumed === todo.length ? "all" : `${resumed} of them`} left by an earlier start`]),
    ...(unchanged.length === 0 ? [] : [`${unchanged.length} unchanged${badText(unchanged)}`])
  ].join(", ")

const badText = (unchanged: HandedIn["unchanged"]): string => {
  const bad = unchanged.filter(({ state }) => state === "refused").length
  return bad === 0 ? "" : ` (${bad} not indexable)`
}

const howToSearch = `  Search it:  npm start -- search "interruption"\n`

/** No failure, and no show: what was proven before is not made new by doing it again unasked. */
const nothingToDo = Effect.fnUntraced(function* (
  { gone, unchanged }: HandedIn,
  view: View,
  shownFolder: string | undefined
) {
  const bad = unchanged.filter(({ state }) => state === "refused")
  const { chunks, documents } = yield* totals
  yield* view.say(
    `\n  Nothing has changed since the last time: ${count(unchanged.length - bad.length, "document")} indexed` +
      (gone === 0 ? "." : `, ${gone} gone from the folder and from the index.`)
  )
  for (const { path, problem } of bad) yield* view.say(`  not indexable: ${path}: ${problem}`)
  yield* view.say(
    `  The index holds ${count(documents, "document")} in ${count(chunks, "chunk")}.\n`
  )
  yield* view.say(
    `  See it all again:  npm start -- --again${shownFolder === undefined ? "" : ` --dir ${shownFolder}`}`
  )
  yield* view.say(howToSearch)
})

const tell = Effect.fnUntraced(function* (outcome: Outcome, view: View) {
  const broken = brokenPromises(outcome)
  yield* view.say("")
  for (const line of reportLines(outcome)) yield* view.say(line)
  yield* view.say("")
  if (broken.length > 0) {
    for (const promise of broken) {
      yield* view.say(paint(view.colour, 31, `  BROKEN PROMISE: ${promise}`))
    }
    yield* view.say(`  What the workers said is in ${outputName}.\n`)
    return yield* new DemoFailed()
  }
  yield* view.say(
    outcome.evidence.documents === 0
      ? "  None of these files could be indexed, so there was no write to prove anything by.\n"
      : paint(view.colour, 32, "  Every document was indexed exactly once.\n")
  )
  yield* view.say(howToSearch)
})

const searching = Command.make(
  "search",
  {
    words: Argument.String("words").pipe(
      Argument.withDescription('As in a web search: words, "a phrase", or, -not.'),
      Argument.variadic({ min: 1 })
    ),
    limit: Flag.Int("limit").pipe(
      Flag.withDescription("How many documents at most."),
      Flag.withDefault(8)
    )
  },
  Effect.fnUntraced(function* ({ limit, words }) {
    yield* Effect.asVoid(Console.log(yield* search(words.join(" "), limit)))
  })
).pipe(Command.withDescription("Searches what was indexed, also while a show goes on."))

export const command = Command.make(
  "demo",
  {
    dir: Flag.String("dir").pipe(
      Flag.withDescription("The folder to index. Otherwise the documentation of effect."),
      Flag.optional
    ),
    again: Flag.Boolean("again").pipe(
      Flag.withDescription("Index everything anew, changed or not."),
      Flag.withDefault(false)
    )
  },
  start
).pipe(
  Command.withDescription(
    "Indexes a folder with three workers, kills one, freezes another, and proves that nothing was lost or done twice."
  ),
  Command.withSubcommands([searching])
)
