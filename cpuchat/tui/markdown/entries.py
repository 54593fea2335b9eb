"""The transcript's messages and their line numbers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from cpuchat.tui.markdown.message_view import STEP, OpenMessage, Rendering, TranscriptMessage, View
from cpuchat.tui.markdown.rows import Line

MessageSource = TranscriptMessage | Callable[[], TranscriptMessage]


@dataclass(eq=False, slots=True)
class Entry:
    """One message on screen. `view` is what `lines` were rendered for, None before; `message` is cleaned then. While a
    long one is rendered, in steps, `lines` are those for the view before, at first those that there are.

    `source` is the message, or makes it when it is needed: all those of a long chat at once would be felt. `open` is
    set while it is written; `message` is then its beginning. `content` are the lines of a complete message without
    its title, reasoning and note.
    """

    source: MessageSource
    open: OpenMessage | None = None
    view: View | None = None
    lines: list[Line] = field(default_factory=list)
    content: range = range(0)
    _rendering: tuple[View, Rendering] | None = None

    @property
    def message(self) -> TranscriptMessage:
        if not isinstance(self.source, TranscriptMessage):
            self.source = self.source()
        return self.source

    @message.setter
    def message(self, message: TranscriptMessage) -> None:
        self.source = message
        if self._rendering is not None:
            self.view = self._rendering = None

    def is_current(self, view: View | None) -> bool:
        return self._rendering is None and (self.view is view or self.view == view)

    @property
    def now(self) -> TranscriptMessage:
        """Return the message so far."""
        if self.open is not None:
            return self.open.message()
        return self.message if self.view is not None else self.message.cleaned()

    @property
    def size(self) -> int:
        """Characters to render in one go, roughly."""
        return min(STEP, len(self.message.content)) + len(self.message.reasoning) + 100

    def render(self, view: View) -> int:
        """Render `lines` for `view`, the next part of a long message; returns the first that changed."""
        first = 0
        if self.open is not None:
            if self.open.view == view:
                first = self.open.update()
            else:
                self.open.restyle(view)
            self.lines, self.view = self.open.lines, view
            return first
        if self._rendering is None or self._rendering[0] != view:
            if self.view is None:
                self.message = self.message.cleaned()
            self._rendering = view, Rendering(self.message, view)
        rendering = self._rendering[1]
        if done := rendering.step():
            self.view, self._rendering = view, None
        if done or not self.lines:
            self.lines = rendering.lines
        self.content = rendering.content if self.lines is rendering.lines else self.content
        return first


class Entries(list[Entry]):
    """Entries in order. After lines have changed, `recount` brings the line numbers up to date."""

    def __init__(self, entries: list[Entry] | None = None) -> None:
        super().__init__(entries or [])
        self.starts = [0]
        self.recount()

    def recount(self) -> None:
        """Update `starts`: the first line of each entry, then the total."""
        self.starts = [0, *accumulate(len(entry.lines) for entry in self)]

    @property
    def height(self) -> int:
        return self.starts[-1]

    def end(self, before: int, view: int, following: bool) -> int:
        """Return the line after the last that can be scrolled into a view of `view` lines; it was `before`.

        An answer that is written and followed has the view move on by a third of its height at a time: in between the
        text stands still, and only new lines are drawn.
        """
        if self.height <= view:
            return self.height
        step, left = view // 3, before - self.height
        if left < 0:
            left = step if following and self.open_index() is not None else 0
        return self.height + min(left, step)

    def at(self, line: int) -> int:
        """Return the index of the entry with `line`, the nearest one beyond the ends."""
        return min(max(0, bisect_right(self.starts, line) - 1), len(self) - 1)

    def line(self, number: int) -> Line:
        """Return a line. Raises IndexError if it does not exist."""
        index = self.at(number)
        return self[index].lines[number - self.starts[index]]

    def all_lines(self) -> list[Line]:
        return [line for entry in self for line in entry.lines]

    def open_answer(self) -> OpenMessage | None:
        """Return the answer that is being written."""
        index = self.open_index()
        return None if index is None else self[index].open

    def current(self, index: int | None) -> TranscriptMessage | None:
        """Return the message at `index`; without one, the last answer."""
        if index is not None and index < len(self):
            return self[index].now
        return next((entry.now for entry in reversed(self) if entry.message.role == "assistant"), None)

    def outward(self, top: int | None) -> Iterator[int]:
        """Yield all indices: from `top` down, then from there up; None: from the last one up."""
        if top is None:
            yield from range(len(self) - 1, -1, -1)
        else:
            yield from range(top, len(self))
            yield from range(top - 1, -1, -1)

    def open_index(self) -> int | None:
        """Return the index of the open answer."""
        return next((index for index, entry in enumerate(self) if entry.open is not None), None)
