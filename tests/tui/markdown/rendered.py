"""All lines of a message in one go, and rows of text that arrives in parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cpuchat.tui.markdown.message_view import Line, Rendering, TranscriptMessage, View
from cpuchat.tui.markdown.rows import LineStream, TextRow
from cpuchat.tui.markdown.streaming import Stream


def message_lines(message: TranscriptMessage, view: View) -> list[Line]:
    """Render all lines of a complete, `cleaned` message, with the blank one after it."""
    rendering = Rendering(message, view)
    while not rendering.step():
        pass
    return rendering.lines


def chunks(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


def streamed(stream: Stream | LineStream, parts: Iterable[str], drafter: str = "") -> Iterator[list[TextRow]]:
    """Feed the parts, and yield all rows so far after each of them."""
    done: list[TextRow] = []
    for part in parts:
        stream.feed(part, drafter)
        final, tail = stream.update()
        done += final
        yield done + tail
