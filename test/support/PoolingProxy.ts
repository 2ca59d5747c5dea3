/**
 * A pooler between clients and PostgreSQL, small enough to be read: many clients over few server
 * sessions, as PgBouncer lends them.
 *
 *   transaction   a client has a session from its first message until the server is idle again
 *   session       a client has one from its start to its end
 *
 * What a client sets in its start-up message beside the few settings every pooler knows is
 *   reject   an error, and the end of the connection
 *   drop     left out without a word
 *   pass     given to the server by whoever opens a session first; later clients find it so
 *
 * Each client is let in by the server itself, over a connection of its own: its authentication is passed
 * through. Then that connection joins the sessions that are lent, or is closed when there are enough.
 */
import { Effect, type Scope } from "effect"
import { connect, createServer, type AddressInfo, type Socket } from "node:net"

export interface Options {
  readonly mode: "transaction" | "session"
  readonly settings: "reject" | "drop" | "pass"
  /** Sessions of the server at most, beside those that are being opened; `transaction` only. */
  readonly sessions?: number
}

export interface PoolingProxy {
  /** The same URL through the pooler. */
  readonly through: (url: string) => string
  /** Statements of the kind that clients have sent. */
  readonly statements: (kind: RegExp) => ReadonlyArray<string>
  readonly clientsMax: () => number
  /** Sessions that were lent at one time. */
  readonly lentMax: () => number
  /** How often a client was lent a session that another had had before. */
  readonly changes: () => number
}

interface Client {
  readonly socket: Socket
  /** What it logs in as and where: sessions are lent among equals. */
  pool: string
  parse: Parser
  isStarted: boolean
  /** What it would cancel with: the key of the connection that let it in. */
  key: Buffer
  session: Session | undefined
  /** Messages that wait for a session. */
  readonly waiting: Array<Message>
  /** Cycles that were sent and not answered yet, and whether a further one has begun. */
  open: number
  hasBegun: boolean
}

interface Session {
  readonly socket: Socket
  readonly pool: string
  parse: Parser
  client: Client | undefined
  last: Client | undefined
  /** Its process and secret, for a cancellation. */
  key: Buffer
}

interface Message {
  readonly tag: string
  readonly body: Buffer
  readonly bytes: Buffer
}

type Parser = (chunk: Buffer) => ReadonlyArray<Message>

/** Known to every pooler, as PgBouncer 1.18 has them. */
const known = new Set([
  "user",
  "database",
  "client_encoding",
  "datestyle",
  "timezone",
  "application_name"
])

/** They belong to a cycle that a Query or a Sync has ended already. */
const copyTags = new Set(["d", "c", "f"])

const cancelCode = 80_877_102
const encryptionCodes = [80_877_103, 80_877_104]

