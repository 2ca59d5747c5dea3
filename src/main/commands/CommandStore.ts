/** The SQL of the commands that no part of the runtime has. */
import { Effect } from "effect"
import type { SqlClient } from "effect/sql"

/** Grants the roles that are there what they need, and names the ones that are not. */
export const grantRoles = (sql: SqlClient.SqlClient) =>
  Effect.map(
    sql<{ readonly missing: ReadonlyArray<string> }>`SELECT tenure.grant_roles() AS missing`,
    ([row]) => row?.missing ?? []
  )

export interface RoleFacts {
  readonly role: string
  /** As SQL has it. */
  readonly quoted: string
  readonly isSuperuser: boolean
  readonly ownsSchema: boolean
  readonly isWorker: boolean
  readonly hasWorkerRole: boolean
  readonly hasApiRole: boolean
  readonly mayRegister: boolean
}

/** Of the role of this session, and the roles that a deployment wants. */
export const roleFacts = (sql: SqlClient.SqlClient) =>
  Effect.map(
    sql<RoleFacts>`
      SELECT session_user::text AS "role", quote_ident(session_user) AS "quoted",
             me.rolsuper AS "isSuperuser",
             coalesce(pg_has_role(me.oid, n.nspowner, 'MEMBER'), false) AS "ownsSchema",
             coalesce(pg_has_role(me.oid, worker.oid, 'MEMBER'), false) AS "isWorker",
             worker.oid IS NOT NULL AS "hasWorkerRole",
             api.oid IS NOT NULL AS "hasApiRole",
             coalesce(has_function_privilege(
               to_regprocedure('tenure.renew_lease(uuid, interval)')::oid, 'EXECUTE'), false) AS "mayRegister"
        FROM pg_roles me
        LEFT JOIN pg_namespace n ON n.nspname = 'tenure'
        LEFT JOIN pg_roles worker ON worker.rolname = 'tenure_worker'
        LEFT JOIN pg_roles api ON api.rolname = 'tenure_api'
       WHERE me.rolname = session_user`,
    ([row]) => row
  )
