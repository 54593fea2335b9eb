"""Intel's memory controllers: column accesses on servers, free-running counters on clients.

The kernel names the events and their scale in sysfs (arch/x86/events/intel/uncore_snb.c and uncore_snbep.c); they
count for the whole machine, whoever caused the traffic.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cpuchat.hardware.counters.base import ROOT, CannotCount
from cpuchat.hardware.counters.kernel import Kernel
from cpuchat.hardware.counters.perf_events import Event, Pmu, close_all, open_event, read_pmu, read_pmus, why_not
from cpuchat.telemetry.machine import Bandwidth, Scope

if TYPE_CHECKING:
    from cpuchat.hardware.topology import Topology

_BYTES = {"MiB": 1 << 20, "KiB": 1 << 10, "Bytes": 1, "B": 1}
_READS = ("cas_count_read", "data_read", "read")
_WRITES = ("cas_count_write", "data_write", "write")


class IntelMemoryControllers:
    """Reads and writes of every channel of `uncore_imc_*`."""

    name = "imc"
    scope: Scope = "machine"
    least_seconds = 0.25

    def __init__(self, topology: Topology, root: Path = ROOT, kernel: Kernel | None = None) -> None:
        if "intel" not in topology.vendor.lower():
            raise CannotCount("only Intel CPUs have it")
        controllers = _controllers(root)
        if not controllers:
            raise CannotCount("the kernel offers no counters of memory controllers", "`sudo modprobe intel_uncore`")
        calls = kernel or Kernel()
        self._reads: list[tuple[Event, float]] = []
        self._writes: list[tuple[Event, float]] = []
        self._time: float | None = None
        try:
            for pmu in controllers:
                for names, events in ((_READS, self._reads), (_WRITES, self._writes)):
                    self._open(pmu, _chosen(pmu, names), events, calls)
        except OSError as error:
            self.close()
            raise why_not(error, root) from None
        except CannotCount:
            self.close()
            raise
        if not self._reads or not self._writes:
            self.close()
            raise CannotCount("the kernel names no events for reads and writes", "needs a newer kernel")

    @staticmethod
    def _open(pmu: Pmu, names: list[str], events: list[tuple[Event, float]], kernel: Kernel) -> None:
        for name in names:
            configs, scale, unit = pmu.named(name)
            size = scale * _BYTES[unit] if unit in _BYTES else 64.0
            for cpu in pmu.cpus:
                events.append((open_event(kernel, pmu.type, configs, cpu=cpu), size))

    def sample(self, now: float) -> Bandwidth | None:
        before, self._time = self._time, now
        read, written = _bytes(self._reads), _bytes(self._writes)
        if before is None or now <= before or read is None or written is None:
            return None
        seconds = now - before
        return Bandwidth((read + written) / seconds, self.name, self.scope, read / seconds, written / seconds)

    def close(self) -> None:
        close_all(event for event, _ in [*self._reads, *self._writes])


def _controllers(root: Path) -> list[Pmu]:
    """The PMUs to count on. Free-running ones see the same traffic: they are for where there are no others."""
    single = read_pmu("uncore_imc", root)
    counting = [pmu for pmu in [*read_pmus("uncore_imc_", root), *([single] if single else [])] if _chosen(pmu, _READS)]
    return counting or read_pmus("uncore_imc_free_running_", root)


def _chosen(pmu: Pmu, wanted: tuple[str, ...]) -> list[str]:
    """The PMU's events for one direction: those of the first word that fits ("cas_count_read", on newer servers
    "cas_count_read_sch0" and "..._sch1"; "data_read" or "data_reads" on clients)."""
    names = pmu.event_names()
    for word in wanted:
        found = [name for name in names if name in (word, f"{word}s") or name.startswith(f"{word}_sch")]
        if found:
            return found
    return []


def _bytes(events: list[tuple[Event, float]]) -> float | None:
    grown = [(event.growth(), size) for event, size in events]
    return None if any(value is None for value, _ in grown) else sum((value or 0.0) * size for value, size in grown)
