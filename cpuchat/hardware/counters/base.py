"""What all counters of memory traffic and power share: their base class, and the error of one that cannot be read."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from cpuchat.telemetry.machine import Bandwidth, Power, Scope

ROOT = Path("/")
T = TypeVar("T")
V_co = TypeVar("V_co", Bandwidth, Power, covariant=True)
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


class Counter(abc.ABC, Generic[V_co]):
    """A source of memory traffic (`Counter[Bandwidth]`) or of power (`Counter[Power]`).

    `scope` is what its figure covers, `least_seconds` the minimum interval between samples.
    """

    name = ""
    scope: Scope = "machine"
    least_seconds = 0.5
    _sampled_at: float | None = None

    @abc.abstractmethod
    def sample(self, now: float) -> V_co | None:
        """Return the figure since the last sample; None before the first full interval. `now`: monotonic seconds, of
        the same clock in every call. Raises CannotCount, OSError: it stopped working.
        """

    def _elapsed(self, now: float) -> float | None:
        """Return the seconds since the last sample; None at the first one, and when the clock went back."""
        before, self._sampled_at = self._sampled_at, now
        return now - before if before is not None and now > before else None

    def close(self) -> None:
        """Release what the source holds open."""


@contextlib.contextmanager
def opening(source: Counter[Any], explain: Callable[[OSError], CannotCount]) -> Iterator[None]:
    """Close `source` when it cannot be opened. Raises CannotCount: the reason, by `explain` for an OSError."""
    try:
        yield
    except OSError as error:
        source.close()
        raise explain(error) from None
    except CannotCount:
        source.close()
        raise


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
