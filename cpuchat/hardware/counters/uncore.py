"""Base of counters outside the cores: groups of perf events, and separate counts of reads and writes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from cpuchat.hardware.counters.base import CounterSource, opening
from cpuchat.hardware.counters.kernel import Kernel
from cpuchat.hardware.counters.perf_events import PerfEvent, Pmu, close_all, open_event, open_failure
from cpuchat.telemetry.machine import Bandwidth, Scope

LINE = 64
"""Bytes per column access: a cache line."""


class EventGroup:
    """Reads events together; each count stands for an amount (bytes, joules)."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._events: list[tuple[PerfEvent, float]] = []

    def __len__(self) -> int:
        return len(self._events)

    def add(self, pmu: Pmu, configs: tuple[int, int, int], each: float = LINE) -> None:
        """Open the event on every unit of the PMU.

        Raises:
            OSError: refused.
        """
        for cpu in pmu.cpus:
            self._events.append((open_event(self._kernel, pmu.type, configs, cpu=cpu), each))

    def growth(self) -> float | None:
        """Return the amount counted since the last call; None when one of the events had no count."""
        grown = [(event.growth(), each) for event, each in self._events]
        return None if any(value is None for value, _ in grown) else sum((value or 0.0) * each for value, each in grown)

    def close(self) -> None:
        close_all(event for event, _ in self._events)


def opening_events(source: CounterSource, root: Path) -> AbstractContextManager[None]:
    """Close `source` when one of its events cannot be opened. Raises CannotCount with the reason."""
    return opening(source, partial(open_failure, root=root))


class ReadWriteCounter:
    """Counts traffic of all memory controllers, reads and writes separately, for the whole machine."""

    name = ""
    scope: Scope = "machine"
    least_seconds = 0.25

    def __init__(self, kernel: Kernel | None) -> None:
        self._kernel = kernel or Kernel()
        self._reads, self._writes = EventGroup(self._kernel), EventGroup(self._kernel)
        self._time: float | None = None

    def sample(self, now: float) -> Bandwidth | None:
        before, self._time = self._time, now
        read, written, per_l3 = self._reads.growth(), self._writes.growth(), self._each_l3()
        if before is None or now <= before or read is None or written is None:
            return None
        seconds = now - before
        each = tuple(value / seconds for value in per_l3)
        return Bandwidth((read + written) / seconds, self.name, self.scope, read / seconds, written / seconds, each)

    def _each_l3(self) -> tuple[float, ...]:
        """Return the bytes of each L3 group since the last call, in the order of the topology; () if unknown."""
        return ()

    def close(self) -> None:
        self._reads.close()
        self._writes.close()
