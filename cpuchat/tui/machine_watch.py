"""Looks at the machine's counters for the chat screen, a few times a second."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from cpuchat.telemetry.machine import MachineSample


class Samples(Protocol):
    """What is used of hardware.monitor.Monitor."""

    def sample(self) -> MachineSample: ...

    def close(self) -> None: ...


def open_monitor(pid: int) -> Samples:
    """The counters for the inference process `pid`. Blocks for some milliseconds."""
    from cpuchat.hardware.monitor import Monitor
    from cpuchat.hardware.topology import read_topology

    monitor = Monitor(read_topology(), pid)
    monitor.sample()  # which opens what there is
    return monitor


class MachineWatch:
    """Use from one event loop. Opening happens in a thread: the first calls have nothing to tell."""

    def __init__(self, opener: Callable[[int], Samples] = open_monitor) -> None:
        self._opener = opener
        self._pid: int | None = None
        self._monitor: Samples | None = None
        self._opening: asyncio.Future[Samples] | None = None

    def sample(self, pid: int | None) -> MachineSample | None:
        """The newest figures; None while there are none. `pid` None: no process to watch."""
        if pid != self._pid:
            self.close()
            self._pid = pid
            if pid is not None:
                self._opening = asyncio.get_running_loop().run_in_executor(None, self._opener, pid)
        if self._opening is not None and self._opening.done():
            opening, self._opening = self._opening, None
            with contextlib.suppress(Exception):  # a machine that cannot be read has no counters
                self._monitor = opening.result()
        return self._monitor.sample() if self._monitor is not None else None

    def close(self) -> None:
        """Give the counters back."""
        self._pid = None
        if self._opening is not None:
            self._opening.add_done_callback(_close)
            self._opening = None
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None


def _close(opening: asyncio.Future[Samples]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
