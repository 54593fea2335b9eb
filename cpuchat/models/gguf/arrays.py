"""Arrays of GGUF metadata, decoded on first use."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, overload

STRING = 8
"""GGUF value type of strings: a length (u64) and UTF-8."""
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF value type -> struct code; 7 is bool."""
_u64 = struct.Struct("<Q").unpack_from


class LazyArray(Sequence[Any]):
    """A metadata array, decoded on first use: a vocabulary of 150k strings costs nothing until then."""

    __slots__ = ("_count", "_raw", "_values", "value_type")

    def __init__(self, value_type: int, count: int, raw: bytes) -> None:
        self.value_type = value_type
        self._count = count
        self._raw = raw
        self._values: list[Any] | None = None

    def first(self, count: int) -> list[Any]:
        """Return at most the first `count` values, without decoding the others."""
        count = min(count, self._count)
        if self._values is not None:
            return self._values[:count]
        if self.value_type != STRING:
            return list(struct.unpack_from(f"<{count}{SCALARS[self.value_type]}", self._raw))
        return [raw.decode("utf-8", "replace") for raw in islice(self.raw_strings(), count)]

    @property
    def is_text(self) -> bool:
        """Return whether these are strings, not numbers."""
        return self.value_type == STRING

    def raw_strings(self) -> Iterator[bytes]:
        """Yield the bytes of every string, valid UTF-8 or not.

        Raises:
            TypeError: these are numbers.
        """
        if not self.is_text:
            raise TypeError(f"{self!r} contains no strings")
        raw, at, number = self._raw, 0, int.from_bytes  # in a loop, faster than struct
        for _ in range(self._count):
            start = at + 8
            at = start + number(raw[at:start], "little")
            yield raw[start:at]

    def shares_strings(self, other: LazyArray, start: int) -> bool:
        """Return whether both have the same strings from `start` to the end of the shorter one. Under 1 ms for 150k."""
        tails: list[bytes] = []
        for array in (self, other):
            if not array.is_text or start > array._count:
                return False
            at = 0
            for _ in range(start):
                at += 8 + _u64(array._raw, at)[0]
            tails.append(array._raw[at:])
        short, long = sorted(tails, key=len)
        return long.startswith(short)

    def _decode(self) -> list[Any]:
        if self._values is None:
            self._values = self.first(self._count)
        return self._values

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self._decode()[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._decode())

    def __repr__(self) -> str:
        return f"LazyArray({self._count} values of type {self.value_type})"
