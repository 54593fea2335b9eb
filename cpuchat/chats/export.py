"""A chat as a Markdown file."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from cpuchat.chats.records import Chat, StoredMessage
from cpuchat.timings import Timings


def to_markdown(chat: Chat, messages: Sequence[StoredMessage]) -> str:
    """The whole chat: a heading per message, the message's own Markdown as it is, reasoning in a folded block."""
    lines = [f"# {_line(chat.title) or 'Chat'}", ""]
    lines += [f"*{_time(chat.created)}{f' · {_line(chat.model)}' if chat.model else ''}*", ""]
    if chat.system_prompt:
        lines += ["## System", "", chat.system_prompt.strip(), ""]
    for message in messages:
        lines += [f"## {_who(message)}", ""]
        if message.reasoning.strip():
            lines += ["<details><summary>Reasoning</summary>", "", message.reasoning.strip(), "", "</details>", ""]
        lines += [_closed(message.content.strip()), ""]
        note = " · ".join(filter(None, (_figures(message.timings), _ending(message))))
        if note:
            lines += [f"*{note}*", ""]
    return "\n".join(lines)


def file_name(chat: Chat) -> str:
    """A name that every file system takes, from the day and the title."""
    words = re.sub(r"[^\w]+", "-", chat.title.lower()).strip("-")[:60].rstrip("-")
    return f"{time.strftime('%Y-%m-%d', time.localtime(chat.created))}-{words or 'chat'}.md"


def _who(message: StoredMessage) -> str:
    if message.role == "user":
        return "You"
    return "System" if message.role == "system" else _line(message.model) or "Answer"


def _ending(message: StoredMessage) -> str:
    if message.role != "assistant" or message.stop_reason in ("end", "stop_string"):
        return ""
    return f"ended: {(message.stop_reason or 'still being written').replace('_', ' ')}"


def _figures(timings: Timings | None) -> str:
    if timings is None or not timings.predicted_n:
        return ""
    rate = timings.predicted_per_second
    return f"{timings.predicted_n} tokens" + (f" at {rate:.1f} tok/s" if rate is not None else "")


def _closed(text: str) -> str:
    """Close a code fence that an interrupted answer left open, so that it does not swallow what follows."""
    fence = ""
    for line in text.splitlines():
        mark = re.match(r" {0,3}(`{3,}|~{3,})(.*)", line)
        if mark is None:
            continue
        if not fence:
            fence = mark[1]
        elif mark[1].startswith(fence) and not mark[2].strip():
            fence = ""
    return f"{text}\n{fence}" if fence else text


def _line(text: str) -> str:
    return " ".join(text.split())


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
