/** What holds slots, and what waits for one: the endpoints of the group `capacity`. */
import { HttpApiBuilder } from "effect/http-api"
import type { Executor } from "../executor/Executor.ts"
import { Api } from "./Api.ts"
import { statement } from "./Boundary.ts"
import { listLeases, listQueued, listSessions } from "./CapacityFacts.ts"

const maxDefault = 100

export const layerCapacity = (executor: Executor["Service"]) => {
  const ask = statement(executor)
  return HttpApiBuilder.group(Api, "capacity", (handlers) =>
    handlers.handleAll({
      leases: ({ query: { max = maxDefault } }) => ask((sql) => listLeases(sql, max)),
      sessions: ({ query: { max = maxDefault } }) => ask((sql) => listSessions(sql, max)),
      queue: ({ query: { max = maxDefault } }) => ask((sql) => listQueued(sql, max))
    })
  )
}
