"""Which CPUs this process may use, and how many threads make sense.

Linux: sched_getaffinity, /sys/devices/system/cpu and cgroups (docs: cpuN/topology in Documentation/admin-guide/
cputopology.rst, cgroup-v2.rst). Elsewhere psutil's counts. `root` replaces `/` in tests.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from pathlib import Path

from cpuchat.errors import UsageError
from cpuchat.hardware.cgroups import Cgroups, read_number, read_text

ROOT = Path("/")


def allowed_cpus() -> tuple[int, ...]:
    """Logical CPUs that this process may run on, ascending."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    import psutil

    return tuple(range(psutil.cpu_count(logical=True) or 1))


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """`0-3,8` as numbers; what is no number is left out."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.strip().isdigit() and (not last or last.strip().isdigit()):
            cpus.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(cpus))


def allowed_physical_cores(cpus: Collection[int] | None = None, root: Path = ROOT) -> tuple[int, ...]:
    """One logical CPU for each physical core out of `cpus` (default: the allowed ones), ascending.

    Hyper-threads of one core share its units and its memory port: a second one per core slows decoding down.
    Without topology information every CPU counts as a core on Linux, and psutil's count is used elsewhere.
    """
    allowed = sorted(set(allowed_cpus() if cpus is None else cpus))
    base = root / "sys/devices/system/cpu"
    if not base.is_dir():
        import psutil

        return tuple(allowed[: psutil.cpu_count(logical=False) or len(allowed)])
    taken: set[int] = set()
    cores: list[int] = []
    for cpu in allowed:
        if cpu in taken:
            continue
        topology = base / f"cpu{cpu}/topology"
        siblings = read_text(topology / "core_cpus_list") or read_text(topology / "thread_siblings_list")
        taken.update(parse_cpu_list(siblings), (cpu,))
        cores.append(cpu)
    return tuple(cores)


def cpu_quota(root: Path = ROOT) -> float | None:
    """CPUs' worth of time that the control group grants (2.5 = two and a half); None when unlimited.

    The smallest limit on the way from this process's group to the root: `cpu.max` (v2) or
    `cpu.cfs_quota_us` / `cpu.cfs_period_us` (v1).
    """
    quotas: list[float] = []
    groups = Cgroups(root)
    for folder in groups.v2():
        quota, _, period = read_text(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.strip().isdigit() and int(period) > 0:
            quotas.append(int(quota) / int(period))
    for folder in groups.v1("cpu"):
        quota_us, period_us = read_number(folder / "cpu.cfs_quota_us"), read_number(folder / "cpu.cfs_period_us")
        if quota_us is not None and quota_us > 0 and period_us:
            quotas.append(quota_us / period_us)
    return min(quotas, default=None)


def leave_for_ui(n_cores: int) -> int:
    """Cores to keep free for the user interface out of `n_cores`: none.

    Measured on two cores, two threads beside the interface are 1.3 times as fast as one (benchmarks/README.md).
    Larger machines have not been measured.
    """
    return 0


def default_threads(root: Path = ROOT) -> int:
    """Inference threads when the user did not say: one per allowed physical core, within the quota."""
    cores = len(allowed_physical_cores(root=root))
    quota = cpu_quota(root)
    if quota is not None:
        # Threads wait for each other: one that is throttled stops all, so a part of a CPU is no CPU.
        cores = min(cores, max(math.floor(quota), 1))
    return max(cores - leave_for_ui(cores), 1)


def validate_threads(n: int, root: Path = ROOT) -> int:
    """Check a thread count given by the user; 0 means `default_threads`.

    Raises:
        UsageError: negative, or more than CPUs are allowed (waiting threads spin, so too many make it very slow).
    """
    if n == 0:
        return default_threads(root)
    cpus, cores = len(allowed_cpus()), len(allowed_physical_cores(root=root))
    most, why = cpus, f"this process may use {_count(cpus, 'CPU')} ({_count(cores, 'physical core')})"
    quota = cpu_quota(root)
    if quota is not None and max(math.floor(quota), 1) < most:
        most, why = max(math.floor(quota), 1), f"the control group grants the time of {quota:g} CPUs"
    if 1 <= n <= most:
        return n
    raise UsageError(f"{_count(n, 'thread')} cannot be used: {why}.", f"Choose 1 to {most}, or 0 to have it chosen.")


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
