"""Sound models with single values of their header changed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cpuchat.models.gguf.header import read_header
from cpuchat.models.gguf.parse import LazyArray, TensorInfo
from cpuchat.models.synthetic.model import TensorSource, write_gguf


def edited(model: Path, out: Path, changes: Mapping[str, Any]) -> Path:
    """Write `model` to `out` with these metadata values; None removes a key."""
    header = read_header(model)
    data = model.read_bytes()[header.data_offset :]

    def source(tensor: TensorInfo) -> TensorSource:
        content = data[tensor.offset : tensor.offset + tensor.nbytes]
        return TensorSource(tensor.name, tensor.shape, tensor.type, lambda: (content,))

    metadata = {key: _writable(value) for key, value in header.metadata.items()} | dict(changes)
    kept = {key: value for key, value in metadata.items() if value is not None}
    return write_gguf(out, kept, [source(tensor) for tensor in header.tensors])


def _writable(value: Any) -> Any:
    if not isinstance(value, LazyArray) or value.is_text:
        return list(value) if isinstance(value, LazyArray) else value
    return np.array(list(value), np.float32 if value.value_type == 6 else np.int32)
