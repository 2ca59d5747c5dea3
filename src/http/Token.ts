/**
 * Bearer tokens: what a secret looks like, and what its role may do. Pure but for the randomness.
 *
 * A secret is shown once, where it is made. Everything else knows its hash: see schema/0014_token.sql
 * for why that is enough. It says its role, so that people and secret scanners know what they look at;
 * what it may do is decided by the database's row alone.
 */
import { createHash, randomBytes } from "node:crypto"

export const roles = ["worker", "organisation", "platform"] as const
export type Role = (typeof roles)[number]

export const mintSecret = (role: Role): string =>
  `tenure_${role}_${randomBytes(32).toString("base64url")}`

/** Hexadecimal. */
export const hashOf = (secret: string): string => createHash("sha256").update(secret).digest("hex")

/** What the API offers, by who may use it. The names are those of its groups. */
const admitted = {
  sessions: ["worker"],
  items: ["organisation", "platform"],
  capacity: ["platform"]
} as const satisfies Readonly<Record<string, ReadonlyArray<Role>>>

export type Group = keyof typeof admitted

/** Why a role may not use a group, or `undefined` when it may. */
export const refusalOf = (role: Role, group: Group): string | undefined => {
  const wanted: ReadonlyArray<Role> = admitted[group]
  if (wanted.includes(role)) return undefined
  const [first] = admitted[group]
  return (
    `${first} credentials required here: this token's role is ${role}; ` +
    `\`tenure token create --role ${first}\` makes one`
  )
}
