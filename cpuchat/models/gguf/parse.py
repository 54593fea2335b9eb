"""Parses the bytes of a GGUF header. The file is untrusted: lengths are checked before anything is allocated.

Format: docs/gguf.md of ggml, versions 2 and 3, little-endian; the checks are those of llama.cpp's gguf.cpp, so what
passes here is accepted there. The limits keep the worst header below 200 MB and 1 s, arrays decoded or not. Types and
their sizes: `enum ggml_type` in ggml.h, the block structs of ggml-common.h (ggml 0.25.3, the one in llama-cpp-python
0.3.36), and `enum llama_ftype` in llama.h of the same release.
"""

from __future__ import annotations

import math
import os
import re
import stat
import struct
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol, overload

import msgspec

from cpuchat.base.errors import CpuchatError, ModelDamaged, ModelNotFound, ModelUnsupported
from cpuchat.base.text import clean_line
from cpuchat.models.ollama import file_name
from cpuchat.telemetry import units

ALIGNMENT = 32
"""Default alignment of tensors in bytes (GGUF_DEFAULT_ALIGNMENT)."""


class GGMLType(NamedTuple):
    """`block` values are stored together in `nbytes` bytes."""

    id: int
    name: str
    block: int
    nbytes: int


_TABLE = tuple(GGMLType(*row) for row in (
    (0, "F32", 1, 4), (1, "F16", 1, 2), (2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24), (8, "Q8_0", 32, 34), (9, "Q8_1", 32, 36), (10, "Q2_K", 256, 84), (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144), (13, "Q5_K", 256, 176), (14, "Q6_K", 256, 210), (15, "Q8_K", 256, 292),
    (16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74), (18, "IQ3_XXS", 256, 98), (19, "IQ1_S", 256, 50),
    (20, "IQ4_NL", 32, 18), (21, "IQ3_S", 256, 110), (22, "IQ2_S", 256, 82), (23, "IQ4_XS", 256, 136),
    (24, "I8", 1, 1), (25, "I16", 1, 2), (26, "I32", 1, 4), (27, "I64", 1, 8), (28, "F64", 1, 8),
    (29, "IQ1_M", 256, 56), (30, "BF16", 1, 2), (34, "TQ1_0", 256, 54), (35, "TQ2_0", 256, 66), (39, "MXFP4", 32, 17),
    (40, "NVFP4", 64, 36), (41, "Q1_0", 128, 18), (42, "Q2_0", 64, 18),
))  # fmt: skip

TYPES: dict[int, GGMLType] = {t.id: t for t in _TABLE}
BY_NAME: dict[str, GGMLType] = {t.name: t for t in _TABLE}
PRECISE = frozenset({"F32", "F16", "BF16", "Q8_0"})
"""Types from which quantizing loses nothing more, or nearly nothing."""

# general.file_type
FILE_TYPES: dict[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4", 39: "NVFP4",
    40: "Q1_0", 41: "Q2_0",
}  # fmt: skip
FILE_TYPE_BY_NAME: dict[str, int] = {name: number for number, name in FILE_TYPES.items()}


