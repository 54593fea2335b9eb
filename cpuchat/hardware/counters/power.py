"""Power of the CPU packages through RAPL: watts now and joules since counting began, without DRAM and power supply.

Documentation/power/powercap/powercap.rst. AMD's driver offers it under the same "intel" names. Since Linux 5.10 only
administrators may read the energy.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING

from cpuchat.hardware.counters.base import ROOT, UNIT_COMMAND, CannotCount, Counter
from cpuchat.hardware.counters.perf_events import Kernel, read_pmu
from cpuchat.hardware.counters.uncore import EventGroup, opening_events
from cpuchat.hardware.sysfs import entries, read_number, read_text
from cpuchat.telemetry.machine import Power

if TYPE_CHECKING:
    from cpuchat.hardware.topology import Topology

_MOST_WATTS = 2000.0
"""Maximum plausible watts of a package: a higher figure means that the count was reset, or wrapped more than once."""


class Rapl(Counter[Power]):
    """Energy of all packages. The count wraps at max_energy_range_uj, on servers every few minutes."""

    name = "rapl"
    least_seconds = 0.25

    def __init__(self, root: Path = ROOT, topology: Topology | None = None) -> None:
        if topology is not None and topology.architecture not in ("x86_64", "AMD64"):
            raise CannotCount("x86 CPUs only")
        self._packages: list[tuple[Path, int]] = []
        zones = entries(root / "sys/class/powercap", "intel-rapl:*")
        # "intel-rapl:0:1" is a part of a package, "psys" the whole board, which has the packages in it.
        packages = [z for z in zones if z.name.count(":") == 1 and read_text(z / "name").startswith("package")]
        if zones and not any(read_text(zone / "name") for zone in zones):
            raise CannotCount("not visible in this container")
        if not packages:
            raise CannotCount("the kernel reports no package energy", "`sudo modprobe intel_rapl_msr`")
        for zone in packages:
            if read_number(zone / "energy_uj") is None:
                raise CannotCount("readable by root only since Linux 5.10", f"install the collector (`{UNIT_COMMAND}`)")
            self._packages.append((zone / "energy_uj", read_number(zone / "max_energy_range_uj") or 0))
        self._last: list[int] = []
        self._joules = 0.0

    def sample(self, now: float) -> Power | None:
        counts = [read_number(file) for file, _ in self._packages]
        known = [count for count in counts if count is not None]
        if len(known) != len(counts):
            raise OSError(errno.EACCES, "the energy counter can no longer be read")
        seconds, last, self._last = self._elapsed(now), self._last, known
        if seconds is None:
            return None
        used = 0
        for (_, wraps), old, new in zip(self._packages, last, known, strict=True):
            grown = new - old if new >= old else new - old + wraps
            if not 0 <= grown / 1e6 <= _MOST_WATTS * seconds:
                return None
            used += grown
        # After a long pause the count may have gone around unseen: what it shows then is too little.
        if any(0 < wraps / 1e6 < 400.0 * seconds for _, wraps in self._packages):
            return None
        self._joules += used / 1e6
        return Power(used / 1e6 / seconds, self._joules, self.name)


class PackageEnergy(Counter[Power]):
    """The same energy through perf's `power/energy-pkg/`, for which CAP_PERFMON is enough."""

    name = "rapl (perf)"
    least_seconds = 0.25

    def __init__(self, root: Path = ROOT, kernel: Kernel | None = None) -> None:
        pmu = read_pmu("power", root)
        if pmu is None or "energy-pkg" not in pmu.event_names():
            raise CannotCount("the kernel has no energy counter")
        configs, scale, unit = pmu.named("energy-pkg")
        if unit != "Joules":
            raise CannotCount(f"unknown energy unit {unit or '(none)'}")
        self._joules = 0.0
        self._events = EventGroup(kernel or Kernel())
        with opening_events(self, root):
            self._events.add(pmu, configs, scale)

    def sample(self, now: float) -> Power | None:
        seconds, joules = self._elapsed(now), self._events.growth()
        if seconds is None or joules is None or joules > _MOST_WATTS * len(self._events) * seconds:
            return None
        self._joules += joules
        return Power(joules / seconds, self._joules, self.name)

    def close(self) -> None:
        self._events.close()
