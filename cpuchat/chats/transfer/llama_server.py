"""Reads the exports of llama-server's web UI.

One JSON object per line, a session and its messages, which are a tree; before that one JSON document with `conv` and
`messages`, or a list of these; at first a conversation with a plain list of messages. The content of attached texts
is taken, other files leave a mark in brackets. The results of tools are left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from cpuchat.chats.transfer.branches import Node, branches, imported_chat, paragraphs
from cpuchat.chats.transfer.portable import PortableChat, PortableMessage
from cpuchat.timings import Timings

_REASONING = "<<<reasoning_content_start>>>", "<<<reasoning_content_end>>>"
_TOOL_CALLS = "<<<AGENTIC_TOOL_CALL_START>>>", "<<<AGENTIC_TOOL_CALL_END>>>"

_Key = str | int


class _Timings(msgspec.Struct):
    cache_n: float | None = None
    prompt_n: float | None = None
    prompt_ms: float | None = None
    predicted_n: float | None = None
    predicted_ms: float | None = None


class _Extra(msgspec.Struct):
    type: str = ""
    name: str = ""
    content: str | None = None


class _Message(msgspec.Struct, rename="camel"):
    role: str
    content: str | None = None
    id: _Key | None = None
    parent: _Key | None = None
    type: str | None = None
    timestamp: float | None = None
    thinking: str | bool | None = None
    reasoning_content: str | None = None
    model: str | None = None
    timings: _Timings | None = None
    extra: list[_Extra] | None = None


class _Conversation(msgspec.Struct, rename="camel"):
    name: str | None = None
    last_modified: float | None = None
    curr_node: _Key | None = None


class _Export(msgspec.Struct):
    conv: _Conversation
    messages: list[_Message]


def sessions(records: Iterable[object]) -> list[object]:
    """Return the conversations of an export with one record per line, as `read` takes them."""
    found: list[Any] = []
    for record in records:
        match record:
            case {"type": "session"}:
                found.append({"conv": record, "messages": []})
            case {"type": "message", "message": message} if found:
                found[-1]["messages"].append(message)
            case _:
                pass  # of a later version
    return found


def read(value: object) -> PortableChat:
    """Return a conversation of the export as a chat. Raises msgspec.ValidationError."""
    if isinstance(value, dict) and "conv" not in value:
        value = {"conv": {name: value.get(name) for name in ("name", "lastModified")}, "messages": value["messages"]}
    one = msgspec.convert(value, _Export)
    nodes: dict[str, Node] = {}
    system: list[str] = []
    before: str | None = None
    for number, message in enumerate(one.messages):
        key = f"{number}." if message.id is None else str(message.id)
        is_linear = message.parent is None and message.type != "root"
        created = (message.timestamp or 0.0) / 1e3
        nodes[key] = Node(before if is_linear else str(message.parent), _portable(message, created), created)
        before = key
        if message.role == "system" and message.type != "root":
            system.append(message.content or "")
    current = None if one.conv.curr_node is None else str(one.conv.curr_node)
    messages, leaf = branches(nodes, current)
    times = [node.created for node in nodes.values() if node.created]
    updated = (one.conv.last_modified or 0.0) / 1e3
    return imported_chat(
        messages, leaf, title=one.conv.name, system_prompt=next(filter(str.strip, system), ""),
        created=min(times, default=updated), updated=updated or max(times, default=0.0),
    )  # fmt: skip


def _portable(message: _Message, created: float) -> PortableMessage | None:
    content = message.content or ""
    if message.type == "root" or message.role not in ("user", "assistant"):
        return None
    if message.role == "user":
        text = paragraphs([content, *map(_attachment, message.extra or [])])
        return PortableMessage(role="user", content=text, created=created)
    said, inline = _divided(content, *_REASONING)
    *before_calls, last = _divided("".join(said), *_TOOL_CALLS)[0]
    thinking = message.thinking if isinstance(message.thinking, str) else ""
    return PortableMessage(
        role="assistant",
        content="".join([*(text.rstrip("\n") for text in before_calls), last]).strip("\n"),
        reasoning=message.reasoning_content or thinking or paragraphs(inline),
        model=message.model or "",
        stop_reason="end",
        timings=_timings(message.timings),
        created=created,
    )


def _divided(text: str, opening: str, closing: str) -> tuple[list[str], list[str]]:
    """Return the parts outside of the marks, one more than there are inside of them, and those inside.

    Linear in the length of the text, whatever its marks; a regular expression is not.
    """
    outside, inside, at = [], [], 0
    while (opened := text.find(opening, at)) >= 0 and (closed := text.find(closing, opened + len(opening))) >= 0:
        outside.append(text[at:opened])
        inside.append(text[opened + len(opening) : closed])
        at = closed + len(closing)
    return [*outside, text[at:]], inside


def _attachment(extra: _Extra) -> str:
    if extra.content:
        return f"{extra.name}:\n```\n{extra.content}\n```"
    return f"[{extra.name or extra.type}]"


def _timings(told: _Timings | None) -> Timings | None:
    """Return the figures; the first token is taken to come when the prompt is read."""
    if told is None or not told.predicted_n:
        return None
    return Timings(
        cache_n=int(told.cache_n or 0),
        prompt_n=int(told.prompt_n or 0),
        prompt_ms=told.prompt_ms or 0.0,
        predicted_n=int(told.predicted_n),
        predicted_ms=told.predicted_ms or 0.0,
        ttft_ms=told.prompt_ms or 0.0,
    )
