"""Intel's memory controllers: column accesses on servers, free-running counters on clients.

The kernel names the events and their scale in sysfs (arch/x86/events/intel/uncore_snb.c and uncore_snbep.c); they
count for the whole machine, whichever process caused the traffic.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cpuchat.hardware.counters.base import ROOT, CannotCount
from cpuchat.hardware.counters.kernel import Kernel
from cpuchat.hardware.counters.perf_events import Pmu, read_pmu, read_pmus
from cpuchat.hardware.counters.uncore import LINE, ReadWriteCounter, opening_events

if TYPE_CHECKING:
    from cpuchat.hardware.topology import Topology

_BYTES = {"MiB": 1 << 20, "KiB": 1 << 10, "Bytes": 1, "B": 1}
_READS = ("cas_count_read", "data_read", "read")
_WRITES = ("cas_count_write", "data_write", "write")


class IntelMemoryControllers(ReadWriteCounter):
    """Reads and writes of every channel of `uncore_imc_*`."""

    name = "imc"

    def __init__(self, topology: Topology, root: Path = ROOT, kernel: Kernel | None = None) -> None:
        if "intel" not in topology.vendor.lower():
            raise CannotCount("Intel CPUs only")
        super().__init__(kernel)
        controllers = _controllers(root)
        if not controllers:
            raise CannotCount("the kernel has no counters of memory controllers", "`sudo modprobe intel_uncore`")
        with opening_events(self, root):
            for pmu in controllers:
                for names, events in ((_READS, self._reads), (_WRITES, self._writes)):
                    for name in _chosen(pmu, names):
                        configs, scale, unit = pmu.named(name)
                        events.add(pmu, configs, scale * _BYTES[unit] if unit in _BYTES else LINE)
            if not self._reads or not self._writes:
                raise CannotCount("the kernel names no events for reads and writes", "needs a newer kernel")


def _controllers(root: Path) -> list[Pmu]:
    """Return the PMUs to count on: free-running ones only if there are no others, because they see the same traffic."""
    single = read_pmu("uncore_imc", root)
    counting = [pmu for pmu in [*read_pmus("uncore_imc_", root), *([single] if single else [])] if _chosen(pmu, _READS)]
    return counting or read_pmus("uncore_imc_free_running_", root)


def _chosen(pmu: Pmu, wanted: tuple[str, ...]) -> list[str]:
    """Return the PMU's events for one direction, by the first name that matches ("cas_count_read", on newer servers
    "cas_count_read_sch0" and "..._sch1"; "data_read" or "data_reads" on clients).
    """
    names = pmu.event_names()
    for word in wanted:
        found = [name for name in names if name in (word, f"{word}s") or name.startswith(f"{word}_sch")]
        if found:
            return found
    return []
