"""The process that measures read bandwidth: `python -m cpuchat.hardware.bandwidth.read_probe --cpus 0,1 --bytes N ...`.

One thread per CPU, pinned before it touches its own memory (so the pages lie where the memory policy of this process
puts them), reads that memory over and over. Time is cut into windows of equal length, the same for all threads; a
thread reports for each window what it read and how long that took it, so that threads which are slower or end later
distort nothing. The first stretch, before the windows, is not counted.

The engine's build has a library that does all of it (`cpuchat/kernels/read.cpp`). Where that is missing or cannot be
opened, `memchr` reads, for a byte that is not there: that stores nothing, and ctypes lets go of the interpreter lock
while it runs. It comes to 60 to 90 % of the library's figures: one stream does not use up the memory, and hundreds of
threads wait for Python's lock.

Standard library only, so that the process is small and starts at once. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import json
import mmap
import os
import sys
import threading
from time import perf_counter, thread_time

HUGE_PAGE = 2 << 20
_CALL_BYTES = 32 << 20
"""Read between two looks at the clock, when threads take turns in Python: some milliseconds."""
_WARM_UP = 0.06
_ALL_READY_SECONDS = 40.0


class ProbeBuffer:
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
        self.address = start + -start % HUGE_PAGE
        self.size = size
        ctypes.memset(self.address, 1, size)
        self._memchr = ctypes.CDLL("msvcrt" if sys.platform == "win32" else None).memchr
        self._memchr.restype = ctypes.c_void_p
        self._memchr.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

    def scan(self, offset: int, length: int) -> int | None:
        """Read `length` bytes at `offset`; return where there is a 0."""
        return self._memchr(self.address + offset, 0, length)


Windows = list[tuple[float, float]]
"""(bytes per second, share of its CPU that a thread got) of each window"""


_REFUSED = "CPU {} may not be used by this process"


def read_with_library(
    library: str, cpus: list[int], size: int, seconds: float, rounds: int
) -> tuple[list[float], list[float]]:
    """Return for each window the bytes per second of all threads together, and the part of its CPU that the thread got
    which got least (1: nothing else ran there). Raises RuntimeError: a thread could not be pinned or got no memory, the
    text says which; OSError and AttributeError: there is no such library, or it is damaged or of another kind."""
    n, windows = len(cpus), ctypes.c_double * rounds
    rates, shares = windows(), windows()
    read = ctypes.CDLL(library).cpuchat_read
    failed = read((ctypes.c_int * n)(*cpus), n, ctypes.c_size_t(size), ctypes.c_double(seconds), rounds, rates, shares)
    if failed:
        cpu = cpus[(abs(failed) - 1) % n]
        why = os.strerror(errno.ENOMEM) if failed >= -n else "no more threads may be started"
        raise RuntimeError(_REFUSED.format(cpu) if failed > 0 else f"CPU {cpu}: {why}")
    return list(rates), list(shares)


def read_without(cpus: list[int], size: int, seconds: float, rounds: int) -> tuple[list[float], list[float]]:
    """As `read_with_library`, with a thread of Python's per CPU. Raises RuntimeError."""
    start: list[float] = []
    ready = threading.Barrier(len(cpus), action=lambda: start.append(perf_counter() + _WARM_UP))
    found: list[Windows] = []
    failures: list[str] = []

    def work(cpu: int) -> None:
        try:
            if hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, {cpu})  # Of this thread alone.
        except OSError:
            failures.append(_REFUSED.format(cpu))
            return ready.abort()
        try:
            memory = ProbeBuffer(size)
        except (OSError, MemoryError, ValueError) as error:
            failures.append(f"CPU {cpu}: {getattr(error, 'strerror', None) or error or type(error).__name__}")
            return ready.abort()
        try:
            ready.wait(_ALL_READY_SECONDS)
        except threading.BrokenBarrierError:
            return None
        found.append(_windows(memory, start[0], seconds, rounds))

    threads = [threading.Thread(target=work, args=(cpu,), daemon=True) for cpu in cpus]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures or len(found) != len(cpus):
        raise RuntimeError(failures[0] if failures else "not all threads were ready in time")
    windows = list(zip(*found, strict=True))
    return [sum(rate for rate, _ in one) for one in windows], [min(share for _, share in one) for one in windows]


def _windows(memory: ProbeBuffer, start: float, seconds: float, rounds: int) -> Windows:
    """Read memory over and over, in a first stretch up to `start`, then in windows."""
    offset, windows, now = 0, list[tuple[float, float]](), perf_counter()
    for window in range(rounds + 1):
        begin, end, done, computed = now, start + window * seconds, 0, thread_time()
        while now < end:
            count = min(_CALL_BYTES, memory.size - offset)
            memory.scan(offset, count)
            offset = (offset + count) % memory.size
            done += count
            now = perf_counter()
        if window:
            took = now - begin
            windows.append((done / took, (thread_time() - computed) / took) if took > 0 else (0.0, 0.0))
    return windows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpus", required=True, type=lambda text: [int(cpu) for cpu in text.split(",")])
    parser.add_argument("--bytes", required=True, type=int, help="buffer per CPU; a multiple of 2 MiB")
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--library", default="", help="the engine's library that reads; none: memchr")
    given = parser.parse_args(arguments)
    cpus: list[int] = given.cpus
    if hasattr(os, "sched_setaffinity"):
        # The parent may be pinned to one CPU; each thread sets its own affinity.
        try:
            os.sched_setaffinity(0, cpus)
        except OSError:
            pass  # The threads will say which CPU it is.
    asked = (cpus, given.bytes, given.seconds, given.rounds)
    try:
        try:
            rounds, shares = read_with_library(given.library, *asked) if given.library else read_without(*asked)
        except (OSError, AttributeError):
            rounds, shares = read_without(*asked)
    except RuntimeError as error:
        print(json.dumps({"error": str(error)}))
        return 1
    print(json.dumps({"rounds": rounds, "shares": shares}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
