/**
 * What stands before every endpoint: who asks, how large a body may be, and how anything that goes wrong
 * is told. No error repeats what was sent.
 */
import { ByteSize, Effect, Layer, Redacted, SchemaIssue } from "effect"
import { HttpApiError } from "effect/http-api"
import {
  HttpEffect,
  HttpIncomingMessage,
  HttpServerError,
  type HttpServerRequest,
  HttpServerResponse
} from "effect/http"
import type { unhandled } from "effect/Types"
import { isSqlError, type SqlError } from "effect/sql/SqlError"
import { Abandoned, abandonAfter } from "../database/Deadline.ts"
import { classify, sqlState } from "../database/SqlState.ts"
import type { Executor } from "../executor/Executor.ts"
import {
  Authorization,
  Boundary,
  Forbidden,
  Malformed,
  Principal,
  TooLarge,
  Unauthorized,
  Unavailable
} from "./Api.ts"
import { lostByFence } from "../queue/Verdict.ts"
import { type Group, hashOf, refusalOf } from "./Token.ts"
import { authenticate, type Found } from "./TokenStore.ts"

/** Room for the rest of a request beside its payload. */
const overhead = 16_384

type Sql = Executor["Service"]["pools"]["work"]

/**
 * A statement for a request: answered soon, or 503. What a value is to blame for is a 400. What else the
 * effect fails with is left to the caller.
 */
export const statement =
  (executor: Executor["Service"]) =>
  <A, E = never>(
    run: (sql: Sql) => Effect.Effect<A, SqlError | E>
  ): Effect.Effect<A, Exclude<E, SqlError> | Unavailable | Malformed> =>
    run(executor.pools.work).pipe(
      abandonAfter(executor.settings.abandonAfter),
      Effect.catch(
        (error): Effect.Effect<never, Exclude<E, SqlError> | Unavailable | Malformed> => {
          if (error instanceof Abandoned) return unavailable("the database does not answer")
          return isSqlError(error) ? answerOf(error) : Effect.fail(error as Exclude<E, SqlError>)
        }
      )
    )

const answerOf = (error: SqlError): Effect.Effect<never, Unavailable | Malformed> => {
  const state = sqlState(error) ?? ""
  // A data exception, or a limit of one value.
  if (state.startsWith("22") || state.startsWith("54")) {
    return Effect.fail(new Malformed({ message: "a value cannot be stored as it is" }))
  }
  if (lostByFence(error) !== undefined) {
    return unavailable("this process has lost its lease: ask another one")
  }
  switch (classify(error)) {
    case "reconnect":
    case "timeout":
    case "retryTransaction":
      return unavailable("the database cannot answer at this moment")
    default:
      return Effect.die(error)
  }
}

export const unavailable = (reason: string) => Effect.fail(new Unavailable({ message: reason }))

/** Why a token that was found, or was not, is not good enough. Pure. */
export const rejection = (
  found: Found | undefined,
  group: Group
): Unauthorized | Forbidden | undefined => {
  if (found === undefined) return new Unauthorized({ message: "nobody has made this token" })
  if (found.state !== "usable") {
    return new Unauthorized({ message: `token ${found.id} is ${found.state}` })
  }
  const refusal = refusalOf(found.role, group)
  return refusal === undefined ? undefined : new Forbidden({ message: refusal })
}

export const layerAuthorization = (executor: Executor["Service"]): Layer.Layer<Authorization> =>
  Layer.succeed(Authorization, {
    bearer: (httpEffect, { credential, group }) =>
      Effect.gen(function* () {
        const secret = Redacted.value(credential)
        if (secret === "") {
          yield* challenge
          return yield* new Unauthorized({
            message: "send a token: Authorization: Bearer <secret>"
          })
        }
        const hash = hashOf(secret)
        const found = yield* statement(executor)((sql) => authenticate(sql, hash)).pipe(
          Effect.catchTag("Malformed", Effect.die)
        )
        const rejected = rejection(found, group.identifier as Group)
        if (rejected !== undefined || found === undefined) {
          yield* challenge
          return yield* Effect.fail(rejected ?? new Unauthorized({ message: "" }))
        }
        return yield* Effect.provideService(httpEffect, Principal, found)
      })
  })

/** What RFC 9110 wants beside a 401. */
const challenge: Effect.Effect<void, never, HttpServerRequest.HttpServerRequest> =
  HttpEffect.appendPreResponseHandler((_request, response) =>
    Effect.succeed(
      response.status === 401
        ? HttpServerResponse.setHeader(response, "www-authenticate", "Bearer")
        : response
    )
  )

export const layerBoundary = (bytesMax: number): Layer.Layer<Boundary> =>
  Layer.succeed(Boundary, (httpEffect) =>
    httpEffect.pipe(
      Effect.catch((error: unhandled): Effect.Effect<never, unhandled | Malformed> =>
        HttpApiError.HttpApiSchemaError.is(error) && isOfRequest(error)
          ? Effect.fail(new Malformed({ message: sentenceOf(error) }))
          : Effect.fail(error)
      ),
      Effect.catchDefect((defect): Effect.Effect<never, TooLarge | Malformed> => {
        if (!HttpServerError.isHttpServerError(defect)) return Effect.die(defect)
        if (defect.reason._tag !== "RequestParseError") return Effect.die(defect)
        return defect.reason.reason === "BodyTooLarge"
          ? Effect.fail(tooLarge(bytesMax))
          : Effect.fail(new Malformed({ message: "the body could not be read" }))
      }),
      Effect.provideService(HttpIncomingMessage.MaxBodySize, ByteSize.bytes(bytesMax + overhead))
    )
  )

export const tooLarge = (bytesMax: number) =>
  new TooLarge({
    message: `a payload or result has at most ${bytesMax} bytes here: store it elsewhere and send a reference`,
    bytesMax
  })

const formatIssues = SchemaIssue.makeFormatterStandardSchemaV1()

const isOfRequest = ({ kind }: HttpApiError.HttpApiSchemaError): boolean =>
  kind !== "Body" && kind !== "ResponseHeaders"

/** Names the places and never the values: a value may be a payload. */
const sentenceOf = (error: HttpApiError.HttpApiSchemaError): string => {
  const part = error.kind === "Payload" ? "body" : error.kind.toLowerCase()
  const places = formatIssues(error.cause.issue).issues.flatMap(({ path }) =>
    path === undefined || path.length === 0 ? [] : [path.map(String).join(".")]
  )
  const at = [...new Set(places)].slice(0, 10)
  return `the ${part} is not as /tenure/v1/openapi.json says${at.length === 0 ? "" : ` at ${at.join(", ")}`}`
}
