"""Parses memory modules from the firmware's SMBIOS table (DMTF DSP0134, "Memory Device", type 17).

The table is bytes from a stranger: every length in it is checked against what is really there.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cpuchat.text import clean_line

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
    """Return the populated memory devices of an SMBIOS structure table, in its order; a truncated structure ends the
    list.
    """
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
