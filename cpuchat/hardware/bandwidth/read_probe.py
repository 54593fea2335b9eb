"""The process that measures read bandwidth: `python -m cpuchat.hardware.bandwidth.read_probe --cpus 0,1 --bytes N ...`.

One thread per CPU, pinned before it touches its own memory (so the pages lie where the memory policy of this process
puts them), reads that memory over and over. Time is cut into windows of equal length, the same for all threads; a
thread reports for each window what it read and how long that took it, so that threads which are slower or end later
distort nothing. The first stretch, before the windows, is not counted: there the threads find out how much to read in
one call.

What reads is `memchr` for a byte that is not there: the C libraries have it in SIMD, it stores nothing, and ctypes
lets go of the interpreter lock while it runs. musl's is a plain loop: there numpy's bitwise_or.reduce does it.

Every call takes Python's lock for some microseconds when it returns. Sixteen threads don't feel that, hundreds would
(measured: 2 % and more of their time), so many CPUs are shared out to processes of sixteen threads that start to count
at the same time.

Standard library only, so that the process is small and starts at once. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from time import perf_counter, thread_time

HUGE_PAGE = 2 << 20
_FIRST_CALL = 2 << 20
_CALL_SECONDS = 0.004
"""Target seconds per call: threads check the clock between calls, and take turns in Python there."""
_WARM_UP = 0.06
_ALL_READY_SECONDS = 40.0
_THREADS_PER_PROCESS = 16

Scan = Callable[[int, int], object]
"""Reads `length` bytes at `offset` of a thread's memory."""