STRING = 8
"""GGUF value type of strings: a length (u64) and UTF-8."""
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF value type -> struct code; 7 is bool."""
_u32 = struct.Struct("<I").unpack_from
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
        """Yield the bytes of every string, valid UTF-8 or not. Raises TypeError: these are numbers."""
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


class ByteSource(Protocol):
    """Bytes that `parse` reads front to back in few large pieces: 1 MiB first, then doubling."""

    name: str
    """For messages."""
    size: int
    """Bytes of the whole file."""

    def read(self, offset: int, count: int) -> bytes:
        """Return up to `count` bytes from `offset`; b"" at the end. Its errors pass through `parse`."""
        ...


class FileSource:
    """An open file; a context manager. Raises ModelNotFound: it does not exist, may not be read, or is a folder, a pipe
    or a device."""

    def __init__(self, path: Path) -> None:
        # O_NONBLOCK: opening a pipe without a writer would block forever.
        flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
        try:
            self._handle = os.open(path, flags)
        except OSError as error:
            raise ModelNotFound(f"Cannot open {path}: {error.strerror}.", "Check the path.") from None
        status = os.fstat(self._handle)
        if not stat.S_ISREG(status.st_mode):
            os.close(self._handle)
            raise ModelNotFound(f"Cannot open {path}: not a regular file.", "Choose a .gguf file.")
        self.name = file_name(path)
        self.size = status.st_size

    def read(self, offset: int, count: int) -> bytes:
        return os.pread(self._handle, count, offset)

    def __enter__(self) -> FileSource:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)


HEAD = 4096
"""Bytes by which `not_gguf` tells what a file is."""
_PIECE = re.compile(r"\.part\d+of\d+$|[.-](?:gguf-)?(?:split|part)-?[a-z]{1,2}$", re.IGNORECASE)
_PARTIAL = re.compile(
    r"\.(?:part|partial|incomplete|crdownload|download|downloadinprogress|aria2|tmp|opdownload|!ut)$", re.IGNORECASE
)


@cache
def _formats() -> list[tuple[re.Pattern[bytes], dict[str, str]]]:
    """Return the entries of formats.toml, each with its expression for the first bytes."""
    text = Path(__file__).with_name("formats.toml").read_text(encoding="utf-8")
    return [(_bytes(one["match"]), one) for one in tomllib.loads(text)["format"]]


def _bytes(expression: str) -> re.Pattern[bytes]:
    return re.compile(expression.encode("ascii"), re.DOTALL | re.IGNORECASE)


def not_gguf(name: str, head: bytes) -> ModelDamaged:
    """Return the error for a file that does not begin as GGUF does. `head`: its first `HEAD` bytes, or all of it."""
    if not head:
        return ModelDamaged(f"{name} is empty.", "Download it again.")
    what, hint = f"bad magic 0x{head[:4].hex()}", how_to_complete(name) or "Choose a .gguf file."
    for pattern, found in _formats():
        if pattern.match(head):
            said = _bytes(found["said"]).search(head) if "said" in found else None
            quoted = clean_line(said[1].decode("utf-8", "replace"))[:40] if said is not None else ""
            what, hint = f"it is {found['what']}{f' ({quoted!r})' if quoted else ''}", found["hint"]
            break
    return ModelDamaged(f"{name} is not a GGUF file: {what}.", hint)


def how_to_complete(name: str) -> str:
    """Return what makes a whole file of one that its name calls a piece or a partial download; "" for other names."""
    if _PIECE.search(name):
        return "It is one of several pieces: join them in their order (`cat PIECES > FILE.gguf`)."
    if _PARTIAL.search(name):
        return "It is a partial download: resume it with the program that began it, which renames it at the end."
    return ""


# Far above anything real: 20 MB with 262k tokens and 515k merges, 60 metadata entries, 100 kB of text, 3,000 tensors.
# Some contain a tokenizer.json of up to 35 MB as one string: nothing uses it, so long strings are truncated.
MAX_HEADER = 64 << 20
MAX_ENTRIES = 1 << 14
MAX_TENSORS = 1 << 14
MAX_VALUES = 1 << 22  # numbers of one array
MAX_STRINGS = 5 << 18  # of all arrays
MAX_TEXT = 8 << 20  # bytes of all strings outside of arrays
KEPT_TEXT = 1 << 20  # bytes kept of one of them
MAX_DIMS = 4
MAX_TENSOR_NAME = 64
_ROUTED = re.compile(r"\.ffn_(up|down|gate|gate_up)_(ch|)exps\.")  # LLM_FFN_EXPS_REGEX in llama.cpp's common.h
_MAX_VERSIONS = 100
_INCONSISTENT = "Compare it with its checksum (`cpuchat models verify`), or choose another file of this model."
_CHUNK = 1 << 20
_ARRAY = 9


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
        return math.prod(self.shape)

    @property
    def is_routed(self) -> bool:
        """Return whether these are weights of experts, of which a token uses some."""
        return _ROUTED.search(self.name) is not None


class _Reader:
    """Reads forward through the source into a buffer."""

    def __init__(self, source: ByteSource) -> None:
        self.source = source
        self.size = source.size
        self.buffer = bytearray()
        self.at = 0
        self.text_left = MAX_TEXT
        self.strings_left = MAX_STRINGS

    def damaged(self, what: str, hint: str = _INCONSISTENT) -> ModelDamaged:
        return ModelDamaged(f"{self.source.name} is damaged: {what}.", hint)

    def truncated(self, what: str) -> ModelDamaged:
        return self.damaged(f"truncated{what}", how_to_complete(self.source.name) or "Download it again.")

    def need(self, count: int, what: str) -> int:
        """Advance over `count` bytes; returns where they start in the buffer."""
        start, end = self.at, self.at + count
        if end > self.size:
            raise self.truncated(f" in {what}, which ends at byte {end}; the file has {self.size}")
        if end > MAX_HEADER:
            raise self.damaged(f"{what} ends at byte {end}, beyond the longest valid header")
        if end > len(self.buffer):
            wanted = min(self.size, MAX_HEADER, max(end, 2 * len(self.buffer), _CHUNK))
            while len(self.buffer) < wanted:
                piece = self.source.read(len(self.buffer), wanted - len(self.buffer))
                if not piece:
                    break
                self.buffer += piece
            if len(self.buffer) < end:  # it shrank in the meantime
                raise self.truncated(f" in {what}: byte {len(self.buffer)} could not be read")
        self.at = end
        return start

    def u32(self, what: str) -> int:
        return _u32(self.buffer, self.need(4, what))[0]

    def u64(self, what: str) -> int:
        return _u64(self.buffer, self.need(8, what))[0]

    def string(self, what: str) -> str:
        length = self.u64(what)
        start = self.need(length, what)
        kept = min(length, KEPT_TEXT)
        self.text_left -= kept
        if self.text_left < 0:
            raise self.damaged(f"{what} has {length} bytes, more text than any valid header")
        return self.buffer[start : start + kept].decode("utf-8", "replace")

    def value(self, what: str) -> Any:
        kind = self.u32(what)
        if kind == STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self.array(what)
        code = SCALARS.get(kind)
        if code is None:
            raise self.damaged(f"{what} has unknown type {kind} at byte {self.at - 4}")
        size = struct.calcsize("<" + code)
        return struct.unpack_from("<" + code, self.buffer, self.need(size, what))[0]

    def array(self, what: str) -> LazyArray:
        kind = self.u32(what)
        count = self.u64(what)
        if kind != STRING and count > MAX_VALUES:
            raise self.damaged(f"{what} has {count} values, more than any valid header")
        if kind == STRING:
            start = self.at
            self.skip_strings(count, what)
        elif kind in SCALARS:
            start = self.need(count * struct.calcsize("<" + SCALARS[kind]), what)
        else:
            raise self.damaged(f"{what} is an array of unknown type {kind}")
        return LazyArray(kind, count, bytes(memoryview(self.buffer)[start : self.at]))

    def skip_strings(self, count: int, what: str) -> None:
        """Skip `count` strings. The one loop over every token of a vocabulary, so it is optimized."""
        if count * 8 > self.size - self.at:
            raise self.damaged(f"{what} claims {count} strings at byte {self.at}; the file has {self.size} bytes")
        self.strings_left -= count
        if self.strings_left < 0:
            raise self.damaged(f"{what} has {count} strings, more than any vocabulary")
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


def _tensor(reader: _Reader, index: int, expected: int, previous: str) -> TensorInfo:
    """Read the entry of a tensor that begins at the offset `expected`, behind one of type `previous`."""
    what = f"the entry of tensor {index}"
    name = reader.string(what)
    if not name or len(name.encode("utf-8", "replace")) >= MAX_TENSOR_NAME:
        raise reader.damaged(f"tensor {index} has a name of {len(name)} characters")
    n_dims = reader.u32(what)
    if n_dims > MAX_DIMS:
        raise reader.damaged(f"tensor {name!r} has {n_dims} dimensions, at most {MAX_DIMS} are allowed")
    shape = struct.unpack_from(f"<{n_dims}Q", reader.buffer, reader.need(8 * n_dims, what)) or (1,)
    kind = TYPES.get(number := reader.u32(what))
    offset = reader.u64(what)
    if kind is None:
        raise ModelUnsupported(
            f"{reader.source.name} has tensors of type {number}, which llama.cpp does not support.",
            "It needs a newer engine, is damaged, or was made for another program: use a standard file, which is "
            "repacked for this CPU at load.",
        )
    elements = math.prod(shape)
    if max(elements, *shape) >= 1 << 63:
        raise reader.damaged(f"tensor {name!r} has the impossible shape {shape}")
    if shape[0] % kind.block:
        raise reader.damaged(f"tensor {name!r} has rows of {shape[0]}, {kind.name} needs multiples of {kind.block}")
    if offset != expected and previous == "Q2_0":
        raise ModelUnsupported(
            f"{reader.source.name} has Q2_0 in groups of 128 weights; llama.cpp supports groups of 64.",
            "Choose the file of the same model with Q2_0_g64 or Q2_g64 in its name, where there is one.",
        )
    if offset != expected:
        raise reader.damaged(f"tensor {name!r} has offset {offset}, expected {expected}")
    return TensorInfo(name, tuple(shape), kind.name, offset, elements // kind.block * kind.nbytes)


def _other_version(reader: _Reader, version: int) -> CpuchatError:
    name, swapped = reader.source.name, int.from_bytes(version.to_bytes(4, "little"), "big")
    if swapped in (1, 2, 3):
        return ModelUnsupported(
            f"{name} is a big-endian GGUF file, for other CPUs.", "Choose a little-endian file of this model."
        )
    if not 0 < version < _MAX_VERSIONS:
        return reader.damaged(f"GGUF version {version}; versions 2 and 3 are supported")
    return ModelUnsupported(
        f"{name} is in version {version} of GGUF; this engine supports 2 and 3.",
        "Choose a newer file of this model." if version == 1 else "It needs a newer engine, or another file.",
    )


def parse(source: ByteSource) -> Parsed:
    """Parse the header of a file. Raises ModelDamaged: not GGUF, truncated or contradictory; ModelUnsupported: another
    version of GGUF, or tensors of a type that ggml does not support. Raises whatever `source.read` raises."""
    reader = _Reader(source)
    reader.need(min(4, reader.size), "the first bytes")
    head = bytes(reader.buffer[:HEAD])
    if not head.startswith(b"GGUF"):
        raise not_gguf(source.name, head)
    version = reader.u32("the version")
    if version not in (2, 3):
        raise _other_version(reader, version)
    n_tensors, n_values = reader.u64("the tensor count"), reader.u64("the metadata count")
    # Smallest entries: a tensor has 8 + 4 + 4 + 8 bytes and a name, metadata 8 + 4 + 1 and a key.
    if n_tensors * 25 + n_values * 14 > reader.size or n_tensors > MAX_TENSORS or n_values > MAX_ENTRIES:
        raise reader.damaged(f"{n_tensors} tensors and {n_values} metadata entries are too many for its size")
    metadata: dict[str, Any] = {}
    for i in range(n_values):
        key = reader.string(f"the key of metadata entry {i}")
        if not key or key in metadata:
            raise reader.damaged(f"metadata entry {i} has {'a repeated' if key else 'an empty'} key {key[:64]!r}")
        metadata[key] = reader.value(f"metadata {key[:64]!r}")
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        shown = alignment if isinstance(alignment, int | float) else "not a number"
        raise reader.damaged(f"the alignment is {shown}, not a power of 2")
    tensors: list[TensorInfo] = []
    seen: set[str] = set()
    expected = 0
    for i in range(n_tensors):
        tensor = _tensor(reader, i, expected, tensors[-1].type if tensors else "")
        if tensor.name in seen:
            raise reader.damaged(f"two tensors have the name {tensor.name!r}")
        seen.add(tensor.name)
        tensors.append(tensor)
        expected += -(-tensor.nbytes // alignment) * alignment
    data_offset = -(-reader.at // alignment) * alignment
    end = max((data_offset + tensor.offset + tensor.nbytes for tensor in tensors), default=0)
    if end > reader.size:
        raise reader.truncated(f", {units.size(reader.size)} of {units.size(end)}")
    return Parsed(version, metadata, tensors, data_offset, reader.size, alignment)
