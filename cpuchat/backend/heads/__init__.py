"""A llama-server of cpuchat's own, for models with a draft head: one more engine on this machine."""
