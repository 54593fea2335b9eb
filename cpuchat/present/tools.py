"""Calls of tools in words."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cpuchat.telemetry.units import plural
from cpuchat.text import clean_line
from cpuchat.tool_calls import Tool, ToolCall, ToolResult
from cpuchat.tools.approval import Choice
from cpuchat.tools.limits import MOST_TOOLS

if TYPE_CHECKING:
    from cpuchat.tools.servers import ToolServer

CHOICES: dict[Choice, str] = {
    "refuse": "Refuse",
    "once": "Run once",
    "chat": "Always in this chat",
    "always": "Always run",
}
_LONGEST = 44  # characters of the arguments in a title
_CHARACTERS_PER_TOKEN = 4
# Without a form of their own, but letters or marks by their category: fillers and variation selectors.
_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)


def title(call: ToolCall, result: ToolResult | None = None) -> str:
    """Format `read_file(path: notes.md, first_line: 3)`, arguments shortened, and how it failed."""
    shown = ", ".join(f"{key}: {_value(value)}" for key, value in call.arguments.items())
    shown = clean_line(shown)
    shown = shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 1]}…"
    state = "" if result is None or not result.failed else f" · {result.ended or 'failed'}"
    return f"{clean_line(call.name)}({shown}){state}"


def arguments(call: ToolCall) -> str:
    """Return all arguments exactly, one a line; those of several lines are indented below their names."""
    lines = list[str]()
    for key, value in call.arguments.items():
        text = value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False, indent=2)
        name = "␊".join(_exact(one) for one in key.split("\n"))
        if "\n" in text:
            lines += [f"{name}:", *(f"  {_exact(one)}" for one in text.split("\n"))]
        else:
            lines.append(f"{name}: {_exact(text)}")
    return "\n".join(lines) or "(no arguments)"


def _exact(line: str) -> str:
    """Return a line with everything in it visible, also spaces at its end."""
    n_spaces = len(line) - len(line.rstrip(" "))
    shown = "".join(map(_visible, line[: len(line) - n_spaces]))
    return f"{shown}{n_spaces * _code(' ')}"


def _visible(character: str) -> str:
    if character == "\t":
        return "⇥"
    hides = unicodedata.category(character)[0] in "CZ" or _UNSEEN.match(character) is not None
    return _code(character) if hides and character != " " else character


def _code(character: str) -> str:
    return f"‹U+{ord(character):04X}›"


def returned(call: ToolCall, result: ToolResult) -> str:
    """Return what a call returned, below its arguments where `title` does not show all of them."""
    return f"{arguments(call)}\n\n{result.text}" if title(call).endswith("…)") else result.text


def owner(tool: Tool) -> str:
    """Format `server files, says that it only reads`."""
    if not tool.source:
        return "built in, only reads"
    return f"server {clean_line(tool.source)}, {'says that it only reads' if tool.read_only else 'may change things'}"


def server_state(server: ToolServer, offered: Sequence[Tool]) -> str:
    """Format `running, 3 tools, about 400 tokens in each prompt`, or why it does not run.

    Args:
        offered: those of its tools that are offered; where that is not all: `running, 128 of 200 tools, …`.
    """
    if server.problem is not None:
        return server.problem.reason
    if server.state != "running":
        return server.state
    n_tools = plural(len(server.tools), "tool")
    if _has_more(server, offered):
        n_tools = f"{len(offered)} of {'over ' if server.has_more else ''}{n_tools}"
    n_tokens = sum(len(json.dumps(tool.declaration())) for tool in offered) // _CHARACTERS_PER_TOKEN
    cost = f", about {max(round(n_tokens, -2), 100):,} tokens in each prompt" if offered else ""
    return f"running, {n_tools}{cost}"


def left_out(servers: Sequence[tuple[ToolServer, Sequence[Tool]]]) -> str:
    """Return which servers have more tools than are offered, each with those that are; "" if none has."""
    shares = [
        f"{len(offered)} of {'over ' if server.has_more else ''}{len(server.tools)} of server {clean_line(server.name)}"
        for server, offered in servers
        if _has_more(server, offered)
    ]
    return f"At most {MOST_TOOLS} tools are offered: {', '.join(shares)}." if shares else ""


def _has_more(server: ToolServer, offered: Sequence[Tool]) -> bool:
    return server.has_more or len(offered) < len(server.tools)


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
