"""Pools of compute threads, each thread pinned to its own CPU."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

from cpuchat.engine.llama import bindings
from cpuchat.engine.llama.bindings import llama
from cpuchat.errors import GenerationFailed


def cpu_wait_seconds() -> float | None:
    """Return how long all threads of this process have waited for a core while ready to run.

    None where the kernel does not tell (schedstat, Documentation/scheduler/sched-stats.rst).
    """
    try:
        tasks = Path("/proc/self/task").iterdir()
        return 1e-9 * sum(int((task / "schedstat").read_text("ascii").split()[1]) for task in tasks)
    except (OSError, ValueError, IndexError):
        return None


def cpu_wait_share(before: float | None, seconds: float, n_threads: int) -> float | None:
    """Return the share of the last `seconds` for which `n_threads` threads waited, since `cpu_wait_seconds` was
    `before`; None where that is not known.
    """
    after = cpu_wait_seconds()
    if before is None or after is None or seconds <= 0:
        return None
    return max(0.0, after - before) / (seconds * n_threads)


class ThreadPool:
    """Compute threads that contexts can be attached to.

    The calling thread computes too and is pinned with the others, so it must be the one that decodes. A pool serves
    one computing context at a time: contexts that compute sequentially share one, because the threads of a second pool
    would keep spinning for a while on the cores that the first one needs.

    Args:
        cpus: logical CPUs below 512 (GGML_MAX_N_THREADS, the length of a mask), one for each thread.
        poll: how hard idle threads spin before they sleep, 0-100.
    """

    def __init__(self, cpus: tuple[int, ...], poll: int) -> None:
        self.n_threads = len(cpus)
        self.cpus = cpus
        # Pinning the caller outlives the pool: restored by `free`.
        self._affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        params = bindings.threadpool_params_default(self.n_threads)
        for cpu in self.cpus:
            params.cpumask[cpu] = True
        params.strict_cpu = True
        params.poll = poll
        self._pool = bindings.threadpool_new(ctypes.byref(params))
        if not self._pool:
            raise GenerationFailed(f"Cannot start {self.n_threads} compute threads.", "Use fewer threads.")
        self._pinned = os.sched_getaffinity(0) if self._affinity is not None else None

    def attach(self, context: Any) -> None:
        """Let `context` compute on this pool from now on. Pins the caller, which must have created it, to its CPU."""
        bindings.attach_threadpool(context, self._pool, None)
        llama.llama_set_n_threads(context, self.n_threads, self.n_threads)
        if self._pinned is not None:
            os.sched_setaffinity(0, self._pinned)

    def rest(self) -> None:
        """Let the threads sleep until the next pass. By themselves they spin for about 0.1 s after one, on cores
        that another program, such as the other side of a comparison, may need."""
        if self._pool:
            bindings.threadpool_pause(self._pool)

    def free(self) -> None:
        """End the threads, after all contexts are detached, on the creating thread. Calling it again does nothing."""
        if not self._pool:
            return
        bindings.threadpool_free(self._pool)
        self._pool = None
        if self._affinity is not None:
            os.sched_setaffinity(0, self._affinity)
