"""The theoretical peak bandwidth of the memory modules: channels × transfers per second × width.

In the order of trust: the SMBIOS table (root only: which modules there are, how fast they run; DMTF DSP0134, "Memory
Device", type 17), EDAC (anyone: which channels have modules, no speed), and what this model of CPU takes (assumed).
The table is bytes from a stranger: every length in it is checked against what is really there.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cpuchat.base.text import clean_line
from cpuchat.hardware.sysfs import numbered, read_number, read_text
from cpuchat.hardware.topology import Topology
from cpuchat.telemetry.units import plural

_MEMORY_DEVICE: Final = 17
_END: Final = 127
_MOST_BYTES: Final = 1 << 20
_MOST_WIDTH: Final = 1024
_SLOWEST, _FASTEST = 100, 50_000
_UNKNOWN_SIZE, _EXTENDED_SIZE = 0xFFFF, 0x7FFF
_EXTENDED_SPEED: Final = 0xFFFF
_KILOBYTES: Final = 0x8000


@dataclass(frozen=True, slots=True)
class Module:
    """One populated memory slot. `speed_mt`: million transfers per second as configured, else as rated (0: unknown);
    `width_bits` of data without error correction (0: unknown); `size` in bytes (0: unknown).
    """

    locator: str
    bank: str
    size: int
    speed_mt: int
    width_bits: int


def read_modules(file: Path) -> list[Module]:
    """Return the modules in a table; empty when it is absent, malformed, or readable by root only."""
    try:
        with file.open("rb") as table:
            data = table.read(_MOST_BYTES)
    except OSError:
        return []
    return parse_modules(data)


def parse_modules(data: bytes) -> list[Module]:
    """Return the populated memory devices of an SMBIOS structure table, up to a truncated structure."""
    found = (_module(fields, strings) for kind, fields, strings in _structures(data) if kind == _MEMORY_DEVICE)
    return [module for module in found if module is not None]


def _structures(data: bytes) -> Iterator[tuple[int, bytes, list[bytes]]]:
    """(type, its bytes with the header, its strings) of each structure: a header of type, length and handle, fields up
    to that length, then strings that end in NUL, and one more NUL (DSP0134 §6.1)."""
    offset = 0
    while offset + 4 <= len(data):
        kind, length = data[offset], data[offset + 1]
        if length < 4 or offset + length > len(data) or kind == _END:
            return
        end = data.find(b"\0\0", offset + length)
        if end < 0:
            return
        yield kind, data[offset : offset + length], data[offset + length : end].split(b"\0")
        offset = end + 2


def _module(fields: bytes, strings: list[bytes]) -> Module | None:
    size = _size(fields)
    if size is None:
        return None
    speed = _speed(fields, 0x20, 0x58) or _speed(fields, 0x15, 0x54)
    width = _word(fields, 0x0A)
    return Module(
        locator=_string(fields, strings, 0x10),
        bank=_string(fields, strings, 0x11),
        size=size,
        speed_mt=speed,
        width_bits=width if 8 <= width <= _MOST_WIDTH else 0,
    )


def _size(fields: bytes) -> int | None:
    """Return bytes of the module, 0 for an unknown size; None for an empty slot."""
    word = _word(fields, 0x0C)
    if word == 0:
        return None
    if word == _UNKNOWN_SIZE:
        return 0
    if word == _EXTENDED_SIZE:
        return (_dword(fields, 0x1C) & 0x7FFFFFFF) << 20
    return (word & ~_KILOBYTES) << 10 if word & _KILOBYTES else word << 20


def _speed(fields: bytes, offset: int, extended: int) -> int:
    word = _word(fields, offset)
    speed = _dword(fields, extended) & 0x7FFFFFFF if word == _EXTENDED_SPEED else word
    return speed if _SLOWEST <= speed <= _FASTEST else 0


def _word(fields: bytes, offset: int) -> int:
    """Return a 16-bit field; 0 ("unknown") when an older table ends before it."""
    return struct.unpack_from("<H", fields, offset)[0] if offset + 2 <= len(fields) else 0


def _dword(fields: bytes, offset: int) -> int:
    return struct.unpack_from("<I", fields, offset)[0] if offset + 4 <= len(fields) else 0


def _string(fields: bytes, strings: list[bytes], offset: int) -> str:
    """Return the string of a field; indexes start at 1, 0 is none."""
    number = fields[offset] if offset < len(fields) else 0
    return clean_line(strings[number - 1].decode("latin-1")).strip() if 1 <= number <= len(strings) else ""


ROOT: Final = Path("/")
SMBIOS_TABLE: Final = "sys/firmware/dmi/tables/DMI"
_EDAC: Final = "sys/devices/system/edac/mc"
_CHANNEL_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Theoretical:
    """The theoretical peak of all channels together, in bytes per second.

    `source` says in words how that is known; `assumed`: something of it is only usual for this CPU. `channels` are
    those with modules, `possible` those that the CPUs have (None: not known), `speed_mt` million transfers per second.
    `note` says how to know better, "" when there is nothing better.
    """

    bytes_per_s: float
    source: str
    channels: int
    speed_mt: int
    assumed: bool
    possible: int | None = None
    note: str = ""


# CPU name: (channels of one socket, MT/s at one module per channel). AMD's and Intel's product pages.
_CPUS: Final = tuple(
    (re.compile(pattern, re.IGNORECASE), channels, speed)
    for pattern, channels, speed in (
        (r"EPYC 9\w\w5", 12, 6000),
        (r"EPYC 9\w\w4", 12, 4800),
        (r"EPYC 8\w\w4", 6, 4800),
        (r"EPYC 7\w\w[23]", 8, 3200),
        (r"EPYC 7\w\w1", 8, 2666),
        (r"EPYC 4\w\w5", 2, 5600),
        (r"EPYC 4\w\w4", 2, 5200),
        (r"Threadripper PRO 9\d\d\dWX", 8, 6400),
        (r"Threadripper PRO 7\d\d\dWX", 8, 5200),
        (r"Threadripper PRO [35]\d\d\dWX", 8, 3200),
        (r"Threadripper 9\d\d\dX", 4, 6400),
        (r"Threadripper 7\d\d\dX", 4, 5200),
        (r"Threadripper 3\d\d\dX", 4, 3200),
        (r"Ryzen \d 9\d\d\dX?(3D)?\b", 2, 5600),
        (r"Ryzen \d 7[5-9]\d\dX?(3D)?\b", 2, 5200),
        (r"Ryzen \d [35]\d\d\dX?(T|3D)?\b", 2, 3200),
        (r"Xeon.* 69\d\dP", 12, 6400),
        (r"Xeon.* 6[57]\d\d[PE]", 8, 6400),
        (r"Xeon.* (Platinum|Gold|Silver|Bronze) [3-9]5\d\d", 8, 5600),
        (r"Xeon.* (Platinum|Gold|Silver|Bronze) [3-9]4\d\d", 8, 4800),
        (r"Xeon.* (Platinum|Gold|Silver) [3-9]3\d\dH", 6, 3200),
        (r"Xeon.* (Platinum|Gold|Silver) [3-9]3\d\d", 8, 3200),
        (r"Xeon.* (Platinum|Gold|Silver|Bronze) [3-9]2\d\d", 6, 2933),
        (r"Xeon.* (Platinum|Gold|Silver|Bronze) [3-9]1\d\d", 6, 2666),
    )
)


def theoretical(topology: Topology, root: Path = ROOT) -> Theoretical | None:
    """Return the best known theoretical peak of this machine; None when unknown. Never raises."""
    usual = usual_memory(topology)
    possible = usual[0] * len(topology.packages) if usual else None
    modules = read_modules(root / SMBIOS_TABLE)
    known = _from_modules(modules, possible)
    if known is not None:
        return known
    if usual is None or topology.virtual:  # A virtual machine has some share of a memory that it knows nothing about.
        return None
    note = "" if modules else "installed modules: sudo dmidecode -t memory"
    speed = usual[1]
    channels = len(edac_channels(root))
    if channels:
        words = f"{plural(channels, 'channel')} populated (EDAC) × {speed} MT/s, assumed for {topology.cpu_name}"
    else:
        channels = usual[0] * len(topology.packages)
        words = f"assumed: {plural(channels, 'channel')} × {speed} MT/s, the maximum of {topology.cpu_name}"
    return Theoretical(channels * speed * 1e6 * _CHANNEL_BYTES, words, channels, speed, True, possible, note)


def usual_memory(topology: Topology) -> tuple[int, int] | None:
    """(channels per socket, MT/s) that this model of CPU takes; None for one that is not in the table."""
    for pattern, channels, speed in _CPUS:
        if pattern.search(topology.model):
            return channels, speed
    return None


def _from_modules(modules: list[Module], possible: int | None) -> Theoretical | None:
    """Add up the channels of modules with a known speed; modules on one channel share it, at the slower one's speed."""
    speeds: dict[str, list[int]] = {}
    widths: dict[str, int] = {}
    for number, module in enumerate(modules):
        if module.speed_mt and module.width_bits:
            channel = channel_of(module) or f"module {number}"
            speeds.setdefault(channel, []).append(module.speed_mt)
            widths[channel] = max(widths.get(channel, 0), module.width_bits)
    if not speeds:
        return None
    channels = sorted(speeds)
    if possible is not None:
        # Boards whose labels tell no channels, or tell them wrongly, cannot have more than the CPU.
        channels = channels[:possible]
    total = sum(min(speeds[channel]) * 1e6 * widths[channel] / 8 for channel in channels)
    slowest = min(min(speeds[channel]) for channel in channels)
    words = f"{plural(len(channels), 'channel')} × {slowest} MT/s (SMBIOS)"
    return Theoretical(total, words, len(channels), slowest, False, possible)


