"""The transcript: streamed Markdown as cached lines in one virtual scroll view."""
