"""Memory traffic and power from the system management unit of an AMD EPYC (Milan and newer), through HSMP.

Needs no rights once the driver is loaded. Files: Documentation/arch/x86/amd_hsmp.rst ("HSMP telemetry sysfs files") and
drivers/platform/x86/amd/hsmp/hwmon.c. Mailbox: struct hsmp_message and the messages of
arch/x86/include/uapi/asm/amd_hsmp.h; a /dev/hsmp opened for reading takes messages of type GET only, and only those are
ever sent here.

Sources disagree on the unit: the header says Gbit/s, the kernel's documentation GB/s. `unit_of` decides.
"""

from __future__ import annotations

import abc
import errno
import struct
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from cpuchat.hardware.counters.base import ROOT, CannotCount, Counter, Patience, opening
from cpuchat.hardware.counters.perf_events import Kernel
from cpuchat.hardware.sysfs import entries, read_number, read_text
from cpuchat.telemetry.machine import Bandwidth, Power

if TYPE_CHECKING:
    from cpuchat.hardware.topology import Topology

V = TypeVar("V", Bandwidth, Power)

DEVICE = "dev/hsmp"
PLATFORM_DRIVER = "sys/devices/platform/amd_hsmp"
COMMAND = 0xC02CF800
"""HSMP_IOCTL_CMD: _IOWR(0xF8, 0, struct hsmp_message), 44 bytes."""
GET_SOCKET_POWER, GET_DDR_BANDWIDTH = 0x04, 0x14
_ALLOWED = frozenset((GET_SOCKET_POWER, GET_DDR_BANDWIDTH))
# msg_id, num_args, response_sz, args[8], sock_ind; packed to 4 bytes, so two of padding at the end.
_MESSAGE = struct.Struct("=IHH8IH2x")
_LOAD = "`sudo modprobe amd_hsmp` (on some kernels hsmp_acpi), with HSMP enabled in the firmware"
_GB = 1e9
_LARGEST_SOCKET_GB = 1000
_SUSPICIOUS = 1.5


def _require_epyc(topology: Topology) -> None:
    """Check that the CPU has HSMP. Raises CannotCount if not."""
    if "amd" not in topology.vendor.lower() or "EPYC" not in topology.model:
        raise CannotCount("AMD EPYC only")
    if (topology.family or 0) < 0x19:
        raise CannotCount("EPYC 7003 (Milan) and newer only")


def _require_all_sockets(found: int, topology: Topology) -> None:
    """Check that every socket is present, so that the sum is the machine's. Raises CannotCount if not."""
    if found < len(topology.packages):
        raise CannotCount(f"reports {found} of {len(topology.packages)} sockets only")


def unit_of(largest: float, theoretical: float | None) -> float:
    """Return bytes per second of one unit of a DDR bandwidth message. `largest`: the maximum that the message itself
    tells for a socket. `theoretical`: what the memory of one socket carries, in bytes per second; None: not known.
    """
    most = _LARGEST_SOCKET_GB if theoretical is None else _SUSPICIOUS * theoretical / _GB
    return _GB / 8 if largest > most else _GB


class _Hsmp(Counter[V]):
    """A figure of all sockets together, from files or the mailbox, which is shared and may be busy once."""

    name = "hsmp"
    _mailbox: Mailbox | None = None

    def __init__(self, topology: Topology) -> None:
        _require_epyc(topology)
        self._n_sockets = len(topology.packages)
        self._patience = Patience()

    def _ask_all(self, message: int) -> list[int]:
        """Send a GET message for each socket through the mailbox. Raises OSError."""
        assert self._mailbox is not None
        return [self._mailbox.get(message, socket) for socket in range(self._n_sockets)]

    def close(self) -> None:
        if self._mailbox is not None:
            self._mailbox.close()


class _Sockets(_Hsmp[Bandwidth]):
    """Adds up the sockets. HSMP averages over about a second, so every reading is a figure."""

    def __init__(self, topology: Topology, theoretical: float | None) -> None:
        super().__init__(topology)
        self._per_socket = theoretical / self._n_sockets if theoretical is not None else None

    @abc.abstractmethod
    def _read(self) -> list[tuple[int, int]]:
        """(maximum, used) of each socket. Raises OSError."""

    def _check(self) -> None:
        if not all(largest > 0 for largest, _ in self._read()):
            raise CannotCount("the firmware does not report memory bandwidth")

    def sample(self, now: float) -> Bandwidth | None:
        sockets = self._patience.read(self._read, OSError)
        if sockets is None:
            return None
        total = sum(used * unit_of(largest, self._per_socket) for largest, used in sockets)
        return Bandwidth(total, self.name, self.scope)


def _socket_folders(root: Path) -> list[Path]:
    """Return the folders of the HSMP driver, one per socket: named by ACPI, or below the platform driver's."""
    return sorted(entries(root / "sys/devices/platform", "AMDI0097:*") + entries(root / PLATFORM_DRIVER, "socket*"))