def channel_of(module: Module) -> str:
    """Return an identifier shared by modules on the same channel; "" where the board's labels don't tell.

    Boards write "P0 CHANNEL A" (the bank) with "DIMM 0", "ChannelA-DIMM0", "DIMM_A1", "P1-DIMMA1", "DIMM_P0_A0", "A1".
    """
    for text in (module.bank, module.locator):
        if match := re.match(r"(.*?CHANNEL[ _-]?[A-Z0-9]{1,2}?)(?![A-Z0-9])", text, re.IGNORECASE):
            return match[1].upper()
    if match := re.fullmatch(r"(.*DIMM[ _-]?(?:P[0-9]_)?)?([A-P])[ _-]?[0-9]{0,2}", module.locator, re.IGNORECASE):
        return f"{match[1] or ''}{match[2]}".upper()
    return ""


def edac_channels(root: Path = ROOT) -> set[tuple[str, str]]:
    """(memory controller, channel) of every channel that EDAC sees a module on (kernel doc: driver-api/edac.rst)."""
    found: set[tuple[str, str]] = set()
    for _, controller in numbered(root / _EDAC, "mc"):
        for _, module in (*numbered(controller, "dimm"), *numbered(controller, "rank")):
            match = re.search(r"channel ([0-9]{1,3})", read_text(module / "dimm_location"))
            if match and (read_number(module / "size") or 0) > 0:
                found.add((controller.name, match[1]))
    return found
