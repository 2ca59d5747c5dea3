throw new Error(`env ${JSON.stringify(process.env)}, execArgv ${JSON.stringify(process.execArgv)}`)
