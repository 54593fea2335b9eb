"""The text of a message with its attachments, as the model reads it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from cpuchat.chats.records import Attachment

Attach = Callable[[], tuple[Attachment, ...]]
"""Reads what is sent with a message; called on a thread."""
_BACKTICKS = re.compile("`{3,}")


def sent_text(content: str, attachments: Iterable[Attachment]) -> str:
    """Return the attachments, each with its title and fenced, then the message itself."""
    return "\n\n".join([*map(_section, attachments), *filter(None, [content])])


def fenced(text: str) -> str:
    """Return `text` as a code block of Markdown, whatever is in it."""
    fence = "`" * (max((len(run) for run in _BACKTICKS.findall(text)), default=2) + 1)
    return f"{fence}\n{text.rstrip(chr(10))}\n{fence}"


def _section(attachment: Attachment) -> str:
    return f"{attachment.title}:\n{fenced(attachment.text)}"
