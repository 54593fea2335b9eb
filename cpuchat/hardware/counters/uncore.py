"""Counters outside the cores, through perf: memory controllers and data fabric of AMD, memory controllers of Intel.

They count for the whole machine, whichever process caused the traffic. AMD's events and bytes per count:
tools/perf/pmu-events/arch/x86/amdzen{2,3,4,5}/ of the kernel, PMUs: arch/x86/events/amd/uncore.c. Intel's events and
their scale are named in sysfs (arch/x86/events/intel/uncore_snb.c and uncore_snbep.c).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpuchat.hardware.counters.base import ROOT, CannotCount, Counter, opening
from cpuchat.hardware.counters.perf_events import (
    LINE,
    Kernel,
    PerfEvent,
    Pmu,
    close_all,
    open_event,
    open_failure,
    read_pmu,
    read_pmus,
)
from cpuchat.telemetry.machine import Bandwidth

if TYPE_CHECKING:
    from cpuchat.hardware.topology import Topology


class EventGroup:
    """Reads events together; each count stands for an amount (bytes, joules)."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._events: list[tuple[PerfEvent, float]] = []

    def __len__(self) -> int:
        return len(self._events)

    def add(self, pmu: Pmu, configs: tuple[int, int, int], each: float = LINE) -> None:
        """Open the event on every unit of the PMU. Raises OSError: refused."""
        for cpu in pmu.cpus:
            self._events.append((open_event(self._kernel, pmu.type, configs, cpu=cpu), each))

    def growth(self) -> float | None:
        """Return the amount counted since the last call; None when one of the events had no count."""
        grown = [(event.growth(), each) for event, each in self._events]
        return None if any(value is None for value, _ in grown) else sum((value or 0.0) * each for value, each in grown)

    def close(self) -> None:
        close_all(event for event, _ in self._events)


def opening_events(source: Counter[Any], root: Path) -> AbstractContextManager[None]:
    """Close `source` when one of its events cannot be opened. Raises CannotCount with the reason."""
    return opening(source, partial(open_failure, root=root))


class ReadWriteCounter(Counter[Bandwidth]):
    """Counts traffic of all memory controllers, reads and writes separately, for the whole machine."""

    least_seconds = 0.25

    def __init__(self, kernel: Kernel | None) -> None:
        self._kernel = kernel or Kernel()
        self._reads, self._writes = EventGroup(self._kernel), EventGroup(self._kernel)

    def sample(self, now: float) -> Bandwidth | None:
        seconds = self._elapsed(now)
        read, written, per_l3 = self._reads.growth(), self._writes.growth(), self._each_l3()
        if seconds is None or read is None or written is None:
            return None
        each = tuple(value / seconds for value in per_l3)
        return Bandwidth((read + written) / seconds, self.name, self.scope, read / seconds, written / seconds, each)

    def _each_l3(self) -> tuple[float, ...]:
        """Return the bytes of each L3 group since the last call, in the order of the topology; () if unknown."""
        return ()

    def close(self) -> None:
        self._reads.close()
        self._writes.close()


BEAT = 32
"""Bytes of one inbound beat on the link between a core complex and the fabric."""
_CAS, _READ, _WRITE = 0x0A, 1, 2
_CHANNELS = 8
_LOCAL_AND_REMOTE = 0xFFE
_MODERATORS = 8


def _require_amd(topology: Topology) -> None:
    if not any(name in topology.vendor.lower() for name in ("amd", "hygon")):
        raise CannotCount("AMD CPUs only")


class AmdMemoryControllers(ReadWriteCounter):
    """Counts column accesses of every memory channel: exact, reads and writes separately. Zen 4 and newer, Linux 6.8.

    Where the fabric's counters open too, they give what each L3 group read.
    """

    name = "umc"

    def __init__(self, topology: Topology, root: Path = ROOT, kernel: Kernel | None = None) -> None:
        _require_amd(topology)
        super().__init__(kernel)
        controllers = read_pmus("amd_umc_", root)
        if not controllers:
            raise CannotCount(
                "the kernel has no counters of memory controllers", "needs Zen 4 or newer and Linux 6.8 or newer"
            )
        self._links: FabricLinks | None = None
        with opening_events(self, root):
            for pmu in controllers:
                for mask, events in ((_READ, self._reads), (_WRITE, self._writes)):
                    events.add(pmu, pmu.configs(event=_CAS, rdwrmask=mask))
        try:
            self._links = FabricLinks(topology, root, self._kernel)
        except (CannotCount, OSError):  # bars for each L3 group are an extra
            pass

    def _each_l3(self) -> tuple[float, ...]:
        if self._links is None:
            return ()
        try:
            return self._links.growth()
        except OSError:
            self._links.close()
            self._links = None
            return ()

    def close(self) -> None:
        super().close()
        if self._links is not None:
            self._links.close()


