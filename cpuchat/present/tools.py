"""Calls of tools in words."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from cpuchat.telemetry.units import plural
from cpuchat.text import clean, clean_line
from cpuchat.tool_calls import Tool, ToolCall, ToolResult
from cpuchat.tools.approval import Choice

if TYPE_CHECKING:
    from cpuchat.tools.servers import ToolServer

CHOICES: dict[Choice, str] = {
    "refuse": "Refuse",
    "once": "Run once",
    "chat": "Run in this chat",
    "always": "Always run",
}
_LONGEST = 44  # characters of the arguments in a title
_CHARACTERS_PER_TOKEN = 4


def title(call: ToolCall, result: ToolResult | None = None) -> str:
    """Format `read_file(path: notes.md, first_line: 3)`, arguments shortened, and how it failed."""
    shown = ", ".join(f"{key}: {_value(value)}" for key, value in call.arguments.items())
    shown = clean_line(shown)
    shown = shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 1]}…"
    state = "" if result is None or not result.failed else f" · {result.ended or 'failed'}"
    return f"{clean_line(call.name)}({shown}){state}"


def arguments(call: ToolCall) -> str:
    """Return all arguments, one a line; those of several lines are indented below their names."""
    lines = list[str]()
    for key, value in call.arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=2)
        if "\n" in text:
            lines += [f"{clean_line(key)}:", *(f"  {one}" for one in clean(text).splitlines())]
        else:
            lines.append(f"{clean_line(key)}: {clean_line(text)}")
    return "\n".join(lines) or "(no arguments)"


def returned(call: ToolCall, result: ToolResult) -> str:
    """Return what a call returned, below its arguments where `title` does not show all of them."""
    return f"{arguments(call)}\n\n{result.text}" if title(call).endswith("…)") else result.text


def owner(tool: Tool) -> str:
    """Format `server files, says that it only reads`."""
    if not tool.source:
        return "built in, only reads"
    return f"server {clean_line(tool.source)}, {'says that it only reads' if tool.read_only else 'may change things'}"


def server_state(server: ToolServer) -> str:
    """Format `running, 3 tools, about 400 tokens in each prompt`, or why it does not run."""
    if server.problem is not None:
        return server.problem.message.removeprefix(f"The MCP server {server.name} ")
    if server.state != "running":
        return server.state
    n_tokens = sum(len(json.dumps(tool.declaration())) for tool in server.tools) // _CHARACTERS_PER_TOKEN
    cost = f", about {max(round(n_tokens, -2), 100):,} tokens in each prompt" if server.tools else ""
    return f"running, {plural(len(server.tools), 'tool')}{cost}"


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
