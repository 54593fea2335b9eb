"""One answer on its way to a client: what is known of it so far, and the base of the replies of all dialects."""

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
from cpuchat.protocol.timings import Timings
from cpuchat.serving.errors import Refusal
from cpuchat.serving.requests import ParsedRequest

_LETTERS = string.ascii_letters + string.digits


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
        self.queued_s = 0.0
        self._start = 0.0
        self._told = Timings()  # by the events

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
                self.prompt, spent = event, 1e3 * (now - self._start)
                self._tell(cache_n=event.cache_n, prompt_n=event.processed - event.cache_n, prompt_ms=spent)
            case TextDelta():
                self._note_text(event, now)
                if event.channel == "reasoning":
                    self.reasoning += event.text
                    self.n_reasoning += event.n_tokens
                else:
                    self.text += event.text
            case CallDelta():
                self._note_text(event, now)
                if event.index == len(self.calls):  # an id has nine letters and digits, as some templates insist
                    id = event.id or "".join(secrets.choice(_LETTERS) for _ in range(9))
                    self.calls.append(WrittenCall(id, event.name))
                self.calls[event.index].arguments += event.arguments
            case SpeculationUpdate(figures=figures):
                drafts = {"draft_n": figures.draft_n, "draft_n_accepted": figures.draft_n_accepted}
                self._tell(speculation=figures, **drafts)
            case GenerationFinished():
                self.finished = event

    def _note_text(self, event: TextDelta | CallDelta, now: float) -> None:
        if self.first_at is None:
            self.first_at = now
            self._tell(ttft_ms=event.at_ms)
        self._tell(predicted_n=event.predicted_n, predicted_ms=event.at_ms - self._told.ttft_ms)

    def _tell(self, **figures: Any) -> None:
        self._told = msgspec.structs.replace(self._told, **figures)

    @property
    def timings(self) -> Timings:
        """Return the engine's own timings once it has finished, before that those of its events."""
        return self.finished.timings if self.finished is not None else self._told

    @property
    def timing_fields(self) -> dict[str, float]:
        """Return llama-server's `timings` (`server_slot_stats::to_json`), 0 for what is not known, with `queue_ms`."""
        timings = msgspec.structs.replace(self.timings, queue_ms=1e3 * self.queued_s)
        return {name: 0.0 if value is None else value for name, value in timings.fields().items()}


class Reply(ABC):
    """Builds one answer of `model` by the engine `fingerprint`: `whole` at its end; or the parts of a stream:
    `rendered` for each event that `progress` has followed (b"" starts the response), `end` after the last, `failed` for
    an error."""

    id_prefix = ""
    ping = b": waiting\n\n"
    """What keeps a silent connection open: a comment, which readers of server-sent events skip."""

    def __init__(self, model: str, fingerprint: str, parsed: ParsedRequest) -> None:
        self.progress = ReplyProgress()
        self.progress.id = f"{self.id_prefix}{secrets.token_urlsafe(24)}"
        self.model, self.fingerprint, self.parsed = model, fingerprint, parsed
        self.created = int(time.time())

    def another(self, parsed: ParsedRequest) -> Reply:
        """Return what builds another answer of the same response; only dialects with several answers have it."""
        raise NotImplementedError

    @abstractmethod
    def whole(self) -> bytes: ...

    @abstractmethod
    def rendered(self, event: AnyEvent) -> bytes | None: ...

    def end(self) -> bytes:
        return b""

    def failed(self, refusal: Refusal) -> bytes:
        return b"data: " + refusal.body + b"\n\n"


class BlockReply(Reply):
    """An answer in blocks of reasoning, text and calls. The kind of a block is its channel, or the number of its call.
    A dialect writes what has `_begun` before the first one, the start of a block, more of it, and its end."""

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
            sent = self._ended() + self._started(kind)
            self._block = kind
        return sent + self._added(kind, text)

    def _ended(self) -> bytes:
        """Return the end of the open block; nothing where none is open."""
        sent = self._closed(self._block) if self._block is not None else b""
        self._block = None
        return sent

    @abstractmethod
    def _begun(self) -> bytes: ...

    @abstractmethod
    def _started(self, kind: str | int) -> bytes: ...

    @abstractmethod
    def _added(self, kind: str | int, text: str) -> bytes: ...

    @abstractmethod
    def _closed(self, kind: str | int) -> bytes: ...


def sent_event(data: Any, name: str = "") -> bytes:
    """Return a server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"
