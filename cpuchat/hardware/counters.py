"""Memory traffic and power of the whole machine, whichever process caused them, through perf's uncore counters.

perf_event_open without a library, one counting event per file descriptor: include/uapi/linux/perf_event.h. Who may open
what: Documentation/admin-guide/perf-security.rst. PMUs describe themselves in /sys/bus/event_source/devices
(Documentation/ABI/testing/sysfs-bus-event_source-devices-{events,format}).

AMD's events and bytes per count: tools/perf/pmu-events/arch/x86/amdzen{2,3,4,5}/ of the kernel, PMUs:
arch/x86/events/amd/uncore.c. Intel's events and their scale are named in sysfs (arch/x86/events/intel/uncore_snb.c and
uncore_snbep.c). Energy of the packages, of both makers: arch/x86/events/rapl.c.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import platform
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cpuchat.hardware.lists import parse_cpu_list
from cpuchat.hardware.sysfs import ROOT, entries, numbered, read_number, read_text

if TYPE_CHECKING:
    from cpuchat.hardware.topology import Topology

_SYSTEM_CALLS = {"x86_64": 298, "aarch64": 241}


class CannotCount(Exception):
    """Raised when a counter does not open, or fails later: `why`, and `how` to make it readable ("" if impossible)."""

    def __init__(self, why: str, how: str = "") -> None:
        super().__init__(f"{why}; {how}" if how else why)
        self.how = how


def perf_event_open(attr: bytes, pid: int, cpu: int, flags: int) -> int:
    """Call perf_event_open(2), which the C library lacks; returns a file descriptor. Raises OSError: refused."""
    number = _SYSTEM_CALLS.get(platform.machine()) if platform.system() == "Linux" else None
    if number is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(attr, len(attr))
    whole = ctypes.c_long
    fd = libc.syscall(whole(number), buffer, whole(pid), whole(cpu), whole(-1), ctypes.c_ulong(flags))
    if fd < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return fd


@dataclass(frozen=True)
class Kernel:
    """Calls into the system, with the arguments of `perf_event_open` and of os; each raises OSError when refused."""

    perf_event_open: Callable[[bytes, int, int, int], int] = perf_event_open
    read: Callable[[int, int], bytes] = os.read
    close: Callable[[int], None] = os.close


_CLOSE_ON_EXEC = 8
_ATTR_BYTES = 128
_TIMES_ENABLED_AND_RUNNING = 0b11


def attributes(type_: int, configs: tuple[int, int, int]) -> bytes:
    """Return `struct perf_event_attr` of a counting event. `type_`: PERF_TYPE_*, or what the PMU's `type` file says."""
    attr = bytearray(_ATTR_BYTES)
    struct.pack_into("=IIQ", attr, 0, type_, _ATTR_BYTES, configs[0])
    struct.pack_into("=Q", attr, 32, _TIMES_ENABLED_AND_RUNNING)
    struct.pack_into("=QQ", attr, 56, configs[1], configs[2])
    return bytes(attr)


class PerfEvent:
    """One open event, which counts from its opening."""

    def __init__(self, fd: int, kernel: Kernel) -> None:
        self._fd = fd
        self._kernel = kernel
        self._last = (0, 0, 0)

    def growth(self) -> float | None:
        """Return the count since the last call (at first: since the start), extrapolated where events take turns on the
        hardware counter. None: the event was never scheduled, or the count went back. Raises OSError: it is gone."""
        data = self._kernel.read(self._fd, 24)
        if len(data) != 24:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        now = struct.unpack("=QQQ", data)  # count, ns enabled, ns running
        counted, enabled, running = (new - old for new, old in zip(now, self._last, strict=True))
        self._last = now
        if counted < 0 or running < 0 or (running == 0 < enabled):
            return None
        return counted * max(enabled / running, 1.0) if running else 0.0

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it is gone, which is what we want
            self._kernel.close(self._fd)


class Counter:
    """Open events of a `name`, in `groups` whose amounts belong together: bytes read and written, bytes of both, or
    joules. Each event comes with the amount that one count stands for."""

    def __init__(self, name: str, n_groups: int, kernel: Kernel) -> None:
        self.name = name
        self.groups: list[list[tuple[PerfEvent, float]]] = [[] for _ in range(n_groups)]
        self._kernel = kernel

    def add(self, group: int, pmu: Pmu, configs: tuple[int, int, int], each: float) -> None:
        """Open the event on every unit of the PMU. Raises OSError: refused."""
        attr = attributes(pmu.type, configs)
        for cpu in pmu.cpus:
            fd = self._kernel.perf_event_open(attr, -1, cpu, _CLOSE_ON_EXEC)
            self.groups[group].append((PerfEvent(fd, self._kernel), each))

    def growth(self) -> tuple[float | None, ...]:
        """Return each group's amount since the last call; None: an event had no count. Raises OSError: one is gone."""
        found: list[float | None] = []
        for group in self.groups:
            grown = [value * each for event, each in group if (value := event.growth()) is not None]
            found.append(sum(grown) if len(grown) == len(group) else None)
        return tuple(found)

    def close(self) -> None:
        for group in self.groups:
            for event, _ in group:
                event.close()


