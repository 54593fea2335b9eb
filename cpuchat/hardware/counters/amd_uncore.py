"""AMD's counters outside the cores: memory controllers (Zen 4 and newer) and the data fabric (EPYC since Zen 2).

Events and bytes per count: tools/perf/pmu-events/arch/x86/amdzen{2,3,4,5}/ of the kernel, PMUs:
arch/x86/events/amd/uncore.c. They count for the whole machine, whichever process caused the traffic.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cpuchat.hardware.counters.base import ROOT, CannotCount
from cpuchat.hardware.counters.kernel import Kernel
from cpuchat.hardware.counters.perf_events import (
    PerfEvent,
    Pmu,
    close_all,
    open_event,
    read_pmu,
    read_pmus,
)
from cpuchat.hardware.counters.uncore import EventGroup, ReadWriteCounter, opening_events
from cpuchat.telemetry.machine import Bandwidth, Scope

if TYPE_CHECKING:
    from cpuchat.hardware.topology import Topology

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


class AmdDataFabric:
    """Counts traffic of the eight memory channels at the fabric, reads and writes together. EPYC of Zen 2 and Zen 3.

    Four counters take turns for eight channels, so it is an estimate; with more than one NUMA node per socket the
    counters are known to be wrong (likwid's notes on Zen 3).
    """

    name = "amd_df"
    scope: Scope = "machine"
    least_seconds = 0.5

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
        self._time: float | None = None
        with opening_events(self, root):
            for channel in range(_CHANNELS):
                self._events.add(pmu, pmu.configs(event=0x07 + 0x40 * channel, umask=0x38))

    def sample(self, now: float) -> Bandwidth | None:
        before, self._time = self._time, now
        total = self._events.growth()
        if before is None or now <= before or total is None:
            return None
        return Bandwidth(total / (now - before), self.name, self.scope)

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
        """Return the bytes that each L3 group received since the last call, in the order of the topology; () if
        unknown.
        """
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
    """Return the L3 groups of the socket that each of the PMU's CPUs stands for.

    Raises:
        CannotCount: links and L3 groups do not match.
    """
    package_of = {cpu: group.package for group in topology.l3_groups for cpu in group.cpus}
    packages = [package_of.get(cpu) for cpu in pmu.cpus]
    if sorted(str(package) for package in packages) != sorted(str(package) for package in topology.packages):
        raise CannotCount("not one set of fabric links per socket")
    if any(len(link) != 1 for link in topology.fabric_links):
        raise CannotCount("several L3 groups share a fabric link")
    return [tuple(g.index for g in topology.l3_groups if g.package == package) for package in packages]
