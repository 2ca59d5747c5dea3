/**
 * What holds a queue's items back beyond the number that runs: rates, turns between keys, and priorities
 * that age. Pure: a policy becomes the columns that `schema/0010_limits.sql` reads, or is refused in words.
 */
import { Duration, Result } from "effect"

/** So many starts in any window of that length, wherever it begins. */
export interface Rate {
  readonly limit: number
  readonly window: Duration.Input
}

/** For the queue as a whole, for each key, or both. */
export type RateLimit =
  | (Rate & { readonly perKey?: Rate | undefined })
  | {
      readonly limit?: undefined
      readonly window?: undefined
      readonly perKey: Rate
    }

export interface Limits {
  /**
   * Over all processes, by the database's clock. What counts is that an item is claimed: one that is handed
   * back before it has run has used its place, and so does each further attempt. Such a queue claims nothing
   * ahead of its free slots, so that items start when they are counted.
   */
  readonly rateLimit?: RateLimit | undefined
  /**
   * Keys take turns: of each that may run one item starts before the second of any, whatever their priorities
   * and ages, which order the items inside a key. On by default where a key has a limit or a rate; `false`
   * there: the highest priority first, and then the oldest, so that a key with many old items may go before
   * all others for long.
   */
  readonly fair?: boolean | undefined
  /**
   * For each such duration an item gains one step of priority on those that are handed in later: one that is
   * `n` steps lower starts before all that come more than `n` times as long after it. At least a second.
   */
  readonly priorityAging?: Duration.Input | undefined
}

/** Members of the last argument of `tenure.register_queue`. */
export interface Encoded {
  readonly rateLimit?: number
  readonly rateWindowMs?: number
  readonly keyRateLimit?: number
  readonly keyRateWindowMs?: number
  readonly takesTurns?: boolean
  readonly agingMs?: number
}

const limitMax = 1_000_000_000
const longestMillis = 400 * 86_400_000

export const isRated = ({ rateLimit }: Limits): boolean => rateLimit !== undefined

export const encode = (limits: Limits, isPerKey: boolean): Result.Result<Encoded, string> =>
  Result.gen(function* () {
    const { fair, priorityAging, rateLimit } = limits
    const rate = yield* encodeRate("rateLimit", rateLimit)
    const keyRate = yield* encodeRate("rateLimit.perKey", rateLimit?.perKey)
    const aging =
      priorityAging === undefined
        ? undefined
        : yield* bounded("priorityAging", Duration.toMillis(priorityAging), 1000)
    return {
      ...(rate === undefined ? {} : { rateLimit: rate.limit, rateWindowMs: rate.windowMillis }),
      ...(keyRate === undefined
        ? {}
        : { keyRateLimit: keyRate.limit, keyRateWindowMs: keyRate.windowMillis }),
      ...((fair ?? (isPerKey || keyRate !== undefined)) ? { takesTurns: true } : {}),
      ...(aging === undefined ? {} : { agingMs: aging })
    }
  })

const encodeRate = (
  name: string,
  rate: Rate | RateLimit | undefined
): Result.Result<{ readonly limit: number; readonly windowMillis: number } | undefined, string> => {
  if (rate?.limit === undefined) return Result.succeed(undefined)
  const { limit, window } = rate
  if (!Number.isInteger(limit) || limit < 1 || limit > limitMax) {
    return Result.fail(`${name}.limit is an integer between 1 and ${limitMax}, and not ${limit}`)
  }
  return Result.map(bounded(`${name}.window`, Duration.toMillis(window), 100), (windowMillis) => ({
    limit,
    windowMillis
  }))
}

const bounded = (name: string, millis: number, min: number): Result.Result<number, string> =>
  millis >= min && millis <= longestMillis
    ? Result.succeed(millis)
    : Result.fail(`${name} is between ${min} ms and 400 days, and not ${millis} ms`)
