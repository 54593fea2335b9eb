"""Walks through the bytes of a GGUF header. The file is untrusted: lengths are checked before anything is allocated.

Format: docs/gguf.md of ggml, versions 2 and 3, little-endian; the checks are those of llama.cpp's gguf.cpp, so what
passes here is accepted there.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import msgspec

from cpuchat.errors import ModelDamaged
from cpuchat.models.gguf.types import TYPES

# Far above anything real (20 MB for 260k tokens with merges; 60 settings; 3,000 tensors), but small enough to hold.
MAX_HEADER = 128 << 20
MAX_SETTINGS = 1 << 16
MAX_TENSORS = 1 << 18
MAX_DIMS = 4
MAX_TENSOR_NAME = 64
_CHUNK = 1 << 20
_STRING = 8
_ARRAY = 9
# GGUF value type -> struct code; 7 is bool.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_u32 = struct.Struct("<I").unpack_from
_u64 = struct.Struct("<Q").unpack_from


class Parsed(msgspec.Struct, frozen=True):
    """The raw header of one file. `data_offset` and `file_size` in bytes."""

    version: int
    metadata: dict[str, Any]
    tensors: list[TensorInfo]
    data_offset: int
    file_size: int
    alignment: int


class TensorInfo(msgspec.Struct, frozen=True):
    """One tensor. `shape` is GGML's order: `shape[0]` is contiguous. `offset` from the start of the data section."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int

    @property
    def n_elements(self) -> int:
        n = 1
        for size in self.shape:
            n *= size
        return n


class LazyArray(Sequence[Any]):
    """A metadata array, decoded on first use: a vocabulary of 150k strings costs nothing until someone asks."""

    __slots__ = ("_count", "_raw", "_values", "value_type")

    def __init__(self, value_type: int, count: int, raw: bytes) -> None:
        self.value_type = value_type
        self._count = count
        self._raw = raw
        self._values: list[Any] | None = None

    def first(self, count: int) -> list[Any]:
        """The first `count` values at most, without decoding the others."""
        count = min(count, self._count)
        if self._values is not None:
            return self._values[:count]
        if self.value_type != _STRING:
            return list(struct.unpack_from(f"<{count}{_SCALARS[self.value_type]}", self._raw))
        values: list[Any] = []
        at = 0
        for _ in range(count):
            (length,) = _u64(self._raw, at)
            at += 8 + length
            values.append(self._raw[at - length : at].decode("utf-8", "replace"))
        return values

    def shares_strings(self, other: LazyArray, start: int) -> bool:
        """Whether both hold the same strings from `start` to the end of the shorter one, told by their bytes.

        False also where only decoding could tell. Under 1 ms for 150k tokens.
        """
        tails: list[bytes] = []
        for array in (self, other):
            if array.value_type != _STRING or array._values is not None or start > array._count:
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
            self._raw = b""
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


class _Reader:
    """Reads forward through the file; the buffer holds what has been read so far."""

    def __init__(self, path: Path, handle: int, size: int) -> None:
        self.path = path
        self.handle = handle
        self.size = size
        self.buffer = bytearray()
        self.at = 0

    def damaged(self, what: str) -> ModelDamaged:
        return ModelDamaged(f"{self.path.name} is damaged: {what}.", "Download the file again or choose another one.")

    def need(self, count: int, what: str) -> int:
        """Make `count` more bytes available and step over them; returns where they start."""
        start, end = self.at, self.at + count
        if end > self.size:
            raise self.damaged(f"cut short in {what}, which ends at byte {end}; the file has {self.size}")
        if end > MAX_HEADER:
            raise self.damaged(f"{what} ends at byte {end}, no header is that long")
        if end > len(self.buffer):
            self._fill(end, what)
        self.at = end
        return start

    def _fill(self, end: int, what: str) -> None:
        wanted = min(self.size, MAX_HEADER, max(end, 2 * len(self.buffer), _CHUNK))
        while len(self.buffer) < wanted:
            piece = os.pread(self.handle, wanted - len(self.buffer), len(self.buffer))
            if not piece:
                break
            self.buffer += piece
        if len(self.buffer) < end:  # it shrank meanwhile
            raise self.damaged(f"cut short in {what}: byte {len(self.buffer)} could not be read")

    def u32(self, what: str) -> int:
        return _u32(self.buffer, self.need(4, what))[0]

    def u64(self, what: str) -> int:
        return _u64(self.buffer, self.need(8, what))[0]

    def string(self, what: str) -> str:
        length = self.u64(what)
        start = self.need(length, what)
        return self.buffer[start : start + length].decode("utf-8", "replace")

    def value(self, what: str) -> Any:
        kind = self.u32(what)
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self.array(what)
        code = _SCALARS.get(kind)
        if code is None:
            raise self.damaged(f"{what} has the unknown type {kind} at byte {self.at - 4}")
        size = struct.calcsize("<" + code)
        return struct.unpack_from("<" + code, self.buffer, self.need(size, what))[0]

    def array(self, what: str) -> LazyArray:
        kind = self.u32(what)
        count = self.u64(what)
        if kind == _STRING:
            start = self.at
            self.skip_strings(count, what)
        elif kind in _SCALARS:
            start = self.need(count * struct.calcsize("<" + _SCALARS[kind]), what)
        else:
            raise self.damaged(f"{what} is an array of the unknown type {kind}")
        return LazyArray(kind, count, bytes(memoryview(self.buffer)[start : self.at]))

    def skip_strings(self, count: int, what: str) -> None:
        """Step over `count` strings. The one loop that runs for every token of a vocabulary: kept tight."""
        if count * 8 > self.size - self.at:
            raise self.damaged(f"{what} claims {count} strings at byte {self.at}; the file has {self.size} bytes")
        buffer, unpack, at, left = self.buffer, _u64, self.at, count
        while left:
            have = len(buffer) - 8
            while left and at <= have:
                at += 8 + unpack(buffer, at)[0]
                left -= 1
            self.at = min(at, self.size + 1)
            # Either the last string reaches beyond the buffer or the next length does.
            self.need(8 if left else 0, what)
            self.at = at


