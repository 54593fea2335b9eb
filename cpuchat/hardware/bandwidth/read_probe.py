"""The process that measures read bandwidth. Its one argument is a JSON array: the library, the CPUs, the bytes of the
buffer for each (a multiple of 2 MiB), the seconds of a window, and the number of windows. It prints a line of JSON.

A library of the engine's build does all of it (`cpuchat/kernels/read.cpp`): one thread per CPU, pinned before it
touches its own memory (so the pages lie where the memory policy of this process puts them), reads that memory over and
over. For each window, the same for all, a thread reports what it read and how long that took it, so that threads which
are slower or end later distort nothing. What they read before the windows is not counted. Standard library only, so
that the process is small and starts at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import sys


def read(library: str, cpus: list[int], size: int, seconds: float, rounds: int) -> tuple[list[float], list[float]]:
    """Return for each window the bytes per second of all threads together, and the part of its CPU that the thread got
    which got least (1: nothing else ran there). Raises RuntimeError: a thread could not be pinned or got no memory, or
    the library is damaged or of another kind; the text says which."""
    n, windows = len(cpus), ctypes.c_double * rounds
    rates, shares = windows(), windows()
    try:
        of_library = ctypes.CDLL(library).cpuchat_read
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"the engine's reader cannot be used, reinstall the engine: {error}") from None
    sizes = (ctypes.c_size_t(size), ctypes.c_double(seconds), rounds)
    failed = of_library((ctypes.c_int * n)(*cpus), n, *sizes, rates, shares)
    if failed:
        cpu = cpus[(abs(failed) - 1) % n]
        why = os.strerror(errno.ENOMEM) if failed >= -n else "no more threads may be started"
        raise RuntimeError(f"CPU {cpu} may not be used by this process" if failed > 0 else f"CPU {cpu}: {why}")
    return list(rates), list(shares)


def main() -> int:
    library, cpus, size, seconds, rounds = json.loads(sys.argv[1])
    if hasattr(os, "sched_setaffinity"):
        # The parent may be pinned to one CPU; each thread sets its own affinity, and says which CPU it may not use.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cpus)
    try:
        rates, shares = read(library, cpus, size, seconds, rounds)
    except RuntimeError as error:
        print(json.dumps({"error": str(error)}))
        return 1
    print(json.dumps({"rounds": rates, "shares": shares}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
