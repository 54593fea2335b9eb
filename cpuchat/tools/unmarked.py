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
_DOUBLED = re.compile(r"\{(?=\s*\{)")  # the template of Qwen2.5 Coder shows a call in two braces
_DOUBLED_END = re.compile(r"\s*\}?\s*(?:```)?")
_NAME = re.compile(r"[\w.-]{1,64}")
_ANY_NAME = re.compile(r'\{"name":"[\w.-]{1,64}"')
_NAME_BEGINS = re.compile(r'\{"name":"[\w.-]{0,64}')
_ARGUMENTS = ',"arguments":{'


def may_begin(text: str) -> bool:
    """Return whether an answer that begins with `text` may be a call: of a tool that exists or of another."""
    fence = _FENCE.match(text)
    body = "".join(text[fence.end() if fence is not None else 0 :][:_NAME_WITHIN].split())
    body = body[1:] if body.startswith("{{") else body
    if (named := _ANY_NAME.match(body)) is not None:
        rest = body[named.end() :]
        return rest.startswith(_ARGUMENTS) or _ARGUMENTS.startswith(rest)
    return bool(body or fence) and ('{"name":"'.startswith(body) or _NAME_BEGINS.fullmatch(body) is not None)


def unmarked_calls(text: str, tools: Sequence[Tool]) -> tuple[str, list[ToolCall]]:
    """Return what an answer says behind the calls with which it begins, and the calls: objects with the name of one of
    these tools and an object of arguments. One of another name is a call only with nothing beside its arguments.
    """
    names, calls, at = {tool.name for tool in tools}, list[ToolCall](), 0
    while True:
        fence = _FENCE.match(text, at)
        doubled = _DOUBLED.match(text, fence.end() if fence is not None else at)
        value, end = json_object(text, doubled.end() if doubled is not None else at)
        name, arguments = (value.get("name"), value.get("arguments", {})) if value is not None else ("", {})
        if end < 0 or value is None or not isinstance(name, str) or not isinstance(arguments, dict):
            return text[at:], calls
        if name not in names and (set(value) != {"name", "arguments"} or _NAME.fullmatch(name) is None):
            return text[at:], calls
        calls.append(ToolCall(name=name, arguments=arguments))
        after = _DOUBLED_END.match(text, end) if doubled is not None else None
        at = after.end() if after is not None else end
