"""Calls of tools in the OpenAI dialect, and in Ollama's, which has arguments as objects."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from cpuchat.protocol import Message
from cpuchat.tool_calls import ToolCall

_MOST_CALLS = 64
_LONGEST = 1 << 20  # characters of a call's arguments


def with_calls(found: dict[str, Any], message: Message, *, as_text: bool) -> dict[str, Any]:
    """Return a message for a server with the calls that it has, or with which call it answers.

    Args:
        as_text: arguments are JSON in a string.
    """
    if message.role == "tool":
        return {**found, "tool_call_id": message.call_id, "name" if as_text else "tool_name": message.tool}
    if not message.calls:
        return found
    return {**found, "tool_calls": [call.declaration(as_text=as_text) for call in message.calls]}


@dataclass(slots=True)
class _Part:
    id: str = ""
    name: str = ""
    text: str = ""
    arguments: dict[str, Any] | None = None


class CallParts:
    """The calls of one answer, from the parts in which a server sends them."""

    def __init__(self) -> None:
        self._parts: dict[int, _Part] = {}

    def add(self, sent: Any) -> None:
        """Take in `tool_calls` of a part of an answer; what is none is left out."""
        if not isinstance(sent, list):
            return
        for number, one in enumerate(sent[:_MOST_CALLS]):
            function = one.get("function") if isinstance(one, dict) else None
            if not isinstance(function, dict):
                continue
            index = one.get("index")
            if not isinstance(index, int):  # whole calls, each with its own
                index = len(self._parts) if function.get("name") else number
            if index not in self._parts and len(self._parts) >= _MOST_CALLS:
                continue
            part = self._parts.setdefault(index, _Part())
            part.id = part.id or _text(one.get("id"))
            part.name = part.name or _text(function.get("name"))
            arguments = function.get("arguments")
            if isinstance(arguments, dict):
                part.arguments = arguments
            elif len(part.text) <= _LONGEST:
                part.text += _text(arguments)

    def calls(self) -> tuple[ToolCall, ...]:
        """Return the calls, in the order in which they began."""
        return tuple(_call(part) for part in self._parts.values() if part.name)


def _call(part: _Part) -> ToolCall:
    arguments: Any = part.arguments
    if arguments is None:
        try:
            arguments = json.loads(part.text) if part.text.strip() else {}
        except (ValueError, RecursionError):
            return ToolCall(name=part.name, id=part.id, problem="The arguments are not valid JSON.")
    if not isinstance(arguments, dict):
        return ToolCall(name=part.name, id=part.id, problem="The arguments are not a JSON object.")
    return ToolCall(name=part.name, id=part.id, arguments=arguments)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
