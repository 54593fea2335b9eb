"""The memory available for a model.

Linux: /proc/meminfo and the control group's limit (cgroup-v2.rst, cgroup-v1/memory.rst). Elsewhere psutil.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from cpuchat.hardware.lists import parse_cpu_list
from cpuchat.hardware.sysfs import ROOT, cgroup_folders, read_number, read_text

_ON_NODE = re.compile(r"^Node [0-9]+ (MemFree|Active\(file\)|Inactive\(file\)|SReclaimable): *([0-9]{1,15}) kB", re.M)


def meminfo(root: Path = ROOT) -> dict[str, int]:
    """/proc/meminfo in bytes; empty where there is none."""
    values: dict[str, int] = {}
    for line in read_text(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        number, _, unit = rest.strip().partition(" ")
        if number.isdigit():
            values[name] = int(number) * (1024 if unit.strip() == "kB" else 1)
    return values


def _limits(root: Path) -> list[tuple[int, int]]:
    """(limit, used without reclaimable cache) in bytes of every group that has a limit. Above `memory.high` nothing is
    killed, but the kernel drops pages of the weights as fast as they are read."""
    limits: list[tuple[int, int]] = []
    for folder in cgroup_folders(root):
        both = (read_number(folder / f"memory.{name}") for name in ("max", "high"))
        limit = min((one for one in both if one is not None), default=None)
        if limit is not None and (used := read_number(folder / "memory.current")) is not None:
            limits.append((limit, max(used - _stat(folder, "inactive_file", "active_file", "slab_reclaimable"), 0)))
    for folder in cgroup_folders(root, "memory"):
        limit = read_number(folder / "memory.limit_in_bytes")
        used = read_number(folder / "memory.usage_in_bytes")
        if limit is not None and used is not None:
            cache = _stat(folder, "total_inactive_file", "total_active_file")
            limits.append((limit, max(used - cache, 0)))
    return limits


def _stat(folder: Path, *names: str) -> int:
    total = 0
    for line in read_text(folder / "memory.stat").splitlines():
        name, _, number = line.partition(" ")
        if name in names and number.isdigit():
            total += int(number)
    return total


def total_bytes(root: Path = ROOT) -> int:
    """Return memory of the machine, or of the control group when that is smaller."""
    total = meminfo(root).get("MemTotal")
    if total is None:
        import psutil

        total = int(psutil.virtual_memory().total)
    return min([total, *(limit for limit, _ in _limits(root))])


def available_on(nodes: Collection[int], root: Path = ROOT) -> int | None:
    """Return the memory available on these NUMA nodes, in bytes: free, and page cache that would be dropped.

    None where `nodes` are all that have memory (then `available_bytes` knows better), or it cannot be read."""
    folders = root / "sys/devices/system/node"
    there = parse_cpu_list(read_text(folders / "has_memory")) or parse_cpu_list(read_text(folders / "online"))
    if not nodes or set(there) <= set(nodes):
        return None
    total = 0
    for node in set(nodes):
        found = dict(_ON_NODE.findall(read_text(folders / f"node{node}/meminfo")))
        if "MemFree" not in found:
            return None
        total += 1024 * sum(int(number) for number in found.values())
    return total


def available_bytes(root: Path = ROOT) -> int:
    """Return the memory available without swapping, in bytes.

    The smallest of MemAvailable and, for every control group above this process, its limit less its usage, where page
    cache does not count as used: the system drops it when memory is needed."""
    available = meminfo(root).get("MemAvailable")
    if available is None:
        import psutil

        available = int(psutil.virtual_memory().available)
    return max(min([available, *(limit - used for limit, used in _limits(root))]), 0)


def available_within(nodes: Collection[int], root: Path = ROOT) -> int:
    """Return the bytes of memory that a process bound to `nodes` may take (none: not bound): the kernel kills one that
    wants more than its nodes have, however much there is on others."""
    bound, anywhere = available_on(nodes, root) if nodes else None, available_bytes(root)
    return anywhere if bound is None else min(bound, anywhere)
