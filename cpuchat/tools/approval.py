"""Which calls of tools the user has approved beforehand."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from cpuchat.files import JsonCache
from cpuchat.tool_calls import Tool

Choice = Literal["once", "chat", "always", "refuse"]
_MOST_APPROVED = 500


class _Approved(msgspec.Struct):
    """For the user who looks into the file."""

    source: str
    name: str


class Approvals:
    """Remembers approvals: for a chat in memory, for good in `file`.

    One for good is only for a tool that reads, by its source's own word, and ends when the tool changes in any way: a
    server that was harmless when it was approved may not stay so.
    """

    def __init__(self, file: Path) -> None:
        self._cache = JsonCache(file, _Approved, version=1, max_entries=_MOST_APPROVED)
        self._in_chat: set[tuple[str, str]] = set()

    @staticmethod
    def choices(tool: Tool) -> tuple[Choice, ...]:
        """Return what may be chosen for a call of this tool."""
        return ("once", "chat", "always", "refuse") if tool.read_only else ("once", "chat", "refuse")

    def is_approved(self, tool: Tool, chat_id: str) -> bool:
        """Return whether the tool may be called in this chat without asking."""
        if (chat_id, tool.fingerprint) in self._in_chat:
            return True
        return tool.read_only and tool.fingerprint in self._cache.read()

    def remember(self, tool: Tool, chat_id: str, choice: Choice) -> None:
        """Keep what the user chose for a call."""
        if choice == "chat":
            self._in_chat.add((chat_id, tool.fingerprint))
        elif choice == "always" and tool.read_only:
            self._cache.put(tool.fingerprint, _Approved(tool.source, tool.name))

    def forget_all(self) -> None:
        """Ask again before every call."""
        self._in_chat.clear()
        self._cache.update(lambda approved: approved.clear())
