"""The chats, the newest first, with a search box."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual import events, on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.widgets import Input, OptionList
from textual.widgets.option_list import Option

from cpuchat.base.text import clean_line
from cpuchat.chats.records import Chat, Excerpt, SearchHit
from cpuchat.chats.store import MAX_CHATS
from cpuchat.tui import keys
from cpuchat.tui.commands import run_on_screen

COMPARISON = "⇄"
"""Stands before a chat that is a comparison."""
_BEFORE_HIT = 6  # characters of an excerpt


def day_of(updated: float, today: datetime.date) -> str:
    """Heading for a chat last changed at `updated` (seconds since the epoch, shown in local time)."""
    days = (today - datetime.date.fromtimestamp(updated)).days
    if days <= 0:
        return "Today"
    if days == 1:
        return "Yesterday"
    return "This week" if days < 7 else "This month" if days < 31 else "Older"


class Chats(OptionList):
    BINDINGS: ClassVar[list[BindingType]] = keys.bindings("chats")

    @property
    def marked(self) -> str | None:
        index = self.highlighted
        id = None if index is None else self.get_option_at_index(index).id
        return id.partition("/")[0] if id else None

    def mark(self, chat_id: str | None) -> None:
        self.highlighted = next((at for at, one in enumerate(self.options) if chat_id and one.id == chat_id), None)

    def on_focus(self) -> None:
        if self.highlighted is None:
            self.action_first()

    def action_select(self) -> None:
        """Open the chat: at the message under the cursor, or at the first one with what was searched for."""
        if self.highlighted is None or not (id := self.get_option_at_index(self.highlighted).id):
            return
        below = next((option.id or "" for option in self.options[self.highlighted + 1 :]), "")
        chat_id, _, message_id = (below if below.startswith(f"{id}/") else id).partition("/")
        run_on_screen(self, "open", chat_id, int(message_id or 0))

    def action_rename(self) -> None:
        if chat_id := self.marked:
            run_on_screen(self, "rename_chat", "", chat_id)

    def action_delete(self) -> None:
        if chat_id := self.marked:
            run_on_screen(self, "delete_chat", chat_id)

    def action_search(self) -> None:
        self.screen.query_one("#chat-search", Input).focus()


def excerpt_row(found: Excerpt) -> Text:
    """Format one line with the first hit in sight, and all hits marked."""
    start = max(0, found.marks[0][0] - _BEFORE_HIT) if found.marks else 0
    rest = found.text[start:].lstrip()
    text = Text(f"  {'…' if start else ''}", style="dim", no_wrap=True, overflow="ellipsis")
    offset = len(text) + len(rest) - len(found.text)
    text.append(rest)
    for first, end in found.marks:
        text.stylize("not dim bold underline", first + offset, end + offset)
    return text


class ChatList(Vertical):
    """Sidebar, which the screen fills."""

    BORDER_TITLE = "Chats"
    _current: str | None = None  # the open chat

    def compose(self) -> ComposeResult:
        yield Input(placeholder="/ search", id="chat-search", compact=True)
        yield Chats(id="chat-options", compact=True)

    def show(self, chats: Sequence[Chat], current: str | None) -> None:
        """List `chats` (newest first) under their days, and mark the open one."""
        today = datetime.date.today()
        options = self.query_one(Chats)
        # The user's own mark stays while the list is used; another open chat takes it along.
        marked = options.marked if options.has_focus and current == self._current else current
        self._current = current
        rows: list[Option] = []
        heading = ""
        for chat in chats:
            if (day := day_of(chat.updated, today)) != heading:
                heading = day
                rows.append(Option(Text(day), disabled=True))
            here = chat.id == current
            # Text, not markup: a title is whatever the user typed.
            title = Text("▌" if here else " ", style="bold" if here else "", no_wrap=True, overflow="ellipsis")
            title.append(f"{COMPARISON} " if chat.sides else "")
            rows.append(Option(title.append(clean_line(chat.title) or "New chat"), id=chat.id))
            if isinstance(chat, SearchHit):
                rows += [Option(excerpt_row(one), id=f"{chat.id}/{one.message_id}") for one in chat.excerpts]
        if self.searching and len(chats) >= MAX_CHATS:
            rows.append(Option(Text(f" First {MAX_CHATS} matches. Type more.", style="italic"), disabled=True))
        if not rows:
            text = "no matches" if self.searching else "no chats yet"
            rows.append(Option(Text(f" {text}", style="italic"), disabled=True))
        options.clear_options()
        options.add_options(rows)
        options.mark(marked if any(row.id == marked for row in rows) else current)

    @property
    def searching(self) -> str:
        return self.query_one("#chat-search", Input).value.strip()

    def clear_search(self) -> None:
        self.query_one("#chat-search", Input).value = ""

    def on_descendant_blur(self) -> None:
        """Select the open chat again when the list is left; a dialog over it does not count."""
        options = self.query_one(Chats)
        self.call_later(lambda: None if options.has_focus else options.mark(self._current))

    def on_key(self, event: events.Key) -> None:
        if event.key == "down" and self.query_one("#chat-search", Input).has_focus:
            event.stop()
            self._to_list()

    @on(Input.Submitted)
    def _to_list(self) -> None:
        options = self.query_one(Chats)
        options.focus()
