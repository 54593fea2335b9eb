"""Memory traffic and power of the whole machine, whichever process caused them, through perf's uncore counters.

AMD's events and bytes per count: tools/perf/pmu-events/arch/x86/amdzen{2,3,4,5}/ of the kernel, PMUs:
arch/x86/events/amd/uncore.c. Intel's events and their scale are named in sysfs (arch/x86/events/intel/uncore_snb.c and
uncore_snbep.c). Energy of the packages, of both makers: arch/x86/events/rapl.c.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from cpuchat.hardware.counters.perf_events import (
    ROOT,
    CannotCount,
    Counter,
    Kernel,
    Pmu,
    open_failure,
    read_pmu,
    read_pmus,
)

if TYPE_CHECKING:
    from cpuchat.hardware.topology import Topology

LINE = 64
"""Bytes of a cache line."""
_CAS, _READ, _WRITE = 0x0A, 1, 2
_CHANNELS = 8
_BYTES = {"MiB": 1 << 20, "KiB": 1 << 10, "Bytes": 1, "B": 1}
_READS = ("cas_count_read", "data_read", "read")
_WRITES = ("cas_count_write", "data_write", "write")


def open_traffic(topology: Topology, root: Path = ROOT, kernel: Kernel | None = None) -> Counter:
    """Open the counters of memory traffic of this machine. Raises CannotCount."""
    calls, vendor = kernel or Kernel(), topology.vendor.lower()
    if "intel" in vendor:
        return _intel(topology, root, calls)
    if not any(name in vendor for name in ("amd", "hygon")):
        raise CannotCount("AMD and Intel CPUs only")
    if not (controllers := read_pmus("amd_umc_", root)):
        return _amd_fabric(topology, root, calls)
    # Column accesses of every memory channel: exact. Zen 4 and newer, Linux 6.8.
    with _opening("umc", 2, root, calls) as counter:
        for pmu in controllers:
            for group, mask in enumerate((_READ, _WRITE)):
                counter.add(group, pmu, pmu.configs(event=_CAS, rdwrmask=mask), LINE)
    return counter


def open_power(topology: Topology, root: Path = ROOT, kernel: Kernel | None = None) -> Counter:
    """Open the energy counters of the CPU packages (RAPL), without DRAM and power supply. Raises CannotCount."""
    if topology.architecture not in ("x86_64", "AMD64", ""):
        raise CannotCount("x86 CPUs only")
    pmu = read_pmu("power", root)
    if pmu is None or "energy-pkg" not in pmu.event_names():
        raise _absent("the kernel has no energy counter", "`sudo modprobe rapl`", topology)
    configs, scale, unit = pmu.named("energy-pkg")
    if unit != "Joules":
        raise CannotCount(f"unknown energy unit {unit or '(none)'}")
    with _opening("rapl", 1, root, kernel or Kernel()) as counter:
        counter.add(0, pmu, configs, scale)
    return counter


@contextlib.contextmanager
def _opening(name: str, groups: int, root: Path, kernel: Kernel) -> Iterator[Counter]:
    """Yield a counter without events; it is closed when one of them cannot be opened. Raises CannotCount."""
    counter = Counter(name, groups, kernel)
    try:
        yield counter
    except OSError as error:
        counter.close()
        raise open_failure(error, root) from None
    except CannotCount:
        counter.close()
        raise


def _absent(why: str, how: str, topology: Topology) -> CannotCount:
    return CannotCount("virtual machines expose no such counters") if topology.virtual else CannotCount(why, how)


def _amd_fabric(topology: Topology, root: Path, kernel: Kernel) -> Counter:
    """Count traffic of the eight memory channels at the fabric, reads and writes together. EPYC of Zen 2 and Zen 3.

    Four counters take turns for eight channels, so it is an estimate; with more than one NUMA node per socket the
    counters are known to be wrong (likwid's notes on Zen 3)."""
    pmu = read_pmu("amd_df", root)
    if pmu is None:
        raise _absent("the kernel has no counters of the data fabric", "`sudo modprobe amd_uncore`", topology)
    if pmu.has("umask", 12):
        raise CannotCount("the kernel has no counters of this CPU's memory controllers", "needs Linux 6.8 or newer")
    if len(topology.cpu_nodes) > len(topology.packages):
        raise CannotCount("wrong with several NUMA nodes per socket", "set NPS1 in the firmware")
    with _opening("amd_df", 1, root, kernel) as counter:
        for channel in range(_CHANNELS):
            counter.add(0, pmu, pmu.configs(event=0x07 + 0x40 * channel, umask=0x38), LINE)
    return counter


def _intel(topology: Topology, root: Path, kernel: Kernel) -> Counter:
    """Count reads and writes of every channel of `uncore_imc_*`; of free-running PMUs only if there are no others,
    because they see the same traffic."""
    single = read_pmu("uncore_imc", root)
    counting = [pmu for pmu in [*read_pmus("uncore_imc_", root), *([single] if single else [])] if _chosen(pmu, _READS)]
    controllers = counting or read_pmus("uncore_imc_free_running_", root)
    if not controllers:
        raise _absent("the kernel has no counters of memory controllers", "`sudo modprobe intel_uncore`", topology)
    with _opening("imc", 2, root, kernel) as counter:
        for pmu in controllers:
            for group, names in enumerate((_READS, _WRITES)):
                for name in _chosen(pmu, names):
                    configs, scale, unit = pmu.named(name)
                    counter.add(group, pmu, configs, scale * _BYTES[unit] if unit in _BYTES else LINE)
        if not all(counter.groups):
            raise CannotCount("the kernel names no events for reads and writes", "needs a newer kernel")
    return counter


def _chosen(pmu: Pmu, wanted: tuple[str, ...]) -> list[str]:
    """Return the PMU's events for one direction, by the first name that matches ("cas_count_read", on newer servers
    "cas_count_read_sch0" and "..._sch1"; "data_read" or "data_reads" on clients)."""
    names = pmu.event_names()
    for word in wanted:
        found = [name for name in names if name in (word, f"{word}s") or name.startswith(f"{word}_sch")]
        if found:
            return found
    return []
