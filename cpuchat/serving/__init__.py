"""The local engine for other programs, over an OpenAI-compatible HTTP interface."""
