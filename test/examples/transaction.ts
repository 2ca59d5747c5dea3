import { Effect, Schema } from "effect"
import { SqlClient } from "effect/sql"
import { WorkQueue } from "tenure"

class NotEnough extends Schema.TaggedError<NotEnough>()("NotEnough", {}) {}

export class Receipt extends WorkQueue.make("receipt", { payload: { of: Schema.String } }) {}

export class Transfer extends WorkQueue.make("transfer", {
  payload: { from: Schema.String, to: Schema.String, cents: Schema.Int },
  error: NotEnough
}) {}

export const TransferLive = Transfer.toLayer(
  Effect.fn("transfer")(function* ({ cents, from, to }) {
    const sql = yield* SqlClient.SqlClient
    yield* sql`UPDATE account SET cents = cents + ${cents} WHERE name = ${to}`
    const paid = yield* sql`
      UPDATE account SET cents = cents - ${cents}
       WHERE name = ${from} AND cents >= ${cents} RETURNING name`
    if (paid.length === 0) return yield* new NotEnough()
    yield* Effect.orDie(Receipt.enqueue({ of: from }))
  }),
  { transaction: true }
)
