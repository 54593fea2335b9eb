"""Formats stored chats: rows of a list, and a chat as Markdown."""

from __future__ import annotations

import html
import json
import time
from collections.abc import Sequence
from pathlib import Path

from cpuchat.chats.records import Attachment, Chat
from cpuchat.chats.request import fenced
from cpuchat.chats.transfer.importing import Imported
from cpuchat.chats.transfer.portable import PortableChat, PortableMessage, encoded
from cpuchat.present.answers import summary
from cpuchat.presets import effective_system_prompt
from cpuchat.telemetry.units import plural
from cpuchat.text import clean, clean_line
from cpuchat.tool_calls import ToolStep

SHORT_ID = 8
"""Characters of a chat's id that are shown."""
HEADINGS = ("ID", "UPDATED", "MESSAGES", "MODEL", "TITLE")


def when(seconds: float) -> str:
    """Format a time since the epoch as local time: `2026-11-23 02:36`."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def row(chat: Chat, n_messages: int) -> tuple[str, ...]:
    """Return the cells of a chat under `HEADINGS`."""
    model = "comparison" if chat.sides else chat.model
    return chat.id[:SHORT_ID], when(chat.updated), f"{n_messages:,}", model, chat.title or "New chat"


def document(chats: Sequence[PortableChat], file: Path) -> bytes:
    """Return what to write to `file`: Markdown if its name ends in .md, else the JSON of an export."""
    if file.suffix.lower() in (".md", ".markdown"):
        return "\n".join(map(markdown, chats)).encode()
    return encoded(chats)


def markdown(chat: PortableChat) -> str:
    """Return the open branch of a chat as a document: figures under the answers, reasoning as a quote before them,
    attachments folded before their messages.
    """
    messages = chat.branch
    facts = [clean_line(chat.model), when(chat.updated), plural(len(messages), "message")]
    parts = [f"# {clean_line(chat.title) or 'New chat'}", f"*{' · '.join(filter(None, facts))}*"]
    if system_prompt := clean(effective_system_prompt(chat.system_prompt, chat.preset)).strip():
        parts += ["## System prompt", system_prompt]
    tree = chat.tree
    for message in messages:
        parts += _message(message, tree.siblings(message.id))
    return "\n\n".join(parts) + "\n"


def _message(message: PortableMessage, siblings: list[int]) -> list[str]:
    system = "Summary" if message.model else "System"
    speaker = {"user": "You", "system": system}.get(message.role) or clean_line(message.model) or "Answer"
    place = f" ({siblings.index(message.id) + 1} of {len(siblings)})" if len(siblings) > 1 else ""
    reasoning = clean(message.reasoning).strip()
    used = message.settings
    defaults = used and used.default_sampling
    note = summary(message.timings, message.stop_reason or "", used and used.sampling, defaults)
    parts = [
        f"## {speaker}{place}",
        "\n".join(f"> {line}".rstrip() for line in reasoning.splitlines()),
        *map(_attachment, message.attachments),
        *(part for step in message.steps for part in _step(step)),
        clean(message.content).strip("\n"),
        f"*{clean_line(note)}*" if note else "",
    ]
    return [part for part in parts if part]


def _attachment(attachment: Attachment) -> str:
    """Return an attachment folded, as Markdown viewers show it."""
    title = html.escape(clean_line(attachment.title), quote=False)
    return f"<details><summary>{title}</summary>\n\n{fenced(clean(attachment.text))}\n\n</details>"


def _step(step: ToolStep) -> list[str]:
    """Return calls of tools, each folded with its result."""
    parts = [clean(step.said).strip("\n")]
    for call, result in zip(step.calls, step.results, strict=False):
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        text = f"{arguments}\n\n{result.text}"
        parts.append(_attachment(Attachment(title=f"{call.name}{' (failed)' if result.failed else ''}", text=text)))
    return parts


def imported(done: Imported, source: str) -> str:
    """Format `12 chats added from ChatGPT, 3 already here, 1 without messages.`"""
    parts = [f"{plural(len(done.added), 'chat')} added from {source}"]
    parts += [f"{done.known:,} already here"] if done.known else []
    parts += [f"{done.empty:,} without messages"] if done.empty else []
    return ", ".join(parts) + "."
