"""Calls of tools in words."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cpuchat.base.text import clean_line, cut
from cpuchat.protocol.messages import Tool, ToolCall, ToolResult
from cpuchat.telemetry.units import plural
from cpuchat.tools.config import MAX_TOOLS
from cpuchat.tools.loop import Choice

if TYPE_CHECKING:
    from cpuchat.tools.servers import ToolServer

CHOICES: dict[Choice, str] = {"refuse": "Refuse", "once": "Run once", "chat": "Always in this chat"}
LONGEST_NAME = 64  # characters
_LONGEST = 44  # characters of the arguments in a title
_MAX_SPACES = 8  # in a row that are shown as they are
_MANY_SPACES = re.compile(rf" {{{_MAX_SPACES + 1},}}")
_LIKE_ARGUMENTS = re.compile(r"[,:]\s")  # in a title: quoted
_CHARACTERS_PER_TOKEN = 4
# Without a form of their own, but letters or marks by their category: fillers and variation selectors.
_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)


def title(call: ToolCall, result: ToolResult | None = None) -> str:
    """Format `read_file(path: notes.md, first_line: 3)`, arguments shortened, and how it failed."""
    state = "" if result is None or not result.failed else f" · {result.ended or 'failed'}"
    return f"{shown_name(call.name)}({cut(_arguments_line(call), _LONGEST)}){state}"


def _arguments_line(call: ToolCall) -> str:
    def shown(value: Any) -> str:
        is_plain = isinstance(value, str) and _LIKE_ARGUMENTS.search(value) is None
        return value if is_plain else json.dumps(value, ensure_ascii=False)

    return clean_line(", ".join(f"{key}: {shown(value)}" for key, value in call.arguments.items()))


def shown_name(name: str) -> str:
    """Return the name of a tool, in one line of at most LONGEST_NAME characters."""
    return cut(clean_line(name), LONGEST_NAME)


def arguments(call: ToolCall, width: int = 0) -> str:
    """Return all arguments exactly, below a line with all their names if there are several; those of one row first.

    A row that begins with `│` is a further line of the argument above it, one with `┊` the rest of a row that is longer
    than `width` cells (0: none is): text in an argument cannot look like another argument."""
    shown = [_argument(key, value, width) for key, value in call.arguments.items()]
    rows = [row for one in sorted(shown, key=lambda one: len(one) > 1) for row in one]
    if len(shown) > 1:
        rows = _folded(f"{len(shown)} arguments: {', '.join(map(_name, call.arguments))}", width) + rows
    return "\n".join(rows) or "(no arguments)"


def _argument(key: str, value: Any, width: int) -> list[str]:
    text = value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False, indent=2)
    lines = [_exact(line) for line in text.split("\n")]
    rows = [f"{_name(key)}: {lines[0]}"] if len(lines) == 1 else [f"{_name(key)}:", *(f"│ {line}" for line in lines)]
    return [part for row in rows for part in _folded(row, width)]


def _name(key: str) -> str:
    return "␊".join(_exact(one) for one in key.split("\n")).replace(":", _code(":")).replace(",", _code(","))


def _folded(row: str, width: int) -> list[str]:
    """Cut a row into parts of at most `width` cells, but for 0; a combining character counts as one."""
    parts, begin, used = list[str](), 0, 0
    for at, character in enumerate(row if width else ""):
        cells = 2 if unicodedata.east_asian_width(character) in "WF" else 1
        if used + cells > width - (2 if parts else 0):
            parts.append(row[begin:at])
            begin, used = at, 0
        used += cells
    first, *others = *parts, row[begin:]
    return [first, *(f"┊ {part}" for part in others)]


def _exact(line: str) -> str:
    """Return a line with everything in it visible, also spaces at its end and many in a row."""
    n_spaces = len(line) - len(line.rstrip(" "))
    shown = "".join(map(_visible, line[: len(line) - n_spaces]))
    end = n_spaces * (_code(" ") if n_spaces <= _MAX_SPACES else " ")
    return _MANY_SPACES.sub(lambda found: f"‹{len(found[0])} spaces›", shown + end)


def _visible(character: str) -> str:
    if character == "\t":
        return "⇥"
    hides = unicodedata.category(character)[0] in "CZ" or _UNSEEN.match(character) is not None
    return _code(character) if hides and character != " " else character


def _code(character: str) -> str:
    return f"‹U+{ord(character):04X}›"


def returned(call: ToolCall, result: ToolResult) -> str:
    """Return what a call returned, below its arguments where `title` does not show all of them."""
    return f"{arguments(call)}\n\n{result.text}" if len(_arguments_line(call)) > _LONGEST else result.text


def owner(tool: Tool) -> str:
    """Format `server files, says that it only reads; it gets these arguments`: one that fetches can pass them on."""
    does = "says that it only reads" if tool.read_only else "may change things"
    return f"server {clean_line(tool.source)}, {does}; it gets these arguments"


def server_state(server: ToolServer, offered: Sequence[Tool]) -> str:
    """Format `running, 3 tools, about 400 tokens in each prompt`, or why it does not run. `offered`: those of its tools
    that are offered; where that is not all: `running, 128 of 200 tools, …`."""
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
    return f"At most {MAX_TOOLS} tools are offered: {', '.join(shares)}." if shares else ""


def _has_more(server: ToolServer, offered: Sequence[Tool]) -> bool:
    return server.has_more or len(offered) < len(server.tools)
