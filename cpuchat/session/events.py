"""What a chat session tells the one who shows it, beside the events of the protocol."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from cpuchat.chats.history import Attach
from cpuchat.chats.records import Attachment
from cpuchat.config.servers import Source
from cpuchat.protocol.messages import AnyEvent, ContextTrimmed, Failed, GenerationFinished, Tool, ToolCall
from cpuchat.tools.loop import Choice

Severity = Literal["information", "warning", "error"]


@dataclass(frozen=True, eq=False)  # two with the same text are two
class Outgoing:
    """A message that has left the prompt. `attach` reads what it names; `editing` is the id of the message that it
    replaces, whose attachments are `resent`, by mark. `begins_chat`: a new chat begins with it."""

    text: str
    attach: Attach | None = None
    editing: int | None = None
    resent: Mapping[str, Attachment] = field(default_factory=dict)
    begins_chat: bool = False


@dataclass(frozen=True)
class Notice:
    """A notice for the user. `refuses`: it says why an action is not possible now."""

    text: str
    severity: Severity = "information"
    refuses: bool = False


@dataclass(frozen=True)
class Changed:
    """Something beside the messages is to be shown anew.

    `state`: something began to run, or ended. `queue`: other messages are queued. `chats`: a chat is new, or has
    another title or place. `saving`: the answer cannot be saved, or is (`AnswerSaver.problem`). `question`: it is
    stored, and the chat has its id. `model`: a measurement may have loaded or unloaded it. `ceilings`: of a newer
    measurement. `tools`: others are offered. `options`: another system prompt or reasoning."""

    what: Literal["state", "queue", "chats", "saving", "question", "model", "ceilings", "tools", "options"]


@dataclass(frozen=True)
class ChatOpened:
    """Another chat is open, or another branch of it, to be shown from this message; 0: from its end."""

    message_id: int = 0
    is_branch: bool = False


@dataclass(frozen=True)
class MessagesChanged:
    """Only the messages of the chat before the index `end` are to be shown; None: all of them."""

    end: int | None = None


@dataclass(frozen=True)
class MessageSent:
    """A message is next; it is not stored yet."""

    message: Outgoing


@dataclass(frozen=True)
class MessageReturned:
    """A message that could not be stored."""

    message: Outgoing


@dataclass(frozen=True)
class AnswerBegun:
    """An answer is asked for. `message`: to a new message, else to one that has an answer. `continues`: it is the end
    of the last answer. `summarizes`: it is a summary of the chat."""

    message: Outgoing | None = None
    continues: bool = False
    summarizes: bool = False


@dataclass(frozen=True)
class AnswerEnded:
    """An answer is over, whole or not. `last`: its last event."""

    last: AnyEvent | None


@dataclass(frozen=True)
class SummaryEnded:
    """A summary is over. `last`: its last event; `trimmed`: what was too long to be summarized."""

    last: GenerationFinished | Failed | None
    trimmed: ContextTrimmed | None
    is_kept: bool


@dataclass(frozen=True)
class WhenFullAsked:
    """The user is to say what the chat does when its context is full; `ChatSession.choose_when_full` goes on."""

    failed: Failed


@dataclass(frozen=True)
class QuestionTooLong:
    """The last question is too long by itself."""


@dataclass(frozen=True)
class ApprovalAsked:
    """The user is to approve a call of a tool; `ChatSession.approve` goes on."""

    tool: Tool
    call: ToolCall


@dataclass(frozen=True)
class ApprovalEnded:
    """A call was approved or refused, or the answer with it was stopped (None)."""

    choice: Choice | None


@dataclass(frozen=True)
class LoadBegun:
    """A model is being loaded; `again`: the one before, as another could not be loaded."""

    source: Source
    again: bool


@dataclass(frozen=True)
class LoadEnded:
    """A load is over. `last`: its last event, `ModelLoaded` if the model is ready."""

    source: Source
    last: AnyEvent | None


SessionEvent = (
    AnyEvent | Notice | Changed | ChatOpened | MessagesChanged | MessageSent | MessageReturned | AnswerBegun
    | AnswerEnded | SummaryEnded | WhenFullAsked | QuestionTooLong | ApprovalAsked | ApprovalEnded
    | LoadBegun | LoadEnded
)  # fmt: skip
