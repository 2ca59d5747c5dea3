/**
 * Array parameters with their type: inference fails on an array of nulls or of mixed sizes, and costs
 * a pass over the values. A value the type cannot hold is a bug of ours, so it throws.
 */
import { PgTypes } from "@effect/sql-pg"
import { Result } from "effect"

const arrayOf =
  <A>(oid: number) =>
  (values: ReadonlyArray<A>): PgTypes.Parameter =>
    Result.getOrThrow(PgTypes.array(values, oid))

export const uuids = arrayOf<string | null>(PgTypes.OID.uuid)
export const texts = arrayOf<string | null>(PgTypes.OID.text)
export const ints = arrayOf<number | null>(PgTypes.OID.int4)
export const bigints = arrayOf<bigint>(PgTypes.OID.int8)
export const floats = arrayOf<number | null>(PgTypes.OID.float8)
/** Epoch milliseconds. */
export const instants = arrayOf<number | null>(PgTypes.OID.timestamptz)