def _tensor(reader: _Reader, index: int, expected: int, alignment: int) -> TensorInfo:
    what = f"the entry of tensor {index}"
    name = reader.string(what)
    if not name or len(name.encode("utf-8", "replace")) >= MAX_TENSOR_NAME:
        raise reader.damaged(f"tensor {index} has a name of {len(name)} characters")
    n_dims = reader.u32(what)
    if n_dims > MAX_DIMS:
        raise reader.damaged(f"tensor {name!r} has {n_dims} dimensions, at most {MAX_DIMS} exist")
    shape = struct.unpack_from(f"<{n_dims}Q", reader.buffer, reader.need(8 * n_dims, what)) or (1,)
    kind = TYPES.get(number := reader.u32(what))
    offset = reader.u64(what)
    if kind is None:
        raise reader.damaged(f"tensor {name!r} has the unknown type {number}")
    elements = 1
    for size in shape:
        elements *= size
    if elements >= 1 << 63:
        raise reader.damaged(f"tensor {name!r} claims {elements} values")
    if shape[0] % kind.block:
        raise reader.damaged(f"tensor {name!r} of type {kind.name} has rows of {shape[0]}, not of {kind.block}s")
    if offset != expected:
        raise reader.damaged(f"tensor {name!r} starts at {offset} of the data, {expected} was expected")
    return TensorInfo(name, tuple(shape), kind.name, offset, elements // kind.block * kind.nbytes)


def parse(path: Path, handle: int) -> Parsed:
    """Parse the header of the open file `handle`; `path` is for messages.

    Raises:
        ModelDamaged: see module.
        OSError: the disk failed.
    """
    reader = _Reader(path, handle, os.fstat(handle).st_size)
    magic = bytes(reader.buffer[(start := reader.need(4, "the first bytes")) : start + 4])
    if magic != b"GGUF":
        raise ModelDamaged(f"{path.name} is no GGUF file: it starts with {magic!r}.", "Choose a file in GGUF format.")
    version = reader.u32("the version")
    if version not in (2, 3):
        hint = " (big-endian?)" if version & 0xFFFF == 0 else ""
        raise reader.damaged(f"GGUF version {version}{hint}; versions 2 and 3 can be read")
    n_tensors, n_values = reader.u64("the number of tensors"), reader.u64("the number of settings")
    # Smallest entries: a tensor has 8 + 4 + 4 + 8 bytes and a name, a setting 8 + 4 + 1 and a key.
    if n_tensors * 25 + n_values * 14 > reader.size or n_tensors > MAX_TENSORS or n_values > MAX_SETTINGS:
        raise reader.damaged(f"{n_tensors} tensors and {n_values} settings are too many for its {reader.size} bytes")
    metadata: dict[str, Any] = {}
    for i in range(n_values):
        key = reader.string(f"the name of setting {i}")
        if not key or key in metadata:
            raise reader.damaged(f"setting {i} has {'a repeated' if key else 'no'} name {key[:64]!r}")
        metadata[key] = reader.value(f"setting {key[:64]!r}")
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise reader.damaged(f"an alignment of {alignment!r}, it must be a power of 2")
    tensors: list[TensorInfo] = []
    seen: set[str] = set()
    expected = 0
    for i in range(n_tensors):
        tensor = _tensor(reader, i, expected, alignment)
        if tensor.name in seen:
            raise reader.damaged(f"two tensors are called {tensor.name!r}")
        seen.add(tensor.name)
        tensors.append(tensor)
        expected += -(-tensor.nbytes // alignment) * alignment
    data_offset = -(-reader.at // alignment) * alignment
    for tensor in tensors:
        end = data_offset + tensor.offset + tensor.nbytes
        if end > reader.size:
            raise reader.damaged(f"cut short: tensor {tensor.name!r} ends at byte {end}, the file has {reader.size}")
    return Parsed(version, metadata, tensors, data_offset, reader.size, alignment)
