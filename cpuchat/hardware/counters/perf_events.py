"""perf_event_open without a library: one counting event per file descriptor.

Layout of `struct perf_event_attr` and of what is read: include/uapi/linux/perf_event.h. Who may open what:
Documentation/admin-guide/perf-security.rst. PMUs describe themselves in /sys/bus/event_source/devices
(Documentation/ABI/testing/sysfs-bus-event_source-devices-{events,format}).
"""

from __future__ import annotations

import errno
import math
import os
import platform
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cpuchat.hardware.lists import parse_cpu_list
from cpuchat.hardware.sysfs import entries, numbered, read_number, read_text

ROOT = Path("/")
_SYSTEM_CALLS = {"x86_64": 298, "aarch64": 241}


class CannotCount(Exception):
    """Raised when a counter does not open, or fails later: `why`, and `how` to make it readable ("" if impossible)."""

    def __init__(self, why: str, how: str = "") -> None:
        super().__init__(why)
        self.why = why
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
    """Calls into the system; every one raises OSError when refused.

    `perf_event_open(attr, pid, cpu, flags)` returns a file descriptor."""

    perf_event_open: Callable[[bytes, int, int, int], int] = perf_event_open
    read: Callable[[int, int], bytes] = os.read
    close: Callable[[int], None] = os.close


_CLOSE_ON_EXEC = 8
_ATTR_BYTES = 128
_TIMES_ENABLED_AND_RUNNING = 0b11


def attributes(type_: int, configs: tuple[int, int, int]) -> bytes:
    """`struct perf_event_attr` of a counting event. `type_`: PERF_TYPE_*, or the number in the PMU's `type` file.
    `configs`: config, config1, config2."""
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
        try:
            self._kernel.close(self._fd)
        except OSError:  # it is gone, which is what we want
            pass


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
        """Return each group's amount since the last call; None where one of its events had no count. Raises OSError: an
        event is gone."""
        found: list[float | None] = []
        for group in self.groups:
            grown = [(event.growth(), each) for event, each in group]
            missing = any(value is None for value, _ in grown)
            found.append(None if missing else sum((value or 0.0) * each for value, each in grown))
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
        """(configs, scale, unit) of a named event: `count * scale` is in `unit` ("MiB", "Joules"). Raises CannotCount:
        its description cannot be read."""
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
