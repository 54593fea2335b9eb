"""A simulated kernel: perf events that count at a given rate, and the files that describe them."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cpuchat.hardware.counters import Kernel
from tests.hardware.trees import write

DEVICES = "sys/bus/event_source/devices"


def refused(code: int) -> OSError:
    return OSError(code, os.strerror(code))


@dataclass
class Opened:
    """An event as perf_event_open got it, and its three numbers: count, nanoseconds enabled and running."""

    attr: bytes
    pid: int
    cpu: int
    flags: int
    count: int = 0
    enabled: int = 0
    running: int = 0
    closed: bool = False

    @property
    def type(self) -> int:
        return struct.unpack_from("=I", self.attr, 0)[0]

    @property
    def config(self) -> int:
        return struct.unpack_from("=Q", self.attr, 8)[0]


@dataclass
class Simulated:
    """The events that the kernel was asked for; `refuse` returns why it does not open one."""

    events: dict[int, Opened] = field(default_factory=dict)
    refuse: Callable[[Opened], OSError | None] = lambda _: None

    @property
    def calls(self) -> Kernel:
        return Kernel(self._perf, self._read, self._close)

    def _perf(self, attr: bytes, pid: int, cpu: int, flags: int) -> int:
        event = Opened(attr, pid, cpu, flags)
        error = self.refuse(event)
        if error is not None:
            raise error
        fd = 1000 + len(self.events)
        self.events[fd] = event
        return fd

    def _read(self, fd: int, size: int) -> bytes:
        event = self.events[fd]
        return struct.pack("=QQQ", event.count, event.enabled, event.running)[:size]

    def _close(self, fd: int) -> None:
        assert not self.events[fd].closed, "closed twice"
        self.events[fd].closed = True

    def run(self, seconds: float, count: Callable[[Opened], float], share: float = 1.0) -> None:
        """Let time pass: each event counts that much, with a hardware counter for `share` of the time."""
        for event in self.events.values():
            event.enabled += int(seconds * 1e9)
            event.running += int(seconds * 1e9 * share)
            event.count += int(count(event) * share)

    @property
    def open_events(self) -> list[Opened]:
        return [event for event in self.events.values() if not event.closed]


def pmu(
    root: Path, name: str, type_: int, cpus: str, formats: dict[str, str], events: dict[str, str] | None = None
) -> None:
    """Write the files of a PMU."""
    base = f"{DEVICES}/{name}"
    files = {f"{base}/type": str(type_), f"{base}/cpumask": cpus}
    files |= {f"{base}/format/{key}": text for key, text in formats.items()}
    files |= {f"{base}/events/{key}": text for key, text in (events or {}).items()}
    write(root, files)


def umc(root: Path, number: int, cpu: str) -> None:
    pmu(root, f"amd_umc_{number}", 20 + number, cpu, {"event": "config:0-7", "rdwrmask": "config:8-9"})


def old_fabric(root: Path, cpus: str = "0") -> None:
    """Write the data fabric of Zen 2 and 3."""
    pmu(root, "amd_df", 10, cpus, {"event": "config:0-7,32-35,59-60", "umask": "config:8-15"})


def new_fabric(root: Path) -> None:
    """Write the data fabric of Zen 4 and newer."""
    pmu(root, "amd_df", 10, "0", {"event": "config:0-7,32-37", "umask": "config:8-15,24-27"})


def energy(root: Path, cpus: str = "0,32") -> None:
    """Write the energy counters of the packages: 2**-32 joules per count."""
    scale = "2.3283064365386962890625e-10"
    events = {"energy-pkg": "event=0x02", "energy-pkg.scale": scale, "energy-pkg.unit": "Joules"}
    pmu(root, "power", 8, cpus, {"event": "config:0-7"}, events)
