/**
 * Watching: outcomes are pushed to whoever waits for them, through outages.
 *
 *   asked --registered, committed--> waiting --told, or the interval over--> read --settled--> answered
 *                                       ^                                     |
 *                                       +------------------ not yet ----------+
 *
 * The waiter commits its registration and then reads; whoever settles commits and then reads the
 * registrations: one of the two sees the other. What is told twice or not at all costs a read or a
 * poll interval, never an answer. One listening session and one reader for the whole process.
 */
import { Clock, Context, Effect, type Scope, type Stream } from "effect"
import type { SqlClient } from "effect/sql"
import type { SqlError } from "effect/sql/SqlError"
import * as Actor from "../actor/Actor.ts"
import { type Abandoned, abandonAfter } from "../database/Deadline.ts"
import { UnknownId } from "./Errors.ts"
import * as ProgressWatch from "./ProgressWatch.ts"
import {
  forgetWaits,
  isId,
  type OutcomeRow,
  progressOf,
  type ProgressRow,
  readOutcomes,
  registerWaits
} from "./QueueStore.ts"

export class Client extends Context.Service<
  Client,
  {
    /** Completes when the listening session is up for the first time, or when none can be had. */
    readonly ready: Effect.Effect<void>
    readonly outcome: (id: string) => Effect.Effect<OutcomeRow, UnknownId>
    readonly progress: (id: string) => Stream.Stream<ProgressRow, UnknownId>
  }
>()("tenure/Client") {}

export interface Watching {
  readonly actor: Actor.Actor<unknown>
  readonly progressActor: Actor.Actor<unknown>
  readonly outcome: Client["Service"]["outcome"]
  readonly progress: Client["Service"]["progress"]
  /** The item has settled, somebody says. */
  readonly toldUnsafe: (id: string) => void
  /** A notification on the channel. */
  readonly notifiedUnsafe: (payload: string) => void
  /** Told of something, or of nothing for a while: look at all. */
  readonly lookUnsafe: () => void
}

const idsPerStatement = 1000

/** On a connection that has gone silent everybody would wait for ever. */
const unlessSilent = abandonAfter("10 seconds")

type Resume = (answer: Effect.Effect<OutcomeRow, UnknownId>) => void

export const make = Effect.fnUntraced(function* (options: {
  readonly sql: SqlClient.SqlClient
  readonly channel: string
  readonly pollMillis: number
}): Effect.fn.Return<Watching, never, Scope.Scope> {
  const { channel, sql } = options
  const clock = yield* Clock.Clock
  const nowMillis = () => Number(clock.monotonicTimeNanosUnsafe()) / 1e6
  let lookedAtAllMillis = nowMillis()
  const waiting = new Map<string, Set<Resume>>()
  let fresh = new Set<string>()
  let told = new Set<string>()
  let abandoned: Array<string> = []
  let lookAtAll = false

  const answer = (rows: ReadonlyArray<OutcomeRow>, asked: ReadonlyArray<string>) => {
    const known = new Map(rows.map((row) => [row.id, row]))
    let answered = 0
    for (const id of asked) {
      const row = known.get(id)
      if (row !== undefined && !row.settled) continue
      const resumes = waiting.get(id)
      waiting.delete(id)
      for (const resume of resumes ?? []) {
        answered++
        resume(
          row === undefined ? Effect.fail(new UnknownId({ kind: "item", id })) : Effect.succeed(row)
        )
      }
    }
    return answered
  }

  const step: Effect.Effect<Actor.Report, SqlError | Abandoned> = Effect.gen(function* () {
    const forgotten = abandoned.splice(0, idsPerStatement)
    if (forgotten.length > 0) yield* unlessSilent(forgetWaits(sql, forgotten, channel))
    const registering = [...fresh].slice(0, idsPerStatement)
    if (registering.length > 0) yield* unlessSilent(registerWaits(sql, registering, channel))
    for (const id of registering) fresh.delete(id)
    const everybody = lookAtAll ? [...waiting.keys()] : []
    if (lookAtAll) lookedAtAllMillis = nowMillis()
    lookAtAll = false
    const looked = [...new Set([...registering, ...told, ...everybody])].filter((id) =>
      waiting.has(id)
    )
    told = new Set()
    let answered = 0
    for (let at = 0; at < looked.length; at += idsPerStatement) {
      const asked = looked.slice(at, at + idsPerStatement)
      // A failure here must not forget them: the next step looks at all.
      const rows = yield* Effect.tapError(unlessSilent(readOutcomes(sql, asked)), () =>
        Effect.sync(() => {
          lookAtAll = true
        })
      )
      answered += answer(rows, asked)
    }
    return { registered: registering.length, looked: looked.length, answered, left: fresh.size }
  })

  const actor = yield* Actor.make({
    name: "queue_client",
    step: Effect.suspend(() => {
      // Since all were looked at, not since the last step: who is told of others all the time would
      // never come to the one whose executor died between the outcome and the telling.
      if (nowMillis() - lookedAtAllMillis >= options.pollMillis) lookAtAll = true
      return step
    }),
    cadence: (report) => {
      if (report["left"] !== 0) return 0
      return waiting.size === 0 ? "1 hour" : options.pollMillis
    }
  })

  const outcome = (id: string) =>
    Effect.callback<OutcomeRow, UnknownId>((resume) => {
      if (!isId(id)) return resume(Effect.fail(new UnknownId({ kind: "item", id })))
      const resumes = waiting.get(id) ?? new Set()
      resumes.add(resume)
      waiting.set(id, resumes)
      if (resumes.size === 1) {
        fresh.add(id)
        actor.wakeUnsafe()
      }
      return Effect.sync(() => {
        resumes.delete(resume)
        if (resumes.size > 0) return
        waiting.delete(id)
        if (!fresh.delete(id)) {
          abandoned.push(id)
          actor.wakeUnsafe()
        }
      })
    })

  const toldUnsafe = (id: string) => {
    if (!waiting.has(id)) return
    told.add(id)
    actor.wakeUnsafe()
  }

  const progress = yield* ProgressWatch.make({ ...options, settled: outcome })

  return {
    actor,
    progressActor: progress.actor,
    outcome,
    progress: progress.progress,
    toldUnsafe,
    notifiedUnsafe: (payload) => {
      const reported = progressOf(payload)
      if (reported === undefined) toldUnsafe(payload)
      else progress.toldUnsafe(reported)
    },
    lookUnsafe: () => {
      lookAtAll = true
      actor.wakeUnsafe()
      progress.lookUnsafe()
    }
  }
})
