"""Reads LM Studio's conversations: `conversations/*.conversation.json` in its folder.

Messages are in a line; each has versions, which become branches, and the chat goes on with the selected one. An answer
has steps: its texts and reasoning are taken, the calls and results of tools are left out. Images and files leave a mark
in brackets.
"""

from __future__ import annotations

from typing import Any

import msgspec

from cpuchat.chats.transfer.branches import imported_chat, paragraphs
from cpuchat.chats.transfer.portable import PortableChat, PortableMessage
from cpuchat.timings import Timings

_STOP_REASONS = {
    "userStopped": "cancelled",
    "maxPredictedTokensReached": "max_tokens",
    "contextLengthReached": "context",
    "stopStringFound": "stop_string",
}


class _Part(msgspec.Struct):
    type: str = "text"
    text: str | None = None
    name: str | None = None


class _Style(msgspec.Struct):
    type: str = ""


class _Stats(msgspec.Struct, rename="camel"):
    stop_reason: str | None = None
    tokens_per_second: float | None = None
    time_to_first_token_sec: float | None = None
    prompt_tokens_count: float | None = None
    predicted_tokens_count: float | None = None


class _Generation(msgspec.Struct, rename="camel"):
    identifier: str | None = None
    stats: _Stats | None = None


class _Step(msgspec.Struct, rename="camel"):
    type: str = ""
    content: list[_Part] | None = None
    style: _Style | None = None
    gen_info: _Generation | None = None


class _Sender(msgspec.Struct, rename="camel"):
    sender_name: str | None = None


class _Version(msgspec.Struct, rename="camel"):
    role: str = ""
    content: list[_Part] | str | None = None
    steps: list[_Step] | None = None
    sender_info: _Sender | None = None


class _Message(msgspec.Struct, rename="camel"):
    versions: list[_Version]
    currently_selected: int = 0


class _Model(msgspec.Struct):
    identifier: str | None = None


class _Field(msgspec.Struct):
    key: str = ""
    value: Any = None


class _Config(msgspec.Struct):
    fields: list[_Field] | None = None


class Conversation(msgspec.Struct, rename="camel"):
    """One conversation, as far as it is read. Times in milliseconds."""

    messages: list[_Message]
    name: str | None = None
    created_at: float | None = None
    user_last_messaged_at: float | None = None
    assistant_last_messaged_at: float | None = None
    system_prompt: str | None = None
    last_used_model: _Model | None = None
    per_chat_prediction_config: _Config | None = None


def read(value: object) -> PortableChat:
    """Return a conversation as a chat. Raises msgspec.ValidationError."""
    one = msgspec.convert(value, Conversation)
    created = (one.created_at or 0.0) / 1e3
    messages: list[PortableMessage] = []
    system: list[str] = [one.system_prompt or ""]
    parent = 0
    for message in one.messages:
        below = parent
        for index, version in enumerate(message.versions):
            if version.role == "system":
                system.append(_text(version.content))
            elif said := _portable(version, created):
                messages.append(msgspec.structs.replace(said, id=len(messages) + 1, parent=parent))
                if index == message.currently_selected or below == parent:
                    below = len(messages)
        parent = below
    fields = one.per_chat_prediction_config.fields or [] if one.per_chat_prediction_config is not None else []
    system += [str(one.value or "") for one in fields if one.key == "llm.prediction.systemPrompt"]
    updated = max(one.user_last_messaged_at or 0.0, one.assistant_last_messaged_at or 0.0) / 1e3
    return imported_chat(
        messages, parent or None, title=one.name, created=created, updated=updated,
        model=(one.last_used_model.identifier or "") if one.last_used_model is not None else "",
        system_prompt=next(filter(str.strip, system), ""),
    )  # fmt: skip


def _portable(version: _Version, created: float) -> PortableMessage | None:
    if version.role == "user":
        return PortableMessage(role="user", content=_text(version.content), created=created)
    if version.role != "assistant":
        return None
    steps = [step for step in version.steps or [] if step.type == "contentBlock"]
    thought = [step for step in steps if _is_thought(step)]
    generations = [step.gen_info for step in steps if step.gen_info is not None]
    last = generations[-1] if generations else _Generation()
    sender = version.sender_info.sender_name if version.sender_info is not None else None
    stats = last.stats or _Stats()
    return PortableMessage(
        role="assistant",
        content=paragraphs([_text(version.content), *(_text(step.content) for step in steps if not _is_thought(step))]),
        reasoning=paragraphs(_text(step.content) for step in thought),
        model=last.identifier or sender or "",
        stop_reason=_STOP_REASONS.get(stats.stop_reason or "", "end"),
        timings=_timings(stats),
        created=created,
    )


def _is_thought(step: _Step) -> bool:
    return step.style is not None and step.style.type == "thinking"


def _text(content: list[_Part] | str | None) -> str:
    """Join the parts: a text may come in one for each token."""
    if not isinstance(content, list):
        return content or ""
    text = "".join(part.text or "" for part in content if part.type == "text")
    files = [f"[{part.name or part.type}]" for part in content if part.type in ("file", "image")]
    return paragraphs([text, *files])


def _timings(stats: _Stats) -> Timings | None:
    if not stats.predicted_tokens_count:
        return None
    n = int(stats.predicted_tokens_count)
    first_ms = 1e3 * (stats.time_to_first_token_sec or 0.0)
    rate = stats.tokens_per_second or 0.0
    return Timings(
        prompt_n=int(stats.prompt_tokens_count or 0),
        prompt_ms=first_ms,
        predicted_n=n,
        predicted_ms=1e3 * (n - 1) / rate if rate > 0 else 0.0,
        ttft_ms=first_ms,
        reused_known=False,
    )
