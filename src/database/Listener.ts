/**
 * One session that listens, for everything a process wants to be told.
 *
 *   connecting --LISTEN confirmed--> up --connection lost, or silent when asked--> connecting
 *
 * A notification is a hint: it says "look now", and whoever is told looks in the tables. Hints that
 * were sent while nobody listened are lost, so `onUp` has to look at everything once.
 *
 * A half-open socket reports nothing, and something in between may swallow notifications: therefore a
 * session that has been quiet sends one itself, on a channel that all listeners of the database
 * share, so that the one that asks first proves all of them (with a channel for each, a thousand idle
 * listeners would be woken a hundred thousand times a second). A session that does not answer is
 * replaced; one that answers and is not told stays, and whoever relies on hints is told that.
 */
import { PgConnection } from "@effect/sql-pg"
import { Cause, Clock, Effect, Exit, Latch, Option, Queue, Random, Scope } from "effect"
import type { SqlError } from "effect/sql/SqlError"
import { abandonAfter } from "./Deadline.ts"

export interface Options {
  readonly connection: PgConnection.Config
  readonly channels: ReadonlyArray<string>
  readonly onNotification: (channel: string, payload: string) => Effect.Effect<void>
  readonly onUp: Effect.Effect<void>
  readonly onDown: Effect.Effect<void>
  /** Runs for as long as the session does, and may use it. */
  readonly beside?: ((session: PgConnection.PgConnection) => Effect.Effect<never>) | undefined
  /** Whether notifications get through, whenever it changes; at first they do not. */
  readonly onHeard: (hears: boolean) => Effect.Effect<void>
  /** Quiet for once or twice that long, the session must answer, and be told, within `answerWithin`. */
  readonly quietMillis: number
  readonly answerWithin: number
}

const echoChannel = "tenure_echo"

const closeWithin = "500 millis"

/** Never ends by itself: a lost session is replaced, soon the first time, then with jitter. */
export const run = (options: Options): Effect.Effect<never> =>
  Effect.gen(function* () {
    let failures = 0
    const onUp = Effect.andThen(
      Effect.sync(() => {
        failures = 0
      }),
      options.onUp
    )
    while (true) {
      const scope = yield* Scope.make()
      const exit = yield* session({ ...options, onUp }).pipe(
        Scope.provide(scope),
        Effect.exit,
        Effect.onExit((exited) =>
          // The driver takes five seconds to close a connection that has gone silent, and nobody listens
          // meanwhile.
          Effect.ignore(abandonAfter(Scope.close(scope, exited), closeWithin))
        )
      )
      if (Exit.hasDies(exit)) return yield* Effect.die(exit)
      const reason = Exit.isFailure(exit) ? Cause.pretty(exit.cause).split("\n")[0] : "it ended"
      yield* Effect.logWarning(
        "the listening session was lost; until it is back, polling finds the work"
      ).pipe(Effect.annotateLogs({ reason, failures }))
      const pauseMillis = (yield* Random.next) * Math.min(2000, 50 * 2 ** failures++)
      yield* Effect.sleep(pauseMillis)
    }
  })

const session = Effect.fnUntraced(function* (options: Options) {
  const clock = yield* Clock.Clock
  const nowMillis = () => Number(clock.monotonicTimeNanosUnsafe()) / 1e6
  // A socket that goes half-open in the middle of this would otherwise hold it up for ever.
  const { connection, queues } = yield* listening(options).pipe(abandonAfter(options.answerWithin))
  yield* options.onUp
  let heardMillis = Number.NEGATIVE_INFINITY
  const told = Latch.makeUnsafe()
  const serve = Effect.fnUntraced(function* (
    queue: Queue.Dequeue<PgConnection.Notification, SqlError>
  ) {
    while (true) {
      const { channel, payload } = yield* Queue.take(queue)
      heardMillis = nowMillis()
      told.openUnsafe()
      if (channel !== echoChannel) yield* options.onNotification(channel, payload)
    }
  })
  const prove = Effect.gen(function* () {
    let hears: boolean | undefined
    while (true) {
      told.closeUnsafe()
      yield* connection
        .query(`SELECT pg_notify('${echoChannel}', '')`)
        .pipe(abandonAfter(options.answerWithin))
      const answer = yield* Effect.timeoutOption(told.await, options.answerWithin)
      if (Option.isSome(answer) !== hears) {
        if (hears === false) yield* Effect.logInfo("notifications get through again")
        hears = Option.isSome(answer)
        if (!hears)
          yield* Effect.logWarning("notifications do not get through; polling finds the work")
        yield* options.onHeard(hears)
      }
      const quietMillis = options.quietMillis * (1 + (yield* Random.next))
      let restMillis = quietMillis
      while (restMillis > 0) {
        yield* Effect.sleep(restMillis)
        restMillis = heardMillis + quietMillis - nowMillis()
      }
    }
  })
  return yield* Effect.all([prove, ...queues.map(serve)], {
    concurrency: "unbounded",
    discard: true
  }).pipe(
    Effect.ensuring(Effect.andThen(options.onHeard(false), options.onDown)),
    Effect.raceFirst(options.beside?.(connection) ?? Effect.never)
  )
})

const listening = Effect.fnUntraced(function* ({ channels, connection: config }: Options) {
  const connection = yield* Effect.flatMap(PgConnection.make(config), (made) => made.pin)
  const queues = yield* Effect.forEach([...channels, echoChannel], (channel) =>
    connection.listen(channel)
  )
  return { connection, queues }
})
