"""A prompt: its text, its tokens, and where its messages are in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from cpuchat.engine.llama.control_text import MARK_BYTES
from cpuchat.engine.text.reasoning import FORMATS
from cpuchat.prefix import common_prefix
from cpuchat.protocol import Message

SPACING: Final = 512
"""Tokens between two checkpoints of a long prompt, at least; the last user's message always has one."""
_MARKUP: Final = 1 << 16
"""Bytes between the contents of two messages, at most."""

Change = Literal["", "system", "trimmed", "message", "template"]


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt.

    Attributes:
        text: with the marks of content (`control_text`).
        messages: that are in it; () for a text without messages.
        is_trimmed: the oldest messages were left out.
    """

    text: bytes
    tokens: list[int]
    messages: tuple[Message, ...] = ()
    is_trimmed: bool = False

    def _contents(self, text: bytes) -> list[tuple[int, int]]:
        """Return the first byte of the content of each message in `text` (without marks) and the one after the last; a
        content that the template has changed is an empty one where the one before ends."""
        found, at, changed = [], 0, 0
        for message in self.messages:
            content = message.content.encode("utf-8", "replace").replace(MARK_BYTES, b"").strip()
            # Looking through all that follows would take seconds for a long chat whose messages the template changes.
            end = at + len(content) + changed + _MARKUP if at else len(text)
            start = text.find(content, at, end)
            found.append((start, start + len(content)) if start >= 0 else (at, at))
            changed = 0 if start >= 0 else changed + 2 * (len(content) + len(message.reasoning))
            at = found[-1][1]
        return found

    def checkpoints(self, start: int, piece: Callable[[int], bytes]) -> list[int]:
        """Return after how many tokens, more than `start`, later prompts are likely to differ from this one.

        At the content of users' messages, which may be edited, and before the marker of reasoning that the template
        opens for the answer, since a later prompt often has the answer without its reasoning.

        Args:
            piece: returns the text of one token, control tokens included.
        """
        text = self.text.replace(MARK_BYTES, b"")
        contents = self._contents(text)
        opening = text[contents[-1][1] :] if contents else b""
        marks = [opening.find(mark.encode()) for kind in FORMATS for mark in (*kind.openings, *kind.closings)]
        markers = [len(text) - len(opening) + at for at in marks if at >= 0]
        wanted = [at for message, (at, _) in zip(self.messages, contents, strict=True) if message.role == "user"]
        last, end = wanted[-1] if wanted else -1, len(text)
        found: list[tuple[int, int]] = []
        wanted = sorted({*wanted, *sorted(markers)[:1]})
        at = len(self.tokens)
        while at > start and wanted:  # from the end: the text of the tokens before `start` is not needed
            while wanted and wanted[-1] >= end:
                found.append((at, wanted.pop()))
            at -= 1
            end -= len(piece(self.tokens[at]))
        places, spaced = list[int](), start
        for token, byte in reversed(found):
            if token > start and (byte >= last or token - spaced >= SPACING):
                places.append(token)
                spaced = token
        return sorted(set(places))

    def changed(self, before: bytes) -> tuple[Change, int]:
        """Return what differs first from the text that was evaluated before, and in which message; see `Reuse`."""
        text, old = self.text.replace(MARK_BYTES, b""), before.replace(MARK_BYTES, b"")
        at = common_prefix(text, old)
        if at == min(len(text), len(old)):
            return "", 0
        contents = self._contents(text)
        number = 0
        for message, (start, end) in zip(self.messages, contents, strict=True):
            number += message.role != "system"
            if at < end:
                if message.role == "system":
                    return "system", 0
                if self.is_trimmed and number == 1:
                    return "trimmed", 0
                return ("message" if at >= start else "template"), number
        return ("template", number) if contents else ("", 0)
