/**
 * Goal: the judge of facts always has an answer, says each reason once, and writes statements that mean
 * what they say whatever the names in them.
 * Method: generated facts and names; a table of the reasons why work waits.
 */
import { assert, describe, it } from "@effect/vitest"
import { Effect, Schema } from "effect"
import { type Facts, judge, type Limits } from "../../src/main/commands/Diagnosis.ts"
import { whyWaiting, type WorkFacts } from "../../src/main/commands/DiagnosisOfWork.ts"
import type { Claims, Head, LiveGroup } from "../../src/main/commands/DoctorStore.ts"
import { formatFinding, ident, literal } from "../../src/main/commands/Finding.ts"
import { resolve, type Resolved } from "../../src/executor/Settings.ts"
import { connect, freshDatabase } from "../support/Postgres.ts"

const limits: Limits = {
  settings: resolve() as Resolved,
  unrevoked: 30_000,
  snapshot: 60_000,
  waiting: 136_000,
  overdue: 60_000,
  clockDifference: 1000,
  again: 6000
}

const head: Head = {
  queue: "mail",
  application: "shop",
  version: null,
  suspect: false,
  item: "i",
  ageMillis: 600_000,
  globalLimit: null,
  perKeyLimit: null,
  pausedMillis: null,
  rateLimit: null,
  rateWindowMillis: null,
  rateUsed: false,
  keyRateLimit: null,
  keyRateWindowMillis: null,
  keyRateUsed: false,
  key: null,
  keyRunning: 0
}
const live: LiveGroup = { application: "shop", version: "v1", count: 2, validityMillis: 75_000 }
const claims: Claims = {
  queue: "mail",
  queueApplication: "shop",
  owner: "o",
  state: "live",
  application: "shop",
  version: "v1",
  laneVersion: null,
  count: 3,
  oldestMillis: 5000
}

describe("why work waits", () => {
  type World = Pick<WorkFacts, "claims" | "live" | "unmoved">
  const world: World = { claims: [], live: [live], unmoved: ["i"] }
  const suspect = { suspect: true, version: "v1" }
  // Each line is true of more than one reason; the first in this order is the one that helps.
  const table: ReadonlyArray<
    readonly [expected: string | undefined, head: Partial<Head>, world: Partial<World>]
  > = [
    ["waiting.unknownQueue", { application: null, version: "v0" }, { live: [] }],
    ["waiting.nobody", { version: "v0", globalLimit: 1 }, { live: [], claims: [claims] }],
    ["waiting.nobody", {}, { live: [{ ...live, application: "other" }] }],
    ["waiting.version", { version: "v0", globalLimit: 1 }, { claims: [claims] }],
    ["waiting.version", { version: "v0", pausedMillis: 1 }, {}],
    ["waiting.paused", { pausedMillis: 1, rateUsed: true, globalLimit: 1 }, { claims: [claims] }],
    ["waiting.rate", { rateUsed: true, globalLimit: 1 }, { claims: [claims] }],
    ["waiting.keyRate", { keyRateUsed: true, key: "a" }, { claims: [claims], unmoved: [] }],
    [
      "waiting.globalLimit",
      { globalLimit: 3, perKeyLimit: 1, key: "a", keyRunning: 1 },
      { claims: [claims] }
    ],
    // Whatever runs counts, whoever holds it.
    ["waiting.globalLimit", { globalLimit: 3 }, { claims: [{ ...claims, state: "expired" }] }],
    [
      "waiting.keyLimit",
      { globalLimit: 4, perKeyLimit: 1, key: "a", keyRunning: 1 },
      { claims: [claims] }
    ],
    ["waiting.suspect", suspect, { claims: [claims] }],
    ["waiting.busy", {}, { claims: [claims] }],
    ["waiting.unclaimed", {}, {}],
    ["waiting.unclaimed", { perKeyLimit: 1, key: null }, {}],
    ["waiting.unclaimed", {}, { claims: [{ ...claims, queue: "other" }] }],
    ["waiting.unclaimed", {}, { claims: [{ ...claims, state: "unknown" }] }],
    // It is gone from its place: somebody claims.
    [undefined, {}, { unmoved: [] }],
    [undefined, suspect, { unmoved: [] }],
    [undefined, {}, { unmoved: ["another"], claims: [claims] }]
  ]
  for (const [index, [expected, ofHead, ofWorld]] of table.entries()) {
    it(`${index + 1}: ${expected ?? "its turn has only come"}`, () => {
      assert.strictEqual(
        whyWaiting({ ...head, ...ofHead }, { ...world, ...ofWorld })?.code,
        expected
      )
    })
  }
})

const Name = Schema.String.check(Schema.isMinLength(1), Schema.isMaxLength(20))
const Millis = Schema.Int.check(Schema.isBetween({ minimum: -1e10, maximum: 1e10 }))
const Count = Schema.Int.check(Schema.isBetween({ minimum: 0, maximum: 1000 }))

const Generated = Schema.Struct({
  name: Name,
  other: Name,
  millis: Millis,
  more: Millis,
  count: Count,
  flag: Schema.Boolean,
  limit: Schema.NullOr(Count),
  state: Schema.Literals(["live", "expired", "revoking", "revoked", "released", "unknown"]),
  source: Schema.Literals(["database", "user", "database user", "global", "configuration file"])
})

