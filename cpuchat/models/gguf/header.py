"""Interprets the header of a GGUF file without loading its model: sizes and vocabulary.

Defaults of vocabularies are those of llama_vocab::impl::load. What llama.cpp would abort on is left to the process
boundary.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from cpuchat.base.errors import CpuchatError, ModelDamaged
from cpuchat.base.text import clean_line
from cpuchat.config.servers import ServerModel, Source
from cpuchat.models.engine_version import HEADS
from cpuchat.models.gguf.parse import FILE_TYPES, ByteSource, FileSource, LazyArray, Parsed, how_to_complete, parse
from cpuchat.models.ollama import is_content, ollama_name

_MAX_LAYERS = 4096
_MAX_PARTS = 1000
# general.type (GGUFType of gguf-py) of files used with a model
_COMPANIONS = {"mmproj": "a multimodal projector", "adapter": "a LoRA adapter", "imatrix": "an importance matrix"}
_FORMAT = re.compile(r"(^|[\s_-]+)gguf$", re.IGNORECASE)
_WORDS, _SIZED = re.compile(r"[^\W\d_]+"), re.compile(r"\d[bm](?![^\W_])", re.IGNORECASE)
_PART = re.compile(r"-\d{5}-of-\d{5}$", re.IGNORECASE)
_SPLIT_NAME = re.compile(r"^(?P<stem>.+)-(?P<no>\d{5})-(?P<of>of)-(?P<count>\d{5})\.gguf$", re.IGNORECASE)
MAX_LINKS = 8  # from a folder of the user to the cache, there to `blobs/`, from there to what repositories share


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
        """`general.name`, or the file's name where that tells more; cleaned for display, without "GGUF" of a
        repository. A file that is named by its content, as in Ollama's store, is called by its architecture."""
        name = _FORMAT.sub("", clean_line(self.text("general.name")))
        stem = self.architecture if is_content(self.path) else _PART.sub("", self.path.stem)
        return telling_name(name, clean_line(stem))

    @property
    def n_params(self) -> int:
        return sum(t.n_elements for t in self.tensors)

    @property
    def n_params_active(self) -> int:
        """Parameters that one token uses: all, except experts that it is not sent to, and embeddings of layers and of
        n-grams, of which it reads rows."""
        n_expert, used = self.number("expert_count"), self.number("expert_used_count")
        kept = [t for t in self.tensors if t.name != "per_layer_token_embd.weight"]
        if not 0 < used < n_expert:
            return sum(t.n_elements for t in kept)
        return sum(t.n_elements * used // n_expert if t.is_routed else t.n_elements for t in kept)

    @property
    def output_matrix(self) -> str:
        """Return the name of the output matrix: in tied models the embedding table, all of which is read as such."""
        tied = all(tensor.name != "output.weight" for tensor in self.tensors)
        return "token_embd.weight" if tied else "output.weight"

    @property
    def size(self) -> int:
        """Return bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors)

    @property
    def bits_per_weight(self) -> float:
        """Return the bits per weight over all tensors; 0 when there are none."""
        return 8 * self.size / max(self.n_params, 1)

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
    def decoding_layers(self) -> int:
        """Return the number of layers without those that predict further tokens, which come last (llama_hparams)."""
        extra = self.number("nextn_predict_layers")
        return self.n_layer - extra if extra < self.n_layer else self.n_layer

    @property
    def is_projector(self) -> bool:
        """Return whether it is a multimodal projector (mmproj), adapter or the like, not a language model."""
        return self.architecture == "clip" or self.text("general.type") in _COMPANIONS

    @property
    def is_head(self) -> bool:
        """Return whether it is a draft head (EAGLE-3, DFlash, MTP) without its model."""
        is_rest = self.number("nextn_predict_layers") > 0 and bool(self.tensors)
        return self.architecture in HEADS or (
            is_rest and not any(tensor.name.startswith("blk.0.") for tensor in self.tensors)
        )

    @property
    def other(self) -> str:
        """Return what the file is if not a language model ("a LoRA adapter"); else ""."""
        if self.is_projector:
            return _COMPANIONS.get(self.text("general.type"), _COMPANIONS["mmproj"])
        if self.is_head:
            return "a draft head"
        return "" if self.tensors else "a vocabulary without weights"


def header_from(source: ByteSource, path: Path) -> GGUFHeader:
    """Read a header from any source; `path` is only recorded in the result. Raises ModelDamaged: not a GGUF file,
    truncated, or contradictory; ModelUnsupported: its tensors have a type that ggml does not support. Raises whatever
    `source.read` raises."""
    return GGUFHeader(**msgspec.structs.asdict(parse(source)), path=path)


def read_header(path: Path) -> GGUFHeader:
    """Read the header of one file (of one part, when the model is split). Raises ModelNotFound: it does not exist or
    may not be read; ModelDamaged, ModelUnsupported: as `header_from`."""
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
    names = (f"{match['stem']}-{no:05d}-{match['of']}-{count:05d}{path.suffix}" for no in range(1, count + 1))
    return [path.with_name(name) for name in names]


def files_beside(path: Path) -> list[Path]:
    """Return all files of a model in the folder of `path`, one of them, whether they exist or not."""
    parts = split_parts(path) or [path]
    if len(parts) > 1 and not all(map(os.path.lexists, parts)):
        with contextlib.suppress(OSError):  # some may be written in capitals
            spelled = {one.name.lower(): one for one in sorted(path.parent.iterdir())}
            parts = [part if os.path.lexists(part) else spelled.get(part.name.lower(), part) for part in parts]
    return parts


def model_files(path: Path) -> list[Path]:
    """Return all files of a model by the path of one of them, whether they exist or not: those beside it or, where more
    of them are, those beside what a link leads to."""
    found, linked = files_beside(path), path
    for _ in range(MAX_LINKS):
        if (len(found) > 1 and _n_here(found) == len(found)) or not linked.is_symlink():
            break
        target = linked.parent / linked.readlink()
        linked = Path(os.path.realpath(target.parent), target.name)
        parts = files_beside(linked)
        if len(parts) > 1 and _n_here(parts) >= _n_here(found):
            found = parts
    return found


def _n_here(parts: list[Path]) -> int:
    return sum(part.is_file() for part in parts)


def model_size(path: Path) -> int:
    """Return the bytes of all files of a model. Raises OSError when one is missing."""
    return sum(part.stat().st_size for part in model_files(path))


def read_model(path: Path) -> GGUFHeader:
    """Read a whole model: like `read_header`, with the tensors of all parts of a split one. Tensor offsets stay those
    of their own part. Raises ModelNotFound, ModelDamaged, ModelUnsupported: as `read_header`; ModelDamaged when a part
    is missing or being downloaded, too, and for a path that no other process could be told."""
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        raise ModelDamaged(f"The path of {clean_line(path.name)} is not valid UTF-8.", "Rename it.") from None
    parts = model_files(path)
    if begun := next((part for part in parts if part.with_name(f"{part.name}.aria2").exists()), None):
        raise ModelDamaged(f"{begun.name} is not downloaded to its end.", how_to_complete(f"{begun.name}.aria2"))
    header = read_header(next((part for part in parts if part.is_file()), path))
    if header.split_count == 1:
        return header
    if len(parts) != header.split_count:
        raise ModelDamaged(
            f"{path.name} is one of {header.split_count} parts, but its name does not say which.",
            f"Restore the original names, *-00001-of-{header.split_count:05d}.gguf, beside each other. Parts that were "
            "joined by `cat` have to be merged by llama-gguf-split instead.",
        )
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ModelDamaged(
            f"{path.name}: {len(missing)} of {len(parts)} parts are missing ({missing[0]}).",
            f"Put the missing parts into {parts[0].parent}, or download them.",
        )
    return join_parts([header, *(read_header(part) for part in parts[1:])])


def telling_name(name: str, other: str) -> str:
    """Return `name` of a header, or the `other` one that its file has: where it is none, a folder in which the model
    was made, or has neither a size nor a word of the other one, which has a size (`KL0.099` of `Qwen3.5-27B-Q8_0`)."""
    name = name.rpartition("/")[2] if name.startswith(("/", ".")) else name
    words, others = (set(_WORDS.findall(one.lower())) for one in (name, other))
    return name if words and (words & others or _SIZED.search(name) or not _SIZED.search(other)) else other


@functools.lru_cache(256)
def known_as(source: Source) -> str:
    """Return the name of a model as people know it: the name that Ollama has for it, else the file's name without its
    ending; of a file that is named by its content alone, what its header says. It is read once."""
    if isinstance(source, ServerModel):
        return source.stem
    if is_content(source) and not ollama_name(source):
        with contextlib.suppress(CpuchatError, OSError):
            return read_model(source).name
    return ollama_name(source) or clean_line(_PART.sub("", source.stem))


def join_parts(parts: Sequence[GGUFHeader]) -> GGUFHeader:
    """Join the headers of a split model: the first part's metadata, the tensors and bytes of all."""
    tensors = [tensor for part in parts for tensor in part.tensors]
    return msgspec.structs.replace(parts[0], tensors=tensors, file_size=sum(part.file_size for part in parts))


# tokenizer.ggml.model -> vocab type of llama.cpp.
_KINDS = {
    "llama": "SPM", "bert": "WPM", "gpt2": "BPE", "hybriddna": "BPE", "whitespace": "BPE", "gemma4": "BPE",
    "t5": "UGM", "rwkv": "RWKV", "plamo2": "PLaMo2", "test": "test", "none": "none", "no_vocab": "none",
}  # fmt: skip
# Default (bos, eos); -1 is none.
_DEFAULT_IDS = {"llama": (1, 2), "bert": (101, -1), "gpt2": (11, 11), "hybriddna": (11, 11), "whitespace": (11, 11),
                "t5": (-1, 1), "plamo2": (1, 2)}  # fmt: skip
# Pre-tokenizers of BPE vocabularies that add bos unless the header says otherwise.
_PRE_WITH_BOS = frozenset(
    {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano",
     "tekken", "chameleon"}
)  # fmt: skip
_PRE_WITHOUT_BOS = frozenset({"chatglm-bpe", "glm4", "glm5"})  # these have no default bos
_PRE_ALWAYS_BOS = frozenset({"gemma4", "granite-embed-multi-311m"})  # whatever the header says


class Vocabulary(msgspec.Struct, frozen=True):
    """A vocabulary. `bos` and `eos` are -1 when there is none. `tokens` None: ids without texts.

    `model` is the header's tokenizer name, `kind` llama.cpp's: "BPE", "SPM", "WPM", "UGM", "RWKV", "PLaMo2", "none";
    `pre` names the pre-tokenizer."""

    model: str
    kind: str
    pre: str
    add_bos: bool
    add_eos: bool
    bos: int
    eos: int
    n_tokens: int
    n_merges: int
    tokens: LazyArray | None


def vocabulary(header: GGUFHeader) -> Vocabulary:
    """Return the vocabulary of a model with llama.cpp's defaults."""
    metadata = header.metadata
    model = header.text("tokenizer.ggml.model")
    kind = _KINDS.get(model, model)
    texts = metadata.get("tokenizer.ggml.tokens")
    tokens = texts if isinstance(texts, LazyArray) and texts.is_text and kind != "none" else None
    n_tokens = header.number("vocab_size") if tokens is None else len(tokens)

    def token(key: str, default: int) -> int:
        default = default if default < n_tokens else -1
        value = metadata.get(f"tokenizer.ggml.{key}_token_id")
        return value if isinstance(value, int) and 0 <= value < n_tokens else default

    def flag(key: str, default: bool) -> bool:
        value = metadata.get(f"tokenizer.ggml.add_{key}_token")
        return value if isinstance(value, bool) else default

    pre = "gemma4" if model == "gemma4" else header.text("tokenizer.ggml.pre")
    bos, eos = _DEFAULT_IDS.get(model, (-1, -1))
    if kind == "BPE" and pre in _PRE_WITHOUT_BOS:
        bos = -1
    begins = kind in ("SPM", "WPM") or (kind == "BPE" and pre in _PRE_WITH_BOS)
    always = kind == "BPE" and pre in _PRE_ALWAYS_BOS
    merges = metadata.get("tokenizer.ggml.merges")
    return Vocabulary(
        model=model,
        kind=kind,
        pre=pre,
        add_bos=kind != "none" and (flag("bos", begins) or always),
        add_eos=kind != "none" and flag("eos", kind == "UGM"),
        bos=token("bos", bos),
        eos=token("eos", eos),
        n_tokens=n_tokens,
        n_merges=len(merges) if isinstance(merges, LazyArray) else 0,
        tokens=tokens,
    )
