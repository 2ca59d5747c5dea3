import { Effect, Schema } from "effect"
import { WorkQueue } from "tenure"

export class Mails extends WorkQueue.make("mails", {
  payload: { tenant: Schema.String, to: Schema.String },
  key: ({ tenant }) => tenant
}) {}

export const MailsLive = Mails.toLayer(({ to }) => Effect.log(`a mail to ${to}`), {
  concurrency: { perExecutor: 20, global: 100, perKey: 5 },
  rateLimit: { limit: 1000, window: "1 minute", perKey: { limit: 100, window: "1 minute" } },
  priorityAging: "10 minutes"
})

// Items are accepted and wait meanwhile.
export const whilePaused = <A, E, R>(repair: Effect.Effect<A, E, R>) =>
  Effect.acquireUseRelease(
    Mails.pause,
    () => repair,
    () => Mails.resume
  )
