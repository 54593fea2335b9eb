"""Pools of compute threads, each thread on a CPU of its own."""

from __future__ import annotations

import ctypes
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from cpuchat.engine.llama import bindings
from cpuchat.engine.llama.bindings import llama
from cpuchat.errors import GenerationFailed, UsageError
from cpuchat.hardware.topology import Topology, read_topology

MAX_CPUS: Final = 512
"""GGML_MAX_N_THREADS, the length of a CPU mask: threads cannot be pinned to CPUs with higher numbers."""


def usable_topology() -> Topology:
    """The machine, with those CPUs as allowed ones that threads can be pinned to.

    Raises:
        UsageError: there is none.
    """
    topology = read_topology()
    cpus = tuple(cpu for cpu in topology.allowed if cpu < MAX_CPUS)
    if not cpus:
        raise UsageError(
            f"This process may only use CPUs from number {MAX_CPUS} on, which llama.cpp cannot use.",
            "Start it on others, as with `taskset -c 0-31 cpuchat`.",
        )
    return topology if cpus == topology.allowed else replace(topology, allowed=cpus)


def cpu_wait_seconds() -> float | None:
    """How long threads of this process have been ready to run and waited for a core, all together; None where the
    kernel does not tell (schedstat, Documentation/scheduler/sched-stats.rst)."""
    try:
        tasks = Path("/proc/self/task").iterdir()
        return 1e-9 * sum(int((task / "schedstat").read_text("ascii").split()[1]) for task in tasks)
    except (OSError, ValueError, IndexError):
        return None


class ThreadPool:
    """Compute threads that contexts can be attached to.

    The calling thread computes too and is pinned with the others, so it must be the one that decodes. A pool serves
    one computing context at a time: contexts that compute in turn share one, because the threads of a second pool
    would go on spinning for a while on the cores that the first one needs.

    Args:
        cpus: logical CPUs, at least `n_threads`; thread j gets the j-th.
        poll: how hard idle threads spin before they sleep, 0-100.
    """

    def __init__(self, cpus: tuple[int, ...], n_threads: int, poll: int) -> None:
        self.n_threads = n_threads
        self.cpus = cpus[:n_threads]
        # Pinning the caller outlives the pool: put back what it had.
        self._affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        params = bindings.threadpool_params_default(n_threads)
        for cpu in self.cpus:
            params.cpumask[cpu] = True
        params.strict_cpu = True
        params.poll = poll
        self._pool = bindings.threadpool_new(ctypes.byref(params))
        if not self._pool:
            raise GenerationFailed(f"The {n_threads} compute threads cannot be started.", "Use fewer threads.")
        self._pinned = os.sched_getaffinity(0) if self._affinity is not None else None

    def attach(self, context: Any) -> None:
        """Let `context` compute on this pool from now on; the caller is pinned to its CPU of it."""
        bindings.attach_threadpool(context, self._pool, None)
        llama.llama_set_n_threads(context, self.n_threads, self.n_threads)
        if self._pinned is not None:
            os.sched_setaffinity(0, self._pinned)

    @staticmethod
    def detach(context: Any) -> None:
        """Call it before the pool or the context is freed."""
        bindings.detach_threadpool(context)

    def free(self) -> None:
        """End the threads, after all contexts are detached. Call it on the creating thread; again does nothing."""
        if not self._pool:
            return
        bindings.threadpool_free(self._pool)
        self._pool = None
        if self._affinity is not None:
            os.sched_setaffinity(0, self._affinity)