const factsOf = (one: typeof Generated.Type): Facts => ({
  limits,
  way: {
    refused: one.flag ? undefined : one.name,
    keepsIdentity: one.flag,
    sharesSessions: !one.flag,
    checkMillis: one.count,
    transactionMillis: one.count
  },
  server: {
    version: 140_000 + one.count * 40,
    isInRecovery: one.flag,
    isReadOnly: one.flag,
    preparedTransactionsMax: one.count,
    executorId: null,
    backendPid: 1,
    mayClaim: one.flag
  },
  settings: {
    serverVersion: "18",
    database: one.name,
    fsync: one.flag ? "on" : "off",
    synchronousCommit: one.flag ? "on" : "off",
    autovacuum: one.flag ? "on" : "off",
    trackCounts: "on",
    connectionsMax: one.count,
    connectionsReserved: 3,
    connectionsUsed: one.count,
    roleConnectionsMax: one.limit,
    databaseConnectionsMax: one.limit
  },
  role: undefined,
  defaults: [
    { name: "default_transaction_read_only", value: one.flag ? "on" : "off", source: one.source },
    { name: "synchronous_commit", value: "off", source: one.source }
  ],
  prepared: [{ gid: one.name, owner: one.other, prepared_at: new Date(0) }],
  slots: [{ name: one.name, active: one.flag, transactions: one.count }],
  schema: undefined,
  tenure: {
    unfenced: [one.name],
    wrongGrants: [{ object: "TABLE t", grantee: one.name, privileges: ["UPDATE"] }],
    missingGrants: one.flag ? [] : [one.name],
    unvacuumed: [],
    snapshots: [
      {
        pid: one.count,
        role: one.name,
        application: one.other,
        state: "idle",
        ageMillis: one.millis
      }
    ],
    hiddenSessions: one.count,
    foreignWorkers: [],
    live: one.flag
      ? [{ ...live, application: one.name, version: one.other, count: one.count }]
      : [],
    doubtful: [
      {
        id: one.name,
        application: one.name,
        version: one.other,
        state: one.flag ? "active" : "revoking",
        silentMillis: one.millis,
        validityMillis: 75_000,
        expiredMillis: one.more,
        claimed: one.count,
        blockers: one.flag ? [] : [one.count]
      }
    ],
    claims: [
      { ...claims, state: one.state, count: one.count, application: one.flag ? one.name : null }
    ],
    heads: [{ ...head, globalLimit: one.limit, perKeyLimit: one.limit, key: one.name }],
    unmoved: one.flag ? ["i"] : [],
    overdue: {
      timers: one.flag ? one.millis : null,
      deadlines: one.more,
      waits: one.more,
      wakes: one.flag ? null : one.millis
    },
    lateLeases: [{ application: one.name, lateMillis: one.millis, count: one.count }],
    lateSchedules: [
      { name: one.name, application: one.other, lateMillis: one.millis, hasRunner: one.flag }
    ],
    roomMillis: one.millis,
    quarantined: [{ queue: one.name, count: one.count, oldestMillis: one.more }],
    clock: { epochMillis: one.millis, isServers: one.flag },
    aheadMillis: one.millis,
    uncertainMillis: Math.abs(one.more)
  }
})

describe("the judge", () => {
  it.effect.prop(
    "answers whatever the facts are; what is no trouble asks for nothing, and what is says what to do",
    [Generated],
    ([one]) =>
      Effect.sync(() => {
        const findings = judge(factsOf(one))
        assert.isNotEmpty(findings)
        for (const finding of findings) {
          assert.match(finding.code, /^[a-z]+(\.[a-zA-Z]+)?$/)
          assert.notMatch(finding.text, /undefined|NaN|null/)
          const mends = finding.sql !== undefined || finding.action !== undefined
          if (finding.level === "ok") assert.isFalse(mends)
          else if (!["server.version", "server.readOnly", "server.silent"].includes(finding.code)) {
            assert.isTrue(mends, finding.code)
          }
          assert.isTrue(formatFinding(finding).startsWith(finding.level.padEnd(7)))
        }
      })
  )

  it("takes a snapshot for a trouble, and a very old one for a problem", () => {
    const one = { pid: 1, role: "r", application: "a", state: "active" }
    for (const [ageMillis, level] of [
      [60_001, "warning"],
      [600_001, "problem"]
    ] as const) {
      const facts = factsOf({
        name: "n",
        other: "o",
        millis: 0,
        more: 0,
        count: 1,
        flag: true,
        limit: null,
        state: "live",
        source: "user"
      })
      const tenure = { ...facts.tenure, snapshots: [{ ...one, ageMillis }] } as Facts["tenure"]
      const found = judge({ ...facts, tenure }).find(({ code }) => code === "horizon.snapshot")
      assert.strictEqual(found?.level, level)
    }
  })

  it.live("quotes names so that the server reads them back as they were", () =>
    Effect.gen(function* () {
      const sql = yield* connect((yield* freshDatabase).worker)
      for (const conforming of ["on", "off"]) {
        yield* sql.withTransaction(
          Effect.gen(function* () {
            // Parsed each time: a prepared statement has its constants already.
            yield* sql.unsafe(`SET LOCAL standard_conforming_strings = ${conforming}`)
            for (const name of [
              "plain",
              "it's",
              "back\\slash",
              "'; DROP TABLE x; --",
              "\\'",
              'say "so"',
              "select"
            ]) {
              const rows = yield* sql.unsafe(`SELECT ${literal(name)} AS ${ident(name)}`).unprepared
              assert.deepStrictEqual(rows, [{ [name]: name }])
            }
          })
        )
      }
    })
  )
})
