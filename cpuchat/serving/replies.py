"""Answers in the OpenAI interface's form, with the additions of llama-server: `timings` in its field names and units.

Source of both: llama.cpp's tools/server/server-task.cpp and server-common.cpp (`server_slot_stats::to_json`).
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from typing import Any

import msgspec

from cpuchat.protocol.messages import GenerationFinished, PrefillProgress, SpeculationUpdate, StopReason, TextDelta
from cpuchat.protocol.timings import SpeculationFigures, Timings

DONE = b"data: [DONE]\n\n"
PING = b": waiting\n\n"
"""A comment, which readers of server-sent events skip."""

_FINISH: dict[StopReason, str] = {"end": "stop", "stop_string": "stop"}

StreamedEvent = TextDelta | PrefillProgress | GenerationFinished


def timings_fields(timings: Timings) -> dict[str, float]:
    """Return llama-server's `timings`, 0 where there is nothing to divide, as there."""
    return {name: 0.0 if value is None else value for name, value in timings.fields().items()}


class Progress:
    """Follows the events of one answer: its timings so far, its text, the tokens of its reasoning."""

    def __init__(self) -> None:
        self.id = ""
        """Of the reply."""
        self.seed: int | None = None
        """That the request gave."""
        self.queued_ms = 0.0
        self.text = ""
        self.reasoning = ""
        self.n_reasoning = 0
        self.prompt: PrefillProgress | None = None
        self.finished: GenerationFinished | None = None
        self._start = self._prefilled = 0.0
        self.first_ms: float | None = None
        self.first_at: float | None = None
        """When the first text came, on the clock of `follow`."""
        self._written = Timings()
        self._figures: SpeculationFigures | None = None
        self._figured = 0

    def follow(self, event: object, now: float) -> None:
        """Take an event at `now` (monotonic seconds)."""
        match event:
            case PrefillProgress():
                if self.prompt is None:
                    self._start = now
                self.prompt, self._prefilled = event, now
            case TextDelta():
                if self.first_ms is None:
                    self.first_ms, self.first_at = event.at_ms, now
                self._written = Timings(
                    predicted_n=event.predicted_n, predicted_ms=event.at_ms - self.first_ms, ttft_ms=self.first_ms
                )
                if event.channel == "reasoning":
                    self.reasoning += event.text
                    self.n_reasoning += event.n_tokens
                else:
                    self.text += event.text
            case SpeculationUpdate():
                self._figures, self._figured = event.figures, event.predicted_n
            case GenerationFinished():
                self.finished = event

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

    @property
    def figured_n(self) -> int:
        """Return the tokens that the figures of speculation are about; of a cut answer, those of the last update."""
        if self.finished is None and self._figured:
            return self._figured
        return self.timings.predicted_n

    def usage(self) -> dict[str, Any]:
        timings = self.timings
        prompt_tokens = timings.cache_n + timings.prompt_n
        usage: dict[str, Any] = {
            "completion_tokens": timings.predicted_n,
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + timings.predicted_n,
            "prompt_tokens_details": {"cached_tokens": timings.cache_n},
        }
        if self.n_reasoning:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.n_reasoning}
        return usage


class Reply(ABC):
    """Builds one answer: `whole` at its end, or `chunk` and `last_chunks` of a stream.

    Args:
        model: the name that it goes by.
        fingerprint: of the engine.
    """

    kind = ""
    chunk_kind = ""
    id_prefix = ""

    def __init__(self, model: str, fingerprint: str) -> None:
        self.progress = Progress()
        self.progress.id = f"{self.id_prefix}-{secrets.token_urlsafe(24)}"
        self._head = {
            "created": int(time.time()),
            "id": self.progress.id,
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def whole(self) -> bytes:
        """Return the answer as one object."""
        progress = self.progress
        return msgspec.json.encode(
            {
                "choices": [{"finish_reason": self._finish_reason, "index": 0, **self._content()}],
                "object": self.kind,
                **self._head,
                "usage": progress.usage(),
                "timings": timings_fields(progress.timings),
            }
        )

    def chunk(self, event: TextDelta, *, with_timings: bool) -> bytes:
        """Return what `event` adds, as a server-sent event."""
        return self._event([self._choice(event)], self._timings() if with_timings else {})

    def progress_chunk(self, event: PrefillProgress, *, with_timings: bool) -> bytes:
        """Return how far the prompt is evaluated, as a server-sent event."""
        fields = {
            "total": event.total,
            "cache": event.cache_n,
            "processed": event.processed,
            "time_ms": int(self.progress.prompt_ms),
        }
        timings = self._timings() if with_timings else {}
        return self._event([self._choice(event)], {"prompt_progress": fields, **timings})

    def queue_chunk(self, **queue: float) -> bytes:
        """Return how many requests come before this one (`ahead`), or the `ms` that it waited for others, as a
        server-sent event.
        """
        return self._event([self._choice(None)], {"queue": queue})

    def last_chunks(self, event: GenerationFinished, *, with_usage: bool) -> bytes:
        """Return the end of a stream: why it ended, the usage if it is wanted, and the timings."""
        ending, timings = [{**self._choice(event), "finish_reason": self._finish_reason}], self._timings()
        if not with_usage:
            return self._event(ending, timings) + DONE
        return self._event(ending, {}) + self._event([], {"usage": self.progress.usage(), **timings}) + DONE

    @property
    def _finish_reason(self) -> str:
        """Return OpenAI's word; "stop" only for an answer that is complete, and matches its grammar."""
        finished = self.progress.finished
        if finished is None or not finished.matches_grammar:
            return "length"
        return _FINISH.get(finished.stop_reason, "length")

    def _timings(self) -> dict[str, Any]:
        return {"timings": timings_fields(self.progress.timings)}

    def _event(self, choices: list[dict[str, Any]], more: dict[str, Any]) -> bytes:
        data = {"choices": choices, **self._head, "object": self.chunk_kind, **more}
        return b"data: " + msgspec.json.encode(data) + b"\n\n"

    def _choice(self, event: StreamedEvent | None) -> dict[str, Any]:
        return {"finish_reason": None, "index": 0, **self._delta(event)}

    @abstractmethod
    def _content(self) -> dict[str, Any]:
        """Return the whole answer's part of its choice."""

    @abstractmethod
    def _delta(self, event: StreamedEvent | None) -> dict[str, Any]:
        """Return what an event adds to the choice; nothing but `TextDelta` has text. None: the request waits."""


class ChatReply(Reply):
    """An answer of /v1/chat/completions; reasoning is separate, in `reasoning_content`."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl"
    _has_role = False

    def _content(self) -> dict[str, Any]:
        message = {"role": "assistant", "content": self.progress.text}
        if self.progress.reasoning:
            message["reasoning_content"] = self.progress.reasoning
        return {"message": message}

    def _delta(self, event: StreamedEvent | None) -> dict[str, Any]:
        if event is None or isinstance(event, PrefillProgress):
            return {"delta": {"role": "assistant", "content": None}}
        delta = {} if self._has_role else {"role": "assistant"}  # in the first chunk only
        self._has_role = True
        if isinstance(event, TextDelta):
            delta["reasoning_content" if event.channel == "reasoning" else "content"] = event.text
        return {"delta": delta}


class CompletionReply(Reply):
    """An answer of /v1/completions: text as the model writes it, reasoning and its markers included."""

    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl"

    def _content(self) -> dict[str, Any]:
        return {"text": self.progress.text, "logprobs": None}

    def _delta(self, event: StreamedEvent | None) -> dict[str, Any]:
        return {"text": event.text if isinstance(event, TextDelta) else "", "logprobs": None}
