/**
 * What depends on other items: groups that are made, filled by every enqueue, and sealed while their members
 * end; and keys that put items off or drop them.
 */
import { Effect } from "effect"
import * as K from "../kernel/kernel.ts"
import { queues, see, type Worker } from "./Worker.ts"

const groupsMax = 8

export const makeGroup = (worker: Worker) =>
  Effect.gen(function* () {
    const { ledger, random } = worker
    if (ledger.groups.size >= groupsMax) return
    const queue = random.chance(0.8) ? random.pick(queues).queue : null
    const { id } = K.first(
      yield* worker.client.sql<{ id: string }>`SELECT tenure.make_group(${queue})::text AS id`
    )
    ledger.groups.add(id)
  })

export const sealGroup = (worker: Worker) =>
  Effect.gen(function* () {
    const { ledger, random } = worker
    if (ledger.groups.size < groupsMax / 2) return
    const id = random.pick([...ledger.groups])
    yield* worker.client.sql`SELECT tenure.seal_group(${id}::uuid)`
    ledger.groups.delete(id)
    see(ledger, "a group sealed")
  })

/** For each of `count` items a group that takes members, as far as is known, or none. */
export const someGroups = (
  worker: Worker,
  count: number
): ReadonlyArray<string | null> | undefined => {
  const { ledger, random } = worker
  if (ledger.groups.size === 0 || random.chance(0.5)) return undefined
  const groups = [...ledger.groups]
  return Array.from({ length: count }, () => (random.chance(0.3) ? null : random.pick(groups)))
}

export const enqueuePaced = Effect.fnUntraced(function* (worker: Worker, sql: K.Sql) {
  const { random } = worker
  const count = random.chance(0.7) ? 1 : 1 + random.int(6)
  const each = <A>(make: () => A) => Array.from({ length: count }, make)
  const kinds = each(() => random.pick(["debounce", "throttle", null] as const))
  const { ids } = yield* K.enqueueAll(
    sql,
    random.pick(queues).queue,
    each(() => `"item"`),
    {
      paceKinds: kinds,
      paceKeys: kinds.map((kind) => (kind === null ? null : `p${random.int(15)}`)),
      paceMs: kinds.map((kind) => (kind === null ? null : 1 + random.int(400))),
      paceMaxMs: kinds.map((kind) => (kind === "debounce" && random.chance(0.5) ? 600 : null)),
      priorities: each(() => random.int(4)),
      ...(random.chance(0.4)
        ? { deadlinesMs: each(() => (random.chance(0.5) ? null : random.int(3000))) }
        : {})
    }
  )
  return ids
})
