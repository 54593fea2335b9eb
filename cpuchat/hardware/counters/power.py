"""Power of the CPU packages: watts now and joules since counting began, without DRAM and power supply.

RAPL: Documentation/power/powercap/powercap.rst. AMD's driver offers it under the same "intel" names. Since Linux 5.10
only administrators may read the energy. HSMP: hardware.counters.hsmp and drivers/platform/x86/amd/hsmp/hwmon.c.
"""

from __future__ import annotations

import abc
import errno
from pathlib import Path
from typing import TYPE_CHECKING

from cpuchat.hardware.counters.base import ROOT, UNIT_COMMAND, CannotCount, Patience, opening
from cpuchat.hardware.counters.perf_events import Kernel, read_pmu
from cpuchat.hardware.counters.uncore import (
    GET_SOCKET_POWER,
    PLATFORM_DRIVER,
    EventGroup,
    Mailbox,
    explain,
    opening_events,
    require_all_sockets,
    require_epyc,
    socket_folders,
)
from cpuchat.hardware.sysfs import read_number, read_text
from cpuchat.telemetry.machine import Power

if TYPE_CHECKING:
    from cpuchat.hardware.topology import Topology

_MOST_WATTS = 2000.0
"""Maximum plausible watts of a package: a higher figure means that the count was reset, or wrapped more than once."""


class Rapl:
    """Energy of all packages. The count wraps at max_energy_range_uj, on servers every few minutes."""

    name = "rapl"
    least_seconds = 0.25

    def __init__(self, root: Path = ROOT, topology: Topology | None = None) -> None:
        if topology is not None and topology.architecture not in ("x86_64", "AMD64"):
            raise CannotCount("x86 CPUs only")
        self._packages: list[tuple[Path, int]] = []
        folders = root / "sys/class/powercap"
        try:
            zones = sorted(folders.glob("intel-rapl:*"))
        except OSError:
            zones = []
        # "intel-rapl:0:1" is a part of a package, "psys" the whole board, which has the packages in it.
        packages = [z for z in zones if z.name.count(":") == 1 and read_text(z / "name").startswith("package")]
        if zones and not any(read_text(zone / "name") for zone in zones):
            raise CannotCount("not visible in this container")
        if not packages:
            raise CannotCount("the kernel reports no package energy", "`sudo modprobe intel_rapl_msr`")
        for zone in packages:
            if read_number(zone / "energy_uj") is None:
                raise CannotCount(
                    "readable by root only since Linux 5.10",
                    f"install the collector (`{UNIT_COMMAND}`)",
                )
            self._packages.append((zone / "energy_uj", read_number(zone / "max_energy_range_uj") or 0))
        self._time: float | None = None
        self._last: list[int] = []
        self._joules = 0.0

    def sample(self, now: float) -> Power | None:
        counts = [read_number(file) for file, _ in self._packages]
        known = [count for count in counts if count is not None]
        if len(known) != len(counts):
            raise OSError(errno.EACCES, "the energy counter can no longer be read")
        before, last = self._time, self._last
        self._time, self._last = now, known
        if before is None or now <= before:
            return None
        used = 0
        for (_, wraps), old, new in zip(self._packages, last, known, strict=True):
            grown = new - old if new >= old else new - old + wraps
            if not 0 <= grown / 1e6 <= _MOST_WATTS * (now - before):
                return None
            used += grown
        # After a long pause the count may have gone around unseen: what it shows then is too little.
        if any(0 < wraps / 1e6 < 400.0 * (now - before) for _, wraps in self._packages):
            return None
        self._joules += used / 1e6
        return Power(used / 1e6 / (now - before), self._joules, self.name)

    def close(self) -> None:
        pass


class PackageEnergy:
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
        self._time: float | None = None
        self._joules = 0.0
        self._events = EventGroup(kernel or Kernel())
        with opening_events(self, root):
            self._events.add(pmu, configs, scale)

    def sample(self, now: float) -> Power | None:
        before, self._time = self._time, now
        joules = self._events.growth()
        if before is None or now <= before or joules is None:
            return None
        if joules > _MOST_WATTS * len(self._events) * (now - before):
            return None
        self._joules += joules
        return Power(joules / (now - before), self._joules, self.name)

    def close(self) -> None:
        self._events.close()


class _Watts(abc.ABC):
    """A source of watts alone: joules are watts integrated over time."""

    name = "hsmp"
    least_seconds = 0.5

    def __init__(self) -> None:
        self._time: float | None = None
        self._joules = 0.0
        self._patience = Patience()

    @abc.abstractmethod
    def _read(self) -> float:
        """Return the watts of all sockets. Raises OSError."""

    def sample(self, now: float) -> Power | None:
        watts = self._patience.read(self._read, OSError)
        if watts is None:
            return None
        if self._time is not None and now > self._time:
            self._joules += watts * (now - self._time)
        self._time = now
        return Power(watts, self._joules, self.name)


class HsmpSensor(_Watts):
    """The sensor of the HSMP driver: power1_input in microwatts, one per socket. Linux 6.16."""

    def __init__(self, topology: Topology, root: Path = ROOT) -> None:
        require_epyc(topology)
        super().__init__()
        folders = [*socket_folders(root), root / PLATFORM_DRIVER]  # below the latter are those of all sockets
        files = [file for folder in folders for file in sorted(folder.glob("hwmon/hwmon*/power1_input"))]
        self._files = [file for file in files if read_number(file) is not None]
        if not self._files:
            raise CannotCount("no such sensor; needs the driver of Linux 6.16")
        require_all_sockets(len(self._files), topology)

    def _read(self) -> float:
        values = [read_number(file) for file in self._files]
        if any(value is None or value < 0 for value in values):
            raise OSError(errno.EIO, "the sensor does not respond")
        return sum(value or 0 for value in values) / 1e6

    def close(self) -> None:
        pass


class HsmpPower(_Watts):
    """GET_SOCKET_POWER of each socket, in milliwatts."""

    def __init__(self, topology: Topology, root: Path = ROOT, kernel: Kernel | None = None) -> None:
        require_epyc(topology)
        super().__init__()
        self._n_sockets = len(topology.packages)
        self._mailbox = Mailbox(root, kernel)
        with opening(self, explain):
            self._read()

    def _read(self) -> float:
        return sum(self._mailbox.get(GET_SOCKET_POWER, socket) for socket in range(self._n_sockets)) / 1e3

    def close(self) -> None:
        self._mailbox.close()
