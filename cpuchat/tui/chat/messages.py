"""Stored messages in the form that the transcript shows."""

from __future__ import annotations

from dataclasses import replace

from cpuchat.chats.records import StoredMessage
from cpuchat.chats.tree import Tree
from cpuchat.present.answers import summary
from cpuchat.tui.markdown.drafted import Spans
from cpuchat.tui.markdown.message_view import TranscriptMessage


def sent_message(text: str) -> TranscriptMessage:
    """Return a message that the user just sent."""
    return TranscriptMessage(role="user", title="You", content=text)


def attached(message: StoredMessage) -> tuple[tuple[str, str], ...]:
    """Return the titles and texts of what was sent with a message."""
    return tuple((attachment.title, attachment.text) for attachment in message.attachments)


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
        title="Summary of what comes before" if message.is_summary else message.model or "Answer",
        content=message.content,
        reasoning=message.reasoning,
        note=summary(message.timings, message.stop_reason or "", message.sampling, message.default_sampling),
        spans=spans,
        id=message.id,
        place=place,
    )
