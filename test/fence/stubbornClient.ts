/**
 * A client that a test stops with SIGSTOP inside fenced transactions: it opens them, says so in one
 * line, and then stays in one of three ways that the server cannot tell from a slow network.
 *
 *   idle    between two statements
 *   result  reading a result far larger than the buffers
 *   copy    about to send the rows of a COPY
 *
 * Arguments: URL, executor, startup parameters as JSON, then one way for each session.
 */
import { PgClient } from "@effect/sql-pg"
import { Effect, Redacted, Stream } from "effect"
import * as Reactivity from "effect/reactivity/Reactivity"
import { connect, type Socket } from "node:net"

const [, , url = "", executor = "", startup = "{}", ...ways] = process.argv

const open = Effect.gen(function* () {
  const { hostname, port } = new URL(url)
  const socket = connect(Number(port), hostname)
  const sql = yield* PgClient.makeClient({
    url: Redacted.make(url),
    stream: () => socket,
    applicationName: `tenure test ${executor}`,
    startupParameters: { "tenure.executor_id": executor, ...JSON.parse(startup) }
  })
  return { socket, sql }
})

type Open = Effect.Success<typeof open>

const write = ({ sql }: Open) =>
  Effect.andThen(sql.unsafe("BEGIN"), sql.unsafe("INSERT INTO app.note (text) VALUES ('written')"))

const stay = ({ socket, sql }: Open, way: string | undefined) => {
  if (way === "result") {
    return Stream.runDrain(
      sql.unsafe("SELECT repeat('x', 1000), generate_series(1, 100000000)").stream
    )
  }
  if (way === "copy") startCopy(socket)
  return Effect.never
}

// The driver knows no COPY, so it is sent past it; nobody reads the answer.
const startCopy = (socket: Socket): void => {
  const text = Buffer.from("COPY app.note (text) FROM STDIN\0")
  const header = Buffer.from("Q....")
  header.writeInt32BE(text.length + 4, 1)
  socket.removeAllListeners("data")
  socket.write(Buffer.concat([header, text]))
}

await Effect.runPromise(
  Effect.gen(function* () {
    // All sessions first: their limits count from the first BEGIN on.
    const sessions = yield* Effect.replicateEffect(open, ways.length)
    yield* Effect.forEach(sessions, write, { concurrency: "unbounded", discard: true })
    process.stdout.write("open\n")
    yield* Effect.forEach(sessions, (session, index) => stay(session, ways[index]), {
      concurrency: "unbounded",
      discard: true
    })
  }).pipe(Effect.scoped, Effect.provideServiceEffect(Reactivity.Reactivity, Reactivity.make))
)
