/** What a test knows to be there, and the compiler does not. */
export const present = <A>(value: A | undefined): A => {
  if (value === undefined) throw new Error("what the test relies on is not there")
  return value
}
