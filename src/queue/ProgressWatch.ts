/**
 * Watching progress, as `Client` watches outcomes: registered, told, read; looked at all the same once in
 * each poll interval, so that a lost notification costs that and no report.
 *
 *   asked --registered, committed--> read --> waiting --told, or the interval over--> registered again
 *                                     |
 *                            item settled --> read for the last time --> ended
 *
 * A registration is used up by one notification: a watcher that is slow, or gone, is not told again.
 * Whoever watches gets the latest report and none of those it has not had the time for.
 */
import { type Cause, Clock, Effect, Queue, type Scope, Stream } from "effect"
import type { SqlClient } from "effect/sql"
import type { SqlError } from "effect/sql/SqlError"
import * as Actor from "../actor/Actor.ts"
import { type Abandoned, abandonAfter } from "../database/Deadline.ts"
import { UnknownId } from "./Errors.ts"
import {
  forgetProgress,
  isId,
  type ProgressRow,
  readProgress,
  watchProgress
} from "./QueueStore.ts"

export interface ProgressWatch {
  readonly actor: Actor.Actor<unknown>
  readonly progress: (id: string) => Stream.Stream<ProgressRow, UnknownId>
  /** The item has a new report, somebody says. */
  readonly toldUnsafe: (id: string) => void
  readonly lookUnsafe: () => void
}

const idsPerStatement = 1000

/** On a connection that has gone silent everybody would wait for ever. */
const unlessSilent = abandonAfter("10 seconds")

type Reports = Queue.Queue<ProgressRow, UnknownId | Cause.Done>

/** Those who watch one item. */
interface Watched {
  readonly reports: Set<Reports>
  last: ProgressRow | undefined
  /** Called after a read that began behind them. */
  readonly looks: Set<() => void>
}

export const make = Effect.fnUntraced(function* (options: {
  readonly sql: SqlClient.SqlClient
  readonly channel: string
  readonly pollMillis: number
  /** Ends when the item has settled. */
  readonly settled: (id: string) => Effect.Effect<unknown, UnknownId>
}): Effect.fn.Return<ProgressWatch, never, Scope.Scope> {
  const { channel, sql } = options
  const clock = yield* Clock.Clock
  const nowMillis = () => Number(clock.monotonicTimeNanosUnsafe()) / 1e6
  let lookedAtAllMillis = nowMillis()
  const watched = new Map<string, Watched>()
  let told = new Set<string>()
  let left: Array<string> = []
  let lookAtAll = false

  const look = Effect.fnUntraced(function* (ids: ReadonlyArray<string>) {
    const looks = ids.flatMap((id) => [...(watched.get(id)?.looks ?? [])])
    yield* unlessSilent(watchProgress(sql, ids, channel))
    const known = ids.map((id) => {
      const last = watched.get(id)?.last
      return { id, attempt: last?.attempt ?? 0, number: last?.number ?? 0 }
    })
    const rows = yield* unlessSilent(readProgress(sql, known))
    for (const row of rows) {
      const one = watched.get(row.id)
      if (one === undefined) continue
      one.last = row
      for (const reports of one.reports) Queue.offerUnsafe(reports, row)
    }
    for (const looked of looks) looked()
    return rows.length
  })

  const step: Effect.Effect<Actor.Report, SqlError | Abandoned> = Effect.gen(function* () {
    // Since all were looked at, not since the last step, which may be about others all the time.
    if (nowMillis() - lookedAtAllMillis >= options.pollMillis) lookAtAll = true
    const gone = left.splice(0, idsPerStatement).filter((id) => !watched.has(id))
    if (gone.length > 0) yield* unlessSilent(forgetProgress(sql, gone, channel))
    const asked = [...(lookAtAll ? watched.keys() : told)].filter((id) => watched.has(id))
    if (lookAtAll) lookedAtAllMillis = nowMillis()
    lookAtAll = false
    told = new Set()
    let found = 0
    for (let at = 0; at < asked.length; at += idsPerStatement) {
      // A failure here must not forget them: the next step looks at all.
      found += yield* Effect.tapError(look(asked.slice(at, at + idsPerStatement)), () =>
        Effect.sync(() => {
          lookAtAll = true
        })
      )
    }
    return { looked: asked.length, found, left: left.length }
  })

  const actor = yield* Actor.make({
    name: "queue_progress",
    step,
    cadence: (report) => {
      if (report["left"] !== 0) return 0
      return watched.size === 0 ? "1 hour" : options.pollMillis
    }
  })

  const toldUnsafe = (id: string) => {
    if (!watched.has(id)) return
    told.add(id)
    actor.wakeUnsafe()
  }

  const join = (id: string, reports: Reports) =>
    Effect.acquireRelease(
      Effect.sync(() => {
        const one = watched.get(id) ?? { reports: new Set(), last: undefined, looks: new Set() }
        watched.set(id, one)
        one.reports.add(reports)
        // Who comes second must not wait for the next report to see the last one.
        if (one.last !== undefined) Queue.offerUnsafe(reports, one.last)
        toldUnsafe(id)
        return one
      }),
      (one) =>
        Effect.sync(() => {
          one.reports.delete(reports)
          if (one.reports.size > 0) return
          watched.delete(id)
          left.push(id)
          actor.wakeUnsafe()
        })
    )

  const lookOnce = (id: string, one: Watched) =>
    Effect.callback<void>((resume) => {
      const looked = () => {
        one.looks.delete(looked)
        resume(Effect.void)
      }
      one.looks.add(looked)
      toldUnsafe(id)
      return Effect.sync(() => one.looks.delete(looked))
    })

  return {
    actor,
    progress: (id) =>
      Stream.callback<ProgressRow, UnknownId>(
        (reports) =>
          Effect.gen(function* () {
            if (!isId(id)) return yield* new UnknownId({ kind: "item", id })
            const one = yield* join(id, reports)
            yield* options.settled(id)
            // The last report was written before the outcome.
            yield* lookOnce(id, one)
            Queue.endUnsafe(reports)
          }),
        { bufferSize: 1, strategy: "sliding" }
      ),
    toldUnsafe,
    lookUnsafe: () => {
      lookAtAll = true
      actor.wakeUnsafe()
    }
  }
})
