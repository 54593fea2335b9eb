"""Where answers come from: a local worker process."""
