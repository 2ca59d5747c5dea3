/** 64 callers, each of which makes its next call when its last one was answered. */
export const inParallel = async (count, call) => {
  let next = 0
  const caller = async () => {
    while (next < count) await call(next++)
  }
  await Promise.all(Array.from({ length: 64 }, caller))
}
