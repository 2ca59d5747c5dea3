/**
 * A PostgreSQL client that does nothing but send prepared bytes and count answers, so that what is
 * measured is the server: some 10 us of ours for each round trip. The driver opens the session, with
 * its authentication; from then on the socket is ours.
 *
 * An error answer ends the run: a benchmark of refused statements would measure nothing.
 */
import { PgConnection, PgProtocol } from "@effect/sql-pg"
import { Clock, Effect, Result, type Scope } from "effect"
import { connect, type Socket } from "node:net"
import type { Endpoint } from "../src/database/Database.ts"

export interface WireClient {
  readonly processId: number
  /** Prepares a statement without parameters. Answers with the bytes that run it once. */
  readonly prepare: (sql: string) => Effect.Effect<Uint8Array>
  /** Sends the frames one after the other, each as a round trip. */
  readonly send: (frames: ReadonlyArray<Uint8Array>) => Effect.Effect<void>
  /** Repeats the frames until the time has come. Tells how often all of them were answered. */
  readonly repeat: (frames: ReadonlyArray<Uint8Array>, untilNanos: bigint) => Effect.Effect<number>
}

export const make = Effect.fnUntraced(function* (
  database: Endpoint,
  startupParameters: Readonly<Record<string, string>> = {}
): Effect.fn.Return<WireClient, never, Scope.Scope> {
  const clock = yield* Clock.Clock
  const socket = yield* Effect.acquireRelease(open(database), (opened) =>
    Effect.sync(() => opened.destroy())
  )
  // Never closed by the driver: the release above ends the session.
  const session = yield* PgConnection.make({
    ...database.config,
    startupParameters,
    ssl: false,
    stream: () => socket
  }).pipe(Effect.orDie)
  socket.removeAllListeners("data")

  let failed: Error | undefined
  let onReady: () => void = () => {}
  const scan = makeScanner({
    ready: () => onReady(),
    error: (message) => {
      failed = new Error(message)
    }
  })
  socket.on("data", scan)

  const run = (
    frames: ReadonlyArray<Uint8Array>,
    again: (rounds: number) => boolean
  ): Effect.Effect<number> =>
    Effect.callback<number>((resume) => {
      let next = 0
      let rounds = 0
      onReady = () => {
        if (failed !== undefined) return resume(Effect.die(failed))
        if (next === frames.length) {
          rounds++
          if (!again(rounds)) return resume(Effect.succeed(rounds))
          next = 0
        }
        socket.write(frames[next++] ?? PgProtocol.encodeSync())
      }
      onReady()
    })

  let statements = 0
  return {
    processId: session.processId,
    prepare: (sql) =>
      Effect.suspend(() => {
        const name = `s${statements++}`
        const parse = Result.getOrThrow(
          PgProtocol.encodeParse({ name, query: sql, parameterTypes: [] })
        )
        const bind = Result.getOrThrow(
          PgProtocol.encodeBind({ portal: "", statement: name, parameters: [] })
        )
        const execute = PgProtocol.encodeExecute({ portal: "", maxRows: 0 })
        const frame = Buffer.concat([bind, execute, PgProtocol.encodeSync()])
        return Effect.as(
          run([Buffer.concat([parse, PgProtocol.encodeSync()])], () => false),
          frame
        )
      }),
    send: (frames) => Effect.asVoid(run(frames, () => false)),
    repeat: (frames, untilNanos) => run(frames, () => clock.monotonicTimeNanosUnsafe() < untilNanos)
  }
})

const open = (database: Endpoint): Effect.Effect<Socket> =>
  Effect.callback<Socket>((resume) => {
    const socket = connect({ host: database.host, port: database.port, noDelay: true })
    const failedToConnect = (error: Error) => resume(Effect.die(error))
    socket.once("error", failedToConnect)
    socket.once("connect", () => {
      socket.off("error", failedToConnect)
      resume(Effect.succeed(socket))
    })
  })

const readyForQuery = 0x5a
const errorResponse = 0x45

/** Walks over messages by their length; their contents are read only when they are errors. */
const makeScanner = (on: {
  readonly ready: () => void
  readonly error: (message: string) => void
}) => {
  let rest: Buffer | undefined
  return (chunk: Buffer) => {
    const bytes = rest === undefined ? chunk : Buffer.concat([rest, chunk])
    rest = undefined
    let at = 0
    while (at + 5 <= bytes.length) {
      const end = at + 1 + bytes.readInt32BE(at + 1)
      if (end > bytes.length) break
      if (bytes[at] === errorResponse) {
        on.error(
          bytes
            .toString("utf8", at + 5, end)
            .replaceAll("\0", " ")
            .trim()
        )
      } else if (bytes[at] === readyForQuery) on.ready()
      at = end
    }
    if (at < bytes.length) rest = bytes.subarray(at)
  }
}
