"""Reads ChatGPT's data export: `conversations.json`, a list of conversations whose messages are a tree.

Texts, code that was run and its output, and the summaries of reasoning are taken; images and files leave a mark in
brackets. What ChatGPT hides, such as custom instructions and the results of its other tools, is left out.
"""

from __future__ import annotations

from typing import Any

import msgspec

from cpuchat.chats.transfer.branches import Node, branches, imported_chat, paragraphs
from cpuchat.chats.transfer.portable import PortableChat, PortableMessage


class _Author(msgspec.Struct):
    role: str = ""


class _Thought(msgspec.Struct):
    summary: str | None = None
    content: str | None = None


class _Content(msgspec.Struct):
    content_type: str = "text"
    parts: list[Any] | None = None
    text: str | None = None
    language: str | None = None
    thoughts: list[_Thought] | None = None


class _Message(msgspec.Struct):
    author: _Author
    content: _Content
    create_time: float | None = None
    metadata: dict[str, Any] | None = None
    recipient: str | None = None


class _Node(msgspec.Struct):
    message: _Message | None = None
    parent: str | None = None


class Conversation(msgspec.Struct):
    """One conversation, as far as it is read."""

    mapping: dict[str, _Node]
    title: str | None = None
    create_time: float | None = None
    update_time: float | None = None
    current_node: str | None = None
    default_model_slug: str | None = None


def read(value: object) -> PortableChat:
    """Return a conversation of the export as a chat. Raises msgspec.ValidationError."""
    one = msgspec.convert(value, Conversation)
    nodes = {key: _node(node) for key, node in one.mapping.items()}
    messages, leaf = branches(nodes, one.current_node)
    system = (
        node.message.content for node in one.mapping.values()
        if node.message is not None and node.message.author.role == "system" and not _is_hidden(node.message)
    )  # fmt: skip
    return imported_chat(
        messages, leaf, title=one.title, created=one.create_time or 0.0, updated=one.update_time or 0.0,
        model=one.default_model_slug or "", system_prompt=paragraphs(map(_text, system)),
    )  # fmt: skip


def _is_hidden(message: _Message) -> bool:
    return bool((message.metadata or {}).get("is_visually_hidden_from_conversation"))


def _node(node: _Node) -> Node:
    message = node.message
    if message is None:
        return Node(node.parent, None)
    created = message.create_time or 0.0
    role = message.author.role
    is_output = role == "tool" and message.content.content_type == "execution_output"
    is_said = role in ("user", "assistant") and message.recipient in (None, "all", "python")
    if _is_hidden(message) or not (is_said or is_output):
        return Node(node.parent, None, created)
    content, reasoning = _text(message.content), _reasoning(message.content)
    if not (content or reasoning):
        return Node(node.parent, None, created)
    if role == "user":
        return Node(node.parent, PortableMessage(role="user", content=content, created=created), created)
    slug = (message.metadata or {}).get("model_slug")
    answer = PortableMessage(
        role="assistant", content=content, reasoning=reasoning, model=slug if isinstance(slug, str) else "",
        stop_reason="end", created=created,
    )  # fmt: skip
    return Node(node.parent, answer, created)


def _text(content: _Content) -> str:
    match content.content_type:
        case "text" | "multimodal_text":
            return paragraphs(map(_part, content.parts or []))
        case "code":
            language = "" if content.language in (None, "unknown") else content.language
            return f"```{language}\n{content.text or ''}\n```" if content.text else ""
        case "execution_output":
            return f"```\n{content.text}\n```" if content.text else ""
        case _:
            return ""


def _part(part: object) -> str:
    match part:
        case str():
            return part
        case {"text": str(text)}:
            return text
        case {"content_type": str(kind)}:
            return f"[{kind.partition('_')[0]}]"
        case _:
            return ""


def _reasoning(content: _Content) -> str:
    return paragraphs(text or "" for one in content.thoughts or [] for text in (one.summary, one.content))
