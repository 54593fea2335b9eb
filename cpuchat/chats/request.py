"""What the model reads of a chat: messages with their attachments, and summaries in place of what they cover."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest

from cpuchat.chats.records import Attachment, StoredMessage
from cpuchat.protocol import Message

Attach = Callable[[], tuple[Attachment, ...]]
"""Reads what is sent with a message; called on a thread."""
SUMMARY_TITLE = "Summary of the conversation so far:"
_BACKTICKS = re.compile("`{3,}")


def request_messages(system: str, messages: Sequence[StoredMessage]) -> tuple[Message, ...]:
    """Return the request to answer `messages` after the system prompt, if there is one.

    The last summary stands for what it covers: all before it, or before the question that it follows. A question that
    was refused as too long is not sent with the next one.
    """
    at = next((at for at in range(len(messages) - 1, -1, -1) if messages[at].is_summary), -1)
    if at >= 0:
        asked = [messages[at - 1]] if at and messages[at - 1].role == "user" else []
        system = "\n\n".join(filter(None, (system, f"{SUMMARY_TITLE}\n\n{messages[at].content}")))
        messages = [*asked, *messages[at + 1 :]]
    turns = [Message(role="system", content=system)] if system else []
    for message, following in zip_longest(messages, messages[1:]):
        if message.role == "user" and message.stop_reason and following is not None and following.role == "user":
            continue
        content = sent_text(message.content, message.attachments)
        turn = Message(role=message.role, content=content, reasoning=message.reasoning)
        if turns and turn.role == turns[-1].role == "user":
            # The answer between them was stopped before its first word; templates want turns to alternate.
            turn = Message(role="user", content=f"{turns.pop().content}\n\n{turn.content}")
        turns += [*_steps(message), turn]
    return tuple(turns)


def _steps(answer: StoredMessage) -> Iterator[Message]:
    """Yield what comes before an answer with calls of tools; calls that have no result were not made."""
    for step in answer.steps:
        calls = step.calls[: len(step.results)]
        if calls:
            yield Message(role="assistant", content=step.said, reasoning=step.reasoning, calls=calls)
        for call, result in zip(calls, step.results, strict=False):
            yield Message(role="tool", content=result.text, call_id=call.id, tool=call.name)


def sent_text(content: str, attachments: Iterable[Attachment]) -> str:
    """Return the attachments, each with its title and fenced, then the message itself."""
    return "\n\n".join([*map(_section, attachments), *filter(None, [content])])


def fenced(text: str) -> str:
    """Return `text` as a code block of Markdown, whatever is in it."""
    fence = "`" * (max((len(run) for run in _BACKTICKS.findall(text)), default=2) + 1)
    return f"{fence}\n{text.rstrip(chr(10))}\n{fence}"


def _section(attachment: Attachment) -> str:
    return f"{attachment.title}:\n{fenced(attachment.text)}"
