"""Runs a measurement while the app and the cores are idle; it gives way to everything."""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from textual.screen import Screen
from textual.worker import Worker, WorkerError

from cpuchat.hardware.placement.cores import MAX_BUSY_CORES, BusyCores
from cpuchat.tui.services import Services


class IdleProbe(ABC):
    """Base of such measurements: `stop` it before anything else computes.

    Args:
        is_idle: asked every `seconds`; after so many `checks` in a row that also found the cores idle, the measurement
            begins.
    """

    name = ""

    def __init__(
        self, screen: Screen[Any], services: Services, is_idle: Callable[[], bool], seconds: float, checks: int
    ) -> None:
        self._screen, self._services, self._is_idle, self._checks = screen, services, is_idle, checks
        self._busy = BusyCores()
        self._idle = 0
        self._stopped = False
        self._worker: Worker[None] | None = None
        screen.set_interval(seconds, self._check)

    @property
    def running(self) -> bool:
        return self._worker is not None

    @abstractmethod
    def _is_wanted(self) -> bool:
        """Return whether there is something to measure."""

    @abstractmethod
    async def _measure(self) -> None:
        """Measure and keep the result."""

    @abstractmethod
    async def _cancel(self) -> None:
        """Make a running `_measure` end."""

    def _check(self) -> None:
        wanted = self._worker is None and self._is_wanted() and self._cores_idle()
        idle = wanted and self._is_idle() and self._screen.is_current
        self._idle = self._idle + 1 if idle else 0
        if self._idle >= self._checks:
            self._idle, self._stopped = 0, False
            self._worker = self._screen.run_worker(self._run(), group=self.name, name=self.name)

    def _cores_idle(self) -> bool:
        """Return whether other programs left alone, since the last check, the cores that the loaded model uses."""
        model = self._services.conversation.model
        cpus = model.compute_cpus if model is not None else ()
        busy = self._busy.since_last(cpus or _allowed())
        return busy is not None and busy < MAX_BUSY_CORES

    async def _run(self) -> None:
        try:
            await self._measure()
        finally:
            self._worker = None

    async def stop(self) -> None:
        """Stop the measurement; it starts again when the app is idle."""
        self._idle, worker = 0, self._worker
        if worker is not None:
            self._stopped = True
            await self._cancel()
            with contextlib.suppress(WorkerError):
                await worker.wait()


def _allowed() -> tuple[int, ...]:
    if hasattr(os, "sched_getaffinity"):
        return tuple(os.sched_getaffinity(0))
    return tuple(range(os.cpu_count() or 1))
