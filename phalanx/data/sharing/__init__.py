"""One loader process per host: `messages`, `slots`, `rings`, then `server`, `process` for it and `client` for ranks."""
