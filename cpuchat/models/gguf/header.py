"""Interprets the header of a GGUF file without loading its model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from cpuchat.errors import ModelDamaged
from cpuchat.models.gguf.arrays import LazyArray
from cpuchat.models.gguf.parse import Parsed, parse
from cpuchat.models.gguf.source import FileSource, Source
from cpuchat.models.gguf.types import FILE_TYPES
from cpuchat.text import clean_line

_MAX_LAYERS = 4096
_MAX_PARTS = 1000
# general.type (GGUFType of gguf-py) of files used with a model
_COMPANIONS = {
    "mmproj": "a multimodal projector",
    "adapter": "a LoRA adapter",
    "imatrix": "an importance matrix",
}
_HEAD = "a draft head"
_HEADS = frozenset({"eagle3", "dflash", "gemma4-assistant"})
"""llama.cpp architectures that read the hidden states of another model."""
_FORMAT = re.compile(r"[\s_-]+gguf$", re.IGNORECASE)
_SPLIT_NAME = re.compile(r"^(?P<stem>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf$", re.IGNORECASE)


class GGUFHeader(Parsed, frozen=True):
    """The header of the file at `path`; for a split model, `file_size` and tensors are those of all parts together."""

    path: Path

    def value(self, key: str, default: Any = None) -> Any:
        """Return `<architecture>.<key>`, or `default`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def number(self, key: str, default: int = 0) -> int:
        """Return `<architecture>.<key>` as a number, the largest of a per-layer array; `default` if invalid or < 0."""
        value = self.value(key, default)
        values = value.first(_MAX_LAYERS) if isinstance(value, LazyArray) else [value]
        return max((v for v in values if isinstance(v, int) and v >= 0), default=default)

    def per_layer(self, key: str, default: int) -> list[int]:
        """Return `<architecture>.<key>` for every layer; a scalar counts for all."""
        value = self.value(key, default)
        values = value.first(self.n_layer) if isinstance(value, LazyArray) else [value] * self.n_layer
        numbers = [v if isinstance(v, int) and v >= 0 else default for v in values]
        return numbers + [default] * (self.n_layer - len(numbers))

    def text(self, key: str) -> str:
        """Return a string of the metadata by its full key; "" when absent or of another type."""
        value = self.metadata.get(key)
        return value if isinstance(value, str) else ""

    @property
    def architecture(self) -> str:
        return self.text("general.architecture")

    @property
    def name(self) -> str:
        """`general.name`, or the file's name; cleaned for display, without "GGUF" of a repository."""
        name = clean_line(self.text("general.name"))
        return _FORMAT.sub("", name) or name or clean_line(self.path.stem)

    @property
    def n_params(self) -> int:
        return sum(t.n_elements for t in self.tensors)

    @property
    def n_params_active(self) -> int:
        """Parameters that one token uses: all, except experts that it is not sent to."""
        n_expert, used = self.number("expert_count"), self.number("expert_used_count")
        if not 0 < used < n_expert:
            return self.n_params
        return sum(t.n_elements * used // n_expert if t.is_routed else t.n_elements for t in self.tensors)

    @property
    def size(self) -> int:
        """Return bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors)

    @property
    def n_ctx_train(self) -> int:
        return self.number("context_length")

    @property
    def n_layer(self) -> int:
        """Layers, limited by the number of tensors: a header can claim any number."""
        return min(self.number("block_count"), len(self.tensors), _MAX_LAYERS)

    @property
    def n_embd(self) -> int:
        return self.number("embedding_length")

    @property
    def n_ff(self) -> int:
        """Largest hidden size of the feed-forward layers (of the experts that one token uses, together)."""
        experts = self.number("expert_used_count") * self.number("expert_feed_forward_length")
        return max(self.number("feed_forward_length"), experts)

    @property
    def n_vocab(self) -> int:
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, LazyArray):
            return len(tokens)
        declared = self.number("vocab_size")
        if declared:
            return declared
        return next((t.shape[1] for t in self.tensors if t.name == "token_embd.weight" and len(t.shape) > 1), 0)

    @property
    def n_head(self) -> int:
        return self.number("attention.head_count")

    @property
    def key_length(self) -> int:
        """Size of one K head."""
        return self.number("attention.key_length") or (self.n_embd // self.n_head if self.n_head else 0)

    @property
    def value_length(self) -> int:
        """Size of one V head."""
        return self.number("attention.value_length") or (self.n_embd // self.n_head if self.n_head else 0)

    @property
    def heads_kv(self) -> list[int]:
        """K/V heads of every layer; as many as Q heads by default."""
        if self.value("attention.head_count_kv") is None:
            return self.per_layer("attention.head_count", 0)
        return self.per_layer("attention.head_count_kv", self.n_head)

    @property
    def quantization(self) -> str:
        """Return `Q4_K_M` and the like, from `general.file_type`, else the type with most bytes."""
        number = self.metadata.get("general.file_type")
        if isinstance(number, int) and number in FILE_TYPES:
            return FILE_TYPES[number]
        by_type: dict[str, int] = {}
        for tensor in self.tensors:
            by_type[tensor.type] = by_type.get(tensor.type, 0) + tensor.nbytes
        return max(by_type, key=lambda t: by_type[t]) if by_type else "?"

    @property
    def chat_template(self) -> str:
        """Return the model's Jinja template; "" when it has none."""
        return self.text("tokenizer.chat_template")

    @property
    def split_count(self) -> int:
        """Return number of files of a split model; else 1."""
        count = self.metadata.get("split.count", 1)
        return count if isinstance(count, int) and count > 1 else 1

    @property
    def is_projector(self) -> bool:
        """Return whether it is a multimodal projector (mmproj), adapter or the like, not a language model."""
        return self.architecture == "clip" or self.text("general.type") in _COMPANIONS

    @property
    def is_head(self) -> bool:
        """Return whether it is a draft head (EAGLE-3, DFlash, MTP) without its model."""
        is_rest = self.number("nextn_predict_layers") > 0 and bool(self.tensors)
        return self.architecture in _HEADS or (
            is_rest and not any(tensor.name.startswith("blk.0.") for tensor in self.tensors)
        )

    @property
    def other(self) -> str:
        """Return what the file is if not a language model ("a LoRA adapter"); else ""."""
        if self.is_projector:
            return _COMPANIONS.get(self.text("general.type"), _COMPANIONS["mmproj"])
        if self.is_head:
            return _HEAD
        return "" if self.tensors else "a vocabulary without weights"


def header_from(source: Source, path: Path) -> GGUFHeader:
    """Read a header from any source; `path` is only recorded in the result.

    Raises:
        ModelDamaged: not a GGUF file, truncated, or contradictory.
        ModelUnsupported: its tensors have a type that ggml does not support.
        Whatever `source.read` raises.
    """
    return GGUFHeader(**msgspec.structs.asdict(parse(source)), path=path)


def read_header(path: Path) -> GGUFHeader:
    """Read the header of one file (of one part, when the model is split).

    Raises:
        ModelNotFound: it does not exist or may not be read.
        ModelDamaged, ModelUnsupported: as `header_from`.
    """
    with FileSource(path) as source:
        try:
            return header_from(source, path)
        except OSError as error:
            raise ModelDamaged(f"Cannot read {path}: {error.strerror}.", "Check the path and the disk.") from None


def split_parts(path: Path) -> list[Path] | None:
    """Return all parts of a split model, by the name of one (`x-00001-of-00003.gguf`); None for other names."""
    match = _SPLIT_NAME.match(path.name)
    if match is None:
        return None
    count = int(match["count"])
    if not 1 <= int(match["no"]) <= count <= _MAX_PARTS:
        return None
    return [path.with_name(f"{match['stem']}-{no:05d}-of-{count:05d}{path.suffix}") for no in range(1, count + 1)]


def read_model(path: Path) -> GGUFHeader:
    """Read a whole model: like `read_header`, with the tensors of all parts of a split one.

    Tensor offsets stay those of their own part.

    Raises:
        ModelNotFound, ModelDamaged, ModelUnsupported: as `read_header`; ModelDamaged when a part is missing, too.
    """
    parts = split_parts(path)
    if parts is not None:
        path = parts[0]
    header = read_header(path)
    if header.split_count == 1:
        return header
    if parts is None or len(parts) != header.split_count:
        raise ModelDamaged(
            f"{path.name} is one of {header.split_count} parts, but its name does not say which.",
            f"Restore the original names: *-00001-of-{header.split_count:05d}.gguf.",
        )
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ModelDamaged(
            f"{path.name}: {len(missing)} of {len(parts)} parts are missing ({missing[0]}).",
            "Download the missing parts.",
        )
    return join_parts([header, *(read_header(part) for part in parts[1:])])


def join_parts(parts: Sequence[GGUFHeader]) -> GGUFHeader:
    """Join the headers of a split model: the first part's metadata, the tensors and bytes of all."""
    tensors = [tensor for part in parts for tensor in part.tensors]
    return msgspec.structs.replace(parts[0], tensors=tensors, file_size=sum(part.file_size for part in parts))
