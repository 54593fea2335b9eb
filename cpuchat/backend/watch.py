"""Ends a worker that llama.cpp keeps from stopping, or that takes far more memory than its model needs.

A prefill obeys a cancel within a second, so only cancels that are not obeyed count, and only the CPU time that one
thread spends on them: a worker that is slow, swapped out or stopped by a debugger is left alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from cpuchat.backend.process import WorkerProcess
from cpuchat.errors import WorkerStuck
from cpuchat.protocol import Failed

STUCK_CPU_SECONDS: Final = 4.0
"""CPU time of one thread after a cancel."""
_POLL_SECONDS: Final = 0.5
_HINT: Final = "The model is loaded again with the next message. If a grammar or schema was used, simplify it."


async def watch_over(
    worker: WorkerProcess, is_cancelled: Callable[[], bool], most_growth: int, longest_pass: float
) -> None:
    """Watch a worker that answers a request, until cancelled from here or the worker is gone.

    Args:
        is_cancelled: whether the worker was told to stop.
        most_growth: bytes of memory of its own that the worker may take during the request.
        longest_pass: seconds that a recurrent model, which stops between passes only, may take for one.
    """
    import psutil  # 10 ms

    try:
        process = psutil.Process(worker.pid)
        at_start, spent = _own_bytes(process), None
        while worker.alive:
            await asyncio.sleep(_POLL_SECONDS)
            grown = _own_bytes(process) - at_start
            if grown > most_growth:
                worker.end(_failure(f"it took {grown / 1e9:.1f} GB for one answer"))
            if is_cancelled():
                times = {one.id: one.user_time + one.system_time for one in process.threads()}
                spent, limit = times if spent is None else spent, STUCK_CPU_SECONDS + longest_pass
                if max((time - spent.get(id, 0.0) for id, time in times.items()), default=0.0) > limit:
                    worker.end(_failure("it did not stop when it was told to"))
    except psutil.Error:  # it is gone, or hidden from us
        return


def _own_bytes(process: object) -> int:
    """Return the resident memory that no file is behind, where the system tells it apart."""
    info = process.memory_info()  # type: ignore[attr-defined]
    return info.rss - getattr(info, "shared", 0)


def _failure(reason: str) -> Failed:
    return Failed(code=WorkerStuck.code, message=f"The inference worker was ended: {reason}.", hint=_HINT)