def open_failure(error: OSError, root: Path = ROOT) -> CannotCount:
    """Explain why perf_event_open failed, and what to do about it."""
    level = read_number(root / "proc/sys/kernel/perf_event_paranoid")
    if error.errno in (errno.EACCES, errno.EPERM):
        if level is not None and level > 0:
            how = f"`sudo sysctl kernel.perf_event_paranoid=0`, which `={level}` takes back"
            return CannotCount(f"the kernel restricts it to root (perf_event_paranoid is {level})", how)
        return CannotCount("performance counters are blocked for this process, as containers often do")
    unknown = (error.strerror or str(error) or type(error).__name__).lower()
    return CannotCount(*_FAILURES.get(error.errno or 0, (unknown, "")))


_FAILURES = {
    errno.ENOSYS: ("this kernel has no performance counters", ""),
    **dict.fromkeys(
        (errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP, errno.EINVAL, errno.ENXIO),
        ("this CPU or virtual machine has no such counter", ""),
    ),
    errno.EBUSY: ("another program uses the counters", "stop other monitoring programs such as perf or pcm"),
    errno.EMFILE: ("too many open files", "raise the limit: `ulimit -n 4096`"),
}


_PMUS = "sys/bus/event_source/devices"
Fields = tuple[int, tuple[tuple[int, int], ...]]
"""Which of config, config1, config2 (0-2), and the bit ranges there, lowest bits of the value first."""


@dataclass(frozen=True)
class Pmu:
    """A PMU as described by the kernel. `cpus`: one CPU per unit, to open events on."""

    name: str
    folder: Path
    type: int
    cpus: tuple[int, ...]
    formats: dict[str, Fields]

    def has(self, field: str, bits: int) -> bool:
        _, ranges = self.formats.get(field, (0, ()))
        return sum(last - first + 1 for first, last in ranges) >= bits

    def configs(self, **values: int) -> tuple[int, int, int]:
        """Encode the event with these fields, as event=0x0a. Raises CannotCount: no such field, or too few bits."""
        configs = [0, 0, 0]
        for field, value in values.items():
            if not self.has(field, max(value.bit_length(), 1)):
                raise CannotCount(f"the kernel's {self.name} has no field {field}={value:#x}")
            which, ranges = self.formats[field]
            for first, last in ranges:
                width = last - first + 1
                configs[which] |= (value & ((1 << width) - 1)) << first
                value >>= width
        return configs[0], configs[1], configs[2]

    def event_names(self) -> list[str]:
        names = [entry.name for entry in entries(self.folder / "events")]
        return [name for name in names if not name.endswith((".scale", ".unit", ".snapshot", ".per-pkg"))]

    def named(self, event: str) -> tuple[tuple[int, int, int], float, str]:
        """Return (configs, scale, unit) of an event: count × scale is in `unit`. Raises CannotCount: it is unknown."""
        values: dict[str, int] = {}
        try:
            for term in read_text(self.folder / "events" / event).split(","):
                field, equals, number = term.partition("=")
                values[field.strip()] = int(number, 0) if equals else 1
            scale = float(read_text(self.folder / "events" / f"{event}.scale") or 1.0)
            if not 0 < scale < math.inf:
                raise ValueError(scale)
        except ValueError:
            raise CannotCount(f"the kernel's {self.name} describes {event} in an unknown format") from None
        return self.configs(**values), scale, read_text(self.folder / "events" / f"{event}.unit")


def read_pmu(name: str, root: Path = ROOT) -> Pmu | None:
    """Return the PMU of that name; None where the kernel has none."""
    folder = root / _PMUS / name
    type_ = read_number(folder / "type")
    if type_ is None:
        return None
    formats: dict[str, Fields] = {}
    for file in entries(folder / "format"):
        if match := re.fullmatch(r"config([12]?):([0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*)", read_text(file)):
            ranges = ((int(first), int(last or first)) for first, last in re.findall(r"(\d+)(?:-(\d+))?", match[2]))
            formats[file.name] = int(match[1] or 0), tuple(ranges)
    return Pmu(name, folder, type_, parse_cpu_list(read_text(folder / "cpumask")) or (0,), formats)


def read_pmus(prefix: str, root: Path = ROOT) -> list[Pmu]:
    """PMUs whose names are `prefix` and a number, in the order of the numbers."""
    folders = numbered(root / _PMUS, prefix)
    return [pmu for _, folder in folders if (pmu := read_pmu(folder.name, root)) is not None]


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
    except (OSError, CannotCount) as error:
        counter.close()
        raise (open_failure(error, root) if isinstance(error, OSError) else error) from None


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
    """Count reads and writes of every `uncore_imc_*`; of free-running ones, which see the same, only without others."""
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
