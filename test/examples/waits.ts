import { Effect, Schema } from "effect"
import { Step, Wait, WorkQueue } from "tenure"

class Label extends WorkQueue.make("label", {
  payload: { orderId: Schema.String },
  success: Schema.Struct({ parcel: Schema.String })
}) {}

export const LabelLive = Label.toLayer(({ orderId }) =>
  Effect.succeed({ parcel: `parcel of ${orderId}` })
)

export class Delivery extends WorkQueue.make("delivery", {
  payload: { orderId: Schema.String },
  success: Schema.Literals(["delivered", "lost"])
}) {}

export const DeliveryLive = Delivery.toLayer(
  Effect.fn("delivery")(function* ({ orderId }) {
    const { parcel } = yield* Effect.orDie(Wait.invoke("label", Label, { orderId }))
    yield* Step.run("hand over", Effect.logInfo(`${parcel} is handed over`))
    yield* Wait.sleep("on its way", "50 millis", { inMemory: 0 }) // "2 days", say
    return yield* Wait.event("signed", { success: Schema.String, timeout: "30 days" }).pipe(
      Effect.as("delivered" as const),
      Effect.catchTag("WaitTimedOut", () => Effect.succeed("lost" as const))
    )
  })
)

// From anywhere, before the handler waits or after. In SQL: tenure.signal(id, 'signed', '"Ada"').
export const signed = (id: WorkQueue.ItemId, by: string) =>
  Wait.send(id, "signed", by, { success: Schema.String })
