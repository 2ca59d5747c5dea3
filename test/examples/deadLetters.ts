import { Effect } from "effect"
import { DeadLetter } from "tenure"

// Ours to decide for ten minutes; what is kept, or left over by a crash, is a dead letter again.
export const sift = (queue: DeadLetter.Queue) =>
  DeadLetter.handle(queue, { max: 50, visibility: "10 minutes" }, ({ failures, reason }) =>
    Effect.succeed(reason === "DeclaredError" && failures > 20 ? "discard" : "reinject")
  )

// After a fix, all that died of one cause: in batches, with their ids, under fresh counters.
export const again = (queue: DeadLetter.Queue) =>
  DeadLetter.redrive(queue, { errorContains: "ECONNRESET", newerThan: "2 days" })
