"""Reads the files in which Linux describes a machine and the control groups of this process, as plain values.

Nothing here raises: what is absent, unreadable or malformed is None, 0 or empty. Kernel documentation: admin-guide/
cputopology.rst, ABI/stable/sysfs-devices-node, ABI/testing/sysfs-devices-system-cpu (caches, cpu_capacity),
admin-guide/cgroup-v2.rst, scheduler/sched-bwc.rst. The launcher of every worker imports this: nothing slow here.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from cpuchat.hardware.lists import parse_cpu_list

ROOT: Final = Path("/")
"""Where the paths below begin; tests put a folder in its place."""


def read_text(path: Path) -> str:
    """Return the file's text without surrounding space; "" when it cannot be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def read_number(path: Path) -> int | None:
    """Return the file's one number; None when it is absent or says something else ("max")."""
    text = read_text(path)
    return int(text) if text.removeprefix("-").isdigit() and len(text) <= 20 else None


def entries(folder: Path, pattern: str = "*") -> list[Path]:
    """Return what is in a folder and matches, sorted; nothing of one that cannot be read."""
    try:
        return sorted(folder.glob(pattern))
    except OSError:
        return []


def cgroup_folders(root: Path, controller: str = "") -> list[Path]:
    """Return the folders of this process's groups, innermost first, up to the root of the hierarchy: the unified one,
    or that of a version 1 `controller` such as "memory".

    In a container /proc/self/cgroup often names the path on the host while /sys/fs/cgroup shows the group itself
    as the root: folders that don't exist are left out, the mount point is always in."""
    mount, found = root / "sys/fs/cgroup", list[Path]()
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        names, colon, path = rest.partition(":")
        if not colon or controller not in names.split(","):  # those of the unified one have no names
            continue
        if controller:
            base = next((mount / name for name in (names, controller) if (mount / name).is_dir()), None)
        else:  # also when it is mounted beside version 1
            base = mount if (mount / "cgroup.controllers").exists() else mount / "unified"
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        folders = [base.joinpath(*parts[:n]) for n in range(len(parts), -1, -1)] if base is not None else []
        found += [folder for folder in folders if folder.is_dir()]
    return found


