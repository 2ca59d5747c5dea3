// What programs that talk to a process over HTTP need, and nothing of the server.
export * as Api from "./Api.ts"
