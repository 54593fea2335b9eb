"""Settings with their sources, presets and the servers that a user knows."""
