"""Reads the counters of memory traffic and power for the screens that show them, a few times a second."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from cpuchat.daemon_thread import run_in_daemon_thread

if TYPE_CHECKING:
    from cpuchat.hardware.monitor import Monitor
    from cpuchat.telemetry.machine import MachineSample

Opener = Callable[[int | None], "Monitor"]


def open_monitor(pid: int | None) -> Monitor:
    """Open the counters of the inference process `pid`, or those of the machine alone. Blocks for some milliseconds."""
    from cpuchat.hardware.monitor import Monitor
    from cpuchat.hardware.topology import read_topology

    return Monitor(read_topology(), pid)


class MachineWatch:
    """Samples the counters for all screens: two readers of the same events would take them from each other.

    Use from one event loop. Counters are opened and read in threads, so a slow kernel blocks no key; the first calls
    return None.
    """

    def __init__(self, opener: Opener = open_monitor) -> None:
        self._opener = opener
        self._pid: int | None = None
        self._watching = False
        self._look: asyncio.Task[tuple[Monitor, MachineSample]] | None = None
        self._monitor: Monitor | None = None
        self._newest: MachineSample | None = None
        self._failed = False

    def sample(self, pid: int | None) -> MachineSample | None:
        """Return the newest figures, None while there are none. `pid` None: of the machine alone."""
        if pid != self._pid or not self._watching:
            self.close()
            self._pid, self._watching = pid, True
        if self._look is not None and self._look.done():
            look, self._look = self._look, None
            try:
                self._monitor, self._newest = look.result()
            except Exception:  # a machine that cannot be read has no counters
                self._failed = True
        if self._look is None and not self._failed:
            opener, monitor = self._opener, self._monitor
            self._look = asyncio.ensure_future(run_in_daemon_thread(lambda: _look(opener, pid, monitor)))
        return self._newest

    def close(self) -> None:
        """Close the counters; `sample` opens them again."""
        look, monitor = self._look, self._monitor
        self._pid = self._look = self._monitor = self._newest = None
        self._watching = self._failed = False
        if look is not None:
            look.add_done_callback(lambda look: _close(look, monitor))
        elif monitor is not None:
            monitor.close()


def _look(opener: Opener, pid: int | None, monitor: Monitor | None) -> tuple[Monitor, MachineSample]:
    monitor = monitor or opener(pid)
    return monitor, monitor.sample()


def _close(look: asyncio.Task[tuple[Monitor, MachineSample]], monitor: Monitor | None) -> None:
    if not look.cancelled() and look.exception() is None:
        monitor = look.result()[0]
    if monitor is not None:
        monitor.close()
