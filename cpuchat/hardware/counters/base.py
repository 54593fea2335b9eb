"""Interfaces of counters of memory traffic and power, and the error of one that cannot be read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from cpuchat.telemetry.machine import Bandwidth, Power, Scope

ROOT = Path("/")
T = TypeVar("T")
UNIT_COMMAND = "cpuchat counters unit"
"""Command that prints how to install the collector."""


@dataclass(frozen=True, slots=True)
class CounterRefusal:
    """Why a source cannot be read, and what would make it readable ("" if nothing would)."""

    name: str
    why: str
    how: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.why}" + (f"; {self.how}" if self.how else "")


class CannotCount(Exception):
    """Raised when a source does not open, or fails later. `why` and `how` as in `CounterRefusal`."""

    def __init__(self, why: str, how: str = "") -> None:
        super().__init__(why)
        self.why = why
        self.how = how


class CounterSource(Protocol):
    """Base of `Counter` and `PowerMeter`. `least_seconds`: the minimum interval between samples."""

    @property
    def name(self) -> str: ...
    @property
    def least_seconds(self) -> float: ...
    def close(self) -> None: ...


class Counter(CounterSource, Protocol):
    """A source of memory traffic. `scope` says what its figure covers."""

    @property
    def scope(self) -> Scope: ...

    def sample(self, now: float) -> Bandwidth | None:
        """Return the traffic since the last sample; None before the first full interval.

        Args:
            now: monotonic seconds, of the same clock in every call.

        Raises:
            CannotCount, OSError: it stopped working.
        """
        ...


class PowerMeter(CounterSource, Protocol):
    """A source of power; `sample` as of `Counter`."""

    def sample(self, now: float) -> Power | None: ...


@contextlib.contextmanager
def opening(source: CounterSource, explain: Callable[[OSError], CannotCount]) -> Iterator[None]:
    """Close `source` when it cannot be opened.

    Raises:
        CannotCount: the reason, by `explain` for an OSError.
    """
    try:
        yield
    except OSError as error:
        source.close()
        raise explain(error) from None
    except CannotCount:
        source.close()
        raise


@dataclass
class Deltas:
    """Computes the growth of several counts between calls. If a count went back, it was reset: that interval is
    unknown.
    """

    time: float | None = None
    counts: tuple[float, ...] = field(default_factory=tuple)

    def step(self, now: float, counts: Iterable[float]) -> tuple[float, Sequence[float]] | None:
        """(seconds, growth of each count); None at first, after a reset, and when the clock went back."""
        before, old = self.time, self.counts
        self.time, self.counts = now, tuple(counts)
        if before is None or now <= before or len(old) != len(self.counts):
            return None
        grown = [new - was for was, new in zip(old, self.counts, strict=True)]
        return None if any(value < 0 for value in grown) else (now - before, grown)


class Patience:
    """Forgives a few failures in a row: a source may be busy, lent to others or starting again for a moment."""

    def __init__(self, most: int = 4) -> None:
        self._most = most
        self._failures = 0

    def read(self, source: Callable[[], T], failure: type[Exception]) -> T | None:
        """Return what `source` returns, None where it fails with `failure`; the `most`-th in a row is raised."""
        try:
            value = source()
        except failure:
            self._failures += 1
            if self._failures >= self._most:
                raise
            return None
        self._failures = 0
        return value
