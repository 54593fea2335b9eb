"""Tools, calls of them and their results, as plain data."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

import msgspec


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool as it is offered to a model.

    `parameters` is the JSON schema of its arguments, `source` names who has it: a server of mcp.json, "" for the
    built-in set. `origin` stands for the command and variables that start the server. `read_only` is what the source
    says of it.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = msgspec.field(default_factory=lambda: {"type": "object", "properties": {}})
    source: str = ""
    origin: str = ""
    read_only: bool = False

    @property
    def fingerprint(self) -> str:
        """Return what an approval for good belongs to: a tool that changes is another one."""
        told = [self.source, self.origin, self.name, self.description, self.parameters, self.read_only]
        return hashlib.sha256(msgspec.json.encode(told, order="sorted")).hexdigest()[:32]

    def declaration(self) -> dict[str, Any]:
        """Return it in the form that chat templates and servers take."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that a model has written. `problem` is why its arguments cannot be used; "" when they can."""

    name: str
    arguments: dict[str, Any] = {}
    id: str = ""
    problem: str = ""

    def __post_init__(self) -> None:
        """Leave out what can be neither sent nor stored: half a surrogate pair, an integer of over 64 bits."""
        try:
            msgspec.msgpack.encode([self.name, self.id, self.arguments])
        except (ValueError, OverflowError, RecursionError):
            for field in ("name", "id"):
                text = getattr(self, field).encode(errors="replace").decode()
                msgspec.structs.force_setattr(self, field, text)
            msgspec.structs.force_setattr(self, "arguments", {})
            msgspec.structs.force_setattr(self, "problem", "The arguments have a value that cannot be sent.")

    def declaration(self, *, as_text: bool) -> dict[str, Any]:
        """Return it in the form that chat templates and servers take; `as_text`: arguments are JSON in a string."""
        arguments = json.dumps(self.arguments, ensure_ascii=False) if as_text else self.arguments
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}}


class ToolResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a call returned, as the model reads it. `failed`: the tool reported an error, or was not run. `ended` is how
    the user kept it from returning anything.
    """

    text: str
    failed: bool = False
    ended: Literal["", "refused", "stopped"] = ""


class ToolStep(msgspec.Struct, frozen=True, kw_only=True):
    """What a model wrote on the way to an answer: what it said, its calls, and a result for each that was made."""

    said: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    results: tuple[ToolResult, ...] = ()
