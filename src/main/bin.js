#!/usr/bin/env node
/**
 * The command `tenure`. Plain JavaScript, and nothing imported before the check: an old Node would
 * otherwise answer with a syntax error in some file, and not with what to do.
 */
const needed = [22, 19]
const found = process.versions.node.split(".").map(Number)

if (found[0] < needed[0] || (found[0] === needed[0] && found[1] < needed[1])) {
  console.error(
    `tenure needs Node ${needed.join(".")} or newer, and this is Node ${process.versions.node}: ` +
      "install a newer one, or run `npm ci` in a clone, which brings its own."
  )
  process.exit(78)
}

await import("./cli.ts")
