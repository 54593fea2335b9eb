"""The transcript of a chat: its branches, and what was searched for."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from rich.cells import cell_len
from rich.style import Style
from textual import events
from textual.binding import BindingType
from textual.message import Message
from textual.strip import Strip

from cpuchat.chats.search import Matcher
from cpuchat.tui import keys
from cpuchat.tui.markdown.rows import selected
from cpuchat.tui.markdown.transcript import Transcript, TranscriptMessage
from cpuchat.tui.threads import spare_from_collections

_FOUND = Style(reverse=True)
_ABOVE = 2  # lines above a hit that is jumped to


class ChatTranscript(Transcript):
    BINDINGS: ClassVar[list[BindingType]] = keys.bindings("branches")

    class BranchAsked(Message):
        """The user wants the sibling `step` places beside a message."""

        def __init__(self, message_id: int, step: int) -> None:
            super().__init__()
            self.message_id = message_id
            self.step = step

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._matcher: Matcher | None = None

    @property
    def selected_id(self) -> int:
        """Return the id of the message under the marker; 0 when none is stored there, or the transcript is not in
        use.
        """
        in_use = self.has_focus and self._current is not None and self._current < len(self._entries)
        return max(0, self._entries[self._current or 0].message.id) if in_use else 0

    @property
    def has_messages(self) -> bool:
        return bool(self._entries)

    def set_messages(
        self, messages: list[TranscriptMessage], top: int | None = None, matcher: Matcher | None = None
    ) -> None:
        """Show only these, as `Transcript`, from the first line with what was searched for in the message at `top`;
        every place where it stands is marked.
        """
        self._matcher = matcher
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

    def _render_stale(self) -> None:
        shown = self._chunk_timer is not None  # before that, the first lines are waited for
        super()._render_stale()
        # Frozen with what is shown, a screen above this one would stay in memory after it was closed.
        if shown and self._chunk_timer is not None and self.app.screen is self.screen:
            spare_from_collections()

    def begin_answer(self, title: str, drafted: bool = False) -> None:
        self._matcher = self._current = None
        super().begin_answer(title, drafted)

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
        return strip

    def action_hit(self, step: int) -> None:
        """Scroll to the next line with what was searched for, or to the one before."""
        here, height = self.scroll_offset.y + _ABOVE, self._entries.height
        ahead = range(here + 1, height) if step > 0 else range(min(here, height) - 1, -1, -1)
        found = next((at for at in ahead if self._hits(at)), None) if self._matcher is not None else None
        if found is not None:
            self.scroll_to(y=max(0, found - _ABOVE), animate=False)

    def on_click(self, event: events.Click) -> None:
        place = event.get_content_offset(self)
        at = -1 if place is None else place.y + self.scroll_offset.y
        if place is None or event.chain != 1 or at not in self._entries.starts[:-1]:
            return
        message, text = self._entries[self._entries.at(at)].message, self._entries.line(at).text
        left, right = (cell_len(text[: text.rfind(sign)]) for sign in "‹›")
        if message.place and "‹" in text and left <= place.x <= right + 1:
            self.post_message(self.BranchAsked(message.id, -1 if place.x <= left + 1 else 1))
