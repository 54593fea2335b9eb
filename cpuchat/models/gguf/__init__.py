"""Reads GGUF headers: `parse` reads the bytes of a `source`, `header` what they say, `checks` finds contradictions."""