class Memory:
    """`size` bytes of 1, in huge pages where available, first touched by the thread that creates it."""

    def __init__(self, size: int) -> None:
        if hasattr(mmap, "MAP_PRIVATE"):
            self._map = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            self._map = mmap.mmap(-1, size + HUGE_PAGE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                self._map.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # A kernel without them.
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.skip = -start % HUGE_PAGE
        self.address = start + self.skip
        self.size = size
        ctypes.memset(self.address, 1, size)

    def scan_with_memchr(self) -> Scan:
        libc = ctypes.CDLL("msvcrt" if sys.platform == "win32" else None)
        libc.memchr.restype = ctypes.c_void_p
        libc.memchr.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
        address, memchr = self.address, libc.memchr
        return lambda offset, length: memchr(address + offset, 0, length)

    def scan_with_numpy(self) -> Scan:
        import numpy as np

        words = np.frombuffer(self._map, dtype=np.uint8)[self.skip : self.skip + self.size].view(np.int64)
        return lambda offset, length: np.bitwise_or.reduce(words[offset // 8 : (offset + length) // 8])


def default_kernel() -> str:
    """Return `memchr`, or `numpy` where the C library's is slow (Linux without glibc)."""
    if not sys.platform.startswith("linux"):
        return "memchr"
    try:
        return "memchr" if os.confstr("CS_GNU_LIBC_VERSION") else "numpy"
    except (ValueError, OSError):
        return "numpy"


def _soon() -> float:
    """Return when to start counting, on the clock of `perf_counter`, which all processes of a machine share."""
    return perf_counter() + _WARM_UP


class Probe:
    """Reads memory with all threads at once.

    Afterwards `rounds[i]` is bytes per second in window i, all threads together, and `shares[i]` the part of its CPU
    that the thread got which got least (1: nothing else ran there).

    `start` is asked when all threads are ready, and says when to start counting.

    Raises (from `run`):
        RuntimeError: a thread could not be pinned or got no memory; the text says which.
    """

    def __init__(
        self, cpus: list[int], size: int, seconds: float, rounds: int, kernel: str, start: Callable[[], float] = _soon
    ) -> None:
        self.cpus = cpus
        self.size = size
        self.seconds = seconds
        self.n_rounds = rounds
        self.kernel = kernel
        self.rounds: list[float] = []
        self.shares: list[float] = []
        self._start = 0.0
        self._when = start
        self._windows: list[list[tuple[float, float]]] = []
        self._failures: list[str] = []
        self._ready = threading.Barrier(len(cpus), action=self._begin)

    def run(self) -> None:
        threads = [threading.Thread(target=self._work, args=(cpu,), daemon=True) for cpu in self.cpus]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failures or len(self._windows) != len(self.cpus):
            raise RuntimeError(self._failures[0] if self._failures else "not all threads were ready in time")
        for windows in zip(*self._windows, strict=True):
            self.rounds.append(sum(rate for rate, _ in windows))
            self.shares.append(min(share for _, share in windows))

    def _begin(self) -> None:
        self._start = self._when()

    def _work(self, cpu: int) -> None:
        try:
            if hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, {cpu})  # Of this thread alone.
        except OSError:
            self._fail(f"CPU {cpu} may not be used by this process")
            return
        try:
            memory = Memory(self.size)
            scan = memory.scan_with_numpy() if self.kernel == "numpy" else memory.scan_with_memchr()
        except (OSError, MemoryError, ValueError, ImportError) as error:
            self._fail(f"CPU {cpu}: {getattr(error, 'strerror', None) or error or type(error).__name__}")
            return
        try:
            self._ready.wait(_ALL_READY_SECONDS)
        except threading.BrokenBarrierError:
            return
        self._windows.append(self._read(scan))

    def _fail(self, why: str) -> None:
        self._failures.append(why)
        self._ready.abort()

    def _read(self, scan: Scan) -> list[tuple[float, float]]:
        """Return bytes per second in each window, and the share of the time that the thread computed."""
        size, length, offset = self.size, min(_FIRST_CALL, self.size), 0
        windows: list[tuple[float, float]] = []
        now = perf_counter()
        for window in range(self.n_rounds + 1):
            begin, end, done, computed = now, self._start + window * self.seconds, 0, thread_time()
            while now < end:
                count = min(length, size - offset)
                scan(offset, count)
                offset = (offset + count) % size
                done += count
                before, now = now, perf_counter()
                if window == 0 and now - before < _CALL_SECONDS / 2:
                    length = min(2 * length, size)
            if window:
                took = now - begin
                windows.append((done / took, (thread_time() - computed) / took) if took > 0 else (0.0, 0.0))
        return windows


def told_by_parent() -> float:
    """Report to the parent process that this one is ready, and wait for the start time."""
    print("ready", flush=True)
    line = sys.stdin.readline()
    if not line:
        os._exit(1)  # The parent is gone.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    return float(line)


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


def run_together(commands: list[list[str]]) -> tuple[list[float], list[float]]:
    """Run several measuring processes that count at the same time; returns rounds and shares of all together. Raises
    RuntimeError: one of them failed; the text is its own.
    """
    parts = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        for command in commands
    ]
    try:
        for part in parts:
            assert part.stdout is not None
            line = part.stdout.readline().strip()
            if line != "ready":
                raise RuntimeError(json.loads(line)["error"] if line else "a measuring process ended early")
        start = _soon()
        for part in parts:
            assert part.stdin is not None
            part.stdin.write(f"{start!r}\n")
        found: list[dict[str, list[float]]] = []
        for part in parts:
            assert part.stdout is not None
            line = part.stdout.readline()
            if not line:
                raise RuntimeError("a measuring process ended early")
            found.append(json.loads(line))
        rounds = [math.fsum(rates) for rates in zip(*(one["rounds"] for one in found), strict=True)]
        return rounds, [min(shares) for shares in zip(*(one["shares"] for one in found), strict=True)]
    finally:
        for part in parts:
            part.kill()
            part.communicate()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpus", required=True, type=lambda text: [int(cpu) for cpu in text.split(",")])
    parser.add_argument("--bytes", required=True, type=int, help="buffer per CPU; a multiple of 2 MiB")
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kernel", choices=("memchr", "numpy"), default=default_kernel())
    parser.add_argument("--threads", type=int, default=_THREADS_PER_PROCESS, help="maximum per process")
    parser.add_argument(
        "--part", action="store_true", help="run as one of several processes: read the start time from stdin"
    )
    given = parser.parse_args(arguments)
    cpus: list[int] = given.cpus
    if hasattr(os, "sched_setaffinity"):
        # The parent may be pinned to one CPU; each thread sets its own affinity.
        try:
            os.sched_setaffinity(0, cpus)
        except OSError:
            pass  # The threads will say which CPU it is.
    try:
        if len(cpus) > given.threads and not given.part:
            from cpuchat.base.processes import python_command

            rounds, shares = run_together([
                [
                    *python_command("-m", "cpuchat.hardware.bandwidth.read_probe"), "--part",
                    "--cpus", ",".join(map(str, cpus[first : first + given.threads])),
                    "--bytes", str(given.bytes), "--seconds", str(given.seconds), "--rounds", str(given.rounds),
                    "--kernel", given.kernel,
                ]
                for first in range(0, len(cpus), given.threads)
            ])  # fmt: skip
        else:
            start = told_by_parent if given.part else _soon
            probe = Probe(cpus, given.bytes, given.seconds, given.rounds, given.kernel, start)
            probe.run()
            rounds, shares = probe.rounds, probe.shares
    except RuntimeError as error:
        print(json.dumps({"error": str(error)}))
        return 1
    refused = os.environ.get("CPUCHAT_MEMORY_REFUSED", "")
    print(json.dumps({"rounds": rounds, "shares": shares, "memory_refused": refused}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
