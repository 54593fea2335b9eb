"""Resident memory of another process."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from mmap import PAGESIZE
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Resident bytes. `private` is the process's own; `shared` is mapped files (model weights, shared by every
    process that maps the same file) and shared memory."""

    private: int
    shared: int


def process_memory(pid: int) -> ProcessMemory | None:
    """Resident memory of `pid`; None when there is no such process or it may not be looked at.

    Linux: /proc/PID/statm (proc(5)). Elsewhere: what psutil can tell.
    """
    if sys.platform != "linux":
        import psutil  # not needed on Linux, and slow to import

        try:
            info = psutil.Process(pid).memory_info()
        except psutil.Error:
            return None
        shared = getattr(info, "shared", 0)
        return ProcessMemory(private=info.rss - shared, shared=shared)
    try:
        _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split())
    except (OSError, ValueError):
        return None
    if not resident:  # a zombie has no memory left
        return None
    return ProcessMemory(private=(resident - shared) * PAGESIZE, shared=shared * PAGESIZE)
