"""Headers of models that are too large to be written in a test."""

from __future__ import annotations

import os
from pathlib import Path

import gguf as reference
import msgspec
import numpy as np

from cpuchat.models.gguf.header import GGUFHeader
from cpuchat.models.gguf.parse import ALIGNMENT
from cpuchat.models.synthetic.model import header_of


def big_header(shape: str, quantization: str) -> GGUFHeader:
    """Return the header of a file of that shape ("7b", "70b") and quantization, without the vocabulary."""
    header = header_of(shape, quantization)
    values = header.metadata | {"general.name": f"big {shape}"}
    return msgspec.structs.replace(header, metadata=values, path=Path(f"big-{shape}.gguf"))


def hollow_file(path: Path, header: GGUFHeader) -> Path:
    """Write a sparse file with that header, but no vocabulary; its weights take no disk space."""
    writer = reference.GGUFWriter(path, header.architecture)
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in header.metadata.items():
        if key != "general.architecture" and not key.startswith("tokenizer."):
            add[type(value)](key, value)
    for tensor in header.tensors:
        kind = reference.GGMLQuantizationType[tensor.type]
        shape = tuple(reversed(tensor.shape))
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.float32), tensor.nbytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    begin = -(-path.stat().st_size // ALIGNMENT) * ALIGNMENT
    os.truncate(path, begin + sum(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in header.tensors))
    return path
