/**
 * A worker of the demo: a process of its own that indexes documents from the queue. `npm start` starts
 * three, kills one and freezes another.
 *
 *   started --read, split--> asks --go--> written, in one fenced transaction --> ended
 *                             ^
 *                             a worker that is frozen here has read, and writes after the thaw
 *
 * When the parent is gone it drains by itself: what it had in hand is written, the rest is handed back.
 */
import { Effect, Layer } from "effect"
import { isSqlError } from "effect/sql/SqlError"
import { layerPostgresConfig } from "../../database/Database.ts"
import { sqlState } from "../../database/SqlState.ts"
import { Executor } from "../../executor/Executor.ts"
import { runMain } from "../runMain.ts"
import { layer } from "../Tenure.ts"
import { application, DocumentQueue, slots, version } from "./DocumentQueue.ts"
import { split, titleOf } from "./Documents.ts"
import { readDocument } from "./Folder.ts"
import { writeDocument } from "./IndexStore.ts"
import type { FromWorker, ToWorker } from "./Messages.ts"

const tell = (message: FromWorker): Effect.Effect<void> =>
  Effect.sync(() => {
    if (process.connected) process.send?.(message)
  })

const permissions = new Map<string, () => void>()
let frozenPeer: number | undefined

process.on("message", (message: ToWorker) => {
  if (message.type === "frozen") frozenPeer = message.pid
  else permissions.get(message.item)?.()
})

const whenAlone = Effect.callback<void>((resume) => {
  const alone = () => {
    for (const permit of permissions.values()) permit()
    resume(Effect.void)
  }
  if (process.connected) process.once("disconnect", alone)
  else alone()
})

const letPeerRunOn = Effect.sync(() => {
  try {
    if (frozenPeer !== undefined) process.kill(frozenPeer, "SIGCONT")
  } catch {
    // It has ended.
  }
})

const permission = (item: string, attempt: number): Effect.Effect<void> =>
  Effect.callback<void>((resume) => {
    permissions.set(item, () => {
      permissions.delete(item)
      resume(Effect.void)
    })
    if (process.connected) process.send?.({ type: "asks", item, attempt } satisfies FromWorker)
    else permissions.get(item)?.()
  })

const Indexing = DocumentQueue.toLayer(
  Effect.fnUntraced(
    function* ({ folder, path }, item) {
      yield* tell({ type: "started", item: item.id, path })
      const executor = yield* Executor
      // Reading again costs nothing and changes nothing, so it is no durable step.
      const document = yield* readDocument(folder, path)
      const chunks = split(document.text)
      // Not to be interrupted: a process that was frozen in the middle of its work does not ask whether
      // its lease still holds. It writes, and the database has to refuse it.
      yield* Effect.uninterruptible(
        Effect.andThen(
          permission(item.id, item.attempt),
          writeDocument({
            item,
            executorId: executor.id,
            folder,
            document,
            title: titleOf(path, chunks),
            chunks
          }).pipe(
            Effect.tapError((error) => {
              const state = isSqlError(error) ? sqlState(error) : undefined
              return state?.startsWith("TN") === true
                ? tell({ type: "refused", item: item.id, sqlState: state })
                : Effect.void
            })
          )
        )
      )
      return { chunks: chunks.length }
    },
    (handled, _, item) =>
      Effect.onExit(handled, (exit) =>
        tell({ type: "ended", item: item.id, indexed: exit._tag === "Success" })
      )
  ),
  { concurrency: { perExecutor: slots } }
)

const Introduced = Layer.effectDiscard(
  Effect.gen(function* () {
    const executor = yield* Executor
    yield* tell({ type: "up", executorId: executor.id })
    yield* Effect.forkScoped(
      whenAlone.pipe(Effect.andThen(letPeerRunOn), Effect.andThen(executor.drain))
    )
  })
)

Layer.mergeAll(Indexing, Introduced).pipe(
  Layer.provide(
    layer({
      application,
      version,
      profile: "short",
      // A slow machine with three workers and a server on it gives one no processor for two seconds now and
      // then, and its watchdog would end it for that; and one that is thawed needs more than a third of a
      // second for the write that is to be refused.
      settings: { leaseValidity: "7 seconds", watchdog: "4500 millis", forcedExit: "2 seconds" },
      // In a database of yours there may be tables that this application never writes.
      unfenced: process.env["TENURE_DEMO_UNFENCED"] === "warn" ? "warn" : "refuse"
    })
  ),
  Layer.provide(layerPostgresConfig()),
  runMain
)
