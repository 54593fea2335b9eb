"""The user's input: a new message, an edit of the last one, a message queued until the model is ready."""

from __future__ import annotations

from textual.content import Content

from cpuchat.text import clean_line
from cpuchat.tui.widgets.prompt import Prompt


class Composer:
    """Keeps the state of `prompt`: the queued message, whether a message is being edited, and each chat's draft."""

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self.queued = ""
        self.editing: int | None = None
        """Id of the message that is being edited."""
        self._edits_last = True
        self._edits_summary = False
        self._before_editing = ""
        self._drafts: dict[str | None, str] = {}  # by chat id
        self.chat_id: str | None = None
        """The chat that the prompt belongs to."""

    @property
    def unsent(self) -> str:
        """Return text that was not sent, the queued message first."""
        return "\n".join(filter(None, (self.queued, self._prompt.text)))

    def show_titles(self, busy: bool, loading: bool, preset: str) -> None:
        """Show in the prompt's border what Enter and Esc do, and the preset of the chat ("" = none)."""
        title: Content | str = Content(f"Message · {clean_line(preset)}") if preset else "Message"
        if self.queued:
            title, keys = Content(f"Queued: {clean_line(self.queued)}"), "Esc cancels"
        elif self.editing is not None:
            kind = "summary" if self._edits_summary else "last message" if self._edits_last else "message"
            title = f"Edit {kind}"
            keys = "Enter saves · Esc cancels" if self._edits_summary else "Enter regenerates from here · Esc cancels"
        elif busy:
            keys = "Enter queues it until the model is ready" if loading else "Esc stops the answer"
        else:
            keys = "Enter sends · Ctrl+J new line"
        self._prompt.border_title, self._prompt.border_subtitle = title, keys
        self._prompt.set_class(self.editing is not None, "-editing")
        self._prompt.set_class(bool(self.queued), "-queued")
        self._prompt.hold_cursor(busy)

    def queue(self, text: str) -> None:
        self._prompt.accept()
        self.queued = text

    def take_queued(self) -> str:
        """Return the queued message and clear it."""
        text, self.queued = self.queued, ""
        return text

    def unqueue(self) -> None:
        """Put the queued message back into the prompt, before what was typed since."""
        if self.queued:
            self._prompt.put(self.unsent)
            self.queued = ""

    def edit(self, text: str, message_id: int, last: bool, summary: bool = False) -> None:
        """Edit a sent message, or a summary."""
        if self.editing is None:
            self._before_editing = self._prompt.text
        self.editing, self._edits_last, self._edits_summary = message_id, last, summary
        self._prompt.put(text)
        self._prompt.focus()

    def cancel_editing(self) -> None:
        """Restore what was in the prompt before."""
        if self.editing is not None:
            self.editing = None
            self._prompt.put(self._before_editing)

    def switch_branch(self, sent: list[str]) -> None:
        """Show another branch of the chat, whose sent messages ↑ brings back; an edit ends, the draft stays."""
        self.cancel_editing()  # of a message that may not be on this branch
        self._prompt.begin_chat(sent, self._prompt.draft)

    def switch_chat(self, chat_id: str | None, sent: list[str]) -> None:
        """Switch to another chat, whose sent messages ↑ brings back; each chat keeps its draft."""
        self._drafts[self.chat_id] = self._before_editing if self.editing is not None else self._prompt.draft
        self.chat_id, self.editing = chat_id, None
        self._prompt.begin_chat(sent, self._drafts.pop(chat_id, ""))
        self._prompt.focus()