class AmdDataFabric(Counter[Bandwidth]):
    """Counts traffic of the eight memory channels at the fabric, reads and writes together. EPYC of Zen 2 and Zen 3.

    Four counters take turns for eight channels, so it is an estimate; with more than one NUMA node per socket the
    counters are known to be wrong (likwid's notes on Zen 3).
    """

    name = "amd_df"

    def __init__(self, topology: Topology, root: Path = ROOT, kernel: Kernel | None = None) -> None:
        _require_amd(topology)
        pmu = read_pmu("amd_df", root)
        if pmu is None:
            raise CannotCount("the kernel has no counters of the data fabric", "`sudo modprobe amd_uncore`")
        if pmu.has("umask", 12):
            raise CannotCount("this CPU has counters at its memory controllers instead", "needs Linux 6.8 or newer")
        if len([node for node in topology.nodes if node.cpus]) > len(topology.packages):
            raise CannotCount("wrong with several NUMA nodes per socket", "set NPS1 in the firmware")
        self._events = EventGroup(kernel or Kernel())
        with opening_events(self, root):
            for channel in range(_CHANNELS):
                self._events.add(pmu, pmu.configs(event=0x07 + 0x40 * channel, umask=0x38))

    def sample(self, now: float) -> Bandwidth | None:
        seconds, total = self._elapsed(now), self._events.growth()
        return Bandwidth(total / seconds, self.name, self.scope) if seconds and total is not None else None

    def close(self) -> None:
        self._events.close()


class FabricLinks:
    """Counts traffic into the cores over each fabric link. Zen 4 and Zen 5.

    A moderator has two interfaces; which one serves which L3 group is not documented. The links that ever carried
    anything are taken in the order of their numbers, and only where there are as many of them as L3 groups.
    """

    def __init__(self, topology: Topology, root: Path, kernel: Kernel) -> None:
        pmu = read_pmu("amd_df", root)
        if pmu is None or not pmu.has("umask", 12):
            raise CannotCount("no per-link counters")
        self._groups = _groups_by_cpu(topology, pmu)
        self._events: list[list[PerfEvent]] = []  # one list per cpu of the PMU, moderators' two interfaces in turn
        self._seen: list[list[bool]] = []
        try:
            for cpu in pmu.cpus:
                self._events.append([])
                self._seen.append([False] * (2 * _MODERATORS))
                for interface in range(2):
                    for moderator in range(_MODERATORS):
                        event = 0x41E + interface + 0x40 * moderator
                        configs = pmu.configs(event=event, umask=_LOCAL_AND_REMOTE)
                        self._events[-1].append(open_event(kernel, pmu.type, configs, cpu=cpu))
        except (OSError, CannotCount):
            self.close()
            raise

    def growth(self) -> tuple[float, ...]:
        """Return the bytes that each L3 group received since the last call, as in the topology; () if unknown."""
        found: dict[int, float] = {}
        for events, seen, groups in zip(self._events, self._seen, self._groups, strict=True):
            counts = [event.growth() or 0.0 for event in events]
            for index, count in enumerate(counts):
                seen[index] = seen[index] or count > 0
            used = [count for count, ever in zip(counts, seen, strict=True) if ever]
            if len(used) == 2 * len(groups):  # wide links: both interfaces of a moderator belong to one L3 group
                half = len(groups)
                used = [used[index] + used[index + half] for index in range(half)]
            if len(used) != len(groups):
                return ()
            found.update({group: count * BEAT for group, count in zip(groups, used, strict=True)})
        return tuple(found[group] for group in sorted(found))

    def close(self) -> None:
        for events in self._events:
            close_all(events)


def _groups_by_cpu(topology: Topology, pmu: Pmu) -> list[tuple[int, ...]]:
    """Return the L3 groups of the socket of each CPU of the PMU. Raises CannotCount: links and groups do not match."""
    package_of = {cpu: group.package for group in topology.l3_groups for cpu in group.cpus}
    packages = [package_of.get(cpu) for cpu in pmu.cpus]
    if sorted(str(package) for package in packages) != sorted(str(package) for package in topology.packages):
        raise CannotCount("not one set of fabric links per socket")
    if any(len(link) != 1 for link in topology.fabric_links):
        raise CannotCount("several L3 groups share a fabric link")
    return [tuple(g.index for g in topology.l3_groups if g.package == package) for package in packages]


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
