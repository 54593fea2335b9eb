"""Writes GGUF version 3 files: metadata and tensors whose bytes come in chunks, so that memory stays small."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from cpuchat.files import atomic_writer
from cpuchat.models.gguf.types import ALIGNMENT, BY_NAME

Chunks = Iterable["np.ndarray[Any, Any] | bytes | memoryview"]


class TensorSource(msgspec.Struct, frozen=True):
    """A tensor to write. `shape` in GGML's order (`shape[0]` contiguous); `chunks()` yields its bytes in order."""

    name: str
    shape: tuple[int, ...]
    type: str
    chunks: Callable[[], Chunks]

    @property
    def nbytes(self) -> int:
        kind = BY_NAME[self.type]
        n = 1
        for size in self.shape:
            n *= size
        return n // kind.block * kind.nbytes


def from_array(name: str, values: np.ndarray[Any, Any], kind: str = "F32") -> TensorSource:
    """Return a tensor from a numpy array (last axis contiguous) of the dtype of `kind`."""
    return TensorSource(name, tuple(reversed(values.shape)), kind, lambda: (np.ascontiguousarray(values),))


def _string(text: str) -> bytes:
    data = text.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def _array(key: str, values: Sequence[Any] | np.ndarray[Any, Any]) -> bytes:
    if isinstance(values, np.ndarray):
        code = {"f": (6, "<f4"), "i": (5, "<i4"), "u": (4, "<u4"), "b": (7, "?")}[values.dtype.kind]
        return struct.pack("<IIQ", 9, code[0], len(values)) + values.astype(code[1]).tobytes()
    if values and isinstance(values[0], str):
        return struct.pack("<IIQ", 9, 8, len(values)) + b"".join(map(_string, values))
    if all(isinstance(v, int) for v in values):
        return _array(key, np.array(values, np.int32))
    if all(isinstance(v, (int, float)) for v in values):
        return _array(key, np.array(values, np.float32))
    raise TypeError(f"{key}: an array of {type(values[0]).__name__} cannot be written")


def _value(key: str, value: Any) -> bytes:
    # llama.cpp checks types: sizes and ids are u32, factors f32.
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        if value < 0:
            return struct.pack("<Ii", 5, value)
        return struct.pack("<II", 4, value) if value < 1 << 32 else struct.pack("<IQ", 10, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    return _array(key, value)


def _pad(size: int) -> int:
    return -size % ALIGNMENT


def _write(file: BinaryIO, metadata: dict[str, Any], tensors: Sequence[TensorSource]) -> None:
    head = [struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))]
    head += [_string(key) + _value(key, value) for key, value in metadata.items()]
    offset = 0
    for tensor in tensors:
        dims = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
        head.append(_string(tensor.name) + dims + struct.pack("<IQ", BY_NAME[tensor.type].id, offset))
        offset += tensor.nbytes + _pad(tensor.nbytes)
    header = b"".join(head)
    file.write(header + bytes(_pad(len(header))))
    for tensor in tensors:
        written = 0
        for chunk in tensor.chunks():
            view = memoryview(chunk).cast("B")  # pyright: ignore[reportArgumentType]
            written += len(view)
            file.write(view)
        if written != tensor.nbytes:
            raise ValueError(f"tensor {tensor.name}: got {written} bytes, its shape needs {tensor.nbytes}")
        file.write(bytes(_pad(written)))


def write_gguf(path: Path, metadata: dict[str, Any], tensors: Sequence[TensorSource]) -> Path:
    """Write the file atomically: `path` is complete or does not exist.

    Metadata values: bool, int (u32, u64 or i32 by size), float (f32), str, lists of str, int (i32) or float (f32),
    numpy arrays.

    Raises:
        ValueError: a tensor's chunks don't add up to its shape.
        OSError: the disk is full or the folder cannot be written.
    """
    with atomic_writer(path, mode=0o644, sync=False) as file:
        _write(file, metadata, tensors)
    return path
