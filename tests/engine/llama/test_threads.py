"""Tests how many threads of a pool compute, and where, as the CPUs and the load of other programs change."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpuchat.engine.llama import threads
from cpuchat.engine.llama.threads import ThreadPool
from tests.engine.conftest import Load

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="affinity and schedstat are Linux's")
BOTH, NONE = (0, 1), (0.0, 0.0)


class Kernel:
    """What the kernel tells and is told: allowed CPUs, quota, how long each thread ran and waited, masks."""

    def __init__(self) -> None:
        self.allowed = {0, 1, 2, 3}
        self.quota: float | None = None
        self.waits: list[float] = []
        self.masks: dict[int, frozenset[int]] = {}
        self.pools: list[ThreadPool] = []
        self._clock: dict[int, tuple[int, int]] = {}

    def times(self, ids: tuple[int, ...]) -> Iterator[tuple[int, tuple[int, int]]]:
        """Each thread has run and waited for a second more than at the last call, in its share."""
        for thread, wait in zip(ids, self.waits or [0.0] * len(ids), strict=False):
            ran, waited = self._clock.get(thread, (0, 0))
            self._clock[thread] = ran + int(1e9 * (1 - wait)), waited + int(1e9 * wait)
            yield thread, self._clock[thread]

    def pool(self, cpus: tuple[int, ...], roams: tuple[int, ...] = ()) -> ThreadPool:
        pool = ThreadPool(cpus, 0, roams)
        self.pools.append(pool)
        self.looked(pool, 0.5)
        return pool

    def looked(self, pool: ThreadPool, *moments: float) -> tuple[int, str]:
        """Look as often as makes a look at the load, at each moment; returns the threads and the note."""
        for moment in moments:
            for _ in range(threads._LOAD_LOOKS):
                pool.note = ""
                pool.look(moment)
        return pool.n_active, pool.note


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    kernel = Kernel()
    monkeypatch.setattr(threads, "cpu_quota", lambda: kernel.quota)
    monkeypatch.setattr(threads, "_thread_times", kernel.times)
    monkeypatch.setattr(ThreadPool, "_allowed", lambda _: set(kernel.allowed))
    monkeypatch.setattr(
        ThreadPool, "_pin", lambda pool: kernel.masks.update(zip(pool.threads.ids, pool._masks, strict=True))
    )
    yield kernel
    for pool in kernel.pools:
        pool.free()


def own(kernel: Kernel, pool: ThreadPool) -> list[set[int]]:
    return [set(kernel.masks[thread]) for thread in pool.threads.ids]


@pytest.mark.parametrize(
    ("cpus", "allowed", "n", "where", "note"),
    [
        ((0, 1), {0, 1, 2, 3}, 2, [{1}, {0}], ""),
        ((0, 1), {0, 2}, 1, [{0}], "2 → 1 thread: only 1 CPU is allowed now"),
        ((0, 1), {3}, 1, [{3}], "2 → 1 thread: only 1 CPU is allowed now"),
        ((0, 1), {2, 3}, 2, [{2, 3}] * 2, ""),
        ((0, 1, 2), {1, 2}, 2, [{1, 2}] * 2, "3 → 2 threads: only 2 CPUs are allowed now"),
        ((0, 1), {1, 7, 8}, 2, [{1, 7, 8}] * 2, ""),  # the cpuset has moved
        ((0,), {0, 1, 7}, 1, [{0}], ""),  # more CPUs are no reason to use more
    ],
    ids=["all", "one of two", "another one", "two others", "two of three", "moved", "more"],
)
def test_the_cpus_that_are_allowed_now_compute(
    kernel: Kernel, cpus: tuple[int, ...], allowed: set[int], n: int, where: list[set[int]], note: str
) -> None:
    pool = kernel.pool(cpus)
    kernel.allowed = allowed
    assert kernel.looked(pool, 1.0) == (n, note)
    assert own(kernel, pool) == where
    kernel.allowed = {0, 1, 2, 3}
    assert kernel.looked(pool, 2.0) == (len(cpus), "")
    assert own(kernel, pool) == [{cpu} for cpu in (cpus[-1], *cpus[:-1])]


@pytest.mark.parametrize(
    ("quota", "n", "note"),
    [
        (4.0, 3, ""),
        (2.5, 2, "3 → 2 threads: the cgroup CPU quota is 2.5 now"),
        (0.3, 1, "3 → 1 thread: the cgroup CPU quota is 0.3 now"),
    ],
    ids=["4", "2.5", "0.3"],
)
def test_a_quota_that_shrinks_leaves_whole_cpus(kernel: Kernel, quota: float, n: int, note: str) -> None:
    pool = kernel.pool((0, 1, 2))
    kernel.quota = quota
    assert kernel.looked(pool, 1.0) == (n, note)
    kernel.quota = None
    assert kernel.looked(pool, 2.0) == (3, "")


@pytest.mark.parametrize(
    ("waits", "n"),
    [
        ([0.5, 0.0], 1),
        ([0.25, 0.25], 1),  # one program that moves
        ([0.5, 0.5], 2),  # nothing is gained by leaving a core where all are as busy
        ([0.08, 0.05], 2),
        ([0.5, 0.0, 0.0, 0.0], 3),
        ([0.5, 0.5, 0.0, 0.0], 2),
        ([0.5, 0.5, 0.5, 0.0], 4),
        ([0.5], 1),
    ],
)
def test_cores_are_left_to_programs_that_would_slow_all_threads_down(
    kernel: Kernel, waits: list[float], n: int
) -> None:
    pool = kernel.pool(tuple(range(len(waits))))
    kernel.waits = waits
    active, note = kernel.looked(pool, 1.0)
    left = len(waits) - n
    assert active == n
    cores = "1 core" if left == 1 else f"{left} cores"
    threads_left = "1 thread" if n == 1 else f"{n} threads"
    assert note == (f"{len(waits)} → {threads_left}: other programs use {cores}" if left else "")
    assert pool.left_any == (left > 0)
    if left:
        assert own(kernel, pool) == [set(range(len(waits)))] * n, "they move to cores that are idle"


def test_all_threads_are_tried_again_and_at_once_where_fewer_wait_too(kernel: Kernel) -> None:
    pool = kernel.pool(BOTH)
    kernel.waits = [0.5, 0.0]
    assert kernel.looked(pool, 1.0)[0] == 1
    kernel.waits = [0.0]
    assert kernel.looked(pool, 2.0)[0] == 1
    assert kernel.looked(pool, 1.0 + threads._RETRY_SECONDS)[0] == 2
    kernel.waits = list(NONE)
    assert kernel.looked(pool, 7.0) == (2, "")  # the other program has ended
    kernel.waits = [0.5, 0.0]
    assert kernel.looked(pool, 8.0)[0] == 1
    kernel.waits = [0.33]  # a second program has begun
    assert kernel.looked(pool, 9.0)[0] == 2
    kernel.waits = [0.5, 0.1]
    assert kernel.looked(pool, 10.0)[0] == 2, "what was no use is not tried again soon"
    assert kernel.looked(pool, 9.0 + 2 * threads._RETRY_SECONDS)[0] == 1


def test_a_thread_of_the_process_itself_is_not_pinned_by_its_own_pool() -> None:
    """The CPUs of a process are those of its main thread, while another one computes and is pinned."""
    code = (
        "import os, threading\n"
        "from cpuchat.engine.llama.threads import ThreadPool\n"
        "cpus = tuple(sorted(os.sched_getaffinity(0)))\n"
        "def compute():\n"
        "    pool = ThreadPool(cpus, 0)\n"
        "    os.sched_setaffinity(os.getpid(), cpus[:1])\n"
        "    pool.look(1.0)\n"
        "    assert pool.n_active == 1 and os.sched_getaffinity(0) == {cpus[0]}, pool.note\n"
        "    os.sched_setaffinity(os.getpid(), cpus)\n"
        "    pool.look(2.0)\n"
        "    assert pool.n_active == len(cpus) and os.sched_getaffinity(0) == {cpus[-1]}\n"
        "    pool.free()\n"
        "    assert os.sched_getaffinity(0) == {*cpus}\n"
        "thread = threading.Thread(target=compute)\n"
        "thread.start()\n"
        "thread.join()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_thread_that_waits_for_another_one_sleeps(load: Load, tiny_model: Path) -> None:
    """Two threads on one CPU: the engine's own barrier would spin for the whole time slice that the other one needs."""
    cpus = sorted(os.sched_getaffinity(0))[:2]
    if len(cpus) < 2:
        pytest.skip("one CPU only")
    model = load(tiny_model, threads=tuple(cpus))
    model.sequence.step(65)
    caller, other = model.pool.threads.ids
    os.sched_setaffinity(other, os.sched_getaffinity(caller))
    before = slept(caller) + slept(other)
    for token in range(66, 71):
        model.sequence.step(token)
    assert slept(caller) + slept(other) - before >= 5


def slept(thread: int) -> int:
    """Return how often a thread has left its CPU by itself."""
    status = (Path("/proc/self/task") / str(thread) / "status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("voluntary_ctxt_switches"))
