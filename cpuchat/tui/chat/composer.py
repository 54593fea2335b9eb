"""The user's input: a new message, an edit of the last one, a message queued until the model is ready."""

from __future__ import annotations

from collections.abc import Iterable

from textual.content import Content

from cpuchat.attachments import PASTED_LINES, is_pasted, pasted
from cpuchat.chats.records import Attachment, StoredMessage
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
        self._drafts: dict[str | None, tuple[str, dict[str, Attachment]]] = {}  # by chat id
        self._pasted: dict[str, Attachment] = {}  # in this chat, by mark
        self._resent: dict[str, Attachment] = {}  # of the message that is being edited, by mark
        self._taken: tuple[int | None, dict[str, Attachment]] = (None, {})
        self.attached = ""
        """What would be sent with the message, or why it cannot be."""
        prompt.fold = self.fold
        self.chat_id: str | None = None
        """The chat that the prompt belongs to."""

    @property
    def unsent(self) -> str:
        """Return text that was not sent, the queued message first, with pasted texts in full."""
        text = self._unsent
        for mark, attachment in self._pasted.items():
            text = text.replace(mark, attachment.text)
        return text

    @property
    def _unsent(self) -> str:
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
        if self.attached and not self.queued:
            title = Content(f"{title} · {self.attached}")
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
            self._prompt.put(self._unsent)
            self.queued = ""

    def edit(self, message: StoredMessage, last: bool) -> None:
        """Edit a sent message, with the attachments that it has, or a summary."""
        if self.editing is None:
            self._before_editing = self._prompt.text
        self.editing, self._edits_last, self._edits_summary = message.id, last, message.is_summary
        self._resent = {attachment.mark: attachment for attachment in message.attachments}
        self._prompt.put(message.content)
        self._prompt.focus()

    def cancel_editing(self) -> None:
        """Restore what was in the prompt before."""
        if self.editing is not None:
            self.editing, self._resent = None, {}
            self._prompt.put(self._before_editing)

    def switch_branch(self, sent: list[str]) -> None:
        """Show another branch of the chat, whose sent messages ↑ brings back; an edit ends, the draft stays."""
        self.cancel_editing()  # of a message that may not be on this branch
        self._prompt.begin_chat(sent, self._prompt.draft)

    def switch_chat(self, chat_id: str | None, sent: list[str], attachments: Iterable[Attachment]) -> None:
        """Switch to another chat; ↑ brings back what was sent, with these attachments. Each chat keeps its draft."""
        draft = self._before_editing if self.editing is not None else self._prompt.draft
        self._drafts[self.chat_id] = draft, self._pasted
        self.chat_id, self.editing, self._resent = chat_id, None, {}
        draft, unsent = self._drafts.pop(chat_id, ("", {}))
        self._pasted = {attachment.mark: attachment for attachment in attachments if is_pasted(attachment)} | unsent
        self._prompt.begin_chat(sent, draft)
        self._prompt.focus()

    # Attachments

    @property
    def attaches(self) -> bool:
        """Return whether files can be sent with what is in the prompt: not with a summary."""
        return self.editing is None or not self._edits_summary

    @property
    def held(self) -> dict[str, Attachment]:
        """Return the attachments that marks in the prompt stand for, beside files that are still to be read."""
        return self._pasted | self._resent

    def fold(self, text: str) -> str:
        """Return what is inserted for a pasted text: for a long one its mark."""
        if len(text.splitlines()) <= PASTED_LINES:
            return text
        number = 1
        while any(mark.startswith(f"[Pasted text {number}:") for mark in self.held):
            number += 1
        attachment = pasted(text, number)
        self._pasted[attachment.mark] = attachment
        return attachment.mark

    def take(self) -> tuple[int | None, dict[str, Attachment]]:
        """Return the id of the message that is being edited, if any, and what is `held`; the edit ends."""
        held, self._taken = self.held, (self.editing, self._resent)
        self.editing, self._resent = None, {}
        return self._taken[0], held

    def put_back(self, text: str) -> None:
        """Put a message that was not sent back into the prompt, as it was taken."""
        self._prompt.put(text)
        self.editing, self._resent = self._taken
