"""Priority and garbage collection of the process that draws, a timer of the event loop, and waiting for a worker."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
from collections.abc import Callable
from typing import TypeVar

from textual.worker import Worker, WorkerError

from cpuchat.base.processes import starter

T = TypeVar("T")
NICENESS = 5
_SELDOM = 100  # collections of younger objects before a full one, which takes 10 to 30 ms: some minutes of an answer


def collect_garbage() -> None:
    """Turn garbage collection on, which is off until the first paint.

    What start-up made stays until the end: full collections that walk it would be felt as a stall. Those that walk the
    rest are ten times rarer than by default: a key that is pressed meanwhile waits."""
    gc.freeze()
    young, middle, full = gc.get_threshold()
    gc.set_threshold(young, middle, max(full, _SELDOM))
    gc.enable()


def yield_to_inference() -> None:
    """Let the worker's threads go first: a stalled one costs a token, a late paint does not.

    What computes is started by a thread that is not lowered."""
    starter()
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, 0, max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))


def yield_thread() -> None:
    """Let all others go before this thread, where each thread has its own niceness. Not as far as it goes: whoever
    waits for Python's lock waits for its holder."""
    if sys.platform == "linux":
        yield_to_inference()


class LoopTimer:
    """Calls a function once, later. Textual's timer never fires when it is late at its start, as on a busy machine."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._handle: asyncio.TimerHandle | None = None

    def start(self, seconds: float) -> None:
        """Call it after `seconds`, at once if that is less than 0; nothing happens while the timer runs."""
        if self._handle is None:
            self._handle = asyncio.get_running_loop().call_later(max(0.0, seconds), self._fire)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self) -> None:
        self._handle = None
        self._call()


async def result_of(worker: Worker[T]) -> T | None:
    """Wait for `worker`; None if it was cancelled or failed.

    Whoever waits may be cancelled: with Textual's `wait`, the worker is cancelled then too, and the cancellation
    becomes a `WorkerCancelled`, which ends the app."""

    async def wait() -> T | None:
        try:
            return await worker.wait()
        except WorkerError:
            return None

    waiting = asyncio.create_task(wait())
    await asyncio.wait([waiting])
    return waiting.result()
