/**
 * What `npm start` and its workers tell each other. For the show alone: no work depends on it, and a
 * worker without a listener goes on by itself.
 */
export type FromWorker =
  | { readonly type: "up"; readonly executorId: string }
  | { readonly type: "started"; readonly item: string; readonly path: string }
  /** Read and split, and not yet written: waits for `go`. */
  | { readonly type: "asks"; readonly item: string; readonly attempt: number }
  | { readonly type: "ended"; readonly item: string; readonly indexed: boolean }
  /** The database refused the write, with a state of the class TN. */
  | { readonly type: "refused"; readonly item: string; readonly sqlState: string }

export type ToWorker =
  | { readonly type: "go"; readonly item: string }
  /** A peer is stopped: should the parent die, somebody has to let it run on. */
  | { readonly type: "frozen"; readonly pid: number }
