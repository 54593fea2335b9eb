"""Headers of models that are too large to be written in a test."""

from __future__ import annotations

import math
import os
from pathlib import Path

import gguf as reference
import numpy as np

from cpuchat.models.gguf.header import GGUFHeader
from cpuchat.models.gguf.parse import ALIGNMENT, BY_NAME, TensorInfo
from cpuchat.models.synthetic.model import layer_tensors, metadata, shape_of, tensor_type


def big_header(shape: str, quantization: str) -> GGUFHeader:
    """Return the header of a file of that shape ("7b", "70b") and quantization, without the vocabulary."""
    wanted = shape_of(shape)
    sizes = [(s.name, s.shape, s.type) for s in layer_tensors(wanted, quantization, seed=0)]
    for name in ("token_embd.weight", "output.weight")[: 1 if wanted.tied else 2]:
        kind = tensor_type(wanted, quantization, name, wanted.n_embd)
        sizes.append((name, (wanted.n_embd, wanted.n_vocab), kind))
    tensors: list[TensorInfo] = []
    offset = 0
    for name, size, kind in sizes:
        nbytes = math.prod(size) // BY_NAME[kind].block * BY_NAME[kind].nbytes
        tensors.append(TensorInfo(name, size, kind, offset, nbytes))
        offset += nbytes
    values = metadata(wanted, quantization, f"big {shape}", "bytes", None)
    return GGUFHeader(3, values, tensors, 0, offset, 32, Path(f"big-{shape}.gguf"))


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
