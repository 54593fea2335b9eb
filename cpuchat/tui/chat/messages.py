"""Stored messages in the form that the transcript shows."""

from __future__ import annotations

from cpuchat.chats.records import StoredMessage
from cpuchat.present.answers import summary
from cpuchat.tui.markdown.drafted import Spans
from cpuchat.tui.markdown.message_view import TranscriptMessage


def sent_message(text: str) -> TranscriptMessage:
    """Return a message that the user just sent."""
    return TranscriptMessage(role="user", title="You", content=text)


def stored_message(message: StoredMessage, spans: Spans = ()) -> TranscriptMessage:
    """Convert a stored message. `spans`: the drafter of each part, if known."""
    if message.role == "user":
        return sent_message(message.content)
    return TranscriptMessage(
        role=message.role,
        title=message.model or "Answer",
        content=message.content,
        reasoning=message.reasoning,
        note=summary(message.timings, message.stop_reason or ""),
        spans=spans,
    )
