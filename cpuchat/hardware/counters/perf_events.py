"""perf_event_open without a library (one counting event per file descriptor), and the core counters of one process.

Layout of `struct perf_event_attr` and of what is read: include/uapi/linux/perf_event.h. Who may open what:
Documentation/admin-guide/perf-security.rst. PMUs describe themselves in /sys/bus/event_source/devices
(Documentation/ABI/testing/sysfs-bus-event_source-devices-{events,format}).
"""

from __future__ import annotations

import errno
import math
import os
import platform
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cpuchat.hardware.counters.base import ROOT, UNIT_COMMAND, CannotCount, Counter
from cpuchat.hardware.lists import parse_cpu_list
from cpuchat.hardware.sysfs import entries, numbered, read_number, read_text
from cpuchat.telemetry.machine import Bandwidth, Scope

if TYPE_CHECKING:
    from cpuchat.hardware.topology import Topology


_SYSTEM_CALLS = {"x86_64": 298, "aarch64": 241}


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


def _ioctl(fd: int, request: int, buffer: bytearray) -> None:
    import fcntl

    fcntl.ioctl(fd, request, buffer, True)


def _open_for_reading(path: Path) -> int:
    return os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))


@dataclass(frozen=True)
class Kernel:
    """Calls into the system; every one raises OSError when refused.

    `perf_event_open(attr, pid, cpu, flags)` returns a file descriptor. `ioctl` fills its buffer. `wall` is the clock
    that time stamps in files are of, in seconds since 1970.
    """

    perf_event_open: Callable[[bytes, int, int, int], int] = perf_event_open
    open: Callable[[Path], int] = _open_for_reading
    ioctl: Callable[[int, int, bytearray], None] = _ioctl
    read: Callable[[int, int], bytes] = os.read
    close: Callable[[int], None] = os.close
    wall: Callable[[], float] = time.time


TYPE_SOFTWARE, TYPE_RAW = 1, 4
TASK_CLOCK = 1
"""Software event: nanoseconds that the task ran."""

_CLOSE_ON_EXEC = 8
_ATTR_BYTES = 128
_TIMES_ENABLED_AND_RUNNING = 0b11
_EXCLUDE_KERNEL, _EXCLUDE_HYPERVISOR = 1 << 5, 1 << 6


def attributes(type_: int, configs: tuple[int, int, int], *, user_only: bool = False) -> bytes:
    """`struct perf_event_attr` of a counting event.

    Args:
        type_: PERF_TYPE_*, or the number in the PMU's `type` file.
        configs: config, config1, config2.
        user_only: leave the kernel's own work out, which needs fewer rights. Uncore PMUs cannot do that.
    """
    attr = bytearray(_ATTR_BYTES)
    struct.pack_into("=IIQ", attr, 0, type_, _ATTR_BYTES, configs[0])
    left_out = _EXCLUDE_KERNEL | _EXCLUDE_HYPERVISOR if user_only else 0
    struct.pack_into("=QQ", attr, 32, _TIMES_ENABLED_AND_RUNNING, left_out)
    struct.pack_into("=QQ", attr, 56, configs[1], configs[2])
    return bytes(attr)


class PerfEvent:
    """One open event, which counts from its opening; release it with `close`."""

    def __init__(self, fd: int, kernel: Kernel) -> None:
        self._fd = fd
        self._kernel = kernel
        self._last = (0, 0, 0)

    def growth(self) -> float | None:
        """Return the count since the last call (at first: since the start), extrapolated where events take turns on the
        hardware counter. None: the event was never scheduled, or the count went back. A thread that did not run counts
        0. Raises OSError: the event is gone.
        """
        data = self._kernel.read(self._fd, 24)
        if len(data) != 24:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        now = struct.unpack("=QQQ", data)  # count, ns enabled, ns running
        counted, enabled, running = (new - old for new, old in zip(now, self._last, strict=True))
        self._last = now
        if counted < 0 or running < 0 or (running == 0 < enabled):
            return None
        if running == 0:
            return 0.0
        return counted * max(enabled / running, 1.0)

    def close(self) -> None:
        self._kernel.close(self._fd)


def open_event(
    kernel: Kernel, type_: int, configs: tuple[int, int, int], *, pid: int = -1, cpu: int = -1, user_only: bool = False
) -> PerfEvent:
    """Open and start one event: of a task (`pid`, or a thread's id) or of everything on `cpu`. Raises OSError."""
    attr = attributes(type_, configs, user_only=user_only)
    return PerfEvent(kernel.perf_event_open(attr, pid, cpu, _CLOSE_ON_EXEC), kernel)


def close_all(events: Iterable[PerfEvent]) -> None:
    for event in events:
        try:
            event.close()
        except OSError:  # it is gone, which is what we want
            pass


