/**
 * A TCP relay in front of the test server that reads the startup packet of each connection, so that a
 * test sees who comes, and decides whether it gets through.
 */
import { Effect, Redacted, type Scope } from "effect"
import { connect as dial, createServer, type Socket } from "node:net"
import type { Endpoint } from "../../src/database/Database.ts"

export interface Gate {
  readonly url: string
  /** Of each connection that had one, in the order they came. */
  readonly executorIds: () => ReadonlyArray<string>
  readonly arrivals: () => ReadonlyArray<{ readonly atMillis: number; readonly admitted: boolean }>
}

/** `admit` is asked with the executor id in the startup packet, if there is one. */
export const open = (
  target: Endpoint,
  admit: (executorId: string | undefined) => boolean
): Effect.Effect<Gate, never, Scope.Scope> =>
  Effect.gen(function* () {
    const executorIds: Array<string> = []
    const arrivals: Array<{ atMillis: number; admitted: boolean }> = []
    const sockets = new Set<Socket>()
    const server = createServer((socket) => {
      sockets.add(socket)
      socket.on("error", () => {}).on("close", () => sockets.delete(socket))
      socket.once("data", (packet) => {
        const parameters = packet.subarray(8).toString("utf8").split("\0")
        const at = parameters.indexOf("tenure.executor_id")
        const executorId = at < 0 ? undefined : parameters[at + 1]
        if (executorId !== undefined) executorIds.push(executorId)
        const admitted = admit(executorId)
        arrivals.push({ atMillis: Number(process.hrtime.bigint()) / 1e6, admitted })
        if (!admitted) {
          socket.destroy()
          return
        }
        const upstream = dial(target.port, target.host)
        sockets.add(upstream)
        upstream.on("error", () => socket.destroy()).on("close", () => socket.destroy())
        socket.on("close", () => upstream.destroy())
        upstream.write(packet)
        socket.pipe(upstream)
        upstream.pipe(socket)
      })
    })
    yield* Effect.acquireRelease(
      Effect.callback<void>((resume) => {
        server.listen(0, "127.0.0.1", () => resume(Effect.void))
      }),
      () =>
        Effect.callback<void>((resume) => {
          server.close(() => resume(Effect.void))
          for (const socket of sockets) socket.destroy()
        })
    )
    const address = server.address()
    const url = new URL(`postgresql://127.0.0.1/${target.database}`)
    url.username = target.username
    if (target.password !== undefined) url.password = Redacted.value(target.password)
    url.port = typeof address === "object" && address !== null ? String(address.port) : ""
    return { url: url.href, executorIds: () => executorIds, arrivals: () => arrivals }
  })
