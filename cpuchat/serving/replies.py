"""One answer on its way to a client: what is known of it so far, whatever its dialect, and the base of the dialects'
replies.

Timings are llama-server's, in its field names and units; source: llama.cpp's tools/server/server-task.cpp and
server-common.cpp (`server_slot_stats::to_json`).
"""

from __future__ import annotations

import secrets
import string
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import msgspec

from cpuchat.protocol.messages import (
    AnyEvent,
    CallDelta,
    GenerationFinished,
    PrefillProgress,
    SpeculationUpdate,
    TextDelta,
    TokenLogprob,
)
from cpuchat.protocol.timings import SpeculationFigures, Timings
from cpuchat.serving.errors import Refusal
from cpuchat.serving.offered import Kind
from cpuchat.serving.requests import ParsedRequest

PING = b": waiting\n\n"
"""A comment, which readers of server-sent events skip."""


def timings_fields(timings: Timings) -> dict[str, float]:
    """Return llama-server's `timings`, 0 where there is nothing to divide, as there."""
    return {name: 0.0 if value is None else value for name, value in timings.fields().items()}


@dataclass
class WrittenCall:
    """A call of a tool as far as it is written; `arguments` is JSON."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class ReplyChoice:
    """One of the answers to a request. `logprobs` are of the text of the answer."""

    text: str = ""
    reasoning: str = ""
    calls: list[WrittenCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finished: GenerationFinished | None = None

    @property
    def is_whole(self) -> bool:
        """Return whether the model ended it, and it matches its grammar."""
        end = self.finished
        return end is not None and bool(end.matches_grammar) and end.stop_reason in ("end", "stop_string")


class ReplyProgress:
    """Follows the events of one request: its timings so far and its answers, one after the other."""

    def __init__(self) -> None:
        self.id = ""
        """Of the reply."""
        self.seed: int | None = None
        """That the request gave."""
        self.queued_ms = 0.0
        self.choices: list[ReplyChoice] = [ReplyChoice()]
        self.n_reasoning = 0
        self.prompt: PrefillProgress | None = None
        self._start = self._prefilled = 0.0
        self.first_ms: float | None = None
        self.first_at: float | None = None
        """When the first text came, on the clock of `follow`."""
        self._before: Timings | None = None  # of the choices that are whole
        self._written = Timings()
        self._figures: SpeculationFigures | None = None
        self._figured = 0

    @property
    def choice(self) -> ReplyChoice:
        """Return the answer that is being written, or the last one."""
        return self.choices[-1]

    @property
    def index(self) -> int:
        return len(self.choices) - 1

    @property
    def finished(self) -> GenerationFinished | None:
        return self.choice.finished

    def begin_next(self) -> None:
        """Begin another answer to the same prompt."""
        self._before = self.timings
        self.choices.append(ReplyChoice())
        self._written, self._figures, self._figured, self.first_ms = Timings(), None, 0, None

    def follow(self, event: AnyEvent, now: float) -> None:
        """Take an event at `now` (monotonic seconds)."""
        match event:
            case PrefillProgress():
                if self.prompt is None:
                    self._start = now
                if self._before is None:
                    self.prompt, self._prefilled = event, now
            case TextDelta():
                self._note_text(event, now)
                if event.channel == "reasoning":
                    self.choice.reasoning += event.text
                    self.n_reasoning += event.n_tokens
                else:
                    self.choice.text += event.text
                    self.choice.logprobs += event.logprobs if event.text else ()
            case CallDelta():
                self._note_text(event, now)
                calls = self.choice.calls
                if event.index == len(calls):
                    calls.append(WrittenCall(event.id or new_id(), event.name))
                calls[event.index].arguments += event.arguments
            case SpeculationUpdate():
                self._figures, self._figured = event.figures, event.predicted_n
            case GenerationFinished():
                self.choice.finished = event

    def _note_text(self, event: TextDelta | CallDelta, now: float) -> None:
        if self.first_ms is None:
            self.first_ms, self.first_at = event.at_ms, now if self.first_at is None else self.first_at
        self._written = Timings(
            predicted_n=event.predicted_n, predicted_ms=event.at_ms - self.first_ms, ttft_ms=self.first_ms
        )

    @property
    def prompt_ms(self) -> float:
        return 1e3 * (self._prefilled - self._start)

    @property
    def timings(self) -> Timings:
        """Return the engine's own timings once it has finished, before that those of its events."""
        own = self.finished.timings if self.finished is not None else self._timings_so_far()
        return own if self._before is None else self._before.followed_by(own)

    def _timings_so_far(self) -> Timings:
        prompt, figures = self.prompt, self._figures
        return msgspec.structs.replace(
            self._written,
            cache_n=prompt.cache_n if prompt else 0,
            prompt_n=prompt.processed - prompt.cache_n if prompt and self._before is None else 0,
            prompt_ms=self.prompt_ms if self._before is None else 0.0,
            draft_n=figures.draft_n if figures else 0,
            draft_n_accepted=figures.draft_n_accepted if figures else 0,
            speculation=figures,
        )

    @property
    def figured_n(self) -> int:
        """Return the tokens that the figures of speculation are about; of a cut answer, those of the last update."""
        if self.finished is None and self._figured:
            return self._figured
        return self.timings.predicted_n


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
        self._n_input: dict[tuple[int, int], int] = {}  # characters sent of the inputs of custom tools

    def queue_chunk(self, **queue: float) -> bytes:
        """Return how many requests come before this one (`ahead`), or the `ms` that it waited for others, as a
        server-sent event.
        """
        return self.ping

    def kind_of(self, call: WrittenCall) -> Kind:
        """Return what the tool of a call is to the client."""
        return self.parsed.asked.offered.kinds.get(call.name, Kind(name=call.name))

    def new_input(self, index: int) -> str:
        """Return what is new of the input of a call of a custom tool."""
        call, key = self.progress.choice.calls[index], (self.progress.index, index)
        text = str(self.kind_of(call).item(call.arguments)["input"])
        sent = self._n_input.get(key, 0)
        self._n_input[key] = max(sent, len(text))
        return text[sent:]

    @abstractmethod
    def whole(self) -> bytes:
        """Return the answer as one object."""

    @abstractmethod
    def rendered(self, event: AnyEvent) -> bytes | None:
        """Return what the client of a stream gets for an event that `progress` has followed; b"" starts the
        response.
        """

    @abstractmethod
    def end(self) -> bytes:
        """Return the end of a stream whose answers are all finished."""

    @abstractmethod
    def failed(self, refusal: Refusal) -> bytes:
        """Return an error in the middle of a stream."""


def sent_event(data: Any, name: str = "") -> bytes:
    """Return a server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"
