throw new Error("this thread does not start")
