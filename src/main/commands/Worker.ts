/**
 * `tenure worker <module>`: a module's exported layer as the main of this process. The module names
 * its database itself, and must not call `Tenure.runMain`.
 */
import { Effect, Layer } from "effect"
import { Argument, Command, Flag } from "effect/cli"
import { existsSync } from "node:fs"
import { resolve } from "node:path"
import { pathToFileURL } from "node:url"
import { refuse, SettingsRejected } from "../../database/StartupRefused.ts"
import { launch } from "../runMain.ts"

const module = Argument.String("module").pipe(
  Argument.withDescription("A file that exports a layer with everything provided.")
)

const name = Flag.String("export").pipe(
  Flag.withDescription("The name of the exported layer."),
  Flag.withDefault("layer")
)

export const worker = Command.make(
  "worker",
  { module, export: name },
  Effect.fnUntraced(function* ({ export: name, module }) {
    if (!existsSync(module)) return yield* rejected(`there is no file ${module}`, "module")
    // Its own error is the report when it throws: nobody but its author can mend it.
    const loaded = yield* Effect.promise(
      (): Promise<Readonly<Record<string, unknown>>> => import(pathToFileURL(resolve(module)).href)
    )
    const found = loaded[name]
    if (isClosedLayer(found)) return yield* launch(found)
    const others = Object.keys(loaded).filter((other) => Layer.isLayer(loaded[other]))
    return yield* rejected(
      `${module} exports no layer named ${name}; ` +
        (others.length === 0 ? "it exports none" : `its layers are ${others.join(", ")}`),
      "--export"
    )
  })
).pipe(Command.withDescription("Runs the layer that a module exports, as Tenure.runMain does."))

const rejected = (rule: string, setting: string) =>
  refuse(new SettingsRejected({ rule, settings: [setting] }))

// What it still needs cannot be seen in a value: a missing service is a defect with its name.
const isClosedLayer = (value: unknown): value is Layer.Layer<never, unknown> => Layer.isLayer(value)
