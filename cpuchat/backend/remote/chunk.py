"""Defines the parts of a streamed answer, whatever the server's dialect, and checks their numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_MOST = 1e15  # of any count or time: what is larger is a mistake


@dataclass(frozen=True, slots=True)
class Attempt:
    """The attempt at a request that was answered: monotonic seconds at which it began, seconds to connect in it."""

    started: float
    connect_s: float = 0.0


@dataclass(slots=True)
class Reported:
    """Counts and times in milliseconds that a server reports; None where it does not.

    `prompt_n` prompt tokens evaluated, `cache_n` reused, or `prompt_total` where only their sum is known;
    `predicted_n` tokens written so far. `predicted_ms` from the first of them by the server's clock, `ttft_ms` by it
    too. `load_ms` went into loading the model.
    """

    prompt_total: int | None = None
    cache_n: int | None = None
    prompt_n: int | None = None
    prompt_ms: float | None = None
    predicted_n: int | None = None
    predicted_ms: float | None = None
    ttft_ms: float | None = None
    queue_ms: float | None = None
    load_ms: float | None = None
    draft_n: int | None = None
    draft_n_accepted: int | None = None

    def update(self, newer: Reported) -> None:
        """Take over what `newer` has."""
        for name in Reported.__slots__:
            value = getattr(newer, name)
            if value is not None:
                setattr(self, name, value)


@dataclass(slots=True)
class Chunk:
    """One part of an answer. `ahead` requests are answered before it; `progress` is (processed, total, reused) tokens
    of the prompt. `finish` says why the answer ended, in the words of OpenAI ("stop", "length"). `id` is the server's
    name for the answer. `lies` counts numbers that cannot be: negative, or not a number. `calls` are
    parts of calls of tools as they were sent (`calls.CallParts`).
    """

    content: str = ""
    reasoning: str = ""
    ahead: int | None = None
    progress: tuple[int, int, int] | None = None
    finish: str = ""
    id: str = ""
    reported: Reported = field(default_factory=Reported)
    lies: int = 0
    calls: Any = None


class Numbers:
    """Reads numbers from an object of a server, and counts those that cannot be."""

    def __init__(self, values: Any) -> None:
        self._values: dict[str, Any] = values if isinstance(values, dict) else {}
        self.lies = 0

    def __bool__(self) -> bool:
        return bool(self._values)

    def ms(self, name: str, scale: float = 1.0) -> float | None:
        """Return a time times `scale`; None when it is missing or cannot be."""
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MOST / scale:
            self.lies += 1
            return None
        return float(value * scale)

    def count(self, name: str) -> int | None:
        """Return a count; None when it is missing or cannot be."""
        value = self.ms(name)
        return None if value is None else int(value)

    def part(self, name: str) -> Numbers:
        """Return the object of that name; its lies are its own."""
        return Numbers(self._values.get(name))
