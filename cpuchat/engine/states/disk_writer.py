"""Writing to disk in the background: on its own thread, only while nothing is computed, and within a budget."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from time import monotonic
from typing import Final

BYTES_PER_HOUR: Final = 1 << 30
"""Of saved chats. At sixty answers an hour that is 18 MB each."""
_HOUR: Final = 3600.0
_POLL_SECONDS: Final = 0.05
_LOWEST_PRIORITY: Final = 19


class WriteBudget:
    """Bytes that may be written: `per_hour`, saved up for one hour at most.

    A write is allowed while something is left and may overdraw the budget, so that a state larger than the budget is
    written too, and is paid for afterwards: any hour sees at most two budgets and one state.
    """

    def __init__(self, per_hour: int = BYTES_PER_HOUR, clock: Callable[[], float] = monotonic) -> None:
        self._per_hour = per_hour
        self._clock = clock
        self._left = float(per_hour)
        self._at = clock()

    def allows(self) -> bool:
        """Return whether something is left now."""
        now = self._clock()
        self._left = min(self._left + (now - self._at) * self._per_hour / _HOUR, self._per_hour)
        self._at = now
        return self._left > 0

    def spend(self, n: int) -> None:
        """Subtract `n` bytes, allowed or not."""
        self.allows()
        self._left -= n


class DiskWriter:
    """Runs one job at a time, which waits between slices of work while the engine computes.

    Create it before the engine's thread is pinned: its thread inherits the CPUs of the creating one. All methods but
    `wait_until_idle` belong to the engine's thread.
    """

    def __init__(self) -> None:
        self._engine_idle = threading.Event()
        self._engine_idle.set()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="disk", initializer=_lower_priority)
        self._executor.submit(lambda: None)  # starts the thread now
        self._job: Future[None] = Future()
        self._job.set_result(None)

    @property
    def is_busy(self) -> bool:
        """Return whether a job is running."""
        return not self._job.done()

    def start(self, job: Callable[[], None]) -> None:
        """Run `job`, which calls `wait_until_idle` between slices of a few milliseconds; not while one `is_busy`."""
        self._job = self._executor.submit(_logged, job)

    def wait_until_idle(self) -> None:
        """Wait while the engine computes; called by the job."""
        self._engine_idle.wait()

    def pause(self) -> None:
        """Let the job wait: the engine computes from here on."""
        self._engine_idle.clear()

    def resume(self) -> None:
        """Let the job continue: the engine is idle from here on."""
        self._engine_idle.set()

    def finish(self, is_cancelled: Callable[[], bool] = lambda: False) -> None:
        """Wait for the job to end, or until `is_cancelled`, which is asked 20 times a second."""
        was_idle = self._engine_idle.is_set()
        self._engine_idle.set()
        while wait((self._job,), _POLL_SECONDS).not_done and not is_cancelled():
            pass
        if not was_idle:
            self._engine_idle.clear()

    def close(self) -> None:
        """Wait for the job, then end the thread."""
        self.resume()
        self._executor.shutdown()


def _lower_priority() -> None:
    if sys.platform == "linux":  # where each thread has its own niceness
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)


def _logged(job: Callable[[], None]) -> None:
    try:
        job()
    except Exception:  # what could not be written costs time only, but it belongs in the log
        traceback.print_exc()
