/**
 * The queue of documents, as both sides see it: the one that hands files in and the workers. An item
 * carries the way to the file, never its text.
 */
import { Schema } from "effect"
import { createHash } from "node:crypto"
import * as WorkQueue from "../../queue/WorkQueue.ts"
import { NotIndexed } from "./Documents.ts"

export const application = "tenure-demo"
export const version = "demo-v1"

/** Items that one worker runs at once. */
export const slots = 2

/** A file with the same fingerprint is the same item; `round` rises when it is to be indexed anew. */
export class DocumentQueue extends WorkQueue.make("demo.document", {
  payload: {
    folder: Schema.String,
    path: Schema.String,
    fingerprint: Schema.String,
    round: Schema.Int
  },
  success: Schema.Struct({ chunks: Schema.Int }),
  error: NotIndexed,
  // Hashed: a path alone may be longer than an indexed key.
  idempotencyKey: ({ fingerprint, folder, path, round }) =>
    createHash("sha256")
      .update(JSON.stringify([folder, path, fingerprint, round]))
      .digest("hex")
}) {}