def open_failure(error: OSError, root: Path = ROOT, *, own_process: bool = False) -> CannotCount:
    """Explain why perf_event_open failed, and what to do about it. `own_process`: the event was to count one of the
    user's processes, which needs fewer rights.
    """
    level = read_number(root / "proc/sys/kernel/perf_event_paranoid")
    wanted = 2 if own_process else 0
    if error.errno in (errno.EACCES, errno.EPERM):
        if level is not None and level > wanted:
            means = f"run `sudo sysctl kernel.perf_event_paranoid={wanted}` (until the next reboot)"
            means = means if own_process else f"install the collector (`{UNIT_COMMAND}`), or {means}"
            return CannotCount(f"the kernel restricts it to root (perf_event_paranoid is {level})", means)
        return CannotCount(
            "performance counters are blocked for this process",
            f"containers often block them; on the host, install the collector (`{UNIT_COMMAND}`)",
        )
    if error.errno == errno.ENOSYS:
        return CannotCount("this kernel has no performance counters")
    if error.errno in (errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP, errno.EINVAL, errno.ENXIO):
        return CannotCount("this CPU or virtual machine has no such counter")
    if error.errno == errno.EBUSY:
        return CannotCount("another program uses the counters", "stop other monitoring programs such as perf or pcm")
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return CannotCount("too many open files", "raise the limit: `ulimit -n 4096`")
    if error.errno == errno.ESRCH:
        return CannotCount("the inference process has exited")
    return CannotCount((error.strerror or str(error)).lower())


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
        """Return whether `field` has at least that many bits."""
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
        """Return the names of the named events."""
        names = [entry.name for entry in entries(self.folder / "events")]
        return [name for name in names if not name.endswith((".scale", ".unit", ".snapshot", ".per-pkg"))]

    def named(self, event: str) -> tuple[tuple[int, int, int], float, str]:
        """(configs, scale, unit) of a named event: `count * scale` is in `unit` ("MiB", "Joules"). Raises CannotCount:
        its description cannot be read.
        """
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


def _format(text: str) -> Fields | None:
    name, _, bits = text.partition(":")
    which = {"config": 0, "config1": 1, "config2": 2}.get(name)
    ranges: list[tuple[int, int]] = []
    for part in bits.split(","):
        first, _, last = part.partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            return None
        ranges.append((int(first), int(last or first)))
    return (which, tuple(ranges)) if which is not None else None


def read_pmu(name: str, root: Path = ROOT) -> Pmu | None:
    """Return the PMU of that name; None where the kernel has none."""
    folder = root / _PMUS / name
    type_ = read_number(folder / "type")
    if type_ is None:
        return None
    files = entries(folder / "format")
    formats = {file.name: parsed for file in files if (parsed := _format(read_text(file))) is not None}
    return Pmu(name, folder, type_, parse_cpu_list(read_text(folder / "cpumask")) or (0,), formats)


def read_pmus(prefix: str, root: Path = ROOT) -> list[Pmu]:
    """PMUs whose names are `prefix` and a number, in the order of the numbers."""
    folders = numbered(root / _PMUS, prefix)
    return [pmu for _, folder in folders if (pmu := read_pmu(folder.name, root)) is not None]


LINE = 64
"""Bytes of a cache line."""
EVENTS = (0x4844, 0x1F72)


class CoreCounters(Counter[Bandwidth]):
    """Counts the memory reads of one process, by an event of each kind for each thread; threads come and go.

    Needs no rights where perf_event_paranoid is 2 or less. AMD Zen 3 and newer: fills of the L1 data cache from memory
    (event 0x44 umask 0x48) and L2 prefetches that missed the L3 (0x72 umask 0x1f), 64 bytes each
    (tools/perf/pmu-events/arch/x86/amdzen{3,4,5}). An estimate: unused prefetches into the L2 count as well.
    """

    name = "core counters, estimated"
    scope: Scope = "process"

    def __init__(self, topology: Topology, pid: int | None, root: Path = ROOT, kernel: Kernel | None = None) -> None:
        if pid is None:
            raise CannotCount("no model is loaded")
        if "amd" not in topology.vendor.lower() or (topology.family or 0) < 0x19:
            raise CannotCount("AMD Zen 3 and newer only")
        self._tasks = root / "proc" / str(pid) / "task"
        self._kernel = kernel or Kernel()
        self._root = root
        self._events: dict[int, list[PerfEvent]] = {}
        try:
            self._follow()
        except OSError as error:
            self.close()
            raise open_failure(error, root, own_process=True) from None
        if not self._events:
            raise CannotCount("the inference process has exited")

    def _threads(self) -> set[int]:
        return {int(entry.name) for entry in entries(self._tasks) if entry.name.isdigit()}

    def _follow(self) -> float:
        """Open events of new threads and close those of ended ones; returns the last counts of the latter."""
        threads = self._threads()
        rest = 0.0
        for ended in self._events.keys() - threads:
            events = self._events.pop(ended)
            try:
                rest += sum(event.growth() or 0.0 for event in events)
            except OSError:  # what it counted at the very end is lost
                pass
            finally:
                close_all(events)
        for new in sorted(threads - self._events.keys()):
            opened: list[PerfEvent] = []
            try:
                for config in EVENTS:
                    opened.append(open_event(self._kernel, TYPE_RAW, (config, 0, 0), pid=new, user_only=True))
            except OSError as error:
                close_all(opened)
                if error.errno == errno.ESRCH:  # it ended in the meantime
                    continue
                raise
            self._events[new] = opened
        return rest

    def sample(self, now: float) -> Bandwidth | None:
        seconds = self._elapsed(now)
        try:
            lines = self._follow()
        except OSError as error:
            raise open_failure(error, self._root, own_process=True) from None
        if not self._events:
            raise CannotCount("the inference process has exited")
        grown = [event.growth() for events in self._events.values() for event in events]
        if seconds is None or any(value is None for value in grown):
            return None
        lines += sum(value or 0.0 for value in grown)
        read = lines * LINE / seconds
        return Bandwidth(read, self.name, self.scope, read)

    def close(self) -> None:
        for events in self._events.values():
            close_all(events)
        self._events.clear()
