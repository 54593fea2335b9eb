"""How events and stored messages read on the screen. Plain functions, no widgets."""

from __future__ import annotations

from textual.content import Content

from cpuchat.chats.records import StoredMessage
from cpuchat.present import answers
from cpuchat.text import clean_line
from cpuchat.tui.markdown.drafted import Spans
from cpuchat.tui.markdown.transcript import TranscriptMessage


def mine(text: str) -> TranscriptMessage:
    """A message that the user just sent."""
    return TranscriptMessage(role="user", title="You", content=text)


def of_stored(message: StoredMessage, spans: Spans = ()) -> TranscriptMessage:
    """A message of the store as the transcript shows it; `spans` tell who proposed which part, if that is known."""
    if message.role == "user":
        return mine(message.content)
    return TranscriptMessage(
        role=message.role,
        title=message.model or "Answer",
        content=message.content,
        reasoning=message.reasoning,
        note=answers.summary(message.timings, message.stop_reason or ""),
        spans=spans,
    )


def prompt_titles(queued: str, editing: bool, busy: bool, loading: bool) -> tuple[Content | str, str]:
    """What stands above and below the prompt; `queued` is the message that waits for the model, "" for none."""
    if queued:
        return Content(f"Sent when the model is ready: {clean_line(queued)}"), "Esc takes it back"
    if editing:
        return "Editing my last message", "Enter replaces it and what followed · Esc leaves it"
    if busy:
        return "Message", "Enter sends when the model is ready" if loading else "Esc stops the answer"
    return "Message", "Enter sends · Ctrl+J new line"
