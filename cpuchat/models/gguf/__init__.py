"""GGUF files: what the header says (`header`), its bytes (`parse`, out of a `source`), types (`types`), writing."""

from cpuchat.models.gguf.arrays import LazyArray
from cpuchat.models.gguf.header import (
    GGUFHeader,
    header_from,
    join_parts,
    read_header,
    read_model,
    split_parts,
)
from cpuchat.models.gguf.parse import TensorInfo
from cpuchat.models.gguf.source import Source

__all__ = [
    "GGUFHeader",
    "LazyArray",
    "Source",
    "TensorInfo",
    "header_from",
    "join_parts",
    "read_header",
    "read_model",
    "split_parts",
]
