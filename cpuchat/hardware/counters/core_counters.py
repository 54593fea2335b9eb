"""Counts the memory reads of one process's threads with core counters.

Needs no rights where perf_event_paranoid is 2 or less, and sees that process alone. AMD Zen 3 and newer: fills of the
L1 data cache from memory (event 0x44 umask 0x48) and L2 prefetches that missed the L3 (0x72 umask 0x1f), 64 bytes each
(tools/perf/pmu-events/arch/x86/amdzen{3,4,5}). Reads only, and an estimate: unused prefetches into the L2 count as
well.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING

from cpuchat.hardware.counters.base import ROOT, CannotCount
from cpuchat.hardware.counters.kernel import Kernel
from cpuchat.hardware.counters.perf_events import TYPE_RAW, PerfEvent, close_all, open_event, open_failure
from cpuchat.telemetry.machine import Bandwidth, Scope

if TYPE_CHECKING:
    from cpuchat.hardware.topology import Topology

LINE = 64
EVENTS = (0x4844, 0x1F72)


class CoreCounters:
    """Counts one event of each kind for each thread of the process; threads come and go."""

    name = "core counters, estimated"
    scope: Scope = "process"
    least_seconds = 0.5

    def __init__(self, topology: Topology, pid: int | None, root: Path = ROOT, kernel: Kernel | None = None) -> None:
        if pid is None:
            raise CannotCount("no model is loaded")
        if "amd" not in topology.vendor.lower() or (topology.family or 0) < 0x19:
            raise CannotCount("AMD Zen 3 and newer only")
        self._tasks = root / "proc" / str(pid) / "task"
        self._kernel = kernel or Kernel()
        self._root = root
        self._events: dict[int, list[PerfEvent]] = {}
        self._time: float | None = None
        try:
            self._follow()
        except OSError as error:
            self.close()
            raise open_failure(error, root, own_process=True) from None
        if not self._events:
            raise CannotCount("the inference process has exited")

    def _threads(self) -> set[int]:
        try:
            return {int(entry.name) for entry in self._tasks.iterdir() if entry.name.isdigit()}
        except OSError:
            return set()

    def _follow(self) -> float:
        """Open events of new threads and close those of ended ones; returns the last counts of the latter."""
        threads = self._threads()
        rest = 0.0
        for ended in self._events.keys() - threads:
            events = self._events.pop(ended)
            try:
                rest += sum(event.growth() or 0.0 for event in events)
            except OSError:  # what it counted at the very end is lost
                pass
            finally:
                close_all(events)
        for new in sorted(threads - self._events.keys()):
            opened: list[PerfEvent] = []
            try:
                for config in EVENTS:
                    opened.append(open_event(self._kernel, TYPE_RAW, (config, 0, 0), pid=new, user_only=True))
            except OSError as error:
                close_all(opened)
                if error.errno == errno.ESRCH:  # it ended in the meantime
                    continue
                raise
            self._events[new] = opened
        return rest

    def sample(self, now: float) -> Bandwidth | None:
        before, self._time = self._time, now
        try:
            lines = self._follow()
        except OSError as error:
            raise open_failure(error, self._root, own_process=True) from None
        if not self._events:
            raise CannotCount("the inference process has exited")
        grown = [event.growth() for events in self._events.values() for event in events]
        if before is None or now <= before or any(value is None for value in grown):
            return None
        lines += sum(value or 0.0 for value in grown)
        read = lines * LINE / (now - before)
        return Bandwidth(read, self.name, self.scope, read)

    def close(self) -> None:
        for events in self._events.values():
            close_all(events)
        self._events.clear()
