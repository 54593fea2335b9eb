"""Stored messages in the form that the transcript shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest

from cpuchat.base.text import clean_line
from cpuchat.chats.records import StoredMessage, Tree
from cpuchat.config.presets import Preset
from cpuchat.present.answers import summary
from cpuchat.present.tools import returned, title
from cpuchat.protocol.messages import ToolStep
from cpuchat.tui.chat.figure_sections import fit
from cpuchat.tui.markdown.drafted import Spans
from cpuchat.tui.markdown.message_view import Step, TranscriptMessage

SUMMARY = "Summary of earlier messages"
_GIST = 40  # characters of a folded system prompt


def sent_message(text: str) -> TranscriptMessage:
    """Return a message that the user just sent."""
    return TranscriptMessage(role="user", title="You", content=text)


def attached(message: StoredMessage) -> tuple[tuple[str, str], ...]:
    """Return the titles and texts of what was sent with a message."""
    return tuple((attachment.title, attachment.text) for attachment in message.attachments)


def system_prompt(text: str, preset: Preset | None) -> list[TranscriptMessage]:
    """Return the folded row of a system prompt, which may be that of a preset; nothing for none."""
    if not text.strip():
        return []
    of_preset = preset is not None and preset.system_prompt
    title = f"System prompt of preset {preset.name}" if preset is not None and of_preset else "System prompt"
    title += f": {fit(clean_line(text), _GIST)}"
    return [TranscriptMessage(role="system", title="", content="", attachments=((title, text),))]


def shown_steps(steps: Sequence[ToolStep], *, current: str = "") -> tuple[Step, ...]:
    """Convert what came before an answer. `current` is the state of the first call without a result."""
    found = list[Step]()
    for step in steps:
        calls = list[tuple[str, str | None]]()
        for call, result in zip_longest(step.calls, step.results[: len(step.calls)]):
            if result is not None:
                calls.append((title(call, result), returned(call, result)))
            else:
                calls.append((f"{title(call)} · {current or 'not run'}", None))
                current = ""
        found.append(Step(step.said, step.reasoning, tuple(calls)))
    return tuple(found)


def _reasoning_s(message: StoredMessage) -> float:
    """Return how long the reasoning that is shown took; 0 when it is only a part of all."""
    if message.timings is None or any(step.reasoning for step in message.steps):
        return 0.0
    return message.timings.reasoning_ms / 1e3


def last_turn(messages: list[StoredMessage], tree: Tree) -> list[TranscriptMessage]:
    """Return the last question, and the answer to it if there is one."""
    answered = bool(messages) and messages[-1].role == "assistant"
    return [stored_message(message, tree) for message in (messages[-2:] if answered else messages[-1:])]


def stored_message(message: StoredMessage, tree: Tree, spans: Spans = ()) -> TranscriptMessage:
    """Convert a message of the chat with these branches. `spans`: the drafter of each part, if known."""
    siblings = tree.siblings(message.id)
    place = f"{siblings.index(message.id) + 1}/{len(siblings)}" if len(siblings) > 1 else ""
    if message.role == "user":
        sent = sent_message(message.content)
        return replace(sent, id=message.id, place=place, attachments=attached(message))
    return TranscriptMessage(
        role=message.role,
        title=SUMMARY if message.is_summary else message.model or "Answer",
        content=message.content,
        reasoning=message.reasoning,
        reasoning_s=_reasoning_s(message),
        note=summary(message.timings, message.stop_reason or "", message.sampling, message.default_sampling),
        spans=spans,
        id=message.id,
        place=place,
        steps=shown_steps(message.steps),
    )