class HsmpFiles(_Sockets):
    """Reads the files of newer drivers (Linux 6.16)."""

    def __init__(self, topology: Topology, root: Path = ROOT, theoretical: float | None = None) -> None:
        super().__init__(topology, theoretical)
        self._folders = [folder for folder in _socket_folders(root) if read_text(folder / "ddr_max_bw")]
        if not self._folders:
            raise CannotCount("no such files; needs the driver of Linux 6.16")
        _require_all_sockets(len(self._folders), topology)
        self._check()

    def _read(self) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for folder in self._folders:
            largest, used = read_number(folder / "ddr_max_bw"), read_number(folder / "ddr_utilised_bw_input")
            if largest is None or used is None or min(largest, used) < 0:
                raise OSError(errno.EIO, f"{folder.name} reports no bandwidth")
            found.append((largest, used))
        return found


class Mailbox:
    """The mailbox /dev/hsmp, opened for reading. Raises CannotCount: there is none, or it may not be opened."""

    def __init__(self, root: Path = ROOT, kernel: Kernel | None = None) -> None:
        self._kernel = kernel or Kernel()
        try:
            self._fd = self._kernel.open(root / DEVICE)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM):
                raise CannotCount("/dev/hsmp is not readable", "`sudo chmod a+r /dev/hsmp`") from None
            raise CannotCount("/dev/hsmp does not exist", _LOAD) from None

    def get(self, message: int, socket: int) -> int:
        """Send a GET message and return the word of its reply. Raises OSError: the firmware does not know the message
        (ENOMSG), there is no such socket (ENODEV), or it is busy.
        """
        if message not in _ALLOWED:
            raise ValueError(f"HSMP message {message:#x} is not a GET message")
        buffer = bytearray(_MESSAGE.pack(message, 0, 1, *([0] * 8), socket))
        self._kernel.ioctl(self._fd, COMMAND, buffer)
        return _MESSAGE.unpack(buffer)[3]

    def close(self) -> None:
        self._kernel.close(self._fd)


def _explain(error: OSError) -> CannotCount:
    if error.errno == errno.ENOMSG:
        return CannotCount("this firmware does not support the message", "update the firmware")
    if error.errno in (errno.ETIMEDOUT, errno.ENODEV, errno.EIO):
        return CannotCount("the firmware does not respond", "enable HSMP in the firmware")
    return CannotCount((error.strerror or str(error)).lower())


class HsmpMailbox(_Sockets):
    """Reads the same figures through /dev/hsmp: `max[31:20] used[19:8] percent[7:0]`."""

    def __init__(
        self, topology: Topology, root: Path = ROOT, kernel: Kernel | None = None, theoretical: float | None = None
    ) -> None:
        super().__init__(topology, theoretical)
        self._mailbox = Mailbox(root, kernel)
        with opening(self, _explain):
            self._check()

    def _read(self) -> list[tuple[int, int]]:
        return [(word >> 20, (word >> 8) & 0xFFF) for word in self._ask_all(GET_DDR_BANDWIDTH)]


class _Watts(_Hsmp[Power]):
    """A source of watts alone: joules are watts integrated over time."""

    _joules = 0.0

    @abc.abstractmethod
    def _read(self) -> float:
        """Return the watts of all sockets. Raises OSError."""

    def sample(self, now: float) -> Power | None:
        watts = self._patience.read(self._read, OSError)
        if watts is None:
            return None
        self._joules += watts * (self._elapsed(now) or 0.0)
        return Power(watts, self._joules, self.name)


class HsmpSensor(_Watts):
    """The sensor of the HSMP driver: power1_input in microwatts, one per socket. Linux 6.16."""

    def __init__(self, topology: Topology, root: Path = ROOT) -> None:
        super().__init__(topology)
        folders = [*_socket_folders(root), root / PLATFORM_DRIVER]  # below the latter are those of all sockets
        files = [file for folder in folders for file in entries(folder, "hwmon/hwmon*/power1_input")]
        self._files = [file for file in files if read_number(file) is not None]
        if not self._files:
            raise CannotCount("no such sensor; needs the driver of Linux 6.16")
        _require_all_sockets(len(self._files), topology)

    def _read(self) -> float:
        values = [read_number(file) for file in self._files]
        if any(value is None or value < 0 for value in values):
            raise OSError(errno.EIO, "the sensor does not respond")
        return sum(value or 0 for value in values) / 1e6


class HsmpPower(_Watts):
    """GET_SOCKET_POWER of each socket, in milliwatts."""

    def __init__(self, topology: Topology, root: Path = ROOT, kernel: Kernel | None = None) -> None:
        super().__init__(topology)
        self._mailbox = Mailbox(root, kernel)
        with opening(self, _explain):
            self._read()

    def _read(self) -> float:
        return sum(self._ask_all(GET_SOCKET_POWER)) / 1e3
