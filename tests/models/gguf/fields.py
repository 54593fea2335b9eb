"""Where the fields of a GGUF header lie: for tests that change them."""

from __future__ import annotations

import struct
from collections import defaultdict

_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9


class _Walk:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 8
        self.found: dict[str, list[tuple[int, int]]] = defaultdict(list)

    def field(self, kind: str, size: int) -> int:
        """Note a number of `size` bytes and step over it."""
        self.found[kind].append((self.at, size))
        self.at += size
        return int.from_bytes(self.data[self.at - size : self.at], "little")

    def string(self) -> None:
        length = self.field("length", 8)
        if length:
            self.found["string"].append((self.at, length))
        self.at += length

    def value(self, kind: int) -> None:
        if kind == _STRING:
            self.string()
        else:
            self.field("value", _SIZES[kind])


def fields(data: bytes) -> dict[str, list[tuple[int, int]]]:
    """Return (start, bytes) of every field of a sound file by kind: "count", "length" (of a string), "string", "type"
    (of a value or tensor), "value", "size" (of a tensor's dimension), "offset"."""
    walk = _Walk(data)
    n_tensors, n_values = walk.field("count", 8), walk.field("count", 8)
    for _ in range(n_values):
        walk.string()
        kind = walk.field("type", 4)
        if kind != _ARRAY:
            walk.value(kind)
            continue
        kind = walk.field("type", 4)
        for _ in range(walk.field("count", 8)):
            walk.value(kind)
    for _ in range(n_tensors):
        walk.string()
        for _ in range(walk.field("count", 4)):
            walk.field("size", 8)
        walk.field("type", 4)
        walk.field("offset", 8)
    return dict(walk.found)


def patched(data: bytes, at: int, size: int, number: int) -> bytes:
    """Return `data` with a little-endian number written over a field, cut to its size."""
    return data[:at] + struct.pack("<Q", number & (1 << 64) - 1)[:size] + data[at + size :]