export const make = Effect.fnUntraced(function* (
  url: string,
  { mode, sessions: sessionsMax = 2, settings }: Options
): Effect.fn.Return<PoolingProxy, never, Scope.Scope> {
  const target = new URL(url)
  const clients = new Set<Client>()
  const sessions = new Set<Session>()
  const queue: Array<Client> = []
  const statements: Array<string> = []
  let clientsMax = 0
  let lentMax = 0
  let changes = 0

  const dial = () => {
    const socket = connect({ host: target.hostname, port: Number(target.port), noDelay: true })
    socket.on("error", () => {})
    return socket
  }

  const lend = (session: Session, client: Client) => {
    if (session.last !== undefined && session.last !== client) changes++
    session.client = client
    session.last = client
    client.session = session
    lentMax = Math.max(lentMax, [...sessions].filter((one) => one.client !== undefined).length)
    for (const message of client.waiting.splice(0)) send(client, session, message)
  }

  const takeBack = (session: Session) => {
    if (session.client !== undefined) session.client.session = undefined
    session.client = undefined
    const next = queue.findIndex((client) => client.pool === session.pool)
    const client = next < 0 ? undefined : queue.splice(next, 1)[0]
    if (client !== undefined) lend(session, client)
  }

  const send = (client: Client, session: Session, { body, bytes, tag }: Message) => {
    // A Query or a Sync ends a cycle; the server answers each with its state.
    if (tag === "Q" || tag === "S") {
      client.open++
      client.hasBegun = false
    } else if (!copyTags.has(tag)) client.hasBegun = true
    if (tag === "Q" || tag === "P") {
      statements.push(body.toString("latin1").split("\0")[tag === "Q" ? 0 : 1] ?? "")
    }
    session.socket.write(bytes)
  }

  const onClient = (client: Client, message: Message) => {
    if (message.tag === "X") return void client.socket.end()
    if (client.session !== undefined) return send(client, client.session, message)
    client.waiting.push(message)
    if (queue.includes(client)) return
    // The one used last is lent first, as poolers do to let the others go.
    const free = [...sessions]
      .reverse()
      .find((one) => one.client === undefined && one.pool === client.pool)
    if (free === undefined) queue.push(client)
    else lend(free, client)
  }

  const onServer = (session: Session, { body, bytes, tag }: Message) => {
    const client = session.client
    // What nobody has asked for, such as a notification, is for nobody.
    if (client === undefined) return
    client.socket.write(bytes)
    if (tag !== "Z") return
    client.open--
    const isIdle = String.fromCharCode(body[0] ?? 0) === "I"
    if (mode === "session" || !isIdle || client.open > 0 || client.hasBegun) return
    sessions.delete(session)
    sessions.add(session)
    takeBack(session)
  }

  const end = (session: Session) => {
    sessions.delete(session)
    session.client?.socket.end()
    session.socket.destroy()
    // Nobody is left to lend to them.
    if ([...sessions].some((one) => one.pool === session.pool)) return
    for (const client of queue.filter((one) => one.pool === session.pool)) client.socket.end()
  }

  /** Opens a session with what the client says of itself, and passes on until the server lets it in. */
  const letIn = (client: Client, wanted: ReadonlyMap<string, string>) => {
    const given = new Map([...wanted].filter(([name]) => settings === "pass" || known.has(name)))
    const unknown = [...wanted.keys()].find((name) => !given.has(name))
    if (settings === "reject" && unknown !== undefined) {
      return void client.socket.end(refusal(`unsupported startup parameter: ${unknown}`))
    }
    client.pool = `${given.get("user")}/${given.get("database")}`
    const session: Session = {
      socket: dial(),
      pool: client.pool,
      parse: parser(),
      client,
      last: undefined,
      key: Buffer.alloc(8)
    }
    let isLetIn = false
    client.session = session
    session.socket.write(startup(given))
    session.socket.on("data", (chunk: Buffer) => {
      for (const message of session.parse(chunk)) {
        if (isLetIn) {
          onServer(session, message)
          continue
        }
        if (message.tag === "K") client.key = session.key = Buffer.from(message.body)
        client.socket.write(message.bytes)
        if (message.tag !== "Z") continue
        isLetIn = true
        client.open = 0
        client.hasBegun = false
        const lent = [...sessions].filter((one) => one.pool === session.pool)
        if (mode === "transaction" && lent.length >= sessionsMax) {
          client.session = undefined
          session.client = undefined
          session.socket.end()
        } else {
          sessions.add(session)
          session.last = client
          if (mode === "transaction") takeBack(session)
        }
      }
    })
    session.socket.on("close", () => {
      if (session.client !== undefined || sessions.has(session)) end(session)
    })
  }

  const cancel = (body: Buffer) => {
    // What is cancelled is what this client runs now, in whatever session.
    const asked = [...clients].find((one) => one.key.equals(body.subarray(4)))
    if (asked?.session === undefined) return
    const message = Buffer.alloc(16)
    message.writeUInt32BE(16, 0)
    message.writeUInt32BE(cancelCode, 4)
    asked.session.key.copy(message, 8)
    dial().end(message)
  }

  const listener = createServer({ noDelay: true }, (socket) => {
    const client: Client = {
      socket,
      pool: "",
      parse: parser(true),
      isStarted: false,
      key: Buffer.alloc(0),
      session: undefined,
      waiting: [],
      open: 0,
      hasBegun: false
    }
    socket.on("error", () => {})
    socket.on("data", (chunk: Buffer) => {
      for (const message of client.parse(chunk)) {
        if (client.isStarted) {
          if (client.session !== undefined && !sessions.has(client.session)) {
            // Still being let in: a password.
            client.session.socket.write(message.bytes)
          } else onClient(client, message)
          continue
        }
        const code = message.body.readUInt32BE(0)
        if (code === cancelCode) {
          cancel(message.body)
          socket.end()
        } else if (encryptionCodes.includes(code)) {
          socket.write("N")
          client.parse = parser(true)
        } else {
          client.isStarted = true
          clients.add(client)
          clientsMax = Math.max(clientsMax, clients.size)
          letIn(client, settingsOf(message.body))
        }
      }
    })
    socket.on("close", () => {
      clients.delete(client)
      const place = queue.indexOf(client)
      if (place >= 0) queue.splice(place, 1)
      const { session } = client
      if (session === undefined) return
      // Whoever leaves in the middle takes the session with him; so does each in session mode.
      session.client = undefined
      end(session)
    })
  })
  yield* Effect.acquireRelease(
    Effect.callback<void>((resume) => {
      listener.listen(0, "127.0.0.1", () => resume(Effect.void))
    }),
    () =>
      Effect.sync(() => {
        listener.close()
        for (const { socket } of [...clients, ...sessions]) socket.destroy()
      })
  )
  const { port } = listener.address() as AddressInfo
  return {
    through: (direct) => {
      const redirected = new URL(direct)
      redirected.hostname = "127.0.0.1"
      redirected.port = String(port)
      return redirected.href
    },
    statements: (kind) => statements.filter((statement) => kind.test(statement)),
    clientsMax: () => clientsMax,
    lentMax: () => lentMax,
    changes: () => changes
  }
})

