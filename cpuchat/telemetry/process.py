"""Memory of another process."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Resident bytes. `private` is the process's own; `shared` is mapped files (model weights, shared by every
    process that maps the same file) and shared memory."""

    private: int
    shared: int


def process_memory(pid: int) -> ProcessMemory | None:
    """Resident memory of `pid`; None when there is no such process or it may not be looked at.

    Linux: RssAnon, and RssFile + RssShmem of /proc/PID/status (proc(5)). Elsewhere: what psutil can tell.
    """
    if sys.platform == "linux":
        return _from_status(pid)
    import psutil  # not needed on Linux, and slow to import

    try:
        info = psutil.Process(pid).memory_info()
    except psutil.Error:
        return None
    shared = getattr(info, "shared", 0)
    return ProcessMemory(private=info.rss - shared, shared=shared)


def _from_status(pid: int) -> ProcessMemory | None:
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    kilobytes: dict[str, int] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.startswith("Rss"):
            kilobytes[name] = int(value.split()[0])
    if "RssAnon" not in kilobytes:  # a zombie has no memory left
        return None
    shared = kilobytes.get("RssFile", 0) + kilobytes.get("RssShmem", 0)
    return ProcessMemory(private=kilobytes["RssAnon"] << 10, shared=shared << 10)
