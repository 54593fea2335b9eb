"""Reads the vocabulary of a model from its header, with llama.cpp's defaults (llama_vocab::impl::load)."""

from __future__ import annotations

import msgspec

from cpuchat.models.gguf.arrays import LazyArray
from cpuchat.models.gguf.header import GGUFHeader

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

    `model` is the header's tokenizer name, `kind` llama.cpp's: "BPE", "SPM", "WPM", "UGM", "RWKV", "PLaMo2", "none".
    """

    model: str
    add_bos: bool
    add_eos: bool
    bos: int
    eos: int
    n_tokens: int
    tokens: LazyArray | None

    @property
    def kind(self) -> str:
        return _KINDS.get(self.model, self.model)


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
    return Vocabulary(
        model=model,
        add_bos=kind != "none" and (flag("bos", begins) or always),
        add_eos=kind != "none" and flag("eos", kind == "UGM"),
        bos=token("bos", bos),
        eos=token("eos", eos),
        n_tokens=n_tokens,
        tokens=tokens,
    )
