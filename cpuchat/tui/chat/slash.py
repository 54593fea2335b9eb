"""Slash commands: what the command palette has for the chat, typed into the prompt."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from textual.screen import Screen

from cpuchat.tui.commands import offered

ACTIONS = {
    "/rename": "rename_chat", "/preset": "preset", "/reasoning": "chat_reasoning", "/system-prompt": "system_prompt",
    "/tools": "tools",
}  # fmt: skip
"""Of the commands that take an argument, which it is for."""
FORMER = {"/again": "/regenerate"}
"""Names by the ids of keys that still work, with those that the plain chat has, too."""
_BEGUN = re.compile(r"/[a-z-]*")
_WITH_ARGUMENT = re.compile(rf"({'|'.join(ACTIONS)}) +(\S.*)")

running_command: ContextVar[str] = ContextVar("running_command", default="")
"""The command that started what runs in this context, as it was typed."""


def is_command(text: str) -> bool:
    """Return whether a message is nothing but a command, known or not, whole or not."""
    return _BEGUN.fullmatch(text) is not None


def with_argument(text: str) -> tuple[str, str] | None:
    """Return name and argument of a command that takes one: `/rename Regex for dates`."""
    match = _WITH_ARGUMENT.fullmatch(text)
    return None if match is None else (match[1], match[2])


def commands(screen: Screen[Any]) -> dict[str, tuple[str, Callable[[], Any]]]:
    """Return what can be done now, by name (`/copy-code`): its title, and what does it."""
    named = ((f"/{key.id.partition('.')[2].replace('_', '-')}", title, run) for key, title, run in offered(screen))
    return {FORMER.get(name, name): (title, run) for name, title, run in named}


def matching(typed: str, titles: dict[str, str]) -> list[str]:
    """Return the names that continue `typed`, then those with a word of the title that does."""
    begun = [name for name in titles if name.startswith(typed)]
    word = typed.removeprefix("/")
    named = [name for name, title in titles.items() if any(one.startswith(word) for one in title.lower().split())]
    return list(dict.fromkeys([*begun, *named]))
