"""The transcript of a chat: its branches, what was searched for, and a mark for text below what is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import BindingType
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip

from cpuchat.chats.store import Matcher
from cpuchat.tui import keys
from cpuchat.tui.markdown.message_view import Step
from cpuchat.tui.markdown.rows import CodeBlock, Line, selected
from cpuchat.tui.markdown.transcript import MessageSource, Transcript, TranscriptMessage
from cpuchat.tui.threads import spare_from_collections

_FOUND = Style(reverse=True)
_ABOVE = 2  # lines above a hit that is jumped to
_SPARED_CHUNKS = 8  # between two calls of `spare_from_collections` while a long chat is rendered
NEW_TEXT = " ↓ new text "
"""At the bottom while there is text below that nobody has seen."""
COPY = " copy "
"""At the right end of a code block's first row, where it leaves room."""


class ChatTranscript(Transcript):
    BINDINGS: ClassVar[list[BindingType]] = keys.bindings("branches")

    class BranchAsked(Message):
        """The user wants the sibling `step` places beside a message."""

        def __init__(self, message_id: int, step: int) -> None:
            super().__init__()
            self.message_id = message_id
            self.step = step

    class CopyAsked(Message):
        """The user wants a code block."""

        def __init__(self, block: CodeBlock) -> None:
            super().__init__()
            self.block = block

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._matcher: Matcher | None = None
        self._unseen = False  # text came in below what is shown
        self._chunks = 0  # of long chats, rendered so far

    @property
    def selected_id(self) -> int:
        """Return the id of the message under the marker; 0 when none is stored there, or the transcript is not in
        use.
        """
        in_use = self.has_focus and self._current is not None and self._current < len(self._entries)
        return max(0, self._entries[self._current or 0].message.id) if in_use else 0

    @property
    def selects_system_prompt(self) -> bool:
        """Return whether the marker is at the system prompt, which is no message, and the transcript is in use."""
        message = self._entries.current(self._current) if self.has_focus and self._current is not None else None
        return message is not None and message.role == "system" and not message.id

    @property
    def has_messages(self) -> bool:
        return bool(self._entries)

    def set_messages(
        self, messages: Sequence[MessageSource], top: int | None = None, matcher: Matcher | None = None
    ) -> None:
        """Show only these, as `Transcript`, from the first line with what was searched for in the message at `top`;
        every place where it stands is marked.
        """
        self._matcher = matcher
        self._unseen = False
        super().set_messages(messages, top)

    def _first_line(self, index: int) -> int:
        if self._matcher is None:
            return 0
        start = self._entries.starts[index]
        return max(0, next((at for at in self._entries[index].content if self._hits(start + at)), 0) - _ABOVE)

    def _hits(self, at: int) -> list[tuple[int, int]]:
        """Return where a line has what was searched for: in the text of a message, not in its title or note."""
        index = self._entries.at(at)
        if self._matcher is None or at - self._entries.starts[index] not in self._entries[index].content:
            return []
        return self._matcher.spans(self._entries.line(at).text)

    def _render_rest(self) -> None:
        self._chunks += 1
        # Frozen with what is shown, a screen above this one would stay in memory after it was closed.
        if self._chunks % _SPARED_CHUNKS == 0 and self.app.screen is self.screen:
            spare_from_collections()  # takes as long as a chunk, so not in one go with it
            self._chunk_timer.start(0.0)
        else:
            super()._render_rest()

    def begin_answer(self, title: str, drafted: bool = False, hint: str = "") -> None:
        self._matcher = self._current = None
        super().begin_answer(title, drafted, hint)

    def flush(self) -> None:
        super().flush()
        self._note_new_text()

    def finish_answer(self, note: str = "") -> TranscriptMessage | None:
        finished = super().finish_answer(note)
        if finished is not None:
            self._note_new_text()
        return finished

    def _note_new_text(self) -> None:
        bottom = self.size.height - 1
        below = self._entries.height > self.scroll_offset.y + self.size.height
        if below and not self.following and not self._unseen:
            self._unseen = True
            self.refresh(Region(0, bottom, self.scrollable_content_region.width, 1))

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        self._unseen = self._unseen and not self.following

    def _is_mark(self, y: int) -> bool:
        """Return whether the mark for new text is at the end of this row."""
        return self._unseen and not self.following and y == self.size.height - 1

    def show_steps(self, steps: tuple[Step, ...]) -> None:
        """Show what came before the open answer; its text up to here is part of it."""
        if (answer := self._entries.open_answer()) is not None:
            answer.show_steps(steps)
            self._flush_soon()

    def identify(self, message: TranscriptMessage) -> None:
        """Give the last message of this role its id, its place among its siblings and its attachments, unless an answer
        is open.
        """
        if self._entries.open_answer() is not None:
            return
        for entry in reversed(self._entries):
            if entry.message.role == message.role and entry.open is None:
                known = entry.message
                entry.message = replace(known, id=message.id, place=message.place, attachments=message.attachments)
                if (known.place, known.attachments) != (message.place, message.attachments):
                    self._show_whole(entry)
                return

    def show_attachments(self, attachments: tuple[tuple[str, str], ...]) -> None:
        """Show what was sent with the user's last message."""
        entry = next((entry for entry in reversed(self._entries) if entry.message.role == "user"), None)
        if entry is not None and entry.message.attachments != attachments:
            entry.message = replace(entry.message, attachments=attachments)
            self._show_whole(entry)

    def render_line(self, y: int) -> Strip:
        strip = super().render_line(y)
        at = y + self.scroll_offset.y
        for start, end in self._hits(at) if at < self._entries.height else ():
            strip = selected(strip, start, end, _FOUND)
        if self._view is not None:
            marker = self._view.palette.base + self._view.palette.marker
            if self._is_mark(y):
                strip = _ending(strip, NEW_TEXT, marker + _FOUND)
            elif at < self._entries.height and self._copies(self._entries.line(at)):
                strip = _ending(strip, COPY, marker + self._view.palette.block)
        return strip

    @staticmethod
    def _copies(line: Line) -> bool:
        """Return whether the mark that copies a code block is at the end of this line."""
        return line.code is not None and cell_len(line.text.rstrip()) <= line.width - len(COPY)

    def action_hit(self, step: int) -> None:
        """Scroll to the next line with what was searched for, or to the one before."""
        here, height = self.scroll_offset.y + _ABOVE, self._entries.height
        ahead = range(here + 1, height) if step > 0 else range(min(here, height) - 1, -1, -1)
        found = next((at for at in ahead if self._hits(at)), None) if self._matcher is not None else None
        if found is not None:
            self.scroll_to(y=max(0, found - _ABOVE), animate=False)

    def on_click(self, event: events.Click) -> None:
        place = event.get_content_offset(self)
        if place is not None and self._is_mark(place.y) and place.x >= self.size.width - cell_len(NEW_TEXT):
            event.prevent_default()
            self.action_scroll_end()
            return
        at = -1 if place is None else place.y + self.scroll_offset.y
        if place is not None and 0 <= at < self._entries.height:
            line = self._entries.line(at)
            if line.code is not None and self._copies(line) and line.width - len(COPY) <= place.x < line.width:
                self.post_message(self.CopyAsked(line.code))
                return
        if place is None or event.chain != 1 or at not in self._entries.starts[:-1]:
            return
        message, text = self._entries[self._entries.at(at)].message, self._entries.line(at).text
        left, right = (cell_len(text[: text.rfind(sign)]) for sign in "‹›")
        if message.place and "‹" in text and left <= place.x <= right + 1:
            self.post_message(self.BranchAsked(message.id, -1 if place.x <= left + 1 else 1))


def _ending(strip: Strip, text: str, style: Style) -> Strip:
    """Return a line with `text` in the place of its end."""
    mark = Strip([Segment(text, style)], cell_len(text))
    return Strip.join([strip.crop(0, max(0, strip.cell_length - mark.cell_length)), mark])
