"""Writing to disk beside the engine: on a thread of its own, only while nothing is computed, and not without end."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable
from time import monotonic
from typing import Final

BYTES_PER_HOUR: Final = 1 << 30
"""Of saved chats. At sixty answers an hour that is 18 MB each."""
_HOUR: Final = 3600.0
_LOOK_SECONDS: Final = 0.05
_LOWEST_PRIORITY: Final = 19


class WriteBudget:
    """Bytes that may be written: `per_hour`, saved up for one hour at most.

    A write is allowed while something is left and may overdraw what is left, so that a state larger than the budget
    is written too, and is paid for afterwards: any hour sees at most two budgets and one state.
    """

    def __init__(self, per_hour: int = BYTES_PER_HOUR, clock: Callable[[], float] = monotonic) -> None:
        self._per_hour = per_hour
        self._clock = clock
        self._left = float(per_hour)
        self._at = clock()

    def allows(self) -> bool:
        """Something is left now."""
        now = self._clock()
        self._left = min(self._left + (now - self._at) * self._per_hour / _HOUR, self._per_hour)
        self._at = now
        return self._left > 0

    def spend(self, n: int) -> None:
        """`n` bytes are written, allowed or not."""
        self.allows()
        self._left -= n


class DiskWriter:
    """One job at a time, on a thread that waits between slices of work while the engine computes.

    Make it before the engine's thread is pinned: it inherits the CPUs of its maker. All methods but `wait_for_quiet`
    belong to the engine's thread.
    """

    def __init__(self) -> None:
        self._quiet = threading.Event()
        self._quiet.set()
        self._idle = threading.Event()
        self._idle.set()
        self._job: Callable[[], None] | None = None
        self._wanted = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name="disk", daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        """There is no job."""
        return self._idle.is_set()

    def start(self, job: Callable[[], None]) -> None:
        """Have `job` done; only when idle. It calls `wait_for_quiet` between slices of a few milliseconds."""
        self._job = job
        self._idle.clear()
        self._wanted.release()

    def wait_for_quiet(self) -> None:
        """For a job: wait while the engine computes."""
        self._quiet.wait()

    def give_way(self) -> None:
        """The engine computes from here on."""
        self._quiet.clear()

    def go_on(self) -> None:
        """The engine rests from here on."""
        self._quiet.set()

    def finish(self, give_up: Callable[[], bool] = lambda: False) -> None:
        """Wait until the job is done, or until `give_up` says so, which is asked 20 times a second."""
        was_quiet = self._quiet.is_set()
        self._quiet.set()
        while not self._idle.wait(_LOOK_SECONDS) and not give_up():
            pass
        if not was_quiet:
            self._quiet.clear()

    def close(self) -> None:
        """Finish what is under way and let the thread end."""
        self.finish()
        self._job = None
        self._wanted.release()
        self._thread.join()

    def _run(self) -> None:
        if sys.platform == "linux":  # where a thread has a niceness of its own
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        while True:
            self._wanted.acquire()
            job, self._job = self._job, None
            if job is None:
                return
            try:
                job()
            except Exception:  # what could not be written costs time only, but whoever reads the log shall know
                traceback.print_exc()
            finally:
                del job  # and the memory that it holds
                self._idle.set()
