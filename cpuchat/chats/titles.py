"""Titles of chats."""

from __future__ import annotations

import re

TITLE_LENGTH = 48
# Of a heading, a quote or a list item; strong emphasis and code.
_MARKDOWN_MARKS = re.compile(r"^\s*(?:#{1,6}\s+|>\s*|[-*+]\s+|\d+\.\s+)|`+|\*\*+")


def title_of(text: str) -> str:
    """Return a chat's first title: the first line of its first message without Markdown marks, cut at a word."""
    line = next((part for part in text.splitlines() if part.strip()), "")
    line = " ".join(_MARKDOWN_MARKS.sub("", line).split())
    if len(line) <= TITLE_LENGTH:
        return line or "New chat"
    return line[: TITLE_LENGTH + 1].rsplit(" ", 1)[0][:TITLE_LENGTH] + "…"
