"""Reads GGUF headers: `parse` their bytes, `header` what they say, and where they contradict themselves."""
