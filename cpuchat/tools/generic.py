"""Calls of tools for models whose chat template knows none: described in the system prompt, written as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec

from cpuchat.protocol import Message
from cpuchat.tool_calls import Tool, ToolCall
from cpuchat.tools.call_format import CallFormat

GENERIC = CallFormat(shape="object", opening="<tool_call>\n", closing="\n</tool_call>", between="\n")
"""Models that were trained on it, and many that were not, know this form from Hermes and Qwen."""


def as_text(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Return the messages with calls and their results as text, after a description of the tools."""
    found = list[Message]()
    for message in messages:
        if message.role == "tool":
            text = f"<tool_response>\n{message.content}\n</tool_response>"
            if found and found[-1].role == "user" and found[-1].tool:
                text = f"{found.pop().content}\n{text}"
            found.append(Message(role="user", content=text, tool=message.tool or "-"))
        elif message.calls:
            content = "\n".join(filter(None, (message.content, *map(_written, message.calls))))
            found.append(msgspec.structs.replace(message, content=content, calls=()))
        else:
            found.append(message)
    if not tools:
        return found
    about = _description(tools)
    if found and found[0].role == "system":
        about = f"{found.pop(0).content}\n\n{about}"
    return [Message(role="system", content=about), *found]


def _written(call: ToolCall) -> str:
    body = {"name": call.name, "arguments": call.arguments}
    return f"{GENERIC.opening}{json.dumps(body, ensure_ascii=False)}{GENERIC.closing}"


def _description(tools: Sequence[Tool]) -> str:
    listed = "\n".join(json.dumps(tool.declaration()["function"], ensure_ascii=False) for tool in tools)
    return (
        "You can call these tools, each given with the JSON schema of its arguments:\n"
        f"{listed}\n\n"
        "To call one, write nothing but this, and you will get its result:\n"
        '<tool_call>\n{"name": "the tool", "arguments": {"argument": "value"}}\n</tool_call>'
    )