/** Cuts a stream into messages. Only the first of a client has no tag. */
const parser = (hasStartup = false): Parser => {
  let rest: Buffer = Buffer.alloc(0)
  let head = hasStartup ? 0 : 1
  return (chunk) => {
    rest = Buffer.concat([rest, chunk])
    const messages: Array<Message> = []
    while (rest.length >= head + 4) {
      const end = head + rest.readUInt32BE(head)
      if (rest.length < end) break
      messages.push({
        tag: head === 0 ? "" : String.fromCharCode(rest[0] ?? 0),
        body: rest.subarray(head + 4, end),
        bytes: rest.subarray(0, end)
      })
      rest = rest.subarray(end)
      head = 1
    }
    return messages
  }
}

const settingsOf = (body: Buffer): ReadonlyMap<string, string> => {
  const words = body.subarray(4).toString("utf8").split("\0")
  const settings = new Map<string, string>()
  for (let at = 0; at + 1 < words.length && words[at] !== ""; at += 2) {
    settings.set((words[at] ?? "").toLowerCase(), words[at + 1] ?? "")
  }
  return settings
}

const startup = (settings: ReadonlyMap<string, string>): Buffer => {
  const text = Buffer.from(`${[...settings].flat().join("\0")}\0\0`)
  const head = Buffer.alloc(8)
  head.writeUInt32BE(text.length + 8, 0)
  head.writeUInt32BE(196_608, 4)
  return Buffer.concat([head, text])
}

/** As PgBouncer says it. */
const refusal = (text: string): Buffer => {
  const body = Buffer.from(`SFATAL\0C08P01\0M${text}\0\0`)
  const head = Buffer.alloc(5)
  head.write("E", 0)
  head.writeUInt32BE(body.length + 4, 1)
  return Buffer.concat([head, body])
}
