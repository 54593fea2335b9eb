"""Readings of the machine while it computes: plain values, filled in by `hardware`; resident memory of a process."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from mmap import PAGESIZE
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Peak:
    """The peak read bandwidth in bytes per second: the denominator of utilization.

    `source` is how it is known in a few words ("measured, 2 cores"), `cpus` the logical CPUs that were measured.
    """

    bytes_per_s: float
    source: str
    cpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Memory traffic of the whole machine since the last sample, in bytes per second.

    `source` names the counter ("umc", "amd_df", "imc"). `read` and `write` are None where the counter knows only their
    sum, `total`.
    """

    total: float
    source: str
    read: float | None = None
    write: float | None = None


@dataclass(frozen=True, slots=True)
class Power:
    """`watts` since the last sample; `joules` since counting began; `source` as of `Bandwidth`.

    Whole packages, without memory modules and power supply.
    """

    watts: float
    joules: float
    source: str


@dataclass(frozen=True, slots=True)
class MachineSample:
    """One sample of the counters. `no_bandwidth` and `no_power` say why a reading is None, and how to get it."""

    bandwidth: Bandwidth | None = None
    power: Power | None = None
    no_bandwidth: str = ""
    no_power: str = ""


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
