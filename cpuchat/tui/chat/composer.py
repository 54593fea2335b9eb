"""The user's input: a new message, an edit of a sent one, messages queued until what runs has ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from textual.content import Content

from cpuchat.attachments import PASTED_CHARACTERS, PASTED_LINES, is_pasted, pasted
from cpuchat.base.text import clean_line
from cpuchat.chats.history import Attach
from cpuchat.chats.records import Attachment, StoredMessage
from cpuchat.tui.widgets.prompt import Prompt


@dataclass(frozen=True, eq=False)  # two with the same text are two
class Outgoing:
    """A message that has left the prompt. `attach` reads what it names; `editing` is the id of the message that it
    replaces, whose attachments are `resent`, by mark.
    """

    text: str
    attach: Attach | None = None
    editing: int | None = None
    resent: Mapping[str, Attachment] = field(default_factory=dict)


class Composer:
    """Keeps the state of `prompt`: the queued messages, whether a message is being edited, and each chat's draft."""

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self.queue: list[Outgoing] = []
        """Messages to send, the next one first."""
        self._behind = 0  # messages in the queue that come after the one in the prompt
        self.editing: int | None = None
        """Id of the message that is being edited."""
        self.edits = ""
        """What is edited: "message", "last message", "summary", "answer" or "system prompt". Messages are sent again,
        the others saved.
        """
        self._before_editing = ""
        self._drafts: dict[str | None, tuple[str, dict[str, Attachment]]] = {}  # by chat id
        self._pasted: dict[str, Attachment] = {}  # in this chat, by mark
        self._resent: dict[str, Attachment] = {}  # of the message that is being edited, by mark
        self.is_command = False
        """What is typed is a command."""
        self.attached = ""
        """What would be sent with the message, or why it cannot be."""
        self.holds_back = False
        """The message names a file that is missing, and was not sent."""
        prompt.fold = self.fold
        self.chat_id: str | None = None
        """The chat that the prompt belongs to."""

    @property
    def unsent(self) -> str:
        """Return text that was not sent, the queued messages first, with pasted texts in full."""
        text = self._unsent
        for mark, attachment in self._pasted.items():
            text = text.replace(mark, attachment.text)
        return text

    @property
    def _unsent(self) -> str:
        return "\n".join(filter(None, (*(message.text for message in self.queue), self._prompt.text)))

    def show_titles(self, busy: bool, loading: bool, options: str) -> None:
        """Show in the prompt's border what Enter and Esc do, and what the chat is answered with beside the settings."""
        title: Content | str = Content(f"Message · {clean_line(options)}") if options else "Message"
        recalls = ["↑ edits the last one"] if self.queue else []
        if self.editing is not None:
            title = f"Edit {self.edits}"
            saves = "Enter saves as a new branch" if self.edits == "answer" else "Enter saves"
            keys = f"{'Enter regenerates from here' if self.attaches else saves} · Esc cancels"
        elif self.is_command:
            keys = "Enter runs · Tab completes"
        elif busy and not loading:
            keys = " · ".join(("Enter queues", *recalls, "Esc stops the answer"))
        elif self.queue:
            keys = " · ".join((*recalls, "Esc unqueues all"))
        elif busy:
            keys = "Enter queues it until the model is ready"
        else:
            keys = "Enter sends · Ctrl+J new line"
        if self.holds_back:
            keys = "Not sent. Enter again sends it as text"
        if self.attached:
            title = Content(f"{title} · {self.attached}")
        self._prompt.border_title, self._prompt.border_subtitle = title, keys
        self._prompt.set_class(self.editing is not None or self.holds_back, "-editing")
        self._prompt.hold_cursor(busy)

    # The queue

    def enqueue(self, message: Outgoing) -> None:
        """Add a message: to the end, or where it was before it was edited."""
        self.queue.insert(max(0, len(self.queue) - self._behind), message)
        self._behind = 0

    def edit_queued(self, message: Outgoing) -> None:
        """Put a queued message back into the prompt, before what is there."""
        if message not in self.queue:  # sent meanwhile
            return
        self._behind = len(self.queue) - 1 - self.queue.index(message)
        self.queue.remove(message)
        self._prompt.put("\n".join(filter(None, (message.text, self._prompt.text))))
        self._edit_again(message)
        self._prompt.focus()

    def delete_queued(self, message: Outgoing) -> None:
        if message in self.queue:
            self.queue.remove(message)

    def unqueue(self) -> None:
        """Put the queued messages back into the prompt, before what was typed since."""
        if self.queue:
            self._prompt.put(self._unsent)
            self._edit_again(self.queue[0])
            self.queue.clear()
            self._behind = 0

    def put_back(self, message: Outgoing) -> None:
        """Put a message that was not sent back into the prompt; with another text in there, to the head of the
        queue.
        """
        if self._prompt.text:
            self.queue.insert(0, message)
        else:
            self._prompt.put(message.text)
            self._edit_again(message)

    def _edit_again(self, message: Outgoing) -> None:
        if message.editing is not None:
            self.editing, self._resent = message.editing, dict(message.resent)
            self.edits = self.edits if self.edits.endswith("message") else "message"

    # Editing, and each chat's own

    def edit(self, message: StoredMessage, kind: str) -> None:
        """Edit a sent message, with the attachments that it has, or what else `edits` may be."""
        if self.editing is None:
            self._before_editing = self._prompt.text
        self.editing, self.edits, self._prompt.sends_blank = message.id, kind, kind == "system prompt"
        self._resent = {attachment.mark: attachment for attachment in message.attachments}
        self._prompt.put(message.content)
        self._prompt.focus()

    def cancel_editing(self) -> None:
        """Restore what was in the prompt before."""
        if self.editing is not None:
            self.editing, self._resent, self._prompt.sends_blank = None, {}, False
            self._prompt.put(self._before_editing)

    def switch_branch(self, sent: list[str]) -> None:
        """Show another branch of the chat, whose sent messages ↑ brings back; an edit ends, the draft stays."""
        self.cancel_editing()  # of a message that may not be on this branch
        self._prompt.begin_chat(sent, self._prompt.draft)

    def switch_chat(self, chat_id: str | None, sent: list[str], attachments: Iterable[Attachment]) -> None:
        """Switch to another chat; ↑ brings back what was sent, with these attachments. Each chat keeps its draft."""
        draft = self._before_editing if self.editing is not None else self._prompt.draft
        self._drafts[self.chat_id] = draft, self._pasted
        self.chat_id, self.editing, self._resent, self._prompt.sends_blank = chat_id, None, {}, False
        draft, unsent = self._drafts.pop(chat_id, ("", {}))
        self._pasted = {attachment.mark: attachment for attachment in attachments if is_pasted(attachment)} | unsent
        self._prompt.begin_chat(sent, draft)
        self._prompt.focus()

    # Attachments

    @property
    def attaches(self) -> bool:
        """Return whether what is in the prompt is to be sent, files with it; a summary is saved."""
        return self.editing is None or self.edits.endswith("message")

    @property
    def held(self) -> dict[str, Attachment]:
        """Return the attachments that marks in the prompt stand for, beside files that are still to be read."""
        return self._pasted | self._resent

    def fold(self, text: str) -> str:
        """Return what is inserted for a pasted text: for a long one its mark, except in a summary."""
        if not self.attaches or (len(text) <= PASTED_CHARACTERS and len(text.splitlines()) <= PASTED_LINES):
            return text
        number = 1
        while any(mark.startswith(f"[Pasted text {number}:") for mark in self.held):
            number += 1
        attachment = pasted(text, number)
        self._pasted[attachment.mark] = attachment
        return attachment.mark

    def take(self, text: str, attach: Attach | None) -> Outgoing:
        """Return the message that is in the prompt; an edit ends."""
        message = Outgoing(text, attach, self.editing, self._resent)
        self.editing, self._resent = None, {}
        return message
