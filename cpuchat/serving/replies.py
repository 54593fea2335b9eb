"""One answer on its way to a client: what is known of it so far, whatever its dialect, and the base of the dialects'
replies.
"""

from __future__ import annotations

import secrets
import string
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import msgspec

from cpuchat.protocol.messages import (
    AnyEvent,
    CallDelta,
    GenerationFinished,
    PrefillProgress,
    SpeculationUpdate,
    TextDelta,
)
from cpuchat.protocol.timings import SpeculationFigures, Timings
from cpuchat.serving.errors import Refusal
from cpuchat.serving.requests import ParsedRequest

PING = b": waiting\n\n"
"""A comment, which readers of server-sent events skip."""


@dataclass
class WrittenCall:
    """A call of a tool as far as it is written; `arguments` is JSON."""

    id: str
    name: str
    arguments: str = ""


class ReplyProgress:
    """Follows the events of one answer: what is written of it so far, and its timings."""

    def __init__(self) -> None:
        self.id = ""
        """Of the reply."""
        self.text = self.reasoning = ""
        self.calls: list[WrittenCall] = []
        self.finished: GenerationFinished | None = None
        self.n_reasoning = 0
        self.prompt: PrefillProgress | None = None
        self.first_at: float | None = None
        """When the first text came, on the clock of `follow`."""
        self._start = self._prefilled = 0.0
        self._written = Timings()
        self._figures: SpeculationFigures | None = None

    @property
    def is_whole(self) -> bool:
        """Return whether the model ended it, and it matches its grammar."""
        end = self.finished
        return end is not None and bool(end.matches_grammar) and end.stop_reason in ("end", "stop_string")

    def follow(self, event: AnyEvent, now: float) -> None:
        """Take an event at `now` (monotonic seconds)."""
        match event:
            case PrefillProgress():
                if self.prompt is None:
                    self._start = now
                self.prompt, self._prefilled = event, now
            case TextDelta():
                self._note_text(event, now)
                if event.channel == "reasoning":
                    self.reasoning += event.text
                    self.n_reasoning += event.n_tokens
                else:
                    self.text += event.text
            case CallDelta():
                self._note_text(event, now)
                if event.index == len(self.calls):
                    self.calls.append(WrittenCall(event.id or new_id(), event.name))
                self.calls[event.index].arguments += event.arguments
            case SpeculationUpdate():
                self._figures = event.figures
            case GenerationFinished():
                self.finished = event

    def _note_text(self, event: TextDelta | CallDelta, now: float) -> None:
        if self.first_at is None:
            self.first_at, self._written = now, Timings(ttft_ms=event.at_ms)
        first_ms = self._written.ttft_ms
        self._written = Timings(predicted_n=event.predicted_n, predicted_ms=event.at_ms - first_ms, ttft_ms=first_ms)

    @property
    def prompt_ms(self) -> float:
        return 1e3 * (self._prefilled - self._start)

    @property
    def timings(self) -> Timings:
        """Return the engine's own timings once it has finished, before that those of its events."""
        if self.finished is not None:
            return self.finished.timings
        prompt, figures = self.prompt, self._figures
        return msgspec.structs.replace(
            self._written,
            cache_n=prompt.cache_n if prompt else 0,
            prompt_n=prompt.processed - prompt.cache_n if prompt else 0,
            prompt_ms=self.prompt_ms,
            draft_n=figures.draft_n if figures else 0,
            draft_n_accepted=figures.draft_n_accepted if figures else 0,
            speculation=figures,
        )


def new_id() -> str:
    """Return an id of a call: nine letters and digits, as some templates insist."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class Reply(ABC):
    """Builds one answer: `whole` at its end; or the parts of a stream: `rendered` for each event, `end` after the last.

    Args:
        model: the name that it goes by.
        fingerprint: of the engine.
        parsed: the request.
    """

    id_prefix = ""
    ping = PING

    def __init__(self, model: str, fingerprint: str, parsed: ParsedRequest) -> None:
        self.progress = ReplyProgress()
        self.progress.id = f"{self.id_prefix}{secrets.token_urlsafe(24)}"
        self.parsed = parsed
        self.model = model
        self.fingerprint = fingerprint
        self.created = int(time.time())

    @abstractmethod
    def whole(self) -> bytes:
        """Return the answer as one object, in JSON."""

    @abstractmethod
    def rendered(self, event: AnyEvent) -> bytes | None:
        """Return what the client of a stream gets for an event that `progress` has followed; b"" starts the
        response.
        """

    @abstractmethod
    def end(self) -> bytes:
        """Return the end of a stream whose answer is finished."""

    @abstractmethod
    def failed(self, refusal: Refusal) -> bytes:
        """Return an error in the middle of a stream."""


class BlockReply(Reply):
    """An answer in blocks: reasoning, text and calls, each of which begins where another one ends.

    The kind of a block is its channel, or the number of its call.
    """

    def __init__(self, model: str, fingerprint: str, parsed: ParsedRequest) -> None:
        super().__init__(model, fingerprint, parsed)
        self._has_begun = False
        self._block: str | int | None = None

    def rendered(self, event: AnyEvent) -> bytes | None:
        if not isinstance(event, PrefillProgress | TextDelta | CallDelta | GenerationFinished):
            return None
        sent = b"" if self._has_begun else self._begun()
        self._has_begun = True
        match event:
            case TextDelta(text=text) if text:
                sent += self._in_block(event.channel, text)
            case CallDelta():
                sent += self._in_block(event.index, event.arguments)
            case GenerationFinished():
                sent += self._ended()
        return sent

    def _in_block(self, kind: str | int, text: str) -> bytes:
        """Return more of a block, after the end of another one and its own start."""
        sent = b""
        if kind != self._block:
            sent = self._ended()
            self._block = kind
            sent += self._started(kind)
        return sent + self._added(kind, text)

    def _ended(self) -> bytes:
        """Return the end of the open block; nothing where none is open."""
        sent = self._closed(self._block) if self._block is not None else b""
        self._block = None
        return sent

    @abstractmethod
    def _begun(self) -> bytes:
        """Return what comes before the first block."""

    @abstractmethod
    def _started(self, kind: str | int) -> bytes:
        """Return the start of a block."""

    @abstractmethod
    def _added(self, kind: str | int, text: str) -> bytes:
        """Return more of the open block: text, or a piece of arguments."""

    @abstractmethod
    def _closed(self, kind: str | int) -> bytes:
        """Return the end of a block."""


def sent_event(data: Any, name: str = "") -> bytes:
    """Return a server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"
