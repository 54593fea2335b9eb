"""The pool of compute threads of one context, each thread on a CPU of its own."""

from __future__ import annotations

import ctypes
import os
from typing import Any

from cpuchat.engine import bindings
from cpuchat.errors import GenerationFailed


class ThreadPool:
    """Compute threads for one context, attached to it.

    The calling thread computes too and is pinned with the others, so it must be the one that decodes. One pool
    serves one computing context.

    Args:
        context: the llama_context; its `n_threads` and `n_threads_batch` must equal `n_threads`.
        cpus: logical CPUs, at least `n_threads`; thread j gets the j-th.
        poll: how hard idle threads spin before they sleep, 0-100.
    """

    def __init__(self, context: Any, cpus: tuple[int, ...], n_threads: int, poll: int) -> None:
        self._context = context
        # Pinning the caller outlives the pool: put back what it had.
        self._affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        params = bindings.threadpool_params_default(n_threads)
        for cpu in cpus[:n_threads]:
            params.cpumask[cpu] = True
        params.strict_cpu = True
        params.poll = poll
        self._pool = bindings.threadpool_new(ctypes.byref(params))
        if not self._pool:
            raise GenerationFailed(f"The {n_threads} compute threads cannot be started.", "Use fewer threads.")
        bindings.attach_threadpool(context, self._pool, None)

    def free(self) -> None:
        """Detach and end the threads. Call it on the creating thread, before the context is freed."""
        if not self._pool:
            return
        bindings.detach_threadpool(self._context)
        bindings.threadpool_free(self._pool)
        self._pool = None
        if self._affinity is not None:
            os.sched_setaffinity(0, self._affinity)
