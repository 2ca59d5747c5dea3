/**
 * A network that fails on command, between workers and their database. Each link knows which session
 * it carries, because the first message names it, so that one kind of session can be cut off alone.
 *
 *   pass      bytes go through
 *   delay     answers come late, in order
 *   mute      requests arrive, answers are dropped
 *   deafen    requests are dropped
 *   freeze    a black hole: nothing goes either way, not even the end of a connection
 *   quiet     everything but notifications
 *   refuse    connections are reset, new ones at once
 *
 * A link that has lost bytes can never be made whole, so healing resets it. One that was frozen goes on
 * where it stood, as TCP does after an outage.
 */
import { Effect, type Scope } from "effect"
import { connect, createServer, type AddressInfo, type Socket } from "node:net"

export type Mode =
  | "pass"
  | "mute"
  | "deafen"
  | "freeze"
  | "quiet"
  | "refuse"
  | { readonly delayMillis: number }

export interface Proxy {
  readonly url: string
  /** Another role's URL of the same server, through the proxy. */
  readonly through: (url: string) => string
  /** For sessions whose application_name has `kind` in it, present and future ones. */
  readonly set: (mode: Mode, kind?: string) => Effect.Effect<void>
  /** For those that are open at this moment and for no others. */
  readonly setOpen: (mode: Mode, kind?: string) => Effect.Effect<void>
  readonly heal: Effect.Effect<void>
  /**
   * Resets the next connection that sends such a statement, as soon as it has been forwarded whole: the
   * server executes it, and the client never learns. With `answer` it is the first one whose answer has
   * that in it. Tells when that has happened.
   */
  readonly cutAfter: (statement: RegExp, answer?: string) => () => boolean
  /** The next connection that sends such a statement freezes before it. Tells when that has happened. */
  readonly freezeAt: (statement: RegExp) => () => boolean
  readonly openMax: () => number
  readonly acceptedCount: () => number
  readonly transcript: ReadonlyArray<string>
}

interface Cut {
  readonly statement: RegExp
  readonly answer: string | undefined
  done: boolean
}

interface Link {
  readonly client: Socket
  readonly server: Socket
  kind: string
  mode: Mode | undefined
  isTainted: boolean
  readonly held: Array<() => void>
  /** Statements by the name they were prepared under. */
  readonly prepared: Map<string, string>
  current: string
  /** Depends on the answer that comes now, of which this much has come. */
  pending: { readonly cut: Cut; answer: string } | undefined
  toServer: Buffer
  toClient: Buffer
  isStarted: boolean
}

