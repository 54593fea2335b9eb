"""The terminal app. Talks to a `Conversation`; never loads llama.cpp itself."""

import os

# Textual reads it once, at import. Half of its default: the cores belong to inference, and text comes at 10 Hz.
os.environ.setdefault("TEXTUAL_FPS", "30")
