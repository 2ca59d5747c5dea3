/**
 * A process that offers the API on a port of its own, with a database of its own, and what a client
 * outside has: an address, tokens, and requests as bytes on a socket.
 */
import { type Context, Effect, Layer, References, type Scope } from "effect"
import type { SqlClient } from "effect/sql"
import { createServer } from "node:http"
import { Tenure } from "tenure"
import { hashOf, mintSecret, type Role } from "../../src/http/Token.ts"
import { createToken } from "../../src/http/TokenStore.ts"
import { connect, type FreshDatabase, freshDatabase, layerOf } from "../support/Postgres.ts"

export const freePort = Effect.callback<number>((resume) => {
  const server = createServer().listen(0, "127.0.0.1", () => {
    const address = server.address()
    const port = typeof address === "object" && address !== null ? address.port : 0
    server.close(() => resume(Effect.succeed(port)))
  })
})

export interface Answer {
  readonly status: number
  readonly headers: Headers
  readonly text: string
  /** What the text says, if it is JSON. */
  readonly body: Readonly<Record<string, unknown>>
}

export interface Process {
  readonly url: string
  readonly database: FreshDatabase
  /** As the schema's owner. */
  readonly sql: SqlClient.SqlClient
  readonly executor: Tenure.Executor["Service"]
  readonly context: Context.Context<Layer.Success<ReturnType<typeof Tenure.layer>>>
  /** The secret of a fresh token. */
  readonly token: (
    role: Role,
    options?: { readonly validMillis?: number }
  ) => Effect.Effect<{ readonly id: string; readonly secret: string }>
  readonly call: (
    method: string,
    path: string,
    options?: {
      readonly token?: string | undefined
      /** Sent as JSON; a string as it is. */
      readonly body?: unknown
      readonly headers?: Readonly<Record<string, string>>
      readonly signal?: AbortSignal
    }
  ) => Effect.Effect<Answer>
}

export const process = (
  options: Partial<Tenure.Options> = {}
): Effect.Effect<Process, never, Scope.Scope> =>
  Effect.gen(function* () {
    const database = yield* freshDatabase
    const port = yield* freePort
    const url = `http://127.0.0.1:${port}`
    const context = yield* Layer.build(
      Tenure.layerHttp({ port, host: "127.0.0.1", api: true }).pipe(
        Layer.provideMerge(
          Tenure.layer({
            application: "app",
            version: "app-v1",
            ...options,
            settings: { drain: 100, ...options.settings }
          })
        ),
        Layer.provide(layerOf(database.worker)),
        Layer.provideMerge(Layer.succeed(References.MinimumLogLevel, "Fatal" as const))
      )
    ).pipe(Effect.orDie)
    const sql = yield* connect(database.owner)
    return {
      url,
      database,
      sql,
      context,
      executor: yield* Tenure.Executor.pipe(Effect.provideContext(context)),
      token: (role, options = {}) =>
        Effect.suspend(() => {
          const secret = mintSecret(role)
          return createToken(sql, {
            role,
            name: "test",
            hash: hashOf(secret),
            validMillis: options.validMillis ?? null
          }).pipe(
            Effect.map((id) => ({ id, secret })),
            Effect.orDie
          )
        }),
      call: (method, path, { body, headers, signal, token } = {}) =>
        Effect.promise(async () => {
          const response = await fetch(`${url}/tenure/v1${path}`, {
            method,
            headers: {
              ...headers,
              ...(token === undefined ? {} : { authorization: `Bearer ${token}` }),
              ...(body === undefined ? {} : { "content-type": "application/json" })
            },
            ...(body === undefined
              ? {}
              : { body: typeof body === "string" ? body : JSON.stringify(body) }),
            ...(signal === undefined ? {} : { signal })
          })
          const text = await response.text()
          return {
            status: response.status,
            headers: response.headers,
            text,
            body: parsed(text)
          }
        })
    }
  })

const parsed = (text: string): Answer["body"] => {
  try {
    return JSON.parse(text) as Answer["body"]
  } catch {
    return {}
  }
}

/** Opens a session, and has its requests at hand. */
export const session = Effect.fnUntraced(function* (
  { call }: Process,
  token: string,
  options: {
    readonly queues: ReadonlyArray<string>
    readonly slots?: number
    readonly recovery?: "executions" | "consecutive"
  }
) {
  const opened = yield* call("POST", "/sessions", {
    token,
    body: { worker: "test", slots: 10, ...options }
  })
  if (opened.status !== 201) return yield* Effect.die(new Error(opened.text))
  const id = String(opened.body["id"])
  const ofItem = (item: string, verb: string, body: object) =>
    call("POST", `/sessions/${id}/items/${item}/${verb}`, { token, body })
  return {
    id,
    opened: opened.body,
    pull: (body: object = { wanted: 10 }, signal?: AbortSignal) =>
      Effect.map(
        call("POST", `/sessions/${id}/pull`, {
          token,
          body,
          ...(signal === undefined ? {} : { signal })
        }),
        (answer) => ({ ...answer, items: (answer.body["items"] ?? []) as ReadonlyArray<Item> })
      ),
    heartbeat: call("POST", `/sessions/${id}/heartbeat`, { token }),
    close: call("DELETE", `/sessions/${id}`, { token }),
    activate: ({ executionSeq, id }: Item) => ofItem(id, "activate", { executionSeq }),
    settle: ({ executionSeq, id }: Item, verb: string, body: object = {}) =>
      ofItem(id, verb, { executionSeq, ...body })
  }
})

export interface Item {
  readonly id: string
  readonly executionSeq: number
  readonly queue: string
  readonly payload: unknown
  readonly failures: number
  readonly losses: number
  readonly traceparent: string | null
}
