/** Child processes of a benchmark, seen from the parent. Every one of them ends with its scope. */
import { Deferred, Effect, type Scope } from "effect"
import { type ChildProcess, fork } from "node:child_process"
import { fileURLToPath } from "node:url"
import type { Message, Order, Role } from "./child.ts"

export interface Child {
  /** The first message of this kind, now or later. Dies with the process. */
  readonly message: <Tag extends Message["_tag"]>(
    tag: Tag
  ) => Effect.Effect<Extract<Message, { readonly _tag: Tag }>>
  readonly order: (order: Order["_tag"]) => void
  readonly signal: (signal: NodeJS.Signals) => void
  readonly exited: Effect.Effect<void>
}

export const start = Effect.fnUntraced(function* (options: {
  /** Relative to this file. */
  readonly module: string
  readonly role: string
  readonly url: string
  readonly items: number
  readonly warmUp?: number | undefined
  readonly settings?: Role["settings"] | undefined
  /** What it logs is not wanted. */
  readonly quiet?: boolean | undefined
  readonly onMessage?: ((message: Message) => void) | undefined
}): Effect.fn.Return<Child, never, Scope.Scope> {
  const exited = yield* Deferred.make<void>()
  const mailboxes = new Map<string, Deferred.Deferred<Message>>()
  const mailbox = (tag: Message["_tag"]) => {
    const known = mailboxes.get(tag)
    if (known !== undefined) return known
    const made = Deferred.makeUnsafe<Message>()
    mailboxes.set(tag, made)
    return made
  }
  const child = yield* Effect.acquireRelease(
    Effect.sync((): ChildProcess => {
      const forked = fork(
        fileURLToPath(new URL(options.module, import.meta.url)),
        [
          options.role,
          options.url,
          String(options.items),
          String(options.warmUp ?? 0),
          JSON.stringify(options.settings ?? {})
        ],
        // Nothing of it may stand among the results.
        { stdio: ["ignore", options.quiet === true ? "ignore" : process.stderr, "inherit", "ipc"] }
      )
      forked.on("message", (message: Message) => {
        Deferred.doneUnsafe(mailbox(message._tag), Effect.succeed(message))
        options.onMessage?.(message)
      })
      forked.on("exit", () => Deferred.doneUnsafe(exited, Effect.void))
      return forked
    }),
    (forked) =>
      Effect.andThen(
        Effect.sync(() => forked.kill("SIGKILL")),
        Deferred.await(exited)
      )
  )
  const died = Effect.andThen(
    Deferred.await(exited),
    Effect.suspend(() => Effect.die(new Error(`${options.module} ${options.role} has ended`)))
  )
  return {
    message: <Tag extends Message["_tag"]>(tag: Tag) =>
      Effect.raceFirst(Deferred.await(mailbox(tag)), died) as Effect.Effect<
        Extract<Message, { readonly _tag: Tag }>
      >,
    order: (tag) => void child.send({ _tag: tag } satisfies Order),
    signal: (signal) => void child.kill(signal),
    exited: Deferred.await(exited)
  }
})
