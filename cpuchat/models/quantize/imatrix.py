"""Reads importance matrices: how strongly each input of a weight matrix was activated on a sample of text.

Formats: GGUF with `<tensor>.in_sum2` and `<tensor>.counts`, and the older binary one
(llama-cpp-python 0.3.36, common/imatrix-loader.cpp; its use: load_imatrix in tools/quantize/quantize.cpp).
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from cpuchat.errors import ModelDamaged, ModelNotFound, UsageError
from cpuchat.models.gguf.header import GGUFHeader, read_header
from cpuchat.models.gguf.parse import TensorInfo

_MAX_ENTRIES = 1 << 20
_MAX_NAME = 4096

Weights = dict[str, "np.ndarray[Any, Any]"]


class ImportanceMatrix(msgspec.Struct, frozen=True):
    """`weights` by the name of the weight matrix: float32, one per column (for each expert in turn). `chunks`: of
    text that they were computed from, 0 if not stated."""

    weights: Weights
    chunks: int = 0


def read_imatrix(path: Path) -> ImportanceMatrix:
    """Read either format.

    Raises:
        ModelNotFound: the file cannot be read.
        ModelDamaged: it is damaged.
        UsageError: it is another kind of GGUF file.
    """
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                file.seek(0)
                return _read_old(path, file)
            return _read_gguf(path, file)
    except OSError as error:
        raise ModelNotFound(f"Cannot read {path}: {error.strerror}.", "Check the path.") from None


def _damaged(path: Path, what: str) -> ModelDamaged:
    return ModelDamaged(f"{path.name} is a damaged importance matrix: {what}.", "Download or compute it again.")


def _read_gguf(path: Path, file: BinaryIO) -> ImportanceMatrix:
    header = read_header(path)
    tensors = {tensor.name: tensor for tensor in header.tensors}
    weights: Weights = {}
    for name, tensor in tensors.items():
        if not name.endswith(".in_sum2"):
            continue
        matrix = name.removesuffix(".in_sum2")
        counts = tensors.get(f"{matrix}.counts")
        if counts is None or tensor.n_elements % max(counts.n_elements, 1):
            raise _damaged(path, f"the counts of {matrix[:64]!r} are missing or have the wrong size")
        n = _values(path, file, header, counts)[:, None]
        sums = _values(path, file, header, tensor).reshape(len(n), -1)
        # An expert that was never used: all its inputs count alike.
        weights[matrix] = np.where(n > 0, sums / np.maximum(n, 1), 1).astype(np.float32).ravel()
    if not weights:
        raise UsageError(f"{path.name} is not an importance matrix.", "Give a file written by llama-imatrix.")
    chunks = header.metadata.get("imatrix.chunk_count", 0)
    return _checked(path, weights, chunks if isinstance(chunks, int) else 0)


def _values(path: Path, file: BinaryIO, header: GGUFHeader, tensor: TensorInfo) -> np.ndarray[Any, Any]:
    if tensor.type != "F32":
        raise _damaged(path, f"{tensor.name[:64]!r} is of type {tensor.type}, not F32")
    file.seek(header.data_offset + tensor.offset)
    return np.frombuffer(file.read(tensor.nbytes), "<f4")


def _read_old(path: Path, file: BinaryIO) -> ImportanceMatrix:
    size = path.stat().st_size

    def number(most: int, what: str) -> int:
        data = file.read(4)
        value = struct.unpack("<i", data)[0] if len(data) == 4 else -1
        if not 0 <= value <= most:
            raise _damaged(path, f"{what} is missing or invalid")
        return value

    weights: Weights = {}
    for i in range(number(_MAX_ENTRIES, "the number of entries")):
        name = file.read(number(_MAX_NAME, f"the name of entry {i}")).decode("utf-8", "replace")
        calls = number(2**31 - 1, f"the number of calls of entry {i}")
        count = number(size // 4, f"the length of entry {i}")
        data = file.read(4 * count)
        if len(data) < 4 * count:
            raise _damaged(path, f"truncated in entry {i}")
        sums = np.frombuffer(data, "<f4")
        weights[name] = (sums / calls if calls else sums).astype(np.float32)
    if not weights:
        raise _damaged(path, "it has no entries")
    tail = file.read(4)
    return _checked(path, weights, struct.unpack("<i", tail)[0] if len(tail) == 4 else 0)


def _checked(path: Path, weights: Weights, chunks: int) -> ImportanceMatrix:
    for name, values in weights.items():
        if not len(values) or not np.isfinite(values).all():
            raise _damaged(path, f"the values of {name[:64]!r} are missing or not finite")
    return ImportanceMatrix(weights, max(chunks, 0))
