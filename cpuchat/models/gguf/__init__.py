"""GGUF files: what the header says (`header`), its bytes (`parse`), types (`types`), writing (`write`)."""

from cpuchat.models.gguf.header import GGUFHeader, read_header, read_model, split_parts
from cpuchat.models.gguf.parse import LazyArray, TensorInfo

__all__ = ["GGUFHeader", "LazyArray", "TensorInfo", "read_header", "read_model", "split_parts"]
