"""Titles of chats."""

from __future__ import annotations

import re
from collections.abc import Sequence

from cpuchat.chats.records import Attachment

TITLE_LENGTH = 48
# Of a heading, a quote or a list item; strong emphasis and code.
_MARKDOWN_MARKS = re.compile(r"^\s*(?:#{1,6}\s+|>\s*|[-*+]\s+|\d+\.\s+)|`+|\*\*+")
_LABEL = re.compile(r"(?:chat |conversation )?title\s*:\s*", re.IGNORECASE)
_AROUND = " \t\"'“”„«»‘’*_"


def title_of(text: str, attachments: Sequence[Attachment] = ()) -> str:
    """Return a chat's first title: the first line of its first message without Markdown marks, cut at a word. Of a
    message that is nothing but pasted text, that text's first line.
    """
    pasted = (one.text for one in attachments if one.mark == text.strip() and not one.mark.startswith("@"))
    line = _first_line(next(pasted, text))
    if len(line) <= TITLE_LENGTH:
        return line or "New chat"
    return line[: TITLE_LENGTH + 1].rsplit(" ", 1)[0][:TITLE_LENGTH] + "…"


def written_title(text: str) -> str:
    """Return the title in what a model wrote, without quotes, marks and "Title:"; "" if that is longer than a title."""
    line = _first_line(text).strip(_AROUND)
    if label := _LABEL.match(line):
        line = line[label.end() :].strip(_AROUND)
    line = line.rstrip(".:;, ")
    return line if len(line) <= TITLE_LENGTH and any(map(str.isalnum, line)) else ""


def _first_line(text: str) -> str:
    line = next((part for part in text.splitlines() if part.strip()), "")
    return " ".join(_MARKDOWN_MARKS.sub("", line).split())
