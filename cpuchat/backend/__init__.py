"""Where answers come from: a local worker process, or a server."""
