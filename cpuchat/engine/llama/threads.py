"""The compute threads of contexts: pinned, and fewer of them while CPUs are gone or other programs compute on them.

Threads wait for each other after every node of a graph: one that shares its CPU costs all of them time slices. So the
allowed CPUs, the cgroup's quota and how long threads wait for a CPU (schedstat,
Documentation/scheduler/sched-stats.rst) are read while they compute.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import platform
import struct
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from time import perf_counter
from typing import Any, Final, NamedTuple

from cpuchat.base.errors import GenerationFailed
from cpuchat.engine.llama import bindings
from cpuchat.engine.llama.bindings import llama
from cpuchat.hardware.sysfs import cpu_quota
from cpuchat.telemetry.units import plural

LOOK_SECONDS: Final = 0.25
"""Seconds between two looks at the allowed CPUs."""
_LOAD_LOOKS: Final = 4  # every so many looks the quota and a file per thread are read, too
_RETRY_SECONDS: Final = 5.0  # that cores are left to other programs, before all threads are tried again
_MAX_WAIT: Final = 0.15
"""Share of the time that fewer threads may wait for a CPU: above it, leaving cores to other programs is no use."""
_MIN_SAMPLE: Final = 200_000_000  # ns that a thread computed or waited; what begins beside a short pass is over soon
_TASKS: Final = Path("/proc/self/task")
_SCHED_SETATTR: Final = {"x86_64": 314, "aarch64": 274, "riscv64": 274}.get(platform.machine())


def leave_cores() -> None:
    """Let the calling thread run on all CPUs of the process: it may come from one that is pinned."""
    if hasattr(os, "sched_setaffinity") and ThreadPool.watches:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, os.sched_getaffinity(os.getpid()))


class CpuWait:
    """Tells for which share of the time since it was made `n_threads` threads ran, and waited for a core that another
    program had: those that ran most, as threads which write text or states may wait for long. In the rest they sleep,
    such as at a barrier while another thread waits."""

    def __init__(self, n_threads: int) -> None:
        self._n_threads = n_threads
        self._before, self._start = dict(_thread_times(_thread_ids())), perf_counter()

    def share(self) -> float | None:
        """Return the share that they waited; None where the kernel does not tell."""
        return self.shares()[0]

    def shares(self) -> tuple[float, float] | tuple[None, None]:
        """Return the shares that they waited and ran; None where the kernel does not tell."""
        after, seconds = dict(_thread_times(self._before)), perf_counter() - self._start
        if not after or seconds <= 0:
            return None, None
        before, whole = self._before, 1e9 * seconds * self._n_threads
        spans = sorted((ran - before[thread][0], waited - before[thread][1]) for thread, (ran, waited) in after.items())
        ran, waited = (min(sum(ns) / whole, 1.0) for ns in zip(*spans[-self._n_threads :], strict=True))
        return waited, ran


class PoolThreads(NamedTuple):
    """A ggml_threadpool, and the kernel's IDs of its threads, the caller's first."""

    address: int
    ids: tuple[int, ...]


class ThreadPool:
    """Compute threads that contexts can be attached to, one computing context at a time. Contexts that compute
    sequentially share a pool, because the threads of a second one would keep spinning on the cores of the first. The
    calling thread computes too and is pinned with the others, so it must be the one that decodes.

    There is a thread for each logical CPU of `cpus`; idle, it spins as hard as `poll` (0-100) before it sleeps.
    `roams`: CPUs among which they may move; () pins each to its own. `n_threads` compute while nothing keeps them from
    it, `n_active` now: the results are the same but for rounding. `note`: why they are fewer, when they last were;
    `left_any`: whether cores were left to other programs since an answer began."""

    watches = True
    """The main thread's CPUs are those of the process: not where that thread computes."""

    def __init__(self, cpus: tuple[int, ...], poll: int, roams: tuple[int, ...] = ()) -> None:
        self.n_threads = self.n_active = len(cpus)
        self.cpus = cpus
        self.note = ""
        self._poll = poll
        self._roams = roams
        # Pinning the caller outlives the pool: restored by `free`.
        self._affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        if threading.get_native_id() == os.getpid():
            ThreadPool.watches = False
        self._known = self._allowed()
        self._pools: dict[int, PoolThreads] = {}
        self._attached: dict[int, int] = {}  # the ggml_threadpool of each context, which several sequences may have
        self._masks: tuple[frozenset[int], ...] = ()
        self._next_look = self._retry = 0.0
        self.left_any = False
        self._looks = self._left = 0
        self._quota: float | None = None
        self._times: dict[int, tuple[int, int]] = {}
        self.threads = self._start(len(cpus))
        self.look(0.0)

    def attach(self, sequence: Any) -> None:
        """Let `sequence` compute on this pool from now on. Pins the caller, which must have created it, to its CPU."""
        sequence.pool = self
        self._attach(sequence)
        self._pin()

    def _attach(self, sequence: Any) -> None:
        bindings.attach_threadpool(sequence.context, self.threads.address, None)
        llama.llama_set_n_threads(sequence.context, self.n_active, self.n_active)
        self._attached[id(sequence.context)] = self.threads.address

    def begin_answer(self, now: float) -> None:
        """Forget the note of the last answer, and look at the CPUs."""
        self.note, self.left_any = "", False
        self.look(now)

    def prepare(self, sequence: Any, now: float) -> None:
        """Let as many threads compute the next pass of an attached `sequence` as the CPUs allow."""
        if now >= self._next_look:
            self.look(now)
        if self._attached.get(id(sequence.context)) != self.threads.address:
            self._attach(sequence)

    def look(self, now: float) -> None:
        """Choose how many threads compute, and on which CPUs, by what is allowed and by what other programs do."""
        self._next_look = now + LOOK_SECONDS
        if self._affinity is None:
            return
        allowed, home = self._allowed(), {*(self._roams or self.cpus)}
        cpus = home & allowed | allowed - self._known or allowed
        max_threads = min(self.n_threads, len(cpus))
        why = f"only {plural(len(cpus), 'CPU')} {'is' if len(cpus) == 1 else 'are'} allowed now"
        if self._looks % _LOAD_LOOKS == 0:
            self._quota = cpu_quota()
            self._left = self._left_to_others(now, max_threads)
        self._looks += 1
        if self._quota is not None and max(math.floor(self._quota), 1) < max_threads:
            max_threads, why = max(math.floor(self._quota), 1), f"the cgroup CPU quota is {self._quota:g} now"
        if 0 < self._left < max_threads:
            max_threads -= self._left
            why, self.left_any = f"other programs use {plural(self._left, 'core')}", True
        if max_threads < self.n_threads:
            self.note = f"{self.n_threads} → {plural(max_threads, 'thread')}: {why}"
        if max_threads != self.n_active:
            self.n_active, self.threads = max_threads, self._pools.get(max_threads) or self._start(max_threads)
            self._times = dict(_thread_times(self.threads.ids))
        is_pinned = max_threads == self.n_threads and not self._roams and home <= allowed
        # The caller has the last CPU, as ggml would place it.
        own = (self.cpus[-1], *self.cpus[:-1])
        masks = tuple(frozenset({cpu}) for cpu in own) if is_pinned else (frozenset(cpus),) * max_threads
        if masks != self._masks or os.sched_getaffinity(0) != masks[0]:
            self._masks = masks
            self._pin()

    def _left_to_others(self, now: float, max_threads: int) -> int:
        """Return how many cores to leave to other programs: one of them on a core slows all threads down to half, so
        leaving up to half of the cores to them is no loss."""
        before, self._times = self._times, dict(_thread_times(self.threads.ids))
        waits: list[float] = []  # share of its time that each thread waited for a CPU since the last call
        for thread, (ran, waited) in self._times.items():
            ran_before, waited_before = before.get(thread, (ran, waited))
            if (total := ran - ran_before + waited - waited_before) >= _MIN_SAMPLE:
                waits.append(min((waited - waited_before) / total, 0.95))
        if self._left:
            if now < self._retry and max(waits, default=0.0) < _MAX_WAIT:
                return self._left
            self._retry = now + (0.0 if now >= self._retry else 2 * _RETRY_SECONDS)
            return 0
        # A thread that waits for half of the time shares its core with one program; less if it also sleeps.
        others = round(sum(share / (1 - share) for share in waits) + 0.2)
        if now < self._retry or not 0 < 2 * others <= max_threads:
            return 0
        self._retry = now + _RETRY_SECONDS
        return others

    def _allowed(self) -> set[int]:
        """Return the CPUs that this process may use; those of the pool where that cannot be told."""
        if self._affinity is None or not self.watches:
            return {*self.cpus, *self._roams}
        return os.sched_getaffinity(os.getpid())

    def _start(self, n: int) -> PoolThreads:
        """Start a pool of `n` threads: in a larger one, those without work would spin. Raises GenerationFailed."""
        params = bindings.threadpool_params_default(n)
        params.poll = self._poll
        before = _thread_ids()
        address = bindings.threadpool_new(ctypes.byref(params))
        if not address:
            raise GenerationFailed(f"Cannot start {n} compute threads.", "Use fewer threads.")
        new = sorted(_thread_ids() - before)[: n - 1]
        threads = self._pools[n] = PoolThreads(address, (threading.get_native_id(), *new))
        # A thread that wakes at a barrier is to preempt other programs while they have had more than their share: it
        # asks for short slices of the same share (sched_setattr(2), since Linux 6.12; before, nothing happens).
        for thread in threads.ids if sys.platform == "linux" and _SCHED_SETATTR is not None else ():
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                nice = os.getpriority(os.PRIO_PROCESS, thread)
                # struct sched_attr: size, policy, flags, nice, priority, runtime (100 µs is the shortest), ...
                attributes = struct.pack("=IIQiIQQQ", 48, os.SCHED_OTHER, 0, nice, 0, 100_000, 0, 0)
                ctypes.CDLL(None).syscall(_SCHED_SETATTR, thread, attributes, 0)
        return threads

    def _pin(self) -> None:
        for thread, mask in zip(self.threads.ids, self._masks, strict=False):
            with contextlib.suppress(OSError):  # the CPUs have changed since: the next look sees it
                os.sched_setaffinity(thread, mask)

    def rest(self) -> None:
        """Let the threads sleep until the next pass. By themselves they spin for about 0.1 s after one, on cores
        that another program, such as the other side of a comparison, may need."""
        for threads in self._pools.values():
            bindings.threadpool_pause(threads.address)

    def free(self) -> None:
        """End the threads, after all contexts are detached, on the creating thread. Calling it again does nothing."""
        if self._pools and self._affinity is not None:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, self._affinity)
        while self._pools:
            bindings.threadpool_free(self._pools.popitem()[1].address)


def _thread_ids() -> set[int]:
    """Return the kernel's IDs of all threads of this process; empty where it has no /proc."""
    try:
        return {int(task.name) for task in _TASKS.iterdir()}
    except OSError:
        return set()


def _thread_times(threads: Iterable[int]) -> Iterable[tuple[int, tuple[int, int]]]:
    """Yield each thread with how long it has run and waited for a CPU, in ns; none where the kernel does not tell."""
    for thread in threads:
        with contextlib.suppress(OSError, ValueError, IndexError):
            ran, waited = (_TASKS / str(thread) / "schedstat").read_text("ascii").split()[:2]
            yield thread, (int(ran), int(waited))
