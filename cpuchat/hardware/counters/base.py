"""What every counter is, how one is refused, and the kernel calls that simulated machines replace in tests."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from cpuchat.telemetry.machine import Bandwidth, Power, Scope

ROOT = Path("/")
UNIT_COMMAND = "cpuchat counters unit"
"""The command that prints how the collector is installed."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a source cannot be read, and what would make it readable ("" where nothing would)."""

    name: str
    why: str
    how: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.why}" + (f"; {self.how}" if self.how else "")


class CannotCount(Exception):
    """A source does not open, or failed after it did. `why` and `how` as in `Refusal`."""

    def __init__(self, why: str, how: str = "") -> None:
        super().__init__(why)
        self.why = why
        self.how = how


class Source(Protocol):
    """What `Counter` and `PowerMeter` share. `least_seconds`: it is not asked more often than that."""

    @property
    def name(self) -> str: ...
    @property
    def least_seconds(self) -> float: ...
    def close(self) -> None: ...


class Counter(Source, Protocol):
    """A source of memory traffic. `scope` says what its figure covers."""

    @property
    def scope(self) -> Scope: ...

    def sample(self, now: float) -> Bandwidth | None:
        """Traffic since the sample before; None while there is no whole interval yet.

        Args:
            now: monotonic seconds, of the same clock in every call.

        Raises:
            CannotCount, OSError: it stopped working.
        """
        ...


class PowerMeter(Source, Protocol):
    """A source of power; `sample` as of `Counter`."""

    def sample(self, now: float) -> Power | None: ...


def _perf_event_open(attr: bytes, pid: int, cpu: int, flags: int) -> int:
    from cpuchat.hardware.counters.perf_events import system_call

    return system_call(attr, pid, cpu, flags)


def _ioctl(fd: int, request: int, buffer: bytearray) -> None:
    import fcntl

    fcntl.ioctl(fd, request, buffer, True)


def _open_for_reading(path: Path) -> int:
    return os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))


@dataclass(frozen=True)
class Kernel:
    """Calls into the system; every one raises OSError when refused.

    `perf_event_open(attr, pid, cpu, flags)` returns a file descriptor. `ioctl` fills its buffer. `wall` is the clock
    that time stamps in files are of, in seconds since 1970.
    """

    perf_event_open: Callable[[bytes, int, int, int], int] = _perf_event_open
    open: Callable[[Path], int] = _open_for_reading
    ioctl: Callable[[int, int, bytearray], None] = _ioctl
    read: Callable[[int, int], bytes] = os.read
    close: Callable[[int], None] = os.close
    wall: Callable[[], float] = time.time


@dataclass
class Deltas:
    """How much several counts grew since the time before. A count that went back was reset: nothing is known then."""

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
