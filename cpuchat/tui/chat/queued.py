"""The queue above the prompt: messages that are sent one after the other when what runs has ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.binding import BindingType
from textual.content import Content
from textual.message import Message
from textual.widgets import OptionList

from cpuchat.base.text import clean_line
from cpuchat.tui import keys
from cpuchat.tui.chat.composer import Outgoing

_HEAD = "Queued: "


class QueuedMessages(OptionList):
    """Shows one line for each; posts what the user wants, and the screen does it."""

    BINDINGS: ClassVar[list[BindingType]] = keys.bindings("queue")

    class _About(Message):
        def __init__(self, message: Outgoing) -> None:
            super().__init__()
            self.message = message

    class EditAsked(_About):
        """The user wants the message back in the prompt."""

    class DeleteAsked(_About):
        """The user wants the message deleted."""

    def __init__(self) -> None:
        super().__init__(id="queue", compact=True)
        self._messages: list[Outgoing] = []

    def show(self, messages: Sequence[Outgoing]) -> None:
        """Show these, or nothing when there are none."""
        if self._messages == [*messages]:
            return
        marked, self._messages = self.highlighted, [*messages]
        heads = [_HEAD, *[" " * len(_HEAD)] * len(messages)]
        self.clear_options()
        self.add_options([Content(heads[at] + clean_line(one.text)) for at, one in enumerate(messages)])
        if marked is not None and messages:
            self.highlighted = min(marked, len(messages) - 1)
        self.set_class(bool(messages), "-open")

    def on_focus(self) -> None:
        if self.highlighted is None:
            self.action_last()

    def on_blur(self) -> None:
        self.highlighted = None

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        if event.option_index < len(self._messages):
            self.post_message(self.EditAsked(self._messages[event.option_index]))

    def action_delete(self) -> None:
        if self.highlighted is not None:
            self.post_message(self.DeleteAsked(self._messages[self.highlighted]))
