"""All lines of a message, in one go."""

from __future__ import annotations

from cpuchat.tui.markdown.message_view import Line, Rendering, TranscriptMessage, View


def message_lines(message: TranscriptMessage, view: View) -> list[Line]:
    """Render all lines of a complete, `cleaned` message, with the blank one after it."""
    rendering = Rendering(message, view)
    while not rendering.step():
        pass
    return rendering.lines
