"""Which CPUs this process may use, and how many threads make sense.

The short way to hardware.topology for those who need no more than CPUs and a count. `root` replaces `/` in tests.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path

from cpuchat.errors import UsageError
from cpuchat.hardware.cgroups import cpu_quota
from cpuchat.hardware.lists import parse_cpu_list
from cpuchat.hardware.placement.cores import choose_cores, leave_for_ui
from cpuchat.hardware.sysfs import own_cpus
from cpuchat.hardware.topology import Topology, read_topology

ROOT = Path("/")

__all__ = [
    "allowed_cpus", "allowed_physical_cores", "cpu_quota", "default_threads", "l3_bytes", "leave_for_ui",
    "parse_cpu_list", "validate_threads",
]  # fmt: skip


def allowed_cpus() -> tuple[int, ...]:
    """Logical CPUs that this process may run on, ascending."""
    return own_cpus()


def allowed_physical_cores(cpus: Collection[int] | None = None, root: Path = ROOT) -> tuple[int, ...]:
    """One logical CPU for each physical core out of `cpus` (default: the allowed ones), ascending.

    Hyper-threads of one core share its units and its memory port: a second one per core slows decoding down.
    Without topology information every CPU counts as a core on Linux, and psutil's count is used elsewhere.
    """
    allowed = set(allowed_cpus() if cpus is None else cpus)
    topology = read_topology(root, allowed=allowed)
    return tuple(sorted(min(allowed.intersection(core.cpus)) for core in topology.allowed_cores))


def l3_bytes(topology: Topology, cpus: Collection[int]) -> int:
    """The L3 caches of these logical CPUs together, in bytes; 0 when they are not known."""
    groups = {group.index: group.size for cpu in cpus if (group := topology.l3_of(cpu)) is not None}
    return sum(groups.values())


def default_threads(root: Path = ROOT) -> int:
    """Inference threads when the user did not say: what hardware.placement chooses."""
    return len(choose_cores(read_topology(root, allowed=allowed_cpus())).cpus)


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