def cpu_quota(root: Path = ROOT) -> float | None:
    """Return the cgroup CPU quota in CPUs (2.5 = two and a half), the smallest of this process's groups: `cpu.max` (v2)
    or `cpu.cfs_quota_us` / `cpu.cfs_period_us` (v1); None when unlimited."""
    quotas: list[float] = []
    for folder in cgroup_folders(root):
        quota, _, period = read_text(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit() and len(quota + period) <= 40 and int(period) > 0:
            quotas.append(int(quota) / int(period))
    for folder in cgroup_folders(root, "cpu"):
        quota_us, period_us = read_number(folder / "cpu.cfs_quota_us"), read_number(folder / "cpu.cfs_period_us")
        if quota_us is not None and quota_us > 0 and period_us is not None and period_us > 0:
            quotas.append(quota_us / period_us)
    return min(quotas, default=None)


CPUS = "sys/devices/system/cpu"
NODES = "sys/devices/system/node"

_CPUINFO_BYTES = 16_384  # the first CPU's entry; hundreds of them take the kernel long to write
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SLOW = 0.75
"""Cores below this share of the fastest are the efficient ones: AMD's compact cores reach 0.65 to 0.71 of the others'
frequency; L3-stacked and plain halves of one desktop chip differ by 0.92."""


class CpuInfo(NamedTuple):
    """/proc/cpuinfo of the first CPU."""

    model: str = ""
    vendor: str = ""
    family: int | None = None
    model_number: int | None = None
    architecture: str = ""
    flags: frozenset[str] = frozenset()


class Cache(NamedTuple):
    """One `cpuN/cache/indexM`: its `size` in bytes, `id` and `cpus`."""

    level: int
    size: int
    id: int | None
    cpus: tuple[int, ...]


class Node(NamedTuple):
    """A NUMA node; `memory` in bytes (0: none, or unknown). Without CPUs it is memory alone (CXL, HBM). `distances` to
    all nodes online, ascending, as the firmware ranks them (10: itself)."""

    number: int
    cpus: tuple[int, ...]
    memory: int
    distances: tuple[int, ...] = ()


def cpuinfo_values(root: Path) -> dict[str, str]:
    """Return what /proc/cpuinfo says of the first CPU."""
    try:
        with (root / "proc/cpuinfo").open("rb") as file:
            text = file.read(_CPUINFO_BYTES).decode("ascii", "replace")
    except OSError:
        text = ""
    values: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            name, value = name.strip(), value.strip()
            known = values.setdefault(name, value)
            if name == "CPU part":  # of big and little cores the big one, which has the higher number
                values[name] = max(known, value)
    return values


def read_cpuinfo(root: Path) -> CpuInfo:
    """Return the name and the instruction sets of the CPU."""
    values = cpuinfo_values(root)
    x86, arm = values.get("flags", ""), values.get("Features", "")
    return CpuInfo(
        model=values.get("model name") or values.get("Model") or values.get("Hardware") or "",
        vendor=values.get("vendor_id") or values.get("CPU implementer") or "",
        family=_number(values.get("cpu family", "")),
        model_number=_number(values.get("model") or values.get("CPU part") or ""),
        architecture="x86_64" if x86 else "aarch64" if arm else platform.machine(),
        flags=frozenset((x86 or arm).split()),
    )


def _number(text: str) -> int | None:
    try:
        return int(text[:20], 0)
    except ValueError:
        return None


def own_cpus() -> tuple[int, ...]:
    """Return logical CPUs that this thread may run on, ascending; all of them where a system has no such thing."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    import psutil

    return tuple(range(psutil.cpu_count(logical=True) or 1))


def online_cpus(root: Path, allowed: Collection[int] = ()) -> tuple[int, ...]:
    """Return CPUs that run: the file `online`, else the folders that have a topology. In a container lxcfs counts that
    file's CPUs from 0, whichever they are: then it lacks some of the `allowed`, and says nothing."""
    base = root / CPUS
    listed = parse_cpu_list(read_text(base / "online"))
    if listed and {*allowed} <= {*listed}:
        return listed
    return tuple(sorted(n for n, folder in numbered(base, "cpu") if (folder / "topology").is_dir())) or listed


class Clock(NamedTuple):
    """Clocks of some CPUs in kHz: the slowest and the fastest now, and the highest that any may have (0: unknown)."""

    low: int
    high: int
    highest: int


def clock(root: Path, cpus: Collection[int]) -> Clock | None:
    """Return the clocks of these CPUs; None where the system does not tell, as in most virtual machines."""

    def read(file: str) -> list[int]:
        return [n for cpu in cpus if (n := read_number(root / CPUS / f"cpu{cpu}/cpufreq/{file}"))]

    now = read("scaling_cur_freq")
    return Clock(min(now), max(now), max(read("cpuinfo_max_freq"), default=0)) if now else None


def numbered(base: Path, name: str) -> Iterator[tuple[int, Path]]:
    """Yield folders called `name` and a number, ascending."""
    matches = ((re.fullmatch(rf"{name}([0-9]{{1,5}})", path.name), path) for path in entries(base, f"{name}*"))
    yield from sorted((int(match[1]), path) for match, path in matches if match is not None)


def siblings(root: Path, cpu: int) -> tuple[int, ...]:
    """Return CPUs of the core of `cpu`, itself among them, ascending."""
    folder = root / CPUS / f"cpu{cpu}/topology"
    text = read_text(folder / "core_cpus_list") or read_text(folder / "thread_siblings_list")
    return tuple(sorted({cpu, *parse_cpu_list(text)}))


def package(root: Path, cpu: int) -> int:
    """Return the socket of `cpu`; 0 where it is unknown (-1 on some Arm boards)."""
    return max(read_number(root / CPUS / f"cpu{cpu}/topology/physical_package_id") or 0, 0)


def caches(root: Path, cpu: int) -> list[Cache]:
    """Return the caches that `cpu` uses, smallest level first."""
    found: list[Cache] = []
    for _, folder in numbered(root / CPUS / f"cpu{cpu}/cache", "index"):
        level, number = read_number(folder / "level"), read_number(folder / "id")
        size = re.fullmatch(r"([0-9]{1,12})([KMG]?)", read_text(folder / "size"))
        if level is not None and 1 <= level <= 4:
            cpus = tuple(sorted({cpu, *parse_cpu_list(read_text(folder / "shared_cpu_list"))}))
            found.append(Cache(level, int(size[1]) * _UNITS.get(size[2], 1) if size else 0, number, cpus))
    return sorted(found, key=lambda cache: cache.level)


def nodes(root: Path) -> list[Node]:
    """Return the NUMA nodes, ascending; none on a kernel without NUMA. Nodes without CPUs (CXL, HBM) are among them."""
    folders = list(numbered(root / NODES, "node"))
    listed = parse_cpu_list(read_text(root / NODES / "online"))
    if listed:
        folders = [(number, folder) for number, folder in folders if number in listed]
    found: list[Node] = []
    for number, folder in folders:
        memory = re.search(r"MemTotal:\s*([0-9]{1,15}) kB", read_text(folder / "meminfo"))
        cpus = parse_cpu_list(read_text(folder / "cpulist"))
        distances = tuple(int(word) for word in read_text(folder / "distance").split() if word.isdecimal())
        found.append(Node(number, cpus, int(memory[1]) * 1024 if memory else 0, distances))
    return found


def efficient_cpus(root: Path, cpus: Collection[int], vendor: str) -> frozenset[int]:
    """Return CPUs of the slower kind of a hybrid; empty where all are of one kind. Intel names them, Arm gives each a
    capacity, AMD's compact cores show by their highest frequency."""
    atom = frozenset(parse_cpu_list(read_text(root / "sys/devices/cpu_atom/cpus")))
    if atom and parse_cpu_list(read_text(root / "sys/devices/cpu_core/cpus")):
        return atom & frozenset(cpus)
    speeds = {cpu: read_number(root / CPUS / f"cpu{cpu}" / "cpu_capacity") or 0 for cpu in cpus}
    if all(speeds.values()):
        # Threads get equal parts of the work and wait for the slowest, so n cores are as fast as n times that.
        capacities = list(speeds.values())
        limit = max(capacities, key=lambda low: (low * sum(one >= low for one in capacities), low), default=0)
    elif vendor == "AuthenticAMD":
        speeds = {cpu: read_number(root / CPUS / f"cpu{cpu}" / "cpufreq/cpuinfo_max_freq") or 0 for cpu in cpus}
        limit = _SLOW * max(speeds.values(), default=0)
    else:
        return frozenset()
    return frozenset(cpu for cpu, speed in speeds.items() if 0 < speed < limit)


def allowed_list(root: Path, name: str) -> tuple[int, ...]:
    """Return `Cpus_allowed_list` or `Mems_allowed_list` of /proc/self/status (cpusets of both versions count)."""
    for line in read_text(root / "proc/self/status").splitlines():
        if line.startswith(f"{name}:"):
            return parse_cpu_list(line.partition(":")[2])
    return ()


def hypervisor(root: Path, flags: Collection[str]) -> str:
    """Return the evidence that this is a virtual machine; "" for bare metal."""
    if "hypervisor" in flags:
        return "hypervisor flag in /proc/cpuinfo"
    if kind := read_text(root / "sys/hypervisor/type"):
        return f"/sys/hypervisor ({kind[:20]})"
    product = read_text(root / "sys/class/dmi/id/product_name")  # Arm CPUs have no such flag
    if re.search(r"virtual machine|kvm|qemu", product, re.IGNORECASE):
        return f"product name {product[:40]}"
    return ""
