"""perf_event_open without a library: one counting event per file descriptor.

Layout of `struct perf_event_attr` and of what is read: include/uapi/linux/perf_event.h. Who may open what:
Documentation/admin-guide/perf-security.rst. PMUs describe themselves in /sys/bus/event_source/devices
(Documentation/ABI/testing/sysfs-bus-event_source-devices-{events,format}).
"""

from __future__ import annotations

import errno
import math
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cpuchat.hardware.cgroups import read_number, read_text
from cpuchat.hardware.counters.base import ROOT, UNIT_COMMAND, CannotCount
from cpuchat.hardware.counters.kernel import Kernel
from cpuchat.hardware.lists import parse_cpu_list

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
        0.

        Raises:
            OSError: the event is gone.
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
    """Open and start one event: of a task (`pid`, or a thread's id) or of everything on `cpu`.

    Raises:
        OSError: refused.
    """
    attr = attributes(type_, configs, user_only=user_only)
    return PerfEvent(kernel.perf_event_open(attr, pid, cpu, _CLOSE_ON_EXEC), kernel)


def close_all(events: Iterable[PerfEvent]) -> None:
    for event in events:
        try:
            event.close()
        except OSError:  # it is gone, which is what we want
            pass


def open_failure(error: OSError, root: Path = ROOT, *, own_process: bool = False) -> CannotCount:
    """Explain why perf_event_open failed, and what to do about it.

    Args:
        own_process: the event was to count one of the user's processes, which needs fewer rights.
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
        """Encode the event with these fields, such as event=0x0a, rdwrmask=1.

        Raises:
            CannotCount: no such field, or its number has too few bits.
        """
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
        try:
            names = sorted(entry.name for entry in (self.folder / "events").iterdir())
        except OSError:
            return []
        return [name for name in names if not name.endswith((".scale", ".unit", ".snapshot", ".per-pkg"))]

    def named(self, event: str) -> tuple[tuple[int, int, int], float, str]:
        """(configs, scale, unit) of a named event: `count * scale` is in `unit` ("MiB", "Joules").

        Raises:
            CannotCount: its description cannot be read.
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
    folder = root / "sys/bus/event_source/devices" / name
    type_ = read_number(folder / "type")
    if type_ is None:
        return None
    try:
        entries = sorted((folder / "format").iterdir())
    except OSError:
        entries = []
    formats = {entry.name: parsed for entry in entries if (parsed := _format(read_text(entry))) is not None}
    return Pmu(name, folder, type_, parse_cpu_list(read_text(folder / "cpumask")) or (0,), formats)


def read_pmus(prefix: str, root: Path = ROOT) -> list[Pmu]:
    """PMUs whose names are `prefix` and a number, in the order of the numbers."""
    try:
        names = [entry.name for entry in (root / "sys/bus/event_source/devices").glob(f"{prefix}*")]
    except OSError:
        return []
    numbered = sorted((int(tail), name) for name in names if (tail := name[len(prefix) :]).isdigit())
    return [pmu for _, name in numbered if (pmu := read_pmu(name, root)) is not None]