export const make = Effect.fnUntraced(function* (
  url: string
): Effect.fn.Return<Proxy, never, Scope.Scope> {
  const target = new URL(url)
  const links = new Set<Link>()
  const rules: Array<{ readonly mode: Mode; readonly kind: string }> = []
  const cuts: Array<Cut> = []
  const freezes: Array<{ readonly statement: RegExp; done: boolean }> = []
  const transcript: Array<string> = []
  let openMax = 0
  let accepted = 0

  const modeOf = (link: Link): Mode =>
    link.mode ?? rules.findLast((rule) => link.kind.includes(rule.kind))?.mode ?? "pass"

  const reset = (link: Link) => {
    link.client.resetAndDestroy()
    // Not reset: what was forwarded must still be executed.
    link.server.end()
    links.delete(link)
  }

  const forward = (link: Link, chunk: Buffer, from: "client" | "server") => {
    const to = from === "client" ? link.server : link.client
    const mode = modeOf(link)
    if (typeof mode === "object") {
      if (from === "client") to.write(chunk)
      else setTimeout(() => to.write(chunk), mode.delayMillis)
    } else if (mode === "freeze") {
      link.held.push(() => forward(link, chunk, from))
    } else if (mode === (from === "client" ? "deafen" : "mute")) {
      link.isTainted = true
    } else if (mode === "refuse") {
      reset(link)
    } else {
      to.write(mode === "quiet" && from === "server" ? withoutNotifications(link, chunk) : chunk)
    }
  }

  const observe = (link: Link, chunk: Buffer) => {
    link.toServer = Buffer.concat([link.toServer, chunk])
    for (let message = nextMessage(link); message !== undefined; message = nextMessage(link)) {
      const statement = statementOf(link, message)
      if (statement !== undefined) link.current = statement
      // Everything up to the Sync is one cycle: now the server has all it needs to execute it.
      if (message.tag !== "S" && message.tag !== "Q") continue
      const cut = cuts.find((one) => !one.done && one.statement.test(link.current))
      link.current = ""
      link.pending = cut?.answer === undefined ? undefined : { cut, answer: "" }
      if (cut !== undefined && cut.answer === undefined) cutNow(link, cut)
    }
  }
  const cutNow = (link: Link, cut: Cut) => {
    cut.done = true
    transcript.push(`cut ${link.kind} after ${cut.statement.source}`)
    link.server.end()
    link.client.resetAndDestroy()
  }
  const answered = (link: Link, chunk: Buffer) => {
    const { pending } = link
    if (pending !== undefined && !pending.cut.done) {
      pending.answer += chunk.toString("latin1")
      if (pending.answer.includes(pending.cut.answer ?? "")) return cutNow(link, pending.cut)
    }
    forward(link, chunk, "server")
  }

  const listener = createServer({ noDelay: true }, (client) => {
    accepted++
    if (rules.findLast((rule) => rule.kind === "")?.mode === "refuse")
      return client.resetAndDestroy()
    const server = connect({ host: target.hostname, port: Number(target.port), noDelay: true })
    const link: Link = {
      client,
      server,
      kind: "",
      mode: undefined,
      isTainted: false,
      held: [],
      prepared: new Map(),
      current: "",
      pending: undefined,
      toServer: Buffer.alloc(0),
      toClient: Buffer.alloc(0),
      isStarted: false
    }
    links.add(link)
    openMax = Math.max(openMax, links.size)
    client.on("data", (chunk: Buffer) => {
      if (!link.isStarted) link.kind = kindOf(chunk)
      const freeze = freezes.find(
        (one) => !one.done && one.statement.test(chunk.toString("latin1"))
      )
      if (freeze !== undefined) {
        freeze.done = true
        link.mode = "freeze"
        transcript.push(`freeze ${link.kind} at ${freeze.statement.source}`)
      }
      forward(link, chunk, "client")
      observe(link, chunk)
    })
    server.on("data", (chunk: Buffer) => answered(link, chunk))
    const onClose = (other: Socket) => () => {
      links.delete(link)
      // Through a black hole not even the end of a connection is seen.
      if (modeOf(link) === "freeze") link.held.push(() => other.destroy())
      else other.end()
    }
    client.on("error", () => {})
    server.on("error", () => {})
    client.on("close", onClose(server))
    server.on("close", onClose(client))
    return
  })
  yield* Effect.acquireRelease(
    Effect.callback<void>((resume) => {
      listener.listen(0, "127.0.0.1", () => resume(Effect.void))
    }),
    () =>
      Effect.sync(() => {
        listener.close()
        for (const link of links) {
          link.client.destroy()
          link.server.destroy()
        }
      })
  )

  const frozen = new Set<Link>()
  const apply = () => {
    for (const link of links) {
      const mode = modeOf(link)
      if (mode === "refuse") reset(link)
      if (mode === "freeze") frozen.add(link)
    }
  }
  const set = (mode: Mode, kind = "") =>
    Effect.sync(() => {
      transcript.push(`${JSON.stringify(mode)} ${kind === "" ? "all" : kind}`)
      rules.push({ mode, kind })
      apply()
    })
  const { port } = listener.address() as AddressInfo
  const through = (direct: string): string => {
    const redirected = new URL(direct)
    redirected.hostname = "127.0.0.1"
    redirected.port = String(port)
    return redirected.href
  }
  return {
    url: through(url),
    through,
    set,
    setOpen: (mode, kind = "") =>
      Effect.sync(() => {
        transcript.push(`${JSON.stringify(mode)} open ${kind === "" ? "all" : kind}`)
        for (const link of links) if (link.kind.includes(kind)) link.mode = mode
        apply()
      }),
    heal: Effect.sync(() => {
      transcript.push("heal")
      rules.length = 0
      for (const link of new Set([...links, ...frozen])) {
        link.mode = undefined
        if (link.isTainted) reset(link)
        for (const go of link.held.splice(0)) go()
      }
      frozen.clear()
    }),
    cutAfter: (statement, answer) => {
      const cut = { statement, answer, done: false }
      cuts.push(cut)
      return () => cut.done
    },
    freezeAt: (statement) => {
      const freeze = { statement, done: false }
      freezes.push(freeze)
      return () => freeze.done
    },
    openMax: () => openMax,
    acceptedCount: () => accepted,
    transcript
  }
})

/** application_name of the start-up message, which comes in one piece. */
const kindOf = (chunk: Buffer): string => {
  const words = chunk.subarray(8).toString("latin1").split("\0")
  return words[words.indexOf("application_name") + 1] ?? ""
}

interface Message {
  readonly tag: string
  readonly body: Buffer
}

const nextMessage = (link: Link): Message | undefined => {
  const bytes = link.toServer
  // Only the first message has no tag.
  const head = link.isStarted ? 1 : 0
  if (bytes.length < head + 4) return undefined
  const end = head + bytes.readUInt32BE(head)
  if (bytes.length < end) return undefined
  const message = {
    tag: head === 0 ? "" : String.fromCharCode(bytes[0] ?? 0),
    body: bytes.subarray(head + 4, end)
  }
  link.isStarted = true
  link.toServer = bytes.subarray(end)
  return message
}

/** What a Query, Parse or Bind message is about. */
const statementOf = (link: Link, { body, tag }: Message): string | undefined => {
  const words = body.toString("latin1").split("\0", 2)
  if (tag === "Q") return words[0]
  if (tag === "P") {
    link.prepared.set(words[0] ?? "", words[1] ?? "")
    return words[1]
  }
  // A Bind names the portal, then the statement.
  return tag === "B" ? link.prepared.get(words[1] ?? "") : undefined
}

const withoutNotifications = (link: Link, chunk: Buffer): Buffer => {
  let bytes = Buffer.concat([link.toClient, chunk])
  const kept: Array<Buffer> = []
  while (bytes.length >= 5 && bytes.length >= 1 + bytes.readUInt32BE(1)) {
    const end = 1 + bytes.readUInt32BE(1)
    if (bytes[0] !== "A".charCodeAt(0)) kept.push(bytes.subarray(0, end))
    bytes = bytes.subarray(end)
  }
  link.toClient = bytes
  return Buffer.concat(kept)
}
