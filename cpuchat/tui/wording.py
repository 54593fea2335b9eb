"""How events and stored messages read on the screen. Plain functions, no widgets."""

from __future__ import annotations

import datetime

from textual.content import Content

from cpuchat.chats.records import StoredMessage
from cpuchat.protocol import ContextTrimmed, Failed, LoadProgress, PrefillProgress, Timings
from cpuchat.telemetry import units
from cpuchat.telemetry.units import size as size
from cpuchat.text import clean_line
from cpuchat.tui.markdown.drafted import Spans
from cpuchat.tui.markdown.transcript import TranscriptMessage

# Only ends that the reader might wonder about get words; an answer that is simply complete gets none.
_STOPS = {
    "end": "",
    "": "",
    "stop_string": "stop string",
    "max_tokens": "token limit reached (F2)",
    "context": "context full",
    "cancelled": "stopped",
    "worker_died": "worker died",
}
_PHASES = {"reading": "reading the file", "preparing": "preparing"}
_CALIBRATING = "calibrating speculation for this model · Esc skips"


def plural(count: int, thing: str) -> str:
    """`1 message`, `1,203 tokens`."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def count(number: int) -> str:
    """How often something was fetched, in at most five characters: `950`, `12.3k`, `1.2M`."""
    if number < 1000:
        return str(number)
    value, unit = (number / 1e6, "M") if number >= 999_500 else (number / 1e3, "k")
    return f"{value:.0f}{unit}" if value >= 99.95 else f"{value:.1f}{unit}"


def ago(then: float, now: float) -> str:
    """When that was, both in seconds since 1970: `today`, `yesterday`, `12 days ago`; `never` for 0."""
    if not then:
        return "never"
    days = (datetime.date.fromtimestamp(now) - datetime.date.fromtimestamp(then)).days
    return "today" if days <= 0 else "yesterday" if days == 1 else f"{days:,} days ago"


def loading(name: str, event: LoadProgress) -> str:
    """State line of a load; the percentage moves, the words keep their width."""
    share = f"{min(100, 100 * event.done // event.total):3d} %" if event.total > 0 else ""
    if event.phase == "calibrating":
        return f"{_CALIBRATING} {share}".rstrip()
    return f"loading {name} · {_PHASES.get(event.phase, event.phase)} {share}".rstrip()


def prefill(event: PrefillProgress) -> str:
    """What stands where the answer will come."""
    reused = f", {event.cache_n:,} remembered" if event.cache_n else ""
    return f"reading the prompt · {event.processed:,} of {plural(event.total, 'token')}{reused}"


def trimmed(event: ContextTrimmed) -> str:
    one = event.dropped_messages == 1
    what = "message" if one else f"{event.dropped_messages:,} messages"
    return (
        f"The oldest {what} ({plural(event.dropped_tokens, 'token')}) no longer {'fits' if one else 'fit'} the "
        f"{event.n_ctx:,}-token context and {'was' if one else 'were'} left out; "
        f"{'it stays' if one else 'they stay'} in the chat."
    )


def left_out(event: ContextTrimmed) -> str:
    """The same in a few words, for the line under the answer."""
    return f"without the oldest {plural(event.dropped_messages, 'message')}"


def stopped(stop_reason: str) -> str:
    """Why an answer ended, in words; "" when it is simply complete."""
    return _STOPS.get(stop_reason, stop_reason.replace("_", " "))


def finished(timings: Timings | None, stop_reason: str) -> str:
    """The line under an answer: `128 tokens · 41.3 tok/s · 1.64× with drafts · first token 0.21 s · stopped`."""
    parts: list[str] = []
    if timings is not None and timings.predicted_n:
        parts.append(plural(timings.predicted_n, "token"))
        if (rate := timings.predicted_per_second) is not None:
            parts.append(f"{units.rate(rate)} tok/s")
        if timings.draft_n and (speed_up := timings.speed_up) is not None:
            parts.append(f"{units.factor(speed_up)} with drafts")
        parts.append(f"first token {' '.join(units.duration(timings.ttft_ms / 1e3))}")
    if words := stopped(stop_reason):
        parts.append(words)
    return " · ".join(parts)


def failure(event: Failed) -> str:
    """A failure as Markdown-free text: what happened, then what to do."""
    lines = [event.message or "Something went wrong."]
    if event.hint:
        lines.append(event.hint)
    if event.code == "worker_died":
        lines.append("The chat is saved, and your next message starts the model again.")
    return "\n\n".join(lines)


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
        note=finished(message.timings, message.stop_reason or ""),
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
