"""Calls without the marks that the model's chat template asks for: JSON alone, or in a code fence, as Qwen2.5 Coder
writes them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from cpuchat.tool_calls import Tool, ToolCall
from cpuchat.tools.values import json_object

_FENCE = re.compile(r"\s*`{1,3}(?:(?<=```)(?:j(?:s(?:on?)?)?)?\s*)?")  # its end may be missing
_NAME_WITHIN = 200  # characters


def may_begin(text: str, names: Sequence[str]) -> bool:
    """Return whether an answer that begins with `text` may be a call of one of these tools."""
    fence = _FENCE.match(text)
    body = "".join(text[fence.end() if fence is not None else 0 :][:_NAME_WITHIN].split())
    starts = (f'{{"name":"{name}"' for name in names)
    return bool(body or fence) and any(body.startswith(start) or start.startswith(body) for start in starts)


def unmarked_calls(text: str, tools: Sequence[Tool]) -> tuple[str, list[ToolCall]]:
    """Return what an answer says behind the calls with which it begins, and the calls: objects with the name of one of
    these tools and an object of arguments.
    """
    names, calls, at = {tool.name for tool in tools}, list[ToolCall](), 0
    while True:
        value, end = json_object(text, at)
        name, arguments = (value.get("name"), value.get("arguments", {})) if value is not None else ("", {})
        if end < 0 or not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
            return text[at:], calls
        calls.append(ToolCall(name=name, arguments=arguments))
        at = end
